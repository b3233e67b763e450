"""Muon for the matrices and AdamW for the rest, or AdamW alone; and the precision this machine multiplies faster in."""

import functools
import math
import time

import torch
from transformers import PreTrainedModel

from modeling_looped.growth import gathered

from .sharding import sharded_like


@functools.cache
def fastest_dtype() -> torch.dtype:
    """
    bf16 where the hardware has units for it, else fp32: CPUs without them emulate bf16, up to 25 times slower than
    fp32 (AVX2, measured by `python -m modeling_looped.recipes.optimizers`). Read off the hardware and not timed, so
    that the ranks of a machine agree and a continued run repeats itself.
    """
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    units = ("amx_bf16", "avx512_bf16", "bf16")  # the last is ARM's
    return torch.bfloat16 if any(capabilities.get(unit) for unit in units) else torch.float32


class Muon(torch.optim.Muon):
    """
    `torch.optim.Muon` with RMS-matched updates, its orthogonalisation in `fastest_dtype()` instead of always bf16. Of
    sharded matrices, every rank gathers the update and orthogonalises the whole of it; the state stays sharded.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None):
        loss = _evaluated(closure)
        dtype = fastest_dtype()
        for group in self.param_groups:
            params, grads, buffers = [], [], []
            self._init_group(group, params, grads, buffers)
            for param, grad, buffer in zip(params, grads, buffers):
                buffer.lerp_(grad, 1 - group["momentum"])
                update = gathered(grad.lerp(buffer, group["momentum"])).to(dtype)
                rate = group["lr"] * 0.2 * math.sqrt(max(param.shape))
                orthogonal = _orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(sharded_like(orthogonal.to(param.dtype), param), alpha=-rate)
        return loss


def _evaluated(closure):
    """What torch's optimizers do with the argument of `step`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _orthogonalise(update: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, on the side with fewer rows."""
    a, b, c = coefficients
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


# Polar Express: five quintic steps towards the orthogonal factor, each with coefficients of its own (section 5.1).
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class MuonH(torch.optim.Optimizer):
    """
    Muon on a Frobenius sphere (arXiv 2604.21106, section 5.1 of its specification): every matrix keeps the norm that it
    starts with, `lr` is the length of a step relative to it, and weight decay has nothing to do. The norm is part of the
    state, so that a continued run keeps it. Matrices of equal shape are orthogonalised together, in `fastest_dtype()`; of
    sharded ones every rank gathers the whole, and the momentum stays sharded.

    Args:
        params: Matrices, or groups of them.
        lr: Relative step size; 0.014 at the reference size, which `transfer.learning_rates` carries to others.
        momentum: Of the Nesterov average.
    """

    def __init__(self, params, lr: float, momentum: float = 0.95):
        if lr < 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr={lr} must not be negative, and momentum={momentum} must be at least 0 and below 1.")
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"MuonH steps on matrices: a parameter of shape {tuple(parameter.shape)} is none.")

    @torch.no_grad()
    def step(self, closure=None):
        loss = _evaluated(closure)
        for group in self.param_groups:
            alike: dict[tuple, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
            for matrices in alike.values():
                self._step(matrices, group["lr"], group["momentum"])
        return loss

    def _step(self, matrices: list[torch.Tensor], lr: float, momentum: float) -> None:
        updates, radii = [], []
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
                state["radius"] = gathered(matrix).norm()
            state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
            updates.append(gathered(matrix.grad.lerp(state["momentum_buffer"], momentum)))
            radii.append(state["radius"])
        radius = torch.stack(radii).view(-1, 1, 1)
        directions = polar_express(torch.stack(updates).to(fastest_dtype())).to(matrices[0].dtype)
        directions *= radius / _norms(directions).clamp(min=1e-30)
        moved = torch.stack([gathered(matrix) for matrix in matrices]).sub_(directions, alpha=lr)
        moved *= radius / _norms(moved).clamp(min=1e-30)
        for matrix, new in zip(matrices, moved, strict=True):
            matrix.copy_(sharded_like(new, matrix))


def polar_express(x: torch.Tensor) -> torch.Tensor:
    """Towards the orthogonal factor of each of `x`, (matrices, rows, columns), on the side with fewer rows."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (1.02 * _norms(x) + 1e-6)
    for a, b, c in _POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _norms(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=(-2, -1), keepdim=True)


def make_optimizers(
    model: PreTrainedModel,
    matrix_lr: float,
    embedding_lr: float,
    other_lr: float,
    matrix_decay: float = 0.0,
    matrices_by: str = "muon",
    head_lr: float | None = None,
    lane_lr: float | None = None,
) -> list[torch.optim.Optimizer]:
    """
    One optimizer on the matrices of the blocks and of the injection, and AdamW on the embedding, the head, the norms and
    lane weights (section 5.2 of arXiv 2604.21106's specification). Every group remembers its peak as `peak_lr`.

    Args:
        matrix_lr, embedding_lr: Peaks of the matrices' and of the embedding's learning rate.
        matrices_by: `"muon"`; `"muonh"`, which has no use for `matrix_decay`; or `"adamw"`.
        head_lr: Of an untied head, `other_lr` by default.
        lane_lr: Of the lanes of hyperconnections, `other_lr` by default.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = {id(embedding), id(head)}
    matrices = [p for _, p in named if p.dim() == 2 and id(p) not in tables and min(p.shape) > 8]
    taken = {id(p) for p in matrices} | tables
    lanes = [p for name, p in named if id(p) not in taken and ".injection." in name]
    taken |= {id(p) for p in lanes}
    groups = [
        {"params": [embedding], "lr": embedding_lr},
        {"params": [] if head is embedding else [head], "lr": other_lr if head_lr is None else head_lr},
        {"params": [p for _, p in named if id(p) not in taken], "lr": other_lr},
        {"params": lanes, "lr": other_lr if lane_lr is None else lane_lr},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    if matrices_by == "muonh":
        first = MuonH(matrices, matrix_lr)
    elif matrices_by == "muon":
        first = Muon(matrices, matrix_lr, weight_decay=matrix_decay)
    else:
        first = torch.optim.AdamW(matrices, matrix_lr, betas=(0.9, 0.95), weight_decay=matrix_decay)
    return _remember_peaks([first, adamw])


def make_adamw(model: PreTrainedModel, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """nanoGPT's one AdamW: `weight_decay` on matrices and embeddings, none on norms and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return _remember_peaks([torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))])


def _remember_peaks(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.ones(256, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype)
        a @ b
        began = time.perf_counter()
        for _ in range(3):
            a @ b
        print(f"{dtype}: {3 * 2 * 256**3 / (time.perf_counter() - began) / 1e9:.1f} GFLOP/s")
    print(f"chosen: {fastest_dtype()}")
