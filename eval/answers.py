"""Scores of free answers: F1 and exact match of SQuAD (arXiv 1606.05250), and the last number of a worked solution."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal


ARTICLES = re.compile(r"\b(a|an|the)\b")
# Commas belong to a number only where they part thousands, and a minus only where it is no operator.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+)")


def f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the normalised words, of the answer that fits best."""
    return max(_f1(_words(prediction), _words(answer)) for answer in answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the normalised text is that of one of the answers, else 0.0."""
    return float(_words(prediction) in map(_words, answers))


def numeric_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the last number of the text is that of one of the answers, else 0.0: lm-eval's `flexible-extract`."""
    number = _last_number(prediction)
    return float(number is not None and number in map(_last_number, answers))


def _words(text: str) -> list[str]:
    """In lower case, without punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return ARTICLES.sub(" ", bare).split()


def _f1(predicted: list[str], right: list[str]) -> float:
    if not predicted or not right:
        return float(predicted == right)
    return 2 * (Counter(predicted) & Counter(right)).total() / (len(predicted) + len(right))


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace("$", "").replace(",", "")) if numbers else None
