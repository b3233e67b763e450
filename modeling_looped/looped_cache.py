"""Which keys and values a pass over the core attends to, which it leaves in the cache, and what must hold before."""

import torch
from transformers.cache_utils import Cache

from .depth_plan import DepthPlan


def slot_schedule(plan: DepthPlan, kept_recurrences: int) -> tuple[int, ...]:
    """
    The cache slot of each executed position. Where the plan has more passes than `kept_recurrences`, pass i uses the
    slots of pass i mod `kept_recurrences`.
    """
    if plan.passes <= kept_recurrences:
        return plan.cache_slots
    prelude, core, _, coda = plan.sections
    once, kept = prelude + coda, core * kept_recurrences
    return tuple(slot if slot < once + kept else once + (slot - once) % kept for slot in plan.cache_slots)


class SharedKeyValues:
    """
    The keys and values of one forward under `kv_sharing`, between the attention layers and a transformers cache.

    An int k (arXiv 2604.21106, engine of the official code): a pass attends to what earlier chunks left in its slot
    and puts its own keys and values of this chunk in place of those of the pass k before. `"average"` (arXiv
    2608.15062, section 10.3 of its specification) does the same with one slot, and in the end leaves the mean of all
    passes there. `"first"` hands the first pass's keys and values on to the others, with or without a cache.

    Layers outside the core have `recurrence=None`.
    """

    def __init__(self, cache: Cache | None, kv_sharing: str | int, num_recurrences: int, kept_recurrences: int):
        self.cache = cache
        self.num_recurrences = num_recurrences
        self.kept_recurrences = kept_recurrences
        self.hands_on = kv_sharing == "first" and num_recurrences > 1
        self.averages = kv_sharing == "average" and num_recurrences > 1 and cache is not None
        self._first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of_first_pass(self, slot: int, recurrence: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What this pass attends to instead of keys and values of its own, if anything."""
        return self._first[slot] if self.hands_on and recurrence else None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, slot: int, recurrence: int | None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This chunk's keys and values, (batch, heads, length, head size), in; those to attend to out."""
        if recurrence is not None and self.averages:
            keys, values = self._sums.get(slot, (0.0, 0.0))
            self._dtype = key.dtype
            self._sums[slot] = (keys + key.float(), values + value.float())
        if self.cache is not None:
            if recurrence is not None and recurrence >= self.kept_recurrences:
                self._drop_last_chunk(slot, key.shape[2])
            key, value = self.cache.update(key, value, slot, **kwargs)
        if recurrence == 0 and self.hands_on:
            self._first[slot] = key, value
        return key, value

    def visible(
        self, attention_mask: torch.Tensor | None, value: torch.Tensor, recurrence: int | None
    ) -> torch.Tensor | None:
        """The mask for attending to what `update` returned; here the causal one."""
        return attention_mask

    def finish(self) -> None:
        """After the last pass: with `"average"`, what later chunks will find of this one."""
        for slot, (keys, values) in self._sums.items():
            self._drop_last_chunk(slot, keys.shape[2])
            keys, values = ((sums / self.num_recurrences).to(self._dtype) for sums in (keys, values))
            self.cache.update(keys, values, slot)

    def _drop_last_chunk(self, slot: int, chunk_length: int) -> None:
        layers = getattr(self.cache, "layers", None)
        if layers is None or not layers[slot].is_croppable:
            kind = type(self.cache if layers is None else layers[slot]).__name__
            raise ValueError(
                f"kv_sharing with fewer kept passes than num_recurrences rewrites cache entries, which {kind} cannot: "
                "use a dynamic or static cache, or kv_sharing='all'."
            )
        layers[slot].crop(-chunk_length)


class CacheSlot:
    """
    What a layer of transformers takes for its cache: it writes to the slot of the executed position that it runs at,
    not to that of its own number.
    """

    def __init__(self, key_values: SharedKeyValues, slot: int, recurrence: int | None = None):
        self.key_values = key_values
        self.slot = slot
        self.recurrence = recurrence

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, **kwargs):
        handed_on = self.key_values.of_first_pass(self.slot, self.recurrence)
        return handed_on or self.key_values.update(key, value, self.slot, self.recurrence, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.key_values.cache.get_seq_length(self.slot)

    def __getattr__(self, name: str):
        return getattr(self.key_values.cache, name)


def check_cache(cache: Cache, schedule: tuple[int, ...], num_recurrences: int) -> None:
    """
    Refuses a cache that lacks slots for `num_recurrences`, whose `schedule` is that of `slot_schedule`, or whose
    earlier tokens ran fewer passes: the passes beyond would attend to the new tokens alone, without any error.
    """
    if not isinstance(cache, Cache) or torch.compiler.is_compiling():
        return
    needed = max(schedule) + 1
    if cache.layer_class_to_replicate is None and len(cache.layers) < needed:
        raise ValueError(
            f"The cache has {len(cache.layers)} slots and num_recurrences={num_recurrences} needs {needed}: build it "
            f"with config=model.config.cache_config({num_recurrences})."
        )
    # Every token has been through slot 0, which is the first layer that runs once, or else the core's first pass.
    seen, deepest = cache.get_seq_length(0), cache.get_seq_length(needed - 1)
    if seen > deepest:
        raise ValueError(
            f"num_recurrences={num_recurrences} is more than the {int(seen)} earlier tokens of this cache ran (pass "
            f"{num_recurrences} has seen {int(deepest)} of them): keep the number they ran, or start a new cache."
        )
