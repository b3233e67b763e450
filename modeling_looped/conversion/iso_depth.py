"""
Official checkpoints of arXiv 2604.21106 (github.com/kschwethelm/looped-lm-scaling) as LoopedGPT.

    looped convert iso-depth runs/loop_s10 loop-s10     # or convert_iso_depth("runs/loop_s10", "loop-s10")

Every tensor and every field of the source is either used or refused, except for those that the ledger lists with a
reason. The same function results: rotary tables rounded to bf16, as the official code trains with, included.
"""

import json
import re
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from ..accounting import parameter_counts
from ..configuration_looped import require_int
from ..configuration_looped_gpt import LoopedGPTConfig
from ..modeling_looped_gpt import LoopedGPTForCausalLM
from .ledger import (
    Ledger,
    Use,
    build,
    check_output,
    compare_read_back,
    dtype_name,
    listed,
    write_checkpoint,
)
from .weights import read_file


INJECTIONS = {
    "inject_init_prelude": "linear",
    "additive": "additive",
    "passthrough": "none",
    "hyperconnect": "hyperconnection",
}
COUNTS = {  # whole numbers of model_config and the least of each
    "sequence_len": 1,
    "vocab_size": 1,
    "n_head": 1,
    "n_kv_head": 1,
    "n_embd": 1,
    "n_prelude": 0,
    "n_recur_block": 1,
    "n_coda": 0,
    "num_recur": 1,
}
REQUIRED = (*COUNTS, "bptt_k", "input_injection", "logit_softcap")
TOKEN_IDS = ("bos_token_id", "eos_token_id")  # not in the official files; taken where somebody added them
OPTIONAL = ("size", "num_lanes", *TOKEN_IDS)

SECTIONS = {"prelude": "prelude", "recur": "core", "coda": "coda"}
BLOCK = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "n1": "input_layernorm",
    "n3": "post_attention_layernorm",
}
INJECTION_KEYS = {
    "linear": {"inject.weight": "proj.weight"},
    "hyperconnection": {"lane_alpha": "alpha", "lane_mixing": "mixing", "lane_beta": "beta"},
}
VOCABULARY_KEYS = ("transformer.wte.weight", "lm_head.weight")
PADDING = 64  # the official code rounds the rows of both vocabulary matrices up to it


def convert_iso_depth(source: str | Path, output: str | Path, overwrite: bool = False, dry_run: bool = False) -> Ledger:
    """
    Turns a checkpoint of the paper's code into a folder that `AutoModelForCausalLM.from_pretrained` takes, in the
    dtype of its master weights. Rows of vocabulary padding are dropped: (ceil(V / 64) * 64, d) becomes (V, d). There
    is no tokenizer in the source, hence none in the result. Nothing is written before everything has been checked,
    and a failure while writing leaves what was there.

    Args:
        source (`str` or `Path`): A folder with `model_000010.pt` and `meta_000010.json`, of several steps the
            newest, or one such `.pt` file.
        output (`str` or `Path`): The folder to write.
        overwrite (`bool`, defaults to `False`): Replace the checkpoint that `output` holds.
        dry_run (`bool`, defaults to `False`): Check everything and write nothing.

    Raises:
        `FileNotFoundError`: where the source lacks one of its two files.
        `ValueError`: where the source holds anything unexplained, or `output` is in the way.
        `ConversionError`: where what was written gives other logits when it is read back.
    """
    model_file, meta_file, steps = _find(Path(source).expanduser())
    output = Path(output).expanduser().resolve()
    if not dry_run:
        check_output(output, {model_file.parent, model_file.resolve().parent}, overwrite)
    said, config, unused = _read_meta(meta_file)
    state = _read_state(model_file)

    with torch.device("meta"):
        here = {key: tuple(tensor.shape) for key, tensor in LoopedGPTForCausalLM(config).state_dict().items()}
    targets = _key_map(config)
    new = tuple(sorted(here.keys() - targets.values()))
    _check_keys(state, targets, new, said, model_file, meta_file)

    dtype = reduce(torch.promote_types, (tensor.dtype for _, tensor in state.values()))
    used, weights = [], {}
    for key, target in targets.items():
        name, tensor = state[key]
        rows = _padding_rows(key, tensor, here[target], said, model_file, meta_file)
        notes = [f"{rows} rows of padding dropped"] if rows else []
        notes += [f"from {dtype_name(tensor.dtype)}"] if tensor.dtype != dtype else []
        used.append(Use(name, (target,), here[target], tuple(notes)))
        weights[target] = tensor[: here[target][0]]

    for shard in sorted(model_file.parent.glob(f"optim_{steps[-1]}_rank*.pt")):
        unused[shard.name] = "state of the optimiser"
    newest = f"step {steps[-1]}, the newest of {', '.join(steps)}"
    ledger = Ledger(
        model_file,
        output,
        f"LoopedGPTForCausalLM {config.plan()}, injection {config.injection}, {dtype_name(dtype)}",
        tuple(used),
        unused,
        new,
        parameter_counts(config),
        (newest,) if len(steps) > 1 else (),
        dry_run=dry_run,
    )
    if dry_run:
        return ledger
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    model = build(LoopedGPTForCausalLM, config, weights, dtype)
    comparisons = write_checkpoint(model, output, lambda folder: compare_read_back(model, folder))
    return replace(ledger, comparisons=comparisons)


def _find(source: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """The model file, its meta file, and the steps beside it (as written in the names), the chosen one last."""
    if source.is_dir():
        files = [file for file in source.iterdir() if re.fullmatch(r"model_\d+\.pt", file.name)]
        if not files:
            raise FileNotFoundError(f"{source} holds no checkpoint: a file such as model_000010.pt is expected in it.")
        files.sort(key=lambda file: int(file.stem.removeprefix("model_")))
    elif source.is_file():
        # By its own name also the links that the official code makes, such as model_pre_warmdown.pt.
        if not re.fullmatch(r"model_\w+\.pt", source.name):
            raise ValueError(f"{source} is not named like a checkpoint: model_000010.pt, beside meta_000010.json.")
        files = [source]
    else:
        raise FileNotFoundError(f"{source} does not exist: pass a folder with model_000010.pt and meta_000010.json.")
    steps = tuple(file.stem.removeprefix("model_") for file in files)
    meta_file = files[-1].with_name(f"meta_{steps[-1]}.json")
    if not meta_file.is_file():
        raise FileNotFoundError(f"{files[-1]} has no {meta_file.name} beside it, which describes the model.")
    return files[-1], meta_file, steps


def _read_meta(meta_file: Path) -> tuple[dict[str, Any], LoopedGPTConfig, dict[str, str]]:
    """The official `model_config`, the configuration here, and the fields that have no place in it, with reasons."""
    try:
        meta = json.loads(meta_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{meta_file} is not JSON: {error}.") from None
    said = meta.get("model_config") if isinstance(meta, dict) else None
    if not isinstance(said, dict):
        raise ValueError(f"{meta_file} has no 'model_config', which describes the model.")
    unknown = sorted(said.keys() - {*REQUIRED, *OPTIONAL})
    if unknown:
        raise ValueError(
            f"model_config in {meta_file} holds {listed(unknown)}, which may change what the model computes and "
            f"which this converter does not know: it knows {', '.join((*REQUIRED, *OPTIONAL))}."
        )
    required = [*REQUIRED, "num_lanes"] if said.get("input_injection") == "hyperconnect" else REQUIRED
    if missing := [name for name in required if name not in said]:
        raise ValueError(f"model_config in {meta_file} lacks {listed(missing)}.")

    try:
        for name, minimum in COUNTS.items():
            require_int(name, said[name], minimum)
        if said["bptt_k"] is not None:
            require_int("bptt_k", said["bptt_k"], 1, ", or null for all recurrences")
        if said["input_injection"] not in tuple(INJECTIONS):
            raise ValueError(f"input_injection={said['input_injection']!r} must be one of {', '.join(INJECTIONS)}.")
        injection = INJECTIONS[said["input_injection"]]
        full = said["bptt_k"] is None or said["bptt_k"] >= said["num_recur"]
        config = LoopedGPTConfig(
            vocab_size=said["vocab_size"],
            hidden_size=said["n_embd"],
            num_attention_heads=said["n_head"],
            num_key_value_heads=said["n_kv_head"],
            num_prelude_layers=said["n_prelude"],
            num_core_layers=said["n_recur_block"],
            num_coda_layers=said["n_coda"],
            num_recurrences=said["num_recur"],
            injection=injection,
            backprop_recurrences=None if full else said["bptt_k"],
            logit_softcap=said["logit_softcap"],
            rotary_dtype="bfloat16",
            max_position_embeddings=said["sequence_len"],
            **({"num_lanes": said["num_lanes"]} if injection == "hyperconnection" else {}),
            **{name: said.get(name, meta.get(name)) for name in TOKEN_IDS},
        )
    except ValueError as error:
        raise ValueError(f"model_config in {meta_file}: {error}") from None

    unused = {}
    if "size" in said:
        unused["model_config.size"] = "names the run in the paper's grid; n_embd is the width"
    if "num_lanes" in said and injection != "hyperconnection":
        unused["model_config.num_lanes"] = f"input_injection={said['input_injection']!r} has no lanes"
    return said, config, unused


def _read_state(model_file: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Official key -> (key as in the file, tensor). `torch.compile` puts `_orig_mod.` before every key."""
    found = {}
    for name, tensor in read_file(model_file).items():
        key = name.removeprefix("_orig_mod.")
        if key in found:
            raise ValueError(f"{model_file} holds {key} twice, with and without the prefix '_orig_mod.'.")
        found[key] = (name, tensor)
    return found


def _key_map(config: LoopedGPTConfig) -> dict[str, str]:
    """Official key -> key here, for the model that `config` describes, in the order of the forward pass."""
    layers = {
        f"transformer.{theirs}.{index}.{part}.weight": f"model.{ours}.{index}.{name}.weight"
        for theirs, ours in SECTIONS.items()
        for index in range(getattr(config, f"num_{ours}_layers"))
        for part, name in BLOCK.items()
    }
    injection = INJECTION_KEYS.get(config.injection, {})
    return {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "norm_emb.weight": "model.embedding_norm.weight",
        **layers,
        **{theirs: f"model.injection.{ours}" for theirs, ours in injection.items()},
        "norm_recur.weight": "model.recurrence_norm.weight",
        "norm_final.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }


def _check_keys(state, targets, new, said, model_file: Path, meta_file: Path) -> None:
    wrong = {
        "missing": [key for key in targets if key not in state],
        "unexplained": [name for key, (name, _) in state.items() if key not in targets],
        "without a source": new,
    }
    if any(wrong.values()):
        names = ("n_prelude", "n_recur_block", "n_coda", "input_injection")
        fields = ", ".join(f"{name}={said[name]!r}" for name in names)
        lists = "; ".join(f"{kind}: {listed(keys)}" for kind, keys in wrong.items() if keys)
        raise ValueError(f"{model_file} is not the model that {meta_file.name} describes ({fields}): {lists}.")


def _padding_rows(key: str, tensor: torch.Tensor, shape: tuple[int, ...], said, model_file, meta_file) -> int:
    """Rows that `tensor` has beyond `shape`. `ValueError` where it differs in anything but vocabulary padding."""
    padded = (-(-shape[0] // PADDING) * PADDING, *shape[1:]) if key in VOCABULARY_KEYS else shape
    if tuple(tensor.shape) not in (shape, padded):
        by = {"wte": "vocab_size n_embd", "lm_head": "vocab_size n_embd", "lane": "num_recur num_lanes"}
        by |= dict.fromkeys(("c_k", "c_v"), "n_embd n_head n_kv_head")
        fields = next((fields for part, fields in by.items() if part in key), "n_embd").split()
        raise ValueError(
            f"{key} in {model_file} has the shape {tuple(tensor.shape)}, but {meta_file.name} with "
            f"{', '.join(f'{name}={said[name]}' for name in fields)} asks for {padded}."
        )
    return tensor.shape[0] - shape[0]
