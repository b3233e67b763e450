"""
Parameters, FLOPs and memory from a configuration alone. The model is built without memory and counted, so that every
family is counted by the same rules: arXiv 2604.21106, sections 2.1 and 2.2 of its spec, 2608.15062, section 4, and
2602.16490, section 4.3. Which layers run is asked of the configuration's plan.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig


SECTIONS = ("prelude", "core", "coda")


def parameter_counts(config: PreTrainedConfig) -> dict[str, int]:
    """
    Parameters by part. `embedding` is the token and position tables, `head` is 0 where it is tied; `prelude`, `core`
    and `coda` are matrices (an order of layers that is no loop is all prelude), `injection` everything that belongs to
    the recurrence itself (gates and routers too), `norms` the rest, `unique` everything but the embeddings (the paper's
    N with norms), `total` what is stored.
    """
    sizes = _sizes(config)
    counts = {"embedding": _elements(sizes, "embedding"), "head": _elements(sizes, "lm_head")}
    counts |= {section: _elements(sizes, section, least_dims=2) for section in SECTIONS}
    counts["injection"] = _elements(sizes, "injection") + _elements(sizes, "router")
    total = sum(sizes.values())
    counts["norms"] = total - sum(counts.values())
    counts["unique"] = total - counts["embedding"] - counts["head"]
    counts["total"] = total
    return counts


def effective_parameters(config: PreTrainedConfig, num_recurrences: int | None = None) -> int:
    """Parameters of the same model with weights of its own for each executed layer, embeddings and head as they are."""
    sizes, ends, total = _sizes(config), config.plan(num_recurrences).ends, parameter_counts(config)["total"]
    executed = ends[0], ends[-2] - ends[0], ends[-1] - ends[-2]
    for section, layers in zip(SECTIONS, executed):
        if stored := _stored(config, section):
            total += (layers - stored) * (_elements(sizes, section) - sizes[section, 3]) // stored
    return total


def training_flops_per_token(
    config: PreTrainedConfig,
    sequence_length: int | None = None,
    num_recurrences: int | None = None,
    backprop_recurrences: int | None = None,
) -> int:
    """
    FLOPs of forward and backward per token in the iso-depth convention, for every family: 2 per weight and pass
    forward, 4 backward, none backward for the passes that truncated backpropagation leaves out (all but the last
    `backprop_recurrences`, the configuration's by default). Attention counts the
    whole `sequence_length` (not halved for causality; `max_position_embeddings` by default), block norms count, the
    embedding lookup is free. This is the official code's estimate, which the paper's budgets are denominated in. A
    pass that needs a share of the tokens only (Mixture-of-Recursions) counts that share of them, as queries and, but
    for `kv_sharing="first"`, as keys. What `kv_sharing` saves in projections is not taken off.
    """
    once, passes = _forward_flops(config, sequence_length, num_recurrences)
    backprop = backprop_recurrences or config.backprop_recurrences or len(passes)
    return round(3 * once + sum(passes) + 2 * sum(passes[max(0, len(passes) - backprop) :]))


def forward_flops_per_token(
    config: PreTrainedConfig, sequence_length: int | None = None, num_recurrences: int | None = None
) -> int:
    """FLOPs of the forward pass per token, counted as in `training_flops_per_token`."""
    once, passes = _forward_flops(config, sequence_length, num_recurrences)
    return round(once + sum(passes))


def paper_flops_per_token(
    config: PreTrainedConfig, sequence_length: int | None = None, num_recurrences: int | None = None
) -> int:
    """
    FLOPs of the forward pass per token as RecurrentGPT's paper counts them (arXiv 2608.15062, section 4 of its spec):
    matrices of blocks and injection and attention over the whole `sequence_length`, without norms, embeddings, head.
    """
    blocks, overhead = _paper_flops(config, sequence_length, num_recurrences)
    return blocks + overhead


@dataclass(frozen=True)
class DenseComparison:
    """
    A RecurrentGPT against its dense twin in the paper's convention, FLOPs per token forward: of the twin, of the
    model's blocks, of its injection on top; and the mean over depths drawn from 1 to `num_recurrences` in training.
    """

    dense: int
    blocks: int
    overhead: int
    mean_training: float

    @property
    def ratio(self) -> float:
        return (self.blocks + self.overhead) / self.dense

    @property
    def training_ratio(self) -> float:
        return self.mean_training / self.dense


def dense_comparison(
    config: PreTrainedConfig, sequence_length: int | None = None, num_recurrences: int | None = None
) -> DenseComparison:
    """The row of section 4 for `config`, whose `dense_twin()` is the model it is compared to."""
    depth = config.recurrences_or_default(num_recurrences)
    drawn = [paper_flops_per_token(config, sequence_length, passes) for passes in range(1, depth + 1)]
    return DenseComparison(
        paper_flops_per_token(config.dense_twin(), sequence_length),
        *_paper_flops(config, sequence_length, depth),
        sum(drawn) / max(1, len(drawn)),
    )


def grown_flops_per_token(
    config: PreTrainedConfig, sequence_length: int | None = None, num_layers: int | None = None
) -> int:
    """
    FLOPs of forward and backward per token as the papers on growing count them (arXiv 2602.16490, section 4.3 of its
    spec): matrices of the executed layers, attention over the whole `sequence_length` (`max_position_embeddings` by
    default), and the head; without norms and embedding. The plan's layers run, or `num_layers` in a stage of growth.
    The forward pass alone is a third.
    """
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    layers = config.plan().effective_depth if num_layers is None else num_layers
    matrices = sum(_elements(_sizes(config), section, least_dims=2) for section in SECTIONS) // config.num_unique_layers
    one_layer = 6 * matrices + 12 * length * config.num_attention_heads * _head_size(config)
    return layers * one_layer + 6 * config.vocab_size * config.hidden_size


def grown_training_flops(
    config: PreTrainedConfig,
    budgets: Sequence[int],
    block_size: int,
    total_steps: int,
    tokens_per_step: int,
    sequence_length: int | None = None,
) -> int:
    """
    FLOPs of a whole training run in the convention of `grown_flops_per_token`. Stage i = 1, 2, ... of `budgets[i - 1]`
    steps runs i * `block_size` layers, and the steps that no stage has run the plan of `config`: no stage is training
    without growth. A step has `tokens_per_step` tokens.

    Raises:
        `ValueError`: where the stages have more steps than `total_steps`.
    """
    in_stages = sum(budgets)
    if in_stages > total_steps:
        raise ValueError(f"budgets={list(budgets)} are {in_stages} steps, more than total_steps={total_steps}.")
    stages = ((steps, stage * block_size) for stage, steps in enumerate(budgets, 1))
    per_token = sum(steps * grown_flops_per_token(config, sequence_length, layers) for steps, layers in stages)
    return tokens_per_step * (per_token + (total_steps - in_stages) * grown_flops_per_token(config, sequence_length))


def kv_cache_bytes(
    config: PreTrainedConfig,
    sequence_length: int,
    batch_size: int = 1,
    num_recurrences: int | None = None,
    bytes_per_value: int = 2,
) -> int:
    """
    Bytes of a full key-value cache: one slot per executed layer, fewer under `kv_sharing`; bf16 by default. Tokens that
    sit out a pass (Mixture-of-Recursions) have their place in its slots all the same, as in the caches of this package.
    """
    slots = config.cache_config(num_recurrences).num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return slots * 2 * heads * _head_size(config) * sequence_length * batch_size * bytes_per_value


def inference_bytes(
    config: PreTrainedConfig,
    sequence_length: int,
    batch_size: int = 1,
    num_recurrences: int | None = None,
    bytes_per_value: int = 2,
) -> int:
    """Bytes of weights and a full key-value cache (arXiv 2608.15062, section 10.2 of its spec), no activations."""
    cache = kv_cache_bytes(config, sequence_length, batch_size, num_recurrences, bytes_per_value)
    return bytes_per_value * parameter_counts(config)["total"] + cache


def accounting_figures(
    config: PreTrainedConfig, recurrences: list[int] | None = None, sequence_length: int | None = None
) -> dict:
    """
    Everything above: parameters by part, and a row for each number of recurrences with the FLOPs per token in each
    convention that the family has.
    """
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    rows = []
    for count in recurrences or [config.num_recurrences]:
        config.check_recurrences(count)
        layers = config.plan(count).effective_depth
        row = {
            "num_recurrences": count,
            "executed_layers": layers,
            "kv_cache_bytes": kv_cache_bytes(config, length, num_recurrences=count),
            "iso_depth": {
                "forward_flops_per_token": forward_flops_per_token(config, length, count),
                "training_flops_per_token": training_flops_per_token(config, length, count),
            },
        }
        if hasattr(config, "dense_twin"):
            against = dense_comparison(config, length, count)
            row["recurrent_gpt"] = {
                "dense_twin_forward_flops_per_token": against.dense,
                "blocks_forward_flops_per_token": against.blocks,
                "injection_forward_flops_per_token": against.overhead,
                "ratio_to_dense": against.ratio,
                "training_ratio": against.training_ratio,
            }
        if hasattr(config, "depth_plan"):
            training = grown_flops_per_token(config, length, layers)
            row["growing"] = {"forward_flops_per_token": training // 3, "training_flops_per_token": training}
        rows.append(row)
    named = {"model_type": config.model_type, "plan": str(config.plan()), "sequence_length": length}
    return {**named, "parameters": parameter_counts(config), "rows": rows}


def accounting_table(
    config: PreTrainedConfig, recurrences: list[int] | None = None, sequence_length: int | None = None
) -> str:
    """`accounting_figures` as a text table, with a row for each number of passes in `recurrences`."""
    figures = accounting_figures(config, recurrences, sequence_length)
    length = figures["sequence_length"]
    rows = [f"{figures['model_type']} {figures['plan']}", "", "parameters"]
    rows += [f"  {part:<10} {count:>15,}" for part, count in figures["parameters"].items()]
    rows += [
        "",
        f"iso-depth convention (arXiv 2604.21106), at {length:,} tokens of context; attention over all, head too",
        "recurrences  executed layers  forward FLOPs/token  training FLOPs/token  KV cache bytes (bf16)",
    ]
    for row in figures["rows"]:
        flops = row["iso_depth"]
        rows.append(
            f"{row['num_recurrences']:11d}  {row['executed_layers']:15d}  {flops['forward_flops_per_token']:19,}  "
            f"{flops['training_flops_per_token']:20,}  {row['kv_cache_bytes']:21,}"
        )
    if hasattr(config, "dense_twin"):
        rows += [
            "",
            f"RecurrentGPT convention (arXiv 2608.15062), at {length:,} tokens of context, GFLOPs forward; no head",
            "recurrences   dense twin  blocks  injection  ratio to dense  training ratio at 1..recurrences",
        ]
        for row in figures["rows"]:
            flops = row["recurrent_gpt"]
            dense, blocks, injection = (
                flops[f"{part}_forward_flops_per_token"] / 1e9 for part in ("dense_twin", "blocks", "injection")
            )
            rows.append(
                f"{row['num_recurrences']:11d}  {dense:11.4f}  {blocks:6.4f}  {injection:9.4f}  "
                f"{flops['ratio_to_dense']:14.3f}  {flops['training_ratio']:32.3f}"
            )
    if hasattr(config, "depth_plan"):
        rows += [
            "",
            f"growing convention (arXiv 2602.16490), at {length:,} tokens of context; head too, no norms",
            "recurrences  executed layers  forward FLOPs/token  training FLOPs/token",
        ]
        for row in figures["rows"]:
            flops = row["growing"]
            rows.append(
                f"{row['num_recurrences']:11d}  {row['executed_layers']:15d}  {flops['forward_flops_per_token']:19,}  "
                f"{flops['training_flops_per_token']:20,}"
            )
    return "\n".join(rows)


def _sizes(config: PreTrainedConfig) -> Counter:
    """
    Elements by `(part, dimensions)` of tensors; a part is a section, or else the first name below `model`, or
    `"embedding"`.
    """
    return _counted(config.to_json_string(use_diff=False))


@lru_cache(maxsize=256)  # by content: configurations change, and the same one is asked for many times
def _counted(config_json: str) -> Counter:
    config = AutoConfig.for_model(**json.loads(config_json))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sections = [section for section in SECTIONS for _ in range(_stored(config, section))]
    sizes = Counter()
    for name, tensor in model.named_parameters():  # a tied head is the table, once
        part, *below = name.removeprefix("model.").split(".")
        if id(tensor) in tables:
            part = "embedding"
        elif part == "layers":  # which have the names of Llama's
            part = sections[int(below[0])]
        sizes[part, tensor.dim()] += tensor.numel()
    return sizes


def _stored(config, section: str) -> int:
    return getattr(config, f"num_{section}_layers")


def _head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _elements(sizes: Counter, part: str, least_dims: int = 1) -> int:
    return sum(count for (of, dims), count in sizes.items() if of == part and dims >= least_dims)


def _run_flops(
    config,
    section: str,
    layers: int,
    sequence_length: int | None,
    least_dims: int = 1,
    share: float = 1,
    keys: float = 1,
) -> float:
    """
    Forward, of `layers` executed layers of a section, which are all of one size, on `share` of the tokens, which
    attend to `keys` of the length.
    """
    if layers == 0:
        return 0
    sizes = _sizes(config)
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    weights = _elements(sizes, section, least_dims)
    # Three dimensions are low-rank matrices of every pass, and one pass runs its own.
    weights -= sizes[section, 3] - sizes[section, 3] // config.trained_recurrences
    attention = 4 * config.num_attention_heads * _head_size(config) * length
    return layers * share * (2 * weights // _stored(config, section) + attention * keys)


def _forward_flops(config, sequence_length: int | None, num_recurrences: int | None) -> tuple[float, list[float]]:
    """`(once, passes)`: what runs once, and each pass over the core with its injection or router."""
    sizes, ends = _sizes(config), config.plan(num_recurrences).ends
    shares = config.pass_shares(len(ends) - 2)
    once = 2 * config.vocab_size * config.hidden_size
    once += _run_flops(config, "prelude", ends[0], sequence_length)
    once += _run_flops(config, "coda", ends[-1] - ends[-2], sequence_length)
    injection = _elements(sizes, "injection", least_dims=2)
    if getattr(config, "injection", None) == "hyperconnection":  # scalars, each pass's own, that weigh whole states
        injection = injection // config.trained_recurrences * config.hidden_size
    router = _elements(sizes, "router", least_dims=2)
    if getattr(config, "routing", None) == "token_choice":
        once += 2 * router
        router = 0
    passes = []
    # A pass takes its tokens from those of the pass before.
    for start, end, share, candidates in zip(ends, ends[1:-1], shares, (1, *shares)):
        keys = 1 if config.kv_sharing == "first" else share
        core = _run_flops(config, "core", end - start, sequence_length, share=share, keys=keys)
        passes.append(core + 2 * injection + candidates * 2 * router / config.trained_recurrences)
    return once, passes


def _paper_flops(config, sequence_length: int | None, num_recurrences: int | None) -> tuple[int, int]:
    """`(blocks, overhead)` of `paper_flops_per_token`; the overhead is the injection's."""
    count = config.recurrences_or_default(num_recurrences)
    prelude, core, coda = (
        _run_flops(config, section, _stored(config, section), sequence_length, least_dims=2) for section in SECTIONS
    )
    return round(prelude + core * count + coda), 2 * _elements(_sizes(config), "injection", least_dims=2) * count
