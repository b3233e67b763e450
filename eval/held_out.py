"""Held-out loss of a causal language model at several recurrence counts, in nats per token and bits per byte."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_looped.recipes.tokens import text_stream
from modeling_looped.recipes.versions import versions

from .metrics import load_metric


@dataclass(frozen=True)
class HeldOutLoss:
    """One row: the loss at `num_recurrences` over `tokens` predicted tokens of texts of `bytes` UTF-8 bytes."""

    num_recurrences: int
    nats_per_token: float
    bits_per_byte: float
    tokens: int
    bytes: int


def parse_recurrences(text: str) -> list[int]:
    """`text` such as `"0..8"`, `"4"` or `"1,2,4..6"` as a list of whole numbers."""
    counts = []
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)(?:\s*\.\.\s*(\d+))?\s*", part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(f"In recurrences {text!r}, {part!r} does not fit: write 4, or 1,2,4, or 0..8.")
        counts.extend(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    return counts


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    recurrences: Sequence[int] | None = None,
    sequence_length: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    progress: bool = False,
) -> list[HeldOutLoss]:
    """
    The texts, each followed by the end-of-text token, as one stream in windows of `sequence_length` tokens that
    overlap by one: every token but the stream's first is predicted once, from its window alone.

    Args:
        recurrences: Recurrence counts, the configured one by default.
        sequence_length: `config.max_position_embeddings` by default.
        max_tokens: Stop after the first so many tokens of the stream.

    Raises:
        `ValueError`: for texts without two tokens, or recurrences on a model that has none.
    """
    configured = getattr(model.config, "num_recurrences", None)
    if recurrences is None:
        recurrences = [1 if configured is None else configured]
    elif configured is None and list(recurrences) != [1]:
        raise ValueError(f"{type(model).__name__} has no recurrences to turn: leave --recurrences out.")
    length = sequence_length or model.config.max_position_embeddings
    batches, size = held_out_batches(tokenizer, texts, length, batch_size, max_tokens)
    training, results = model.training, []
    model.eval()
    bar = tqdm(total=len(batches) * len(recurrences), desc="held-out loss", unit="batch", disable=not progress)
    for count in recurrences:
        depth = {} if configured is None else {"num_recurrences": count}
        nats, predicted = 0.0, 0
        for batch in batches:
            labels = batch["labels"].to(model.device)
            logits = model(batch["input_ids"].to(model.device), use_cache=False, **depth).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            nats += loss.item()
            predicted += int((labels[:, 1:] != -100).sum())
            bar.update()
        per_token = load_metric("continuation_loss").compute(nats=[nats], tokens=[predicted])["continuation_loss"]
        per_byte = load_metric("bits_per_byte").compute(nats=[nats], bytes=[size])["bits_per_byte"]
        results.append(HeldOutLoss(count, per_token, per_byte, predicted, size))
    bar.close()
    model.train(training)
    return results


def save_held_out(
    checkpoint: str | Path,
    losses: Sequence[HeldOutLoss],
    texts: Sequence[str],
    name: str,
    window: int,
    command: list[str],
) -> Path:
    """
    Keeps what `held_out_loss` measured as `held_out.json` in a checkpoint's folder, for its card: an earlier one is
    replaced.

    Args:
        texts, name: What was read, and what it is called.
        window: Tokens of a window.
        command: How to measure it again, with `CHECKPOINT` for the folder.

    Raises:
        `ValueError`: where `checkpoint` is no folder.
    """
    if not Path(checkpoint).is_dir():
        raise ValueError(f"--save keeps the losses in a checkpoint's folder, and {checkpoint} is none.")
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()
    record = {
        "command": command,
        "text": {"name": name, "documents": len(texts), "sha256": digest},
        "sequence_length": window,
        "rows": [asdict(row) for row in losses],
        "versions": versions(),
    }
    path = Path(checkpoint) / "held_out.json"
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def held_out_batches(
    tokenizer, texts: Iterable[str], sequence_length: int, batch_size: int = 8, max_tokens: int | None = None
) -> tuple[list[dict[str, torch.Tensor]], int]:
    """
    The windows of `held_out_loss` as batches of `input_ids` and `labels`, with the bytes of the texts that they cover.
    """
    stream, size = text_stream(tokenizer, texts, max_tokens)
    if len(stream) < 2:
        raise ValueError("The texts hold fewer than two tokens: there is nothing to predict.")
    starts = range(0, len(stream) - 1, sequence_length - 1)
    windows = [torch.tensor(stream[start : start + sequence_length]) for start in starts]
    pad = torch.nn.utils.rnn.pad_sequence
    batches = []
    for i in range(0, len(windows), batch_size):
        rows = windows[i : i + batch_size]
        # Padding only ever stands to the right of the last window: no token attends to it.
        batches.append({"input_ids": pad(rows, True), "labels": pad(rows, True, padding_value=-100)})
    return batches, size
