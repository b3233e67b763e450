"""Adapters of each pass over a looped block: peft's LoRA, one adapter for each time that a layer runs."""

import inspect
from collections.abc import Sequence

from torch import nn

from .decoder_stack import decoder_stack
from .interventions import PlannedLayers


class AdaptersByRecurrence:
    """What `adapters_by_recurrence` returns: in force until `undo`, or until the end of a `with` block."""

    def __init__(self, model: nn.Module, adapters: tuple[str, ...]):
        self._stack = decoder_stack(model)
        self._tellers = (
            [self._stack.layers] if isinstance(self._stack.layers, PlannedLayers) else self._stack.unique_layers
        )
        self._layers: list[nn.Module] = []
        self._hooks, self._before = [], []
        for layer in self._stack.unique_layers:
            adapted = [module for module in layer.modules() if hasattr(module, "lora_A")]
            if not adapted:
                continue
            for module in adapted:
                missing = [name for name in adapters if name not in module.lora_A]
                if missing:
                    self.undo()
                    raise ValueError(
                        f"adapters: a layer has no adapter {missing[0]!r}, only {', '.join(module.lora_A)}."
                    )
                self._before.append((module, module._active_adapter))
                for name, parameter in module.named_parameters():
                    if any(f".{adapter}." in f".{name}." for adapter in adapters):
                        self._before.append((parameter, parameter.requires_grad))
                        parameter.requires_grad_(True)
            # The first thing that runs inside a layer, and so inside what activation checkpointing runs again.
            attention = next((m for name, m in layer.named_children() if "attn" in name or "attention" in name), None)
            if attention is None:
                self.undo()
                raise ValueError(f"{type(layer).__name__} has no child named after attention, which is told the pass.")
            hook = _choose(adapted, adapters)
            self._hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        if not self._hooks:
            raise ValueError(f"{type(model).__name__} has no LoRA in its layers: add the adapters with peft first.")
        for teller in self._tellers:
            teller.tells_recurrence = True

    def undo(self) -> None:
        """One adapter for all passes again, as before."""
        for hook in self._hooks:
            hook.remove()
        for thing, before in reversed(self._before):
            if isinstance(thing, nn.Parameter):
                thing.requires_grad_(before)
            else:
                thing._active_adapter = before
        for teller in self._tellers:
            teller.__dict__.pop("tells_recurrence", None)
        self._hooks, self._before = [], []

    def __enter__(self) -> "AdaptersByRecurrence":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()


def adapters_by_recurrence(model: nn.Module, adapters: Sequence[str]) -> AdaptersByRecurrence:
    """
    Pass i over a looped block uses the peft adapter `adapters[i]`; passes beyond use the last, layers that run once
    the first. All of them train. The choice is made inside each layer, so that activation checkpointing recomputes
    with the adapter that the forward used. Works for the families of this package and for models with a `loop`.

    Args:
        model: A `PeftModel`, or the model inside it, whose LoRA adapters have the names `adapters`
            (`peft_model.add_adapter(name, config)` adds one).
        adapters: Their names, by pass.

    Returns:
        A handle with `.undo()`. A merged weight has no passes: merge after undoing, or unroll.

    Raises:
        `ValueError`: for adapters that are not there, or layers that cannot be told their pass.
    """
    if isinstance(adapters, str) or not adapters:
        raise ValueError(f"adapters={adapters!r} must be a list of adapter names, one for each pass.")
    stack = decoder_stack(model)
    if isinstance(stack.layers, PlannedLayers):
        layer = stack.unique_layers[0]
        kinds = [p.kind for p in inspect.signature(type(layer).forward).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"{type(layer).__name__}.forward takes no further keywords and cannot be told its pass.")
    return AdaptersByRecurrence(model, tuple(adapters))


def _choose(modules: list[nn.Module], adapters: tuple[str, ...]):
    def hook(attention, args, kwargs):
        recurrence = kwargs.get("recurrence") or 0
        chosen = [adapters[min(recurrence, len(adapters) - 1)]]
        for module in modules:
            module._active_adapter = chosen

    return hook
