"""
What to run, before running it: `plan_sweep` measures phi with as few FLOPs as a wanted confidence interval allows, and
`advise` picks a recurrence count, a width and tokens for a budget, a memory and an amount of serving (arXiv 2604.21106,
sections 4.2, 5 and 6; 3.2, 3.5 and 3.7 of its spec). Budgets and costs are FLOPs in the convention of
`modeling_looped.accounting`, losses nats per token, memory bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.stats import norm

from .allocation import _checked, _memory, compute_optimal, inference_cost, predicted_loss
from .family import ISO_DEPTH, Family
from .fit import HUBER_DELTA, Bootstrap, Problem, parameters_of, predicted_losses, refine, start_of
from .law import PUBLISHED, JointLaw


# Standard deviations of the paper's 116 runs about its law, as `residual_noise` splits them: what the runs of one
# budget and recurrence count have each for themselves, and what they share. Most of it is misfit of the law, and not
# what another seed would change: about a parabola of their cell, runs scatter by 0.0023.
RUN_NOISE, CELL_NOISE = 0.0089, 0.0050
# Of the paper's grid: what PUBLISHED was fitted on.
PUBLISHED_RANGES = {
    "training FLOPs": (4.64e17, 2.15e19),
    "unique parameters": (10917504, 1136487808),
    "tokens": (324272128, 7965507584),
    "recurrences": (1, 8),
}
TRAINING_BYTES = 16  # per parameter: weights, gradients and two moments in fp32, no activations
_STEP = 10 ** (1 / 3)  # from one budget of a ladder to the next, as in the paper


@dataclass(frozen=True)
class Hardware:
    """`flops_per_second` that training reaches on one device (not its peak), `memory_bytes` of one (`None`: plenty)."""

    flops_per_second: float
    devices: int = 1
    memory_bytes: float | None = None

    def __post_init__(self):
        for name in ("flops_per_second", "devices", "memory_bytes"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value} of the hardware must be positive.")

    def hours(self, flops: float) -> float:
        """Of `flops`, with all devices busy."""
        return flops / (self.flops_per_second * self.devices * 3600)


@dataclass(frozen=True)
class SweepPlan:
    """
    `runs` has a row for every model to train: `budget_flops`, `r`, `s`, `d_model`, `n_unique`, `iterations`, `tokens`,
    `flops`, `device_hours`, the `expected_loss`, and the columns of counts that
    `fit_joint_law` wants beside the `val_loss` that you measure. `interval` of phi is the middle 95 % of the fits to
    `simulations` of them; `reached` is whether it is as narrow as wanted.
    """

    runs: pd.DataFrame
    interval: tuple[float, float]
    target_width: float
    simulations: int
    total_flops: float
    hours: float

    @property
    def width(self) -> float:
        return self.interval[1] - self.interval[0]

    @property
    def reached(self) -> bool:
        return self.width <= self.target_width

    def __str__(self) -> str:
        cells = self.runs.groupby(["budget_flops", "r"], sort=True)
        rows = ["budget FLOPs  r  sizes (width / 64)            tokens, millions"]
        for (budget, r), cell in cells:
            sizes = " ".join(f"{size:g}" for size in cell["s"])
            tokens = " ".join(f"{count / 1e6:.0f}" for count in cell["tokens"])
            rows.append(f"{budget:12.3g}  {r:<2d} {sizes:28s}  {tokens}")
        verdict = "" if self.reached else f", wider than the {self.target_width:g} asked for: raise the budget"
        return "\n".join(
            [
                *rows,
                f"{len(self.runs)} runs, {self.total_flops:.3g} FLOPs, {self.hours:.3g} hours with all devices busy",
                f"phi within [{self.interval[0]:.3f}, {self.interval[1]:.3f}] in 95 % of {self.simulations} "
                f"simulations, {self.width:.3f} wide{verdict}",
            ]
        )


def plan_sweep(
    budget_flops: float,
    hardware: Hardware,
    law: JointLaw = PUBLISHED,
    family: Family = ISO_DEPTH,
    noise: float = RUN_NOISE,
    cell_noise: float = CELL_NOISE,
    recurrences: Iterable[int] = (1, 2, 4, 8),
    target_width: float = 0.12,
    smallest_budget: float = 4.64e17,
    batch_tokens: int = 262144,
    simulations: int = 300,
    seed: int = 0,
) -> SweepPlan:
    """
    The cheapest iso-FLOPs sweep that measures phi as well as wanted. Sweeps are a ladder of two to eight budgets from
    `smallest_budget` up, each the last one times 10 ** (1/3), and three to eight widths for each budget and recurrence
    count, whole heads about the law's optimum. The cheapest that is good enough to first order in the noise is found,
    its losses are simulated from the law with noise and refitted, and where the interval is another than expected, so
    is its neighbour. Where none within `budget_flops` is good enough, the most precise one is returned, and says so.

    A sweep measures phi of its own scale, and of its own recipe: choose `smallest_budget` for models that are like
    those you mean, and tune the r = 1 anchor as well as the others.

    Args:
        budget_flops: The most that all runs together may cost.
        noise: Standard deviation of one run's loss, in nats (`residual_noise` of your own runs).
        cell_noise: Of what all runs of one budget and recurrence count have in common.
        hardware: Which says what fits, and how long the sweep takes.
        simulations: Sweeps that are simulated and refitted, from which the interval is taken.
        recurrences: At least two; r = 1 is the anchor.
        target_width: Of the 95 % interval of phi.
        batch_tokens: Of one step, of which every run has a whole number.

    Raises:
        `ValueError`: where not even the smallest sweep fits into the budget or the memory.
    """
    _checked(budget_flops, None)
    recurrences = tuple(recurrences)
    if len(set(recurrences)) < 2:
        raise ValueError(f"recurrences={list(recurrences)} cannot show phi: give at least two counts, 1 among them.")
    for r in recurrences:
        if r not in family.recurrences():
            raise ValueError(f"recurrences has {r}, which is not among those of the family: {family.recurrences()}.")
    for name, value in {"noise": noise, "target_width": target_width, "smallest_budget": smallest_budget}.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive.")
    if not cell_noise >= 0:
        raise ValueError(f"cell_noise={cell_noise} must not be negative.")
    if simulations < 20:
        raise ValueError(f"simulations={simulations} give no 95 % interval: take at least 20.")
    ladder = smallest_budget * _STEP ** np.arange(8)
    best = {(budget, r): compute_optimal(law, budget, r, family=family).width for budget in ladder for r in recurrences}
    sweeps = []
    for widths in range(3, 9):
        cells = [
            [_cell(law, budget, r, best[budget, r], widths, batch_tokens, hardware, family) for r in recurrences]
            for budget in ladder
        ]
        # A rung with too few widths that fit into the memory is where the ladder ends.
        high = next((rung for rung, of_budget in enumerate(cells) if min(map(len, of_budget)) < 3), len(cells))
        for rungs in range(2, high + 1):
            runs = pd.DataFrame([row for of_budget in cells[:rungs] for cell in of_budget for row in cell])
            sweeps.append((float(runs["flops"].sum()), _linear_width(law, runs, noise, cell_noise), runs))
    if not sweeps:
        raise ValueError(
            f"memory_bytes={hardware.memory_bytes:.4g} of the hardware holds fewer than three widths of a cell of the "
            f"smallest sweep, at {TRAINING_BYTES} bytes a parameter: lower smallest_budget={smallest_budget:.4g}."
        )
    cheapest = min(cost for cost, _, _ in sweeps)
    front = []  # each dearer than the one before, and by linear theory narrower
    for sweep in sorted(sweeps, key=lambda sweep: sweep[0]):
        if sweep[0] <= budget_flops and (not front or sweep[1] < front[-1][1]):
            front.append(sweep)
    if not front:
        raise ValueError(
            f"budget_flops={budget_flops:.4g} is less than the smallest sweep from smallest_budget="
            f"{smallest_budget:.4g} costs, {cheapest:.4g}: raise the one or lower the other."
        )

    # Linear theory is right to about a tenth, and as wrong about one sweep as about its neighbours.
    linear, ratio, plans = np.array([width for _, width, _ in front]), 1.0, {}
    while (index := next(iter(np.flatnonzero(linear * ratio <= target_width)), len(front) - 1)) not in plans:
        cost, _, runs = front[index]
        interval = simulated_interval(law, runs, noise, cell_noise, simulations, seed)
        plans[index] = SweepPlan(runs, interval, target_width, simulations, cost, hardware.hours(cost))
        ratio = plans[index].width / linear[index]
    reached = [plan for plan in plans.values() if plan.reached]
    return min(reached, key=lambda plan: plan.total_flops) if reached else plans[index]


def simulated_interval(
    law: JointLaw,
    runs: pd.DataFrame,
    noise: float = RUN_NOISE,
    cell_noise: float = CELL_NOISE,
    simulations: int = 300,
    seed: int = 0,
) -> tuple[float, float]:
    """
    The middle 95 % of phi, fitted to losses of `law` for `runs` with normal noise of each run and, of deviation
    `cell_noise`, of each cell, in so many `simulations`.
    """
    random = np.random.default_rng(seed)
    once, rec, r, tokens = _counts(law, runs)
    expected = law.predict(once, rec, tokens, r)
    cell = runs.groupby(["budget_flops", "r"]).ngroup().to_numpy()
    phis = []
    for _ in range(simulations):
        shared = random.normal(0, cell_noise, cell.max() + 1)[cell]
        losses = expected + shared + random.normal(0, noise, len(runs))
        _, found = refine(Problem(once, rec, r, tokens, losses), start_of(law))  # the truth: no other start is needed
        phis.append(parameters_of(found)[5])
    low, high = np.percentile(phis, [2.5, 97.5])
    return float(low), float(high)


def residual_noise(law: JointLaw, runs: pd.DataFrame, family: Family = ISO_DEPTH) -> tuple[float, float]:
    """
    `(noise, cell_noise)` of `plan_sweep` from your runs (the columns of `bootstrap`): standard deviations of their
    residuals within and between cells, by analysis of variance.

    Raises:
        `ValueError`: where no cell has two runs.
    """
    residuals = runs["val_loss"] - predicted_losses(runs, law, family)
    cells = residuals.groupby([runs["budget_flops"], runs["r"]])
    sizes, spare = cells.size(), len(runs) - cells.ngroups
    if spare < 1 or cells.ngroups < 2:
        raise ValueError("residual_noise needs at least two cells, and one with two runs.")
    within = ((residuals - cells.transform("mean")) ** 2).sum() / spare
    between = (sizes * (cells.mean() - residuals.mean()) ** 2).sum() / (cells.ngroups - 1)
    runs_a_cell = (len(runs) - (sizes**2).sum() / len(runs)) / (cells.ngroups - 1)
    return float(np.sqrt(within)), float(np.sqrt(max(0.0, (between - within) / runs_a_cell)))


def _cell(law, budget, r, best, count, batch_tokens, hardware, family) -> list[dict]:
    """
    The runs of one budget and recurrence count: widths of whole heads, evenly in ln d from 1 / 1.6 to 1.6 of the
    `best`; fewer than `count` where heads are coarse, but three neighbours of the best at least, and those alone whose
    training fits into a device.
    """
    heads = np.unique(np.maximum(1, np.round(best * np.geomspace(1 / 1.6, 1.6, count) / family.head_dim)).astype(int))
    if len(heads) < 3:
        heads = max(1, round(best / family.head_dim) - 1) + np.arange(3)
    rows = []
    for width in (int(number) * family.head_dim for number in heads):
        if hardware.memory_bytes and TRAINING_BYTES * family.total_parameters(width, r) > hardware.memory_bytes:
            continue
        per_token = family.flops_per_token(width, r)
        iterations = max(1, round(budget / (per_token * batch_tokens)))
        tokens = iterations * batch_tokens
        rows.append(
            {
                "budget_flops": float(budget),
                **family.columns(width, r),
                "iterations": iterations,
                "tokens": tokens,
                "expected_loss": predicted_loss(law, width, tokens, r, family),
                "flops": tokens * per_token,
                "device_hours": replace(hardware, devices=1).hours(tokens * per_token),
            }
        )
    return rows


def _counts(law: JointLaw, runs: pd.DataFrame) -> list[np.ndarray]:
    names = {"paper": ("n_once_paper", "n_rec_paper"), "regression": ("n_once_ls", "n_rec_ls")}[law.decomposition]
    return [runs[name].to_numpy(np.float64) for name in (*names, "r", "tokens")]


def _linear_width(law: JointLaw, runs: pd.DataFrame, noise: float, cell_noise: float) -> float:
    """
    Width of the 95 % interval of phi to first order in the noise: least squares in log loss on the law's gradient,
    with the efficiency of the Huber loss (section 3.2) for normal noise.
    """
    once, rec, r, tokens = _counts(law, runs)
    effective = law.effective(once, rec, r)
    of_size, of_data = law.A * effective**-law.alpha, law.B * tokens**-law.beta
    loss = law.E + of_size + of_data
    others = np.stack(
        [of_size, of_size * np.log(effective), of_data, of_data * np.log(tokens), np.full(len(runs), law.E)], axis=1
    )
    others /= loss[:, None]
    others /= np.linalg.norm(others, axis=0)
    of_phi = -law.alpha * of_size * r**law.phi * np.log(r) * rec / effective / loss
    alone = of_phi - others @ np.linalg.lstsq(others, of_phi)[0]
    weights = alone / (alone @ alone) / loss
    cells = pd.Series(weights).groupby([runs["budget_flops"].to_numpy(), r]).sum()
    edge = HUBER_DELTA * loss.mean() / noise
    inside = 1 - 2 * norm.sf(edge)
    spread = inside - 2 * edge * norm.pdf(edge) + 2 * edge**2 * norm.sf(edge)
    # What a cell shares moves all of its runs alike, which Huber's loss passes on as it is.
    variance = noise**2 * (weights @ weights) * spread / inside**2 + cell_noise**2 * (cells @ cells)
    return float(2 * norm.ppf(0.975) * np.sqrt(variance))


@dataclass(frozen=True)
class Advice:
    """
    The option of least loss, and a `table` of the best one at every recurrence count, a row each: `r`, `width`, `s`,
    `n_unique`, `tokens`, `loss`, its 95 % interval `loss_low` and `loss_high` over the draws, `best_share`, the draws
    in which this row has the least loss, `training_flops`, `inference_flops`, `lifetime_flops`, `weight_bytes`,
    `cache_bytes`, and `binding` limits. `notes` are sentences, on extrapolation above all.
    """

    num_recurrences: int
    width: int
    tokens: float
    loss: float
    interval: tuple[float, float] | None
    table: pd.DataFrame
    notes: tuple[str, ...]

    def __str__(self) -> str:
        error = "" if self.interval is None else f" [{self.interval[0]:.4f}, {self.interval[1]:.4f}]"
        rows = [
            f"r = {self.num_recurrences}, width {self.width}, {self.tokens:.4g} tokens: loss {self.loss:.4f}{error}",
            "",
            " r  width  unique params    tokens    loss  [95 % of draws]   best in  training  lifetime  memory, GB  "
            "binding",
        ]
        for row in self.table.itertuples():
            error = f"[{row.loss_low:.4f}, {row.loss_high:.4f}]" if self.interval is not None else ""
            share = f"{100 * row.best_share:.0f} %" if self.interval is not None else ""
            rows.append(
                f"{row.r:2d}  {row.width:5d}  {row.n_unique:13,.0f}  {row.tokens:8.3g}  {row.loss:.4f}  {error:16s}  "
                f"{share:>7s}  {row.training_flops:8.3g}  {row.lifetime_flops:8.3g}  "
                f"{(row.weight_bytes + row.cache_bytes) / 1e9:10.3f}  {', '.join(row.binding)}".rstrip()
            )
        return "\n".join([*rows, *([""] * bool(self.notes)), *self.notes])


def fitted_ranges(runs: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """What a law fitted on `runs` has seen, for `advise`: least and most of each quantity."""
    columns = zip(PUBLISHED_RANGES, ("budget_flops", "n_unique", "tokens", "r"))
    return {name: (float(runs[column].min()), float(runs[column].max())) for name, column in columns}


def advise(
    law: JointLaw,
    bootstrap_draws: Bootstrap | Iterable[JointLaw] | None,
    budget: float,
    memory_bytes: float | None = None,
    inference_tokens: float = 0,
    recurrences: Iterable[int] = (1, 2, 4, 8),
    family: Family = ISO_DEPTH,
    max_tokens: float | None = None,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    fitted: Mapping[str, tuple[float, float]] = PUBLISHED_RANGES,
) -> Advice:
    """
    The recurrence count, width (whole heads) and tokens of least predicted loss, of models whose whole life costs at
    most `budget` FLOPs: their training, and `inference_tokens` forward passes at full context. Under a law of phi < 1,
    loops lose to r = 1 wherever only FLOPs count, and may win where memory does. The published law was 0.06 nats too
    pessimistic at 47B tokens of its widest models (section 3.5 of the spec): the gaps between r held better.

    Args:
        recurrences: Counts to choose from, each of which divides the layers of the loop.
        bootstrap_draws: What `bootstrap` returned, or laws of resampled runs. Their spread is the error of the fit, not
            what a seed changes; a model outside of the family or the fitted ranges may be off by more. `None` for none.
        memory_bytes: Of weights, with embeddings, and key-value caches of `batch` sequences of `context` tokens (the
            training length by default) in `dtype`.
        max_tokens: Of data to train on.
        fitted: Ranges to warn outside of (`fitted_ranges` of the runs behind `law`).

    Raises:
        `ValueError`: where no model meets the limits.
    """
    limits = {"memory_bytes": memory_bytes, "tokens": max_tokens}
    limits = _checked(budget, {name: value for name, value in limits.items() if value is not None})
    if inference_tokens < 0:
        raise ValueError(f"inference_tokens={inference_tokens} must not be negative.")
    draws = _laws(bootstrap_draws)
    serving = replace(family, sequence_length=family.sequence_length if context is None else context)
    notes, rows, losses = [], [], []
    for r in recurrences:
        width, tokens, binding = _best_width(law, budget, r, inference_tokens, limits, family, serving, batch, dtype)
        if width is None:
            notes.append(f"r = {r} has no model: {binding}.")
            continue
        cost = inference_cost(width, r, serving.sequence_length, batch, dtype, law, tokens, family)
        training, inference = tokens * family.flops_per_token(width, r), inference_tokens * cost.flops_per_token
        rows.append(
            {
                "r": r,
                "width": width,
                "s": width / 64,
                "n_unique": family.n_all(width, r),
                "tokens": tokens,
                "loss": cost.loss,
                "training_flops": training,
                "inference_flops": inference,
                "lifetime_flops": training + inference,
                "weight_bytes": cost.weight_bytes,
                "cache_bytes": cost.cache_bytes,
                "binding": binding,
            }
        )
        losses.append([predicted_loss(draw, width, tokens, r, family) for draw in draws])
    if not rows:
        raise ValueError("No recurrence count meets the limits. " + " ".join(notes))
    table, losses = pd.DataFrame(rows), np.array(losses)
    if draws:
        table["loss_low"], table["loss_high"] = np.percentile(losses, [2.5, 97.5], axis=1)
        table["best_share"] = np.bincount(losses.argmin(axis=0), minlength=len(rows)) / len(draws)
    best = table.loc[table["loss"].idxmin()]
    if isinstance(bootstrap_draws, Bootstrap) and not bootstrap_draws.identified:
        notes.insert(0, f"The runs behind this law do not determine phi: {bootstrap_draws.reason}")
    outside = _outside(best, fitted)
    if outside:
        notes.insert(0, f"This extrapolates, and the law may be off by more than it says: {', '.join(outside)}.")
    return Advice(
        int(best["r"]),
        int(best["width"]),
        float(best["tokens"]),
        float(best["loss"]),
        (float(best["loss_low"]), float(best["loss_high"])) if draws else None,
        table,
        tuple(notes),
    )


def _laws(draws) -> list[JointLaw]:
    if isinstance(draws, Bootstrap):
        return [JointLaw(**row, decomposition=draws.law.decomposition) for row in draws.draws.to_dict("records")]
    return list(draws or [])


def _best_width(law, budget, r, inference_tokens, limits, family, serving, batch, dtype):
    """`(width, tokens, binding)` of least loss in whole heads, or `(None, None, reason)`."""
    head, most_tokens = family.head_dim, limits.get("tokens", np.inf)
    if family.flops_per_token(head, r) > budget:
        return None, None, f"not one token of its narrowest model is within {budget:.4g} FLOPs"
    # Serving makes the best model narrower, never wider.
    data = {"tokens": most_tokens} if np.isfinite(most_tokens) else None
    widest = compute_optimal(law, budget, r, data, family).width
    widths = head * np.arange(1, int(widest // head) + 3)
    if "memory_bytes" in limits:
        needed = _memory(r, family, serving.sequence_length, batch, dtype)(widths)
        if needed[0] > limits["memory_bytes"]:
            return None, None, f"its narrowest needs {needed[0]:.4g} bytes of {limits['memory_bytes']:.4g}"
        fits = needed <= limits["memory_bytes"]
    else:
        fits = np.full(len(widths), True)
    paid = (budget - inference_tokens * serving.forward_flops_per_token(widths, r)) / family.flops_per_token(widths, r)
    if paid[0] < 1:
        return None, None, f"serving {inference_tokens:.4g} tokens costs its narrowest the whole budget"
    tokens = np.minimum(paid, most_tokens)
    candidates = paid >= 1
    loss = np.where(candidates, predicted_loss(law, widths, np.maximum(tokens, 1), r, family), np.inf)
    best = int(np.argmin(np.where(fits, loss, np.inf)))
    binding = []
    if not fits[loss.argmin()]:
        binding.append("memory_bytes")
    if paid[best] >= most_tokens:
        binding.append("tokens")
    return int(widths[best]), float(tokens[best]), tuple(binding)


def _outside(row: pd.Series, fitted: Mapping[str, tuple[float, float]]) -> list[str]:
    columns = dict(zip(PUBLISHED_RANGES, ("training_flops", "n_unique", "tokens", "r")))
    found = []
    for name, (low, high) in fitted.items():
        if name not in columns:
            raise ValueError(f"fitted has {name!r}, which is unknown: choose among {', '.join(columns)}.")
        value = row[columns[name]]
        if not low * (1 - 1e-3) <= value <= high * (1 + 1e-3):  # budgets are met to a step
            found.append(f"{name} {value:.4g} (fitted from {low:.4g} to {high:.4g})")
    return found


__all__ = [
    "CELL_NOISE",
    "PUBLISHED_RANGES",
    "RUN_NOISE",
    "Advice",
    "Hardware",
    "SweepPlan",
    "advise",
    "fitted_ranges",
    "plan_sweep",
    "residual_noise",
    "simulated_interval",
]
