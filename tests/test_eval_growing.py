"""The tasks of arXiv 2602.16490 and the nine of recurrent_gpt.md: readers, prompts, scores, chance, means of groups."""

import json
import os
from pathlib import Path
from random import Random

import datasets
import lm_eval
import pytest
import yaml
from lm_eval.api.group import Group
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from modeling_looped.eval import sets
from modeling_looped.eval.answers import exact_match, f1, numeric_match
from modeling_looped.eval.task import DATA_VARIABLE, LoopedTask


HERE = Path(__file__).parent
TASKS = HERE.parent / "eval" / "tasks"
FIXTURES = HERE / "fixtures" / "eval"
SHARED = HERE.parent.parent / "shared" / "data"
NINE = "hellaswag arc_easy arc_challenge piqa winogrande openbookqa boolq lambada_openai lambada_standard".split()
CATEGORIES = {
    "looped_closed_book_qa": "growing_triviaqa growing_webq growing_tydiqa_no_context growing_nq",
    "looped_open_book_qa": "growing_coqa growing_drop growing_quac growing_squadv2 growing_tydiqa_goldp",
    "looped_language": "growing_lambada growing_hellaswag",
    "looped_math_word_problems": "growing_asdiv growing_mawps_addsub growing_mawps_multiarith growing_mawps_singleop "
    "growing_mawps_singleeq growing_svamp",
    "looped_reasoning_primitives": "copy_random copy_real var_assign_basic_depth_0 var_assign_math_depth_0 "
    "var_assign_code_depth_0",
}


def members(category: str) -> list[str]:
    return [f"looped_{name}" for name in CATEGORIES[category].split()]


def manager(*folders: Path) -> TaskManager:
    metadata = {"data_dir": os.pathsep.join(map(str, folders))} if folders else None
    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)


@pytest.fixture(scope="module")
def loaded():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} has the sets that are no fixtures, and is not here")
    groups = ["looped_nine", "looped_growing", *(f"looped_reasoning_primitives_depth_{depth}" for depth in (1, 2))]
    return manager(SHARED / "eval", SHARED / "text", FIXTURES).load(groups)


class Chance(LM):
    """Likelihoods without a reason, and the same text for every prompt."""

    def __init__(self, text: str = ""):
        super().__init__()
        self.random, self.text = Random(0), text

    def loglikelihood(self, requests, **kwargs):
        return [(-self.random.random(), False) for _ in requests]

    def loglikelihood_rolling(self, requests, **kwargs):
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests, **kwargs):
        return [self.text for _ in requests]


# Scores of answers


@pytest.mark.parametrize(
    "prediction, answers, score",
    [
        ("Yahoo!", ["yahoo"], 1.0),
        ("The cat sat.", ["a  cat sat"], 1.0),  # articles, punctuation and white space are nothing
        ("red kite", ["a red kite on the beach"], 2 * 1.0 * 0.5 / 1.5),  # 2 of 2 words, 2 of "red kite on beach"
        ("in Port Veldra", ["Port Veldra", "Ostrel"], 2 * (2 / 3) / (2 / 3 + 1)),  # the best of the answers
        ("two two", ["two three"], 0.5),  # a word counts as often as both have it
        ("1874", ["1875"], 0.0),
        ("", ["1875"], 0.0),
        ("the", ["a"], 1.0),  # no words in either
        ("theory", ["ory"], 0.0),  # an article is a whole word
    ],
)
def test_f1_is_that_of_squad(prediction, answers, score):
    assert f1(prediction, answers) == pytest.approx(score)


def test_exact_match_compares_normalised_texts():
    assert exact_match("the Port-Veldra ", ["x", "portveldra"]) == 1.0
    assert exact_match("Port Veldra", ["Portveldra"]) == 0.0
    assert exact_match("", ["the"]) == 1.0


@pytest.mark.parametrize(
    "prediction, answer, score",
    [
        ("3 + 4 = 7 loaves.\n#### 7", "7", 1.0),
        ("That makes 42.", "42", 1.0),
        ("It costs $5", "5", 1.0),
        ("They earn $1,234.50 a year", "1234.5", 1.0),
        ("43,500", "43,500", 1.0),
        ("43500", "43,500", 1.0),
        ("7.0", "7", 1.0),
        ("9 and then 7", "9", 0.0),
        ("10-3", "3", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is -$3", "3", 0.0),
        ("1,2,3", "3", 1.0),
        ("none", "0", 0.0),
        ("", "0", 0.0),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(prediction, answer, score):
    assert numeric_match(prediction, [answer]) == score


# Readers: invented rows in both formats


def test_boolq_reads_both_formats_to_the_prompt_of_lm_eval():
    item = {"context": "Otters swim.\nQuestion: do otters swim?\nAnswer:", "choices": ["no", "yes"], "gold": 1}
    local = {"query": "Passage: Otters swim.\nQuestion: do otters swim?", "choices": ["no", "yes"], "gold": 1}
    hub = {"passage": "Otters swim.", "question": "do otters swim"}
    assert sets.boolq([local, hub | {"answer": True}, hub | {"label": 1}]) == [item] * 3
    assert sets.boolq([hub | {"answer": False}])[0]["gold"] == 0


def test_piqa_reads_both_formats_to_the_prompt_of_lm_eval():
    item = {"context": "Question: dry a kite\nAnswer:", "choices": ["hang it up", "eat it"], "gold": 0}
    local = {"query": "Question: dry a kite\n", "choices": ["hang it up", "eat it"], "gold": 0}
    hub = {"goal": "dry a kite", "sol1": "hang it up", "sol2": "eat it", "label": 0}
    assert sets.piqa([local, hub]) == [item, item]


def test_openbook_qa_reads_both_formats_to_the_prompt_of_lm_eval():
    item = {"context": "A kite needs", "choices": ["wind", "rain"], "gold": 1}
    choices = {"text": ["wind", "rain"], "label": ["A", "B"]}
    hub = {"id": "1", "question_stem": "A kite needs", "choices": choices, "answerKey": " B"}
    local = {"query": "A kite needs", "choices": ["wind", "rain"], "gold": 1}
    assert sets.openbook_qa([local, hub]) == [item, item]


def test_hellaswag_reads_both_formats_to_the_prompt_of_lm_eval():
    local = {"query": "Baking: then you", "choices": ["knead.", "sing."], "gold": 1}
    hub = {
        "activity_label": "Baking",
        "ctx_a": "Heat the oven [title] Mix flour [step] and water.",
        "ctx_b": "then you",
        "endings": ["[substeps] knead.", "sing."],
        "label": "1",
    }
    context = "Baking: Heat the oven. Mix flour and water. Then you"
    assert sets.hellaswag([local, hub]) == [
        {"context": "Baking: then you", "choices": ["knead.", "sing."], "gold": 1},
        {"context": context, "choices": [" knead.", "sing."], "gold": 1},  # lm-eval leaves that space, too
    ]


def test_winogrande_reads_both_formats_to_two_contexts_with_one_continuation():
    contexts = ["Pip thanked Nell as Pip", "Pip thanked Nell as Nell"]
    item = {"contexts": contexts, "continuation": "had helped.", "gold": 1}
    local = {"context_options": contexts, "continuation": "had helped.", "gold": 1}
    hub = {"sentence": "Pip thanked Nell as _ had helped.", "option1": "Pip", "option2": "Nell", "answer": "2"}
    assert sets.winogrande([local, hub]) == [item, item]


def test_quac_has_an_item_for_each_answered_turn_after_those_before_it():
    row = {
        "background": "Quill built lighthouses.",
        "context": "Quill grew up in Port Veldra. CANNOTANSWER",
        "questions": ["Where?", "Married?", "By whom?"],
        "orig_answers": {"texts": ["Port Veldra", "CANNOTANSWER", "Quill"]},
        "answers": {"texts": [["in Port Veldra", "Port Veldra"], ["CANNOTANSWER"], ["CANNOTANSWER", "Quill"]]},
    }
    passage = "Context: Quill built lighthouses.\nQuill grew up in Port Veldra.\n"
    assert sets.quac([row]) == [
        {
            "context": f"{passage}Question: Where?\nAnswer:",
            "continuation": "Port Veldra",
            "answers": ["Port Veldra", "in Port Veldra"],
        },
        {
            "context": f"{passage}Question: Where?\nAnswer: Port Veldra\nQuestion: By whom?\nAnswer:",
            "continuation": "Quill",
            "answers": ["Quill"],
        },
    ]


def test_gsm8k_reads_both_formats_with_the_worked_solution():
    worked = "He has <<3+4=7>>7.\n#### 7"
    item = {"context": "Question: How many?\nAnswer:", "continuation": worked, "answers": ["7"]}
    local = {"context": "How many?", "chain_of_thought": "He has <<3+4=7>>7.", "answer": "7"}
    assert sets.gsm8k([local, {"question": "How many?", "answer": worked}]) == [item, item]


def test_parts_of_mawps_are_read_in_both_formats():
    local = {"question": "number0 and number1 ?", "numbers": "3.0 1.5", "answer": "4.5"}
    item = {"context": "Question: 3 and 1.5 ?\nAnswer:", "continuation": "4.5", "answers": ["4.5"]}
    assert sets.mawps_subset([local, {"input": "3 and 1.5 ?", "output_answer": "4.5"}]) == [item, item]


@pytest.mark.parametrize(
    "read", ["boolq", "piqa", "openbook_qa", "hellaswag", "winogrande", "quac", "gsm8k", "mawps_subset", "held_out"]
)
def test_a_row_of_another_set_is_refused_with_the_keys_found_and_expected(read):
    with pytest.raises(ValueError, match="Row 1 has colour, shape; expected .*"):
        getattr(sets, read)([{"colour": 1, "shape": 2}])


@pytest.mark.parametrize(
    "read, row",
    [
        ("hellaswag", {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e"], "label": ""}),
        ("winogrande", {"sentence": "a _ b", "option1": "c", "option2": "d", "answer": ""}),
        ("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "label": -1}),
        ("openbook_qa", {"question_stem": "a", "choices": {"text": ["b"], "label": ["A"]}, "answerKey": "0"}),
        ("boolq", {"query": "Passage: a", "choices": ["no", "yes"], "gold": 2}),
    ],
)
def test_a_row_without_a_label_is_refused(read, row):
    with pytest.raises(ValueError, match="(its label|answerKey).* Use validation"):
        getattr(sets, read)([row])


# Tasks


def test_every_task_of_the_groups_loads(loaded):
    assert [task.task_name for task in loaded["groups"]["looped_nine"].get_all_tasks()] == [
        f"looped_nine_{name}" for name in NINE
    ]
    for category in CATEGORIES:
        assert [task.task_name for task in loaded["groups"][category].get_all_tasks()] == members(category)
    # 22 tasks in five categories, and held-out loss and GSM8K
    assert len(loaded["groups"]["looped_growing"].get_all_tasks()) == 22 + 2
    assert {task.config.metadata["version"] for task in loaded["tasks"].values()} == {1.0}


def test_shots_and_ways_of_scoring_are_those_of_section_5_1(loaded):
    for name, shots, output_type in (
        ("looped_closed_book_qa", 0, "generate_until"),
        ("looped_open_book_qa", 0, "generate_until"),
        ("looped_math_word_problems", 5, "loglikelihood"),
        ("looped_reasoning_primitives", 5, "multiple_choice"),
    ):
        for task in loaded["groups"][name].get_all_tasks():
            assert (task.config.num_fewshot, task.OUTPUT_TYPE) == (shots, output_type), task.task_name
    for name in ("looped_nine", "looped_language"):
        assert {task.config.num_fewshot for task in loaded["groups"][name].get_all_tasks()} == {0}
    assert loaded["tasks"]["looped_growing_gsm8k"].config.num_fewshot == 5


def requests(task: LoopedTask, index: int = 0) -> list:
    task.build_all_requests(limit=index + 1)
    return [instance.args for instance in task.instances if instance.doc["index"] == index]


PROMPTS = {
    "hellaswag/hellaswag.yaml": (
        sets.hellaswag,
        {
            "activity_label": "Baking",
            "ctx_a": "Heat the oven [title] Mix  flour.",
            "ctx_b": "then you",
            "endings": ["[step] knead.", "sing  [x] loud."],
            "label": "1",
        },
    ),
    "arc/arc_easy.yaml": (
        sets.arc,
        {"question": "What flies?", "choices": {"text": ["kites", "mills"], "label": ["1", "2"]}, "answerKey": "1"},
    ),
    "piqa/piqa.yaml": (sets.piqa, {"goal": "dry a kite", "sol1": "hang it up", "sol2": "eat it", "label": 0}),
    "winogrande/default.yaml": (
        sets.winogrande,
        {"sentence": "Pip thanked Nell as _ had helped.", "option1": "Pip", "option2": "Nell", "answer": "2"},
    ),
    "openbookqa/openbookqa.yaml": (
        sets.openbook_qa,
        {"question_stem": "A kite needs", "choices": {"text": ["wind", "rain"], "label": ["A", "B"]}, "answerKey": "A"},
    ),
    "super_glue/boolq/default.yaml": (
        sets.boolq,
        {"passage": "Otter -- Otters swim.", "question": "do otters swim", "label": 1},
    ),
    "lambada/lambada_openai.yaml": (sets.lambada, {"text": "They waited for the wind"}),
    "lambada/lambada_standard.yaml": (sets.lambada, {"text": "they waited for the wind"}),
}


@pytest.mark.parametrize("path", PROMPTS)
def test_prompts_of_the_nine_are_those_of_lm_evals_own_tasks(path):
    read, row = PROMPTS[path]

    class Theirs(ConfigurableTask):
        def download(self, *args, **kwargs):
            self.dataset = {name: datasets.Dataset.from_list([row]) for name in ("train", "validation", "test")}

    task = Theirs(config=load_yaml(Path(lm_eval.__file__).parent / "tasks" / path))
    task.build_all_requests()
    [item] = read([row])
    if "contexts" in item:
        pairs = [(context, item["continuation"]) for context in item["contexts"]]
    else:
        pairs = [(item["context"], answer) for answer in item.get("choices") or [item["continuation"]]]
    assert [request.args for request in task.instances] == [(context, f" {answer}") for context, answer in pairs]


def test_winogrande_scores_one_continuation_after_each_context(loaded):
    row = json.loads((SHARED / "eval" / "winogrande.jsonl").read_text().splitlines()[0])
    assert requests(loaded["tasks"]["looped_nine_winogrande"]) == [
        (context, f" {row['continuation']}") for context in row["context_options"]
    ]


def test_gsm8k_shows_worked_solutions_and_stops_at_the_next_question(loaded):
    [(prompt, options)] = requests(loaded["tasks"]["looped_growing_gsm8k"])
    assert prompt.count("Question: ") == 6 and prompt.count("\n#### ") == 5 and prompt.endswith("\nAnswer:")
    assert "Question:" in options["until"] and options["do_sample"] is False


def test_question_answering_stops_at_the_line_end(loaded):
    for category in ("looped_closed_book_qa", "looped_open_book_qa"):
        for task in loaded["groups"][category].get_all_tasks():
            [(prompt, options)] = requests(task)
            assert prompt.endswith("\nAnswer:") and options["until"] == ["\n"], task.task_name


def test_a_right_answer_gets_full_marks(loaded):
    for name, written in (("looped_growing_webq", "{}."), ("looped_growing_gsm8k", "It is 1,000, or rather {}.")):
        task = loaded["tasks"][name]
        doc = task.test_docs()[0]
        scores = task.process_results(doc, [written.format(doc["answers"][0])])
        assert {score for metric, score in scores.items() if not metric.endswith("_stderr")} == {1.0}


def test_each_category_gets_its_own_metric():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} has the sets that are no fixtures, and is not here")
    scores = simple_evaluate(
        Chance("7"),
        tasks=["looped_growing", "looped_nine"],
        task_manager=manager(SHARED / "eval", SHARED / "text", FIXTURES),
        limit=2,
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    for group, metrics in (
        ("looped_closed_book_qa", {"f1"}),
        ("looped_open_book_qa", {"f1"}),
        ("looped_language", {"acc"}),
        ("looped_math_word_problems", {"acc"}),
        ("looped_reasoning_primitives", {"acc"}),
        ("looped_nine", {"acc", "nats_per_byte"}),
        ("looped_growing_gsm8k", {"acc"}),
        ("looped_growing_nll", {"nats_per_byte"}),
    ):
        found = {key.partition(",")[0] for key in scores[group] if key.endswith(",none")}
        assert {metric for metric in found if not metric.endswith("_stderr")} == metrics, group  # without a tokenizer
    assert scores["looped_growing_nll"]["nats_per_byte,none"] == pytest.approx(1.0, abs=0.05)  # a nat a character


def test_the_first_thousand_texts_of_the_hub_are_streamed(monkeypatch):
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    asked = {}

    def load_dataset(path, name=None, **options):
        asked.update(options, path=path, name=name)
        return datasets.IterableDataset.from_generator(lambda: ({"text": f"text {i}"} for i in range(10**9)))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = manager().load(["looped_growing_nll"])["tasks"]["looped_growing_nll"]
    assert asked == {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "split": "train", "streaming": True}
    assert len(task.test_docs()) == 1000 and task.test_docs()[999]["text"] == "text 999"


# Chance


@pytest.fixture(scope="module")
def primitives():
    depths = [f"looped_reasoning_primitives{depth}" for depth in ("", "_depth_1", "_depth_2")]
    return manager().load(depths)["tasks"]


def test_primitives_have_a_thousand_items_with_the_answer_once_among_as_many_choices_as_chance_says(primitives):
    assert len(primitives) == 2 + 3 * 3
    for name, task in primitives.items():
        docs = task.test_docs()
        assert len(docs) == 1000
        count = 10 if "copy" in name else 5
        assert task.config.metadata["chance"] == 1 / count
        for doc in docs:
            assert len(set(doc["choices"])) == len(doc["choices"]) == count and 0 <= doc["gold"] < count


def test_shots_of_primitives_are_never_test_items(primitives):
    for task in primitives.values():
        tested = set(task.test_docs()["context"])
        shots = task.fewshot_docs()["context"]
        assert len(shots) == 100 and not tested & set(shots)
        prompt = requests(task)[0][0]
        assert sum(prompt.count(shot) > 0 for shot in shots) == 5
        assert prompt.endswith(task.test_docs()[0]["context"])


def test_random_choices_get_the_chance_level():
    names = ["looped_copy_random", "looped_var_assign_code_depth_2"]
    options = {"bootstrap_iters": 0, "log_samples": False}
    scores = simple_evaluate(Chance(), tasks=names, task_manager=manager(), **options)["results"]
    for name, chance in zip(names, (0.1, 0.2)):
        assert abs(scores[name]["acc,none"] - chance) < 4 * (chance * (1 - chance) / 1000) ** 0.5


# Group means


def mean(group: str, metric: str, values: dict[str, float]) -> float:
    """lm-eval's own aggregation of the group in the YAML file, with tasks of very different sizes."""
    [path] = [path for path in TASKS.rglob(f"{group}.yaml")]
    built = Group.from_config(load_yaml(path))
    for name in yaml.safe_load(path.read_text())["task"]:
        task = object.__new__(LoopedTask)
        task._config = TaskConfig(task=name, output_type="multiple_choice")
        built.add(task)
    names = [task.task_name for task in built.get_all_tasks()]
    measured = {
        name: ({f"{metric},none": values[name]} if name in values else {}) | {"sample_len": 10**number}
        for number, name in enumerate(names)
    }
    assert values.keys() <= measured.keys()
    return built.aggregate(measured)[f"{metric},none"]


# By task, tables 3 to 6 of arXiv 2512.08819, and the means of its table 1. Those of question answering are known as in
# section 7.1 of the specification, which differs by at most 0.07.
EXACT, NEAR = 0.005, 0.075


@pytest.mark.parametrize(
    "group, row, stated, tolerance",
    [
        ("looped_open_book_qa", "46.08 12.48 14.27 24.35 17.25", 22.89, EXACT),
        ("looped_open_book_qa", "50.00 12.75 14.10 24.96 21.06", 24.57, EXACT),
        ("looped_open_book_qa", "51.50 15.25 15.79 28.11 22.50", 26.63, EXACT),
        ("looped_open_book_qa", "58.36 16.52 15.91 33.88 23.17", 29.57, EXACT),
        ("looped_open_book_qa", "59.35 16.88 17.30 36.06 14.39", 28.80, EXACT),
        ("looped_open_book_qa", "63.41 17.66 17.91 36.56 13.65", 29.84, EXACT),
        ("looped_closed_book_qa", "19.23 16.78 12.98 9.01", 14.50, NEAR),
        ("looped_closed_book_qa", "18.90 14.58 12.64 8.89", 13.75, NEAR),
        ("looped_closed_book_qa", "20.80 15.61 12.14 9.73", 14.57, NEAR),
        ("looped_closed_book_qa", "27.72 19.20 15.34 12.18", 18.60, NEAR),
        ("looped_closed_book_qa", "27.98 17.96 16.16 11.91", 18.43, NEAR),
        ("looped_closed_book_qa", "26.85 20.24 16.34 12.90", 19.07, NEAR),
        ("looped_math_word_problems", "3.34 3.67 1.72 5.66 2.75 5.02", 3.69, EXACT),
        ("looped_math_word_problems", "3.77 3.67 1.15 6.29 6.42 5.02", 4.39, EXACT),
        ("looped_math_word_problems", "4.64 1.83 1.72 7.55 6.42 4.01", 4.36, EXACT),
        ("looped_math_word_problems", "11.15 14.68 1.15 25.16 22.02 8.36", 13.75, EXACT),
        ("looped_math_word_problems", "12.93 18.35 2.30 33.96 20.18 8.70", 16.07, EXACT),
        ("looped_math_word_problems", "14.88 25.69 2.87 38.36 18.35 11.37", 18.59, EXACT),
        ("looped_reasoning_primitives", "15.5 13.3 20.5 42.7 58.3", 30.06, EXACT),
        ("looped_reasoning_primitives", "13.8 14.1 20.0 40.1 52.9", 28.18, EXACT),
        ("looped_reasoning_primitives", "14.2 19.7 24.3 46.0 51.8", 31.20, EXACT),
        ("looped_reasoning_primitives", "17.9 16.4 22.7 50.8 49.1", 31.38, EXACT),
        ("looped_reasoning_primitives", "16.8 23.6 20.8 48.8 64.2", 34.84, EXACT),
        ("looped_reasoning_primitives", "19.3 24.6 37.0 62.0 61.5", 40.88, EXACT),
        ("looped_reasoning_primitives", "28.4 31.0 36.7 68.8 71.8", 47.34, EXACT),
        ("looped_reasoning_primitives", "24.4 26.6 23.8 71.9 75.2", 44.38, EXACT),
    ],
)
def test_category_means_are_those_of_the_paper(group, row, stated, tolerance):
    values = dict(zip(members(group), map(float, row.split()), strict=True))
    metric = "f1" if group.endswith("_book_qa") else "acc"
    assert mean(group, metric, values) == pytest.approx(stated, abs=tolerance)


def test_the_mean_of_the_nine_is_unweighted():
    values = {f"looped_nine_{name}": float(number) for number, name in enumerate(NINE)}
    assert mean("looped_nine", "acc", values) == 4.0  # of 0 to 8
