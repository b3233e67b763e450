"""
What another order of the layers does to a model: swap, skip, reverse (arXiv 2602.16490, sections 4.1 and B.1; 6.5 of
the specification) and repeated blocks (section 4.2). The edits are those of `modeling_looped.interventions`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import interventions
from ..depth_plan import DepthPlan
from .measurement import Measurement, show_small_changes, style
from .probe import Probe, batches, undisturbed


EDITS = ("swap", "skip", "reverse")
KINDS = ("accuracy", "loss")
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Score:
    """
    A number that a model gets when it is called with one.

    Args:
        kind: `"accuracy"` (more is better; compared by division) or `"loss"` (less is better; by difference).
        measure: The function of a model.
        name: What is measured, for figures.
    """

    kind: str
    measure: Callable[[PreTrainedModel], float]
    name: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}.")

    def __call__(self, model: PreTrainedModel) -> float:
        return float(self.measure(model))


def held_out_loss(rows: Sequence[Sequence[int]], batch_size: int = 8) -> Score:
    """
    Mean nats over all tokens of `rows` but each one's first.

    Args:
        rows: Lists of token ids; padded on the left in batches of `batch_size`.
    """
    from ..recipes.scoring import Continuation, score_continuations

    list(batches(rows, len(rows) or 1))  # raises where a row does not fit
    continuations = [Continuation(tuple(map(int, row)), 1) for row in rows]
    tokens = sum(len(row) - 1 for row in rows)

    def measure(model: PreTrainedModel) -> float:
        with undisturbed(model):
            scores = score_continuations(model, continuations, batch_size, "left")
        return -sum(score.log_likelihood for score in scores) / tokens

    return Score("loss", measure, "loss (nats per token)")


def task_accuracy(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    data_dir: str | None = None,
    batch_size: int = 8,
) -> Score:
    """
    Accuracy on one task of `modeling_looped.eval` (the paper's are `looped_var_assign_math_depth_0`, which needs no
    data, and `looped_growing_lambada`), or of lm-eval. Needs the extra `eval`. The task is loaded once.

    Args:
        limit: Take only so many items, the first ones.
        data_dir: A folder with the local JSONL files of the tasks; without it, data come from the Hub.

    Raises:
        `ValueError`: for an unknown task, or one that has no accuracy.
    """
    from lm_eval import evaluator

    from ..eval.harness import LoopedLM
    from ..eval.run import TASKS, find_tasks

    _, manager = find_tasks([task], [TASKS], {} if data_dir is None else {"data_dir": str(data_dir)})
    loaded = list(manager.load([task])["tasks"].values())
    if [one.config.task for one in loaded] != [task]:
        raise ValueError(f"{task!r} is a group of tasks: choose one of {', '.join(one.config.task for one in loaded)}.")

    @functools.lru_cache(maxsize=1)  # one for all edits of a model, so that it tokenises once
    def harness(model: PreTrainedModel) -> LoopedLM:
        return LoopedLM(model, tokenizer=tokenizer, batch_size=batch_size)

    def measure(model: PreTrainedModel) -> float:
        with undisturbed(model):
            lm = harness(model)
            lm.num_recurrences = None  # the configured number, which may have changed
            results = evaluator.evaluate(lm, manager.load(loaded), limit=limit, bootstrap_iters=0, log_samples=False)
        found = {name.partition(",")[0]: value for name, value in results["results"][task].items()}
        for metric in ("acc", "exact_match"):
            if metric in found:
                return found[metric]
        raise ValueError(f"{task} measures {', '.join(found)}, and neither acc nor exact_match: choose another task.")

    return Score("accuracy", measure, f"accuracy ({task})")


@dataclass(frozen=True)
class OrderCurves(Measurement):
    """
    Args:
        kind: `"accuracy"` or `"loss"`.
        clean: The score of the model as it is.
        values: The score under each `(edit, length)`, (executed layers): at s, where the edit's first position is s.
            NaN where the edit does not fit, or was not asked for.
        boundaries: Positions where blocks end.
        name: What the score is.
    """

    title = "Layers in another order"
    reading = (
        "The score with neighbouring layers exchanged, left out or reversed from the position on: a flat line is a model "
        "to which the order hardly matters."
    )

    kind: str
    clean: float
    values: dict[tuple[str, int], np.ndarray]
    boundaries: list[int] = field(default_factory=list)
    name: str = "score"

    @property
    def depth(self) -> int:
        return len(next(iter(self.values.values())))

    def relative(self, edit: str = "swap", length: int = 1) -> np.ndarray:
        """(executed layers): an accuracy over the clean one, or a loss less the clean one."""
        if (edit, length) not in self.values:
            known = ", ".join(f"{edit} {length}" for edit, length in self.values)
            raise ValueError(f"{edit} {length} was not measured; these were: {known}.")
        return _relative(self.kind, self.values[edit, length], self.clean)

    def mean(self, edit: str = "swap", length: int = 1, first: int | None = None, last: int | None = None) -> float:
        """The mean of `relative` over first positions from `first` to `last`: the paper's 3 to 15 of 24, in proportion."""
        first, last = self._range(first, last)
        chosen = self.relative(edit, length)[first : last + 1]
        if np.isnan(chosen).all():
            raise ValueError(f"{edit} {length} was measured at no position from first={first} to last={last}.")
        return float(np.nanmean(chosen))

    def _range(self, first: int | None, last: int | None) -> tuple[int, int]:
        return self.depth // 8 if first is None else first, 5 * self.depth // 8 if last is None else last

    def to_frame(self):
        import pandas as pd

        rows = [
            (edit, length, s, value, relative)
            for (edit, length), values in self.values.items()
            for s, (value, relative) in enumerate(zip(values, self.relative(edit, length)))
            if not np.isnan(value)
        ]
        return pd.DataFrame(rows, columns=["edit", "length", "position", "score", "relative"])

    def plot(self, ax, label=None, color="#1f5fa8", edit: str | None = None):
        """The curves of `edit`, the first of those that were measured by default; a line for each length."""
        edit = edit or next(iter(self.values))[0]
        lengths = [length for name, length in self.values if name == edit]
        for number, length in enumerate(lengths):
            name = f"{edit} {length}" if label is None else label if number == 0 else None
            line = {"linestyle": _LINES[number % len(_LINES)], "marker": "o", "markersize": 3, "color": color}
            ax.plot(range(self.depth), self.relative(edit, length), label=name, **line)
            if self.kind == "loss":
                show_small_changes(ax, self.relative(edit, length))
        if label is None:
            ax.legend(frameon=False, fontsize="small")
        style(ax, f"first position of {edit}", _axis(self.kind, self.name), self.boundaries)

    def headline(self):
        edit, length = next(iter(self.values))
        try:
            (first, last), change = self._range(None, None), self.mean(edit, length)
        except ValueError:
            first, last = 0, self.depth - 1
            change = self.mean(edit, length, first, last)
        effect = (
            f"leaves {change:.3g} of the accuracy" if self.kind == "accuracy" else f"changes the loss by {change:+.3g}"
        )
        what = {"swap": "Exchanging neighbours", "skip": "Leaving out layers", "reverse": "Reversing layers"}[edit]
        return f"{what} ({length} at a time) {effect} of {self.clean:.3g}, on average over positions {first} to {last}."


def order_curves(
    model,
    score: Callable[[PreTrainedModel], float],
    edits: Sequence[str] = EDITS,
    lengths: Sequence[int] = (1, 2),
    positions: Sequence[int] | None = None,
    num_recurrences: int | None = None,
    kind: str | None = None,
) -> OrderCurves:
    """
    The score of the model under each edit of its order, one at a time: `swap` exchanges the executed layers [s, s + l)
    and [s + l, s + 2l), `skip` leaves [s, s + l) out, and `reverse` reverses them. Orders that are the same, such as
    those of `reverse` 2 and `swap` 1, are scored once. The paper has `swap` at lengths 1 and 2, 2512.08819 all three,
    `reverse` at length 4.

    Args:
        model: A causal language model, or a `Probe` of one.
        score: A `Score`, such as `held_out_loss` or `task_accuracy`, or any function of a model, with its `kind`.
        edits: Of `swap`, `skip` and `reverse`.
        lengths: l; `reverse` leaves out 1, which changes nothing.
        positions: First positions s, where they fit; all by default.
        num_recurrences: Passes over the core of a looped model, which is what the score then sees as configured.
        kind: `"accuracy"` or `"loss"`, of a function that does not say.

    Raises:
        `ValueError`: for edits, lengths, positions or a kind that do not fit, or a clean accuracy of 0.
    """
    score = _as_score(score, kind)
    for edit in edits:
        if edit not in EDITS:
            raise ValueError(f"edits: {edit!r} must be one of {', '.join(EDITS)}.")
    probe = Probe.of(model, num_recurrences)
    places = {}
    for edit in edits:
        for length in lengths:
            if edit == "reverse" and length == 1:
                continue
            fitting = _positions(edit, length, probe.depth)
            places[edit, length] = [s for s in fitting if positions is None or s in positions]
            if not places[edit, length]:
                why = f"positions={list(positions)}" if fitting else f"lengths: {length}"
                raise ValueError(f"{why} does not fit {edit} of length {length} in {probe.depth} executed layers.")
    if not places:
        raise ValueError(f"edits={list(edits)} and lengths={list(lengths)} leave nothing to measure.")

    with _passes(probe) as edited:
        clean = score(edited)
        _check_clean(score, clean)
        known = {_key(interventions.executed_plan(edited)): clean}
        values = {}
        for (edit, length), starts in places.items():
            values[edit, length] = np.full(probe.depth, np.nan)
            for s in starts:
                with getattr(interventions, edit)(edited, s, length) as made:
                    key = _key(made.plan)
                    if key not in known:
                        known[key] = score(edited)
                values[edit, length][s] = known[key]
    return OrderCurves(score.kind, clean, values, probe.boundaries, score.name)


@dataclass(frozen=True)
class RepeatCurves(Measurement):
    """
    The best of these values is a maximum over all settings. Taken on the items that it is reported on, it is larger than
    what the setting is worth; `select_on` chooses it on others.

    Args:
        kind: `"accuracy"` or `"loss"`.
        clean: The score of the model as it is.
        values: (times, starts), the scores.
        times: How many further passes the block ran.
        starts: The blocks' first unique layers.
        block: Layers of a block.
        choice: Numbers of the best setting among `times` and `starts`.
        chosen_elsewhere: Whether it was chosen by a score of its own.
        name: What the score is.
    """

    title = "A block that runs again"
    reading = (
        "The change when a block of layers runs again, without training: below the dashed line (above it, for an "
        "accuracy), the model makes use of further passes."
    )

    kind: str
    clean: float
    values: np.ndarray
    times: tuple[int, ...]
    starts: tuple[int, ...]
    block: int
    choice: tuple[int, int]
    chosen_elsewhere: bool
    name: str = "score"

    @property
    def best(self) -> float:
        """The score at `choice`."""
        return float(self.values[self.choice])

    def relative(self) -> np.ndarray:
        """(times, starts): accuracies over the clean one, or losses less the clean one."""
        return _relative(self.kind, self.values, self.clean)

    def to_frame(self):
        import pandas as pd

        relative = self.relative()
        rows = [
            (start, times, self.values[i, j], relative[i, j])
            for i, times in enumerate(self.times)
            for j, start in enumerate(self.starts)
        ]
        return pd.DataFrame(rows, columns=["start", "times", "score", "relative"])

    def plot(self, ax, label=None, color="#1f5fa8"):
        for number, (times, values) in enumerate(zip(self.times, self.relative())):
            name = f"{times} more" if label is None else label if number == 0 else None
            line = {"linestyle": _LINES[number % len(_LINES)], "marker": "o", "markersize": 3, "color": color}
            ax.plot(self.starts, values, label=name, **line)
            if self.kind == "loss":
                show_small_changes(ax, values)
        ax.axhline(float(self.kind == "accuracy"), color="0.5", linestyle="--", linewidth=1)
        if label is None:
            ax.legend(frameon=False, fontsize="small")
        ax.xaxis.get_major_locator().set_params(integer=True)
        style(ax, f"first of {self.block} layers that run again", _axis(self.kind, self.name))

    def headline(self):
        (i, j), count = self.choice, self.values.size
        times, start = self.times[i], self.starts[j]
        change = self.relative()[self.choice]
        gain = f"{change:.3g} times" if self.kind == "accuracy" else f"{change:+.3g} to"
        how = "chosen on other items" if self.chosen_elsewhere else "chosen on these very items, which flatters it"
        return (
            f"Layers {start} to {start + self.block - 1}, {times} more time{'' if times == 1 else 's'}: {self.best:.3g}, "
            f"{gain} the clean {self.clean:.3g}; the best of {count} settings, {how}."
        )


def repeat_curves(
    model,
    score: Callable[[PreTrainedModel], float],
    block: int,
    times: Sequence[int] = (1, 2, 3, 4),
    starts: Sequence[int] | None = None,
    select_on: Callable[[PreTrainedModel], float] | None = None,
    num_recurrences: int | None = None,
    kind: str | None = None,
) -> RepeatCurves:
    """
    The score with a block of layers that runs again directly after its last pass, without training: figures 6 and 12
    of arXiv 2602.16490 (section 4.2; 5.5 of the specification) have blocks of 4 from every layer on.

    Args:
        model: A causal language model, or a `Probe` of one.
        score: As for `order_curves`: what is reported.
        block: Layers of a block.
        times: Further passes.
        starts: First unique layers of blocks; by default all whose layers run one after the other.
        select_on: A score on other items that chooses the best setting; without it, `score` does, and the best value
            is a maximum over settings on the items that it is reported on.
        num_recurrences, kind: As for `order_curves`.

    Raises:
        `ValueError`: for a block, times or starts that do not fit, or a clean accuracy of 0.
    """
    score = _as_score(score, kind)
    selection = None if select_on is None else _as_score(select_on, kind)
    probe = Probe.of(model, num_recurrences)
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block={block!r} must be a whole number of layers, at least 1.")
    if not times:
        raise ValueError("times is empty: say how often the block runs again.")
    with _passes(probe) as edited:
        plan = interventions.executed_plan(edited)
        if starts is None:
            starts = [start for start in range(max(plan.order) + 1) if _can_repeat(plan, start, block)]
        for start in starts:
            for count in times:
                plan.repeat(start, start + block, count)  # raises where it does not fit
        if not starts:
            raise ValueError(f"block={block}: depth plan {plan} runs no {block} layers one after the other.")
        clean = score(edited)
        _check_clean(score, clean)
        values, others = np.zeros((len(times), len(starts))), np.zeros((len(times), len(starts)))
        for i, count in enumerate(times):
            for j, start in enumerate(starts):
                with interventions.repeat(edited, start, start + block, count):
                    values[i, j] = score(edited)
                    others[i, j] = values[i, j] if selection is None else selection(edited)
    best = np.argmax if (selection or score).kind == "accuracy" else np.argmin
    i, j = np.unravel_index(best(others), others.shape)
    choice, elsewhere = (int(i), int(j)), selection is not None
    return RepeatCurves(score.kind, clean, values, tuple(times), tuple(starts), block, choice, elsewhere, score.name)


def _positions(edit: str, length: int, depth: int) -> range:
    """First positions at which an edit fits; at least one layer remains."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"lengths: {length!r} must be a whole number of at least 1.")
    if edit == "skip" and length == depth:
        return range(0)
    return range(max(0, depth - (2 if edit == "swap" else 1) * length + 1))


def _can_repeat(plan: DepthPlan, start: int, block: int) -> bool:
    run = tuple(range(start, start + block))
    return any(plan.order[i : i + block] == run for i in range(plan.effective_depth))


def _key(plan: DepthPlan) -> tuple:
    """What tells plans apart in what a model computes."""
    return plan.order, plan.ends


def _relative(kind: str, values: np.ndarray, clean: float) -> np.ndarray:
    return values / clean if kind == "accuracy" else values - clean


def _axis(kind: str, name: str) -> str:
    return f"{name}, relative" if kind == "accuracy" else f"{name}, change"


def _as_score(score: Callable, kind: str | None) -> Score:
    if isinstance(score, Score):
        return score
    if kind is None:
        raise ValueError("kind is missing: say whether the score is an 'accuracy' or a 'loss'.")
    return Score(kind, score, getattr(score, "__name__", "score"))


def _check_clean(score: Score, clean: float) -> None:
    if not np.isfinite(clean) or (score.kind == "accuracy" and clean <= 0):
        raise ValueError(
            f"The model as it is has a {score.kind} of {clean}: there is nothing to compare with. Use an easier task, more "
            "items, or a loss."
        )


@contextmanager
def _passes(probe: Probe) -> Iterator[PreTrainedModel]:
    """The probe's model, configured for the probe's number of passes for a while: scores and edits ask no other."""
    config = probe.model.config
    before = dict(config.__dict__)
    try:
        if probe.num_recurrences is not None:
            config.num_recurrences = probe.num_recurrences
        yield probe.model
    finally:
        config.__dict__.clear()
        config.__dict__.update(before)
