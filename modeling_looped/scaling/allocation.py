"""
What to train with a budget: widths and tokens that minimise a law's loss, their exponents, and what a looped model is
worth in dense ones (arXiv 2604.21106, section 4 and appendices F and G; 3.5 and 3.6 of its spec). A width d is a real
number here, as the law's optimum is; budgets are training FLOPs in the convention of `modeling_looped.accounting`,
tokens and parameters are counts, losses nats per token. `n_unique` has norms and no embeddings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq, minimize_scalar

from ..accounting import forward_flops_per_token, inference_bytes, kv_cache_bytes
from ..configuration_looped import require_int
from ..configuration_looped_gpt import LoopedGPTConfig
from .family import ISO_DEPTH, Family
from .law import ChinchillaLaw, JointLaw


Law = JointLaw | ChinchillaLaw
BUDGETS = (4.64e17, 1e18, 2.15e18, 4.64e18, 1e19, 2.15e19)  # of the paper's grid, as are the widths
WIDTHS = tuple(64 * size for size in (6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 34))
LIMITS = ("unique_parameters", "tokens", "width", "memory_bytes")
_WIDEST = 2.0**24
_WITHOUT_NORMS = 1e9  # a width at which norms vanish beside matrices


@dataclass(frozen=True)
class Allocation:
    """
    A width and the tokens it is trained on. `flops` is what that costs, and `binding` names the limits that it meets:
    of the constraint, `"one head"` where no narrower model is to be had. Where a limit on the width and one on tokens
    bind at once, the budget is not spent.
    """

    num_recurrences: int
    width: float
    n_unique: float
    tokens: float
    loss: float
    flops: float
    binding: tuple[str, ...] = ()

    @property
    def s(self) -> float:
        """The paper's size: width / 64."""
        return self.width / 64


def predicted_loss(law: Law, width, tokens, num_recurrences: int, family: Family = ISO_DEPTH):
    """
    Loss in nats of a model of the family. A law of one architecture knows N alone, so it has to be the law of that
    `num_recurrences`. `width` and `tokens` are numbers or arrays.
    """
    if isinstance(law, JointLaw):
        n_once, n_rec = family.split(width, num_recurrences, law.decomposition)
        return law.predict(n_once, n_rec, tokens, num_recurrences)
    return law.predict(family.n_all(width, num_recurrences), tokens)


def compute_optimal(
    law: Law,
    budget: float,
    num_recurrences: int,
    constraint: Mapping[str, float] | None = None,
    family: Family = ISO_DEPTH,
) -> Allocation:
    """
    The width and tokens of least loss whose training costs at most `budget` FLOPs, by the exact FLOPs of the family.

    Args:
        constraint:
            The most there may be of each of these: `unique_parameters` (without embeddings), `tokens` (unrepeated
            data), `width`, and `memory_bytes`, of weights with embeddings and one sequence's key-value cache in bf16.

    Raises:
        `ValueError`: for a budget, a constraint or a name of one that leaves no model.
    """
    limits = _checked(budget, constraint)
    narrowest = float(family.head_dim)

    def flops(width):
        return family.flops_per_token(width, num_recurrences)

    if flops(narrowest) > budget:
        raise ValueError(
            f"budget={budget:.4g} FLOPs is less than one token costs at the narrowest width, {narrowest:.0f}: raise it."
        )
    widest, bound_by = _widest(limits, num_recurrences, family)
    most_tokens = limits.get("tokens", np.inf)
    one_token = _width_where(flops, budget)
    free = _minimum(
        lambda width: predicted_loss(law, width, budget / flops(width), num_recurrences, family), narrowest, one_token
    )
    # Fewer tokens than the budget pays for leave a wider model for the rest of it.
    all_tokens = narrowest if budget / flops(narrowest) <= most_tokens else _width_where(flops, budget / most_tokens)
    width = min(max(free, all_tokens), widest)
    tokens = min(budget / flops(width), most_tokens)
    binding = [bound_by] if width == widest else []
    if tokens * (1 + 1e-9) >= most_tokens:
        binding.append("tokens")
    if width <= narrowest * (1 + 1e-6):
        binding.append("one head")
    return _allocation(law, width, tokens, num_recurrences, family, tuple(binding))


def frontier(
    law: Law | Mapping[int, Law],
    budgets: Iterable[float] = BUDGETS,
    recurrences: Iterable[int] = (1, 2, 4, 8),
    constraint: Mapping[str, float] | None = None,
    family: Family = ISO_DEPTH,
) -> pd.DataFrame:
    """
    `compute_optimal` of every one of `budgets` and number of recurrences under the `constraint`, a row each, and `gap`,
    the loss above that of the first of `recurrences` at the same budget. `law` is a joint one or a mapping from
    recurrences to laws of one each.
    """
    recurrences = tuple(recurrences)
    laws = law if isinstance(law, Mapping) else dict.fromkeys(recurrences, law)
    if missing := [r for r in recurrences if r not in laws]:
        raise ValueError(f"There is no law for r={missing[0]}: give one, or leave it out of recurrences.")
    return _table(
        (budget, compute_optimal(laws[r], budget, r, constraint, family)) for budget in budgets for r in recurrences
    )


class Exponents(NamedTuple):
    """N* goes as C ** `parameters` and D* as C ** `tokens`."""

    parameters: float
    tokens: float


def allocation_exponents(
    law: Law,
    num_recurrences: int,
    method: str = "power_law",
    budgets: Iterable[float] = BUDGETS,
    widths: Iterable[float] = WIDTHS,
    family: Family = ISO_DEPTH,
) -> Exponents:
    """
    How the optimal unique parameters and tokens grow with the budget.

    The `method` `"power_law"` is the paper's figure 3: FLOPs per token as a power N ** gamma, by log-log regression
    over `widths`, and then beta / (alpha + beta * gamma). `"exact"` regresses the optima of `compute_optimal` over
    `budgets`, whose FLOPs are no power of N: the head and attention weigh most in narrow models. They differ, and the
    second is what a budget buys.
    """
    if method == "power_law":
        widths = np.asarray(tuple(widths), dtype=float)
        n_all, flops = family.n_all(widths, num_recurrences), family.flops_per_token(widths, num_recurrences)
        gamma = _slope(n_all, flops)
        parameters = law.beta / (law.alpha + law.beta * gamma)
        return Exponents(float(parameters), float(1 - gamma * parameters))
    if method == "exact":
        budgets = tuple(budgets)
        if len(set(budgets)) < 2:
            raise ValueError(f"budgets={list(budgets)} have no slope: give at least two different ones.")
        optima = [compute_optimal(law, budget, num_recurrences, family=family) for budget in budgets]
        return Exponents(*(_slope(budgets, [getattr(at, of) for at in optima]) for of in ("n_unique", "tokens")))
    raise ValueError(f"method={method!r} must be 'power_law' or 'exact'.")


def empirical_optimum(cell: pd.DataFrame, family: Family = ISO_DEPTH) -> Allocation:
    """
    The vertex of the least-squares parabola of `val_loss` in ln `n_unique` through the runs of a `cell`, one budget and
    one number of recurrences (columns `budget_flops`, `r`, `n_unique`, `val_loss`), without any law. The width is the
    one of that N in the family, and the tokens are what the budget pays for there.

    Raises:
        `ValueError`: for fewer than three widths, runs of several cells, or a parabola without a minimum.
    """
    if cell[["budget_flops", "r"]].drop_duplicates().shape[0] != 1:
        raise ValueError("An optimum is of one budget and one number of recurrences: select the runs of one cell.")
    budget, r = float(cell["budget_flops"].iloc[0]), int(cell["r"].iloc[0])
    where = f"The runs at budget_flops={budget:.4g}, r={r}"
    if cell["n_unique"].nunique() < 3:
        raise ValueError(f"{where} have {cell['n_unique'].nunique()} widths, and a parabola needs three.")
    middle = np.log(cell["n_unique"]).mean()  # about which the powers are well conditioned
    second, first, height = np.polyfit(np.log(cell["n_unique"]) - middle, cell["val_loss"], 2)
    if second <= 0:
        raise ValueError(f"{where} have no minimum: their parabola opens downwards. Add widths on both sides.")
    n_unique = float(np.exp(middle - first / (2 * second)))
    width = _width_where(lambda d: family.n_all(d, r), n_unique)
    loss = float(height - first**2 / (4 * second))
    return Allocation(r, width, n_unique, float(budget / family.flops_per_token(width, r)), loss, budget)


def empirical_optima(runs: pd.DataFrame, family: Family = ISO_DEPTH) -> pd.DataFrame:
    """`empirical_optimum` of every cell of `runs`, a row each as in `frontier`, gaps to the least recurrences."""
    cells = runs.groupby(["budget_flops", "r"], sort=True)
    return _table((budget, empirical_optimum(cell, family)) for (budget, _), cell in cells)


# What a looped model is worth, at the width and the executed layers of a dense one (appendix F.4).


def unique_ratio(num_recurrences: int, injection: bool = True, family: Family = ISO_DEPTH) -> float:
    """
    Unique matrices of a looped model over those of the dense one of its width: 0.4083 at r = 4, 0.4 without those of
    the `injection`.
    """
    if injection:
        unique, dense = (family.n_all(_WITHOUT_NORMS, r) for r in (num_recurrences, 1))
        return float(unique / dense)
    return effective_ratio(num_recurrences, 0.0, family=family)


def effective_ratio(num_recurrences: int, phi: float, convention: str = "layers", family: Family = ISO_DEPTH) -> float:
    """
    The dense parameters that the law counts for a looped model, over those of the dense one of its width.

    The paper has three `convention`s: `"layers"` drops the injection's n_i (its text: 0.578 at r = 4, phi = 0.46),
    `"paper"` keeps it in N_rec (0.594), `"regression"` is the split that its fits and figure 1 use (0.5835).
    """
    if convention == "layers":
        ends = family.prelude + family.coda
        looped = num_recurrences**phi * family.looped / num_recurrences
        return (ends + looped) / (ends + family.looped)
    (once, rec), (dense_once, dense_rec) = (family.split(_WITHOUT_NORMS, r, convention) for r in (num_recurrences, 1))
    return float((once + num_recurrences**phi * rec) / (dense_once + dense_rec))


def dense_equivalent(
    n: float, num_recurrences: int, phi: float, convention: str = "layers", family: Family = ISO_DEPTH
) -> float:
    """
    Parameters of the dense model that a looped one equals in loss at equal tokens. `n` is the r = 1 model of the same
    width, `phi` and `convention` are those of `effective_ratio`: of 1B, r = 4 stores `unique_ratio` * n = 410M, is
    worth 580M, and trains at the cost of 1B.
    """
    return n * effective_ratio(num_recurrences, phi, convention, family)


def cost_equivalent(n: float, num_recurrences: int, injection: bool = False, family: Family = ISO_DEPTH) -> float:
    """
    Parameters of the dense model that costs as many FLOPs per token in matrices: `n` itself, the r = 1 model of the
    same width, or with its `injection` r * n_i more (3.3 % at r = 4).
    """
    if not injection:
        return n
    (once, rec), dense = family.split(_WITHOUT_NORMS, num_recurrences, "paper"), family.n_all(_WITHOUT_NORMS, 1)
    return float(n * (once + num_recurrences * rec) / dense)


@dataclass(frozen=True)
class InferenceCost:
    """
    Of serving one model: FLOPs of a token's forward pass at a full context, bytes of weights (embeddings too) and of a
    full key-value cache, and the loss that a law predicts, `None` where none was asked.
    """

    flops_per_token: int
    weight_bytes: int
    cache_bytes: int
    loss: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def family_config(width: int, num_recurrences: int, family: Family = ISO_DEPTH) -> LoopedGPTConfig:
    """
    The model of the family; r = 1 is one stack without injection.

    Raises:
        `ValueError`: where `width` is no multiple of the heads' size, or the recurrences do not divide the layers.
    """
    return LoopedGPTConfig(**family.fields(width, num_recurrences))


def inference_cost(
    config_or_width: LoopedGPTConfig | int,
    num_recurrences: int | None = None,
    context: int | None = None,
    batch: int = 1,
    dtype: str | torch.dtype = "bfloat16",
    law: Law | None = None,
    tokens: float | None = None,
    family: Family = ISO_DEPTH,
) -> InferenceCost:
    """
    What a model costs to serve, counted by `modeling_looped.accounting`, beside the loss of `law` after `tokens`.

    Args:
        config_or_width: A configuration, or a width of the family, a multiple of its heads' size.
        num_recurrences: The configuration's own by default.
        context: Tokens in the cache of each of `batch` sequences; the training length by default.
        dtype: Of weights and cache, by torch's name.
    """
    if isinstance(config_or_width, LoopedGPTConfig):
        config = config_or_width
        num_recurrences = config.recurrences_or_default(num_recurrences)
    elif num_recurrences is None:
        raise ValueError(f"num_recurrences is needed beside a width ({config_or_width}).")
    else:
        config = family_config(config_or_width, num_recurrences, family)
    if (law is None) != (tokens is None):
        raise ValueError("A loss needs both: law and the tokens that the model is trained on.")
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} must be one of torch, such as 'bfloat16'.")
    size, context = dtype.itemsize, config.max_position_embeddings if context is None else context
    require_int("context", context, 1)
    require_int("batch", batch, 1)
    cache = kv_cache_bytes(config, context, batch, num_recurrences, size)
    return InferenceCost(
        forward_flops_per_token(config, context, num_recurrences),
        inference_bytes(config, context, batch, num_recurrences, size) - cache,
        cache,
        None if law is None else float(predicted_loss(law, config.hidden_size, tokens, num_recurrences, family)),
    )


@lru_cache(maxsize=256)
def _memory(num_recurrences: int, family: Family, context: int, batch: int, dtype: str):
    """
    Bytes of weights and cache as a function of a real width. The accounting counts models, whose widths are whole
    heads; bytes are a quadratic in the width (matrices, then tables, norms and cache), which three of them determine.
    """
    widths = [heads * family.head_dim for heads in (1, 2, 3)]
    costs = [inference_cost(width, num_recurrences, context, batch, dtype, family=family) for width in widths]
    return np.poly1d(np.polyfit(widths, [cost.total_bytes for cost in costs], 2))


def _checked(budget: float, constraint: Mapping[str, float] | None) -> dict[str, float]:
    if not budget > 0 or not np.isfinite(budget):
        raise ValueError(f"budget={budget} must be a positive number of FLOPs.")
    limits = dict(constraint or {})
    for name, value in limits.items():
        if name not in LIMITS:
            raise ValueError(f"constraint {name!r} is unknown: choose among {', '.join(LIMITS)}.")
        if not value > 0:
            raise ValueError(f"constraint {name}={value} must be positive.")
    return limits


def _widest(limits: Mapping[str, float], num_recurrences: int, family: Family) -> tuple[float, str]:
    """The widest model within the limits, and the name of the one that it meets; infinite without any."""
    of_width = {
        "unique_parameters": lambda width: family.n_all(width, num_recurrences),
        "memory_bytes": lambda width: _memory(num_recurrences, family, family.sequence_length, 1, "bfloat16")(width),
    }
    widths = [(np.inf, "")]
    for name in limits.keys() - {"tokens"}:
        least = float(of_width[name](family.head_dim)) if name in of_width else family.head_dim
        if least > limits[name]:
            raise ValueError(
                f"constraint {name}={limits[name]:.6g} leaves no model: one head of {family.head_dim} at "
                f"r={num_recurrences} has {least:.6g}."
            )
        widths.append((_width_where(of_width[name], limits[name]) if name in of_width else limits[name], name))
    return min(widths)


def _width_where(function, value: float) -> float:
    """The width at which a growing function of it has this value, even a fraction of a head."""
    edges = 1e-3, _WIDEST
    if function(edges[1]) <= value:
        return edges[1]
    log_width = brentq(lambda x: np.log(function(np.exp(x)) / value), *np.log(edges), xtol=1e-13, rtol=1e-13)
    return float(np.exp(log_width))


def _minimum(function, low: float, high: float) -> float:
    """Of a function of the width with one minimum; at an edge, the edge itself."""
    bounds, options = (np.log(low), np.log(high)), {"xatol": 1e-9}
    found = minimize_scalar(lambda x: float(function(np.exp(x))), bounds=bounds, method="bounded", options=options)
    return min((float(np.exp(found.x)), low, high), key=function)


def _slope(x, y) -> float:
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def _allocation(law, width, tokens, num_recurrences, family, binding=()) -> Allocation:
    n_unique, flops = family.n_all(width, num_recurrences), tokens * family.flops_per_token(width, num_recurrences)
    loss = predicted_loss(law, width, tokens, num_recurrences, family)
    return Allocation(num_recurrences, float(width), float(n_unique), float(tokens), float(loss), float(flops), binding)


def _table(allocations) -> pd.DataFrame:
    rows = [{"budget_flops": budget, **asdict(at), "s": at.s} for budget, at in allocations]
    frame = pd.DataFrame(rows).rename(columns={"num_recurrences": "r"})
    frame["gap"] = frame["loss"] - frame.groupby("budget_flops")["loss"].transform("first")
    return frame[["budget_flops", "r", "width", "s", "n_unique", "tokens", "loss", "gap", "flops", "binding"]]


__all__ = [
    "BUDGETS",
    "LIMITS",
    "WIDTHS",
    "Allocation",
    "Exponents",
    "InferenceCost",
    "allocation_exponents",
    "compute_optimal",
    "cost_equivalent",
    "dense_equivalent",
    "effective_ratio",
    "empirical_optima",
    "empirical_optimum",
    "family_config",
    "frontier",
    "inference_cost",
    "predicted_loss",
    "unique_ratio",
]
