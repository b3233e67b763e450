"""The texts that measurements run on: where answers begin, which boundaries are drawn, which groups there are."""

import json
import random

import pytest
from conftest import tiny_grown_llama

from modeling_looped.diagnostics.skipping import depth_score
from modeling_looped.diagnostics.texts import (
    encode,
    gsm8k_prompts,
    math_problems,
    multi_hop_questions,
    plain_texts,
    random_rows,
)
from modeling_looped.recipes.tokens import train_tokenizer


WORDS = "Problem Question Answer river tower lake mayor stamp price seven nine plus minus equals twice half".split()
PROBLEMS = [
    {
        "problem": f"What is {i} plus {i % 7}?",
        "level": f"Level {i % 6}" if i % 6 else "Level ?",
        "type": "Intermediate Algebra",
        "solution": f"We add them one by one and find {' '.join(WORDS[: i % 9])} $\\boxed{{{i + i % 7}}}$.",
    }
    for i in range(120)
]
QUESTIONS = [
    {
        "case_id": i,
        "questions": [f"Who is the mayor of the town of river {i}?", "another wording", "a third"],
        "answer": f"Ada Holm {i}",
        "answer_alias": [],
        "new_answer": "nobody",
        "single_hops": [{"question": "q", "cloze": "c", "answer": "a", "answer_alias": []}] * (2 + i % 4),
        "new_single_hops": [],
    }
    for i in range(60)
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([row["problem"] + row["solution"] for row in PROBLEMS] + WORDS, 300)


def test_gsm8k_prompts_have_the_question_and_end_with_solution_and_answer(shared):
    path = shared / "data" / "eval" / "gsm8k.jsonl"
    texts = gsm8k_prompts(path)
    rows = [json.loads(line) for line in path.open()][:20]
    assert len(texts) == 20 and gsm8k_prompts(rows) == texts and gsm8k_prompts(path, 3) == texts[:3]
    for text, row in zip(texts, rows):
        assert row["context"].strip() in text
        assert text.endswith(f"{row['chain_of_thought'].strip()}\nFinal answer: {row['answer']}\n")


def test_gsm8k_of_the_hub_gives_the_same_prompt():
    ours = {"context": "How many?", "chain_of_thought": "3 + 4 = 7\nSo 7.", "answer": "7"}
    theirs = {"question": "How many?", "answer": "3 + 4 = 7\nSo 7.\n#### 7"}
    assert gsm8k_prompts([ours]) == gsm8k_prompts([theirs])


def test_math_problems_have_twenty_of_each_level_and_boundaries_at_every_fourth_token_of_the_answer(tokenizer):
    found = math_problems(PROBLEMS, tokenizer, per_level=15)
    assert found.groups == [f"level {level}" for level in range(1, 6) for _ in range(15)]
    assert len(found) == len(found.rows) == len(found.boundaries) == 75
    for row, places in zip(found.rows, found.boundaries):
        context, answer = tokenizer.decode(row).split("\nAnswer:")
        begin = len(tokenizer.encode(f"{context}\nAnswer:"))
        assert context.startswith("Problem: What is") and answer.startswith(" We add them")
        assert len(set(places)) == 4 and all((t - begin) % 4 == 0 and begin <= t < len(row) for t in places)
    by_text = {f"Problem: {row['problem']}\nAnswer: {row['solution']}": row["level"].lower() for row in PROBLEMS}
    assert all(by_text[tokenizer.decode(row)] == group for row, group in zip(found.rows, found.groups))


def test_one_seed_gives_one_choice_and_leaves_the_items_and_the_global_generator_alone(tokenizer):
    items, before = list(PROBLEMS), random.getstate()
    assert math_problems(items, tokenizer, 5) == math_problems(items, tokenizer, 5)
    assert math_problems(items, tokenizer, 5).rows != math_problems(items, tokenizer, 5, seed=1).rows
    assert items == PROBLEMS and random.getstate() == before


def test_short_answers_have_as_many_boundaries_as_they_have_room_for(tokenizer):
    rows = [{"problem": "One?", "level": f"Level {level}", "solution": "a"} for level in range(1, 6)]
    assert [len(places) for places in math_problems(rows, tokenizer).boundaries] == [1] * 5


def test_longer_items_than_max_tokens_are_passed_over(tokenizer):
    lengths = [len(row) for row in math_problems(PROBLEMS, tokenizer, 100).rows]
    limit = sorted(lengths)[len(lengths) // 2]
    kept = math_problems(PROBLEMS, tokenizer, 100, max_tokens=limit)
    assert len(kept) == sum(length <= limit for length in lengths)


def test_multi_hop_questions_are_grouped_by_hops_with_one_boundary_at_the_true_answer(tokenizer):
    found = multi_hop_questions(QUESTIONS, tokenizer, per_group=10)
    assert found.groups == [f"{hops} hops" for hops in (2, 3, 4) for _ in range(10)]  # those of five are left out
    hops = {row["answer"]: f"{len(row['single_hops'])} hops" for row in QUESTIONS}
    for row, (begin,), group in zip(found.rows, found.boundaries, found.groups, strict=True):
        question, answer = tokenizer.decode(row[:begin]), tokenizer.decode(row[begin:])
        assert question.startswith("Question: Who is the mayor of the town of river") and question.endswith(
            "?\nAnswer:"
        )
        assert hops[answer.strip()] == group


def test_items_can_be_read_from_a_file_of_json_lines(tokenizer, tmp_path):
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    assert math_problems(path, tokenizer, 3) == math_problems(PROBLEMS, tokenizer, 3)
    with pytest.raises(ValueError, match="is not a file"):
        multi_hop_questions(tmp_path / "missing.jsonl", tokenizer)


def test_the_depth_score_takes_them_as_they_are(tokenizer):
    model = tiny_grown_llama(vocab_size=300, max_position_embeddings=512)
    for texts, groups in (
        (math_problems(PROBLEMS, tokenizer, 1), {f"level {level}" for level in range(1, 6)}),
        (multi_hop_questions(QUESTIONS, tokenizer, 1), {"2 hops", "3 hops", "4 hops"}),
    ):
        found = depth_score(model, texts.rows, texts.boundaries, texts.groups)
        assert set(found.by_group) == groups and 0 <= found.score <= 7


@pytest.mark.parametrize(
    "read, rows, message",
    [
        (gsm8k_prompts, [{"text": "x"}], "Item 1 has the fields text"),
        (gsm8k_prompts, [], "no item of GSM8K"),
        (math_problems, [{"problem": "x", "level": "Level 1"}], "fields problem, level does not fit"),
        (math_problems, PROBLEMS[:2], "none of at most max_tokens=1024 tokens is of level 2, level 3"),
        (multi_hop_questions, [{"questions": [], "answer": "x", "single_hops": [1, 2]}], "does not fit"),
        (multi_hop_questions, QUESTIONS[:1], "is of 3 hops, 4 hops"),
    ],
)
def test_items_that_do_not_fit_are_said(tokenizer, read, rows, message):
    with pytest.raises(ValueError, match=message):
        read(rows) if read is gsm8k_prompts else read(rows, tokenizer)


def test_encode_cuts_long_texts_and_drops_those_too_short_to_say_anything(tokenizer):
    long, short = " ".join(WORDS * 5), "tower"
    rows = encode(tokenizer, [long, short, long[:80]], max_tokens=40)
    assert rows[0] == tokenizer.encode(long)[:40] and len(rows) == 2 and 16 <= len(rows[1]) <= 40
    with pytest.raises(ValueError, match="None of 1 texts has 16 tokens"):
        encode(tokenizer, [short])
    with pytest.raises(ValueError, match="max_tokens=4"):
        encode(tokenizer, [long], max_tokens=4)


def test_a_begin_of_text_token_stands_where_the_tokenizer_puts_one(tokenizer):
    class Beginning:
        def encode(self, text):
            return [0, *tokenizer.encode(text)]

    assert encode(Beginning(), [" ".join(WORDS)])[0] == [0, *tokenizer.encode(" ".join(WORDS))]
    plain, begun = (multi_hop_questions(QUESTIONS, one, 2) for one in (tokenizer, Beginning()))
    assert begun.boundaries == [[begin + 1] for (begin,) in plain.boundaries]


def test_plain_texts_are_documents_of_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    (tmp_path / "b.txt").write_text("first\n\n\nsecond\n")
    assert plain_texts(tmp_path / "a.jsonl", 2) == ["one", "two"]
    assert plain_texts(tmp_path / "b.txt") == ["first\n", "second\n"]
    with pytest.raises(ValueError, match="texts .*missing.txt' is not a file"):
        plain_texts(tmp_path / "missing.txt")


def test_random_rows_are_those_of_their_seed():
    rows = random_rows(50, 3, 20, seed=4)
    assert rows == random_rows(50, 3, 20, seed=4) != random_rows(50, 3, 20, seed=5)
    assert [len(row) for row in rows] == [20] * 3 and all(0 <= token < 50 for row in rows for token in row)
