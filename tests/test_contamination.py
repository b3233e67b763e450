"""Shared n-grams: against a search without any index, and where text was planted."""

import json
import math
import string
from dataclasses import FrozenInstanceError
from pathlib import Path
from random import Random

import pytest

from modeling_looped.eval import contamination
from modeling_looped.eval.contamination import Overlap, contamination_table, overlap, task_texts, words
from modeling_looped.recipes.corpus import read_texts


def naive(texts, items, n):
    """Each n-gram of each item held against each place of each text."""

    def plain(text):
        return "".join(c for c in text.lower() if c.isalnum() or c.isspace()).split()

    read, unjudged, touched, shares = [plain(text) for text in texts], 0, [], []
    for number, item in enumerate(items):
        row = plain(item)
        if len(row) < n and len(row) < 5:
            unjudged += 1
            continue
        size = min(n, len(row))
        grams = []
        for start in range(len(row) - size + 1):
            if (gram := row[start : start + size]) not in grams:
                grams.append(gram)
        there = [any(gram == text[i : i + size] for text in read for i in range(len(text))) for gram in grams]
        shares.append(sum(there) / len(there))
        if any(there):
            touched.append(number)
    return Overlap(len(items), unjudged, tuple(touched), sum(shares) / len(shares) if shares else math.nan, n)


def random_text(random, vocabulary, fewest, most):
    chosen = random.choices(vocabulary, k=random.randint(fewest, most))
    written = (random.choice((word, word.upper(), word.title())) for word in chosen)
    return " ".join(word + random.choice(("", "", ",", ".", " -", "!\n")) for word in written)


@pytest.mark.parametrize("n", (1, 2, 3, 5, 8, 13))
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_a_search_without_an_index(n, seed):
    random = Random(seed)
    vocabulary = ["ab", "c", "dé", "7"][: 2 + seed % 3]  # few words, so that long n-grams meet
    texts = [random_text(random, vocabulary, 0, 120) for _ in range(12)]
    items = [random_text(random, vocabulary, 0, 30) for _ in range(60)]
    found, expected = overlap(iter(texts), items, n), naive(texts, items, n)
    assert (found.items, found.unjudged, found.touched, found.n) == (60, expected.unjudged, expected.touched, n)
    assert found.mean_share == pytest.approx(expected.mean_share)
    if n > 1:
        assert found.unjudged > 0
    if n == 13:
        assert 0 < found.num_touched < 60 and 0 < found.mean_share < 1


def different_words(random, count):
    return ["".join(random.choices(string.ascii_lowercase, k=8)) for _ in range(count)]


def test_planted_text_is_found_and_nothing_else():
    random = Random(0)
    items = [different_words(random, 30) for _ in range(20)]
    noise = [different_words(random, 50) for _ in range(10)]
    noise[3][20:20] = items[4]  # all of it
    noise[5][10:10] = items[7][5:20]  # 15 words: 3 of its 18 n-grams
    noise[6][0:0] = items[9][:12]  # one too few
    noise[7] += items[11][-13:]  # the last n-gram, where the text ends
    found = overlap(map(" ".join, noise), list(map(" ".join, items)))
    assert found.touched == (4, 7, 11) and found.num_touched == 3 and found.unjudged == 0
    assert found.share == pytest.approx(3 / 20)
    assert found.mean_share == pytest.approx((1 + 3 / 18 + 1 / 18) / 20)


def test_an_n_gram_does_not_reach_from_one_text_into_the_next():
    item = "one two three four five six"
    assert overlap(["one two three", "four five six"], [item], n=6).touched == ()
    assert overlap(["one two three\nfour five six"], [item], n=6).touched == (0,)


def test_case_punctuation_and_white_space_do_not_hide_a_text():
    assert words("“Don't” — he\tSAID_it:\n\nÉté, 3.5%!") == ["dont", "he", "saidit", "été", "35"]
    item = "What's the capital of France? It is Paris, of course."
    assert overlap(["so: WHATS THE  capital\nof (France) -- it is Paris of course..."], [item], n=8).mean_share == 1


def test_short_items_are_one_n_gram_and_shorter_ones_are_not_judged():
    texts = ["the cat sat on the mat and slept"]
    items = ["The cat sat on the mat!", "the cat sat on a mat", "the cat sat on", "", "sat on the mat and"]
    found = overlap(texts, items)
    assert found == Overlap(items=5, unjudged=2, touched=(0, 4), mean_share=2 / 3)
    assert (found.judged, found.share) == (3, 2 / 3)
    # Four words are judged where n-grams are no longer than that.
    assert overlap(texts, ["the cat sat on", "on it"], n=4) == Overlap(2, 1, (0,), 1.0, 4)


def test_where_no_item_can_be_judged_shares_are_not_numbers():
    found = overlap(["some text"], ["some text", "text"])
    assert found.unjudged == 2 and math.isnan(found.share) and math.isnan(found.mean_share)
    assert "| – | – |" in contamination_table([("short", found)])


def test_texts_are_read_once_and_may_be_none():
    assert overlap((text for text in ("a b c d e",)), ["a b c d e"]).share == 1
    assert overlap([], ["a b c d e"]).share == 0


def test_the_result_is_frozen():
    with pytest.raises(FrozenInstanceError):
        overlap([], ["a b c d e"]).items = 2


@pytest.mark.parametrize(
    "arguments, told",
    (
        ((["text"], ["item"], 0), "n=0 must be at least 1"),
        ((["text"], []), "items is empty"),
        (("text", ["item"]), "texts is one string"),
        ((["text"], "item"), "items is one string"),
    ),
)
def test_what_cannot_be_looked_for_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        overlap(*arguments)


def test_the_table_has_a_row_for_each_task():
    rows = [("arc", Overlap(200, 50, (3, 5, 8), 0.0125)), ("lambada", Overlap(7, 0, (), 0.0, 8))]
    assert contamination_table(iter(rows)) == (
        "| task | items | too short | n | items touched | share of items | mean share of n-grams |\n"
        "|---|--:|--:|--:|--:|--:|--:|\n"
        "| arc | 200 | 50 | 13 | 3 | 2.0% | 1.2% |\n"
        "| lambada | 7 | 0 | 8 | 0 | 0.0% | 0.0% |"
    )


# Tasks


@pytest.fixture(scope="module")
def tasks():
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    root = Path(contamination.__file__).parent / "tasks"
    manager = TaskManager(include_path=str(root), include_defaults=False)
    return manager.load(["looped_p_hop_16", "looped_addition_32"])["tasks"]


def test_a_tasks_text_is_context_and_right_answer_without_shots(tasks):
    for text in task_texts(tasks["looped_addition_32"]):
        numbers, answer = text.split(" = ")
        assert sum(map(int, numbers.split(" + "))) == int(answer)
    for text, doc in zip(task_texts(tasks["looped_p_hop_16"]), tasks["looped_p_hop_16"].test_docs()):
        assert text == f"{doc['context']} {doc['choices'][doc['gold']]}"


def test_a_task_is_wholly_in_its_own_texts_and_not_in_others(tasks, tmp_path):
    for name, task in tasks.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in task_texts(task)))
    read = {name: [text for _, text in read_texts(str(tmp_path / f"{name}.jsonl"))] for name in tasks}
    for name, other in (tuple(tasks), tuple(reversed(tuple(tasks)))):
        own = overlap(read[name], task_texts(tasks[name]))
        assert (own.share, own.mean_share, own.num_touched) == (1, 1, 1000)
        assert overlap(read[other], task_texts(tasks[name])).share == 0
        assert contamination_table([(name, own)]).endswith(f"| {name} | 1000 | 0 | 13 | 1000 | 100.0% | 100.0% |")


@pytest.mark.parametrize(
    "kind, item, text",
    (
        ("loglikelihood", {"context": "One and one is", "continuation": "two"}, "One and one is two"),
        ("multiple_choice", {"context": "Sky?", "choices": ["red", "blue"], "gold": 1}, "Sky? blue"),
        ("multiple_choice", {"contexts": ["He is", "She is"], "continuation": "in.", "gold": 1}, "She is in."),
        ("generate_until", {"context": "Who?", "answers": ["Ann", "Anna"]}, "Who? Ann"),
        ("loglikelihood_rolling", {"text": "Once upon a time."}, "Once upon a time."),
    ),
)
def test_each_form_of_item_has_a_text(kind, item, text):
    task = pytest.importorskip("modeling_looped.eval.task")
    to_text = {"contexts": "", "text": "", "context": "context"}[next(iter(item))]
    config = {
        "task": "planted",
        "output_type": kind,
        "custom_dataset": lambda: {"test": [item]},
        "doc_to_text": to_text,
        "doc_to_target": "gold" if "gold" in item else next(reversed(item)),
        "target_delimiter": " ",
        "metadata": {"version": 1.0},
    }
    if "choices" in item:
        config["doc_to_choice"] = "choices"
    if "contexts" in item:
        config |= {"doc_to_text": lambda doc: doc["gold"], "doc_to_choice": "contexts", "doc_to_target": "continuation"}
    assert task_texts(task.LoopedTask(config)) == [text]
