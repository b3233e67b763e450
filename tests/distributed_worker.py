"""
One rank of a gloo run, started by torchrun from test_distributed.py: `distributed_worker.py CASE FOLDER`.

Each case leaves FOLDER/rank0.pt and rank1.pt. The test imports `train` and `predict`, which are the same code on one
process, and compares.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from conftest import TINY_MODELS, randomise
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
from modeling_looped.conversion.depth import grow_checkpoint
from modeling_looped.growth import grow_sharded
from modeling_looped.keyed_noise import NoiseKey, set_noise_key
from modeling_looped.recipes.optimizers import make_adamw
from modeling_looped.recipes.pretrain import PretrainRecipe, newest_checkpoint, pretrain
from modeling_looped.recipes.tokens import TokenRows


# Model fields of each training run. `family`, `checkpointing` and `unused` (parameters that some steps leave without
# gradient) are not model fields.
RUNS = {
    "linear": {"checkpointing": True},
    "linear truncated": {"backprop_recurrences": 2, "checkpointing": True},
    "additive truncated": {"injection": "additive", "backprop_recurrences": 1, "checkpointing": False},
    "hyperconnection": {"injection": "hyperconnection", "checkpointing": True},
    # Without injection, truncation cuts the prelude off at every r > k.
    "none truncated": {"injection": "none", "backprop_recurrences": 2, "checkpointing": True, "unused": True},
    # With noise, which each rank draws for its rows of the whole batch. An even vocabulary: a tied table that does not
    # split evenly trains on stale values under transformers' FSDP plan, Llama's too (transformers 5.24, torch 2.13).
    "recurrent_gpt": {"family": "recurrent_gpt", "vocab_size": 98, "checkpointing": True},
    "grown_llama": {"family": "grown_llama", "checkpointing": True},
}
STEPS, ROWS, LENGTH, SEED = 3, 4, 12, 0


def sampled_recurrences(seed: int, step: int) -> int:
    """1 to 5, from the seed and the step alone, so that all ranks draw the same."""
    return int(torch.randint(1, 6, (), generator=torch.Generator().manual_seed(1000 * seed + step)))


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and labels of one step; row i counts 2i + 3 tokens less, so that ranks count unequally."""
    rows = torch.randint(1, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = rows.clone()
    for i in range(ROWS):
        labels[i, : 2 * i + 3] = -100
    return rows, labels


def run_model(name: str):
    fields = {key: value for key, value in RUNS[name].items() if key not in ("family", "checkpointing", "unused")}
    tiny = TINY_MODELS[RUNS[name].get("family", "looped_gpt")]
    # Smaller weights than elsewhere: after an update, rounding alone would make gradients differ by more than 1e-6.
    model = randomise(tiny(trained_recurrences=5, **fields), std=0.1)
    if getattr(model.config, "injection", None) == "hyperconnection":
        with torch.no_grad():  # lanes that nearly cancel would turn rounding into differences
            for parameter in model.model.injection.parameters():
                parameter.add_(1)
    if model.config.model_type == "grown_llama":
        with torch.no_grad():  # the first norm divides gradients by the embeddings' size, and with them rounding
            model.model.embed_tokens.weight.mul_(10)
    return model


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, rank: int = 0, ranks: int = 1, recurrences: int | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """
    SGD steps on this rank's share of each global batch, at sampled depths or at `recurrences`: the gradients of every
    step, and the weights after the last.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.train()
    results = {}
    for step in range(STEPS):
        rows, labels = global_batch(step)
        counted = (labels[:, 1:] != -100).sum()
        mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        set_noise_key(model, NoiseKey(SEED, step, first_row=mine.start))
        output = model(
            input_ids=rows[mine],
            labels=labels[mine],
            num_items_in_batch=counted,
            num_recurrences=recurrences or sampled_recurrences(SEED, step),
            use_cache=False,
        )
        (output.loss * ranks).backward()  # the ranks' gradients are averaged, and the loss is a share of a sum
        results[f"gradients {step}"] = {
            name.removeprefix("module."): whole(parameter.grad).clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    results["weights"] = {
        name.removeprefix("module."): whole(parameter.detach()).clone() for name, parameter in model.named_parameters()
    }
    return results


@torch.no_grad()
def predict(model) -> dict[str, torch.Tensor]:
    """Logits and greedy continuations of two rows at several depths."""
    rows, results = global_batch(0)[0][:2], {}
    for recurrences in (1, 3, 5):
        results[f"logits {recurrences}"] = model(rows, num_recurrences=recurrences).logits
        results[f"text {recurrences}"] = model.generate(
            rows, max_new_tokens=12, do_sample=False, num_recurrences=recurrences
        )
    return results


def ddp(rank: int, folder: Path) -> dict:
    results = {}
    for name, options in RUNS.items():
        model = run_model(name)
        if options["checkpointing"]:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        wrapped = DistributedDataParallel(model, find_unused_parameters=options.get("unused", False))
        results[name] = train(wrapped, rank, dist.get_world_size())
    return results


def fsdp(rank: int, folder: Path) -> dict:
    """Sharded from outside: each layer by itself, the rest with the root."""
    results = {}
    for name, options in RUNS.items():
        model = run_model(name)
        if options["checkpointing"]:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        for layer in model.model.unique_layers():
            fully_shard(layer)
        fully_shard(model)
        results[name] = train(model, rank, dist.get_world_size())
    return results


def fsdp_plan(rank: int, folder: Path) -> dict:
    """Sharded by transformers while it loads, by the configuration's plan."""
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    local = {name: tuple(parameter.to_local().shape) for name, parameter in model.named_parameters()}
    results = {"units": units, "local shapes": local}
    model.save_pretrained(folder / "saved")
    return {**results, **train(model, rank, dist.get_world_size(), recurrences=3)}


def tp(rank: int, folder: Path) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    local = {
        name: tuple(parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape)
        for name, parameter in model.named_parameters()
    }
    results = {"local shapes": local, **predict(model)}
    model.save_pretrained(folder / "saved")
    return results


def growing_model():
    config = GrownLlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=6,
        max_position_embeddings=16, pad_token_id=0,
    )  # fmt: skip
    return randomise(GrownLlamaForCausalLM(config), std=0.1)


GROWING = PretrainRecipe(
    total_steps=12, batch_size=4, decay="trapezoid", warmup_steps=1, precision="no", optimizer="adamw", adamw_lr=1e-3,
    growth_operator="lidas", growth_block_size=2, checkpoint_every=100,
)  # fmt: skip


def growing_run(folder: Path, limit_seconds: float | None = None) -> list[float]:
    stream = np.random.default_rng(3).integers(1, 97, 2000).astype(np.int32)
    result = pretrain(growing_model(), TokenRows(stream, 16), GROWING, folder, progress=False, limit_seconds=limit_seconds)
    return result.losses


def grow(rank: int, folder: Path) -> dict:
    """DDP under Accelerate: growing in the run, and growing the file between runs that end at every step."""
    whole = growing_run(folder / "whole")
    after = GROWING.growth_steps(growing_model().config)
    losses, stage = [], 0
    while len(losses) < GROWING.total_steps:
        if len(losses) in after:
            source = newest_checkpoint(folder / f"stage-{stage}")
            stage += 1
            if rank == 0:
                grow_checkpoint(str(source), str(folder / f"stage-{stage}" / source.name), "lidas", 2)
            dist.barrier()
        losses += growing_run(folder / f"stage-{stage}", limit_seconds=0)
    return {"whole": torch.tensor(whole), "by file": torch.tensor(losses), "growths": after}


def sharded_losses(model, optimizer, steps: range, rank: int, ranks: int) -> list[float]:
    losses = []
    for step in steps:
        rows, labels = global_batch(step)
        mine = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        count = (labels[:, 1:] != -100).sum()
        loss = model(rows[mine], labels=labels[mine], num_items_in_batch=count, use_cache=False).loss
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shard_and_adopt(model, optimizers):
    """What Accelerate does for FSDP2: the optimizer's parameters become the sharded ones."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizers[0].param_groups]
    parameters = dict(sharded(model).named_parameters())
    for group, members in zip(optimizers[0].param_groups, groups):
        group["params"] = [parameters[name] for name in members]
    return model, optimizers


def grow_fsdp(rank: int, folder: Path) -> dict:
    model = sharded(growing_model()).train()
    (optimizer,) = make_adamw(model, 1e-2, 0.1)
    losses = sharded_losses(model, optimizer, range(3), rank, 2)
    model, (optimizer,) = grow_sharded(model, [optimizer], "lidas", 2, shard_and_adopt)
    losses += sharded_losses(model, optimizer, range(3, 6), rank, 2)
    known = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, known)) == sorted(map(id, model.parameters()))
    assert all(isinstance(optimizer.state[parameter]["exp_avg"], DTensor) for parameter in known)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return {"losses": losses, "weights": {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}}


CASES = {"grow": grow, "grow_fsdp": grow_fsdp, "ddp": ddp, "fsdp": fsdp, "fsdp_plan": fsdp_plan, "tp": tp}

if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.save(CASES[case](dist.get_rank(), folder), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
