"""
FSDP2 from outside: torch's `fully_shard` over a looped model. Accelerate starts the ranks and names the device; its own
FSDP plugin is not used, since it knows no core that is passed several times, and does nothing on CPUs.
"""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from modeling_looped.decoder_stack import decoder_stack
from modeling_looped.growth import gathered, sharded_state, unsharded_class


def wants_sharding() -> bool:
    """
    Whether the launcher asked for FSDP2 (`distributed_type: FSDP` in Accelerate's configuration).

    Raises:
        `ValueError`: for FSDP1, and for offloading, which the recipes do not have.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("fsdp_version: 1 does not train a shared core: set fsdp_version: 2 in Accelerate's configuration.")
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError("fsdp_offload_params: true is not supported by these recipes: set it to false.")
    return True


def shard(model: PreTrainedModel, optimizers: list[torch.optim.Optimizer]):
    """
    Shards each unique layer, then the rest, over all ranks, and lets groups and states of the optimizers follow. A layer
    that runs several times in one forward stays gathered until its backward is done, so that a core is communicated once
    and not once for every pass.

    Returns:
        `(model, optimizers)`, the same objects.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[[names[p] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]
    states = [{names[p]: state for p, state in optimizer.state.items()} for optimizer in optimizers]
    stack = decoder_stack(model)
    order = model.config.plan().order if hasattr(model.config, "plan") else range(len(stack.unique_layers))
    order = list(order)
    for number, layer in enumerate(stack.unique_layers):
        fully_shard(layer, reshard_after_forward=order.count(number) == 1)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    for optimizer, members, state in zip(optimizers, groups, states, strict=True):
        for group, named in zip(optimizer.param_groups, members):
            group["params"] = [parameters[name] for name in named]
        optimizer.state.clear()
        for name, values in state.items():
            like = parameters[name]
            optimizer.state[like] = {key: sharded_state(like, value) for key, value in values.items()}
    return model, optimizers


@contextmanager
def as_unsharded(model: PreTrainedModel):
    """
    `fully_shard` gives a model a class of torch's module: save_pretrained would put that one's code beside the weights,
    and its name into configuration and card.
    """
    sharded = type(model)
    model.__class__ = unsharded_class(model)
    try:
        yield
    finally:
        model.__class__ = sharded


def sharded_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that every rank has whole which belongs to this rank's part of `like`; no communication."""
    if not isinstance(like, DTensor):
        return value
    copies = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return copies.redistribute(like.device_mesh, like.placements)


def whole_state(model: nn.Module, optimizers: list) -> tuple[dict | None, list[dict] | None]:
    """
    State dicts with whole tensors on the CPU, of which rank 0 writes a checkpoint (None on others). `None` for the model
    where nothing is sharded, since `save_pretrained` then reads it by itself.
    """
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    first = not dist.is_initialized() or dist.get_rank() == 0
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    if not sharded:
        return None, [optimizer.state_dict() for optimizer in optimizers] if first else None

    def kept(value):
        value = gathered(value)  # all ranks take part, and one keeps it
        return value.cpu() if first and isinstance(value, torch.Tensor) else value if first else None

    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {name: kept(value) for name, value in model.state_dict().items() if name not in tied}
    states = []
    for optimizer in optimizers:
        state = optimizer.state_dict()
        state["state"] = {
            number: {name: kept(value) for name, value in values.items()} for number, values in state["state"].items()
        }
        states.append(state)
    return (weights, states) if first else (None, None)
