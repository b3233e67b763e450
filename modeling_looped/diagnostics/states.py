"""
What each pass over the core does to the state of a looped model: how good an exit it would be, how much it resembles
the others, and whether the passes arrive somewhere (sections 7 and 11 of arXiv 2608.15062's specification).

States are numbered by the passes behind them: h(0) is the state before the first, h(1) the one after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from modeling_looped.eval.exit_curve import can_run

from .measurement import Measurement, heatmap, style
from .probe import Probe, Rows
from .residual import SMALLEST


AT_ONCE = 1024  # tokens whose logits exist at the same time


def num_passes(probe: Probe) -> int:
    """
    Passes over the core that `probe.run` makes.

    Raises:
        `ValueError`: for a model that makes none.
    """
    passes = probe.model.config.plan(probe.num_recurrences).passes if probe.is_looped else 0
    if passes < 1:
        how = (
            "pass num_recurrences=1 or more"
            if getattr(probe.model.config, "num_core_layers", 0)
            else "use a looped one"
        )
        raise ValueError(f"{type(probe.model).__name__} has no recurrences to look at: {how}.")
    return passes


def looped_probe(model, num_recurrences: int | None = None) -> Probe:
    """A `Probe` of a model with recurrences; an error as of `num_passes` for another."""
    probe = Probe.of(model, num_recurrences)
    num_passes(probe)
    return probe


def predictions(probe: Probe, rows: Rows, *states: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """
    The tokens to predict, a part at a time: their ids, (n), and from each of `states`, (batch, length, width), the
    logits for them, (n, vocabulary), fp32. The first token of a text is not predicted.
    """
    chosen = rows.mask[:, :-1].to(probe.device)
    parts = [rows.input_ids.to(probe.device)[:, 1:][chosen].split(AT_ONCE)]
    parts += [state[:, :-1][chosen.to(state.device)].split(AT_ONCE) for state in states]
    with torch.no_grad():
        for targets, *chunks in zip(*parts, strict=True):
            yield targets, *(probe.head(chunk) for chunk in chunks)


def style_passes(ax, xlabel: str, ylabel: str) -> None:
    """`style` of axes on which whole passes stand."""
    style(ax, xlabel, ylabel)
    ax.xaxis.get_major_locator().set_params(integer=True)


@dataclass(frozen=True)
class ExitCurve(Measurement):
    """
    The exits after k = 0, 1, ... passes; the arrays are (k). Means over all predicted tokens.

    Args:
        loss: L(k), nats a token.
        accuracy: Share of tokens that are predicted as the most likely next one.
        kl_to_final, kl_from_final: KL(p_R || p_k) and KL(p_k || p_R), nats.
        num_recurrences: R, the exit that the others are compared with.
        tokens: How many tokens the means are over.
    """

    title = "Early exits"
    reading = "Loss of the model when it stops after so many passes; the dotted line is the number it is meant to make."

    loss: np.ndarray
    accuracy: np.ndarray
    kl_to_final: np.ndarray
    kl_from_final: np.ndarray
    num_recurrences: int
    tokens: int

    @property
    def gain(self) -> np.ndarray:
        """L(k-1) - L(k); NaN at k = 0."""
        return np.append(np.nan, -np.diff(self.loss))

    @property
    def frac_cum(self) -> np.ndarray:
        """(L(0) - L(k)) / (L(0) - L(R)); NaN where the passes up to R change nothing."""
        whole = self.loss[0] - self.loss[self.num_recurrences]
        return (self.loss[0] - self.loss) / (whole or np.nan)

    @property
    def retention(self) -> np.ndarray:
        """Accuracy over that of exit R."""
        return self.accuracy / (self.accuracy[self.num_recurrences] or np.nan)

    def to_frame(self):
        import pandas as pd

        names = ("loss", "gain", "frac_cum", "accuracy", "retention", "kl_to_final", "kl_from_final")
        columns = {name: getattr(self, name) for name in names}
        return pd.DataFrame({"num_recurrences": range(len(self.loss)), **columns})

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.plot(range(len(self.loss)), self.loss, marker="o", markersize=3, color=color, label=label)
        ax.axvline(self.num_recurrences, color=color, linestyle=":", linewidth=1)
        style_passes(ax, "passes before the exit", "loss (nats/token)")

    def headline(self):
        best, last = int(np.argmin(self.loss)), self.num_recurrences
        text = f"From {self.loss[0]:.3g} nats without a pass to {self.loss[last]:.3g} after {last}"
        middle = last // 2
        if middle and np.isfinite(self.frac_cum[middle]):
            text += f", {100 * self.frac_cum[middle]:.3g} % of the way after {middle}"
        return f"{text}; the best exit is after {best} ({self.loss[best]:.3g})."


def exit_curve(
    model, rows: Sequence[Sequence[int]], max_recurrences: int | None = None, batch_size: int = 8
) -> ExitCurve:
    """
    All exits of one run of `max_recurrences` passes (section 7). Outside training, exit k is what the model computes
    with `num_recurrences=k`, except in Mixture-of-Recursions with token choice, whose tokens choose among the passes
    that there are. Exit 0 sends the state before the first pass through the coda; only RecurrentGPT is trained for it.

    Args:
        model: A looped model, or a `Probe` of one, whose number of passes is R.
        max_recurrences: The last exit; the trained number of passes by default, R at least.

    Raises:
        `ValueError`: for a model without recurrences, or a `max_recurrences` below R or that it cannot run.
    """
    probe = looped_probe(model)
    config, final = probe.model.config, num_passes(probe)
    most = max(final, config.trained_recurrences) if max_recurrences is None else max_recurrences
    if most < final:
        raise ValueError(
            f"max_recurrences={most} must be at least {final}, the number of passes whose exit the others are compared "
            "with: leave it out, or give a Probe with fewer num_recurrences."
        )
    config.check_recurrences(most)
    if most != final:
        probe = Probe(probe.model, most)
    sums, tokens = torch.zeros(4, num_passes(probe) + 1, dtype=torch.float64), 0
    for batch in probe.batches(rows, batch_size):
        exits = probe.run(batch, output_exits=True).exit_states
        for k, state in enumerate(exits):
            for targets, logits, final_logits in predictions(probe, batch, state, exits[final]):
                here, there = logits.log_softmax(-1), final_logits.log_softmax(-1)
                values = (
                    F.nll_loss(here, targets, reduction="none"),
                    here.argmax(-1) == targets,
                    F.kl_div(here, there, log_target=True, reduction="none").sum(-1),
                    F.kl_div(there, here, log_target=True, reduction="none").sum(-1),
                )
                sums[:, k] += torch.stack([value.double().sum().cpu() for value in values])
        tokens += int(batch.mask[:, :-1].sum())
    return ExitCurve(*(sums / tokens).numpy(), num_recurrences=final, tokens=tokens)


@dataclass(frozen=True)
class StateSimilarity(Measurement):
    """
    Linear CKA over tokens: 1 where two states are the same up to rotation and scale. NaN where one does not vary.

    Args:
        similarity: (states, states), of h(r) with h(s), or (states, executed layers), of h(r) with what another
            model's layer reads.
        other: Whether the columns are another model's layers.
        tokens: How many tokens it is over.
    """

    title = "Similarity of states"
    reading = (
        "Linear CKA of the states after so many passes, 0 being the one before the first: a bright square is a run of "
        "passes that leave the state much as it is."
    )
    overlay = False

    similarity: np.ndarray
    other: bool = False
    tokens: int = 0

    def to_frame(self):
        import pandas as pd

        rows, columns = np.indices(self.similarity.shape).reshape(2, -1)
        name = "layer" if self.other else "other_passes"
        return pd.DataFrame({"passes": rows, name: columns, "similarity": self.similarity.ravel()})

    def plot(self, ax, label=None, color="#1f5fa8"):
        xlabel = "executed layer of the other model" if self.other else "passes"
        heatmap(ax, self.similarity, xlabel, "passes (0: before the first)")
        if label:
            ax.set_title(label, fontsize="small")

    def headline(self):
        if self.other:
            # A state of zeros is like no layer.
            nearest = np.nan_to_num(self.similarity, nan=-1).argmax(1)
            return (
                f"The state before the first pass is most like what layer {nearest[0]} reads "
                f"({self.similarity[0, nearest[0]]:.3g}), the last like what layer {nearest[-1]} reads "
                f"({self.similarity[-1, nearest[-1]]:.3g})."
            )
        last = len(self.similarity) - 1
        return (
            f"The state after the last pass resembles the one before it at {self.similarity[last, last - 1]:.3f}, "
            f"and that before the first at {self.similarity[last, 0]:.3f}."
        )


class _Moments:
    """Sums over tokens from which the linear CKA of all pairs follows. No token is kept."""

    def __init__(self):
        self.tokens, self.sums = 0, None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """(states, tokens, width) of the rows, and of the columns."""
        x, y = x.double(), y.double()
        flat = [z.transpose(0, 1).flatten(1) for z in (x, y)]
        own = [z.transpose(1, 2) @ z for z in (x, y)]
        new = [x.sum(1), y.sum(1), *own, flat[0].T @ flat[1]]
        self.sums = new if self.sums is None else [total + part for total, part in zip(self.sums, new, strict=True)]
        self.tokens += x.shape[1]

    def similarity(self) -> np.ndarray:
        x, y, xx, yy, xy = self.sums
        own = [(total - z[:, :, None] * z[:, None] / self.tokens, total) for z, total in ((x, xx), (y, yy))]
        # A state that does not vary, zeros for one, leaves rounding only: no similarity then.
        norms = [c.norm(dim=(1, 2)) for c, _ in own]
        norms = [
            n.where(n > 1e-12 * total.norm(dim=(1, 2)), torch.nan) for n, (_, total) in zip(norms, own, strict=True)
        ]
        centred = xy - x.flatten()[:, None] * y.flatten() / self.tokens
        shared = centred.view(*x.shape, *y.shape).square().sum((1, 3))
        return (shared / (norms[0][:, None] * norms[1])).cpu().numpy()


def state_similarity(
    model, rows: Sequence[Sequence[int]], other=None, batch_size: int = 8, num_recurrences: int | None = None
) -> StateSimilarity:
    """
    Args:
        model: A looped model, or a `Probe` of one.
        other: Another decoder with the same tokenizer, whose layers' inputs the states are compared with.

    Memory is (states x width) x (columns x width) numbers of 8 bytes.

    Raises:
        `ValueError`: for a model without recurrences.
    """
    probe = looped_probe(model, num_recurrences)
    second = None if other is None else Probe.of(other)
    moments = _Moments()
    for batch in probe.batches(rows, batch_size):
        x = y = torch.stack([h[batch.mask.to(h.device)] for h in probe.run(batch).recurrent_states])
        if second is not None:
            y = torch.stack(_layer_inputs(second, batch)).to(x.device)
        moments.add(x, y)
    return StateSimilarity(moments.similarity(), second is not None, moments.tokens)


def _layer_inputs(probe: Probe, batch: Rows) -> list[torch.Tensor]:
    found, mask = [], batch.mask.to(probe.device)
    probe.run(batch, on_input=lambda position, h: found.append(h[mask]))
    return found


def verdict_of(step: Sequence[float], residual: Sequence[float], two_back: Sequence[float]) -> str:
    """
    In this order, of what is defined in `FixedPoint`:

    - "converges": the last residual is at most 0.001; or steps shrink by a factor c < 1 a pass over the second half of
      the passes, and what is left to go if they go on like this, residual * c / (1 - c), is at most 0.1 of the state.
    - "cycles": at the end, the state two passes ago is at most half as far away as the last one.
    - "drifts": else; longer cycles too.

    Args:
        step, residual: (n), of the passes 1 to n.
        two_back: (n - 1), of the passes 2 to n.

    Raises:
        `ValueError`: for fewer than two passes.
    """
    passes = len(step)
    if passes < 2:
        raise ValueError(f"{passes} passes: where a state is going is seen from two passes on.")
    middle = (passes - 1) // 2
    factor = (step[-1] / max(step[middle], SMALLEST)) ** (1 / (passes - 1 - middle))
    if residual[-1] <= 1e-3 or (factor < 1 and residual[-1] * factor / (1 - factor) <= 0.1):
        return "converges"
    return "cycles" if two_back[-1] <= residual[-1] / 2 else "drifts"


@dataclass(frozen=True)
class FixedPoint(Measurement):
    """
    Where the passes lead; entry 0 of an array is the first pass for which it is defined. Means over all tokens.

    Args:
        step: (n), the length of h(r) - h(r-1), r = 1, ..., n.
        residual: (n), the same over the length of h(r).
        two_back: (n - 1), the length of h(r) - h(r-2) over that of h(r), r = 2, ..., n: small in a cycle of two.
        cosine: (n - 1), of h(r) - h(r-1) and h(r-1) - h(r-2), r = 2, ..., n: negative where the state goes to and fro.
        trained_recurrences: R, the most passes that the model was trained with.
        wanted: The number of passes that was asked for; n is smaller where the model cannot run so many.
        tokens: How many tokens the means are over.
    """

    title = "Towards a fixed point"
    reading = (
        "How far a pass moves the state, as a share of its length: a straight fall is a contraction, a level line a "
        "cycle or a drift; the dotted line is the trained number of passes."
    )

    step: np.ndarray
    residual: np.ndarray
    two_back: np.ndarray
    cosine: np.ndarray
    trained_recurrences: int
    wanted: int
    tokens: int = 0

    @property
    def contraction(self) -> np.ndarray:
        """(n - 1), `step` over the one before, r = 2, ..., n: of means, so that a token at rest upsets nothing."""
        return self.step[1:] / np.maximum(self.step[:-1], SMALLEST)

    @property
    def verdict(self) -> str:
        """ "converges", "cycles" or "drifts": see `verdict_of`."""
        return verdict_of(self.step, self.residual, self.two_back)

    def to_frame(self):
        import pandas as pd

        later = {name: np.append(np.nan, getattr(self, name)) for name in ("contraction", "two_back", "cosine")}
        passes = range(1, len(self.step) + 1)
        return pd.DataFrame({"pass": passes, "step": self.step, "residual": self.residual, **later})

    def plot(self, ax, label=None, color="#1f5fa8"):
        passes = range(1, len(self.step) + 1)
        # A state at rest has no place on a logarithmic axis.
        ax.plot(passes, np.maximum(self.residual, SMALLEST), marker="o", markersize=3, color=color, label=label)
        ax.axvline(self.trained_recurrences, color=color, linestyle=":", linewidth=1)
        ax.set_yscale("log")
        style_passes(ax, "pass", "|h(r) - h(r-1)| / |h(r)|")

    def headline(self):
        passes = len(self.step)
        text = (
            f"The state {self.verdict}: pass {passes} still moves it by {self.residual[-1]:.3g} of its length, "
            f"{self.contraction[-1]:.3g} times the step before."
        )
        return text if passes >= self.wanted else f"{text} This model can make no more than {passes} passes."


def fixed_point(
    model, rows: Sequence[Sequence[int]], max_recurrences: int | None = None, batch_size: int = 8
) -> FixedPoint:
    """
    Args:
        model: A looped model, or a `Probe` of one (whose own number of passes is not used).
        max_recurrences: Passes to make, at least 2. By default twice the trained number, or as many as the model can
            run.

    The states are those that the coda would get, hyperconnection's lanes summed.

    Raises:
        `ValueError`: for a model without recurrences, or a number of passes below 2 or that it cannot run.
    """
    probe = looped_probe(model)
    config = probe.model.config
    wanted = 2 * config.trained_recurrences if max_recurrences is None else max_recurrences
    most = wanted
    if max_recurrences is None:
        most = next((n for n in range(wanted, 2, -1) if can_run(config, n)), 2)
    if most < 2:
        raise ValueError(f"max_recurrences={most} must be at least 2 passes, of which one has a step before it.")
    config.check_recurrences(most)
    probe = Probe(probe.model, most)
    sums, tokens = {}, 0
    for batch in probe.batches(rows, batch_size):
        states = probe.run(batch).recurrent_states
        h = torch.stack([state[batch.mask.to(state.device)].float() for state in states])
        steps, length = h.diff(dim=0), h[1:].norm(dim=-1).clamp(min=SMALLEST)
        values = {
            "step": steps.norm(dim=-1),
            "residual": steps.norm(dim=-1) / length,
            "two_back": (h[2:] - h[:-2]).norm(dim=-1) / length[1:],
            "cosine": F.cosine_similarity(steps[1:], steps[:-1], dim=-1),
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value.double().sum(-1).cpu().numpy()
        tokens += h.shape[1]
    means = {name: total / tokens for name, total in sums.items()}
    return FixedPoint(**means, trained_recurrences=config.trained_recurrences, wanted=wanted, tokens=tokens)
