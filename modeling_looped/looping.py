"""
Loops for a model that exists: over any block, without training (arXiv 2602.16490, section 5.5), for training on
(section 4.2), and back to plain layers for software that knows no loops.
"""

import copy

import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from .configuration_looped import require_int
from .decoder_stack import DecoderStack, decoder_stack, renumber
from .interventions import PlanEdit, PlannedConfig, executed_plan, repeat


def loop(model: PreTrainedModel, start: int, stop: int, repeats: int) -> PlanEdit:
    """
    Runs the layers [start, stop) of `model` `repeats` additional times, directly after they ran, with the same weights
    and a cache slot for each executed position. Nothing is copied, renamed or scaled. `generate`, padding, caches,
    adapters and saving go on as before; `save_pretrained` stores every tensor once and writes `looped_layers`, with
    which `load` brings the loop back.

    Args:
        model: Any transformers decoder with one list of layers, with or without a head, or a family of this package.
        start: The first layer of the block, counted from 0 in unique layers.
        stop: The layer after its last one.
        repeats: Additional passes; 0 changes nothing.

    Returns:
        A handle with `.undo()`, which is a context manager too. Loops compose.

    Raises:
        `ValueError`: for a range that the model does not run, or an architecture that cannot be looped.
    """
    require_int("repeats", repeats, 0)
    return repeat(model, start, stop, repeats)


def load(path: str, auto_class: type = AutoModelForCausalLM, **kwargs) -> PreTrainedModel:
    """
    `auto_class.from_pretrained(path, **kwargs)` with the loops that `save_pretrained` of a looped model wrote. The same
    as `from_pretrained` where there are none.
    """
    loaded = auto_class.from_pretrained(path, **kwargs)
    apply_loops(loaded[0] if isinstance(loaded, tuple) else loaded)
    return loaded


def apply_loops(model: PreTrainedModel) -> PreTrainedModel:
    """The loops that the configuration of an unlooped `model` names as `looped_layers`."""
    config = model.config.get_text_config(decoder=True)
    for start, stop, repeats in config.__dict__.pop("looped_layers", None) or []:
        loop(model, start, stop, repeats)
    return model


def add_recurrence(model: PreTrainedModel, start: int, stop: int) -> PreTrainedModel:
    """
    Retrofitted recurrence (section 4.2): from here on the layers [start, stop) run one more time, in training (full
    backpropagation through all passes) as afterwards. In GrownLlama the configuration's `depth_plan` says so, and
    `trained_recurrences` follows; in any other decoder it is a `loop` that stays.

    Returns:
        `model`, changed in place. Nothing is trained yet.
    """
    config = decoder_stack(model).config
    if not hasattr(config, "depth_plan"):
        loop(model, start, stop, 1)
        return model
    retrofit(config, start, stop)
    return model


def retrofit(config: PreTrainedConfig, start: int, stop: int) -> None:
    """What `add_recurrence` of the layers [start, stop) does to the configuration of a GrownLlama, in place."""
    config.depth_plan = str(config.base_plan().repeat(start, stop, 1))
    config.trained_recurrences = max(config.trained_recurrences, config.num_recurrences)


def unroll(model: PreTrainedModel, num_recurrences: int | None = None) -> PreTrainedModel:
    """
    The same function as a model without loops, for software that knows none: a new transformers Llama of a GrownLlama
    (whose tied passes become copies that train on their own), or a new model of the original class of any other
    decoder that was looped.

    Args:
        model: A GrownLlama, or a decoder with a `loop`; `model` itself stays as it is.
        num_recurrences: Of a GrownLlama with a looped block: how many passes to unroll, the configured number by default.

    Raises:
        `ValueError`: for families whose passes are more than their layers, or adapters that are not merged.
    """
    if hasattr(model, "peft_config") or any("lora_" in name for name, _ in model.named_parameters()):
        raise ValueError(f"{type(model).__name__} holds adapters: merge_and_unload() them before unrolling.")
    stack = decoder_stack(model)
    config = model.config
    if hasattr(stack.config, "plan") and not hasattr(stack.config, "depth_plan"):
        raise ValueError(
            f"{type(model).__name__} does more between its passes than run layers, which no plain decoder does: only "
            "GrownLlama and looped transformers decoders can be unrolled."
        )
    if hasattr(stack.config, "depth_plan"):
        if num_recurrences is not None:
            config.check_recurrences(num_recurrences)
        if config.shares_kv(num_recurrences):
            raise ValueError(
                f"kv_sharing={config.kv_sharing!r} shares keys between passes, which layers do not: set 'all'."
            )
        order = config.plan(num_recurrences).order
        model_class = getattr(transformers, type(model).__name__.replace("Grown", "", 1))
        plain = _llama_config(config, len(order))
    else:
        if num_recurrences is not None:
            raise ValueError(
                f"num_recurrences={num_recurrences}: {type(model).__name__} has no looped block of its own; its loops "
                "are those of looping.loop."
            )
        order = executed_plan(model).order
        model_class = type(model)
        plain = copy.deepcopy(config)
        text = plain.get_text_config(decoder=True)
        if isinstance(text, PlannedConfig):
            text.forget_plan()
        renumber(DecoderStack(nn.Module(), stack.name, text), list(order))
        for name in ("looped_layers", "_name_or_path"):
            text.__dict__.pop(name, None)
    if model.device.type == "meta":  # a model that is only looked at
        with model.device:
            return model_class(plain)
    unrolled = model_class.from_pretrained(
        None,
        config=plain,
        state_dict=_unrolled_state(model, stack, order, model_class),
        dtype=model.dtype,
        attn_implementation=config._attn_implementation,
    )
    _check_copies(stack, decoder_stack(unrolled), order)
    unrolled.config._name_or_path = unrolled.name_or_path = ""  # transformers would say "None"
    unrolled.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return unrolled.to(model.device).train(model.training)


def _check_copies(stack: DecoderStack, copies: DecoderStack, order: tuple[int, ...]) -> None:
    """Raises `ValueError` where a layer does something else further down, because it knows its number."""
    for layer, copied in zip(order, copies.unique_layers, strict=True):
        for one, other in zip(stack.unique_layers[layer].modules(), copied.modules(), strict=True):
            for name, value in vars(one).items():
                of_the_run = name in ("layer_idx", "training", "gradient_checkpointing")
                if isinstance(value, (int, float, str)) and not of_the_run and vars(other).get(name) != value:
                    raise ValueError(
                        f"{type(one).__name__}.{name} follows from the layer's number, so that its copy at position "
                        f"{getattr(other, 'layer_idx', '?')} computes something else: this model cannot be unrolled."
                    )


def _llama_config(config, num_hidden_layers: int) -> LlamaConfig:
    """The fields that Llama has, of a GrownLlama's configuration."""
    ours = {"depth_plan", "history", "trained_recurrences", "kv_sharing", "plan_edits", "looped_layers"}
    dropped = {"auto_map", "model_type", "transformers_version", "architectures", "_name_or_path"}
    fields = {name: value for name, value in config.to_dict().items() if name not in ours | dropped}
    return LlamaConfig(**fields, num_hidden_layers=num_hidden_layers)


def _unrolled_state(model: PreTrainedModel, stack: DecoderStack, order: tuple[int, ...], model_class: type) -> dict:
    """A tensor of its own for every parameter and executed position, under the names of `model_class`."""
    prefix = next(name for name, module in model.named_modules() if module is stack.owner)
    layers = f"{prefix}.{stack.name}." if prefix else f"{stack.name}."
    state = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(layers):
            state[name] = tensor.clone()
            continue
        number, _, rest = name.removeprefix(layers).partition(".")
        state |= {f"{layers}{i}.{rest}": tensor.clone() for i, layer in enumerate(order) if layer == int(number)}
    if model_class.base_model_prefix != model.base_model_prefix:  # transformers' Llama for question answering
        old, new = f"{model.base_model_prefix}.", f"{model_class.base_model_prefix}."
        state = {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in state.items()}
    return state
