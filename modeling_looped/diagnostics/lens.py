"""
What a model would say if it stopped early: the logit lens, the tuned lens (arXiv 2303.08112) and what they show of depth
(arXiv 2602.16490, section 6.4).

Index i is the stream in front of executed layer i, so after i layers; the last index is the model's own output, which no
lens translates. Logits are made for one index and a few tokens at a time: of all indices at once they would be larger
than the model.
"""

import difflib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm

from modeling_looped.recipes.checkpoints import PROGRESS, STATE, newest_checkpoint, read_progress, write_checkpoint
from modeling_looped.recipes.scoring import Continuation, continuation_begin

from .measurement import Measurement, style
from .probe import Probe, Rows, batches


WEIGHTS, CONFIG = "lens.safetensors", "lens.json"
LOGITS = 2**26  # numbers in the logits that stand in memory at once
ENOUGH = 0.9  # of the model's own accuracy


class TunedLens(nn.Module):
    """
    An affine change of the stream in front of each executed layer, `T_i(h) = h + A_i h + b_i`, after which the model's
    own norm and head read it. Zero at first, which is the logit lens; in fp32, whatever the model is in.

    Args:
        model: A causal language model, or a `Probe` of one.

    Attributes:
        depth (`int`): Number of executed layers, each of which has a translator.
        width (`int`): Of the stream.
        tokens (`int`): How many tokens it was trained on.
    """

    def __init__(self, model, num_recurrences: int | None = None):
        super().__init__()
        self.probe = Probe.of(model, num_recurrences)
        self.depth, self.tokens = self.probe.depth, 0
        self.width = self.probe.model.config.get_text_config(decoder=True).hidden_size
        # Without an initialisation, which would draw random numbers only to be overwritten.
        translators = [nn.utils.skip_init(nn.Linear, self.width, self.width) for _ in range(self.depth)]
        self.translators = nn.ModuleList(translators).to(self.probe.device)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            index: From 0 to `depth` - 1.
            hidden_states: (..., width), what executed layer `index` reads.

        Returns:
            (..., vocabulary), logits in fp32.
        """
        h = hidden_states.float()
        return self.probe.lens(h + self.translators[index](h))

    def save_pretrained(self, directory: str | Path) -> None:
        """The translators as safetensors, and what they are for as JSON, in `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), directory / WEIGHTS)
        facts = {"depth": self.depth, "width": self.width, "order": self.probe.order, "tokens": self.tokens}
        (directory / CONFIG).write_text(json.dumps(facts))

    @classmethod
    def from_pretrained(cls, directory: str | Path, model, num_recurrences: int | None = None) -> "TunedLens":
        """
        Args:
            model: The model whose stream it reads, or a `Probe` of it.

        Raises:
            `ValueError`: for a directory without a lens, or with one of another depth or width.
        """
        directory = Path(directory)
        if not (directory / CONFIG).is_file():
            raise ValueError(
                f"{directory} holds no tuned lens ({CONFIG} is not there): train one with train_tuned_lens."
            )
        facts, lens = json.loads((directory / CONFIG).read_text()), cls(model, num_recurrences)
        for name in ("depth", "width"):
            if facts[name] != getattr(lens, name):
                raise ValueError(
                    f"{directory} is a tuned lens of {name} {facts[name]}, and this model has {getattr(lens, name)}: "
                    "load it for the model, and the number of recurrences, that it was trained on, or train another one."
                )
        lens.tokens = facts["tokens"]
        lens.load_state_dict(load_file(directory / WEIGHTS))
        return lens


def train_tuned_lens(
    model,
    rows: Sequence[Sequence[int]],
    steps: int = 250,
    tokens_per_step: int = 2**18,
    optimizer: str = "adam",
    learning_rate: float | None = None,
    batch_size: int = 8,
    output_dir: str | Path | None = None,
    save_every: int = 25,
    seed: int = 0,
    progress: bool = True,
    num_recurrences: int | None = None,
) -> TunedLens:
    """
    Trains all translators at once, each to say after i layers what the model says in the end: it minimises the mean
    over tokens of KL(p_final || p_i). The model itself is not trained and gets no gradients. The learning rate falls
    linearly to 0; gradients are clipped at a norm of 1.

    Args:
        model: A causal language model, or a `Probe` of one.
        rows: Lists of token ids, of texts that the lens is not tested on. A step reads the next ones of an endless
            sequence of shuffled passes, so that what it reads is a function of `seed` and the step.
        steps, tokens_per_step: As in the tuned lens's code; tokens to the nearest number of whole rows.
        optimizer: `"adam"`, or `"sgd"` with the paper's Nesterov momentum of 0.9 and weight decay of 1e-3.
        learning_rate: By default 1e-3 for Adam, and the paper's 0.1 for SGD.
        batch_size: Rows of one forward; a step has as many forwards as it needs.
        output_dir: For the lens and, every `save_every` steps, what training goes on from: a call with the same
            settings that finds it there ends at the same numbers as one that was never interrupted.

    Raises:
        `ValueError`: for settings that do not fit, a directory with another training, or a loss that is not finite.
    """
    rates = {"adam": 1e-3, "sgd": 0.1}
    if optimizer not in rates:
        raise ValueError(f"optimizer={optimizer!r} must be 'adam' or 'sgd'.")
    learning_rate = rates[optimizer] if learning_rate is None else learning_rate
    counts = {"steps": steps, "tokens_per_step": tokens_per_step, "batch_size": batch_size, "save_every": save_every}
    for name, value in {**counts, "learning_rate": learning_rate}.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be above 0.")
    next(batches(rows, 1))  # which looks at all of them
    probe = Probe.of(model, num_recurrences)
    lens = TunedLens(probe)
    if optimizer == "adam":
        descent = torch.optim.Adam(lens.parameters(), lr=learning_rate)
    else:
        descent = torch.optim.SGD(lens.parameters(), lr=learning_rate, momentum=0.9, nesterov=True, weight_decay=1e-3)
    first = 0
    if output_dir is not None:
        output_dir = Path(output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        settings = {
            "steps": steps,
            "tokens_per_step": tokens_per_step,
            "optimizer": optimizer,
            "learning_rate": learning_rate,
            "seed": seed,
            "order": probe.order,
            "model": _weights_digest(probe),
            "rows": _digest(np.concatenate([[len(row), *row] for row in rows])),
        }
        first = _continue(output_dir, settings, lens, descent)

    def save(step: int) -> None:
        def write(folder: Path) -> None:
            lens.save_pretrained(folder)
            torch.save(descent.state_dict(), folder / STATE)
            (folder / PROGRESS).write_text(json.dumps({"step": step, "settings": settings}))

        write_checkpoint(output_dir, step, write, keep_last=1, keep=set())

    per_step = max(1, round(tokens_per_step * len(rows) / sum(map(len, rows))))
    bar = tqdm(total=steps, initial=first, desc="tuned lens", unit="step", disable=not progress)
    for step in range(first, steps):
        for group in descent.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        chosen = [rows[number] for number in _numbers(len(rows), per_step, seed, step)]
        loss = _accumulate_gradients(lens, chosen, batch_size)
        if not np.isfinite(loss):
            raise ValueError(f"The loss of step {step} is {loss}: take a learning_rate below {learning_rate}.")
        nn.utils.clip_grad_norm_(lens.parameters(), 1.0)
        descent.step()
        descent.zero_grad()
        lens.tokens += sum(map(len, chosen))
        bar.set_postfix(KL=f"{loss:.4f}")
        bar.update()
        if output_dir is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
            save(step + 1)
    bar.close()
    if output_dir is not None:
        lens.save_pretrained(output_dir)
    return lens


def _accumulate_gradients(lens: TunedLens, rows: Sequence[Sequence[int]], batch_size: int) -> float:
    """
    The mean over tokens and indices of the KL divergence. The gradients are those of its sum over indices, as in the
    tuned lens's code: no translator learns more slowly for there being many.
    """
    probe, tokens, total = lens.probe, sum(map(len, rows)), 0.0
    for batch in probe.batches(rows, batch_size):
        stream = _stream(probe, batch, batch.mask.to(probe.device))
        for part in _parts(probe, len(stream[-1])):
            with torch.no_grad():
                final = probe.head(stream[-1][part]).log_softmax(-1)
            for index, translator in enumerate(lens.translators):
                with torch.enable_grad():
                    here = lens(index, stream[index][part]).log_softmax(-1)
                    loss = F.kl_div(here, final, log_target=True, reduction="none").sum(-1).sum() / tokens
                loss.backward(inputs=list(translator.parameters()))  # nothing else, such as the head, gets a gradient
                total += loss.item()
    return total / lens.depth


def _numbers(rows: int, count: int, seed: int, step: int) -> Iterator[int]:
    """Which `count` of so many rows a step reads."""
    orders = {}
    for place in range(step * count, (step + 1) * count):
        epoch, within = divmod(place, rows)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(rows)
        yield int(orders[epoch][within])


def _continue(output_dir: Path, settings: dict, lens: TunedLens, descent: torch.optim.Optimizer) -> int:
    """The step to go on from, with what `output_dir` holds of it loaded."""
    checkpoint = newest_checkpoint(output_dir)
    if checkpoint is None:
        return 0
    progress = read_progress(checkpoint)
    for name, value in settings.items():
        if progress["settings"].get(name) != value:
            raise ValueError(
                f"output_dir={str(output_dir)!r} holds the training of a tuned lens with {name}="
                f"{progress['settings'].get(name)!r}, and this one has {value!r}: name another directory."
            )
    before = TunedLens.from_pretrained(checkpoint, lens.probe)
    lens.load_state_dict(before.state_dict())
    lens.tokens = before.tokens
    descent.load_state_dict(torch.load(checkpoint / STATE, map_location=lens.probe.device, weights_only=True))
    return progress["step"]


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:12]


def _weights_digest(probe: Probe) -> str:
    """The first numbers of every tensor tell weights apart, wherever their folder is."""
    return _digest(*(p.detach().flatten()[:16].float().cpu().numpy() for p in probe.model.parameters()))


@dataclass(frozen=True)
class LensStatistics(Measurement):
    """
    Means over tokens of what a lens says at each index, against the model's own output, which is the last index.

    Args:
        forward: (executed layers + 1), KL(p_final || p_i) in nats, what a tuned lens is trained on.
        backward: The same of KL(p_i || p_final).
        overlap: The share of the `k` most likely tokens of p_final that are among those of p_i.
        agreement: The share of tokens at which the most likely one is the same.
        cross_entropy: Of p_i on the next token of the text, nats.
        k: How many tokens the overlap is of.
        tuned: Whether it is a tuned lens.
        boundaries: Positions where blocks end.
        tokens: How many tokens the means are over.
    """

    title = "How early the output is there"
    reading = (
        "The share of the model's most likely next tokens that can be read off after so many layers: where the curve "
        "rises late, late layers still change what the model says."
    )

    forward: np.ndarray
    backward: np.ndarray
    overlap: np.ndarray
    agreement: np.ndarray
    cross_entropy: np.ndarray
    k: int = 5
    tuned: bool = False
    boundaries: list[int] = field(default_factory=list)
    tokens: int = 0

    def to_frame(self):
        import pandas as pd

        columns = {
            name: getattr(self, name) for name in ("forward", "backward", "overlap", "agreement", "cross_entropy")
        }
        return pd.DataFrame({"index": range(len(self.overlap)), **columns})

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.plot(range(len(self.overlap)), self.overlap, marker="o", markersize=3, color=color, label=label)
        ax.set_ylim(0, 1.02)
        style(ax, "executed layers before the lens", f"overlap of the top {self.k}", self.boundaries)

    def headline(self):
        depth = len(self.overlap) - 1
        half = _stays(self.overlap, 0.5)
        return (
            f"Half of the {self.k} most likely tokens can be read off from layer {half} of {depth} on, and "
            f"{self.overlap[-2]:.3f} of them before the last one ({_lens_name(self.tuned)}, {self.tokens:,} tokens)."
        )


def lens_statistics(
    model,
    rows: Sequence[Sequence[int]],
    lens: TunedLens | None = None,
    k: int = 5,
    batch_size: int = 8,
    num_recurrences: int | None = None,
) -> LensStatistics:
    """
    Args:
        model: A causal language model, or a `Probe` of one.
        rows: Lists of token ids, which the lens was not trained on.
        lens: A tuned lens of that model; the logit lens by default.
        k: How many of the most likely tokens are compared.
        batch_size: Rows of one forward.

    Raises:
        `ValueError`: for a lens of another model or depth, or a `k` that the vocabulary has not.
    """
    probe = Probe.of(model, num_recurrences)
    _check(probe, lens)
    if not 1 <= k <= _vocabulary(probe):
        raise ValueError(f"k={k} must be at least 1 and at most the {_vocabulary(probe)} tokens of the vocabulary.")
    sums = torch.zeros(5, probe.depth + 1, dtype=torch.float64, device=probe.device)
    tokens = 0
    for batch in probe.batches(rows, batch_size):
        mask = batch.mask.to(probe.device)
        stream = _stream(probe, batch, mask)
        following = F.pad(batch.input_ids[:, 1:], (0, 1), value=-100).to(probe.device)[mask]
        tokens += len(following)
        for part in _parts(probe, len(following)):
            final = _read(probe, lens, stream, probe.depth, part)
            best = final.topk(k).indices
            for index in range(probe.depth + 1):
                here = final if index == probe.depth else _read(probe, lens, stream, index, part)
                shared = (here.topk(k).indices[:, :, None] == best[:, None, :]).any(-1).double().mean(-1)
                values = (
                    F.kl_div(here, final, log_target=True, reduction="none").sum(-1),
                    F.kl_div(final, here, log_target=True, reduction="none").sum(-1),
                    shared,
                    here.argmax(-1) == final.argmax(-1),
                    F.nll_loss(here, following[part], ignore_index=-100, reduction="none"),
                )
                sums[:, index] += torch.stack([value.double().sum() for value in values])
    predicted = tokens - len(rows)  # the last token of a text has no next one
    means = (sums.cpu() / torch.tensor([tokens] * 4 + [predicted])[:, None]).numpy()
    return LensStatistics(*means, k, lens is not None, probe.boundaries, tokens)


@dataclass(frozen=True)
class EarlyExitAccuracy(Measurement):
    """
    Args:
        accuracy: (executed layers + 1), the share of items that are answered right after so many layers; the last is
            the model's own.
        chance: The accuracy of random choices.
        items: How many there are.
        tuned: Whether it is a tuned lens.
        boundaries: Positions where blocks end.
    """

    title = "Leaving early"
    reading = (
        "The share of the model's own accuracy that is left when its answer is read off after so many layers: the "
        "further right it reaches 0.9, the more of the depth the task needs."
    )

    accuracy: np.ndarray
    chance: float
    items: int
    tuned: bool = False
    boundaries: list[int] = field(default_factory=list)

    @property
    def relative(self) -> np.ndarray:
        """Over the model's own accuracy; NaN where that is 0."""
        own = self.accuracy[-1]
        return self.accuracy / own if own > 0 else np.full_like(self.accuracy, np.nan)

    @property
    def exit(self) -> int | None:
        """After how many layers 90 % are reached for good; `None` where the model answers nothing right."""
        return _stays(self.relative, ENOUGH) if self.accuracy[-1] > 0 else None

    def to_frame(self):
        import pandas as pd

        places = range(len(self.accuracy))
        return pd.DataFrame({"index": places, "accuracy": self.accuracy, "relative": self.relative})

    def plot(self, ax, label=None, color="#1f5fa8"):
        ax.plot(range(len(self.accuracy)), self.relative, marker="o", markersize=3, color=color, label=label)
        ax.axhline(ENOUGH, color="0.5", linestyle=":", linewidth=1, zorder=0)
        ax.set_ylim(bottom=0)
        style(ax, "executed layers before the lens", "accuracy / the model's own", self.boundaries)

    def headline(self):
        if self.exit is None:
            return f"The model answers none of {self.items:,} items right, so there is nothing to read off earlier."
        return (
            f"{ENOUGH:.0%} of the model's accuracy of {self.accuracy[-1]:.3f} (chance {self.chance:.3f}) is there from "
            f"layer {self.exit} of {len(self.accuracy) - 1} on ({_lens_name(self.tuned)}, {self.items:,} items)."
        )


Item = tuple[str, Sequence[str], int]


def early_exit_accuracy(
    model,
    tokenizer,
    items: Iterable[Item],
    lens: TunedLens | None = None,
    batch_size: int = 8,
    num_recurrences: int | None = None,
) -> EarlyExitAccuracy:
    """
    Reads answers off at every index, all of them in one forward of each prompt.

    Args:
        model: A causal language model, or a `Probe` of one.
        items: `(context, choices, gold)`, such as `task_items` has: a text, what may follow it (with the space between
            the two), and the number of the right one. The choice with the highest log-likelihood is the answer. One
            choice alone is right where each of its tokens is the most likely one. Prompts that do not fit
            `config.max_position_embeddings` lose their beginning.
        lens: A tuned lens of that model; the logit lens by default.
        batch_size: Rows of one forward.

    Raises:
        `ValueError`: for a lens of another model or depth, or an item that cannot be scored.
    """
    probe = Probe.of(model, num_recurrences)
    _check(probe, lens)
    items = list(items)
    if not items:
        raise ValueError("items is empty: there is nothing to answer.")
    longest = getattr(probe.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    continuations, chosen = [], []
    for number, (context, choices, gold) in enumerate(items):
        if gold not in range(len(choices)):
            raise ValueError(f"items[{number}] has gold={gold!r}, and {len(choices)} choices: it must be one's number.")
        chosen.append(range(len(continuations), len(continuations) + len(choices)))
        continuations += [_encode(tokenizer, context, choice, longest, number) for choice in choices]
    likelihoods, greedy = _score(probe, lens, continuations, batch_size)
    right = np.zeros(probe.depth + 1)
    for (_, choices, gold), numbers in zip(items, chosen):
        if len(choices) == 1:
            right += greedy[numbers[0]]
        else:
            right += likelihoods[numbers.start : numbers.stop].argmax(0) == gold
    chance = sum(1 / len(choices) for _, choices, _ in items if len(choices) > 1) / len(items)
    return EarlyExitAccuracy(right / len(items), chance, len(items), lens is not None, probe.boundaries)


def _encode(tokenizer, context: str, choice: str, longest: int | None, number: int) -> Continuation:
    start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    whole, alone = (
        [*start, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for text in (context + choice, context.rstrip())
    )
    begin = continuation_begin(whole, alone)
    cut = max(0, len(whole) - longest) if longest else 0
    if not cut < begin < len(whole):
        raise ValueError(
            f"items[{number}], choice {choice[:80]!r}: no token is left to score, or none to predict it from. Leave the "
            "item out, or give it a context."
        )
    return Continuation(tuple(whole[cut:]), begin - cut)


def _score(
    probe: Probe, lens: TunedLens | None, continuations: Sequence[Continuation], batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """(continuations, indices): the summed log-likelihood, and whether every token is the most likely one."""
    # Those that differ in their last token only, such as choices of one letter, share a row.
    shared: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, continuation in enumerate(continuations):
        shared[continuation.ids[:-1]].append(number)
    groups = sorted(shared.values(), key=lambda group: len(continuations[group[0]].ids), reverse=True)
    texts = [continuations[group[0]].ids for group in groups]
    sums = torch.zeros(len(continuations), probe.depth + 1, dtype=torch.float64)
    greedy = torch.ones(len(continuations), probe.depth + 1, dtype=torch.bool)
    batch_size = probe.rows_at_once(batch_size)
    for start, batch in zip(range(0, len(texts), batch_size), probe.batches(texts, batch_size)):
        wanted = []  # (row, place whose output is read, continuation, token)
        for row, group in enumerate(groups[start : start + batch_size]):
            padding = batch.input_ids.shape[1] - len(texts[start + row])
            for number in group:
                ids, begin = continuations[number].ids, continuations[number].begin
                wanted += [(row, padding + place - 1, number, ids[place]) for place in range(begin, len(ids))]
        row, place, number, token = torch.tensor(wanted).T
        stream = _stream(probe, batch, (row.to(probe.device), place.to(probe.device)))
        for part in _parts(probe, len(wanted)):
            asked = token[part].to(probe.device)
            for index in range(probe.depth + 1):
                here = _read(probe, lens, stream, index, part)
                found = here.gather(1, asked[:, None])[:, 0].double().cpu()
                sums[:, index].index_add_(0, number[part], found)
                greedy[number[part][(here.argmax(-1) != asked).cpu()], index] = False
    return sums.numpy(), greedy.numpy()


def task_items(
    name: str, limit: int | None = None, num_fewshot: int | None = None, data_dir: str | Path | None = None
) -> list[Item]:
    """
    The items of one of this package's lm-eval tasks, as `early_exit_accuracy` takes them, with their shots. Needs the
    extra `eval`.

    Args:
        name: Such as `looped_var_assign_math_depth_0`, which is made and asks for no files.
        limit: How many, from the beginning.
        num_fewshot: Shots; the task's own number by default.
        data_dir: Folder, or several as in `PATH`, with the task's JSONL file; where none is named here or in the
            environment's `LOOPED_EVAL_DATA`, the Hub has it.

    Raises:
        `ValueError`: for a name that is no task, or a task whose answers are generated.
    """
    from lm_eval.tasks import TaskManager

    from modeling_looped.eval.run import TASKS

    # lm-eval's own tasks are left out: their index takes many seconds.
    metadata = None if data_dir is None else {"data_dir": os.fspath(data_dir)}
    manager = TaskManager(include_path=TASKS, include_defaults=False, metadata=metadata)
    if name not in manager.all_subtasks:
        near = difflib.get_close_matches(name, manager.all_subtasks, n=3)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"name={name!r} is no task of this package. {hint}`python -m modeling_looped.eval ls tasks` lists them."
        )
    task = manager.load([name])["tasks"][name]
    if task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
        raise ValueError(f"name={name!r} asks for {task.OUTPUT_TYPE}: take a task of multiple choice or loglikelihood.")
    if num_fewshot is not None:
        task.set_config("num_fewshot", num_fewshot)
    task.build_all_requests(limit=limit)
    requests = defaultdict(list)
    for request in sorted(task.instances, key=lambda request: request.idx):
        requests[request.doc["index"]].append(request)
    items = []
    for index in sorted(requests):
        contexts, choices = zip(*(request.args for request in requests[index]))
        if len(set(contexts)) > 1:
            raise ValueError(f"name={name!r} has a context for each choice: take a task with one for all of them.")
        items.append((contexts[0], list(choices), requests[index][0].doc.get("gold", 0)))
    return items


def _check(probe: Probe, lens: TunedLens | None) -> None:
    if lens is None:
        return
    if lens.depth != probe.depth:
        raise ValueError(
            f"lens has {lens.depth} translators, and the model executes {probe.depth} layers: train one for that depth."
        )
    if lens.probe.model is not probe.model:
        raise ValueError("lens is another model's: load it with TunedLens.from_pretrained(directory, model).")


def _stream(probe: Probe, batch: Rows, where) -> list[torch.Tensor]:
    """What each executed layer reads and, last, what the head reads, at `where` in (batch, length): (places, width)."""
    stream = []

    def on_input(position, h):
        stream.append(h[where])

    final = probe.run(batch, on_input=on_input).last_hidden_state
    return [*stream, final[where]]


@torch.no_grad()
def _read(probe: Probe, lens: TunedLens | None, stream: list[torch.Tensor], index: int, part: slice) -> torch.Tensor:
    """(places, vocabulary), log-probabilities at an index; the last one is the model's own output."""
    h = stream[index][part]
    if index == probe.depth:
        logits = probe.head(h)
    else:
        logits = probe.lens(h) if lens is None else lens(index, h)
    return logits.log_softmax(-1)


def _parts(probe: Probe, count: int) -> list[slice]:
    size = max(1, LOGITS // _vocabulary(probe))
    return [slice(start, start + size) for start in range(0, count, size)]


def _vocabulary(probe: Probe) -> int:
    return probe.model.get_output_embeddings().weight.shape[0]


def _stays(values: np.ndarray, least: float) -> int:
    """The first index from which on all `values` are at least so large; the last one is in any case."""
    below = np.flatnonzero(values[:-1] < least)
    return int(below[-1]) + 1 if len(below) else 0


def _lens_name(tuned: bool) -> str:
    return "tuned lens" if tuned else "logit lens"
