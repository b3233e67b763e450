"""
Metrics over scored items, and what chance does to them. An item's score is a number, whose metric is the mean over
items, or a pair such as (nats, tokens), whose metric is the sum of the first over the sum of the second.
"""

import functools
from collections.abc import Sequence

import numpy as np


RESAMPLES = 1000


def aggregate(scores: Sequence[float] | Sequence[tuple[float, float]]) -> float:
    """The metric of all `scores`: their mean, or of pairs the ratio of the sums."""
    numerators, denominators = _parts(scores)
    return float(numerators.sum() / denominators.sum())


def bootstrap_stderr(scores: Sequence, resamples: int = RESAMPLES, seed: int = 0) -> float:
    """
    Standard deviation of `aggregate` over `resamples` bootstrap samples of the items' `scores`; not a number for fewer
    than 2.
    """
    numerators, denominators = _parts(scores)
    if len(numerators) < 2:
        return float("nan")
    return float(np.std(_resampled(numerators, denominators, resamples, seed), ddof=1))


def paired_bootstrap(
    scores: Sequence, others: Sequence, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """
    `aggregate(scores) - aggregate(others)` over the same items: the difference, its bootstrap standard error, and the
    two-sided p-value of no difference. Each sample draws items, and takes both scores of each.

    Raises:
        `ValueError`: where the two do not score equally many items.
    """
    if len(scores) != len(others):
        raise ValueError(f"A paired bootstrap needs the same items: there are {len(scores)} and {len(others)} scores.")
    difference = aggregate(scores) - aggregate(others)
    # The same seed draws the same items for both.
    drawn = resampled(scores, resamples, seed) - resampled(others, resamples, seed)
    changed = int((np.asarray(scores) != np.asarray(others)).reshape(len(scores), -1).any(axis=1).sum())
    return difference, float(np.std(drawn, ddof=1)), p_value(drawn, changed)


def p_value(drawn: np.ndarray, changed: int) -> float:
    """
    Two-sided, of bootstrap samples of a difference: how rarely zero is on one side of them. At least one sample's share,
    and at least what a sign test over the `changed` items that differ can reach: a few that agree prove nothing. Not a
    number where a sample is none.
    """
    if not np.isfinite(drawn).all():
        return float("nan")
    rarely = 2 * min((drawn <= 0).mean(), (drawn >= 0).mean())
    return float(min(1.0, max(rarely, 1 / len(drawn), 2.0 ** (1 - changed))))


def resampled(scores: Sequence, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """`aggregate` of each of `resamples` bootstrap samples, for means over tasks. Shape (resamples,)."""
    return _resampled(*_parts(scores), resamples, seed)


def _parts(scores: Sequence) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(scores, dtype=np.float64)
    if values.size == 0:
        raise ValueError("There are no scores to take a metric of.")
    return (values, np.ones_like(values)) if values.ndim == 1 else (values[:, 0], values[:, 1])


def _resampled(numerators: np.ndarray, denominators: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    chosen, drawn = _chosen(len(numerators), resamples, seed), np.empty(resamples)
    step = max(1, 2**15 // len(numerators))  # samples at a time, for the processor's cache
    for i in range(0, resamples, step):
        rows = chosen[i : i + step]
        drawn[i : i + step] = numerators.take(rows).sum(1) / denominators.take(rows).sum(1)
    return drawn


@functools.lru_cache(maxsize=1)  # all runs and metrics of a task draw the same items
def _chosen(count: int, resamples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(resamples, count), dtype=np.int32)
