"""What measurements run on: texts as lists of token ids, with the places and groups that `depth_score` wants."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from transformers import PreTrainedTokenizerBase

from ..recipes.corpus import read_json_lines, read_texts
from ..recipes.scoring import continuation_begin


FEWEST = 16  # tokens of a text that says something


@dataclass(frozen=True)
class Texts:
    """
    The arguments of `depth_score(model, texts.rows, texts.boundaries, texts.groups)`.

    Args:
        rows: Token ids of each text.
        boundaries: Of each text, the tokens before which layers are left out.
        groups: A name for each text.
    """

    rows: list[list[int]]
    boundaries: list[list[int]]
    groups: list[str]

    def __len__(self) -> int:
        return len(self.rows)


def gsm8k_prompts(rows: str | Path | Iterable[dict], limit: int = 20) -> list[str]:
    """
    The first `limit` items of GSM8K as texts: an instruction, the question, where the answer has to stand, and the
    worked solution (section 6.1 of the specification; the wording is ours).

    Args:
        rows: Items, or a JSONL file of them, with `context`, `chain_of_thought` and `answer`; or those of `openai/gsm8k`
            with `question` and `answer`.

    Raises:
        `ValueError`: where an item has neither, or there is none.
    """
    texts = []
    for number, row in enumerate(islice(_items(rows), limit), 1):
        if {"context", "chain_of_thought", "answer"} <= row.keys():
            question, solution, answer = row["context"], row["chain_of_thought"], row["answer"]
        elif {"question", "answer"} <= row.keys():
            question = row["question"]
            solution, _, answer = row["answer"].rpartition("\n#### ")
        else:
            raise ValueError(
                f"Item {number} has the fields {', '.join(row)}: 'context', 'chain_of_thought' and 'answer' are needed, or "
                "'question' and 'answer'."
            )
        texts.append(
            "Solve the problem step by step.\n\n"
            f"Question: {question.strip()}\n"
            'End with a line "Final answer:" and the number.\n\n'
            f"{solution.strip()}\nFinal answer: {str(answer).strip()}\n"
        )
    if not texts:
        raise ValueError("There is no item of GSM8K.")
    return texts


def math_problems(
    rows: str | Path | Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    per_level: int = 20,
    seed: int = 42,
    max_tokens: int = 1024,
) -> Texts:
    """
    Problems of MATH with their solutions, in groups by level, and four boundaries in each: random ones of the
    solution's tokens 0, 4, 8, ... (section 6.3 of the specification).

    Args:
        rows: Items of `EleutherAI/hendrycks_math`, `intermediate_algebra`, split `test`, or a JSONL file of them:
            `problem`, `level`, `solution`.
        per_level: Problems of each of the levels 1 to 5, after a shuffle with `seed`.
        max_tokens: Longer ones are passed over.

    Raises:
        `ValueError`: where a field is missing, or a level has no problem.
    """
    levels = {f"Level {level}": f"level {level}" for level in range(1, 6)}

    def read(row: dict) -> tuple[str, str, str] | None:
        if row["level"] not in levels:
            return None
        return levels[row["level"]], f"Problem: {row['problem'].strip()}\nAnswer:", f" {row['solution'].strip()}"

    generator = Random(seed)

    def boundaries(begin: int, length: int) -> list[int]:
        places = range(begin, length, 4)
        return sorted(generator.sample(places, min(4, len(places))))

    return _chosen(rows, tokenizer, read, boundaries, list(levels.values()), per_level, generator, max_tokens)


def multi_hop_questions(
    rows: str | Path | Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    per_group: int = 20,
    seed: int = 42,
    max_tokens: int = 1024,
) -> Texts:
    """
    Questions that take 2, 3 or 4 facts, with their true answers, in groups by that number; one boundary in each, where
    the answer begins (section 6.3 of the specification).

    Args:
        rows: Items of MQuAKE (`henryzhongsc/MQuAKE-Remastered`, split `CF3k`), or a JSONL file of them: of `questions`
            the first is asked, `answer` is what held before any edit, and `single_hops` are counted.
        per_group: Questions of each group, after a shuffle with `seed`.
        max_tokens: Longer ones are passed over.

    Raises:
        `ValueError`: where a field is missing, or a group has no question.
    """
    groups = {hops: f"{hops} hops" for hops in (2, 3, 4)}

    def read(row: dict) -> tuple[str, str, str] | None:
        hops = len(row["single_hops"])
        question, answer = row["questions"][0].strip(), row["answer"].strip()
        return (groups[hops], f"Question: {question}\nAnswer:", f" {answer}") if hops in groups else None

    names = list(groups.values())
    return _chosen(rows, tokenizer, read, lambda begin, _: [begin], names, per_group, Random(seed), max_tokens)


def plain_texts(source: str | Path, limit: int = 20) -> list[str]:
    """
    The first `limit` documents of `source`, a `.jsonl` file with a field `text`, of a text file, or of a data set of
    the Hub.

    Raises:
        `ValueError`: where there is none.
    """
    return [text for _, text in islice(read_texts(str(source), "texts"), limit)]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], max_tokens: int = 512) -> list[list[int]]:
    """
    Token ids of each text, with the begin-of-text token where the tokenizer puts one, cut after `max_tokens`. Texts of
    fewer than 16 tokens are dropped.

    Raises:
        `ValueError`: where none is left.
    """
    if max_tokens < FEWEST:
        raise ValueError(f"max_tokens={max_tokens} must be at least {FEWEST}.")
    rows = [tokenizer.encode(text)[:max_tokens] for text in texts]
    kept = [row for row in rows if len(row) >= FEWEST]
    if not kept:
        raise ValueError(f"None of {len(rows)} texts has {FEWEST} tokens or more: use longer ones.")
    return kept


def random_rows(vocab_size: int, count: int = 20, length: int = 128, seed: int = 0) -> list[list[int]]:
    """
    `count` rows of `length` random tokens below `vocab_size`, for checkpoints without a tokenizer. Such rows say little
    of language.
    """
    generator = Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _items(rows: str | Path | Iterable[dict]) -> Iterable[dict]:
    if not isinstance(rows, (str, Path)):
        return rows
    if not Path(rows).is_file():
        raise ValueError(f"{str(rows)!r} is not a file: name a JSONL file, or pass its items.")
    return (row for _, row in read_json_lines(Path(rows)))


def _chosen(
    rows: str | Path | Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    read: Callable[[dict], tuple[str, str, str] | None],
    boundaries: Callable[[int, int], Sequence[int]],
    groups: list[str],
    per_group: int,
    generator: Random,
    max_tokens: int,
) -> Texts:
    """`per_group` shuffled items of each group, read as (group, context, answer)."""
    items = list(_items(rows))
    generator.shuffle(items)
    found: dict[str, list[tuple[list[int], list[int]]]] = {group: [] for group in groups}
    for row in items:
        try:
            item = read(row)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"An item with the fields {', '.join(row)} does not fit: {error!r}.") from None
        if item is None or len(found[item[0]]) >= per_group:
            continue
        group, context, answer = item
        whole = tokenizer.encode(context + answer)
        begin = continuation_begin(whole, tokenizer.encode(context))
        if 1 <= begin < len(whole) <= max_tokens:
            found[group].append((whole, list(boundaries(begin, len(whole)))))
    if empty := [group for group, texts in found.items() if not texts]:
        raise ValueError(
            f"Of {len(items)} items none of at most max_tokens={max_tokens} tokens is of {', '.join(empty)}."
        )
    return Texts(
        [row for texts in found.values() for row, _ in texts],
        [places for texts in found.values() for _, places in texts],
        [group for group, texts in found.items() for _ in texts],
    )
