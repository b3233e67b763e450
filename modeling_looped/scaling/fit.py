"""
Scaling laws from runs: arXiv 2604.21106, section 4.2 and appendix F (sections 3.2 to 3.4 of its spec). A frame of runs
has one row a run and the columns of the reference table: `r`, `tokens`, `val_loss` (nats per token), `budget_flops`,
`variant` where there are several, and of the parameter counts those that the fit needs:

    joint, regression   `n_once_ls`, `n_rec_ls`; where they are not given, the family at `d_model`
    joint, paper        `n_once_paper`, `n_rec_paper`; where they are not given, the family at `d_model`
    joint, own          `n_once`, `n_rec`, for models of no iso-depth family
    Chinchilla          `n_unique`; where it is not given, the family at `d_model`, or else `n_once + n_rec`
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from ..configuration_looped import require_int
from .family import DECOMPOSITIONS, ISO_DEPTH, Family
from .law import ChinchillaLaw, JointLaw


HUBER_DELTA = 1e-3
BOX = {"a": (-5, 35), "alpha": (0, 2.5), "b": (-5, 35), "beta": (0, 2.5), "e": (-3, 2), "phi": (-3, 3)}
LAW_NAMES = ("A", "alpha", "B", "beta", "E", "phi")  # A = exp(a), and so on
COUNTS = {"regression": ("n_once_ls", "n_rec_ls"), "paper": ("n_once_paper", "n_rec_paper"), "own": ("n_once", "n_rec")}

# The sum is about 3e-4, and scipy compares its progress to max(|sum|, 1): unscaled, it stops far too early.
SCALE = 1e6
OPTIONS = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-12, "gtol": 1e-9, "maxcor": 20}
# L-BFGS-B calls BLAS on matrices of a few numbers, whose threads cost ten times what the fit does on a busy machine.
one_thread = threadpool_limits.wrap(limits=1, user_api="blas")
SAME_OPTIMUM = 1e-3  # relative difference of objectives at which a start has reached the best one


def fit_chinchilla(
    frame: pd.DataFrame, restarts: int = 500, seed: int = 0, family: Family = ISO_DEPTH, processes: int = 1
) -> ChinchillaLaw:
    """
    L = E + A N^-alpha + B D^-beta of the runs of one recurrence count, N with norms (Table 1 of the paper). Objective,
    box and restarts are as in `fit_joint_law`.

    Raises:
        `ValueError`: as in `fit_joint_law`, and for runs of several recurrence counts.
    """
    runs = _read(frame, None, family)
    problem = Problem(runs.n_once, np.zeros_like(runs.n_once), runs.r, runs.tokens, runs.loss, phi=0.0)
    _check_size(runs, 5)
    best, reached = _search(problem, restarts, seed, processes)
    return ChinchillaLaw(*parameters_of(best)[:5], **_report(problem, best, restarts, reached))


def fit_joint_law(
    frame: pd.DataFrame,
    decomposition: str | None = None,
    phi: float | None = None,
    restarts: int = 500,
    seed: int = 0,
    family: Family = ISO_DEPTH,
    processes: int = 1,
) -> JointLaw:
    """
    L = E + A (n_once + r^phi n_rec)^-alpha + B D^-beta of runs of several recurrence counts (Table 2 of the paper). The
    objective is the sum over runs of Huber residuals of log L with delta = 1e-3, minimised by L-BFGS-B in the paper's
    box from uniform starts, of which the best one counts. The same seed gives the same law, on any number of processes.

    Args:
        frame: Runs, with the columns that the module's docstring names.
        decomposition:
            `"regression"`, `"paper"` (see `Family.split`) or `"own"`, the frame's `n_once` and `n_rec`. By default
            `"own"` where the frame has these, else `"regression"`.
        phi: Fixes phi and fits the other five.
        restarts: Random starts. About one in seven reaches the best optimum, so 60 are few and 500 plenty.
        seed: Of the starts.
        family: Gives the counts that the frame lacks. They depend on a run's width and r alone, not on the other runs.
        processes: Over which the starts are spread.

    Raises:
        `ValueError`: where columns or values are missing or impossible, runs are doubled, of several variants, or fewer
            than parameters, or where they cannot tell the parameters apart: one budget, one recurrence count, no core.
    """
    if phi is not None and not BOX["phi"][0] <= phi <= BOX["phi"][1]:
        raise ValueError(f"phi={phi} must lie in {BOX['phi']}, or be None to be fitted.")
    decomposition = decomposition_of(frame, decomposition)
    runs = _read(frame, decomposition, family)
    _check_size(runs, 5 + (phi is None))
    if phi is None:
        _check_loops(runs)
    problem = Problem(runs.n_once, runs.n_rec, runs.r, runs.tokens, runs.loss, phi)
    best, reached = _search(problem, restarts, seed, processes)
    found = dict(zip(LAW_NAMES, parameters_of(best)))
    return JointLaw(
        **{"phi": phi, **found},
        decomposition=decomposition,
        phi_fixed=phi is not None,
        **_report(problem, best, restarts, reached),
    )


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """
    Refits of a joint law to resampled cells. `draws` has one row a resample and the columns A, alpha, B, beta, E, phi;
    `cells` is the number of blocks; `redrawn` counts resamples that had one budget or one recurrence count only and
    were drawn again. `reason` says why phi is not identified by these runs, and is `None` where it is.
    """

    law: JointLaw
    draws: pd.DataFrame
    cells: int
    seed: int
    redrawn: int = 0
    reason: str | None = None

    @property
    def identified(self) -> bool:
        """Whether the runs determine phi at all. Where not, its interval is not worth printing."""
        return self.reason is None

    def interval(self, name: str = "phi", level: float = 0.95) -> tuple[float, float]:
        """
        The percentile interval of a parameter.

        Raises:
            `ValueError`: for a name that is no parameter or a level outside (0, 1).
        """
        if name not in self.draws:
            raise ValueError(f"{name!r} is no parameter of the law: choose one of {', '.join(self.draws)}.")
        if not 0 < level < 1:
            raise ValueError(f"level={level} must lie between 0 and 1, such as 0.95.")
        low, high = np.quantile(self.draws[name], [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def bootstrap(
    frame: pd.DataFrame,
    law: JointLaw,
    resamples: int = 200,
    seed: int = 0,
    random_starts: int = 3,
    family: Family = ISO_DEPTH,
    processes: int = 1,
) -> Bootstrap:
    """
    The paper's block bootstrap (appendix F.2): the cells of one budget and one r are drawn with replacement, and the
    law refitted from where it was and from `random_starts` uniform starts.

    phi counts as identified unless it lies on the edge of its box, its 95 % interval covers half of the box, or moving
    phi by one and refitting the rest is no worse than chance: n log(objective) rises by less than 3.84, the 95 % point
    of chi squared.

    Raises:
        `ValueError`: as in `fit_joint_law`; for a law whose phi was fixed; for a frame without `budget_flops`.
    """
    require_int("resamples", resamples, 2)
    require_int("random_starts", random_starts, 0)
    _refuse_fixed(law)
    runs, problem, cells = read_cells(frame, law.decomposition, family)
    start = start_of(law)
    rng = np.random.default_rng(seed)
    num_cells, jobs, redrawn = cells.max() + 1, [], 0
    while len(jobs) < resamples:
        weights = np.bincount(rng.integers(num_cells, size=num_cells), minlength=num_cells)[cells].astype(np.float64)
        if runs.is_fittable(weights > 0):
            jobs.append((replace(problem, weights=weights), start, uniform_starts(rng, random_starts, problem.bounds)))
        else:
            redrawn += 1
            if redrawn > 100 * resamples:
                raise ValueError(
                    f"The {num_cells} cells of (budget_flops, r) are too few to resample: add budgets or recurrence "
                    "counts."
                )
    return bootstrap_of(law, problem, jobs, int(num_cells), seed, redrawn, processes)


@one_thread
def bootstrap_of(
    law: JointLaw, problem: "Problem", jobs: list, cells: int, seed: int, redrawn: int, processes: int
) -> Bootstrap:
    """Of resamples that are drawn: `jobs` of `refit`."""
    draws = pd.DataFrame([parameters_of(x) for x in spread(refit, jobs, processes)], columns=list(LAW_NAMES))
    result = Bootstrap(law, draws, cells, seed, redrawn)
    return replace(result, reason=_why_not_identified(result, problem))


def residual_table(frame: pd.DataFrame, law: JointLaw | ChinchillaLaw, family: Family = ISO_DEPTH) -> pd.DataFrame:
    """
    Measured minus predicted loss in nats (Table 7 of the paper): a row for each r and one of all, `"pooled"`, with
    `runs`, `mean`, `max` (the largest absolute value) and `rmse`.

    Raises:
        `ValueError`: where columns or values of the frame are missing or impossible.
    """
    predicted = predicted_losses(frame, law, family)
    residuals = frame["val_loss"] - predicted
    groups = {**{int(r): group for r, group in residuals.groupby(frame["r"])}, "pooled": residuals}
    rows = {
        name: {"runs": len(of), "mean": of.mean(), "max": of.abs().max(), "rmse": np.sqrt((of**2).mean())}
        for name, of in groups.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").astype({"runs": int}).rename_axis("r")


def predicted_losses(frame: pd.DataFrame, law: JointLaw | ChinchillaLaw, family: Family = ISO_DEPTH) -> pd.Series:
    """The law's loss for each run, from the counts that it was fitted with. Raises as `residual_table`."""
    if isinstance(law, JointLaw):
        runs = _read(frame, law.decomposition, family)
        losses = law.predict(runs.n_once, runs.n_rec, runs.tokens, runs.r)
    else:
        runs = _read(frame, None, family)
        losses = law.predict(runs.n_once, runs.tokens)
    return pd.Series(losses, index=frame.index, name="predicted_loss")


def half_budgets(
    frame: pd.DataFrame,
    decomposition: str | None = None,
    restarts: int = 500,
    seed: int = 0,
    family: Family = ISO_DEPTH,
    processes: int = 1,
) -> dict[str, JointLaw]:
    """
    Whether phi drifts with scale (appendix F.3): the law of the lower half of the budgets, `"low"`, and of the upper
    half, `"high"`. The middle one of an odd number of budgets is low.

    Raises:
        `ValueError`: as in `fit_joint_law`, and for fewer than four budgets.
    """
    _require_columns(frame, ["budget_flops"])
    budgets = np.unique(frame["budget_flops"])
    if len(budgets) < 4:
        raise ValueError(
            f"Column 'budget_flops' has {len(budgets)} values, and each half needs two: add runs at further budgets."
        )
    is_low = frame["budget_flops"] <= budgets[(len(budgets) - 1) // 2]
    return {
        name: fit_joint_law(frame[rows], decomposition, None, restarts, seed, family, processes)
        for name, rows in (("low", is_low), ("high", ~is_low))
    }


@one_thread
def leave_one_cell_out(
    frame: pd.DataFrame,
    law: JointLaw | None = None,
    decomposition: str | None = None,
    random_starts: int = 3,
    seed: int = 0,
    family: Family = ISO_DEPTH,
    processes: int = 1,
) -> pd.DataFrame:
    """
    The law refitted without each cell of one budget and one r, which it then predicts. A row for each cell:
    `budget_flops`, `r`, `runs` left out, the refitted A, alpha, B, beta, E, phi, and the left-out runs' `mean` and
    `rmse` of measured minus predicted loss in nats. NaN where the other cells cannot be fitted.

    Args:
        law: The law of all runs, to start from, which `fit_joint_law` with `decomposition` finds otherwise.
        random_starts: Starts of each fit besides that law.

    Raises:
        `ValueError`: as in `bootstrap`.
    """
    law = law or fit_joint_law(frame, decomposition, seed=seed, family=family, processes=processes)
    _refuse_fixed(law)
    runs, problem, cells = read_cells(frame, law.decomposition, family)
    rng = np.random.default_rng(seed)
    kept = [cells != cell for cell in range(cells.max() + 1)]
    jobs = [
        (
            replace(problem, weights=keep.astype(np.float64)),
            start_of(law),
            uniform_starts(rng, random_starts, problem.bounds),
        )
        for keep in kept
        if runs.is_fittable(keep)
    ]
    refits = iter(spread(refit, jobs, processes))
    rows = []
    for keep in kept:
        out = ~keep
        row = {"budget_flops": runs.budgets[out][0], "r": int(runs.r[out][0]), "runs": int(out.sum())}
        if runs.is_fittable(keep):
            without = JointLaw(*parameters_of(next(refits)))
            errors = runs.loss[out] - without.predict(runs.n_once[out], runs.n_rec[out], runs.tokens[out], runs.r[out])
            row |= {name: getattr(without, name) for name in LAW_NAMES}
            row |= {"mean": errors.mean(), "rmse": np.sqrt((errors**2).mean())}
        rows.append(row)
    columns = ["budget_flops", "r", "runs", *LAW_NAMES, "mean", "rmse"]
    return pd.DataFrame(rows).reindex(columns=columns)


@dataclass(frozen=True, eq=False)
class Problem:
    """Section 3.2's objective over x = (a, alpha, b, beta, e[, phi]). `phi` fixes it; arrays have one entry a run."""

    n_once: np.ndarray
    n_rec: np.ndarray
    r: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    phi: float | None = None
    weights: np.ndarray | float = 1.0

    def __post_init__(self):
        for name in ("r", "tokens", "loss"):
            object.__setattr__(self, f"log_{name}", np.log(getattr(self, name)))

    @property
    def bounds(self) -> np.ndarray:
        """`(parameters, 2)`"""
        return np.array(list(BOX.values())[: 5 + (self.phi is None)], dtype=np.float64)

    def objective(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """The sum of Huber residuals times `SCALE`, and its gradient."""
        recurrent, effective, log_n, shares, residuals = self._terms(x)
        clipped = np.minimum(np.maximum(residuals, -HUBER_DELTA), HUBER_DELTA)
        pulls = SCALE * self.weights * clipped
        shares *= pulls
        of_a, of_b, of_e = shares.sum(1)
        slope = [of_a, -(shares[0] @ log_n), of_b, -(shares[1] @ self.log_tokens), of_e]
        if self.phi is None:
            slope.append(-x[1] * (shares[0] @ (recurrent / effective * self.log_r)))
        return float(pulls @ (residuals - 0.5 * clipped)), np.array(slope)

    def jacobian(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(runs,)` residuals predicted - measured of log L and their `(runs, parameters)` derivatives."""
        recurrent, effective, log_n, shares, residuals = self._terms(x)
        slopes = [shares[0], -shares[0] * log_n, shares[1], -shares[1] * self.log_tokens, shares[2]]
        if self.phi is None:
            slopes.append(-x[1] * shares[0] * recurrent / effective * self.log_r)
        return residuals, np.stack(slopes, axis=1)

    def _terms(self, x):
        """
        `(r^phi n_rec, N_eff, log N_eff, shares, residuals)`, where `shares` are of the three terms in the prediction,
        `(3, runs)`. The box keeps every exponent below 40, so exp needs no shift.
        """
        recurrent = self.n_rec * np.exp((x[5] if self.phi is None else self.phi) * self.log_r)
        effective = self.n_once + recurrent
        log_n = np.log(effective)
        shares = np.empty((3, len(log_n)))
        shares[0] = x[0] - x[1] * log_n
        shares[1] = x[2] - x[3] * self.log_tokens
        shares[2] = x[4]
        np.exp(shares, out=shares)
        predicted = shares.sum(0)
        shares /= predicted
        return recurrent, effective, log_n, shares, np.log(predicted) - self.log_loss


@dataclass(frozen=True, eq=False)
class _Runs:
    """The checked columns of a frame; `budgets` is `None` where it has none."""

    n_once: np.ndarray
    n_rec: np.ndarray
    r: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    budgets: np.ndarray | None

    def is_fittable(self, rows: np.ndarray) -> bool:
        """Whether these rows can tell phi and the rest apart."""
        several = len(np.unique(self.r[rows])) > 1 and len(np.unique(self.budgets[rows])) > 1
        return several and rows.sum() >= 6 and bool((self.n_rec[rows] * (self.r[rows] > 1)).any())


def _minimise(problem: Problem, start: np.ndarray) -> tuple[float, np.ndarray]:
    found = minimize(problem.objective, start, jac=True, method="L-BFGS-B", bounds=problem.bounds, options=OPTIONS)
    return found.fun, found.x


def refine(problem: Problem, start: np.ndarray) -> tuple[float, np.ndarray]:
    """
    The optimum near `start`, in coordinates where the Gauss-Newton Hessian is the identity: log N hardly varies, so in
    the paper's own the condition number is 3e7 and the last digits of phi take hundreds of steps. They have no box, and
    where the optimum is outside of it, the box's own minimiser has the word.
    """
    residuals, jacobian = problem.jacobian(start)
    pulls = SCALE * problem.weights * HUBER_DELTA / np.maximum(np.abs(residuals), HUBER_DELTA)
    hessian = (jacobian.T * pulls) @ jacobian
    spread = np.sqrt(np.diag(hessian)) + 1e-12
    correlation = hessian / np.outer(spread, spread) + 1e-10 * np.eye(len(start))
    steps = np.linalg.inv(np.linalg.cholesky(correlation)).T / spread[:, None]

    def objective(z):
        value, slope = problem.objective(start + steps @ z)
        return value, steps.T @ slope

    with np.errstate(all="ignore"):  # outside of the box anything may overflow
        found = minimize(objective, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=OPTIONS)
    x, bounds = start + steps @ found.x, problem.bounds
    inside = np.isfinite(found.fun) and (x >= bounds[:, 0]).all() and (x <= bounds[:, 1]).all()
    return (found.fun, x) if inside else _minimise(problem, np.clip(start, bounds[:, 0], bounds[:, 1]))


def refit(job: tuple[Problem, np.ndarray, np.ndarray]) -> np.ndarray:
    """The best optimum from a start nearby and from others anywhere."""
    problem, start, others = job
    found = [refine(problem, start), *(_minimise(problem, other) for other in others)]
    return min(found, key=lambda pair: pair[0])[1]


@one_thread
def _search(problem: Problem, restarts: int, seed: int, processes: int) -> tuple[np.ndarray, int]:
    """The best optimum and how many starts reached it."""
    require_int("restarts", restarts, 1)
    starts = uniform_starts(np.random.default_rng(seed), restarts, problem.bounds)
    found = spread(_minimise_job, [(problem, start) for start in starts], processes)
    best = min(found, key=lambda pair: pair[0])
    bar = best[0] * (1 + SAME_OPTIMUM) + SCALE * SAME_OPTIMUM * HUBER_DELTA**2  # the second for runs without noise
    return min(best, refine(problem, best[1]), key=lambda pair: pair[0])[1], sum(value <= bar for value, _ in found)


def _minimise_job(job: tuple[Problem, np.ndarray]) -> tuple[float, np.ndarray]:
    return _minimise(*job)


def spread(function: Callable, jobs: list, processes: int) -> list:
    """In order. Forked where that is safe, so that workers need not import everything again."""
    require_int("processes", processes, 1)
    if processes == 1 or len(jobs) < 2:
        return [function(job) for job in jobs]
    context = get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(function, jobs, chunksize=max(1, len(jobs) // (8 * processes))))


def uniform_starts(rng: np.random.Generator, count: int, bounds: np.ndarray) -> np.ndarray:
    return rng.uniform(bounds[:, 0], bounds[:, 1], (count, len(bounds)))


def parameters_of(x: np.ndarray) -> list[float]:
    """As the law names them."""
    return [float(np.exp(value) if index in (0, 2, 4) else value) for index, value in enumerate(x)]


def start_of(law: JointLaw) -> np.ndarray:
    return np.array([np.log(law.A), law.alpha, np.log(law.B), law.beta, np.log(law.E), law.phi])


def _report(problem: Problem, best: np.ndarray, restarts: int, reached: int) -> dict:
    value, _ = problem.objective(best)
    residuals, _ = problem.jacobian(best)
    errors = problem.loss * np.expm1(residuals)
    variation = ((problem.loss - problem.loss.mean()) ** 2).sum()
    low, high = problem.bounds.T
    is_edge = np.minimum(best - low, high - best) < 1e-6 * (high - low)
    return {
        "huber": value / SCALE,
        "r2": float(1 - (errors**2).sum() / variation) if variation > 0 else None,
        "num_runs": len(problem.loss),
        "restarts": restarts,
        "restarts_at_best": int(reached),
        "at_bounds": tuple(name for name, edge in zip(LAW_NAMES, is_edge) if edge),
    }


def _why_not_identified(result: Bootstrap, problem: Problem) -> str | None:
    law, (low, high) = result.law, BOX["phi"]
    if "phi" in law.at_bounds:
        return f"phi={law.phi:g} lies on the edge of the box {BOX['phi']} it was looked for in."
    lower, upper = result.interval("phi", 0.95)
    if upper - lower > (high - low) / 2:
        return f"the 95 % interval of phi, [{lower:.2f}, {upper:.2f}], covers most of the box {BOX['phi']}."
    start = start_of(law)
    best, _ = refine(problem, start)
    for phi in (law.phi - 1, law.phi + 1):
        moved, _ = refine(replace(problem, phi=float(np.clip(phi, low, high))), start[:5])
        if len(problem.loss) * np.log((moved + 1e-9) / (best + 1e-9)) < 3.84:
            return f"phi={phi:.2f} fits these runs as well as phi={law.phi:.2f} when the other parameters follow."
    return None


def decomposition_of(frame: pd.DataFrame, decomposition: str | None) -> str:
    if decomposition is None:
        return "own" if isinstance(frame, pd.DataFrame) and set(COUNTS["own"]) <= set(frame) else "regression"
    if decomposition not in COUNTS:
        raise ValueError(f"decomposition={decomposition!r} must be one of {', '.join(map(repr, COUNTS))}.")
    return decomposition


def _read(frame: pd.DataFrame, decomposition: str | None, family: Family) -> _Runs:
    """The checked columns, with parameter counts of a decomposition, or with N as n_once where it is `None`."""
    _require_columns(frame, ["r", "tokens", "val_loss"])
    if frame.empty:
        raise ValueError("The frame has no runs.")
    if "variant" in frame and frame["variant"].nunique(dropna=False) > 1:
        variants = ", ".join(map(repr, frame["variant"].unique()))
        raise ValueError(
            f"Column 'variant' has {variants}, and a law is of one: choose the runs with "
            f"frame[frame.variant == {frame['variant'].iloc[0]!r}], or drop the column where they belong together."
        )
    r = _numbers(frame, "r", 1, "at least 1")
    if (r % 1).any():
        broken = r % 1 > 0
        raise ValueError(f"Column 'r' has {r[broken][0]:g}{_row(frame, broken)}: it must be a whole number of passes.")
    if decomposition is None and len(np.unique(r)) > 1:
        raise ValueError(
            f"Column 'r' has {', '.join(f'{value:g}' for value in np.unique(r))}, and this law is of one recurrence "
            f"count: choose the runs with frame[frame.r == {r[0]:g}], or use fit_joint_law."
        )
    tokens = _numbers(frame, "tokens", 0, "positive", is_open=True)
    loss = _numbers(frame, "val_loss", 0, "positive", is_open=True)
    budgets = _numbers(frame, "budget_flops", 0, "positive", is_open=True) if "budget_flops" in frame else None
    once, core = sizes(frame, family) if decomposition is None else _split(frame, decomposition, family)
    if (once + core <= 0).any():
        raise ValueError(f"A run has no parameters{_row(frame, once + core <= 0)}: n_once + n_rec must be positive.")
    _refuse_duplicates(frame, once, core, decomposition != "own" and "d_model" in frame)
    return _Runs(once, core, r, tokens, loss, budgets)


def read_cells(frame: pd.DataFrame, decomposition: str, family: Family) -> tuple[_Runs, Problem, np.ndarray]:
    """Also the objective of a free phi, and each run's number of its cell of one budget and one r."""
    _require_columns(frame, ["budget_flops"])
    runs = _read(frame, decomposition, family)
    _check_size(runs, 6)
    _check_loops(runs)
    cells = np.unique(np.stack([runs.budgets, runs.r]), axis=1, return_inverse=True)[1].reshape(-1)
    return runs, Problem(runs.n_once, runs.n_rec, runs.r, runs.tokens, runs.loss), cells


def _split(frame: pd.DataFrame, decomposition: str, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """`(n_once, n_rec)` of every run: the frame's own where it has them, else the family's."""
    columns = COUNTS[decomposition]
    if decomposition not in DECOMPOSITIONS:
        _require_columns(frame, columns)
        return tuple(_numbers(frame, name, 0, "zero or positive") for name in columns)
    known = set(columns) <= set(frame)
    if not known and "d_model" not in frame:
        remedy = "choose decomposition='own' for n_once and n_rec" if set(COUNTS["own"]) <= set(frame) else "add them"
        raise ValueError(
            f"The frame lacks {' and '.join(map(repr, columns))}, and 'd_model' to find them by: {remedy}."
        )
    given = frame[list(columns)].notna().all(axis=1).to_numpy() if known else np.zeros(len(frame), bool)
    if known and ("d_model" not in frame or given.all()):
        return tuple(_numbers(frame, name, 0, "zero or positive") for name in columns)
    counts = np.empty((2, len(frame)))
    if given.any():
        counts[:, given] = [_numbers(frame[given], name, 0, "zero or positive") for name in columns]
    rest = frame[~given]
    widths = _numbers(rest, "d_model", 0, "positive", is_open=True)
    counts[:, ~given] = family.split(widths, rest["r"].to_numpy(np.float64), decomposition)
    return counts[0], counts[1]


def sizes(frame: pd.DataFrame, family: Family) -> tuple[np.ndarray, np.ndarray]:
    """`(N, 0)` of every run."""
    if "n_unique" in frame:
        sizes = _numbers(frame, "n_unique", 0, "positive", is_open=True)
    elif "d_model" in frame:
        widths = _numbers(frame, "d_model", 0, "positive", is_open=True)
        sizes = np.asarray(family.n_all(widths, frame["r"].to_numpy(np.float64)))
    elif set(COUNTS["own"]) <= set(frame):
        sizes = sum(_numbers(frame, name, 0, "zero or positive") for name in COUNTS["own"])
    else:
        raise ValueError("The frame lacks 'n_unique', and 'd_model' to find it by: add one of these columns.")
    return sizes, np.zeros_like(sizes)


def _numbers(frame: pd.DataFrame, name: str, bound: float, meaning: str, is_open: bool = False) -> np.ndarray:
    """A column as float64, which must be finite and at least, or if open above, `bound`."""
    try:
        values = frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise ValueError(f"Column {name!r} holds {frame[name].dtype} values, and must hold numbers.") from None
    wrong = ~np.isfinite(values) | (values <= bound if is_open else values < bound)
    if wrong.any():
        remedy = "repeat or leave out that run" if not np.isfinite(values[wrong][0]) else f"it must be {meaning}"
        raise ValueError(f"Column {name!r} has {values[wrong][0]:g}{_row(frame, wrong)}: {remedy}.")
    return values


def _row(frame: pd.DataFrame, is_wrong: np.ndarray) -> str:
    return f" in row {frame.index[is_wrong][0]!r}"


def _require_columns(frame: pd.DataFrame, names: Iterable[str]) -> None:
    if not isinstance(frame, pd.DataFrame):
        raise ValueError(f"The runs are a {type(frame).__name__}, and must be a pandas DataFrame with one row a run.")
    missing = [name for name in names if name not in frame]
    if missing:
        has = ", ".join(map(str, frame.columns))
        raise ValueError(f"The frame lacks the column {', '.join(map(repr, missing))}: add it to its columns {has}.")


def _refuse_duplicates(frame: pd.DataFrame, once: np.ndarray, core: np.ndarray, has_width: bool) -> None:
    names = [name for name in ("variant", "budget_flops", "r", "d_model", "tokens", "seed") if name in frame]
    key = frame[names].assign(**({} if has_width else {"n_once": once, "n_rec": core}))
    doubled = key.duplicated(keep=False).to_numpy()
    if doubled.any():
        first = key[doubled].iloc[0]
        same = ((key == first) | (key.isna() & first.isna())).all(axis=1).to_numpy()
        rows = " and ".join(f"{label!r}" for label in frame.index[same])
        what = ", ".join(f"{name}={value}" for name, value in first.items())
        losses = " and ".join(f"{value:g}" for value in frame["val_loss"][same])
        raise ValueError(
            f"Rows {rows} are the same run ({what}) with val_loss {losses}: keep one of them, or tell them apart by a "
            "column 'seed'."
        )


def _refuse_fixed(law: JointLaw) -> None:
    if law.phi_fixed:
        raise ValueError(f"The law's phi was fixed at {law.phi:g}: take a law that fit_joint_law fitted with phi=None.")


def _check_size(runs: _Runs, parameters: int) -> None:
    if len(runs.loss) < parameters:
        raise ValueError(
            f"The frame has {len(runs.loss)} runs, fewer than the law's {parameters} parameters: add runs."
        )
    if runs.budgets is not None and len(np.unique(runs.budgets)) == 1:
        raise ValueError(
            f"Column 'budget_flops' has one value, {runs.budgets[0]:g}, at which B and beta cannot be told from E: add "
            "runs at a second budget."
        )


def _check_loops(runs: _Runs) -> None:
    if len(np.unique(runs.r)) == 1:
        raise ValueError(
            f"Column 'r' has one value, {runs.r[0]:g}, at which phi cannot be told from A: add runs at another "
            "recurrence count, or fix phi."
        )
    if not (runs.n_rec * (runs.r > 1)).any():
        raise ValueError("No run has n_rec above zero at r above 1, so nothing depends on phi: fix phi, or mend n_rec.")


__all__ = [
    "BOX",
    "Bootstrap",
    "bootstrap",
    "fit_chinchilla",
    "fit_joint_law",
    "half_budgets",
    "leave_one_cell_out",
    "predicted_losses",
    "residual_table",
]
