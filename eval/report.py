"""
A report of several lm-eval runs, models or recurrence counts of one: a table for each group of tasks and each metric,
with bootstrap errors over items, significance against a reference run and two baselines that read no question, and a
figure for each group.

A run is a results JSON with its samples beside it, as lm-eval's `--log_samples` writes them. Any lm-eval model's runs
will do; those of this package also say their recurrences, vocabulary, training FLOPs and how many requests were cut.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modeling_looped.recipes.corpus import read_json_lines

from .statistics import RESAMPLES, aggregate, p_value, resampled


MARKER = "<!-- written by looped eval-report -->"
LEVELS = ((0.01, "**"), (0.05, "*"))
UNGROUPED = "other tasks"
RANDOM, MAJORITY, NONE = "random guess", "majority answer", "—"
METRICS = {  # in the order of their tables
    "continuation_loss": "nats per token, lower is better",
    "acc": "share of right answers, higher is better",
    "f1": "overlap of words, higher is better",
    "exact_match": "share of right answers, higher is better",
    "acc_norm": "share of right answers by log-likelihood per size, higher is better",
    "nats_per_byte": "lower is better",
}
LOSSES = ("continuation_loss", "nats_per_byte")
MODELS = ("pretrained", "model")  # arguments that name the model: a label has their last part, as reports are published


@dataclass(frozen=True)
class TaskScores:
    """
    What one run scored on one task.

    Attributes:
        items: Hashes of the documents, in the order of their numbers.
        scores: By metric, float64 of shape (items,), or (items, 2) of (nats, tokens) or (nats, bytes).
        shots: Examples in the prompt, where the results say so.
        available: Items that the task has, where the results say so.
        random: Accuracy of a uniform choice, or what the task calls chance; 0 where answers are not chosen.
        majority: Share of items that the most frequent answer is right for.
        notes: What a reader has to know of the scores.
    """

    name: str
    items: tuple[str, ...]
    scores: Mapping[str, np.ndarray]
    shots: int | None
    available: int | None
    random: float
    majority: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """
    One results JSON.

    Attributes:
        label: The last part of the model's name, recurrences and exit, and a number where an earlier run has the same.
        model: All that runs at several recurrence counts, or at several exits, share.
        name: `model` as a figure calls it.
        arguments: lm-eval's `model_args` but for the model, written as "name=value,name=value".
        groups: Members (tasks and groups) of each group.
        truncated_requests: Prompts that the whole run cut to the model's context; None where it does not say.
    """

    path: Path
    label: str
    model: str
    name: str
    arguments: str
    tasks: Mapping[str, TaskScores]
    groups: Mapping[str, tuple[str, ...]]
    num_recurrences: int | None = None
    vocab_size: int | None = None
    training_flops: float | None = None
    limit: float | None = None
    truncated_requests: int | None = None


# Reading


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """
    The runs of results files, and of folders' `results_*.json`, however deep. Their order is that of `paths`.

    Raises:
        `ValueError`: where there is no such file, one is not of lm-eval, or its samples are missing.
    """
    runs, labels, names = [], Counter(), {}
    for path in dict.fromkeys(file.resolve() for given in paths for file in _files(Path(given))):
        run = _read_run(path)
        labels[run.label] += 1
        models = names.setdefault(run.name, [])
        if run.model not in models:
            models.append(run.model)
        number = models.index(run.model) + 1
        runs.append(replace(run, label=_numbered(run.label, labels[run.label]), name=_numbered(run.name, number)))
    if not runs:
        raise ValueError("There is nothing to report on: name results files of lm-eval, or folders with such.")
    return runs


def _numbered(text: str, number: int) -> str:
    return text if number == 1 else f"{text} ({number})"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} is neither a results file nor a folder with results_*.json.")
    files = sorted(path.rglob("results_*.json"))
    if not files:
        raise ValueError(f"{path} has no results_*.json: name the folder that was lm-eval's --output_path.")
    return files


def _read_run(path: Path) -> Run:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    parts = ("results", "configs", "config")
    if not isinstance(results, dict) or not all(isinstance(results.get(part), dict) for part in parts):
        raise ValueError(f"{path} is no result of lm-eval, which has {', '.join(parts)}.")
    config = results["config"]
    arguments = _arguments(config.get("model_args"))
    said = {**arguments, **{name: value for name, value in config.items() if value is not None}}
    named = (arguments.get(key) for key in MODELS)
    model = str(next(filter(None, named), None) or config.get("model") or path.parent.name)
    name = Path(model.rstrip("/")).name or model
    recurrences, stop = _number(said.get("num_recurrences"), int), said.get("exit")
    depth = ("" if recurrences is None else f" r={recurrences}") + ("" if stop is None else f" exit={stop}")
    others = sorted((key, str(value)) for key, value in arguments.items() if key not in ("num_recurrences", "exit"))
    return Run(
        path=path,
        label=name + depth,
        model=" ".join([model, *(f"{key}={value}" for key, value in others), *(["exits"] if stop is not None else [])]),
        name=name if stop is None else f"{name} (exits)",
        arguments=",".join(f"{key}={value}" for key, value in arguments.items() if key not in MODELS),
        tasks={task: _read_task(path, results, task) for task in results["configs"]},
        groups={group: tuple(names) for group, names in (results.get("group_subtasks") or {}).items() if names},
        num_recurrences=recurrences,
        vocab_size=_number(config.get("vocab_size"), int),
        training_flops=_number(config.get("training_flops"), float),
        limit=_number(config.get("limit"), float),
        truncated_requests=_number(config.get("truncated_requests"), int),
    )


def _arguments(given) -> dict:
    """`model_args`, of which lm-eval keeps what it was given: a dictionary, or "name=value,name=value"."""
    if isinstance(given, dict):
        return given
    pairs = (part.partition("=") for part in str(given or "").split(","))
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _number(value, kind: type):
    try:
        return None if value is None or isinstance(value, bool) else kind(value)
    except (TypeError, ValueError):
        return None


def _read_task(path: Path, results: dict, task: str) -> TaskScores:
    file = path.with_name(f"samples_{task}_{path.stem.rpartition('_')[2]}.jsonl")
    if not file.is_file():
        raise ValueError(
            f"{path} has no samples of {task} beside it ({file.name}), which errors and significance come from: run "
            f"lm-eval again with --log_samples; python -m modeling_looped.eval does so by itself."
        )
    config = results["configs"][task]
    chosen, chance = config.get("output_type") == "multiple_choice", (config.get("metadata") or {}).get("chance")
    items, filters, answers, chances = {}, [], Counter(), 0.0
    for number, sample in read_json_lines(file):
        try:
            kind = sample.get("filter", "none")
            if kind not in filters:
                filters.append(kind)
            if kind != filters[0]:
                continue
            names = [metric for metric in METRICS if metric in sample["metrics"]]
            scores = {metric: _score(sample[metric]) for metric in names}
            items[int(sample["doc_id"])] = sample["doc_hash"], scores
            answers.update(_answers(sample, chosen))
            chances += 1 / _choices(sample) if chosen else 0.0
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{file}, line {number}: no sample as lm-eval 0.4.13 logs them ({what}).") from None
    if not items:
        raise ValueError(f"{file} has no samples. Delete {path} and its samples, or run lm-eval again.")
    notes = []
    if len(filters) > 1:
        notes.append(f"{task}: answers as the filter {filters[0]} finds them, not {', '.join(filters[1:])}.")
    ordered, scores = [items[number] for number in sorted(items)], {}  # ranks log theirs one after the other
    for metric in METRICS:
        there = [given[metric] for _, given in ordered if metric in given]
        if len(there) == len(ordered):
            scores[metric] = np.array(there, dtype=np.float64)
        elif there:
            notes.append(f"{task}: no {metric}, which {len(ordered) - len(there)} of {len(ordered)} items lack.")
    return TaskScores(
        name=task,
        items=tuple(doc for doc, _ in ordered),
        scores=scores,
        shots=_number((results.get("n-shot") or {}).get(task), int),
        available=_number(((results.get("n-samples") or {}).get(task) or {}).get("original"), int),
        random=chances / len(ordered) if chance is None else float(chance),
        majority=max(answers.values()) / len(ordered),
        notes=tuple(notes),
    )


def _score(value) -> float | tuple[float, float]:
    if isinstance(value, list):
        over, under = value
        return float(over), float(under)
    return float(value)


def _choices(sample: dict) -> int:
    """How many answers there are: our tasks' documents say so, other tasks' have a request for each."""
    for name in ("choices", "contexts"):
        if isinstance(sample["doc"].get(name), list):
            return len(sample["doc"][name])
    return len(sample["arguments"])


def _answers(sample: dict, chosen: bool) -> set[str]:
    """What would be right: the number of a choice, any of several answers, or the target."""
    if chosen:
        return {str(sample["doc"].get("gold", sample["target"]))}
    answers = sample["doc"].get("answers")
    several = isinstance(answers, list) and answers
    return {str(answer).strip() for answer in (answers if several else [sample["target"]])}


# Numbers


class Comparison:
    """
    The runs' values, errors and significance, of tasks and groups alike: a group's value is the unweighted mean over
    its members, whose items are resampled each for itself. All runs draw the same items of a task.
    """

    def __init__(self, runs: Sequence[Run], reference: str | None = None):
        if not runs:
            raise ValueError("There are no runs to compare.")
        labels = [run.label for run in runs]
        if reference is not None and reference not in labels:
            raise ValueError(f"No run has the label {reference!r}: choose of {', '.join(map(repr, labels))}.")
        self.runs = list(runs)
        self.reference = self.runs[0 if reference is None else labels.index(reference)]
        self.groups = _groups(runs)
        self._values, self._draws = {}, {}
        for task in dict.fromkeys(name for run in runs for name in run.tasks):
            for run in runs:
                for metric, scores in run.tasks[task].scores.items() if task in run.tasks else ():
                    self._values[run.label, task, metric] = aggregate(scores)
                    self._draws[run.label, task, metric] = resampled(scores, seed=zlib.crc32(task.encode()))

    def metrics(self, name: str) -> list[str]:
        """What at least one run measured in the task or group."""
        return [metric for metric in METRICS if any(self._has(run, name, metric) for run in self.runs)]

    def members(self, group: str, metric: str) -> list[str]:
        return [name for name in self.groups[group] if metric in self.metrics(name)]

    def tasks(self, name: str) -> list[str]:
        """The tasks of a group and of the groups in it; a task itself."""
        members = self.groups.get(name)
        return [name] if members is None else [task for member in members for task in self.tasks(member)]

    def value(self, run: Run, name: str, metric: str) -> float | None:
        """None where the run lacks one of the tasks that others have."""
        return self._mean(self._values, run, name, metric)

    def error(self, run: Run, name: str, metric: str) -> float:
        """Bootstrap standard error; not a number where a task has one item."""
        draws = self._mean(self._draws, run, name, metric)
        single = any(len(run.tasks[task].items) < 2 for task in self._measured(name, metric))
        return math.nan if single else float(np.std(draws, ddof=1))

    def p(self, run: Run, name: str, metric: str) -> float | None:
        """Two-sided, of no difference to the reference (`statistics.p_value`); None where the two do not score the same."""
        if self.value(run, name, metric) is None or self.value(self.reference, name, metric) is None:
            return None
        if self.unlike(run, name, metric):
            return None
        drawn = self._mean(self._draws, run, name, metric) - self._mean(self._draws, self.reference, name, metric)
        changed = sum(self._changed(run, task, metric) for task in self._measured(name, metric))
        return p_value(drawn, changed)

    def unlike(self, run: Run, name: str, metric: str) -> list[str]:
        """Tasks that the run and the reference both measured, on other items or by counts of other tokens."""
        tasks = []
        for task in self._measured(name, metric):
            here, there = run.tasks.get(task), self.reference.tasks.get(task)
            if here is None or there is None or not {metric} <= here.scores.keys() & there.scores.keys():
                continue
            scores, others = here.scores[metric], there.scores[metric]
            counted = scores.ndim == others.ndim and (scores.ndim == 1 or np.array_equal(scores[:, 1], others[:, 1]))
            if here.items != there.items or not counted:
                tasks.append(task)
        return tasks

    def baseline(self, which: str, name: str, metric: str) -> float | None:
        """Of `RANDOM` or `MAJORITY`, on the items of the first run that has the task."""
        if name in self.groups:
            values = [self.baseline(which, member, metric) for member in self.members(name, metric)]
            return None if None in values else sum(values) / len(values)
        if metric in LOSSES:
            sizes = {run.vocab_size for run in self.runs}
            known = which == RANDOM and metric == "continuation_loss" and len(sizes) == 1 and None not in sizes
            return math.log(sizes.pop()) if known else None
        task = next(run.tasks[name] for run in self.runs if self._has(run, name, metric))
        return task.random if which == RANDOM else task.majority

    def _has(self, run: Run, name: str, metric: str) -> bool:
        if name in self.groups:
            return any(self._has(run, member, metric) for member in self.groups[name])
        return (run.label, name, metric) in self._values

    def _measured(self, name: str, metric: str) -> list[str]:
        return [task for task in self.tasks(name) if metric in self.metrics(task)]

    def _mean(self, table: Mapping, run: Run, name: str, metric: str):
        if name not in self.groups:
            return table.get((run.label, name, metric))
        parts = [self._mean(table, run, member, metric) for member in self.members(name, metric)]
        return None if not parts or any(part is None for part in parts) else sum(parts) / len(parts)

    def _changed(self, run: Run, task: str, metric: str) -> int:
        scores, others = (which.tasks[task].scores[metric] for which in (run, self.reference))
        return int((scores != others).reshape(len(scores), -1).any(axis=1).sum())


def _groups(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Members of all groups that hold tasks, those that hold groups first, and of the tasks that are in none."""
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    named: dict[str, dict[str, None]] = {}
    for run in runs:
        for group, members in run.groups.items():
            if group not in tasks:
                named.setdefault(group, {}).update(dict.fromkeys(members))

    def holds(name: str) -> bool:
        return name in tasks or any(holds(member) for member in named.get(name, ()))

    inner = {member for members in named.values() for member in members}
    groups: dict[str, tuple[str, ...]] = {}

    def visit(group: str) -> None:
        groups.setdefault(group, tuple(member for member in named[group] if holds(member)))
        for member in groups[group]:
            if member in named:
                visit(member)

    for group in named:
        if group not in inner and holds(group):
            visit(group)
    if others := tuple(task for task in tasks if task not in inner):
        groups[UNGROUPED] = others
    return groups


# Text


def report(runs: Sequence[Run], reference: str | None = None) -> str:
    """
    The report in Markdown, without figures. `reference` is the label of the run that the others are compared with, the
    first by default.
    """
    return _text(Comparison(runs, reference), {})


def write_report(
    runs: Sequence[Run],
    output_dir: str | Path,
    reference: str | None = None,
    overwrite: bool = False,
) -> Path:
    """
    Writes `report.md` of `runs` and a `report_GROUP.png` for each group that can be drawn into `output_dir`, and
    returns the path of the first. An earlier report is replaced; `overwrite` replaces any other `report.md` too. A
    model card gets its tables from the same results by `hub_cards.card.write_card`.

    Raises:
        `ValueError`: where `report.md` is not one of ours, or no run has the label `reference`.
    """
    path = Path(output_dir) / "report.md"
    if path.exists() and not overwrite and path.read_text(encoding="utf-8", errors="replace").split("\n")[0] != MARKER:
        raise ValueError(f"{path} is no report of looped eval-report: choose another --output, or pass --overwrite.")
    comparison = Comparison(runs, reference)
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = {}
    for group in comparison.groups:
        if (figure := plot_group(comparison, group)) is not None:
            name = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in group)
            figures[group] = f"report_{name}.png"
            figure.savefig(path.parent / figures[group], dpi=150)
    path.write_text(_text(comparison, figures), encoding="utf-8")
    return path


def comparison_rows(comparison: Comparison) -> list[dict]:
    """The report's cells, a row for each group, metric, task of it and run; a group's own mean has the task None."""
    rows = []
    for group in comparison.groups:
        for metric in comparison.metrics(group):
            for name in (*comparison.members(group, metric), group):
                shared = {"group": group, "metric": metric, "task": None if name == group else name}
                chance = {"random": comparison.baseline(RANDOM, name, metric)}
                chance["majority"] = comparison.baseline(MAJORITY, name, metric)
                for run in comparison.runs:
                    value = comparison.value(run, name, metric)
                    error = None if value is None else comparison.error(run, name, metric)
                    p = None if run is comparison.reference else comparison.p(run, name, metric)
                    rows.append({**shared, "run": run.label, "value": value, "error": error, "p": p, **chance})
    return rows


def _text(comparison: Comparison, figures: Mapping[str, str]) -> str:
    lines = [MARKER, "# Evaluation report", ""]
    lines += [
        f"Each value stands with its standard error, of {RESAMPLES} bootstrap samples of the items. A mean is "
        f"unweighted, and its items are resampled within each task. Marks are of a paired bootstrap over the same "
        f"items against `{comparison.reference.label}`: \\* p < 0.05, \\*\\* p < 0.01, not corrected for the number of "
        f"comparisons.",
        "",
        *_rows(
            ["run", "recurrences", "training FLOPs", "model arguments", "results"],
            (
                [
                    run.label,
                    NONE if run.num_recurrences is None else str(run.num_recurrences),
                    NONE if run.training_flops is None else f"{run.training_flops:.3g}",
                    run.arguments or NONE,
                    run.path.name,
                ]
                for run in comparison.runs
            ),
        ),
    ]
    for group in comparison.groups:
        if not (metrics := comparison.metrics(group)):
            lines += ["", f"## {_short(group)}", "", f"None of its tasks measures {', '.join(METRICS)}."]
            continue
        lines += ["", f"## {_short(group)}"]
        for metric in metrics:
            lines += ["", f"### {metric} ({METRICS[metric]})", "", *_table(comparison, group, metric)]
        lines += ["", *_notes(comparison, group)]
        if group in figures:
            lines += ["", f"![{_short(group)}]({figures[group]})"]
    return "\n".join(lines) + "\n"


def _table(comparison: Comparison, group: str, metric: str) -> list[str]:
    names = comparison.members(group, metric)
    columns = [*names, group]
    rows = [[run.label, *(_cell(comparison, run, name, metric) for name in columns)] for run in comparison.runs]
    for which in (RANDOM, MAJORITY):
        values = [comparison.baseline(which, name, metric) for name in columns]
        rows.append([which, *(NONE if value is None else f"{value:.3f}" for value in values)])
    return [*_rows(["run", *map(_short, names), "mean"], rows), *_remarks(comparison, group, metric)]


def _cell(comparison: Comparison, run: Run, name: str, metric: str) -> str:
    if (value := comparison.value(run, name, metric)) is None:
        return NONE
    error = comparison.error(run, name, metric)
    text = f"{value:.3f}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"
    p = None if run is comparison.reference else comparison.p(run, name, metric)
    return text + next((mark for level, mark in LEVELS if p is not None and p < level), "")


def _remarks(comparison: Comparison, group: str, metric: str) -> Iterator[str]:
    """Under a table: why there is no mark, or no mean."""
    for run in comparison.runs:
        if tasks := comparison.unlike(run, group, metric):
            here, there = run.tasks, comparison.reference.tasks
            others = [task for task in tasks if here[task].items != there[task].items]
            tokens = [task for task in tasks if task not in others]
            to = f"those of `{comparison.reference.label}`"
            if others:
                yield from ("", f"`{run.label}`: the items of {', '.join(others)} differ from {to}; no marks there.")
            if tokens:
                what = "tokens" if metric == "continuation_loss" else "answers"
                yield from ("", f"`{run.label}`: the {what} of {', '.join(tokens)} are not {to}; no marks there.")
        if comparison.value(run, group, metric) is None:
            yield from ("", f"`{run.label}` lacks tasks of this table, and so has no mean.")


def _notes(comparison: Comparison, group: str) -> Iterator[str]:
    """Under the tables of a group: what was asked."""
    runs, parts, notes = comparison.runs, [], {}
    for task in comparison.tasks(group):
        there = [run.tasks[task] for run in runs if task in run.tasks]
        counts = sorted({len(scores.items) for scores in there})
        available = max((scores.available or 0 for scores in there), default=0)
        shots = sorted({scores.shots for scores in there if scores.shots is not None})
        text = f"{task} {' or '.join(map(str, counts))}{f' of {available}' if available > counts[0] else ''}"
        parts.append(text + (f" ({' or '.join(map(str, shots))} shots)" if shots else ""))
        notes |= dict.fromkeys(note for scores in there for note in scores.notes)
    yield f"Items: {', '.join(parts)}."
    yield from (line for note in notes for line in ("", note))
    for said, values in (
        ("Limited by --limit", {run.label: f"{run.limit:g}" for run in runs if run.limit is not None}),
        (
            "Prompts cut to the model's context, of all tasks that were run",
            {run.label: str(run.truncated_requests) for run in runs if run.truncated_requests},
        ),
    ):
        if len(set(values.values())) == 1 and len(values) == len(runs) > 1:
            values = {"each run": values[runs[0].label]}
        if values:
            yield from ("", f"{said}: {', '.join(f'{label} {value}' for label, value in values.items())}.")


def _short(group: str) -> str:
    """A group that another one defines in place is called OTHER::GROUP."""
    return group.rpartition("::")[2]


def _rows(head: Sequence[str], rows) -> list[str]:
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines]


# Figures


def plot_group(comparison: Comparison, group: str):
    """
    A matplotlib figure of the group's mean of its first metric with standard errors: against recurrences, a line for
    each model, dashed where it has none; and against training FLOPs, where grey lines join runs of equal recurrences, if
    there are two budgets at least. None where no run says either.
    """
    metrics = comparison.metrics(group)
    points = [
        (run, value, comparison.error(run, group, metrics[0]))
        for run in comparison.runs
        if metrics and (value := comparison.value(run, group, metrics[0])) is not None and math.isfinite(value)
    ]
    panels = [_against_recurrences] if any(run.num_recurrences is not None for run, _, _ in points) else []
    panels += [_against_flops] if len({run.training_flops for run, _, _ in points} - {None}) > 1 else []
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    models = {run.model: run.name for run, _, _ in points}
    palette = matplotlib.colormaps["tab10" if len(models) <= 10 else "turbo"]
    colors = {model: palette(i if len(models) <= 10 else i / len(models)) for i, model in enumerate(models)}
    across = 4.8 * len(panels)
    columns = max(1, min(len(models), int(across * 11 / (max(map(len, models.values())) + 6))))
    legend = 0.25 * math.ceil(len(models) / columns) if len(models) > 1 else 0
    figure = Figure(figsize=(across, 3.6 + legend), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        draw(axes, points, colors)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    members = len(comparison.members(group, metrics[0]))
    figure.axes[0].set_ylabel(metrics[0].replace("_", " ") + (f" (mean of {members})" if members > 1 else ""))
    only = "" if len(models) > 1 else f": {next(iter(models.values()))}"
    figure.suptitle(f"{_short(group)}{only}", fontsize=10)
    if len(models) > 1:
        handles = [matplotlib.lines.Line2D([], [], marker="o", markersize=4, color=color) for color in colors.values()]
        options = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 8}
        figure.legend(handles, list(models.values()), **options)
    return figure


def _against_recurrences(axes, points: Sequence[tuple[Run, float, float]], colors: Mapping[str, object]) -> None:
    counts = sorted({run.num_recurrences for run, _, _ in points if run.num_recurrences is not None})
    for model, color in colors.items():
        here = [point for point in points if point[0].model == model and point[0].num_recurrences is not None]
        if here:
            here = [(run.num_recurrences, value, error) for run, value, error in here]
            _errorbar(axes, sorted(here), color, "o-", next(run.name for run, _, _ in points if run.model == model))
    for run, value, _ in points:
        if run.num_recurrences is None:
            axes.axhline(value, color=colors[run.model], linewidth=1, linestyle="--", zorder=0, label=run.name)
    if counts[0] > 0 and counts[-1] >= 8 * counts[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("recurrences (passes over the core)")


def _against_flops(axes, points: Sequence[tuple[Run, float, float]], colors: Mapping[str, object]) -> None:
    points = [point for point in points if point[0].training_flops is not None]
    for count in sorted({run.num_recurrences for run, _, _ in points if run.num_recurrences is not None}):
        here = sorted((run.training_flops, value) for run, value, _ in points if run.num_recurrences == count)
        if len({flops for flops, _ in here}) > 1:
            axes.plot(*zip(*here), color="0.75", linewidth=1, zorder=1, label=f"r={count}")
        end = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "color": "0.4", "fontsize": 7}
        axes.annotate(f"r={count}", here[-1], **end)
    for model, color in colors.items():
        here = [(run.training_flops, value, error) for run, value, error in points if run.model == model]
        if here:
            _errorbar(axes, sorted(here), color, "o", next(run.name for run, _, _ in points if run.model == model))
    axes.set_xscale("log")
    budgets = {run.training_flops for run, _, _ in points}
    if max(budgets) < 10 * min(budgets):  # powers of ten are too few ticks, and what lies between them too long
        axes.set_xticks(sorted(budgets), [f"{flops:.2g}" for flops in sorted(budgets)], fontsize=8)
        axes.minorticks_off()
    if len(budgets) == 1:
        axes.set_xlim(min(budgets) / 3, min(budgets) * 3)
    axes.set_xlabel("training FLOPs")


def _errorbar(axes, points: Sequence[tuple[float, float, float]], color, style: str, label: str) -> None:
    across, values, errors = zip(*points)
    errors = [0.0 if math.isnan(error) else error for error in errors]
    axes.errorbar(across, values, errors, fmt=style, color=color, markersize=4, linewidth=1.3, capsize=2, label=label)
