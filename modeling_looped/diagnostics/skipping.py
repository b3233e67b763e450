"""
What later layers and the output lose when an executed layer is left out (arXiv 2602.16490, sections 6.2 and 6.3).

A row of a batch is one skipped layer with one boundary: the model runs once over all of them, and each row is changed at
its own layer. So a text costs as many rows as there are sources, of as many layers as there are effects: E^2. A local
effect needs no more, although it is asked of each pair: in the row of source s, every later layer l is given the clean
h_l - c_s in place of what came out of the layer before, which answers the question for all l in one forward. A forward
for each pair would cost E^3.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .measurement import Measurement, heatmap, style
from .probe import Probe, Rows, batches
from .residual import SMALLEST


PARTS = ("layer", "attention", "mlp")
_HOOKS = {"attention": "on_attention", "mlp": "on_mlp"}  # of the parts that are not the whole layer
REACHES = ("future", "local", "current")


@dataclass(frozen=True)
class SkipEffects(Measurement):
    """
    Args:
        effect: (executed layers, executed layers), of leaving out the row's layer on what the column's adds to the
            stream: the largest relative change over texts, boundaries and positions. NaN up to the diagonal.
        output: (executed layers), the largest change of the next-token distribution (Euclidean norm). `output_mean`
            averages over texts instead. NaN of local effects, which never reach the output.
        reach: `"future"` (earlier tokens are changed, later ones looked at, and the change flows through all layers),
            `"local"` (the same, but every layer sees the clean stream less what the skipped one added) or `"current"`
            (all tokens but the first are changed and looked at).
        part: What is left out: `"layer"`, `"attention"` or `"mlp"`.
    """

    reading = (
        "Row: the layer that is left out on earlier tokens. Column: a later layer, and how much what it adds at later "
        "tokens changes. A bright column is a layer that reads what many before it wrote."
    )
    overlay = False

    effect: np.ndarray
    output: np.ndarray
    output_mean: np.ndarray
    reach: str
    part: str
    boundaries: list[int] = field(default_factory=list)
    texts: int = 0

    @property
    def title(self) -> str:
        part = "a layer" if self.part == "layer" else f"a layer's {self.part}"
        what = {"future": "on all that follows", "local": "on each later layer alone", "current": "on the same tokens"}
        return f"Effect of leaving out {part} {what[self.reach]}"

    def to_frame(self):
        import pandas as pd

        depth = len(self.effect)
        pairs = [(s, l) for s in range(depth) for l in range(s + 1, depth)]
        return pd.DataFrame(
            {
                "skipped": [s for s, _ in pairs],
                "layer": [l for _, l in pairs],
                "effect": [self.effect[p] for p in pairs],
            }
        )

    def plot(self, ax, label=None, color="#1f5fa8"):
        heatmap(ax, self.effect, "effect at executed layer", "layer left out", self.boundaries)
        if label:
            ax.set_title(label, fontsize="small")

    def columns(self) -> np.ndarray:
        """(executed layers), the mean effect that earlier layers have on each."""
        return np.array([np.nan, *(np.nanmean(self.effect[:l, l]) for l in range(1, len(self.effect)))])

    def headline(self):
        columns = self.columns()
        most = int(np.nanargmax(columns))
        return (
            f"The {self.reach} effect of leaving out a{'n' if self.part == 'attention' else ''} {self.part} is "
            f"{np.nanmean(columns):.3f} on average; layer {most} depends most on those before it ({columns[most]:.3f})."
        )


@dataclass(frozen=True)
class DepthScore(Measurement):
    """
    Where in depth the layers stand that the output needs: sum of s * o_s over sum of o_s, from 0 to the last layer.

    Args:
        output: (executed layers), o_s, the mean over texts of what leaving out layer s for earlier tokens does to later
            tokens' distributions.
        by_group: Scores of the texts' groups (levels, hops), of which `score` is the mean where there are several.
    """

    title = "Depth score"
    reading = (
        "How much the output changes when a layer is left out for earlier tokens; the score is the centre of gravity: "
        "higher means that more of the depth is used."
    )

    output: np.ndarray
    by_group: dict[str, float] = field(default_factory=dict)
    boundaries: list[int] = field(default_factory=list)

    def __post_init__(self):
        depth_score_of(self.output)  # raises where there is none

    @property
    def pooled(self) -> float:
        """The score of the mean vector of all texts."""
        return depth_score_of(self.output)

    @property
    def score(self) -> float:
        return float(np.mean(list(self.by_group.values()))) if self.by_group else self.pooled

    def to_frame(self):
        import pandas as pd

        return pd.DataFrame({"position": range(len(self.output)), "output_effect": self.output})

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.plot(range(len(self.output)), self.output, marker="o", markersize=3, color=color, label=label)
        ax.axvline(self.score, color=color, linestyle="--", linewidth=1)
        style(ax, "layer left out", "change of the distribution", self.boundaries)

    def headline(self):
        depth = len(self.output)
        return f"Depth score {self.score:.2f} of {depth - 1} ({(depth - 1) / 2:.1f} were all layers needed alike)."


def depth_score_of(output: Sequence[float]) -> float:
    """
    Raises:
        `ValueError`: where no layer has an effect.
    """
    output = np.asarray(output, dtype=float)
    if not output.sum() > 0:
        raise ValueError("No layer changes the output when it is left out, so there is no depth score.")
    return float((np.arange(len(output)) * output).sum() / output.sum())


def skip_boundaries(length: int, count: int, generator: random.Random) -> list[int]:
    """The first `count` of the shuffled 8, 16, 24, ... below `length` - 4, or the middle of a text too short for one."""
    found = list(range(8, length - 4, 8))
    generator.shuffle(found)
    return found[:count] or [max(1, length // 2)]


def skip_effects(
    model,
    rows: Sequence[Sequence[int]],
    reach: str = "future",
    part: str = "layer",
    boundaries: int | Sequence[Sequence[int]] = 4,
    seed: int = 123,
    batch_tokens: int = 8192,
    num_recurrences: int | None = None,
) -> SkipEffects:
    """
    Leaves out each executed layer in turn, at tokens 1 to t - 1 of a text with boundary t; the first token, on which
    attention rests, always keeps its layers.

    Args:
        model: A causal language model, or a `Probe` of one.
        rows: Lists of token ids.
        boundaries: Number of boundaries a text (drawn with `seed`), or those of each text.
        batch_tokens: Tokens of one forward.

    Raises:
        `ValueError`: for an unknown `reach` or `part`, or boundaries outside a text.
    """
    if reach not in REACHES:
        raise ValueError(f"reach={reach!r} must be one of {', '.join(REACHES)}.")
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(PARTS)}.")
    probe = Probe.of(model, num_recurrences)
    generator = random.Random(seed)
    effect = np.zeros((probe.depth, probe.depth))
    outputs = []
    for number, (text, row) in enumerate(zip(batches(rows, 1), rows, strict=True)):
        if reach == "current":
            places = [len(row)]
        elif isinstance(boundaries, int):
            places = skip_boundaries(len(row), boundaries, generator)
        else:
            places = list(boundaries[number])
            if not places or min(places) < 1 or max(places) >= len(row):
                raise ValueError(f"boundaries={places} of text {number}: each must be in 1 to {len(row) - 1}.")
        found, output = _of_text(probe, text, places, reach, part, batch_tokens)
        effect = np.maximum(effect, found)
        outputs.append(output)
    effect[np.tril_indices(probe.depth)] = np.nan
    return SkipEffects(
        effect, np.max(outputs, axis=0), np.mean(outputs, axis=0), reach, part, probe.boundaries, len(outputs)
    )


def _of_text(probe: Probe, text: Rows, places: list[int], reach: str, part: str, batch_tokens: int):
    """(executed layers, executed layers) and (executed layers) of one text."""
    depth, length = probe.depth, text.input_ids.shape[1]
    clean = _Clean(probe, text, part)
    effect, output = np.zeros((depth, depth)), np.full(depth, np.nan if reach == "local" else 0.0)
    variants = [(s, t) for s in range(depth) for t in places]
    size = max(1, batch_tokens // length)
    for start in range(0, len(variants), size):
        chunk = variants[start : start + size]
        sources = torch.tensor([s for s, _ in chunk], device=probe.device)
        ends = torch.tensor([t for _, t in chunk], device=probe.device)
        token = torch.arange(length, device=probe.device)
        changed = (token >= 1) & (token < ends[:, None])  # (variants, length)
        watched = token >= ends[:, None] if reach != "current" else torch.ones_like(changed)
        inputs = {}
        removed = changed.unsqueeze(-1) * clean.written[sources] if reach == "local" else None

        def on_input(position, h):
            if removed is not None:
                # Of rows whose source comes later nothing is asked here: they may as well see the clean stream.
                h = (clean.stream[position] - (sources < position)[:, None, None] * removed).to(h.dtype)
            inputs["h"] = h
            return h

        def leave_out(position, written):
            here = (changed & (sources == position)[:, None]).unsqueeze(-1)
            return written.masked_fill(here, 0)

        def on_output(position, out):
            if reach != "local" and part == "layer":
                here = (changed & (sources == position)[:, None]).unsqueeze(-1)
                out = torch.where(here, inputs["h"], out)
            later = sources < position
            if later.any():
                added, before = (out - inputs["h"])[later].float(), clean.added[position]
                change = (added - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=SMALLEST)
                change = change.masked_fill(~watched[later], 0).amax(-1).cpu().numpy()
                np.maximum.at(effect[:, position], sources[later].cpu().numpy(), change)
            return out

        hooks = {_HOOKS[part]: leave_out} if part in _HOOKS and reach != "local" else {}
        result = probe.run(text.repeated(len(chunk)), on_input=on_input, on_output=on_output, **hooks)
        if reach != "local":
            with torch.no_grad():
                for (s, _), state, seen in zip(chunk, result.last_hidden_state, watched):
                    probabilities = probe.head(state[seen]).softmax(-1)
                    output[s] = max(output[s], (probabilities - clean.probabilities[seen]).norm(dim=-1).max().item())
    return effect, output


class _Clean:
    """One text's undisturbed forward: streams, what each layer adds, what its `part` adds, probabilities; fp32."""

    def __init__(self, probe: Probe, text: Rows, part: str):
        self.stream, self.added, written = [], [], []

        def on_input(position, h):
            self.stream.append(h[0].float())

        def on_part(position, x):
            written.append(x[0].float())

        def on_output(position, out):
            self.added.append(out[0].float() - self.stream[-1])

        hooks = {_HOOKS[part]: on_part} if part in _HOOKS else {}
        result = probe.run(text, on_input=on_input, on_output=on_output, **hooks)
        self.written = torch.stack(written or self.added)
        with torch.no_grad():
            self.probabilities = probe.head(result.last_hidden_state[0]).softmax(-1)


def depth_score(
    model,
    rows: Sequence[Sequence[int]],
    boundaries: int | Sequence[Sequence[int]] = 4,
    groups: Sequence[str] | None = None,
    seed: int = 42,
    num_recurrences: int | None = None,
    **options,
) -> DepthScore:
    """
    Args:
        rows, boundaries: As for `skip_effects`. The paper's boundaries are offsets into an answer
            (`texts.math_problems`, `texts.multi_hop_questions`).
        groups: A name for each text, such as its level; the score is then the mean of the groups' scores.
    """
    probe = Probe.of(model, num_recurrences)
    names = list(groups) if groups is not None else ["all"] * len(rows)
    if len(names) != len(rows):
        raise ValueError(f"groups has {len(names)} names for {len(rows)} texts: one each is needed.")
    by_group, vectors = {}, []
    for name in sorted(set(names)):
        chosen = [i for i, other in enumerate(names) if other == name]
        places = boundaries if isinstance(boundaries, int) else [boundaries[i] for i in chosen]
        found = skip_effects(probe, [rows[i] for i in chosen], boundaries=places, seed=seed, **options)
        by_group[name] = depth_score_of(found.output_mean)
        vectors += [found.output_mean] * len(chosen)
    return DepthScore(np.mean(vectors, axis=0), by_group if groups is not None else {}, probe.boundaries)
