"""What a key-value cache that keeps less (`kv_sharing`) costs a looped model, measured with the real cache."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_looped.recipes.tokens import text_stream


@dataclass(frozen=True)
class KVCost:
    """
    One strategy: loss over the continuations, and the bytes that the filled cache holds for 1,000 tokens of a row.
    The ratios are to `"all"`. Where the family refuses the strategy, `refused` says why and the rest is `None`.
    """

    strategy: str | int
    nats_per_token: float | None = None
    perplexity: float | None = None
    perplexity_ratio: float | None = None
    cache_bytes_per_1000_tokens: float | None = None
    cache_ratio: float | None = None
    refused: str | None = None


@torch.no_grad()
def kv_cost(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    strategies: Sequence[str | int] = ("all", "first", "average", "last"),
    num_recurrences: int | None = None,
    prompt_length: int = 128,
    continuation: int = 64,
    rows: int = 16,
) -> list[KVCost]:
    """
    Cuts the texts, as one stream, into `rows` windows of `prompt_length + continuation` tokens (fewer where the texts
    end earlier). Each prompt is read in one forward, then its continuation token by token as in generation, but with
    the text's own tokens. `strategies` are values of `kv_sharing`; `"all"`, which computes the exact function, always
    comes first: the ratios refer to it.

    Raises:
        `ValueError`: for a model without `kv_sharing`, windows that it has no positions for, or texts without one.
    """
    if not hasattr(model.config, "kv_sharing"):
        raise ValueError(f"{type(model).__name__} has no kv_sharing to compare: use a looped model.")
    length, longest = prompt_length + continuation, model.config.max_position_embeddings
    if min(prompt_length, continuation, rows) < 1 or length > longest:
        raise ValueError(
            f"prompt_length={prompt_length}, continuation={continuation} and rows={rows} must be at least 1, and the "
            f"first two together at most max_position_embeddings={longest}."
        )
    stream, _ = text_stream(tokenizer, texts, rows * length)
    if len(stream) < length:
        raise ValueError(f"The texts hold {len(stream)} tokens and one window takes {length}: make it shorter.")
    windows = torch.tensor(stream[: len(stream) // length * length], device=model.device).view(-1, length)
    depth = {} if num_recurrences is None else {"num_recurrences": num_recurrences}
    configured, training, costs = model.config.kv_sharing, model.training, []
    model.eval()
    try:
        for strategy in dict.fromkeys(("all", *strategies)):
            try:
                model.config.kv_sharing = strategy
                model.config.validate()
            except ValueError as error:
                costs.append(KVCost(strategy, refused=str(error)))
                continue
            nats, size = _measure(model, windows, prompt_length, depth)
            exact_nats, full_size = (nats, size) if strategy == "all" else (exact_nats, full_size)
            costs.append(KVCost(strategy, nats, math.exp(nats), math.exp(nats - exact_nats), size, size / full_size))
    finally:
        model.config.kv_sharing = configured
        model.train(training)
    return costs


def kv_cost_table(costs: Sequence[KVCost]) -> str:
    """The costs as a text table."""
    lines = ["strategy  nats/token  perplexity  ratio   KiB of cache/token  ratio"]
    for row in costs:
        if row.refused:
            lines.append(f"{row.strategy!s:<8}  refused: {row.refused}")
        else:
            lines.append(
                f"{row.strategy!s:<8}  {row.nats_per_token:10.4f}  {row.perplexity:10.3f}  {row.perplexity_ratio:.4f}  "
                f"{row.cache_bytes_per_1000_tokens / 1024_000:18.3f}  {row.cache_ratio:.3f}"
            )
    return "\n".join(lines)


def _measure(model: PreTrainedModel, windows: torch.Tensor, prompt_length: int, depth: dict) -> tuple[float, float]:
    """Nats per token of the continuations, and cache bytes for 1,000 tokens of a row."""
    outputs = model(windows[:, :prompt_length], use_cache=True, logits_to_keep=1, **depth)
    nats = 0.0
    for position in range(prompt_length, windows.shape[1]):
        nats += torch.nn.functional.cross_entropy(outputs.logits[:, -1].float(), windows[:, position]).item()
        if position + 1 < windows.shape[1]:
            outputs = model(windows[:, position, None], cache=outputs.cache, use_cache=True, **depth)
    held = [tensor for layer in outputs.cache.layers for tensor in (layer.keys, layer.values)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return nats / (windows.shape[1] - prompt_length), 1000 * size / (len(windows) * (windows.shape[1] - 1))
