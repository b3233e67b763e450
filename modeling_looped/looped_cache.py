"""Which cache slot a pass over the core writes, and what must hold before it does."""

import torch
from transformers.cache_utils import Cache

from .depth_plan import DepthPlan


def slot_schedule(plan: DepthPlan, kv_sharing: str | int) -> tuple[tuple[int, bool], ...]:
    """
    `(slot, rewritten)` of each executed position. `kv_sharing="all"` gives each position its own slot. With an int
    k, pass i shares the slots of pass i mod k: it attends to what earlier chunks left there, and puts its own keys
    and values for the current chunk in place of those of pass i - k (arXiv 2604.21106, engine of the official code).
    """
    if kv_sharing == "all" or plan.sections[2] <= kv_sharing:
        return tuple((slot, False) for slot in plan.cache_slots)
    prelude, core, recurrences, coda = plan.sections
    once = prelude + coda
    kept = core * kv_sharing
    return tuple(
        (slot, False) if slot < once + kept else (once + (slot - once) % kept, True) for slot in plan.cache_slots
    )


def drop_last_chunk(cache: Cache, slot: int, chunk_length: int) -> None:
    """Takes the current chunk out of `slot`, so that the next update puts another pass's in its place."""
    layers = getattr(cache, "layers", None)
    if layers is None or not layers[slot].is_croppable:
        kind = type(cache if layers is None else layers[slot]).__name__
        raise ValueError(
            f"kv_sharing with fewer kept passes than num_recurrences rewrites cache entries, which {kind} cannot: "
            "use a dynamic or static cache, or kv_sharing='all'."
        )
    layers[slot].crop(-chunk_length)


def check_cache(cache: Cache, schedule: tuple[tuple[int, bool], ...], num_recurrences: int) -> None:
    """
    Refuses a cache that lacks slots for `num_recurrences`, or whose earlier tokens ran fewer passes: the passes
    beyond would attend to the new tokens alone, without any error.
    """
    if not isinstance(cache, Cache) or torch.compiler.is_compiling():
        return
    needed = max(slot for slot, _ in schedule) + 1
    if cache.layer_class_to_replicate is None and len(cache.layers) < needed:
        raise ValueError(
            f"The cache has {len(cache.layers)} slots and num_recurrences={num_recurrences} needs {needed}: build it "
            f"with config=model.config.cache_config({num_recurrences})."
        )
    seen, deepest = cache.get_seq_length(schedule[0][0]), cache.get_seq_length(needed - 1)
    if seen > deepest:
        raise ValueError(
            f"num_recurrences={num_recurrences} is more than the {int(seen)} earlier tokens of this cache ran (pass "
            f"{num_recurrences} has seen {int(deepest)} of them): keep the number they ran, or start a new cache."
        )
