"""From texts to rows of tokens: a byte-level BPE tokenizer, one long stream, and batches that a step number names."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens at most, the two special ones included."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, special_tokens=[END_OF_TEXT, PAD], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def token_stream(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> np.ndarray:
    """All texts as one stream, each followed by the end-of-text token. Shape `(tokens,)`, int32."""
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return np.concatenate([np.asarray(ids + end, dtype=np.int32) for ids in encoded])


def text_stream(tokenizer, texts: Iterable[str], max_tokens: int | None) -> tuple[list[int], int]:
    """The token stream, and the bytes of the texts that it covers (a cut text counts by its decoded part)."""
    stream, size = [], 0
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + end
        if max_tokens is not None and len(stream) + len(ids) > max_tokens:
            ids = ids[: max_tokens - len(stream)]
            text = tokenizer.decode(ids, skip_special_tokens=True)
        stream += ids
        size += len(text.encode("utf-8"))
        if max_tokens is not None and len(stream) >= max_tokens:
            break
    return stream, max(size, 1)


@dataclass(frozen=True)
class TokenRows:
    """Rows of `length` tokens cut from a stream, in an order that is a function of (seed, epoch)."""

    stream: np.ndarray
    length: int
    seed: int = 0

    def __post_init__(self):
        if len(self) < 1:
            raise ValueError(f"{len(self.stream)} tokens do not fill one row of {self.length}: use more text.")

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def batch(self, first: int, count: int) -> torch.Tensor:
        """The rows number `first` to `first + count - 1` of the endless shuffled sequence. `(count, length)`, int64."""
        rows = []
        for index in range(first, first + count):
            epoch, position = divmod(index, len(self))
            start = int(self._order(epoch)[position]) * self.length
            rows.append(self.stream[start : start + self.length])
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def inputs(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """The `count` rows from `first` on as arguments of a model's forward."""
        batch = self.batch(first, count)
        return {"input_ids": batch, "labels": batch}

    def _order(self, epoch: int) -> np.ndarray:
        cached = self.__dict__.get("_cached_order")
        if cached is None or cached[0] != epoch:
            cached = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
            object.__setattr__(self, "_cached_order", cached)
        return cached[1]


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    """Nats per token of a unigram model with add-one counts of `train` on `validation`."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[validation].mean())
