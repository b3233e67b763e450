"""Log-likelihoods of continuations: each row of tokens once, and the head only where something is read off."""

import inspect
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm


@dataclass(frozen=True)
class Continuation:
    """Token `ids` of which those from number `begin` on are scored; at least one stands before, and one after it."""

    ids: tuple[int, ...]
    begin: int


def continuation_begin(whole: Sequence[int], context: Sequence[int]) -> int:
    """
    The first token of a text that its context alone does not have there: where a tokenizer merges across the boundary,
    the merged token belongs to the continuation.
    """
    return len(os.path.commonprefix([whole, context]))


@dataclass(frozen=True)
class Score:
    """The summed log-likelihood in nats, and whether every token was the most likely one."""

    log_likelihood: float
    greedy: bool


@torch.no_grad()
def score_continuations(
    model,
    continuations: Sequence[Continuation],
    batch_size: int = 8,
    padding_side: str = "right",
    progress: bool = False,
    **forward,
) -> list[Score]:
    """
    A score for each of `continuations`, in their order. Those that differ in their last token only, such as choices of
    one letter, share a row.

    Args:
        model: Any causal language model; what it returns for padded rows must not depend on the padding.
        batch_size: Rows of a forward.
        padding_side: `"right"`, where padding is behind every token that is read, or `"left"`.
        forward: Further arguments of each forward, such as `num_recurrences`.
    """
    # What to read off where: {row of tokens: [(continuation, place, token)]}.
    rows: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for number, continuation in enumerate(continuations):
        ids = continuation.ids
        rows[ids[:-1]] += [(number, place - 1, ids[place]) for place in range(continuation.begin, len(ids))]
    sums, greedy = (
        torch.zeros(len(continuations), dtype=torch.float64),
        torch.ones(len(continuations), dtype=torch.bool),
    )
    slices = "logits_to_keep" in inspect.signature(model.forward).parameters
    in_order = sorted(
        rows, key=len, reverse=True
    )  # what does not fit fails at once, and rows of one length stay unpadded
    bar = tqdm(total=len(in_order), desc="log-likelihoods", unit="row", disable=not progress)
    for first in range(0, len(in_order), batch_size):
        batch = in_order[first : first + batch_size]
        longest = len(batch[0])
        before = [longest - len(row) if padding_side == "left" else 0 for row in batch]
        wanted = [
            (i, place + before[i], number, token) for i, row in enumerate(batch) for number, place, token in rows[row]
        ]
        input_ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.long)
        for i, row in enumerate(batch):
            input_ids[i, before[i] : before[i] + len(row)] = torch.tensor(row)
            mask[i, before[i] : before[i] + len(row)] = 1
        places = sorted({place for _, place, *_ in wanted})
        inputs = {"input_ids": input_ids, "attention_mask": mask}
        if padding_side == "left":
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        if slices:
            inputs["logits_to_keep"] = torch.tensor(places)
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        logits = model(**inputs, use_cache=False, **forward).logits
        at = {place: i for i, place in enumerate(places)} if slices else {place: place for place in places}
        read = logits[[i for i, *_ in wanted], [at[place] for _, place, *_ in wanted]].float()
        tokens = torch.tensor([token for *_, token in wanted], device=read.device)[:, None]
        logs = read.log_softmax(-1).gather(1, tokens)[:, 0].double().cpu()
        right = (read.argmax(-1) == tokens[:, 0]).cpu()
        numbers = torch.tensor([number for _, _, number, _ in wanted])
        sums.index_add_(0, numbers, logs)
        greedy[numbers[~right]] = False
        bar.update(len(batch))
    bar.close()
    return [Score(*score) for score in zip(sums.tolist(), greedy.tolist())]
