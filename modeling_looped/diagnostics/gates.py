"""
What the gate of a RecurrentGPT lets through, what it looks at, and which tokens the passes help (section 11 of the
specification of arXiv 2608.15062).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .measurement import Measurement, style
from .probe import Probe, Rows
from .residual import SMALLEST
from .states import looped_probe, num_passes, predictions, style_passes


def gate_of(probe: Probe) -> nn.Module:
    """
    The injection of a gated model.

    Raises:
        `ValueError`: for a model without a gate, or that makes no pass.
    """
    if not probe.is_gated:
        raise ValueError(f"{type(probe.model).__name__} has no gate to look at: use a RecurrentGPT with gate='mlp'.")
    num_passes(probe)
    return probe.base.injection


@contextmanager
def hooked(hooks: dict[nn.Module, Callable]) -> Iterator[None]:
    """Functions (module, args, output) behind modules, for a while."""
    handles = [module.register_forward_hook(function) for module, function in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class GateStatistics(Measurement):
    """
    (passes) each: means over all tokens, and channels where a value has them.

    Args:
        gate: g, the share of the old state that is kept.
        deviation: Standard deviation of g over tokens and channels, without noise.
        copied, written: Shares of the channels with g above 0.95, and below 0.05.
        proposal: Norm of o, the core's output.
        applied: Norm of (1 - g) * o, what is written of it.
        change: Norm of h(r) - h(r-1), which includes what is taken from the old state.
        openness: rho, `applied` over `proposal`: of the means, as the paper's 17.6 / 96.7 = 0.182.
        openness_of_tokens: The mean over tokens of the same ratio.
        tokens: How many tokens the means are over.
    """

    title = "The gate"
    reading = (
        "Solid: share of the old state that the gate keeps in each pass. Dashed: share of the core's output that is "
        "written (effective openness). Where the dashed line falls, early passes write and late ones copy."
    )

    gate: np.ndarray
    deviation: np.ndarray
    copied: np.ndarray
    written: np.ndarray
    proposal: np.ndarray
    applied: np.ndarray
    change: np.ndarray
    openness_of_tokens: np.ndarray
    tokens: int

    @property
    def openness(self) -> np.ndarray:
        return self.applied / np.maximum(self.proposal, SMALLEST)

    def to_frame(self):
        import pandas as pd

        names = ("gate", "deviation", "copied", "written", "proposal", "applied", "change", "openness")
        columns = {name: getattr(self, name) for name in (*names, "openness_of_tokens")}
        return pd.DataFrame({"pass": range(1, len(self.gate) + 1), **columns})

    def plot(self, ax, label=None, color="#1f5fa8"):
        passes = range(1, len(self.gate) + 1)
        ax.plot(passes, self.gate, marker="o", markersize=3, color=color, label=label or "mean gate")
        openness = "effective openness" if label is None else None
        ax.plot(passes, self.openness, marker="o", markersize=3, linestyle="--", color=color, label=openness)
        if label is None:
            ax.legend(frameon=False, fontsize="small")
        style_passes(ax, "pass", "mean gate, openness (dashed)")

    def headline(self):
        return (
            f"The gate keeps {self.gate[0]:.3g} of the state in the first pass and {self.gate[-1]:.3g} in the last; "
            f"effective openness goes from {self.openness[0]:.3g} to {self.openness[-1]:.3g}."
        )


def gate_statistics(
    model, rows: Sequence[Sequence[int]], batch_size: int = 8, num_recurrences: int | None = None
) -> GateStatistics:
    """
    Args:
        model: A gated RecurrentGPT, or a `Probe` of one.

    Raises:
        `ValueError`: for a model without a gate.
    """
    probe = looped_probe(model, num_recurrences)
    injection = gate_of(probe)
    passes, tokens, seen = num_passes(probe), 0, {}
    names = ("gate", "square", "copied", "written", "proposal", "applied", "change", "openness_of_tokens", "plain")
    sums = {name: np.zeros(passes) for name in names}

    def on_logit(module, args, logit):
        seen["gate"] = torch.sigmoid(logit.float() / probe.model.config.gate_temperature)

    def on_injection(module, args, output):
        if args[0] != "write":
            return
        state, recurrence, mask = args[2], args[4], seen["mask"]
        gate = seen.pop("gate")[mask].double()
        sums["plain"][recurrence] += gate.mean(-1).sum().item()
        sums["square"][recurrence] += gate.square().mean(-1).sum().item()
        sums["change"][recurrence] += (output.float() - state.float())[mask].norm(dim=-1).double().sum().item()

    with hooked({injection.gate_logit: on_logit, injection: on_injection}):
        for batch in probe.batches(rows, batch_size):
            mask = seen["mask"] = batch.mask.to(probe.device)
            found = {name: value[:, mask].double() for name, value in probe.run(batch).gate_statistics.items()}
            found |= {"gate": found["mean"], "proposal": found["proposal_norm"], "applied": found["update_norm"]}
            found["openness_of_tokens"] = found["applied"] / found["proposal"].clamp(min=SMALLEST)
            for name in sums.keys() & found.keys():
                sums[name] += found[name].sum(-1).cpu().numpy()
            tokens += int(mask.sum())
    means = {name: total / tokens for name, total in sums.items()}
    deviation = np.sqrt(np.maximum(means.pop("square") - means.pop("plain") ** 2, 0))
    return GateStatistics(**means, deviation=deviation, tokens=tokens)


@dataclass(frozen=True)
class GateAttribution(Measurement):
    """
    What the gate looks at: the state h(r-1), the rest being the anchor. (passes) each.

    Args:
        state: Share of the state by variance: what state and anchor each bring to the gate's first matrix,
            Var(z_x) / (Var(z_x) + Var(z_p)) over tokens, averaged over its outputs.
        state_shuffled: Share of the state by shuffling: of the two errors that the gate's logit has when one of its
            inputs comes from another token of the same text, averaged over channels.
        state_drop, anchor_drop: These errors, as shares of the variance of the logit over tokens: how much of it is
            no longer explained. Up to 2, for two independent values.
        tokens: How many tokens it is over.
    """

    title = "What the gate looks at"
    reading = (
        "Share of the variation in the gate that comes from the state, not from the anchor; solid by the variance in "
        "the gate's first matrix, dashed by shuffling its inputs."
    )

    state: np.ndarray
    state_shuffled: np.ndarray
    state_drop: np.ndarray
    anchor_drop: np.ndarray
    tokens: int

    @property
    def anchor(self) -> np.ndarray:
        return 1 - self.state

    @property
    def anchor_shuffled(self) -> np.ndarray:
        return 1 - self.state_shuffled

    def to_frame(self):
        import pandas as pd

        names = ("state", "anchor", "state_shuffled", "anchor_shuffled", "state_drop", "anchor_drop")
        columns = {name: getattr(self, name) for name in names}
        return pd.DataFrame({"pass": range(1, len(self.state) + 1), **columns})

    def plot(self, ax, label=None, color="#1f5fa8"):
        passes = range(1, len(self.state) + 1)
        ax.plot(passes, self.state, marker="o", markersize=3, color=color, label=label)
        ax.plot(passes, self.state_shuffled, marker="o", markersize=3, linestyle="--", color=color)
        ax.axhline(0.5, color="0.5", alpha=0.35, linewidth=0.8)
        ax.set_ylim(0, 1)
        style_passes(ax, "pass", "share of the state")

    def headline(self):
        return (
            f"{100 * self.state[0]:.3g} % of the gate's variance comes from the state in the first pass, "
            f"{100 * self.state[-1]:.3g} % in the last; by shuffling, {100 * self.state_shuffled[0]:.3g} % and "
            f"{100 * self.state_shuffled[-1]:.3g} %."
        )


def gate_attribution(
    model, rows: Sequence[Sequence[int]], batch_size: int = 8, seed: int = 0, num_recurrences: int | None = None
) -> GateAttribution:
    """
    The paper does not say how its shares were found; both readings of the specification, section 11, are here. The
    LayerNorm over both inputs centres and scales them together, so each is centred alone and scaled by what the pair
    is scaled by: the two parts then add up to what the gate's first matrix puts out.

    Args:
        model: A gated RecurrentGPT, or a `Probe` of one.
        seed: Of the shuffling, a permutation of each text's tokens, the same in every pass.

    Raises:
        `ValueError`: for a model without a gate.
    """
    probe = looped_probe(model, num_recurrences)
    injection = gate_of(probe)
    passes, width = num_passes(probe), probe.model.config.hidden_size
    parts, logits = torch.zeros(2, 3, passes, width).double(), torch.zeros(3, passes, width).double()
    errors = torch.zeros(2, passes, width).double()
    number = tokens = 0
    for batch in probe.batches(rows, batch_size):
        mask, order = batch.mask.to(probe.device), torch.arange(batch.mask.shape[1]).repeat(len(batch.mask), 1)
        for places, real in zip(order, batch.mask, strict=True):
            drawn = np.random.default_rng([seed, number]).permutation(int(real.sum()))
            places[real] = places[real][torch.from_numpy(drawn)]
            number += 1
        order = order.to(probe.device)[..., None].expand(-1, -1, width)
        with torch.no_grad():
            for r, both in enumerate(_gate_inputs(probe, batch)):
                state, anchor = both.split(width, dim=-1)
                for kind, part in enumerate(parts_of_gate(injection, state, anchor)):
                    _add(parts[kind, :, r], part[mask])
                logit = gate_logit(injection, state, anchor)[mask].double()
                _add(logits[:, r], logit)
                changed = (state.gather(1, order), anchor), (state, anchor.gather(1, order))
                for kind, (x, p) in enumerate(changed):
                    errors[kind, r] += (gate_logit(injection, x, p)[mask].double() - logit).square().sum(0).cpu()
        tokens += int(mask.sum())
    drops = errors / tokens / _variance(logits)
    return GateAttribution(
        state=_share(_variance(parts[0]), _variance(parts[1])),
        state_shuffled=_share(errors[0], errors[1]),
        state_drop=drops[0].nanmean(-1).numpy(),
        anchor_drop=drops[1].nanmean(-1).numpy(),
        tokens=tokens,
    )


def _gate_inputs(probe: Probe, batch: Rows) -> list[torch.Tensor]:
    """Of each pass, state and anchor side by side, both normed: (batch, length, 2 * width)."""
    found = []
    with hooked({probe.base.injection.gate_norm: lambda module, args, output: found.append(args[0])}):
        probe.run(batch)
    return found


def parts_of_gate(injection: nn.Module, state: torch.Tensor, anchor: torch.Tensor) -> list[torch.Tensor]:
    """What the normed `state` and `anchor`, (..., width), each bring to the gate's first matrix: both (..., width)."""
    weight = injection.gate_hidden.weight.float()
    pair = [torch.cat([state, torch.zeros_like(anchor)], -1), torch.cat([torch.zeros_like(state), anchor], -1)]
    pair = [part.float() for part in pair]
    norm = injection.gate_norm
    if isinstance(norm, nn.LayerNorm):
        scale = ((pair[0] + pair[1]).var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        pair = [(part - part.mean(-1, keepdim=True)) * scale * norm.weight.float() for part in pair]
    return [part @ weight.T for part in pair]


def gate_logit(injection: nn.Module, state: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """The gate's logit, before temperature and noise, of normed inputs: all (..., width)."""
    both = injection.gate_norm(torch.cat([state, anchor], dim=-1))
    return injection.gate_logit(nn.functional.silu(injection.gate_hidden(both)))


def _add(sums: torch.Tensor, values: torch.Tensor) -> None:
    """Into (3, width): number, sum and sum of squares of (tokens, width)."""
    values = values.double()
    sums += torch.stack([torch.ones_like(values).sum(0), values.sum(0), values.square().sum(0)]).cpu()


def _variance(sums: torch.Tensor) -> torch.Tensor:
    """Of (3, ...)."""
    number, total, squares = sums
    return (squares / number - (total / number).square()).clamp(min=0)


def _share(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    """(passes, width) of each -> (passes): the first's share, averaged over channels in which anything happens."""
    return (first / (first + second)).nanmean(-1).numpy()


@dataclass(frozen=True)
class ProjectionContrast(Measurement):
    """
    How the matrix that reads state and anchor treats the two.

    Args:
        cosine: (width), of the state's half and the anchor's half of each row of W_proj. Negative: it reads their
            difference.
        spectra: The singular values, largest first, (width) each, of `state` and `anchor`, the halves of W_proj, and of
            `gate_state` and `gate_anchor`, those of the gate's first matrix where there is a gate.
    """

    title = "State against anchor"
    reading = (
        "Cosines of the two halves of each row of the injection's matrix: on the left of zero, an output reads how the "
        "state differs from the anchor, on the right what they have in common."
    )

    cosine: np.ndarray
    spectra: dict[str, np.ndarray]

    @property
    def above_half(self) -> float:
        """Share of the rows whose cosine is above 0.5."""
        return float((self.cosine > 0.5).mean())

    def to_frame(self):
        import pandas as pd

        values = {f"singular_{name}": values for name, values in self.spectra.items()}
        return pd.DataFrame({"row": range(len(self.cosine)), "cosine": self.cosine, **values})

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.hist(self.cosine, bins=np.linspace(-1, 1, 41), color=color, alpha=0.6, label=label)
        ax.axvline(self.cosine.mean(), color=color, linestyle="--", linewidth=1)
        style(ax, "cosine of a row's halves", "rows")

    def headline(self):
        state, anchor = self.spectra["state"][0], self.spectra["anchor"][0]
        return (
            f"The halves' mean cosine is {self.cosine.mean():.3g}, with {100 * self.above_half:.3g} % of the rows "
            f"above 0.5; leading singular values {state:.3g} (state) and {anchor:.3g} (anchor)."
        )


def projection_contrast(model) -> ProjectionContrast:
    """
    Args:
        model: A looped model with `injection="linear"`, gated or not, or a `Probe` of one.

    Raises:
        `ValueError`: for a model without such a matrix.
    """
    probe = looped_probe(model)
    injection = getattr(probe.base, "injection", None)
    if not hasattr(injection, "proj"):
        raise ValueError(
            f"{type(probe.model).__name__} has no matrix that reads state and anchor: use one with injection='linear'."
        )

    def halves(linear):
        return linear.weight.detach().float().cpu().chunk(2, dim=1)

    state, anchor = halves(injection.proj)
    if probe.model.config.model_type == "looped_gpt":  # W [e; h], where RecurrentGPT has W [h; e]
        state, anchor = anchor, state
    parts = {"state": state, "anchor": anchor}
    if probe.is_gated:
        parts["gate_state"], parts["gate_anchor"] = halves(injection.gate_hidden)
    spectra = {name: torch.linalg.svdvals(part).numpy() for name, part in parts.items()}
    return ProjectionContrast(nn.functional.cosine_similarity(state, anchor, dim=1).numpy(), spectra)


def token_losses(
    model, rows: Sequence[Sequence[int]], batch_size: int = 8, num_recurrences: int | None = None
) -> np.ndarray:
    """
    The loss of every token but the first of each text, one text after the other: (predicted tokens), nats. Of any
    decoder that `Probe` knows, so that of one with the same tokenizer it can say how difficult a token is.
    """
    probe = Probe.of(model, num_recurrences)
    found = [_losses(probe, batch, probe.run(batch).last_hidden_state) for batch in probe.batches(rows, batch_size)]
    return np.concatenate(found)


def _losses(probe: Probe, batch: Rows, state: torch.Tensor) -> np.ndarray:
    parts = predictions(probe, batch, state)
    losses = [nn.functional.cross_entropy(logits, targets, reduction="none") for targets, logits in parts]
    return torch.cat(losses).double().cpu().numpy()


@dataclass(frozen=True)
class Deciles:
    """
    Ten bins of equally many tokens, to one, by rising score. (10) each: mean score, mean gain and number of tokens.
    """

    score: np.ndarray
    gain: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, score: np.ndarray, gain: np.ndarray) -> "Deciles":
        """Of (tokens) each."""
        bins = np.array_split(np.argsort(score, kind="stable"), 10)
        means = (np.array([values[chosen].mean() for chosen in bins]) for values in (score, gain))
        return cls(*means, np.array([len(chosen) for chosen in bins]))

    def line(self) -> np.ndarray:
        """(10), the gains on the straight line through the bins."""
        return np.polyval(np.polyfit(self.score, self.gain, 1), self.score)

    @property
    def r_squared(self) -> float:
        """The share of the gains' variance over the bins that the line explains."""
        total = np.square(self.gain - self.gain.mean()).sum()
        return float(1 - np.square(self.gain - self.line()).sum() / (total or np.nan))


@dataclass(frozen=True)
class TokenDifficulty(Measurement):
    """
    Which tokens the passes help: the gain L_t(0) - L_t(R) over deciles of difficulty.

    Args:
        initial: By L_t(0), the loss of the exit before the first pass, as in the paper. The gain is made of the same
            number, noise included, so that some of the slope and fit is regression to the mean.
        independent: By a score that knows nothing of this model.
    """

    title = "Which tokens the passes help"
    reading = (
        "Loss that the passes take from tokens of rising difficulty, a dot for each tenth of them: filled by this "
        "model's loss without a pass, hollow by an independent score where one was given."
    )

    initial: Deciles
    independent: Deciles | None = None

    def _series(self) -> dict[str, Deciles]:
        found = {"initial": self.initial, "independent": self.independent}
        return {name: deciles for name, deciles in found.items() if deciles is not None}

    def to_frame(self):
        import pandas as pd

        frames = [
            pd.DataFrame({"by": name, "decile": range(1, 11), "score": d.score, "gain": d.gain, "tokens": d.tokens})
            for name, d in self._series().items()
        ]
        return pd.concat(frames, ignore_index=True)

    def plot(self, ax, label=None, color="#1f5fa8"):
        for name, deciles in self._series().items():
            line, face, shown = ("-", color, label) if name == "initial" else ("--", "none", None)
            ax.plot(deciles.score, deciles.line(), linestyle=line, linewidth=1, alpha=0.6, color=color)
            ax.scatter(deciles.score, deciles.gain, s=16, edgecolors=color, facecolors=face, label=shown)
        style(ax, "difficulty (nats)", "gain of the passes (nats)")

    def headline(self):
        found = self.initial
        text = (
            f"The passes gain {found.gain[0]:.3g} nats on the easiest tenth of the tokens and {found.gain[-1]:.3g} on "
            f"the hardest (R² of the line {found.r_squared:.3f})"
        )
        if (other := self.independent) is None:
            return f"{text}."
        return (
            f"{text}; by the independent score {other.gain[0]:.3g} and {other.gain[-1]:.3g} (R² {other.r_squared:.3f})."
        )


def token_difficulty(
    model,
    rows: Sequence[Sequence[int]],
    difficulty: Sequence[float] | None = None,
    batch_size: int = 8,
    num_recurrences: int | None = None,
) -> TokenDifficulty:
    """
    Args:
        model: Any looped model, or a `Probe` of one; gate or not. Only RecurrentGPT is trained for the exit before the
            first pass, L_t(0).
        difficulty: An independent score of every token that is predicted, in the order of `token_losses`, which makes
            one from another model.

    Raises:
        `ValueError`: for a model without recurrences, fewer than ten predicted tokens, or a `difficulty` of another
        length or with a value that is not finite.
    """
    probe = looped_probe(model, num_recurrences)
    predicted = sum(len(row) - 1 for row in rows)
    if predicted < 10:
        raise ValueError(f"The texts have {predicted} tokens to predict: deciles need at least ten.")
    if difficulty is not None:
        difficulty = np.asarray(difficulty, dtype=float)
        if difficulty.shape != (predicted,) or not np.isfinite(difficulty).all():
            raise ValueError(
                f"difficulty of shape {difficulty.shape} must be ({predicted},) finite numbers, one for each token but "
                "the first of each text: token_losses makes such from another model."
            )
    first, last = [], []
    for batch in probe.batches(rows, batch_size):
        exits = probe.run(batch, output_exits=True).exit_states
        first.append(_losses(probe, batch, exits[0]))
        last.append(_losses(probe, batch, exits[-1]))
    initial = np.concatenate(first)
    gain = initial - np.concatenate(last)
    return TokenDifficulty(Deciles.of(initial, gain), None if difficulty is None else Deciles.of(difficulty, gain))


@dataclass(frozen=True)
class GateInterventions(Measurement):
    """
    Args:
        loss: Mean loss, nats a token, by what was changed; `"clean"` is the model as it is.
        tokens: How many tokens the means are over.
    """

    title = "Without anchor, without gate"
    reading = "Loss when the anchor or the gate is replaced while the model runs; the line is the model as it is."
    overlay = False

    loss: dict[str, float]
    tokens: int

    def to_frame(self):
        import pandas as pd

        losses = list(self.loss.values())
        rise = [loss - self.loss["clean"] for loss in losses]
        return pd.DataFrame({"intervention": list(self.loss), "loss": losses, "rise": rise})

    def plot(self, ax, label=None, color="#1f5fa8"):
        changed = {name: loss for name, loss in self.loss.items() if name != "clean"}
        bars = ax.bar(range(len(changed)), list(changed.values()), color=color, width=0.6)
        ax.bar_label(bars, fmt="%.3g", fontsize="small")
        ax.axhline(self.loss["clean"], color="0.3", linestyle="--", linewidth=1)
        ax.set_xticks(range(len(changed)), list(changed), rotation=20, ha="right")
        style(ax, "", "loss (nats/token)")
        if label:
            ax.set_title(label, fontsize="small")

    def headline(self):
        clean = self.loss["clean"]
        changed = {name: loss for name, loss in self.loss.items() if name != "clean"}
        worst = max(changed, key=changed.get)
        return (
            f"The clean loss is {clean:.3g}; {worst} costs most ({changed[worst]:.3g}); gate = 1, which leaves the "
            f"state as it is, gives {changed['gate = 1']:.3g}."
        )


def gate_interventions(
    model, rows: Sequence[Sequence[int]], batch_size: int = 8, num_recurrences: int | None = None
) -> GateInterventions:
    """
    The model's loss with the anchor as zeros, as the embedding and as the previous state, for injection and gate alike,
    and with the gate held at 1 or at 0. Of the four anchors that there are, the model's own is what `"clean"` has.

    Args:
        model: A gated RecurrentGPT, or a `Probe` of one.

    Raises:
        `ValueError`: for a model without a gate.
    """
    probe = looped_probe(model, num_recurrences)
    injection, config = gate_of(probe), probe.base.config
    losses = token_losses(probe, rows, batch_size)
    loss, own = {"clean": losses.mean()}, config.anchor
    try:
        for anchor in ("zeros", "embedding", "previous", "prelude"):
            if anchor != own:
                config.anchor = anchor
                loss[f"anchor = {anchor}"] = token_losses(probe, rows, batch_size).mean()
    finally:
        config.anchor = own
    for name, logit in (("gate = 1", torch.inf), ("gate = 0", -torch.inf)):
        with hooked({injection.gate_logit: _constant(logit)}):
            loss[name] = token_losses(probe, rows, batch_size).mean()
    return GateInterventions({name: float(value) for name, value in loss.items()}, len(losses))


def _constant(value: float) -> Callable:
    return lambda module, args, output: torch.full_like(output, value)
