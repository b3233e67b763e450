"""Parameters, FLOPs and cache bytes from a configuration alone (arXiv 2604.21106, sections 2.1 and 2.2 of its spec)."""

from transformers import PreTrainedConfig


def parameter_counts(config: PreTrainedConfig) -> dict[str, int]:
    """
    Parameters by part. `prelude`, `core`, `coda` and `injection` are matrices (and lane weights), `norms` all RMSNorm
    scales, `unique` everything but the embeddings (the paper's N with norms), `total` what a checkpoint stores.
    """
    width, layer = config.hidden_size, _layer_matrices(config)
    layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    embedding = config.vocab_size * width
    counts = {
        "embedding": embedding,
        "head": 0 if config.tie_word_embeddings else embedding,
        "prelude": config.num_prelude_layers * layer,
        "core": config.num_core_layers * layer,
        "coda": config.num_coda_layers * layer,
        "injection": {
            "linear": 2 * width**2,
            "hyperconnection": config.trained_recurrences * _lane_weights(config),
        }.get(config.injection, 0),
        "norms": (2 * layers + 3) * width,
    }
    counts["unique"] = sum(counts[part] for part in ("prelude", "core", "coda", "injection", "norms"))
    counts["total"] = counts["unique"] + counts["embedding"] + counts["head"]
    return counts


def training_flops_per_token(
    config: PreTrainedConfig,
    sequence_length: int | None = None,
    num_recurrences: int | None = None,
    backprop_recurrences: int | None = None,
) -> int:
    """
    FLOPs of forward and backward per token: 2 per weight and pass forward, 4 backward, none backward for the passes
    that truncated backpropagation leaves out. Attention counts the whole `sequence_length` (not halved for
    causality; `max_position_embeddings` by default), block norms count, the embedding lookup is free. This is the
    official code's estimate, which the paper's budgets are denominated in.
    """
    passes = config.num_recurrences if num_recurrences is None else num_recurrences
    backprop = backprop_recurrences or config.backprop_recurrences or passes
    return _flops_per_token(config, sequence_length, passes, min(passes, backprop))


def forward_flops_per_token(
    config: PreTrainedConfig, sequence_length: int | None = None, num_recurrences: int | None = None
) -> int:
    """FLOPs of the forward pass per token, counted as in `training_flops_per_token`."""
    passes = config.num_recurrences if num_recurrences is None else num_recurrences
    return _flops_per_token(config, sequence_length, passes, passes) // 3


def kv_cache_bytes(
    config: PreTrainedConfig,
    sequence_length: int,
    batch_size: int = 1,
    num_recurrences: int | None = None,
    bytes_per_value: int = 2,
) -> int:
    """Bytes of a full key-value cache: one slot per executed layer, fewer under `kv_sharing`; bf16 by default."""
    slots = config.cache_config(num_recurrences).num_hidden_layers
    head_dim = config.hidden_size // config.num_attention_heads
    return slots * 2 * config.num_key_value_heads * head_dim * sequence_length * batch_size * bytes_per_value


def accounting_table(
    config: PreTrainedConfig, recurrences: list[int] | None = None, sequence_length: int | None = None
) -> str:
    """Everything above as a text table, with one row for each number of recurrences."""
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    rows = [f"{config.model_type} {config.depth_plan()}", "", "parameters"]
    rows += [f"  {part:<10} {count:>15,}" for part, count in parameter_counts(config).items()]
    rows += [
        "",
        f"at {length:,} tokens of context; attention counted over all of it",
        "recurrences  executed layers  forward FLOPs/token  training FLOPs/token  KV cache bytes (bf16)",
    ]
    for count in recurrences or [config.num_recurrences]:
        config.check_recurrences(count)
        rows.append(
            f"{count:11d}  {config.depth_plan(count).effective_depth:15d}  "
            f"{forward_flops_per_token(config, length, count):19,}  "
            f"{training_flops_per_token(config, length, count):20,}  "
            f"{kv_cache_bytes(config, length, num_recurrences=count):21,}"
        )
    return "\n".join(rows)


def _flops_per_token(config, sequence_length: int | None, passes: int, backprop: int) -> int:
    width = config.hidden_size
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    # Per layer, forward and backward: its weights with its two norms, and scores and values over the length.
    layer = 6 * (_layer_matrices(config) + 2 * width) + 12 * width * length
    once = (config.num_prelude_layers + config.num_coda_layers) * layer + 6 * config.vocab_size * width
    injection = {"linear": 2 * width**2, "hyperconnection": _lane_weights(config) * width}.get(config.injection, 0)
    core = config.num_core_layers * layer + 6 * injection
    return once + backprop * core + (passes - backprop) * core // 3


def _layer_matrices(config) -> int:
    width = config.hidden_size
    kv_width = width // config.num_attention_heads * config.num_key_value_heads
    return 2 * width**2 + 2 * width * kv_width + 2 * width * config.intermediate_size


def _lane_weights(config) -> int:
    """Scalars of one pass's hyperconnection: alpha, beta and the mixing matrix."""
    return config.num_lanes**2 + 2 * config.num_lanes
