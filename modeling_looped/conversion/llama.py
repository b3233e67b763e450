"""
Llama-shaped checkpoints as GrownLlama with a depth plan: `looped convert llama SmolLM2-135M out --plan "Loop(10-10x2-10)"`.
Nothing is copied or scaled: the layers are those of the source, and one pass over the core is the source.
"""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..accounting import parameter_counts
from ..configuration_grown_llama import GrownLlamaConfig
from ..depth_plan import DepthPlan
from ..modeling_grown_llama import GrownLlamaForCausalLM
from .ledger import (
    Comparison,
    Ledger,
    Use,
    build,
    check_output,
    compare_logits,
    dtype_name,
    listed,
    probe_tokens,
    write_checkpoint,
)
from .tokenizers import copy_tokenizer, read_tokenizer
from .weights import read_folder


MODEL_TYPES = ("llama", "mistral")  # whose layers are transformers' LlamaDecoderLayer, tensor for tensor
OF_THE_SOURCE = {
    *("model_type", "architectures", "transformers_version", "auto_map", "_name_or_path", "dtype", "torch_dtype"),
    *("num_hidden_layers", "sliding_window", "layer_types", "_attn_implementation"),
}


def convert_llama(
    source: str | Path, output: str | Path, plan: str | None = None, overwrite: bool = False, dry_run: bool = False
) -> Ledger:
    """
    Turns a folder of transformers' Llama, or of a Mistral without a sliding window, into one of GrownLlama, in the
    dtype of the source. With one pass it has the source's logits to the last bit, which is checked on what was written;
    so are those at the plan's depth against the source's own layers run in that order. The tokenizer and the generation
    configuration come along. `trained_recurrences` is 1: nothing was trained at another depth.

    Args:
        source (`str` or `Path`): A folder of `save_pretrained`, with weights in safetensors or pickles, sharded or not.
        output (`str` or `Path`): The folder to write.
        plan (`str`, *optional*): A depth plan over all layers of the source; each once by default.
        overwrite (`bool`, defaults to `False`): Replace the checkpoint that `output` holds.
        dry_run (`bool`, defaults to `False`): Check everything and write nothing.

    Raises:
        `FileNotFoundError`: where the source lacks a file.
        `ValueError`: for a source of another architecture, anything unexplained in it, or a plan that does not fit.
        `ConversionError`: where logits or tokens differ from the source's; nothing is at `output` then.
    """
    source, output = Path(source).expanduser(), Path(output).expanduser().resolve()
    _check_config(source)
    if not dry_run:
        check_output(output, {source}, overwrite)
    config = grown_config(AutoConfig.from_pretrained(source), plan, str(source / "config.json"))
    state = read_folder(source)
    used, unused, weights, dtype = match_llama(state, config, source)
    tokenizer = read_tokenizer(source)

    ledger = describe(Ledger(source, output, "", used, unused, dry_run=dry_run), config, dtype)
    generation = source / "generation_config.json"
    travels = [
        name for name, there in (("tokenizer", tokenizer), ("generation_config.json", generation.is_file())) if there
    ]
    ledger = replace(
        ledger, remarks=(f"with {' and '.join(travels)} of the source" if travels else "without a tokenizer",)
    )
    if dry_run:
        return ledger

    def beside(folder: Path) -> None:
        copy_tokenizer(tokenizer, folder)
        if generation.is_file():
            shutil.copy(generation, folder / generation.name)

    def compare(folder: Path) -> tuple[Comparison, ...]:
        return compare_with_llama(lambda computed: AutoModelForCausalLM.from_pretrained(source, dtype=computed), folder)

    model = build(GrownLlamaForCausalLM, config, weights, dtype)
    return replace(ledger, comparisons=write_checkpoint(model, output, compare, beside))


def _check_config(source: Path) -> None:
    if not source.is_dir():
        what = "is a file" if source.is_file() else "does not exist"
        raise FileNotFoundError(f"{source} {what}: pass a folder of save_pretrained, with config.json and weights.")
    file = source / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{source} holds no config.json, which describes the model.")
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        model_type = said.get("model_type")
    except (ValueError, AttributeError):
        raise ValueError(f"{file} is damaged: it holds no JSON object.") from None
    if model_type == "grown_llama":
        raise ValueError(f"{source} is a GrownLlama already: looped loop, unroll and grow change its depth.")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{source} holds a model of type {model_type!r}, whose layers are not Llama's: {' and '.join(MODEL_TYPES)} can "
            "be converted. looped loop runs layers of any decoder more than once."
        )
    if said.get("quantization_config"):
        raise ValueError(f"{file} says that the weights are quantized: save them dequantized first.")


def grown_config(config: PreTrainedConfig, plan: str | None, place: str) -> GrownLlamaConfig:
    """A GrownLlama's configuration with the fields of a Llama's, and a plan that visits each of its layers."""
    layers = config.num_hidden_layers
    order = DepthPlan.parse(plan or f"{layers}x1").order
    if set(order) != set(range(layers)):
        beyond = [str(layer) for layer in sorted(set(order)) if layer >= layers]
        unvisited = [str(layer) for layer in range(layers) if layer not in order]
        reason = f"there is no layer {listed(beyond)}" if beyond else f"it does not visit {listed(unvisited)}"
        raise ValueError(
            f"The plan {plan!r} does not fit the {layers} layers of the source (numbered from 0): {reason}. Every layer has "
            f"to be visited, as in Loop({layers // 3}-{layers - 2 * (layers // 3)}x2-{layers // 3})."
        )
    if getattr(config, "sliding_window", None) is not None:
        raise ValueError(
            f"{place} has sliding_window={config.sliding_window}, which GrownLlama has not: it would attend further than "
            "the source was trained to."
        )
    fields = {name: value for name, value in config.to_dict().items() if name not in OF_THE_SOURCE}
    return GrownLlamaConfig(**fields, depth_plan=plan or f"{layers}x1", trained_recurrences=1)


def match_llama(
    state: dict[str, torch.Tensor], config: GrownLlamaConfig, place: Path
) -> tuple[tuple[Use, ...], dict[str, str], dict[str, torch.Tensor], torch.dtype]:
    """
    Every tensor of `state`, which has a Llama's names, as one of the model of `config`: `(used, unused, weights, dtype)`.
    """
    with torch.device("meta"):
        here = {name: tuple(tensor.shape) for name, tensor in GrownLlamaForCausalLM(config).state_dict().items()}
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    unused = {}
    expected = dict(here)
    if config.tie_word_embeddings:
        del expected[head]
        if head in state and table in state:
            if state[head].shape != state[table].shape or not torch.equal(state[head], state[table]):
                raise ValueError(
                    f"{place} holds a lm_head.weight that differs from the embedding, to which tie_word_embeddings=true in "
                    "its configuration ties it: set that to false, or remove the tensor."
                )
            unused[head] = "the same as model.embed_tokens.weight, to which the head is tied"
    for name in state:
        if name.endswith(".rotary_emb.inv_freq"):
            unused[name] = "frequencies, which rope_parameters say"
    wrong = {
        "missing": [name for name in expected if name not in state],
        "unexplained": [name for name in state if name not in expected and name not in unused],
        "wrong shape": [
            f"{name} {tuple(state[name].shape)} instead of {shape}"
            for name, shape in expected.items()
            if name in state and tuple(state[name].shape) != shape
        ],
    }
    if any(wrong.values()):
        lists = "; ".join(f"{kind}: {listed(names)}" for kind, names in wrong.items() if names)
        raise ValueError(
            f"The weights in {place} are not those of the Llama that its configuration describes "
            f"({config.num_unique_layers} layers, hidden_size={config.hidden_size}): {lists}."
        )
    dtype = reduce(torch.promote_types, (state[name].dtype for name in expected))
    weights = {name: state[name].to(dtype) for name in expected}
    if config.tie_word_embeddings:
        weights[head] = weights[table]
    used = tuple(
        Use(name, (name,), shape, () if state[name].dtype == dtype else (f"from {dtype_name(state[name].dtype)}",))
        for name, shape in expected.items()
    )
    return used, unused, weights, dtype


def describe(ledger: Ledger, config: GrownLlamaConfig, dtype: torch.dtype) -> Ledger:
    plan = config.plan()
    model = f"GrownLlamaForCausalLM {plan}, {config.num_unique_layers} stored layers, {plan.effective_depth} executed"
    return replace(ledger, model=f"{model}, {dtype_name(dtype)}", parameters=parameter_counts(config))


def compare_with_llama(load: Callable[[torch.dtype], PreTrainedModel], folder: Path) -> tuple[Comparison, ...]:
    """
    The model that `load` returns in a dtype, which is transformers' own, against the GrownLlama that was written to
    `folder`: at one pass, and at the plan's depth with the source's layers put into that order.
    """
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    if converted.dtype == torch.float16:  # which processors compute slowly, where they can
        converted = converted.float()
    llama = load(converted.dtype).eval()
    config = converted.config
    tokens = probe_tokens(config.vocab_size, config.max_position_embeddings)
    name = f"transformers' {type(llama).__name__} of the source against the checkpoint read back"
    plan, comparisons = config.plan(), []
    if not plan.is_explicit:
        comparisons.append(compare_logits(llama, converted, f"{name}, one pass", tokens, num_recurrences=1))
    if plan.is_explicit or plan.passes > 1:
        in_order(llama, plan.order)
        comparisons.append(compare_logits(llama, converted, f"{name}, its layers run as {plan}", tokens))
    return tuple(comparisons)


def in_order(llama: PreTrainedModel, order: tuple[int, ...]) -> None:
    """Puts the layers of transformers' own model into `order`, in place, for forwards without a cache."""
    layers = llama.model.layers
    llama.model.config = llama.config = copy.deepcopy(llama.config)
    llama.config.num_hidden_layers = len(order)
    llama.model.layers = nn.ModuleList(layers[layer] for layer in order)
