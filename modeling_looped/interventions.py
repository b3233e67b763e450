"""
Edits of the order in which depth visits a model's layers, for a while: swap, skip, reverse (arXiv 2602.16490, sections
5.5 and 6.5) and repeat. They work on every family of this package and on any transformers decoder with one list of
layers. Positions count executed layers, so that of a loop one pass can be edited and not the others.
"""

import copy
import functools

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .configuration_looped import check_savable, looped_layers
from .decoder_stack import decoder_stack, per_layer_fields
from .depth_plan import DepthPlan
from .looped_cache import CacheSlot, SharedKeyValues


class PlanEdit:
    """
    An edit that is in force until `undo`, or until the end of a `with` block:

    ```python
    >>> import torch
    >>> from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM
    >>> from modeling_looped.interventions import swap
    >>> model = LoopedGPTForCausalLM(LoopedGPTConfig(hidden_size=64, num_attention_heads=2))
    >>> ids = torch.arange(8)[None]
    >>> with swap(model, 3, 1) as edit:  # the executed layers 3 and 4 exchanged
    ...     print(edit.plan)
    ...     loss = model(ids, labels=ids).loss
    0 1 2 4 3 5 2 3 4 5 2 3 4 5 2 3 4 5 6 7
    ```

    Edits apply one after the other, in the order in which they were made; each counts positions in the plan that
    those before it leave. They can be undone in any order that leaves the others valid.
    """

    def __init__(self, model: PreTrainedModel, name: str, arguments: tuple[int, ...]):
        stack = decoder_stack(model)
        getattr(_plan(stack.config, stack.layers), name)(*arguments)  # an edit that does not fit changes nothing
        self._model = model
        self._edit = (name, arguments)
        self._active = True
        _set_edits(model, (*plan_edits(model), self._edit))

    @property
    def plan(self) -> DepthPlan:
        """What the model executes now, all of its edits included."""
        stack = decoder_stack(self._model)
        return _plan(stack.config, stack.layers)

    def undo(self) -> None:
        """Takes the edit back. A second call does nothing."""
        if not self._active:
            return
        edits = list(plan_edits(self._model))
        place = next(i for i in reversed(range(len(edits))) if edits[i] is self._edit)
        _set_edits(self._model, (*edits[:place], *edits[place + 1 :]))
        self._active = False

    def __enter__(self) -> "PlanEdit":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()


def swap(model: PreTrainedModel, s: int, length: int = 1) -> PlanEdit:
    """The executed layers [s, s+length) and [s+length, s+2*length) exchanged, their own order kept."""
    return PlanEdit(model, "swap", (s, length))


def skip(model: PreTrainedModel, s: int, length: int = 1) -> PlanEdit:
    """The executed layers [s, s+length) left out."""
    return PlanEdit(model, "skip", (s, length))


def reverse(model: PreTrainedModel, s: int, length: int) -> PlanEdit:
    """The executed layers [s, s+length) in reverse."""
    return PlanEdit(model, "reverse", (s, length))


def repeat(model: PreTrainedModel, start: int, stop: int, times: int = 1) -> PlanEdit:
    """`times` further passes over the unique layers [start, stop), directly after their last one."""
    return PlanEdit(model, "repeat", (start, stop, times))


def executed_plan(model: PreTrainedModel) -> DepthPlan:
    """The plan that `model` executes, edits included: of any decoder with one list of layers."""
    stack = decoder_stack(model)
    return _plan(stack.config, stack.layers)


def plan_edits(model: PreTrainedModel) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The edits in force, first to last, as (`DepthPlan` method, arguments)."""
    return getattr(decoder_stack(model).config, "plan_edits", ())


def _plan(config: PreTrainedConfig, layers: nn.ModuleList) -> DepthPlan:
    if hasattr(config, "plan"):
        return config.plan()
    if isinstance(layers, PlannedLayers):
        return layers.plan
    return DepthPlan.looped(0, len(layers), 1, 0)


def _set_edits(model: PreTrainedModel, edits: tuple) -> None:
    """All or nothing: edits that do not follow on each other raise `ValueError` and leave those in force."""
    stack = decoder_stack(model)
    config, layers = stack.config, stack.layers
    if hasattr(config, "plan"):
        plan = config.base_plan(config.num_recurrences)
    else:
        _check_architecture(model, config)
        if isinstance(layers, PlannedLayers):
            layers.original.training = layers.training
            layers = layers.original
        plan = DepthPlan.looped(0, len(layers), 1, 0)
    for name, arguments in edits:
        plan = getattr(plan, name)(*arguments)
    if hasattr(config, "plan"):
        config.__dict__.pop("plan_edits", None)
        if edits:
            config.plan_edits = edits
        return
    if isinstance(config, PlannedConfig):
        config.forget_plan()
    if edits:
        config.__class__ = planned_config_class(type(config))
        config.follow_plan(plan, edits)
        layers = PlannedLayers(layers, plan)
    setattr(stack.owner, stack.name, layers)


# What caches hold for layers of these types is keys and values, written by `cache.update` alone.
_CACHED_BY_UPDATE = {"full_attention", "sliding_attention", "chunked_attention"}


def _check_architecture(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    other = set(getattr(config, "layer_types", None) or ()) - _CACHED_BY_UPDATE
    shares = getattr(config, "num_kv_shared_layers", 0)
    state = getattr(model, "_is_stateful", False)
    if other or shares or state or getattr(config, "add_cross_attention", False):
        why = f"layers of type {', '.join(sorted(other))}" if other else ""
        why = why or (
            f"num_kv_shared_layers={shares}" if shares else "recurrent states" if state else "cross-attention"
        )
        raise ValueError(
            f"{type(model).__name__} has {why}, whose caches know layers by their number: only decoders whose layers "
            "cache their own keys and values can run in another order."
        )


class ExecutedLayer:
    """A layer at one executed position: the layer itself, with that position's cache slot. No module."""

    def __init__(self, layer: nn.Module, slot: int, recurrence: int | None):
        self.layer = layer
        self.slot = slot
        self.recurrence = recurrence

    def __call__(self, *args, **kwargs):
        if self.recurrence is not None:
            kwargs["recurrence"] = self.recurrence
        args = [self._slot(value) if isinstance(value, Cache) else value for value in args]
        for name in ("cache", "past_key_values", "layer_past"):
            if kwargs.get(name) is not None:
                kwargs[name] = self._slot(kwargs[name])
        return self.layer(*args, **kwargs)

    def _slot(self, cache: Cache) -> CacheSlot:
        return CacheSlot(SharedKeyValues(cache, "all", 1, 1), self.slot)

    def __getattr__(self, name: str):
        return getattr(self.layer, name)


class PlannedLayers(nn.ModuleList):
    """
    A decoder's list of layers that runs in the order of a plan: whoever walks it meets the executed positions. Names,
    parameters, hooks, adapters and checkpoints see every layer once, as in the list that it stands for.
    """

    tells_recurrence = False  # how often a layer ran before, to adapters of each pass

    def __init__(self, original: nn.ModuleList, plan: DepthPlan):
        super().__init__()
        self._modules = original._modules  # the very same: what replaces a layer here replaces it there
        self.__dict__["original"] = original  # no submodule, which would give every layer a second name
        self.plan = plan
        self.training = original.training

    def _executed(self) -> list:
        layers, order = list(self._modules.values()), self.plan.order
        if not self.tells_recurrence:
            return [layers[i] if i == slot else ExecutedLayer(layers[i], slot, None) for slot, i in enumerate(order)]
        return [ExecutedLayer(layers[i], slot, order[:slot].count(i)) for slot, i in enumerate(order)]

    def __len__(self) -> int:
        return self.plan.effective_depth

    def __iter__(self):
        return iter(self._executed())

    def __getitem__(self, index):
        return self._executed()[index]

    def __setitem__(self, *_):
        raise ValueError("The layers of a looped model cannot be changed: undo the loop first.")

    __delitem__ = append = extend = insert = __setitem__


class PlannedConfig:
    """
    In front of a configuration's class while a plan is in force: it counts executed layers, as caches and masks want,
    and serialises as the model that it belongs to, with its loops as `looped_layers`.
    """

    def follow_plan(self, plan: DepthPlan, edits: tuple) -> None:
        per_layer = per_layer_fields(self)
        names = [self.attribute_map.get(name, name) for name in ("num_hidden_layers", "looped_layers", *per_layer)]
        self._before = {name: self.__dict__[name] for name in names if name in self.__dict__}
        self.plan_edits = edits
        for name, values in per_layer.items():
            setattr(self, name, [copy.copy(values[layer]) for layer in plan.order])
        self.num_hidden_layers = plan.effective_depth

    def forget_plan(self) -> None:
        before = self._before
        self.__class__ = type(self).__mro__[2]
        for name in ("_before", "plan_edits", "looped_layers"):
            self.__dict__.pop(name, None)
        self.__dict__.update(before)

    def to_dict(self) -> dict:
        values = super().to_dict()
        before, edits = values.pop("_before", {}), values.pop("plan_edits", [])
        values.update(before)
        if loops := looped_layers(edits):
            values["looped_layers"] = loops
        return values

    def save_pretrained(self, *args, **kwargs):
        check_savable(self.plan_edits)
        return super().save_pretrained(*args, **kwargs)

    def __reduce__(self):
        return _unpickled, (type(self).__mro__[2], dict(self.__dict__))


@functools.cache
def planned_config_class(config_class: type) -> type:
    if issubclass(config_class, PlannedConfig):
        return config_class
    return type(config_class.__name__, (PlannedConfig, config_class), {"__module__": config_class.__module__})


def _unpickled(config_class: type, values: dict) -> PreTrainedConfig:
    config = object.__new__(planned_config_class(config_class))
    config.__dict__.update(values)
    return config
