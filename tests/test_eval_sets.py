"""Readers of the evaluation sets, and the tasks of five axes that they fill, on invented rows."""

import json
from pathlib import Path
from random import Random

import pytest


pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager  # noqa: E402

import modeling_looped.eval  # noqa: E402
from modeling_looped.eval import sets  # noqa: E402


TASKS = Path(modeling_looped.eval.__file__).parent / "tasks" / "five_axes"
FIXTURES = Path(__file__).parent / "fixtures" / "eval"

# Specification, section 6.1: shots, and the Hub's data set, configuration and split.
HUB = {
    "triviaqa": (5, "mandarjoshi/trivia_qa", "rc.nocontext", "validation"),
    "nq": (5, "google-research-datasets/nq_open", None, "validation"),
    "webq": (5, "stanfordnlp/web_questions", None, "test"),
    "lambada_openai": (0, "EleutherAI/lambada_openai", "default", "test"),
    "tydiqa_goldp": (3, "google-research-datasets/tydiqa", "secondary_task", "validation"),
    "squadv2": (3, "rajpurkar/squad_v2", None, "validation"),
    "drop": (3, "ucinlp/drop", None, "validation"),
    "coqa": (1, "stanfordnlp/coqa", None, "validation"),
    "svamp": (5, "ChilleD/SVAMP", None, "test"),
    "asdiv": (5, "EleutherAI/asdiv", None, "validation"),
    "mawps": (5, "mwpt5/MAWPS", None, "train"),
    "bigbench_dyck_languages": (10, None, None, None),
    "bigbench_qa_wikidata": (10, None, None, None),
    "bigbench_cs_algorithms": (10, None, None, None),
    "arc_easy": (10, "allenai/ai2_arc", "ARC-Easy", "test"),
}
ASSIGNMENTS = [f"var_assign_d{depth}_{form}" for depth in (0, 1) for form in ("math", "code")]
SHOTS = {name: row[0] for name, row in HUB.items()} | {"induction_head": 0} | dict.fromkeys(ASSIGNMENTS, 5)

# Section 6.6: continuation loss of each task at r = 1, 2, 4, 8, and the means of the axes.
TABLE_9 = {
    "parametric_knowledge": {
        "triviaqa": (3.251, 3.346, 3.381, 3.497),
        "nq": (3.158, 3.226, 3.257, 3.393),
        "webq": (3.079, 3.183, 3.199, 3.431),
    },
    "reading_comprehension": {
        "lambada_openai": (1.910, 1.934, 1.991, 2.116),
        "tydiqa_goldp": (0.631, 0.624, 0.564, 0.605),
        "squadv2": (1.001, 0.990, 0.924, 1.020),
        "drop": (1.674, 1.667, 1.630, 1.736),
        "coqa": (1.482, 1.449, 1.427, 1.492),
    },
    "math_word_problems": {
        "svamp": (1.645, 1.634, 1.643, 1.540),
        "asdiv": (1.635, 1.657, 1.675, 1.634),
        "mawps": (1.503, 1.526, 1.532, 1.453),
    },
    "reasoning_primitives": {
        "induction_head": (1.760, 1.666, 2.208, 2.187),
        "var_assign_d0_math": (0.790, 0.816, 0.715, 0.812),
        "var_assign_d0_code": (0.891, 0.612, 0.787, 0.815),
        "var_assign_d1_math": (0.986, 1.127, 1.090, 1.123),
        "var_assign_d1_code": (1.110, 0.935, 1.142, 1.141),
    },
    "compositional_symbolic": {
        "bigbench_dyck_languages": (3.902, 3.419, 3.733, 3.264),
        "bigbench_qa_wikidata": (1.737, 1.808, 1.874, 1.999),
        "arc_easy": (1.977, 2.020, 2.010, 2.088),
        "bigbench_cs_algorithms": (1.127, 1.127, 1.117, 1.105),
    },
}
AXIS_MEANS = {
    "parametric_knowledge": (3.1627, 3.2517, 3.2790, 3.4403),
    "reading_comprehension": (1.3396, 1.3328, 1.3072, 1.3938),
    "math_word_problems": (1.5943, 1.6057, 1.6167, 1.5423),
    "reasoning_primitives": (1.1074, 1.0312, 1.1884, 1.2156),
    "compositional_symbolic": (2.1858, 2.0935, 2.1835, 2.1140),
}

# A row of each format, and the items that it becomes: the context and the accepted answers.
TEA = {"context": "Tea is grown on Kettle Top.", "question": "Where is tea grown?", "id": "english-7-0"}
WHERE = "Question: Where is tea grown?\nAnswer:"
TEXTS = {"text": ["Kettle Top", "on Kettle Top", "Kettle Top"], "answer_start": [16, 13, 16]}
PREAMBLE = (
    "Below is a story followed by a series of related questions. Please answer the final question by referring to the "
    "story and the previous questions.\nStory: "
)
STORY = f"{PREAMBLE}Pip met Nell."
ROWS = {
    "triviaqa, published": (
        sets.triviaqa,
        {"context": "Question: Who painted it?\nAnswer:", "answer": "Nell Orr", "aliases": ["N. Orr", "Nell Orr"]},
        [("Question: Who painted it?\nAnswer:", ["Nell Orr", "N. Orr"])],
    ),
    "triviaqa, Hub": (
        sets.triviaqa,
        {"question": "Who painted it? ", "question_id": "q1", "answer": {"value": "Nell Orr ", "aliases": ["N. Orr"]}},
        [("Question: Who painted it?\nAnswer:", ["Nell Orr", "N. Orr"])],
    ),
    "natural_questions": (
        sets.natural_questions,
        {"question": "who painted it", "answer": ["Nell Orr", "", "N. Orr"]},
        [("Question: who painted it\nAnswer:", ["Nell Orr", "N. Orr"])],
    ),
    "natural_questions, no answer": (sets.natural_questions, {"question": "who painted it", "answer": []}, []),
    "web_questions": (
        sets.web_questions,
        {"url": "example.org", "question": "who painted it?", "answers": ["Nell Orr"]},
        [("Question: who painted it?\nAnswer:", ["Nell Orr"])],
    ),
    "tydiqa_goldp": (
        sets.tydiqa_goldp,
        TEA | {"answers": TEXTS},
        [(f"Context: Tea is grown on Kettle Top.\n{WHERE}", ["Kettle Top", "on Kettle Top"])],
    ),
    "tydiqa_goldp, not English": (sets.tydiqa_goldp, TEA | {"id": "swahili-7-0", "answers": TEXTS}, []),
    "tydiqa_no_context": (
        sets.tydiqa_no_context,
        TEA | {"answers": TEXTS},
        [(WHERE, ["Kettle Top", "on Kettle Top"])],
    ),
    "squad_v2": (
        sets.squad_v2,
        TEA | {"answers": TEXTS},
        [(f"Context: Tea is grown on Kettle Top.\n{WHERE}", ["Kettle Top", "on Kettle Top"])],
    ),
    "squad_v2, unanswerable": (sets.squad_v2, TEA | {"answers": {"text": [], "answer_start": []}}, []),
    "drop": (
        sets.drop,
        {
            "passage": "They had 40 seats, later 65.",
            "question": "How many more?",
            "answers_spans": {"spans": ["25", "25"], "types": ["number", "number"]},
        },
        [("Context: They had 40 seats, later 65.\nQuestion: How many more?\nAnswer:", ["25"])],
    ),
    "coqa": (
        sets.coqa,
        {
            "story": "Pip met Nell. ",
            "questions": ["Who met Nell?", "Is she kind?", "Whom did he meet? "],
            "answers": {"input_text": ["Pip", " ", "Nell"]},
        },
        [
            (f"{STORY}\n\nFinal question:\nQuestion: Who met Nell?\nAnswer:", ["Pip"]),
            (
                f"{STORY}\nPreceding questions:\nQuestion: Who met Nell?\nAnswer: Pip\nQuestion: Is she kind?\nAnswer: "
                "\n\nFinal question:\nQuestion: Whom did he meet?\nAnswer:",
                ["Nell"],
            ),
        ],
    ),
    "lambada, published": (
        sets.lambada,
        {"context": "They saw the kite and wanted the", "continuation": "kite"},
        [("They saw the kite and wanted the", ["kite"])],
    ),
    "lambada, Hub": (
        sets.lambada,
        {"text": "They saw the kite and wanted the kite"},
        [("They saw the kite and wanted the", ["kite"])],
    ),
    "svamp, published": (
        sets.svamp,
        {"context": "Pip has 5 kites. How many legs?", "answer": "44", "chain_of_thought": ""},
        [("Question: Pip has 5 kites. How many legs?\nAnswer:", ["44"])],
    ),
    "svamp, Hub": (
        sets.svamp,
        {"Body": "Pip has 5 kites", "Question": "How many legs?", "Answer": "44.0", "Type": "x"},
        [("Question: Pip has 5 kites. How many legs?\nAnswer:", ["44"])],
    ),
    "svamp, a fraction": (
        sets.svamp,
        {"Body": "Pip has 5 kites.", "Question": "How much?", "Answer": 2.5},
        [("Question: Pip has 5 kites. How much?\nAnswer:", ["2.5"])],
    ),
    "asdiv": (
        sets.asdiv,
        {"body": "Pip has 5 kites.", "question": "How many strings? ", "answer": "5 (strings)"},
        [("Question: Pip has 5 kites How many strings?\nAnswer:", ["5"])],
    ),
    "asdiv, two answers": (
        sets.asdiv,
        {"body": "If Pip has 5 kites,", "question": "how many?", "answer": "2 (red); 3 (blue)"},
        [("Question: If Pip has 5 kites, how many?\nAnswer:", ["2; 3"])],
    ),
    "mawps, published": (
        sets.mawps,
        {"question": "number0 kites and number1 strings , then number0 ?", "numbers": "70.0 2.5", "answer": "7.0"},
        [("Question: 70 kites and 2.5 strings , then 70 ?\nAnswer:", ["7"])],
    ),
    "mawps, Hub": (
        sets.mawps,
        {"Question": "N_00 kites and N_01 strings ?", "Numbers": "70.0 2.5", "Answer": "0.25", "Equation": ""},
        [("Question: 70 kites and 2.5 strings ?\nAnswer:", ["0.25"])],
    ),
    "mawps, unresolved": (sets.mawps, {"Question": "N_00 kites or N_01 ?", "Numbers": "7.0", "Answer": 7.0}, []),
    "bigbench": (
        sets.bigbench,
        {"context": "Close it.\n\nInput: ( [\nOutput:", "continuation": "] )"},
        [("Close it.\n\nInput: ( [\nOutput:", ["] )"])],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_the_prompts_of_the_paper(name):
    reader, row, expected = ROWS[name]
    items = [{"context": context, "continuation": texts[0], "answers": texts} for context, texts in expected]
    assert reader([row]) == items


CHOICES = ["sand", "rain", "a kite"]
PUBLISHED = {"query": "Question: What flies?", "choices": CHOICES, "gold": 2}
ON_HUB = {"id": "1", "question": "What flies?", "choices": {"text": CHOICES, "label": ["A", "B", "C"]}}


@pytest.mark.parametrize(
    "row",
    [
        PUBLISHED,
        ON_HUB | {"answerKey": "C"},
        ON_HUB | {"choices": {"text": CHOICES, "label": ["1", "2", "3"]}, "answerKey": "3"},
    ],
    ids=["published", "letters", "digits"],
)
def test_a_row_with_choices_names_the_right_one(row):
    assert sets.arc([row]) == [{"context": "Question: What flies?\nAnswer:", "choices": CHOICES, "gold": 2}]


READERS = dict.fromkeys(row[0] for row in ROWS.values())


@pytest.mark.parametrize("reader", READERS)
def test_finished_items_pass_through_every_reader_as_they_are(reader):
    # A blank one as well: it is the task that refuses it, and says which item it is.
    rows = [{"context": "Question: Who?\nAnswer: ", "continuation": word} for word in ("\nPip", " ")]
    assert reader(rows) == [{**row, "context": "Question: Who?\nAnswer:", "answers": [row["continuation"]]} for row in rows]


@pytest.mark.parametrize("reader", [*READERS, sets.arc])
def test_a_row_of_another_set_is_refused_with_its_keys(reader):
    with pytest.raises(ValueError, match=r"^Row 1 has premise, label; expected .*\w and \w"):
        reader([{"premise": "It rains.", "label": 0}])


def test_a_row_that_lacks_a_nested_key_is_told_which_keys_there_should_be():
    with pytest.raises(ValueError, match="context and answer and aliases, or question and answer.value and answer.al"):
        sets.triviaqa([{"question": "Who?", "answer": {"text": "Pip"}}])


def test_answers_that_are_no_list_of_strings_are_refused():
    with pytest.raises(ValueError, match="^Row 2: the answers must be a list of strings, not 'Pip'"):
        sets.natural_questions([{"question": "who", "answer": ["Pip"]}, {"question": "who", "answer": "Pip"}])


def test_an_answer_key_that_is_no_label_is_refused():
    with pytest.raises(ValueError, match="answerKey='D' is none of its labels A, B, C"):
        sets.arc([ON_HUB | {"answerKey": "D"}])


# Tasks


def manager(*folders: Path) -> TaskManager:
    data = ":".join(map(str, folders))
    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"data_dir": data})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Twelve finished items for each task that reads a file."""
    folder = tmp_path_factory.mktemp("made")
    for name in HUB:
        rows = [{"context": f"Item {i} of {name}:", "continuation": f"answer {i}"} for i in range(12)]
        if name == "arc_easy":
            rows = [PUBLISHED] * 12
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def loaded(made) -> dict:
    return manager(made).load(["looped_five_axes"])


def prompts(task) -> list[str]:
    task.build_all_requests()
    return [instance.arguments[0] for instance in task.instances if instance.idx == 0]


def test_the_five_axes_are_the_twenty_tasks_of_the_paper(loaded):
    axes = {name: set(group.child_names) for name, group in loaded["groups"].items() if name != "looped_five_axes"}
    assert axes == {f"looped_axis_{axis}": {f"looped_{name}" for name in tasks} for axis, tasks in TABLE_9.items()}
    assert {name: task.config.num_fewshot for name, task in loaded["tasks"].items()} == {
        f"looped_{name}": shots for name, shots in SHOTS.items()
    }


@pytest.mark.parametrize("name", HUB)
def test_a_task_asks_the_hub_for_the_set_of_the_paper(name, loaded):
    config = loaded["tasks"][f"looped_{name}"].config
    split = (config.dataset_kwargs or {}).get("split")
    assert (config.num_fewshot, config.dataset_path, config.dataset_name, split) == HUB[name]


@pytest.mark.parametrize("name", ["induction_head", *ASSIGNMENTS])
def test_a_task_of_made_items_has_a_thousand(name, loaded):
    docs = loaded["tasks"][f"looped_{name}"].eval_docs
    kind = "Python program" if "code" in name else "equations" if "math" in name else " -> "
    assert len(docs) == 1000 and kind in docs[0]["context"]
    if "d1" in name or "d0" in name:
        assert docs[0]["context"].count("=") == (10 if "d1" in name else 5)


@pytest.mark.parametrize("axis", TABLE_9)
def test_an_axis_is_the_unweighted_mean_of_its_tasks_as_in_table_9(axis, loaded):
    group = loaded["groups"][f"looped_axis_{axis}"]
    for column, mean in enumerate(AXIS_MEANS[axis]):
        metrics = {
            f"looped_{name}": {
                **{f"{metric},none": values[column] for metric in ("acc", "continuation_loss", "nats_per_byte")},
                "sample_len": 10 ** (size % 4),
            }
            for size, (name, values) in enumerate(TABLE_9[axis].items())
        }
        result = group.aggregate(metrics)
        for metric in ("acc", "continuation_loss", "nats_per_byte"):
            assert result[f"{metric},none"] == pytest.approx(mean, abs=6e-5)


def test_the_five_axes_have_no_mean_of_their_own(loaded):
    assert not loaded["groups"]["looped_five_axes"].has_aggregation


def test_shots_are_drawn_from_the_other_items_of_the_shuffled_set(tmp_path):
    rows = [{"question": f"what is item {i}", "answer": [f"thing {i}", "it"]} for i in range(40)]
    (tmp_path / "nq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = manager(tmp_path).load(["looped_nq"])["tasks"]["looped_nq"]
    shuffled = list(range(40))
    Random(1337).shuffle(shuffled)
    expected = []
    for index in range(40):
        shots = Random(1234 + index).sample([other for other in range(40) if other != index], 5)
        asked = [f"Question: what is item {shuffled[i]}\nAnswer: thing {shuffled[i]}\n\n" for i in shots]
        expected.append("".join(asked) + f"Question: what is item {shuffled[index]}\nAnswer:")
    assert prompts(task) == expected
    assert [instance.arguments[1] for instance in task.instances] == [f" thing {i}" for i in shuffled]


FIRST_PROMPTS = {
    "nq": (
        "Question: what is the tallest hill in dunmarrow county\nAnswer: Kettle Top\n\n"
        "Question: when did the ferry to ostrel island start running\nAnswer: 1911\n\n"
        "Question: who built the lighthouse of port veldra\nAnswer:",
        " Mara Quill",
    ),
    "webq": (
        "Question: what did mara quill design?\nAnswer: Lighthouse\n\n"
        "Question: where is ostrel island?\nAnswer: Grey Bay\n\n"
        "Question: what language do people speak in veldra?\nAnswer:",
        " Veldran",
    ),
    "tydiqa_goldp": (
        "Context: Kettle Top is a hill of slate. Goats graze on its northern side.\n"
        "Question: Which animals graze there?\nAnswer: Goats\n\n"
        "Context: Ostrel Island lies in Grey Bay. A ferry crosses twice a day.\n"
        "Question: How often does the ferry cross?\nAnswer: twice a day\n\n"
        "Context: Port Veldra is a harbour town. Its lighthouse was finished in 1874 by Mara Quill.\n"
        "Question: When was the lighthouse finished?\nAnswer:",
        " 1874",
    ),
    "squadv2": (
        "Context: Slate from Kettle Top roofed the town hall, and later the railway station.\n"
        "Question: What did the slate roof first?\nAnswer: the town hall\n\n"
        "Context: The school of Ostrel Island has nine pupils and one teacher, who also rings the bell.\n"
        "Question: How many pupils are there?\nAnswer: nine\n\n"
        "Context: The harbour of Port Veldra freezes in most winters. Sledges then carry the mail.\n"
        "Question: What carries the mail in winter?\nAnswer:",
        " Sledges",
    ),
    "drop": (
        "Context: Quill first drew the lamp, then the stairs, and last the door.\n"
        "Question: What did Quill draw second?\nAnswer: the stairs\n\n"
        "Context: In 1911 the ferry had 40 seats, and in 1932 a new boat had 65.\n"
        "Question: How many more seats did the new boat have?\nAnswer: 25\n\n"
        "Context: The Harbour Gulls led 14 to 7 at half time. "
        "After the break Teller kicked two goals of 3 points each.\n"
        "Question: How many points did Teller score after the break?\nAnswer:",
        " 6",
    ),
    "coqa": (
        f"{PREAMBLE}Grey Bay has two islands. Ostrel is the larger one.\n\n"
        "Final question:\nQuestion: How many islands are there?\nAnswer: two\n\n"
        f"{PREAMBLE}Pip the otter found a red kite on the beach. He gave it to Nell, who lived next to the mill.\n"
        "Preceding questions:\nQuestion: What did Pip find?\nAnswer: a red kite\n\n"
        "Final question:\nQuestion: Where?\nAnswer:",
        " on the beach",
    ),
}


@pytest.fixture(scope="module")
def invented() -> dict:
    return manager(FIXTURES).load([f"looped_{name}" for name in FIRST_PROMPTS])["tasks"]


@pytest.mark.parametrize("name", FIRST_PROMPTS)
def test_the_first_prompt_of_an_invented_set_is_exactly_this(name, invented):
    prompt, continuation = FIRST_PROMPTS[name]
    task = invented[f"looped_{name}"]
    task.build_all_requests(limit=1)
    assert task.instances[0].arguments == (prompt, continuation)


def test_without_folders_a_task_reads_the_hub(monkeypatch):
    asked = []

    def open_dataset(named, *arguments, **options):
        asked.append((*arguments, options))
        return [json.loads(line) for line in (FIXTURES / "tydiqa.jsonl").read_text().splitlines()]

    monkeypatch.setattr("modeling_looped.eval.task.open_dataset", open_dataset)
    monkeypatch.delenv("LOOPED_EVAL_DATA", raising=False)
    task = manager().load(["looped_tydiqa_goldp"])["tasks"]["looped_tydiqa_goldp"]
    assert asked == [("google-research-datasets/tydiqa", "secondary_task", {"split": "validation"})]
    assert len(task.eval_docs) == 3


def test_every_item_of_the_published_files_makes_a_prompt(shared):
    tasks = manager(shared / "data" / "eval", FIXTURES).load(["looped_five_axes"])["tasks"]
    sizes = {name.removeprefix("looped_"): len(task.eval_docs) for name, task in tasks.items()}
    few = {"nq": 3, "webq": 3, "tydiqa_goldp": 3, "squadv2": 3, "drop": 3, "coqa": 6}
    made = dict.fromkeys(["induction_head", *ASSIGNMENTS], 1000)
    assert sizes == {**dict.fromkeys(SHOTS, 200), **few, **made}
    for name, task in tasks.items():
        task.build_all_requests(limit=3)
        for instance in task.instances:
            context, continuation = instance.arguments
            assert not context[-1].isspace() and continuation[0] == " " and continuation.strip(), name
            assert context.count("\n\n") >= min(task.config.num_fewshot, len(task.eval_docs) - 1), name
    for name in ("svamp", "asdiv", "mawps", "triviaqa"):
        for item in tasks[f"looped_{name}"].eval_docs:
            assert item["context"].startswith("Question: ") and item["context"].endswith("\nAnswer:")
            assert "number0" not in item["context"]
    assert not any("(" in item["continuation"] for item in tasks["looped_asdiv"].eval_docs)
