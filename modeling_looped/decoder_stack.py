"""Where a transformers decoder keeps its layers, and what else counts them: for growing and looping any of them."""

import copy
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


# The names under which transformers' decoders keep their layers.
LAYER_LISTS = ("layers", "h", "blocks")


@dataclass(frozen=True)
class DecoderStack:
    """`owner.<name>` is the list of layers (a family of sections has none); `config` is the text model's."""

    owner: nn.Module
    name: str | None
    config: PreTrainedConfig

    @property
    def layers(self) -> nn.ModuleList | None:
        return self.name and getattr(self.owner, self.name)

    @property
    def unique_layers(self) -> list[nn.Module]:
        """Each layer once, in the order of their numbers."""
        if hasattr(self.owner, "unique_layers"):
            return list(self.owner.unique_layers())
        return list(self.layers._modules.values())  # of a list that runs in another order too


def decoder_stack(model: PreTrainedModel) -> DecoderStack:
    """
    The stack of layers of `model`, with or without a head, or with peft's wrapper around it.

    Raises:
        `ValueError`: for a model that has none, or keeps it where nobody would look.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} is not a transformers model: unwrap it first (accelerator.unwrap_model)."
        )
    config = model.config.get_text_config(decoder=True)
    for owner in model.modules():
        if hasattr(owner, "unique_layers"):
            return DecoderStack(owner, "layers" if hasattr(owner, "layers") else None, config)
    depth = getattr(config, "num_hidden_layers", None)
    found = [
        DecoderStack(owner, name, config)
        for owner in model.modules()
        for name, layers in owner.named_children()
        if name in LAYER_LISTS and isinstance(layers, nn.ModuleList) and len(layers) == depth
    ]
    if config.is_encoder_decoder or len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has no single list of {depth} decoder layers (named {', '.join(LAYER_LISTS)}): "
            "only decoders with one stack can be grown or looped."
        )
    return found[0]


def per_layer_fields(config: PreTrainedConfig) -> dict[str, list]:
    """The fields of `config` that hold one value for each layer, such as `layer_types`."""
    depth = config.num_hidden_layers
    names = ("layer_types", "mlp_layer_types", "no_rope_layers")
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == depth}


def renumber(stack: DecoderStack, order: list[int]) -> None:
    """Makes the configuration that of a stack whose layers are `order` of the present one."""
    config = stack.config
    for name, values in per_layer_fields(config).items():
        setattr(config, name, [copy.copy(values[layer]) for layer in order])
    config.num_hidden_layers = len(order)
