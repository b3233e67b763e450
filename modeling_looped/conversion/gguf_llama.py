"""
GGUF files of Llama: in, as transformers' Llama or as GrownLlama, and out, with loops written out as layers.

    looped convert gguf SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M
    looped convert to-gguf checkpoint looped.gguf --recurrences 4 --dtype f16

In a GGUF of Llama the rows of each head's queries and keys are interleaved: (half, 2) where transformers has (2, half),
because rotary embeddings turn neighbouring numbers there, and the two halves of a head here.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..interventions import executed_plan
from ..looping import load
from ..modeling_grown_llama import GrownLlamaForCausalLM
from .depth import executed_order, unrolled_names
from .ledger import (
    Comparison,
    Ledger,
    Use,
    build,
    check_output,
    compare_logits,
    listed,
    logits_of,
    parameters_by_part,
    probe_tokens,
    write_checkpoint,
    written_aside,
)
from .llama import compare_with_llama, describe, grown_config
from .tokenizers import check_tokenizer, copy_tokenizer, read_tokenizer


LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
COUNTS = {  # metadata of llama.* -> field of LlamaConfig
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
EPSILON, BASE, ROTATED = "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"
HEAD_SIZES = (ROTATED, "attention.key_length", "attention.value_length")
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # tokens, here and in the metadata
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def require_gguf() -> None:
    """
    Raises:
        `ValueError`: without the packages that read and write GGUF.
    """
    for name in ("gguf", "accelerate"):  # transformers reads GGUF with both
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"GGUF files need the package {name}: pip install 'modeling-looped[gguf]'.")


def from_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as GGUF has them, in transformers' order."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def to_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `from_pairs`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def heads_of(target: str, config: PreTrainedConfig) -> int | None:
    """The heads whose rows a tensor with this name (here) interleaves in a GGUF."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((count for part, count in heads.items() if f".{part}." in target), None)


def tensor_names(num_hidden_layers: int, has_head: bool) -> dict[str, str]:
    """Tensor of a GGUF -> tensor of transformers' Llama, in the order of the forward pass."""
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        **{
            f"blk.{index}.{theirs}.weight": f"model.layers.{index}.{ours}.weight"
            for index in range(num_hidden_layers)
            for theirs, ours in LAYER.items()
        },
        "output_norm.weight": "model.norm.weight",
        **({"output.weight": "lm_head.weight"} if has_head else {}),
    }


# ---- In ----


def convert_gguf(
    source: str | Path, output: str | Path, plan: str | None = None, overwrite: bool = False, dry_run: bool = False
) -> Ledger:
    """
    Turns a GGUF file of the architecture llama into a folder of transformers' `LlamaForCausalLM` in float32, quantized
    weights dequantized; or, with a `plan`, into one of GrownLlama, as `convert_llama` does. The logits of what was
    written are those of transformers reading the same file, to the last bit. The tokenizer comes along.

    Args:
        source (`str` or `Path`): The `.gguf` file.
        output (`str` or `Path`): The folder to write.
        plan (`str`, *optional*): A depth plan over all layers of the source.
        overwrite (`bool`, defaults to `False`): Replace the checkpoint that `output` holds.
        dry_run (`bool`, defaults to `False`): Check everything and write nothing.

    Raises:
        `FileNotFoundError`: where there is no such file.
        `ValueError`: for a damaged file, another architecture, or anything in it that would be lost.
        `ConversionError`: where logits or tokens differ from the source's; nothing is at `output` then.
    """
    require_gguf()
    source, output = Path(source).expanduser(), Path(output).expanduser().resolve()
    metadata, tensors = read_gguf(source)
    if not dry_run:
        check_output(output, {source}, overwrite)
    config = _llama_config(source, metadata, tensors)
    grown = None if plan is None else grown_config(config, plan, str(source))
    names = tensor_names(config.num_hidden_layers, not config.tie_word_embeddings)
    _check_tensors(source, tensors, names, config)

    used, weights = [], {}
    for name, target in names.items():
        kind = tensors[name].tensor_type.name
        weights[target] = _dequantized(tensors[name])
        notes = [] if kind == "F32" else [f"from {kind.lower() if kind in ('F16', 'BF16') else kind}"]
        if heads := heads_of(target, config):
            weights[target] = from_pairs(weights[target], heads)
            notes.append(f"rows of {heads} heads reordered for rotary embeddings")
        used.append(Use(name, (target,), tuple(weights[target].shape), tuple(notes)))
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]

    tokenizer, remarks = None, ["without a tokenizer: the file holds none"]
    if "tokenizer.ggml.tokens" in metadata:
        tokenizer = _read_back_tokenizer(source)
        remarks = ["with the tokenizer of the source", *_of_the_split(metadata)]
    unused = {"general.*": "describes the file"} if any(key.startswith("general.") for key in metadata) else {}
    model = build(
        *((LlamaForCausalLM, config) if grown is None else (GrownLlamaForCausalLM, grown)), weights, torch.float32
    )
    ledger = Ledger(source, output, "", tuple(used), unused, remarks=tuple(remarks), dry_run=dry_run)
    if grown is None:
        described = f"LlamaForCausalLM, {config.num_hidden_layers} layers, float32"
        ledger = replace(ledger, model=described, parameters=parameters_by_part(model))
    else:
        ledger = describe(ledger, grown, torch.float32)
    if dry_run:
        return ledger

    def compare(folder: Path) -> tuple[Comparison, ...]:
        if grown is not None:
            return compare_with_llama(lambda _: _read_back(source), folder)
        tokens = probe_tokens(config.vocab_size, config.max_position_embeddings)
        what = "the GGUF read by transformers against the checkpoint read back"
        return (compare_logits(_read_back(source), LlamaForCausalLM.from_pretrained(folder), what, tokens),)

    return replace(
        ledger, comparisons=write_checkpoint(model, output, compare, lambda folder: copy_tokenizer(tokenizer, folder))
    )


def read_gguf(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Metadata and tensors of a GGUF file, both by name; tensors as `gguf.gguf_reader.ReaderTensor`, and of the tokenizer's
    lists, which hold a whole vocabulary, the length.
    """
    from gguf import GGUFReader, GGUFValueType

    if not source.is_file():
        what = "is a folder" if source.is_dir() else "does not exist"
        raise FileNotFoundError(f"{source} {what}: pass a .gguf file.")
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{source} is no GGUF file: it does not begin with GGUF.")
    try:
        reader = GGUFReader(source)
        metadata = {
            name: len(field.data)
            if name.startswith("tokenizer.") and field.types[0] == GGUFValueType.ARRAY
            else field.contents()
            for name, field in reader.fields.items()
        }
    except Exception as error:  # numpy's, of a file that ends early or holds nonsense
        raise ValueError(
            f"{source} is damaged or truncated: its header or its tensors cannot be read whole."
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if len(tensors) < len(reader.tensors):
        raise ValueError(f"{source} is damaged: it holds a tensor twice.")
    return metadata, tensors


def _llama_config(source: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> LlamaConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{source} is of the architecture {architecture!r}: only 'llama' can be converted.")
    said = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    if missing := [f"llama.{key}" for key in (*COUNTS, EPSILON) if key not in said]:
        raise ValueError(f"{source} lacks {listed(missing)} in its metadata, without which transformers misreads it.")
    numbers = {field: said.pop(key) for key, field in COUNTS.items()}
    if wrong := [f"{field}={value!r}" for field, value in numbers.items() if not isinstance(value, int) or value < 1]:
        raise ValueError(f"{source} says {listed(wrong)}, where whole numbers are expected: it is no plain Llama.")
    head_dim = said.get(ROTATED, numbers["hidden_size"] // numbers["num_attention_heads"])
    # What changes nothing. Whatever else there is would be lost without a word.
    harmless = {"rope.scaling.type": ("none",), "expert_count": (0,), "expert_used_count": (0,)}
    harmless |= dict.fromkeys(HEAD_SIZES, (head_dim,))
    known = {EPSILON, BASE, "vocab_size", "tensor_data_layout"}
    beyond = [
        f"llama.{key}={value!r}"
        for key, value in said.items()
        if key not in known and value not in harmless.get(key, ())
    ]
    if beyond:
        raise ValueError(
            f"{source} has {listed(beyond)}, which transformers does not read from a GGUF of Llama, or cannot do: the "
            "converted model would compute something else."
        )
    vocab_size = said.get("vocab_size") or metadata.get("tokenizer.ggml.tokens")
    if "token_embd.weight" not in tensors or not vocab_size:
        raise ValueError(f"{source} says no vocabulary: it lacks token_embd.weight, or llama.vocab_size and tokens.")
    special = {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in SPECIAL.items()
    }
    del special["unk_token_id"]
    return LlamaConfig(
        **numbers,
        **special,
        vocab_size=vocab_size,
        head_dim=head_dim,
        rms_norm_eps=float(str(np.float32(said[EPSILON]))),  # 1e-05, not the digits behind it; the same float32
        rope_parameters={"rope_type": "default", "rope_theta": float(said.get(BASE, 10000.0))},
        tie_word_embeddings="output.weight" not in tensors,
    )


def _check_tensors(source: Path, tensors: dict[str, Any], names: dict[str, str], config: LlamaConfig) -> None:
    with torch.device("meta"):
        here = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    wrong = {
        "missing": [name for name in names if name not in tensors],
        "unexplained": [name for name in tensors if name not in names],
        "wrong shape": [
            f"{name} {shapes[name]} instead of {here[target]}"
            for name, target in names.items()
            if name in shapes and shapes[name] != here[target]
        ],
    }
    if any(wrong.values()):
        lists = "; ".join(f"{kind}: {listed(keys)}" for kind, keys in wrong.items() if keys)
        raise ValueError(
            f"{source} is not the Llama that its metadata describes ({config.num_hidden_layers} layers, hidden_size="
            f"{config.hidden_size}), without biases, experts or frequencies of its own: {lists}."
        )


def _dequantized(tensor) -> torch.Tensor:
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which the package gguf cannot dequantize."
        ) from None
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped


def _read_back(file: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def _read_back_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # of several libraries
        raise ValueError(f"The tokenizer in {file} cannot be read: {(str(error).splitlines() or [''])[0]}") from error
    tokenizer.init_kwargs.pop("gguf_file", None)
    return tokenizer


def _of_the_split(metadata: dict[str, Any]) -> Iterator[str]:
    """A remark where transformers does not know how the source cuts text into words."""
    split = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split not in (None, "default", "gpt-2", *_splits()):
        yield (
            f"transformers does not know the pre-tokenizer {split!r} and cuts words as GPT-2 does: numbers and unusual "
            "characters may become other tokens than in training"
        )


def _splits() -> dict[str, str]:
    """Names of pre-tokenizers in GGUF, and the regular expressions that transformers has for them."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS


# ---- Out ----


def to_gguf(
    checkpoint: str | Path,
    output: str | Path,
    num_recurrences: int | None = None,
    dtype: str = "f32",
    tokenizer: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Ledger:
    """
    Writes a GrownLlama, or a Llama with or without loops, as a GGUF file of the architecture llama, each executed layer
    as a layer of its own, with tokenizer and chat template. What was written is read back by transformers: in f32 it has
    the logits of the source to the last bit, in f16 and bf16 those of the source with its matrices rounded so.

    Args:
        checkpoint (`str` or `Path`): A folder of `save_pretrained`.
        output (`str` or `Path`): The file to write.
        num_recurrences (`int`, *optional*): Passes over the core of a GrownLlama, the checkpoint's own by default.
        dtype (`str`, defaults to `"f32"`): Of matrices, `"f32"`, `"f16"` or `"bf16"`; norms are always f32.
        tokenizer (`bool`, defaults to `True`): Whether to write it. One that GGUF has no words for is refused.
        overwrite (`bool`, defaults to `False`): Replace the file at `output`.
        dry_run (`bool`, defaults to `False`): Check everything but tokenizer and logits, and write nothing.

    Raises:
        `FileNotFoundError`: where there is no checkpoint.
        `ValueError`: for a model or a tokenizer that a GGUF of Llama cannot say.
        `ConversionError`: where logits or tokens differ from the source's; nothing is at `output` then.
    """
    require_gguf()
    checkpoint, output = Path(checkpoint).expanduser(), Path(output).expanduser().resolve()
    if dtype not in TYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(TYPES)}.")
    if not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint} is no checkpoint: a folder with config.json and weights is expected.")
    if not dry_run:
        check_output(output, {checkpoint}, overwrite, is_file=True)
    model = load(str(checkpoint), dtype=torch.float32).eval()
    _check_llama(model, num_recurrences)
    order = executed_order(model, num_recurrences)
    fast = read_tokenizer(checkpoint) if tokenizer else None
    vocabulary = None if fast is None else _vocabulary(fast, model.config.vocab_size)
    used, tensors = _gguf_tensors(model, order, dtype)
    if TYPES[dtype] == torch.float16 and (large := [name for name, x in tensors.items() if x.abs().max() > 65504]):
        raise ValueError(f"{listed(large)} holds numbers beyond f16: write f32 or bf16.")

    plan = executed_plan(model) if num_recurrences is None else model.config.plan(num_recurrences)
    travels = "with the tokenizer of the source" if fast is not None else "without a tokenizer"
    parameters = {
        "stored": sum(p.numel() for p in model.parameters()),
        "total": sum(x.numel() for x in tensors.values()),
    }
    described = f"GGUF, llama, {len(order)} layers ({type(model).__name__} {plan}), {dtype}"
    ledger = Ledger(checkpoint, output, described, used, {}, (), parameters, (travels,), dry_run=dry_run)
    if isinstance(getattr(fast, "chat_template", None), dict):
        others = sorted(fast.chat_template.keys() - {"default"})
        ledger = replace(ledger, unused={f"chat template {name}": "a GGUF has one, the default" for name in others})
    if dry_run:
        return ledger

    tokens = probe_tokens(model.config.vocab_size, model.config.max_position_embeddings)
    passes = {} if num_recurrences is None else {"num_recurrences": num_recurrences}
    original = logits_of(model, tokens, **passes)
    with written_aside(output) as file:
        _write_gguf(file, model.config, len(order), tensors, dtype, vocabulary)
        tensors.clear()
        read = logits_of(_read_back(file), tokens)
        what = f"{type(model).__name__} of the source against the GGUF read by transformers"
        comparisons = [compare_logits(original, read, what, tokens, 0.0 if dtype == "f32" else None)]
        if dtype != "f32":
            _round_matrices(model, TYPES[dtype])
            what = f"the same with the source's matrices rounded to {dtype}"
            comparisons.append(compare_logits(logits_of(model, tokens, **passes), read, what, tokens))
        if fast is not None:
            check_tokenizer(fast, _read_back_tokenizer(file), "The tokenizer read back from the GGUF")
    return replace(ledger, comparisons=tuple(comparisons))


def _check_llama(model: PreTrainedModel, num_recurrences: int | None) -> None:
    """That a GGUF of Llama, as transformers reads it, can say what `model` is."""
    config, name = model.config, type(model).__name__
    if config.model_type not in ("llama", "grown_llama"):
        raise ValueError(f"{name} is no Llama: only Llama and GrownLlama can be written as GGUF.")
    if num_recurrences is not None and not hasattr(config, "depth_plan"):
        raise ValueError(f"num_recurrences={num_recurrences}: {name} has no looped block of its own to turn.")
    if hasattr(config, "depth_plan") and config.shares_kv(num_recurrences):
        raise ValueError(
            f"kv_sharing={config.kv_sharing!r} shares keys between passes, which layers do not: set 'all'."
        )
    rope = config.rope_parameters
    wrong = [
        f"{field}={value!r}"
        for field, value, plain in (
            ("rope_type", rope.get("rope_type", "default"), "default"),
            ("attention_bias", config.attention_bias, False),
            ("mlp_bias", config.mlp_bias, False),
            ("hidden_act", config.hidden_act, "silu"),
            ("rope_theta", rope["rope_theta"], float(np.float32(rope["rope_theta"]))),
        )
        if value != plain
    ]
    if wrong:
        raise ValueError(f"{name} has {listed(wrong)}, which transformers does not read from a GGUF of Llama.")


def _gguf_tensors(
    model: PreTrainedModel, order: tuple[int, ...], dtype: str
) -> tuple[tuple[Use, ...], dict[str, torch.Tensor]]:
    """The ledger's rows, and tensors by their names in the GGUF; copies of a layer are one tensor."""
    config, ours = model.config, {}
    for theirs, here in tensor_names(len(order), not config.tie_word_embeddings).items():
        ours[here] = theirs
    used, tensors = [], {}
    for (name, parameter), copies in zip(model.named_parameters(), unrolled_names(model, order).values(), strict=True):
        tensor, notes = parameter.detach(), []
        if heads := heads_of(name, config):
            tensor = to_pairs(tensor, heads)
            notes.append(f"rows of {heads} heads reordered for rotary embeddings")
        if dtype != "f32" and tensor.dim() > 1:
            notes.append(f"to {dtype}")
        targets = tuple(ours[copy] for copy in copies)
        used.append(Use(name, targets, tuple(tensor.shape), tuple(notes)))
        tensors |= dict.fromkeys(targets, tensor)
    return tuple(used), tensors


def _write_gguf(
    file: Path,
    config: PreTrainedConfig,
    num_hidden_layers: int,
    tensors: dict[str, torch.Tensor],
    dtype: str,
    vocabulary: dict[str, Any] | None,
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize

    kind = GGMLQuantizationType[dtype.upper()]
    writer = GGUFWriter(file, "llama")
    writer.add_file_type(
        {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16}.get(dtype, LlamaFileType.MOSTLY_BF16)
    )
    for key, field in COUNTS.items():
        value = num_hidden_layers if field == "num_hidden_layers" else getattr(config, field)
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32(f"llama.{EPSILON}", config.rms_norm_eps)
    writer.add_float32(f"llama.{BASE}", config.rope_parameters["rope_theta"])
    for key in HEAD_SIZES:
        writer.add_uint32(f"llama.{key}", config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id")
        token = token[0] if isinstance(token, list) else token
        if token is not None and vocabulary is None:
            writer.add_uint32(f"tokenizer.ggml.{SPECIAL[name]}_token_id", token)
    for key, value in (vocabulary or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.{key}", value)
    for name, tensor in tensors.items():
        values = tensor.contiguous().numpy()
        stored = kind if tensor.dim() > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def _round_matrices(model: PreTrainedModel, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(parameter.to(dtype))


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens in a GGUF


def _vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """
    The metadata below `tokenizer.`, for byte-level BPE and for BPE with spaces written as U+2581, as Llama 2 has it.

    Raises:
        `ValueError`: for any other tokenizer, with the reason.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    model = backend.get("model") or {}
    if model.get("type") != "BPE":
        raise ValueError(_no_words(f"its model is {model.get('type')}, where BPE is expected"))
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(tokens) >= vocab_size:
        raise ValueError(_no_words(f"its token {max(tokens)} is beyond the embedding of {vocab_size} rows"))
    kinds = []
    for index in range(vocab_size):
        is_there = index in tokens
        token = tokens.setdefault(index, f"[PAD{index}]")
        if token == tokenizer.unk_token and _is_llama2(backend):
            kinds.append(UNKNOWN)
        elif token in added:
            kinds.append(CONTROL if added[token].special else USER_DEFINED)
        elif not is_there:
            kinds.append(UNUSED)
        else:
            is_byte = _is_llama2(backend) and token.startswith("<0x") and len(token) == 6
            kinds.append(BYTE if is_byte else NORMAL)
    texts = [tokens[index] for index in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    said = {"ggml.tokens": texts, "ggml.token_type": kinds, "ggml.merges": merges}
    if _is_llama2(backend):
        ranks = {"".join(merge.split(" ")): float(-rank) for rank, merge in reversed(list(enumerate(merges)))}
        said |= {"ggml.model": "llama", "ggml.pre": "default"}
        said["ggml.scores"] = [ranks.get(text, 0.0 if kind != NORMAL else -1e6) for text, kind in zip(texts, kinds)]
    else:
        said |= {"ggml.model": "gpt2", "ggml.pre": _split_name(backend)}
    for ours, theirs in SPECIAL.items():
        token = getattr(tokenizer, f"{ours}_token_id")
        if token is not None:
            said[f"ggml.{theirs}_token_id"] = token
    ids = tokenizer("a")["input_ids"]
    said["ggml.add_bos_token"] = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    said["ggml.add_eos_token"] = tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        said["chat_template"] = template
    return said


def _no_words(reason: str) -> str:
    return f"A GGUF of Llama has no words for this tokenizer: {reason}. Leave it out with --no-tokenizer (tokenizer=False)."


def _is_llama2(backend: dict) -> bool:
    return bool(backend["model"].get("byte_fallback"))


def _split_name(backend: dict) -> str:
    """How a GGUF calls the way in which a byte-level tokenizer cuts text into words."""
    if backend.get("normalizer") is not None:
        raise ValueError(_no_words(f"it normalizes text ({backend['normalizer'].get('type')})"))
    before = backend.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if [step.get("type") for step in steps] == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if [step.get("type") for step in steps] == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        pattern = steps[0]["pattern"].get("Regex")
        if names := [name for name, known in _splits().items() if known == pattern]:
            return names[0]
    kinds = ", ".join(str(step.get("type")) for step in steps)
    raise ValueError(_no_words(f"transformers would not cut text into words as its {kinds} does"))
