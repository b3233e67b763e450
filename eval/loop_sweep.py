"""Which block of a trained model can run again? Each one looped without training (arXiv 2602.16490, section 4.2)."""

import math
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_looped.interventions import executed_plan, skip
from modeling_looped.looping import loop
from modeling_looped.recipes.corpus import read_json_lines
from modeling_looped.recipes.scoring import Continuation
from modeling_looped.recipes.study import append_row, fingerprint, read_rows
from modeling_looped.recipes.versions import versions

from .held_out import held_out_batches


MEASURES = {
    "accuracy": "accuracy",
    "log_likelihood": "log-likelihood of the gold answer",
    "margin": "margin of the gold answer",
}


@dataclass(frozen=True)
class TaskScore:
    """
    Args:
        accuracy (`float`): Share of items that are answered right.
        log_likelihood (`float`): Of the gold continuation, summed over its tokens, in nats; mean over items.
        margin (`float`, *optional*): Of multiple choice, that minus the best other choice's; mean over items.
        gained (`int`): Items answered right that the unlooped model answers wrong.
        lost (`int`): The other way round.
        items (`int`): How many there are.
    """

    accuracy: float
    log_likelihood: float
    margin: float | None
    gained: int
    lost: int
    items: int


@dataclass(frozen=True)
class SweepRow:
    """
    The layers [start, start + length) with `repeats` additional passes: held-out loss over `tokens` predicted tokens,
    and the tasks' scores. `start` is `None` and `repeats` 0 for the model without a loop.
    """

    start: int | None
    length: int
    repeats: int
    nats_per_token: float
    tokens: int
    tasks: dict[str, TaskScore]

    @property
    def columns(self) -> dict:
        """Flat, as in a CSV: a task's scores as `<task>_accuracy` and so on."""
        row = {**asdict(self), "start": "" if self.start is None else self.start}
        for name, score in row.pop("tasks").items():
            row |= {f"{name}_{field}": value for field, value in score.items() if value is not None}
        return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}


@dataclass(frozen=True)
class _Item:
    """A window of the text (`task` is `None`), a continuation, or choices of which number `gold` is right."""

    task: str | None
    sequences: tuple[Continuation, ...]
    gold: int = 0


@dataclass(frozen=True)
class _Batch:
    """Padded sequences, (sequences, length), and at which positions the next token is `scored`."""

    input_ids: torch.Tensor
    scored: torch.Tensor
    numbers: tuple[int, ...]  # of the sequences, in the order of the items


def parse_tasks(arguments: Sequence[str]) -> dict[str, list[dict]]:
    """The items of each `NAME=PATH`, by name."""
    tasks = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not (name and equals and path) or name in tasks:
            raise ValueError(f"--task {argument!r} does not fit: write NAME=PATH, each name once.")
        tasks[name] = read_items(path)
    return tasks


def read_items(path: str) -> list[dict]:
    """The items of a JSONL file, as `loop_sweep` takes them."""
    if not Path(path).is_file():
        raise ValueError(f"{path!r} is not a file: name a .jsonl file with a task's items.")
    return [item for _, item in read_json_lines(Path(path))]


def loop_sweep(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    tasks: Mapping[str, Sequence[Mapping]],
    length: int = 4,
    repeats: Sequence[int] = (1, 2),
    starts: Sequence[int] | None = None,
    done: Collection[tuple[int | None, int]] = (),
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    max_items: int | None = None,
    batch_tokens: int = 1024,
    progress: bool = False,
) -> Iterator[SweepRow]:
    """
    One row for the model as it is, then one for each block of `length` layers and number of additional passes. What
    comes before a loop's second pass is computed once for all rows, where the model lets its layers start from hidden
    states (`inputs_embeds` that it takes as they are); each row then runs only the layers after it.

    Args:
        texts: Held-out texts, cut into windows as `held_out_loss` does.
        tasks: Items by name. Either each has `context` and `continuation`, right where every token of the continuation
            is the most likely one. Or each has `query`, `choices` and `gold`, the number of the right one: the prompt
            is the query, a line break and "Answer:", and the choice with the highest likelihood is the answer.
            A space goes before continuations and choices that do not begin with one. Prompts that do not fit
            `config.max_position_embeddings` lose their beginning.
        starts: First layers, in the order of the rows; all by default, those at multiples of `length` first.
        done: `(start, repeats)` of rows that are not wanted, `(None, 0)` for the model as it is.
        sequence_length: Of the windows, `config.max_position_embeddings` by default.
        max_tokens: Of the texts, from their beginning.
        max_items: Of each task, from its beginning.
        batch_tokens: About so many tokens at a time.

    Raises:
        `ValueError`: for blocks that the model does not have, a task without items or with others; before any work.
    """
    layers = executed_plan(model).unique_layers
    if not 1 <= length <= layers:
        name = type(model).__name__
        raise ValueError(f"length={length} must be at least 1 and at most the {layers} layers of {name}.")
    if not repeats or min(repeats) < 1:
        raise ValueError(f"repeats={list(repeats)} must be additional passes, each at least 1.")
    possible = range(layers - length + 1)
    starts = sorted(possible, key=lambda start: (start % length, start)) if starts is None else list(starts)
    for start in starts:
        if start not in possible:
            raise ValueError(f"starts: {start} must be at least 0 and at most {possible[-1]} for blocks of {length}.")
    keys = [(start, count) for start in starts for count in repeats if (start, count) not in done]
    depths = {key: _shared_depth(model, key, length) for key in keys}
    items = _items(model, tokenizer, texts, tasks, sequence_length, max_tokens, max_items)
    wanted = {**({} if (None, 0) in done else {(None, 0): 0}), **depths}
    return _rows(model, items, wanted, length, batch_tokens, progress)


def sweep_to_csv(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    tasks: Mapping[str, Sequence[Mapping]],
    results: str | Path,
    length: int = 4,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    max_items: int | None = None,
    **options,
) -> list[dict[str, str]]:
    """
    `loop_sweep` of blocks of `length` layers into the file `results`, each row as it is finished: rows that the file
    has are not computed again. `tasks` have items by name, of which the first `max_items` are used.

    Returns:
        All rows of the file.

    Raises:
        `ValueError`: for what `loop_sweep` refuses, or a file with rows of other settings, data or weights.
    """
    results = Path(results)
    cuts = {"sequence_length": sequence_length, "max_tokens": max_tokens, "max_items": max_items}
    items = _items(model, tokenizer, texts, tasks, **cuts)
    shape = [[item.task, item.gold, [sequence.begin for sequence in item.sequences]] for item in items]
    ids = np.array([token for item in items for sequence in item.sequences for token in sequence.ids])
    # The first numbers of every tensor tell weights apart, wherever their folder is.
    weights = [parameter.detach().flatten()[:16].float().cpu().numpy() for parameter in model.parameters()]
    plan = str(executed_plan(model))
    settings = fingerprint({"plan": plan, "length": length, "dtype": str(model.dtype), "items": shape}, ids, *weights)
    rows = read_rows(results)
    if {row.get("settings") for row in rows} - {settings}:
        raise ValueError(f"{results} holds rows of other settings, data or weights: name another file as results.")
    done = {(int(row["start"]) if row["start"] else None, int(row["repeats"])) for row in rows}
    began = time.perf_counter()
    for row in loop_sweep(model, tokenizer, texts, tasks, length, done=done, **cuts, **options):
        seconds, began = time.perf_counter() - began, time.perf_counter()
        values = {**row.columns, "nats_per_token": row.nats_per_token, "seconds": f"{seconds:.1f}"}
        values |= {"settings": settings, "versions": versions()}
        append_row(results, values, values)
        print(f"{_block(values)}: {row.nats_per_token:.4f} nats/token, {seconds:.0f} s", flush=True)
    return read_rows(results)


def sweep_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Of the rows of a CSV: the model without a loop, and how each block's figures differ from it."""
    base, looped, measures = _parts(rows)
    lines = ["  ".join(["layers     passes", *measures])]
    for row in [base, *looped]:
        cells = [f"{_block(row):<18}"[:18]]
        for measure in measures:
            value = float(row[measure])
            text = f"{value:.4f}" if row is base else f"{value - float(base[measure]):+.4f}"
            cells.append(f"{text:>{len(measure)}}")
        lines.append(" ".join(cells[:1]) + " " + "  ".join(cells[1:]))
    return "\n".join(lines)


def sweep_figures(rows: Sequence[Mapping[str, str]]) -> list[dict]:
    """What `sweep_table` says, as numbers: the measures of each row, and their change from the model without a loop."""
    base, looped, measures = _parts(rows)
    figures = []
    for row in [base, *looped]:
        start = None if row is base else int(row["start"])
        values = {measure: float(row[measure]) for measure in measures}
        figures.append(
            {
                "start": start,
                "stop": None if start is None else start + int(row["length"]),
                "repeats": int(row["repeats"]),
                "tokens": int(row["tokens"]),
                "values": values,
                "changes": {measure: value - float(base[measure]) for measure, value in values.items()},
            }
        )
    return figures


def plot_sweep(rows: Sequence[Mapping[str, str]], path: str | Path) -> None:
    """
    Of the rows of a CSV, a panel for each measure: its change against the model without a loop, by first layer. Bands
    are the standard error of the accuracy without a loop.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base, looped, measures = _parts(rows)
    across = min(3, len(measures))
    down = math.ceil(len(measures) / across)
    figure, panels = plt.subplots(
        down, across, figsize=(4.6 * across, 3.4 * down), sharex=True, layout="constrained", squeeze=False
    )
    for axes, measure in zip(panels.flat, measures):
        origin = float(base[measure])
        for number, count in enumerate(sorted({int(row["repeats"]) for row in looped})):
            here = [row for row in looped if int(row["repeats"]) == count]
            first, change = zip(*((int(row["start"]), float(row[measure]) - origin) for row in here))
            label = f"{count} additional pass" + ("es" if count > 1 else "")
            axes.plot(first, change, "o-", color=f"C{number}", markersize=3.5, label=label)
        task, _, kind = measure.rpartition("_accuracy")
        axes.set_title(f"{_title(measure)}\n(without a loop: {origin:.3f})", fontsize=10)
        axes.axhline(0, color="0.3", linewidth=1)
        if task and not kind:
            error = math.sqrt(origin * (1 - origin) / int(base[f"{task}_items"]))
            axes.axhspan(-error, error, color="0.93", zorder=0)
        else:  # the first layers can be a hundred times worse than the others, which should be seen too
            usual = statistics.median(abs(float(row[measure]) - origin) for row in looped)
            axes.set_yscale("asinh", linear_width=usual or 1.0, base=0)
            axes.yaxis.get_major_locator().set_params(numticks=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    for axes in panels.flat[len(measures) :]:
        axes.set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("first layer of the block")
    for axes in panels[:, 0]:
        axes.set_ylabel("change against no loop")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles) or 1, frameon=False, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _parts(rows: Sequence[Mapping[str, str]]) -> tuple[Mapping, list[Mapping], list[str]]:
    """The row without a loop, the others by start and repeats, and the columns that measure something."""
    base = next((row for row in rows if row["start"] == ""), None)
    if base is None:
        raise ValueError("The rows lack the model without a loop, with which the others are compared: run the sweep.")
    looped = sorted((row for row in rows if row is not base), key=lambda row: (int(row["start"]), int(row["repeats"])))
    measures = [name for name in base if name == "nats_per_token" or name.endswith(tuple(f"_{m}" for m in MEASURES))]
    return base, looped, measures


def _block(row: Mapping) -> str:
    if row["start"] == "":
        return "no loop"
    return f"{row['start']}-{int(row['start']) + int(row['length']) - 1} +{row['repeats']}"


def _title(measure: str) -> str:
    for field, words in MEASURES.items():
        if measure.endswith(f"_{field}"):
            return f"{measure.removesuffix(f'_{field}')}: {words}"
    return "held-out loss, nats per token"


def _items(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    tasks: Mapping[str, Sequence[Mapping]],
    sequence_length: int | None,
    max_tokens: int | None,
    max_items: int | None,
) -> list[_Item]:
    longest = model.config.get_text_config(decoder=True).max_position_embeddings
    windows, _ = held_out_batches(tokenizer, texts, sequence_length or longest, 1, max_tokens)
    items = [_Item(None, (Continuation(tuple(window["input_ids"][0].tolist()), 1),)) for window in windows]
    for name, given in tasks.items():
        given = list(given)[:max_items]
        if not given:
            raise ValueError(f"Task {name!r} holds no items.")
        kinds = {_kind(name, number, item) for number, item in enumerate(given, 1)}
        if len(kinds) > 1:
            raise ValueError(f"Task {name!r} mixes continuations and multiple choice: give each its own name.")
        for item in given:
            prompt, gold = item.get("context"), item.get("gold", 0)
            if prompt is None:
                prompt = f"{item['query']}\nAnswer:"
            answers = item.get("choices") or [item["continuation"]]
            sequences = [_encode(tokenizer, prompt, answer, longest) for answer in answers]
            if min(len(sequence.ids) - sequence.begin for sequence in sequences) < 1 or sequences[0].begin < 1:
                raise ValueError(f"Task {name!r}: {item!r} leaves nothing to predict, or nothing to predict it from.")
            items.append(_Item(name, tuple(sequences), gold))
    return items


def _kind(name: str, number: int, item) -> str:
    if isinstance(item, Mapping):
        if isinstance(item.get("context"), str) and isinstance(item.get("continuation"), str):
            return "continuation"
        choices, gold = item.get("choices"), item.get("gold")
        if isinstance(item.get("query"), str) and isinstance(choices, list) and len(choices) > 1:
            if all(isinstance(choice, str) for choice in choices) and gold in range(len(choices)):
                return "multiple choice"
    raise ValueError(
        f"Task {name!r}, item {number}: it needs context and continuation as text, or query, choices and gold, the "
        "number of the right one."
    )


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, longest: int) -> Continuation:
    answer = answer if answer.startswith(" ") else f" {answer}"
    begin = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    prompt = [*begin, *prompt]
    cut = max(0, len(prompt) + len(answer) - longest)
    return Continuation((*prompt[cut:], *answer), len(prompt) - min(cut, len(prompt)))


def _batches(items: Sequence[_Item], batch_tokens: int) -> list[_Batch]:
    sequences = [sequence for item in items for sequence in item.sequences]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].ids), reverse=True)
    batches = []
    while order:
        count = max(1, batch_tokens // len(sequences[order[0]].ids))
        numbers, order = order[:count], order[count:]
        chosen = [sequences[i] for i in numbers]
        # Padding stands to the right of every token: none attends to it, and no mask is needed.
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sequence.ids) for sequence in chosen], True)
        begins, ends = (torch.tensor(bounds)[:, None] for bounds in zip(*((s.begin, len(s.ids)) for s in chosen)))
        predicted = torch.arange(1, ids.shape[1] + 1)
        batches.append(_Batch(ids, (predicted >= begins) & (predicted < ends), tuple(numbers)))
    return batches


def _shared_depth(model: PreTrainedModel, key: tuple[int, int], length: int) -> int:
    """
    How many executed layers of the unlooped model a loop leaves in front of all that it changes, but not the last
    layer, whose recorded output is normed.
    """
    start, repeats = key
    before = executed_plan(model).order
    with loop(model, start, start + length, repeats) as edit:
        after = edit.plan.order
    return min(next((i for i, layer in enumerate(before) if after[i] != layer), len(before)), len(before) - 1)


def _rows(
    model: PreTrainedModel,
    items: list[_Item],
    wanted: dict[tuple[int | None, int], int],
    length: int,
    batch_tokens: int,
    progress: bool,
) -> Iterator[SweepRow]:
    """A row for each (start, repeats) that is `wanted`, with the depth that it shares with the unlooped model."""
    if not wanted:
        return
    batches = _batches(items, batch_tokens)
    looped = {key: depth for key, depth in wanted.items() if key[1]}
    depths = set(looped.values()) - {0}
    needed = sorted(depths) if depths and _can_share(model, batches[0], looped, length) else []
    bar = tqdm(total=len(batches) * len({(None, 0), *wanted}), desc="loop sweep", unit="batch", disable=not progress)
    scores, states = _scores(model, batches, bar, record=needed)
    unlooped = [_is_right(item, score) for item, score in zip(items, _by_item(items, scores))]
    for (start, repeats), depth in wanted.items():
        if repeats:
            with ExitStack() as edits:
                edits.enter_context(loop(model, start, start + length, repeats))
                if depth in needed:
                    edits.enter_context(skip(model, 0, depth))
                scores, _ = _scores(model, batches, bar, states[depth] if depth in needed else None)
        yield _row(items, scores, unlooped, start, length, repeats)
    bar.close()


@torch.no_grad()
def _can_share(model: PreTrainedModel, batch: _Batch, looped: dict[tuple[int, int], int], length: int) -> bool:
    """Whether the layers after a loop's first pass, started from hidden states, compute what the looped model does."""
    keys = [key for key, depth in looped.items() if depth]
    training = model.training
    model.eval()
    try:
        states = _forward(model, batch, output_hidden_states=True).hidden_states
        if len(states) != executed_plan(model).effective_depth + 1:
            return False
        for start, repeats in {min(keys), max(keys)}:
            with loop(model, start, start + length, repeats):
                whole = _forward(model, batch).logits
                with skip(model, 0, looped[start, repeats]):
                    suffix = _forward(model, batch, inputs_embeds=states[looped[start, repeats]]).logits
            if not torch.allclose(whole, suffix, rtol=1e-5, atol=1e-5):
                return False
    finally:
        model.train(training)
    return True


def _forward(model: PreTrainedModel, batch: _Batch, **inputs):
    if "inputs_embeds" not in inputs:
        inputs["input_ids"] = batch.input_ids.to(model.device)
    return model(**inputs, use_cache=False, logits_to_keep=batch.scored.to(model.device))


@torch.no_grad()
def _scores(
    model: PreTrainedModel,
    batches: list[_Batch],
    bar,
    hidden_states: list[torch.Tensor] | None = None,
    record: Collection[int] = (),
) -> tuple[list[tuple[float, bool]], dict[int, list[torch.Tensor]]]:
    """
    Log-likelihood of each sequence's scored tokens, and whether each of them is the most likely; from `hidden_states`,
    one tensor (sequences, length, width) a batch, where given. With them, those at the depths to `record`, in RAM.
    """
    training, device = model.training, model.device
    model.eval()
    scores, states = {}, {depth: [] for depth in record}
    for number, batch in enumerate(batches):
        inputs = {} if hidden_states is None else {"inputs_embeds": hidden_states[number].to(device)}
        outputs = _forward(model, batch, **inputs, **({"output_hidden_states": True} if record else {}))
        for depth in record:
            states[depth].append(outputs.hidden_states[depth].cpu())
        logits = outputs.logits.float()  # (scored tokens, vocabulary): the head saw no other position
        targets = batch.input_ids.roll(-1, 1)[batch.scored].to(device)
        nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double().cpu()
        wrong = (logits.argmax(-1) != targets).double().cpu()
        sums = torch.zeros(len(batch.numbers), 2, dtype=torch.float64)
        sums.index_add_(0, batch.scored.nonzero()[:, 0], torch.stack([nats, wrong], dim=1))
        scores |= {i: (-loss, misses == 0) for i, (loss, misses) in zip(batch.numbers, sums.tolist())}
        bar.update()
    model.train(training)
    return [scores[i] for i in range(len(scores))], states


def _by_item(items: list[_Item], scores: list[tuple[float, bool]]) -> Iterator[list[tuple[float, bool]]]:
    scores = iter(scores)
    for item in items:
        yield [next(scores) for _ in item.sequences]


def _is_right(item: _Item, scores: list[tuple[float, bool]]) -> bool:
    if len(scores) == 1:
        return scores[0][1]
    likelihoods = [likelihood for likelihood, _ in scores]
    return likelihoods.index(max(likelihoods)) == item.gold


def _row(
    items: list[_Item],
    scores: list[tuple[float, bool]],
    unlooped: list[bool],
    start: int | None,
    length: int,
    repeats: int,
) -> SweepRow:
    nats, tokens, found = 0.0, 0, {}
    for item, here, before in zip(items, _by_item(items, scores), unlooped):
        likelihoods = [likelihood for likelihood, _ in here]
        if item.task is None:
            nats -= likelihoods[0]
            tokens += len(item.sequences[0].ids) - item.sequences[0].begin
            continue
        gold = likelihoods.pop(item.gold)
        margin = gold - max(likelihoods) if likelihoods else None
        found.setdefault(item.task, []).append((_is_right(item, here), before, gold, margin))
    tasks = {}
    for name, answers in found.items():
        right, before, gold, margins = zip(*answers)
        count = len(answers)
        tasks[name] = TaskScore(
            accuracy=sum(right) / count,
            log_likelihood=sum(gold) / count,
            margin=None if margins[0] is None else sum(margins) / count,
            gained=sum(a and not b for a, b in zip(right, before)),
            lost=sum(b and not a for a, b in zip(right, before)),
            items=count,
        )
    return SweepRow(start, length, repeats, nats / tokens, tokens, tasks)
