"""
Growing a stack during training by copying its middle: MIDAS and LIDAS (arXiv 2602.16490, section 3; 2512.08819). At
the moment of growth the model is the old one with a block that runs twice; from then on the copies part.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_looped import require_int
from .decoder_stack import decoder_stack, renumber
from .interventions import executed_plan


def midas_sources(num_layers: int, block_size: int) -> list[int]:
    """
    For each layer of the grown stack, the layer of the old one of `num_layers` that it is: the middle block, of blocks
    of `block_size`, comes twice (section 3.2 of the specification; the earlier of two middle blocks).
    """
    _check_blocks(num_layers, block_size)
    middle = -(-(num_layers // block_size) // 2) - 1
    return _twice(num_layers, middle * block_size, (middle + 1) * block_size)


def lidas_sources(num_layers: int, block_size: int) -> list[int]:
    """As `midas_sources`, with the `block_size` layers around the exact middle of `num_layers` (section 3.3)."""
    _check_blocks(num_layers, block_size)
    centre = -(-num_layers // 2)
    return _twice(num_layers, centre + block_size // 2 - block_size, centre + block_size // 2)


OPERATORS: dict[str, Callable[[int, int], list[int]]] = {"midas": midas_sources, "lidas": lidas_sources}


def growth_schedule(
    total_steps: int, stages: int, alpha: float = 1.0, rounding: str = "largest_remainder"
) -> list[int]:
    """
    Steps of each stage under PROP-alpha, in proportion to (stage number)^alpha (section 3.5). Growth comes after each
    stage but the last.

    Args:
        total_steps: Steps over which the stack grows; the paper's 170,000 of 200,000.
        stages: Depths, the initial one included.
        alpha: 1 in the paper; 0 makes all stages equally long.
        rounding: `"largest_remainder"` adds up to `total_steps`; `"floor"` reproduces the paper's table of FLOPs, and
            leaves the steps that are missing to the last stage.

    Returns:
        One whole number of steps for each stage.
    """
    require_int("stages", stages, 1)
    require_int("total_steps", total_steps, stages)
    if rounding not in ("floor", "largest_remainder"):
        raise ValueError(f"rounding={rounding!r} must be 'floor' or 'largest_remainder'.")
    weights = [stage**alpha for stage in range(1, stages + 1)]
    exact = [weight / sum(weights) * total_steps for weight in weights]
    budgets = [int(steps + 1e-9) for steps in exact]  # a whole number may come out a hair too small
    if rounding == "largest_remainder":
        largest = sorted(range(stages), key=lambda stage: budgets[stage] - exact[stage])
        for stage in largest[: total_steps - sum(budgets)]:
            budgets[stage] += 1
    if min(budgets) < 1:
        raise ValueError(
            f"total_steps={total_steps} leaves stage {budgets.index(0) + 1} of {stages} without a step at alpha={alpha}: "
            "use more steps or fewer stages."
        )
    return budgets


def growth_steps(budgets: Sequence[int]) -> list[int]:
    """The numbers of finished steps after which the stack grows, of `budgets` as `growth_schedule` returns them."""
    return [sum(budgets[: stage + 1]) for stage in range(len(budgets) - 1)]


def grow(
    model: PreTrainedModel,
    operator: str,
    block_size: int,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> PreTrainedModel:
    """
    Grows `model` by `block_size` layers in place, copying parameters and, of `optimizer`, every tensor of their state
    (moments, momentum, step counters). New parameters join the groups of those that they copy. Embedding, head and
    norm stay the objects they were. The configuration gets its new depth and one more entry of `history`.

    Args:
        model: A dense GrownLlama, or any transformers decoder with a list of layers, on one process. Under Accelerate,
            use `grow_prepared`.
        operator: `"midas"` or `"lidas"`.
        block_size: Layers to add, b; the depth must be a multiple of it.
        optimizer: One or several, prepared by Accelerate or not.

    Returns:
        `model`.

    Raises:
        `ValueError`: for an operator or block size that does not fit, a looped model, or sharded parameters; before
            anything is changed.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator={operator!r} must be one of {', '.join(OPERATORS)}.")
    stack = decoder_stack(model)
    config, old, plan = stack.config, stack.unique_layers, executed_plan(model)
    if stack.layers is None or plan.order != tuple(range(len(old))):
        raise ValueError(
            f"{type(model).__name__} with the plan {plan} is no stack of layers that run one after the other, which alone "
            "can grow: unroll it first (modeling_looped.looping.unroll)."
        )
    sources = OPERATORS[operator](len(old), block_size)
    if any(isinstance(parameter, DTensor) for layer in old for parameter in layer.parameters()):
        raise ValueError("The model's parameters are sharded over ranks: use growth.grow_prepared or grow_sharded.")

    copies: dict[nn.Parameter, nn.Parameter] = {}
    grown = []
    for position, source in enumerate(sources):
        layer = old[source]
        if source in sources[:position]:
            layer = copy.deepcopy(old[source])
            copies |= dict(zip(old[source].parameters(), layer.parameters(), strict=True))
        grown.append(layer)
    entry = {"operator": operator, "block_size": block_size, "num_layers": len(old)}
    config.history = [*(getattr(config, "history", None) or []), entry]
    if hasattr(config, "depth_plan"):
        config.depth_plan = f"{len(sources)}x1"
    else:
        renumber(stack, sources)
    del stack.layers[:]
    stack.layers.extend(grown)
    for position, layer in enumerate(grown):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    for one in _raw(optimizer):
        _adopt(one, copies, list(model.parameters()))
    return model


def shrink(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Keeps the first `num_layers` of a dense GrownLlama, in place: the stack that growth starts from."""
    if not hasattr(model.config, "depth_plan"):
        raise ValueError(f"{type(model).__name__} cannot grow in training: load its checkpoint as GrownLlama.")
    stack = decoder_stack(model)
    if executed_plan(model).order != tuple(range(len(stack.layers))):
        raise ValueError(f"depth_plan={model.config.depth_plan!r} is no dense stack, which alone can grow.")
    del stack.layers[num_layers:]
    model.config.depth_plan = f"{num_layers}x1"
    return model


def grow_prepared(accelerator, model: nn.Module, optimizers: Sequence, operator: str, block_size: int):
    """
    `grow` in the middle of a run under Accelerate, on one process, DDP or FSDP2: takes the model and the optimizers
    that `accelerator.prepare` returned, and returns grown ones in their place. DDP and FSDP2 know their parameters from
    the moment they wrap a model, so it is unwrapped (under FSDP2 gathered on every rank), grown, and prepared anew.

    Returns:
        `(model, optimizers)`, prepared; the caller drops the old ones.
    """

    def prepare(model: PreTrainedModel, raw: list[torch.optim.Optimizer]):
        accelerator._models.clear()
        accelerator._optimizers.clear()
        prepared, *optimizers = accelerator.prepare(model, *raw)
        return prepared, optimizers

    raw_model, raw = accelerator.unwrap_model(model, keep_fp32_wrapper=False), _raw(optimizers)
    if any(isinstance(parameter, DTensor) for parameter in raw_model.parameters()):
        return grow_sharded(raw_model, raw, operator, block_size, prepare)
    return prepare(grow(raw_model, operator, block_size, raw), raw)


def grow_sharded(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    operator: str,
    block_size: int,
    shard: Callable[[PreTrainedModel, list[torch.optim.Optimizer]], tuple],
):
    """
    `grow` for a model under `torch.distributed.fsdp.fully_shard`. Every rank gathers parameters and optimizer states,
    grows them, and `shard`, which takes and returns `(model, optimizers)`, shards the result as the caller wants it;
    the states then follow their parameters.

    Returns:
        What `shard` returned.
    """
    whole = unsharded_class(model)(copy.deepcopy(model.config))
    whole.load_state_dict({name: gathered(value) for name, value in model.state_dict().items()})
    whole.train(model.training)
    whole.generation_config = copy.deepcopy(model.generation_config)
    if getattr(model, "is_activation_checkpointing", False):
        whole.activation_checkpointing_enable()
    twins = dict(whole.named_parameters())
    of_sharded = {parameter: twins[name] for name, parameter in model.named_parameters()}
    for sharded, twin in of_sharded.items():
        twin.requires_grad_(sharded.requires_grad)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [of_sharded[parameter] for parameter in group["params"]]
        state = {
            of_sharded[parameter]: {name: gathered(value) for name, value in values.items()}
            for parameter, values in optimizer.state.items()
        }
        optimizer.state.clear()
        optimizer.state.update(state)
    grow(whole, operator, block_size, optimizers)
    names = {parameter: name for name, parameter in whole.named_parameters()}
    states = [{names[parameter]: values for parameter, values in optimizer.state.items()} for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.state.clear()
    prepared, prepared_optimizers = shard(whole, list(optimizers))
    sharded = {name.removeprefix("module."): parameter for name, parameter in prepared.named_parameters()}
    for optimizer, state in zip(_raw(prepared_optimizers), states, strict=True):
        for name, values in state.items():
            parameter = sharded[name]
            optimizer.state[parameter] = {key: sharded_state(parameter, value) for key, value in values.items()}
    return prepared, prepared_optimizers


def unsharded_class(model: nn.Module) -> type:
    """The class of a model before `fully_shard`, which makes it one of torch's own module."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def gathered(value):
    """The whole tensor on every rank; anything else as it is. A collective call where it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_state(parameter: torch.Tensor, value):
    """An optimizer's state for `parameter`, spread over the ranks as it is where it has its shape."""
    if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


@dataclass(frozen=True)
class Ancestry:
    """
    Where the layers of a grown stack come from.

    Args:
        origin: For each layer, the layer of the initial stack that it descends from.
        created: For each layer, the number of the growth (from 1) that made it as a copy; 0 for original ones.
        splits: `splits[i][j]` is the growth at which layers i and j last shared their weights, 0 where they never did.
    """

    origin: tuple[int, ...]
    created: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]


def ancestry(config: PreTrainedConfig) -> Ancestry:
    """Replays the growths that `config.history` records."""
    history = getattr(config, "history", None)
    if not history:
        raise ValueError(f"This {type(config).__name__} has no history of growth to replay.")
    initial = history[0]["num_layers"]
    origin, created = list(range(initial)), [0] * initial
    splits = [[0] * initial for _ in range(initial)]
    for number, entry in enumerate(history, 1):
        if entry["num_layers"] != len(origin):
            raise ValueError(
                f"history: growth {number} starts from num_layers={entry['num_layers']}, and the growths before it end "
                f"at {len(origin)}."
            )
        sources = OPERATORS[entry["operator"]](len(origin), entry["block_size"])
        created = [number if s in sources[:i] else created[s] for i, s in enumerate(sources)]
        splits = [
            [number if a == b and i != j else splits[a][b] for j, b in enumerate(sources)]
            for i, a in enumerate(sources)
        ]
        origin = [origin[source] for source in sources]
    return Ancestry(tuple(origin), tuple(created), tuple(map(tuple, splits)))


def _twice(num_layers: int, start: int, stop: int) -> list[int]:
    return [*range(stop), *range(start, num_layers)]


def _check_blocks(num_layers: int, block_size: int) -> None:
    require_int("block_size", block_size, 1)
    require_int("num_layers", num_layers, block_size, f" (block_size={block_size})")
    if num_layers % block_size:
        raise ValueError(f"num_layers={num_layers} must be a multiple of block_size={block_size}: choose a divisor.")


def _raw(optimizers) -> list[torch.optim.Optimizer]:
    """One optimizer, several or none, without Accelerate's wrapper."""
    if optimizers is None:
        return []
    if hasattr(optimizers, "param_groups"):
        optimizers = [optimizers]
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]


def _adopt(optimizer: torch.optim.Optimizer, copies: dict, order: list[nn.Parameter]) -> None:
    """The copies of an optimizer's parameters join their group, each with its source's state."""
    place = {id(parameter): position for position, parameter in enumerate(order)}
    for group in optimizer.param_groups:
        params = group["params"]
        # Groups filled in the model's order stay so: a state dict names parameters by their position.
        places = [place.get(id(parameter), -1) for parameter in params]
        new = [copies[parameter] for parameter in params if parameter in copies]
        group["params"] = params + new
        if places == sorted(places):
            group["params"].sort(key=lambda parameter: place.get(id(parameter), -1))
    for source, parameter in copies.items():
        if source in optimizer.state:
            state = optimizer.state[source].items()
            optimizer.state[parameter] = {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                for name, value in state
            }
