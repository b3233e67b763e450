"""
What runs say about phi: the tables of arXiv 2604.21106 (section 3.4 of its spec) with intervals and warnings, as text,
JSON and figures. A frame of runs is as in `fit`; a CSV may have `#` comments, and a column `variant` of several recipes
that share the runs at r = 1.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from . import fit
from .allocation import Exponents, allocation_exponents, effective_ratio, empirical_optimum, unique_ratio
from .family import DECOMPOSITIONS, ISO_DEPTH, Family
from .fit import Bootstrap, bootstrap, fit_chinchilla, fit_joint_law, half_budgets, leave_one_cell_out, residual_table
from .law import ChinchillaLaw, JointLaw


MADE_BY = "looped phi"
LEVEL = 0.95
REQUIRED = ("budget_flops", "r", "tokens", "val_loss")
BASELINE = "baseline"
UNIDENTIFIED, NONE = "not identified", "—"
MOST_RECURRENCES = 16  # r^phi is a local form, before recurrences saturate


# Reading


def read_runs(path: str | Path, variant: str | None = None) -> pd.DataFrame:
    """
    The runs of one variant in the CSV at `path`; the index is the line of the file, which errors name as the row. A
    variant without runs at r = 1 gets those of the variant that has them, `"baseline"` where several do, at its own
    budgets.

    Args:
        variant: By default the only one, or the only one with runs at r > 1.

    Raises:
        `ValueError`: where the file is no CSV of runs, or has no such variant or several to choose from.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: name a CSV with one row a run.")
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    lines = ["" if line.startswith("#") else line for line in lines]  # not removed: pandas counts lines in its errors
    try:
        frame = pd.read_csv(StringIO("\n".join(lines)), skipinitialspace=True, index_col=False)
    except ValueError as error:
        raise ValueError(f"{path} is no CSV of runs: {' '.join(str(error).split())}") from None
    missing = [name for name in REQUIRED if name not in frame]
    if missing:
        raise ValueError(
            f"{path} lacks the column {', '.join(map(repr, missing))}; it has {', '.join(map(str, frame.columns))}. "
            f"A run needs {', '.join(REQUIRED)}, and d_model or the counts of its parameters."
        )
    if frame.empty:
        raise ValueError(f"{path} has a header and no runs.")
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()][1:]
    if len(numbers) == len(frame):
        frame.index = pd.Index(numbers, dtype=object, name="line")  # plain numbers in errors
    for name in REQUIRED:
        values = pd.to_numeric(frame[name], errors="coerce")
        if (wrong := values.isna() & frame[name].notna()).any():
            line = frame.index[wrong][0]
            raise ValueError(f"{path}, line {line}: {name} is {frame.loc[line, name]!r}, and must be a number.")
        frame[name] = values
    return _choose_variant(frame, variant, path)


def _choose_variant(frame: pd.DataFrame, variant: str | None, path: Path) -> pd.DataFrame:
    if "variant" not in frame:
        if variant is not None:
            raise ValueError(f"{path} has no column 'variant', and so no variant {variant!r}.")
        return frame
    frame = frame.assign(variant=frame["variant"].astype(str))
    names, looped = list(dict.fromkeys(frame["variant"])), list(dict.fromkeys(frame["variant"][frame["r"] != 1]))
    if variant is None and len(names) > 1 and len(looped) != 1:
        raise ValueError(f"{path} has the variants {', '.join(names)}: choose one.")
    if variant is None:
        variant = (looped if len(looped) == 1 else names)[0]
    if variant not in names:
        raise ValueError(f"{path} has no variant {variant!r}: it has {', '.join(names)}.")
    own, dense = frame[frame["variant"] == variant], frame[frame["r"] == 1]
    anchors = list(dict.fromkeys(dense["variant"]))
    if variant in anchors or not anchors:
        return own
    if len(anchors) > 1 and BASELINE not in anchors:
        several = ", ".join(anchors)
        raise ValueError(f"{path}: {variant!r} has no runs at r = 1, and {several} all have: call one {BASELINE!r}.")
    anchor = BASELINE if BASELINE in anchors else anchors[0]
    shared = dense[(dense["variant"] == anchor) & dense["budget_flops"].isin(own["budget_flops"])]
    return pd.concat([shared, own]).assign(variant=variant)


# The report


@dataclass(frozen=True, eq=False)
class PhiReport:
    """
    Everything that `looped phi` says of the runs of one variant.

    Attributes:
        runs: The frame, with `n_unique`.
        law: The joint law with phi fitted; `none` and `full` are refitted with phi = 0 and phi = 1.
        chinchilla: By r, the law of its runs alone, where they are enough for one.
        bootstrap: Refits of `law`, or `None` where the cells are too few to resample.
        reason: Why phi is not identified, `None` where it is.
        residuals: `fit.residual_table` of `law`.
        halves: `"low"` and `"high"` budgets with their laws; empty where they are too few.
        leave_one_out: `fit.leave_one_cell_out`, a row a cell.
        exponents: By r, `"power_law"` and `"exact"` exponents of its Chinchilla law; empty without `has_family`.
        optima: Empirical optima, a row a cell that has one: `budget_flops`, `r`, `runs`, `n_unique`, `loss`, `gap` to
            r = 1, and `is_inside`, whether it lies among the widths that were run.
        has_family: Whether the runs have the parameters and FLOPs of `family`, which says what a budget buys.
        warnings: What a reader has to know.
    """

    runs: pd.DataFrame
    law: JointLaw
    none: JointLaw
    full: JointLaw
    chinchilla: Mapping[int, ChinchillaLaw]
    bootstrap: Bootstrap | None
    reason: str | None
    residuals: pd.DataFrame
    halves: Mapping[str, JointLaw]
    leave_one_out: pd.DataFrame
    exponents: Mapping[int, Mapping[str, Exponents]]
    optima: pd.DataFrame
    family: Family = ISO_DEPTH
    has_family: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        """Whether the runs determine phi at all."""
        return self.reason is None

    @property
    def budgets(self) -> list[float]:
        return sorted(map(float, self.runs["budget_flops"].unique()))

    @property
    def recurrences(self) -> list[int]:
        return sorted(map(int, self.runs["r"].unique()))

    def interval(self, name: str = "phi", level: float = LEVEL) -> tuple[float, float] | None:
        """Of the parameter `name`, from the bootstrap; `None` without one or where phi is not identified."""
        return self.bootstrap.interval(name, level) if self.bootstrap and self.identified else None

    def text(self) -> str:
        """Markdown, with columns aligned for a terminal."""
        return _text(self)

    def to_dict(self) -> dict:
        """For JSON, without NaN: `"laws"` are of `JointLaw.to_dict`, and phi's value is null where not identified."""
        return _to_dict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def phi_report(
    frame: pd.DataFrame,
    decomposition: str | None = None,
    restarts: int = 500,
    resamples: int = 200,
    seed: int = 0,
    random_starts: int = 3,
    family: Family = ISO_DEPTH,
    processes: int = 1,
    progress: bool = False,
) -> PhiReport:
    """
    Fits everything of section 3.4: about `restarts` fits for each of the three joint laws, each half and each r, and
    `resamples` refits with `random_starts` uniform starts each. The law and its bootstrap are what `fit_joint_law` and
    `bootstrap` give with the same arguments. `progress` writes to stderr what is being done.

    Raises:
        `ValueError`: as in `fit_joint_law`, where the runs have no joint law. Whatever else they do not allow is left
            out of the report, with a warning.
    """
    shared = {"restarts": restarts, "seed": seed, "family": family, "processes": processes}
    again = {"random_starts": random_starts, "seed": seed, "family": family, "processes": processes}
    warnings: list[str] = []

    def attempt(what: str, function, *arguments, **options):
        """Its result, or `None` and a warning."""
        if progress:
            print(f"{what} ...", file=sys.stderr, flush=True)
        try:
            return function(*arguments, **options)
        except ValueError as error:
            warnings.append(f"{what}: {error}")
            return None

    if progress:
        print("joint laws ...", file=sys.stderr, flush=True)
    law, none, full = (fit_joint_law(frame, decomposition, phi, **shared) for phi in (None, 0.0, 1.0))
    draws, reason = None, None
    if progress:
        print("bootstrap ...", file=sys.stderr, flush=True)
    try:
        draws = bootstrap(frame, law, resamples, **again)
        reason = draws.reason
    except ValueError as error:
        reason = str(error)
    if "n_unique" not in frame:
        own = law.decomposition not in DECOMPOSITIONS
        frame = frame.assign(n_unique=frame["n_once"] + frame["n_rec"] if own else fit.sizes(frame, family)[0])
    chinchilla = {
        int(r): found
        for r, runs in frame.groupby("r")
        if (found := attempt(f"law of r = {r:g} alone", fit_chinchilla, runs, **shared)) is not None
    }
    halves = attempt("halves of the budgets", half_budgets, frame, law.decomposition, **shared) or {}
    left = attempt("leaving one cell out", leave_one_cell_out, frame, law, **again)
    exponents = {}
    if has_family := law.decomposition in DECOMPOSITIONS and _is_of(family, frame):
        budgets = sorted(map(float, frame["budget_flops"].unique()))
        for r, of in chinchilla.items():
            methods = {"power_law": {}, "exact": {"budgets": budgets}}
            found = {
                name: attempt(f"{name} exponents, r = {r}", allocation_exponents, of, r, name, family=family, **more)
                for name, more in methods.items()
            }
            if None not in found.values():
                exponents[r] = found
    else:
        warnings.append(
            "The runs are not of the family that was given, or not with its training FLOPs: no widths for a budget "
            "follow from the laws, so there are neither exponents nor frontiers."
        )
    optima, remarks = _optima(frame, family)
    report = PhiReport(
        runs=frame,
        law=law,
        none=none,
        full=full,
        chinchilla=chinchilla,
        bootstrap=draws,
        reason=reason,
        residuals=residual_table(frame, law, family),
        halves=halves,
        leave_one_out=pd.DataFrame(columns=["budget_flops", "r", "runs", "phi"]) if left is None else left,
        exponents=exponents,
        optima=optima,
        family=family,
        has_family=has_family,
    )
    return replace(report, warnings=(*_cautions(report), *remarks, *warnings))


def _is_of(family: Family, frame: pd.DataFrame) -> bool:
    """Not where runs have other parameters or FLOPs: of fewer layers, a truncated backward pass, another injection."""
    if "d_model" not in frame:
        return True
    widths, r = (frame[name].to_numpy(float) for name in ("d_model", "r"))
    flops = frame["flops_per_token"] if "flops_per_token" in frame else frame["budget_flops"] / frame["tokens"]
    is_near = np.abs(np.log(frame["n_unique"] / family.n_all(widths, r))) < 0.01
    return bool((is_near & (np.abs(np.log(flops / family.flops_per_token(widths, r))) < 0.03)).all())


def _optima(frame: pd.DataFrame, family: Family) -> tuple[pd.DataFrame, list[str]]:
    """The empirical optimum of every cell that has one, and what to say of the others."""
    rows, few, bent, outside, cells = [], 0, [], [], 0
    for (budget, r), cell in frame.groupby(["budget_flops", "r"]):
        cells += 1
        if cell["n_unique"].nunique() < 3:
            few += 1
            continue
        try:
            at = empirical_optimum(cell, family)
        except ValueError:
            bent.append(f"C = {write_flops(budget)} at r = {r:g}")
            continue
        inside = bool(cell["n_unique"].min() <= at.n_unique <= cell["n_unique"].max())
        if not inside:
            outside.append(f"C = {write_flops(budget)} at r = {r:g}")
        row = {"budget_flops": float(budget), "r": int(r), "runs": len(cell), "n_unique": at.n_unique, "loss": at.loss}
        rows.append(row | {"is_inside": inside})
    remarks = []
    if few:
        have = "cell has" if few == 1 else "cells have"
        remarks.append(f"{few} of {cells} {have} fewer than 3 widths, and so no empirical optimum.")
    if bent:
        remarks.append(f"Losses without a minimum over the widths, and so no empirical optimum: {'; '.join(bent)}.")
    if outside:
        remarks.append(f"Optima outside the widths that were run, which are extrapolated: {'; '.join(outside)}.")
    optima = pd.DataFrame(rows, columns=["budget_flops", "r", "runs", "n_unique", "loss", "is_inside"])
    dense = optima[optima["r"] == 1].set_index("budget_flops")["loss"]
    optima["gap"] = optima["loss"] - optima["budget_flops"].map(dense).astype(float)
    return optima, remarks


def _cautions(report: PhiReport) -> Iterable[str]:
    law, recurrences = report.law, report.recurrences
    laws = {"the joint law": law, "the law with phi = 0": report.none, "the law with phi = 1": report.full}
    for name, of in {**laws, **{f"the law of r = {r}": of for r, of in report.chinchilla.items()}}.items():
        if of.at_bounds:
            yield f"On the edge of the box that is searched, not to be trusted: {', '.join(of.at_bounds)} of {name}."
    yield from few_restarts(law, "the joint law")
    if recurrences[0] != 1:
        yield "There are no runs at r = 1: phi is not anchored to dense models, and not to be compared with any other."
    if recurrences[-1] > MOST_RECURRENCES:
        yield f"r = {recurrences[-1]}: r^phi is a local form, not to be read beyond r = {MOST_RECURRENCES}."
    gaps = report.optima[report.optima["r"] > 1].groupby("r")["gap"].mean().dropna()
    if (gaps < 0).any() and (gaps > 0).any():
        better, worse = (", ".join(f"{r}" for r in gaps.index[sign]) for sign in (gaps < 0, gaps > 0))
        yield f"r = {better} beats r = 1 and r = {worse} trails it: one phi does not describe both."
    if report.bootstrap and report.bootstrap.redrawn:
        yield (
            f"{report.bootstrap.redrawn} resamples had one budget or one recurrence count only, and were drawn again: "
            f"{report.bootstrap.cells} cells are few."
        )


def few_restarts(law: JointLaw, name: str) -> Iterable[str]:
    if law.restarts and law.restarts_at_best is not None and law.restarts_at_best < min(3, law.restarts):
        yield f"Only {law.restarts_at_best} of {law.restarts} starts reached {name}: try more restarts."


def write_flops(budget: float) -> str:
    return f"{budget:.3g}".replace("e+", "e")


# Text


def _text(report: PhiReport) -> str:
    law, runs = report.law, report.runs
    budgets = report.budgets
    variant = f" of {runs['variant'].iloc[0]}" if "variant" in runs else ""
    lines = [
        f"{law.num_runs} runs{variant} at {len(budgets)} budgets, {write_flops(budgets[0])} to "
        f"{write_flops(budgets[-1])} FLOPs, r = {', '.join(map(str, report.recurrences))}; "
        f"decomposition {law.decomposition}.",
        "",
    ]
    if report.identified:
        draws = report.bootstrap
        lines.append(
            f"phi = {law.phi:.3f} {interval_text(report.interval())}, the {LEVEL:.0%} interval of {len(draws.draws)} "
            f"resamples of {draws.cells} cells."
        )
    else:
        lines.append(f"phi is {UNIDENTIFIED} by these runs: {report.reason}")
    lines += ["", "## Joint law: L = E + A (N_once + r^phi N_rec)^-alpha + B D^-beta", "", *_joint_table(report)]
    if report.chinchilla:
        lines += ["", "## Each r alone: L = E + A N^-alpha + B D^-beta", ""]
        head = ["r", "runs", "A", "alpha", "B", "beta", "E", "Huber x 1e5", "R2"]
        lines += table(head, ([str(r), str(of.num_runs), *_law_cells(of)] for r, of in report.chinchilla.items()))
    lines += ["", "## Residuals of the joint law (measured - predicted, nats)", ""]
    rows = [
        [str(r), f"{row['runs']:.0f}", f"{row['mean']:+.4f}", f"{row['max']:.4f}", f"{row['rmse']:.4f}"]
        for r, row in report.residuals.iterrows()
    ]
    lines += table(["r", "runs", "mean", "max", "RMSE"], rows)
    if rows := list(_robustness(report)):
        lines += ["", "## phi without some of the runs", "", *table(["runs that are kept", "number", "phi"], rows)]
    if report.exponents:
        lines += ["", "## Compute-optimal allocation: N* ~ C^x, D* ~ C^y, from the law of each r", ""]
        lines += _allocation_table(report)
    if len(report.optima):
        lines += ["", "## Loss at each cell's empirical optimum (above r = 1), nats", "", *_optima_table(report)]
    if report.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in report.warnings)]
    return "\n".join(lines) + "\n"


def interval_text(interval: tuple[float, float] | None, form: str = ".3f") -> str:
    return NONE if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _law_cells(law: JointLaw | ChinchillaLaw) -> list[str]:
    shape = [f"{law.A:.4g}", f"{law.alpha:.4f}", f"{law.B:.4g}", f"{law.beta:.4f}", f"{law.E:.4f}"]
    huber = NONE if law.huber is None else f"{1e5 * law.huber:.2f}"
    return [*shape, huber, NONE if law.r2 is None else f"{law.r2:.4f}"]


def _joint_table(report: PhiReport) -> list[str]:
    free = f"{report.law.phi:.3f}" if report.identified else UNIDENTIFIED
    rows = [["fitted", free, *_law_cells(report.law)]]
    if report.identified:
        forms = {"phi": ".3f", "A": ".3g", "alpha": ".3f", "B": ".3g", "beta": ".3f", "E": ".3f"}
        intervals = [interval_text(report.interval(name), form) for name, form in forms.items()]
        rows.append([f"{LEVEL:.0%} interval", *intervals, NONE, NONE])
    rows += [[f"phi = {of.phi:.0f}", f"{of.phi:.0f}", *_law_cells(of)] for of in (report.none, report.full)]
    return table(["form", "phi", "A", "alpha", "B", "beta", "E", "Huber x 1e5", "R2"], rows)


def _robustness(report: PhiReport) -> Iterable[list[str]]:
    """Rows of what phi is for parts of the runs, with digits only where all of the runs give it."""

    def written(phi: float) -> str:
        return f"{phi:.3f}" if report.identified else UNIDENTIFIED

    if report.halves:
        budgets = report.budgets
        low, high = budgets[(len(budgets) - 1) // 2], budgets[(len(budgets) - 1) // 2 + 1]
        for name, bound in (("low", f"C <= {write_flops(low)}"), ("high", f"C >= {write_flops(high)}")):
            law = report.halves[name]
            yield [bound, str(law.num_runs), UNIDENTIFIED if "phi" in law.at_bounds else written(law.phi)]
    left = report.leave_one_out.dropna(subset=["phi"])
    if len(left) and report.identified:
        for what, row in (("least", left.loc[left["phi"].idxmin()]), ("most", left.loc[left["phi"].idxmax()])):
            cell = f"all but C = {write_flops(row.budget_flops)}, r = {row.r:.0f} ({what} of {len(left)} such)"
            yield [cell, str(len(report.runs) - int(row.runs)), written(row.phi)]


def _allocation_table(report: PhiReport) -> list[str]:
    rows = []
    for r, exponents in report.exponents.items():
        here = report.optima[report.optima["r"] == r]
        measured = NONE
        if len(here) > 1:
            measured = f"{np.polyfit(np.log(here['budget_flops']), np.log(here['n_unique']), 1)[0]:.2f}"
        worth = NONE
        if report.identified:
            worth = f"{effective_ratio(r, report.law.phi, report.law.decomposition, report.family):.3f}"
        power, exact = exponents["power_law"], exponents["exact"]
        rows.append(
            [str(r), *(f"{value:.2f}" for value in (*power, *exact)), measured]
            + [f"{unique_ratio(r, family=report.family):.3f}", worth]
        )
    head = ["r", "x", "y", "x, exact F(N)", "y, exact F(N)", "x of empirical optima", "N / N(r=1)", "N_eff / N(r=1)"]
    return table(head, rows)


def _optima_table(report: PhiReport) -> list[str]:
    optima, rows = report.optima.set_index(["r", "budget_flops"]), []
    for r in sorted(report.optima["r"].unique()):
        cells = []
        for budget in report.budgets:
            at = optima.loc[(r, budget)] if (r, budget) in optima.index else None
            gap = "" if at is None or r == 1 or math.isnan(at.gap) else f" ({at.gap:+.3f})"
            cells.append(NONE if at is None else f"{at.loss:.3f}{gap}{'' if at.is_inside else ' *'}")
        rows.append([str(r), *cells])
    lines = table(["r", *(f"C = {write_flops(budget)}" for budget in report.budgets)], rows)
    return lines if optima["is_inside"].all() else [*lines, "", "\\* extrapolated beyond the widths that were run."]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown that is aligned as it stands."""
    cells = [list(head), *map(list, rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))]
        for row in (cells[0], rule, *cells[1:])
    ]
    return ["| " + " | ".join(row) + " |" for row in padded]


# JSON


def _to_dict(report: PhiReport) -> dict:
    law, draws = report.law, report.bootstrap
    phi = {
        "value": law.phi if report.identified else None,
        "interval": report.interval(),
        "level": LEVEL,
        "identified": report.identified,
        "reason": report.reason,
    }
    fitted = None
    if draws is not None:
        fitted = {"resamples": len(draws.draws), "cells": draws.cells, "seed": draws.seed, "redrawn": draws.redrawn}
        fitted["intervals"] = {name: draws.interval(name, LEVEL) for name in draws.draws}
        fitted["phi"] = draws.draws["phi"].tolist()
    values = {
        "made_by": MADE_BY,
        "variant": str(report.runs["variant"].iloc[0]) if "variant" in report.runs else None,
        "num_runs": law.num_runs,
        "budgets": report.budgets,
        "recurrences": report.recurrences,
        "decomposition": law.decomposition,
        "phi": phi,
        "laws": {name: of.to_dict() for name, of in (("fitted", law), ("phi=0", report.none), ("phi=1", report.full))},
        "bootstrap": fitted,
        "chinchilla": {str(r): of.to_dict() for r, of in report.chinchilla.items()},
        "residuals": report.residuals.rename(index=str).to_dict("index"),
        "halves": {name: of.to_dict() for name, of in report.halves.items()},
        "leave_one_cell_out": report.leave_one_out.to_dict("records"),
        "exponents": {str(r): {how: of._asdict() for how, of in each.items()} for r, each in report.exponents.items()},
        "optima": report.optima.to_dict("records"),
        "warnings": list(report.warnings),
    }
    return plain(values)


def plain(value):
    """Without numpy's types, tuples or NaN."""
    if isinstance(value, dict):
        return {key: plain(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(of) for of in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_phi(frame: pd.DataFrame, output_dir: str | Path, overwrite: bool = False, **options) -> PhiReport:
    """
    `phi_report(frame, **options)`, written to `output_dir` as `phi.json` and the figures `phi_iso_flops.png`,
    `phi_frontier.png` and `phi_predicted.png`. Files of an earlier call are replaced.

    Raises:
        `ValueError`: before anything is fitted, where a file of such a name is not ours and `overwrite` is false; as in
            `phi_report`.
    """
    from .figures import FIGURES

    output = Path(output_dir)
    _refuse_others(output, ["phi.json", *FIGURES], overwrite)
    report = phi_report(frame, **options)
    output.mkdir(parents=True, exist_ok=True)
    (output / "phi.json").write_text(report.to_json(), encoding="utf-8")
    for name, draw in FIGURES.items():
        draw(report).savefig(output / name, dpi=150)
    return report


def _refuse_others(output: Path, names: Iterable[str], overwrite: bool) -> None:
    """Figures are ours where the `phi.json` beside them is."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: choose a folder for --output.")
    there = [name for name in names if (output / name).exists()]
    if not there or overwrite:
        return
    try:
        values = json.loads((output / "phi.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or values.get("made_by") != MADE_BY:
        raise ValueError(
            f"{output} has {', '.join(there)} not made by {MADE_BY}: choose another --output, or pass --overwrite."
        )


__all__ = ["MADE_BY", "PhiReport", "phi_report", "read_runs", "write_flops", "write_phi"]
