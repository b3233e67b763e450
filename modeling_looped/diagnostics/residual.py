"""Norms of the residual stream, what attention and MLP add to it, and in which direction (arXiv 2602.16490, section 6.1)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.nn.functional as F

from .measurement import Measurement, style
from .probe import Probe


SMALLEST = 1e-6  # of a norm that something is divided by


@dataclass(frozen=True)
class ResidualStatistics(Measurement):
    """
    Means over all tokens of all texts, of per-token values; `*_max` has the largest over tokens.

    Args:
        norm: (executed layers + 1), the norm of h_i: of the stream that layer i reads, and of the last layer's output.
        attention, mlp, layer: (executed layers), the norms of a_i, m_i and a_i + m_i over those of h_i, h_i + a_i, h_i.
        attention_cosine, mlp_cosine, layer_cosine: Of the same pairs.
        in_out_cosine: Of a layer's output and its input.
        boundaries: Positions where blocks end.
        tokens: How many tokens the means are over.
    """

    title = "Residual stream"
    reading = (
        "How long the residual stream is in front of each executed layer: where it stays level, layers rewrite it; "
        "where it grows, they add to it."
    )

    norm: np.ndarray
    attention: np.ndarray
    mlp: np.ndarray
    layer: np.ndarray
    attention_cosine: np.ndarray
    mlp_cosine: np.ndarray
    layer_cosine: np.ndarray
    in_out_cosine: np.ndarray
    norm_max: np.ndarray
    attention_max: np.ndarray
    mlp_max: np.ndarray
    layer_max: np.ndarray
    boundaries: list[int] = field(default_factory=list)
    tokens: int = 0

    def to_frame(self):
        import pandas as pd

        columns = {name: getattr(self, name) for name in (*_NORMS, *_COSINES, *(f"{name}_max" for name in _NORMS))}
        depth = len(self.norm)
        frame = pd.DataFrame(
            {name: np.append(values, [np.nan] * (depth - len(values))) for name, values in columns.items()}
        )
        frame.insert(0, "position", range(depth))
        return frame

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.plot(range(len(self.norm)), self.norm, marker="o", markersize=3, color=color, label=label)
        ax.set_yscale("log")
        style(ax, "executed layer", "norm of its input", self.boundaries)

    def headline(self):
        return (
            f"From {self.norm[0]:.3g} in front of the first layer to {self.norm[-1]:.3g} behind the last, over "
            f"{self.tokens:,} tokens."
        )


_NORMS = ("norm", "attention", "mlp", "layer")
_COSINES = ("attention_cosine", "mlp_cosine", "layer_cosine", "in_out_cosine")


@dataclass(frozen=True)
class Contributions(Measurement):
    """The contributions of `statistics` as a figure of its own (figure 3 of arXiv 2602.16490)."""

    title = "What attention adds"
    reading = (
        "Length of what attention adds to the stream, as a share of the stream: a pattern that repeats from block to "
        "block is the mark of an iteration."
    )

    statistics: ResidualStatistics

    def to_frame(self):
        return self.statistics.to_frame()[["position", "attention", "mlp", "layer"]].iloc[:-1]

    def plot(self, ax, label=None, color="#1f5fa8"):
        found = self.statistics
        places = range(len(found.attention))
        ax.plot(places, found.attention, marker="o", markersize=3, color=color, label=label or "attention")
        if label is None:
            ax.plot(places, found.mlp, color="0.55", linewidth=1.2, label="MLP")
            ax.legend(frameon=False, fontsize="small")
        if found.attention.max() > 10 * np.median(found.attention):
            ax.set_yscale("log")  # in front of the first layer, the stream is an embedding, and often small
        style(ax, "executed layer", "contribution / stream", found.boundaries)

    def headline(self):
        found, most = self.statistics, int(np.argmax(self.statistics.attention))
        return f"Attention adds {found.attention.mean():.3f} of the stream on average, most at layer {most} ({found.attention[most]:.3f})."


def residual_statistics(
    model, rows: Sequence[Sequence[int]], batch_size: int = 8, num_recurrences: int | None = None
) -> ResidualStatistics:
    """
    Args:
        model: A causal language model, or a `Probe` of one.
        rows: Lists of token ids; padded on the left in batches of `batch_size`.
        num_recurrences: Passes over the core of a looped model.
    """
    probe = Probe.of(model, num_recurrences)
    sums: dict[str, np.ndarray] = {name: np.zeros(probe.depth + (name == "norm")) for name in (*_NORMS, *_COSINES)}
    largest = {name: np.zeros_like(sums[name]) for name in _NORMS}
    tokens = 0
    for batch in probe.batches(rows, batch_size):
        mask = batch.mask.to(probe.device)
        tokens += int(mask.sum())
        parts = {}

        def record(name, position, values):
            values = values[mask].double()
            sums[name][position] += values.sum().item()
            if name in largest:
                largest[name][position] = max(largest[name][position], values.max().item())

        def on_input(position, h):
            parts["h"] = h.float()
            record("norm", position, parts["h"].norm(dim=-1))

        def on_attention(position, a):
            parts["a"] = a.float()

        def on_mlp(position, m):
            parts["m"] = m.float()

        def on_output(position, out):
            h, a, m, out = parts["h"], parts["a"], parts["m"], out.float()
            for name, written, stream in (("attention", a, h), ("mlp", m, h + a), ("layer", a + m, h)):
                record(name, position, written.norm(dim=-1) / stream.norm(dim=-1).clamp(min=SMALLEST))
                record(f"{name}_cosine", position, F.cosine_similarity(written, stream, dim=-1, eps=SMALLEST))
            record("in_out_cosine", position, F.cosine_similarity(out, h, dim=-1, eps=SMALLEST))
            if position == probe.depth - 1:
                record("norm", probe.depth, out.norm(dim=-1))

        probe.run(batch, on_input, on_attention, on_mlp, on_output)
    means = {name: values / tokens for name, values in sums.items()}
    return ResidualStatistics(
        **means,
        **{f"{name}_max": values for name, values in largest.items()},
        boundaries=probe.boundaries,
        tokens=tokens,
    )
