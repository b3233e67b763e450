"""
Whether texts that a model was trained on hold the items it is tested on: shared n-grams of words, as in arXiv
2005.14165 (appendix C), which ignores case and punctuation and takes at most 13 words.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


FEWEST_WORDS = 5  # of an item that is shorter than an n-gram: fewer words are found anywhere


@dataclass(frozen=True)
class Overlap:
    """
    What of `items` the texts hold.

    Attributes:
        items: How many there are.
        unjudged: How many of them are too short to tell.
        touched: Numbers of the items that have at least one n-gram in the texts, from 0, in order.
        mean_share: The share of an item's different n-grams that the texts have, mean over the items judged; not a
            number where there are none.
        n: Words in an n-gram.
    """

    items: int
    unjudged: int
    touched: tuple[int, ...]
    mean_share: float
    n: int = 13

    @property
    def num_touched(self) -> int:
        return len(self.touched)

    @property
    def judged(self) -> int:
        return self.items - self.unjudged

    @property
    def share(self) -> float:
        """Of the items judged, those with at least one n-gram in the texts; not a number where there are none."""
        return self.num_touched / self.judged if self.judged else math.nan


def words(text: str) -> list[str]:
    """The words of `text` in lower case, without what is neither letter nor digit."""
    return _PUNCTUATION.sub("", text.lower()).split()


_PUNCTUATION = re.compile(r"[^\w\s]|_")


def overlap(texts: Iterable[str], items: Sequence[str], n: int = 13) -> Overlap:
    """
    Look for the n-grams of `items` in `texts`, which are read once and not kept.

    Args:
        texts: Of the training data; `(text for _, text in read_texts(source))` of `recipes.corpus`, for one.
        items: A text each, such as `task_texts` gives.
        n: Words in an n-gram. An item with fewer is one n-gram of all its words if it has at least 5, and cannot be
            judged otherwise.

    Raises:
        `ValueError`: for an n below 1, for no items, and for one string in place of several.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1, the number of words in an n-gram; 13 is usual.")
    for name, value in (("texts", texts), ("items", items)):
        if isinstance(value, str):
            raise ValueError(f"{name} is one string, {value[:40]!r}: give a list of them.")
    if not items:
        raise ValueError("items is empty: there is nothing to look for. Give the text of at least one item.")
    numbers: dict[str, int] = {}  # of the different n-grams, in which words are parted by a space
    sizes: dict[str, set[int]] = {}  # by the first word: only there can an n-gram begin, and it has so many words
    grams_of = [{numbers.setdefault(gram, len(numbers)) for gram in _item_grams(item, n, sizes)} for item in items]
    found = bytearray(len(numbers))
    for text in texts:
        read = words(text)
        for start, first in enumerate(read):
            for size in sizes.get(first, ()):
                # Near the end of a text this is shorter than `size`, and another n-gram that is there just as well.
                number = numbers.get(" ".join(read[start : start + size]))
                if number is not None:
                    found[number] = 1
    shares = [sum(found[number] for number in grams) / len(grams) if grams else None for grams in grams_of]
    judged = [share for share in shares if share is not None]
    touched = tuple(number for number, share in enumerate(shares) if share)
    mean_share = math.fsum(judged) / len(judged) if judged else math.nan
    return Overlap(len(items), len(items) - len(judged), touched, mean_share, n)


def _item_grams(item: str, n: int, sizes: dict[str, set[int]]) -> list[str]:
    """The n-grams of an item, none if it is too short; notes the size of each under its first word."""
    read = words(item)
    if len(read) < n:
        n = len(read)
        if n < FEWEST_WORDS:
            return []
    starts = range(len(read) - n + 1)
    for start in starts:
        sizes.setdefault(read[start], set()).add(n)
    return [" ".join(read[start : start + n]) for start in starts]


def task_texts(task) -> list[str]:
    """
    The text of each test item of a task of ours: what is read, then the right answer (the first, where several are).
    No shots are in it, and no wrong choice.

    Args:
        task: A `modeling_looped.eval.task.LoopedTask`, as lm-eval's `TaskManager` loads it.
    """
    return [_item_text(doc, task.config.target_delimiter) for doc in task.test_docs()]


def _item_text(doc: dict, delimiter: str) -> str:
    if "text" in doc:
        return doc["text"]
    gold = doc.get("gold", 0)
    context = doc["contexts"][gold] if "contexts" in doc else doc["context"]
    if "choices" in doc and "contexts" not in doc:
        answer = doc["choices"][gold]
    else:
        answer = doc["continuation"] if "continuation" in doc else doc["answers"][0]
    return f"{context}{delimiter}{answer}"


def contamination_rows(rows: Iterable[tuple[str, Overlap]]) -> list[dict]:
    """What `contamination_table` says, and which items it is, by their numbers from 0."""
    return [
        {
            "task": name,
            "items": found.items,
            "too_short": found.unjudged,
            "n": found.n,
            "items_touched": found.num_touched,
            "touched": list(found.touched),
            "share_of_items": found.share,
            "mean_share_of_ngrams": found.mean_share,
        }
        for name, found in rows
    ]


def contamination_table(rows: Iterable[tuple[str, Overlap]]) -> str:
    """A Markdown table of names, such as those of tasks, and what was found of each."""
    lines = [
        "| task | items | too short | n | items touched | share of items | mean share of n-grams |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, found in rows:
        shares = " | ".join("–" if math.isnan(share) else f"{share:.1%}" for share in (found.share, found.mean_share))
        lines.append(f"| {name} | {found.items} | {found.unjudged} | {found.n} | {found.num_touched} | {shares} |")
    return "\n".join(lines)
