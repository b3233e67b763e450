"""The items that eval/generators.py makes and the tasks over them: the paper's files, or what their definition says."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from modeling_looped.eval import generators


TASKS = Path(generators.__file__).parent / "tasks"
P_HOPS, OPERANDS = (16, 32), (2, 4, 8, 16, 32)

# arXiv 2604.21106: of the JSONL files that its scripts write (specification, section 6.4).
PAPER = {
    ("induction_head",): "f8a18e6989eda65f",
    ("var_assign", "math", 0): "45e165026d251c1c",
    ("var_assign", "code", 0): "0fdff618e1bfd230",
    ("var_assign", "math", 1): "8214a887b2dca3e1",
    ("var_assign", "code", 1): "518f951c5d2655d0",
}
# Ours, at version 1.0 of the tasks: other items need another version.
OURS = {
    ("p_hop", 16, 1000): "e35425da4629d5bd",
    ("p_hop", 32, 1000): "170bad719cd3ebba",
    ("addition", 2, 1000): "dfe0f09857fc7cfe",
    ("addition", 32, 1000): "8833492e7137e01d",
}


def made(name: str, *arguments) -> dict:
    return getattr(generators, name)(*arguments)


def digest(items: list[dict]) -> str:
    lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@pytest.mark.parametrize("call", PAPER)
def test_the_papers_files_are_made_byte_for_byte(call):
    splits = made(*call)
    assert list(splits) == ["test"] and len(splits["test"]) == 1000
    assert digest(splits["test"]) == PAPER[call]


@pytest.mark.parametrize("call", OURS)
def test_our_items_are_those_of_version_1(call):
    assert digest(list(itertools.chain(*made(*call).values()))) == OURS[call]


@pytest.mark.parametrize("hash_seed", ("0", "1"))
def test_items_do_not_depend_on_the_process(hash_seed):
    calls = [*PAPER, *OURS]
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_generators import *; "
        f"print(*(digest(list(itertools.chain(*made(*call).values()))) for call in {calls!r}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert run.stdout.split() == [*PAPER.values(), *OURS.values()], run.stderr


def test_the_first_items_of_the_papers_files_read_as_stated():
    item = generators.induction_head()["test"][0]
    assert item["context"].endswith("\nkbsj ->") and item["continuation"] == "qfh" == item["choices"][item["gold"]]
    item = generators.var_assign("math", 0)["test"][0]
    assert "\n\nu=8\nd=8\na=5\nx=24\ni=4\nWhat" in item["context"] and item["continuation"] == "4"


def resolved(name: str, equations: dict[str, str]) -> str:
    value = equations[name]
    return value if value.isdigit() else resolved(value, equations)


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("form", ("math", "code"))
def test_an_assignment_is_answered_by_its_own_lines(form, depth):
    for item in generators.var_assign(form, depth)["test"]:
        lines = [line.replace(" ", "") for line in item["context"].split("\n")]
        equations = dict(line.split("=") for line in lines if line[1:2] == "=")
        asked = item["context"].rsplit("\nAnswer:", 1)[0][-2]
        assert len(equations) == 5 * (depth + 1)
        assert (equations[asked].isdigit()) == (depth == 0)
        assert item["continuation"] == resolved(asked, equations)


def places_of(sequence: list[str], hops: int) -> list[int] | None:
    """The definition word for word, with places from 1: where the path goes, None where a hop does not exist."""
    v, places = [None, *sequence], [len(sequence)]
    for _ in range(hops):
        i = places[-1]
        found = {j for j in range(2, i + 1) if v[j - 1] == v[i]}
        if not found:
            return None
        places.append(max(found))
    return places


@pytest.mark.parametrize(
    "size", ((16, 200), (32, 200), (1, 300, 3, 2), (1, 300, 5, 26), (30, 100, 32, 2), (14, 100, 16, 3)), ids=str
)
def test_p_hop_is_answered_by_its_definition(size):
    hops, count, length, alphabet = (*size, *(256, 4)[len(size) - 2 :])
    items = generators.p_hop(*size)["test"]
    assert len(items) == count
    for item in items:
        sequence = item["context"].split(" ")
        places = places_of(sequence, hops)
        assert len(sequence) == length and set(sequence) <= set(item["choices"]) and len(item["choices"]) == alphabet
        assert all(left < right for right, left in itertools.pairwise(places))
        assert item["choices"][item["gold"]] == sequence[places[-1] - 1]


def test_p_hop_makes_every_sequence_that_there_is():
    def fits(sequence):
        places = places_of(list(sequence), 2)
        return places is not None and len(set(places)) == 3

    expected = {" ".join(sequence) for sequence in itertools.product("abc", repeat=5) if fits(sequence)}
    assert {item["context"] for item in generators.p_hop(2, 3000, 5, 3)["test"]} == expected


def test_p_hop_cannot_be_guessed_from_how_often_or_where_letters_are():
    items = generators.p_hop(16, 4000)["test"]
    answers = [item["choices"][item["gold"]] for item in items]
    sequences = [item["context"].split(" ") for item in items]
    counts = [Counter(sequence).most_common() for sequence in sequences]
    guesses = {
        "always the same": ["a"] * len(items),
        "the last": [sequence[-1] for sequence in sequences],
        "the last but one": [sequence[-2] for sequence in sequences],
        "after the last occurrence": [sequence[places_of(sequence, 1)[1] - 1] for sequence in sequences],
        "the most frequent": [count[0][0] for count in counts],
        "the rarest": [count[-1][0] for count in counts],
        "the first": [sequence[0] for sequence in sequences],
    }
    for name, guess in guesses.items():
        right = sum(map(str.__eq__, guess, answers)) / len(items)
        # Four standard deviations. Any letter of a sequence is its most frequent one more often than that: 28 % here.
        assert abs(right - 0.25) < (0.05 if "most" in name or "rarest" in name else 0.0275), (name, right)


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("digits", (1, 3))
def test_addition_is_right_and_its_shots_are_no_test_items(operands, digits):
    count = 50 if operands * digits == 2 else 1000
    splits = generators.addition(operands, count, digits)
    for split, items in splits.items():
        for item in items:
            numbers = [int(number) for number in item["context"].removesuffix(" =").split(" + ")]
            assert len(numbers) == operands and 0 <= min(numbers) and max(numbers) < 10**digits
            total = 0
            for number in numbers:
                total += number
            assert item == {"context": " + ".join(map(str, numbers)) + " =", "continuation": str(total)}
    contexts = [{item["context"] for item in splits[split]} for split in ("test", "shots")]
    assert len(splits["test"]) == count and len(splits["shots"]) >= 20 and not set.intersection(*contexts)


@pytest.mark.parametrize("call", (("p_hop", 16), ("addition", 4)))
def test_the_first_items_of_many_are_those_of_few(call):
    assert made(*call, 100)["test"][:7] == made(*call, 7)["test"]
    assert made(*call, 7, *((256, 4) if call[0] == "p_hop" else (3,)), 1)["test"] != made(*call, 7)["test"]


@pytest.mark.parametrize(
    "call, told",
    (
        (("var_assign", "basic", 0), "form='basic' at depth=0"),
        (("var_assign", "math", 2), "'code' at 1"),
        (("p_hop", 0, 10), "hops=0 must be an integer from 1 to 254"),
        (("p_hop", 255, 10), "hops=255"),
        (("p_hop", "16", 10), "hops='16'"),
        (("p_hop", 1, 0), "count=0"),
        (("p_hop", 1, 1, 2), "length=2 must be an integer of at least 3"),
        (("p_hop", 1, 1, 9, 27), "alphabet=27 must be an integer from 2 to 26"),
        (("addition", 1, 10), "operands=1"),
        (("addition", 2, 10, 0), "digits=0"),
        (("addition", 2, 0), "count=0"),
        (("addition", 2, 5000, 1), "count=5000 test items leave no sum of 2 numbers for shots"),
    ),
)
def test_sizes_that_no_item_has_are_refused(call, told):
    with pytest.raises(ValueError, match=told):
        made(*call)


# The tasks


@pytest.fixture(scope="module")
def manager():
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS), include_defaults=False)


def solve(prompt: str) -> str:
    question = prompt.split("\n\n")[-1]
    if question.endswith(" ="):
        return str(sum(map(int, question[:-2].split(" + "))))
    sequence = question.split(" ")
    return sequence[places_of(sequence, solve.hops)[-1] - 1]


def evaluated(manager, task: str, likelihood, limit: int | None = None) -> tuple[dict, list]:
    import lm_eval
    from lm_eval.api.model import LM

    asked = []

    class Model(LM):
        def loglikelihood(self, requests):
            asked.extend(request.args for request in requests)
            return [likelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        generate_until = loglikelihood_rolling

    found = lm_eval.simple_evaluate(
        Model(), tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return found, asked


def oracle(context: str, continuation: str) -> tuple[float, bool]:
    right = continuation == f" {solve(context)}"
    return (0.0 if right else -1.0), right


@pytest.mark.parametrize("task", [f"looped_p_hop_{hops}" for hops in P_HOPS])
def test_p_hop_tasks_ask_for_one_letter_after_the_sequence(manager, task):
    solve.hops = int(task.rsplit("_", 1)[1])
    found, asked = evaluated(manager, task, oracle, limit=40)
    assert found["results"][task]["acc,none"] == 1
    assert len(asked) == 160 and {choice for _, choice in asked} == {" a", " b", " c", " d"}
    assert all(len(context) == 511 and "\n" not in context for context, _ in asked)
    wrong, _ = evaluated(manager, task, lambda *pair: (-1 - oracle(*pair)[0], False), limit=40)
    assert wrong["results"][task]["acc,none"] == 0


@pytest.mark.parametrize("task", [f"looped_addition_{operands}" for operands in OPERANDS])
def test_addition_tasks_show_five_right_sums_before_the_question(manager, task):
    found, asked = evaluated(manager, task, oracle, limit=40)
    assert found["results"][task]["acc,none"] == 1 and len(asked) == 40
    for context, _ in asked:
        *shots, question = context.split("\n\n")
        assert len(shots) == 5 and question not in {shot.rsplit(" ", 1)[0] for shot in shots}
        assert all(shot == f"{shot.rsplit(' ', 1)[0]} {solve(shot.rsplit(' ', 1)[0])}" for shot in shots)


def test_the_group_takes_the_unweighted_mean_of_all_tasks(manager):
    # Knows the sums of fewer than 16 numbers, and always the same letter.
    def knows_little(context, continuation):
        if "=" not in context:
            return (0.0 if continuation == " a" else -1.0), False
        return oracle(context, continuation) if context.split("\n\n")[-1].count("+") < 15 else (-1.0, False)

    found, _ = evaluated(manager, "looped_synthetic", knows_little, limit=20)
    results = found["results"]
    tasks = [f"looped_p_hop_{hops}" for hops in P_HOPS] + [f"looped_addition_{operands}" for operands in OPERANDS]
    scores = [results[task]["acc,none"] for task in tasks]
    assert scores[2:] == [1, 1, 1, 0, 0] and all(0 < score < 0.6 for score in scores[:2])
    assert set(results) == {"looped_synthetic", *tasks}
    assert results["looped_synthetic"]["acc,none"] == pytest.approx(sum(scores) / 7)


def test_metadata_state_version_and_chance(manager):
    for task in manager.load(["looped_synthetic"])["tasks"].values():
        metadata = task.config.metadata
        assert metadata["version"] == 1.0
        assert metadata["chance"] == (0.25 if "p_hop" in task.config.task else 0.0)
        assert len(task.test_docs()) == 1000
