"""
Readers of the evaluation sets: rows as their publishers' files or the Hub's data sets have them become items
`{"context", "continuation", "answers"}`, or `{"context", "choices", "gold"}`, in the prompt formats of arXiv 2604.21106
(specification, section 6.2).

A row that has `context` and `continuation` is an item already, in every set without choices, and its continuation
stays as it is: so are the files in nanochat's `eval_bundle.zip` and those which the paper's own code prepares. Which
other keys tell a format stands with each reader. The continuation is the first answer; questions to which their set has
none, as in SQuAD 2, are left out.

Raises:
    `ValueError`: for a row in none of a set's formats, with the keys that it has and those that were expected.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial


# By the keys that tell a format: what makes of its row the context and the accepted answers of each question.
Formats = Mapping[tuple[str, ...], Callable[[dict], list[tuple[str, list[str]]]]]

PREAMBLE = (
    "Below is a story followed by a series of related questions. Please answer the final question by referring to the "
    "story and the previous questions."
)
NO_ANSWER = "CANNOTANSWER"  # QuAC's mark
PASSAGE = ("context", "question", "answers.text")
QUERY = ("query", "choices", "gold")  # of the multiple-choice files in nanochat's `eval_bundle.zip`
PLACEHOLDERS = {("question", "numbers", "answer"): r"number(\d+)", ("Question", "Numbers", "Answer"): r"N_(\d\d)"}


# Parametric knowledge


def triviaqa(rows: Iterable[dict]) -> list[dict]:
    """`context`, `answer`, `aliases`; or `mandarjoshi/trivia_qa`: `question`, `answer: {value, aliases}`."""

    def on_hub(row: dict):
        return _closed_book(row["question"], [row["answer"]["value"], *row["answer"]["aliases"]])

    return _read(
        rows,
        {
            ("context", "answer", "aliases"): lambda row: [(row["context"], [row["answer"], *row["aliases"]])],
            ("question", "answer.value", "answer.aliases"): on_hub,
        },
    )


def natural_questions(rows: Iterable[dict]) -> list[dict]:
    """`google-research-datasets/nq_open`: `question`, `answer: [str]`."""
    return _read(rows, {("question", "answer"): lambda row: _closed_book(row["question"], row["answer"])})


def web_questions(rows: Iterable[dict]) -> list[dict]:
    """`stanfordnlp/web_questions`: `question`, `answers: [str]`."""
    return _read(rows, {("question", "answers"): lambda row: _closed_book(row["question"], row["answers"])})


def tydiqa_no_context(rows: Iterable[dict]) -> list[dict]:
    """The questions of `tydiqa_goldp` without their passages."""

    def closed(row: dict):
        return _closed_book(row["question"], row["answers"]["text"]) if _is_english(row) else []

    return _read(rows, {("id", "question", "answers.text"): closed})


# Reading comprehension


def tydiqa_goldp(rows: Iterable[dict]) -> list[dict]:
    """`google-research-datasets/tydiqa`, the English ones: `id`, `context`, `question`, `answers: {text: [str]}`."""
    return _read(rows, {("id", *PASSAGE): lambda row: _passage(row) if _is_english(row) else []})


def squad_v2(rows: Iterable[dict]) -> list[dict]:
    """`rajpurkar/squad_v2`, the answerable ones: `context`, `question`, `answers: {text: [str]}`."""
    return _read(rows, {PASSAGE: _passage})


def drop(rows: Iterable[dict]) -> list[dict]:
    """`ucinlp/drop`: `passage`, `question`, `answers_spans: {spans: [str]}`."""

    def on_hub(row: dict):
        return _open_book(row["passage"], row["question"], row["answers_spans"]["spans"])

    return _read(rows, {("passage", "question", "answers_spans.spans"): on_hub})


def coqa(rows: Iterable[dict]) -> list[dict]:
    """`stanfordnlp/coqa`: `story`, `questions: [str]`, `answers: {input_text: [str]}`. Every turn is an item."""
    return _read(rows, {("story", "questions", "answers.input_text"): _turns})


def _turns(row: dict) -> list[tuple[str, list[str]]]:
    items, preceding = [], ""
    for question, answer in zip(row["questions"], row["answers"]["input_text"], strict=True):
        asked = f"Question: {question.strip()}\nAnswer:"
        before = f"\nPreceding questions:{preceding}" if preceding else ""
        items.append((f"{PREAMBLE}\nStory: {row['story'].strip()}{before}\n\nFinal question:\n{asked}", [answer]))
        preceding += f"\n{asked} {answer.strip()}"
    return items


def lambada(rows: Iterable[dict]) -> list[dict]:
    """`EleutherAI/lambada_openai`: `text`, whose last word is the answer."""

    def last_word(row: dict):
        context, _, word = row["text"].strip().rpartition(" ")
        return [(context, [word])]

    return _read(rows, {("text",): last_word})


# Math word problems


def svamp(rows: Iterable[dict]) -> list[dict]:
    """`context`, `answer`; or `ChilleD/SVAMP`: `Body`, `Question`, `Answer`."""

    def on_hub(row: dict):
        text = f"{row['Body'].strip().rstrip('.')}. {row['Question'].strip()}"
        return _closed_book(text, [_number(row["Answer"])])

    return _read(
        rows,
        {
            ("context", "answer"): lambda row: _closed_book(row["context"], [_number(row["answer"])]),
            ("Body", "Question", "Answer"): on_hub,
        },
    )


def asdiv(rows: Iterable[dict]) -> list[dict]:
    """As published and as `EleutherAI/asdiv`: `body`, `question`, `answer` with its unit in brackets."""

    def without_unit(row: dict):
        text = f"{row['body'].strip().rstrip('.')} {row['question'].strip()}"
        return _closed_book(text, [re.sub(r"\s*\(.*?\)", "", row["answer"])])

    return _read(rows, {("body", "question", "answer"): without_unit})


def mawps(rows: Iterable[dict]) -> list[dict]:
    """
    `question` with placeholders number0, number1, `numbers: "1.0 2.0"`, `answer`; or `mwpt5/MAWPS`: `Question` with
    N_00, N_01, `Numbers`, `Answer`. Rows with more placeholders than numbers are left out.
    """
    return _read(rows, {keys: partial(_filled_in, keys, pattern) for keys, pattern in PLACEHOLDERS.items()})


def _filled_in(keys: tuple[str, ...], placeholder: str, row: dict) -> list[tuple[str, list[str]]]:
    question, numbers, answer = (row[key] for key in keys)
    values = [_number(value) for value in (numbers or "").split()]
    if any(int(index) >= len(values) for index in re.findall(placeholder, question)):
        return []
    text = re.sub(placeholder, lambda found: values[int(found[1])], question)
    return _closed_book(text, [_number(answer)])


def _number(value) -> str:
    """Whole numbers without a decimal point, everything else as it is written."""
    text = str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


# Compositional and symbolic


def bigbench(rows: Iterable[dict]) -> list[dict]:
    """Dyck languages, QA Wikidata and CS algorithms of nanochat's `eval_bundle.zip`: `context`, `continuation`."""
    return _read(rows, {})


def arc(rows: Iterable[dict]) -> list[dict]:
    """
    `query`, `choices: [str]`, `gold`; or `allenai/ai2_arc`: `question`, `choices: {text: [str], label: [str]}`,
    `answerKey`, which is one of the labels: letters or digits.
    """

    def published(row: dict):
        return f"{row['query'].strip()}\nAnswer:", row["choices"], row["gold"]

    def on_hub(row: dict):
        return f"Question: {row['question'].strip()}\nAnswer:", row["choices"]["text"], _labelled(row)

    return _choices(rows, {QUERY: published, ("question", "choices.text", "choices.label", "answerKey"): on_hub})


# Multiple choice of recurrent_gpt.md (section 9), with the prompts of lm-eval's own tasks


def boolq(rows: Iterable[dict]) -> list[dict]:
    """`query` with the passage; or `aps/super_glue`, `google/boolq`: `passage`, `question`, `label` or `answer`."""

    def published(row: dict):
        return row["query"].removeprefix("Passage: ").rstrip() + "\nAnswer:", row["choices"], row["gold"]

    def on_hub(row: dict):
        label = row["label"] if "label" in row else row["answer"]
        return f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"], label

    hub = ("passage", "question")
    return _choices(rows, {QUERY: published, (*hub, "label"): on_hub, (*hub, "answer"): on_hub})


def piqa(rows: Iterable[dict]) -> list[dict]:
    """`query` as "Question: ..."; or `baber/piqa`: `goal`, `sol1`, `sol2`, `label`."""

    def published(row: dict):
        return row["query"].rstrip() + "\nAnswer:", row["choices"], row["gold"]

    def on_hub(row: dict):
        return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]

    return _choices(rows, {QUERY: published, ("goal", "sol1", "sol2", "label"): on_hub})


def openbook_qa(rows: Iterable[dict]) -> list[dict]:
    """`query`; or `allenai/openbookqa`: `question_stem`, `choices: {text: [str], label: [str]}`, `answerKey`."""

    def on_hub(row: dict):
        return row["question_stem"], row["choices"]["text"], _labelled(row)

    hub = ("question_stem", "choices.text", "choices.label", "answerKey")
    return _choices(rows, {QUERY: _as_published, hub: on_hub})


def hellaswag(rows: Iterable[dict]) -> list[dict]:
    """`query`; or `Rowan/hellaswag`: `activity_label`, `ctx_a`, `ctx_b`, `endings: [str]`, `label`."""

    def on_hub(row: dict):
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return _without_marks(context), [_without_marks(ending) for ending in row["endings"]], row["label"]

    return _choices(rows, {QUERY: _as_published, ("activity_label", "ctx_a", "ctx_b", "endings", "label"): on_hub})


def _without_marks(text: str) -> str:
    # Texts from WikiHow have their parts marked, as in "[title]" and "[step]".
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def winogrande(rows: Iterable[dict]) -> list[dict]:
    """
    `context_options: [str]`, `continuation`, `gold`; or `allenai/winogrande`: `sentence` with a "_", `option1`,
    `option2`, `answer`. Items have `contexts`: the two ways to go on to the same continuation.
    """

    def published(row: dict):
        return row["continuation"], row["context_options"], row["gold"]

    def on_hub(row: dict):
        before, _, after = row["sentence"].partition("_")
        return after, [before + row["option1"], before + row["option2"]], int(row["answer"] or 0) - 1

    hub = ("sentence", "option1", "option2", "answer")
    items = _choices(rows, {("context_options", "continuation", "gold"): published, hub: on_hub})
    return [
        {"contexts": item["choices"], "continuation": item["context"].strip(), "gold": item["gold"]} for item in items
    ]


def _as_published(row: dict) -> tuple[str, Sequence[str], int]:
    return row["query"], row["choices"], row["gold"]


def _labelled(row: dict) -> int:
    labels, key = row["choices"]["label"], row["answerKey"].strip()
    if key not in labels:
        raise ValueError(
            f"answerKey={key!r} is none of its labels {', '.join(labels)}. Is it of a split without labels, such as test? "
            "Use validation."
        )
    return labels.index(key)


def _choices(rows: Iterable[dict], formats: Mapping[tuple[str, ...], Callable]) -> list[dict]:
    items = []
    for number, row in enumerate(rows, 1):
        context, choices, label = _format_of(number, row, formats)(row)
        gold = int(label) if isinstance(label, bool) or str(label).isdecimal() else -1
        if gold not in range(len(choices)):
            raise ValueError(
                f"Row {number}: its label is {label!r}, and there are {len(choices)} choices. Is it of a split without "
                "labels, such as test? Use validation."
            )
        items.append({"context": context, "choices": list(choices), "gold": gold})
    return items


# Those of arXiv 2602.16490 (section 5.1) beside the ones above


def quac(rows: Iterable[dict]) -> list[dict]:
    """
    `allenai/quac`: `background`, `context`, `questions: [str]`, `orig_answers: {texts: [str]}` and
    `answers: {texts: [[str]]}`. Every turn that has an answer is an item, with those before it that have one.
    """
    hub = ("background", "context", "questions", "orig_answers.texts", "answers.texts")
    return _read(rows, {hub: _dialogue})


def _dialogue(row: dict) -> list[tuple[str, list[str]]]:
    turns = zip(row["questions"], row["orig_answers"]["texts"], row["answers"]["texts"], strict=True)
    passage = row["context"].removesuffix(NO_ANSWER).strip()
    told, items = f"Context: {row['background'].strip()}\n{passage}\n", []
    for question, original, others in turns:
        if original == NO_ANSWER:
            continue
        told += f"Question: {question.strip()}\nAnswer:"
        items.append((told, [original, *(answer for answer in others if answer != NO_ANSWER)]))
        told += f" {original.strip()}\n"
    return items


def gsm8k(rows: Iterable[dict]) -> list[dict]:
    """
    `context`, `chain_of_thought`, `answer`; or `openai/gsm8k`: `question`, and `answer` which ends with "#### " and a
    number. Shots show the whole worked solution.
    """

    def published(row: dict):
        return row["context"], f"{row['chain_of_thought']}\n#### {row['answer']}"

    def on_hub(row: dict):
        return row["question"], row["answer"]

    formats = {("context", "chain_of_thought", "answer"): published, ("question", "answer"): on_hub}
    items = []
    for number, row in enumerate(rows, 1):
        question, solution = _format_of(number, row, formats)(row)
        answer = solution.rpartition("#### ")[2]
        items.append({"context": f"Question: {question}\nAnswer:", "continuation": solution, "answers": [answer]})
    return items


def mawps_subset(rows: Iterable[dict]) -> list[dict]:
    """As `sets.mawps`; or `allenai/lila`, which has MAWPS's parts: `input`, `output_answer`."""

    def from_lila(row: dict) -> dict:
        context = f"Question: {row['input'].strip()}\nAnswer:"
        return {"context": context, "continuation": _number(row["output_answer"])}

    return mawps(from_lila(row) if {"input", "output_answer"} <= row.keys() else row for row in rows)


# Texts


def held_out(rows: Iterable[dict]) -> list[dict]:
    """`text`, in files and on the Hub."""
    return [
        {"text": _format_of(number, row, {("text",): lambda row: row["text"]})(row)}
        for number, row in enumerate(rows, 1)
    ]


def _passage(row: dict) -> list[tuple[str, list[str]]]:
    return _open_book(row["context"], row["question"], row["answers"]["text"])


def _open_book(passage: str, question: str, answers: list[str]) -> list[tuple[str, list[str]]]:
    return [(f"Context: {passage.strip()}\nQuestion: {question.strip()}\nAnswer:", answers)]


def _closed_book(question: str, answers: list[str]) -> list[tuple[str, list[str]]]:
    return [(f"Question: {question.strip()}\nAnswer:", answers)]


def _is_english(row: dict) -> bool:
    return row["id"].partition("-")[0] == "english"


def _read(rows: Iterable[dict], formats: Formats) -> list[dict]:
    formats = {("context", "continuation"): lambda row: [(row["context"], [row["continuation"]])], **formats}
    items = []
    for number, row in enumerate(rows, 1):
        for context, answers in _format_of(number, row, formats)(row):
            if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
                raise ValueError(f"Row {number}: the answers must be a list of strings, not {answers!r}.")
            if "continuation" not in row:
                answers = list(dict.fromkeys(filter(None, map(str.strip, answers))))
            if answers:
                items.append({"context": context.rstrip(), "continuation": answers[0], "answers": answers})
    return items


def _format_of(number: int, row: dict, formats: Mapping[tuple[str, ...], Callable]) -> Callable:
    for keys, convert in formats.items():
        if all(_holds(row, key) for key in keys):
            return convert
    expected = ", or ".join(" and ".join(keys) for keys in formats)
    raise ValueError(f"Row {number} has {', '.join(row) or 'no keys'}; expected {expected}. Is it another set's?")


def _holds(row, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return False
        row = row[part]
    return True
