"""
One rank of a gloo run, started by torchrun from test_distributed.py: `distributed_worker.py CASE FOLDER`.

Each case leaves FOLDER/rank0.pt and rank1.pt. The test imports `train` and `predict`, which are the same code on one
process, and compares.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import TINY_MODELS, randomise
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from modeling_looped.keyed_noise import NoiseKey, set_noise_key


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


CASES = {"ddp": ddp, "fsdp": fsdp, "fsdp_plan": fsdp_plan, "tp": tp}

if __name__ == "__main__":
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    torch.save(CASES[case](dist.get_rank(), folder), folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
