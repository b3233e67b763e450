"""
Whether a change of recipe moved phi (arXiv 2604.21106, section 6; 3.7 of its spec): Delta phi of two variants' runs with
an interval, or why their baselines do not allow one.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from . import fit
from .family import ISO_DEPTH, Family
from .fit import Bootstrap, bootstrap, fit_joint_law
from .law import JointLaw
from .report import LEVEL, MADE_BY, UNIDENTIFIED, few_restarts, interval_text, plain, table, write_flops


TOLERANCE = 0.005  # nats between runs of one baseline, which two seeds of it stay within


@dataclass(frozen=True, eq=False)
class Comparison:
    """
    phi of two variants over the same baseline.

    Attributes:
        names: What the text calls them.
        laws: The joint laws; `None` where void, as nothing is fitted then.
        void: Why the two phis may not be compared; empty where they may.
        bootstraps: Of each law, resample by resample comparable; `None` where void.
        shared_baseline: Whether both have the very same runs at r = 1, whose cells were then drawn jointly.
        notes: What a reader has to know.
    """

    names: tuple[str, str]
    laws: tuple[JointLaw, JointLaw] | None
    void: tuple[str, ...]
    bootstraps: tuple[Bootstrap, Bootstrap] | None
    shared_baseline: bool
    notes: tuple[str, ...] = ()

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Why a phi is not identified, of each where it is not."""
        named = zip(self.names, self.bootstraps or ())
        return tuple(f"phi of {name} is {UNIDENTIFIED}: {of.reason}" for name, of in named if not of.identified)

    @property
    def delta(self) -> float | None:
        """phi of the second less that of the first; `None` where void or not identified."""
        return None if self.void or self.unidentified else self.laws[1].phi - self.laws[0].phi

    @property
    def draws(self) -> np.ndarray | None:
        """`(resamples,)` of `delta`."""
        if self.delta is None:
            return None
        return self.bootstraps[1].draws["phi"].to_numpy() - self.bootstraps[0].draws["phi"].to_numpy()

    def interval(self, level: float = LEVEL) -> tuple[float, float] | None:
        """The percentile interval of `delta`."""
        if self.delta is None:
            return None
        low, high = np.quantile(self.draws, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    @property
    def p(self) -> float | None:
        """Two-sided, of no difference: how rarely zero is on one side of the draws, at least one draw's share."""
        if self.delta is None:
            return None
        return float(min(1.0, max(2 * min((self.draws <= 0).mean(), (self.draws >= 0).mean()), 1 / len(self.draws))))

    def text(self) -> str:
        lines = []
        if self.void:
            lines += ["The comparison is void: phi is relative to its baseline at r = 1, and these two differ.", ""]
            lines += [f"- {reason}" for reason in self.void]
        elif self.unidentified:
            lines += ["There is no Delta phi:", "", *(f"- {reason}" for reason in self.unidentified)]
        else:
            pairs = list(zip(self.names, self.laws, self.bootstraps))
            rows = [
                [name, str(law.num_runs), f"{law.phi:.3f}", interval_text(of.interval("phi", LEVEL))]
                for name, law, of in pairs
            ]
            lines += [*table(["runs", "number", "phi", f"{LEVEL:.0%} interval"], rows), ""]
            count = len(self.draws)
            sign = "p < " if self.p <= 1 / count else "p = "
            drawn = "those at r = 1 drawn for both at once" if self.shared_baseline else "drawn for each on its own"
            lines.append(
                f"Delta phi = {self.delta:+.3f} {interval_text(self.interval(), '+.3f')}, {sign}{self.p:.2g} "
                f"({self.names[1]} - {self.names[0]}; {LEVEL:.0%} interval of {count} resamples of cells, {drawn})."
            )
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict:
        """For JSON; without laws where the comparison is void or a phi is not identified."""
        values = {
            "made_by": f"{MADE_BY} compare",
            "names": self.names,
            "void": self.void,
            "unidentified": self.unidentified,
            "delta_phi": self.delta,
            "interval": self.interval(),
            "level": LEVEL,
            "p": self.p,
            "resamples": None if self.bootstraps is None else len(self.bootstraps[0].draws),
            "shared_baseline": self.shared_baseline,
            "laws": None if self.delta is None else [law.to_dict() for law in self.laws],
            "notes": self.notes,
        }
        return plain(values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def compare_phi(
    frame_a: pd.DataFrame,
    frame_b: pd.DataFrame,
    decomposition: str | None = None,
    tolerance: float = TOLERANCE,
    shared_budgets: bool = False,
    restarts: int = 500,
    resamples: int = 200,
    seed: int = 0,
    random_starts: int = 3,
    family: Family = ISO_DEPTH,
    processes: int = 1,
    names: tuple[str, str] = ("A", "B"),
) -> Comparison:
    """
    Whether the second variant's recurrences are worth more than the first's: Delta phi of two block bootstraps. Where
    both have the same runs at r = 1, to the digit, each resample draws as many and the same of these cells for both.

    The comparison is void where the baselines differ (section 3.7): budgets, a run at r = 1 that one lacks at some
    (budget, width), losses at r = 1 that differ by more than `tolerance` nats, or decompositions.

    Args:
        frame_a, frame_b: Runs of the two variants, as `read_runs` returns them.
        shared_budgets: Leaves out budgets that only one of them has, instead of voiding the comparison.
        random_starts: Starts of each resample's fit besides that of the whole fit.
        names: Of the two, for errors and text.

    Raises:
        `ValueError`: as in `fit_joint_law`, with the name of the runs.
    """
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance={tolerance} must be a number of nats, at least 0.")
    frames, notes = [frame_a, frame_b], []
    chosen = [_named(name, fit.decomposition_of, frame, decomposition) for name, frame in zip(names, frames)]
    budgets = [
        set(map(_budget, _named(name, fit.read_cells, frame, of, family)[0].budgets))
        for name, frame, of in zip(names, frames, chosen)
    ]
    if shared_budgets and budgets[0] != budgets[1]:
        kept = budgets[0] & budgets[1]
        if not kept:
            raise ValueError(f"{names[0]} and {names[1]} share no budget.")
        notes += [f"Left out of {name}: C = {_list(of - kept)}." for name, of in zip(names, budgets) if of - kept]
        frames = [frame[[_budget(value) in kept for value in frame["budget_flops"]]] for frame in frames]
    by_width = all("d_model" in frame for frame in frames)
    dense = [_dense_runs(frame, family, by_width) for frame in frames]
    void = list(_why_void(frames, dense, chosen, names, tolerance))
    counts = [sorted(set(map(int, frame["r"]))) for frame in frames]
    if counts[0] != counts[1]:
        there = " and ".join(f"r = {_list(of)} in {name}" for name, of in zip(names, counts))
        notes.append(f"{there}: each phi is of its own range.")
    if void:
        return Comparison(tuple(names), None, tuple(void), None, False, tuple(notes))
    options = {"restarts": restarts, "seed": seed, "family": family, "processes": processes}
    laws = tuple(
        _named(name, fit_joint_law, frame, of, None, **options) for name, frame, of in zip(names, frames, chosen)
    )
    notes += [note for name, law in zip(names, laws) for note in few_restarts(law, f"the law of {name}")]
    shared = dense[0].equals(dense[1])
    again = {"resamples": resamples, "random_starts": random_starts, "family": family, "processes": processes}
    bootstraps = (_joint_bootstraps if shared else _independent_bootstraps)(frames, laws, names, seed, **again)
    return Comparison(tuple(names), laws, (), bootstraps, shared, tuple(notes))


def run_names(*runs: tuple[str | Path, str | None]) -> tuple[str, ...]:
    """What to call runs of files and their variants: all different."""
    names = [Path(path).stem + (f":{variant}" if variant else "") for path, variant in runs]
    return tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1))


def _named(name: str, function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _budget(value: float) -> float:
    """Budgets are equal to six digits, however they were written."""
    return float(f"{value:.6g}")


def _list(values: Iterable[float]) -> str:
    return ", ".join(write_flops(value) for value in sorted(values))


def _dense_runs(frame: pd.DataFrame, family: Family, by_width: bool) -> pd.DataFrame:
    """The runs at r = 1 as sorted `(budget, size, tokens, loss)`; size is the width or the parameters."""
    dense = frame[frame["r"] == 1]
    sizes = dense["d_model"] if by_width or dense.empty else fit.sizes(dense, family)[0]
    columns = {"budget": dense["budget_flops"].map(_budget), "size": sizes}
    columns |= {"tokens": dense["tokens"], "loss": dense["val_loss"]}
    return pd.DataFrame(columns).astype(float).sort_values(list(columns)).reset_index(drop=True)


def _why_void(frames, dense, decompositions, names: Sequence[str], tolerance: float) -> Iterable[str]:
    a, b = names
    if decompositions[0] != decompositions[1]:
        yield f"The decomposition is {decompositions[0]} in {a} and {decompositions[1]} in {b}: choose one for both."
    budgets = [set(map(_budget, frame["budget_flops"])) for frame in frames]
    for name, here, there in ((a, *budgets), (b, *reversed(budgets))):
        if here - there:
            yield f"Only {name} has runs at C = {_list(here - there)}: leave these out (--shared-budgets)."
    if not len(dense[0]) or not len(dense[1]):
        yield f"There are no runs at r = 1 in {' and '.join(name for name, of in zip(names, dense) if not len(of))}."
        return
    dense = [runs.groupby(["budget", "size"])["loss"].mean() for runs in dense]  # over seeds
    common = budgets[0] & budgets[1]
    for name, here, there in ((a, *dense), (b, *reversed(dense))):
        lacking = [key for key in there.index.difference(here.index) if key[0] in common]
        if lacking:
            at = "; ".join(f"C = {write_flops(budget)}, size {size:g}" for budget, size in lacking[:3])
            yield f"{name} lacks {len(lacking)} of the runs at r = 1: {at}{'; ...' if len(lacking) > 3 else ''}."
    both = dense[0].index.intersection(dense[1].index)
    differences = (dense[1][both] - dense[0][both]).abs()
    if len(both) and differences.max() > tolerance:
        budget, size = differences.idxmax()
        first, second = (of[(budget, size)] for of in dense)
        yield (
            f"{(differences > tolerance).sum()} of {len(both)} losses at r = 1 differ by more than {tolerance:g} nats, "
            f"most at C = {write_flops(budget)}, size {size:g}: {first:.4f} in {a} and {second:.4f} in {b}."
        )


def _independent_bootstraps(frames, laws, names, seed: int, **options) -> tuple[Bootstrap, Bootstrap]:
    pairs = zip(names, frames, laws, (seed, seed + 1))
    return tuple(_named(name, bootstrap, frame, law, seed=of, **options) for name, frame, law, of in pairs)


def _joint_bootstraps(
    frames, laws, names, seed: int, resamples: int, random_starts: int, family: Family, processes: int
) -> tuple[Bootstrap, Bootstrap]:
    """
    As `fit.bootstrap` for each, but that a resample has the same cells at r = 1 in both: as many of these as falls to
    them among all cells of the first, and for each variant as many others as make up the number of its cells.
    """
    rng = np.random.default_rng(seed)
    parts = [fit.read_cells(frame, law.decomposition, family) for frame, law in zip(frames, laws)]
    numbers, dense = [], []
    for runs, _, cells in parts:
        numbers.append(int(cells.max()) + 1)
        is_dense = np.zeros(numbers[-1], bool)
        is_dense[cells[runs.r == 1]] = True
        dense.append(is_dense)  # in the order of budgets in both, as cells are numbered
    num_dense, jobs, redrawn = int(dense[0].sum()), ([], []), 0
    while len(jobs[0]) < resamples:
        drawn = rng.multinomial(rng.binomial(numbers[0], num_dense / numbers[0]), np.full(num_dense, 1 / num_dense))
        weights = []
        for (_, _, cells), number, is_dense in zip(parts, numbers, dense):
            counts = np.zeros(number)
            counts[is_dense] = drawn
            others = number - num_dense
            counts[~is_dense] = rng.multinomial(max(0, number - drawn.sum()), np.full(others, 1 / others))
            weights.append(counts[cells])
        if all(runs.is_fittable(of > 0) for (runs, _, _), of in zip(parts, weights)):
            for (_, problem, _), law, of, into in zip(parts, laws, weights, jobs):
                starts = fit.uniform_starts(rng, random_starts, problem.bounds)
                into.append((replace(problem, weights=of), fit.start_of(law), starts))
        else:
            redrawn += 1
            if redrawn > 100 * resamples:
                few = " and ".join(names)
                raise ValueError(f"The cells of {few} are too few to resample: add budgets or recurrence counts.")
    return tuple(
        fit.bootstrap_of(law, problem, into, number, seed, redrawn, processes)
        for (_, problem, _), law, into, number in zip(parts, laws, jobs, numbers)
    )


__all__ = ["TOLERANCE", "Comparison", "compare_phi", "run_names"]
