"""Noise that is a function of where it falls, so that ranks agree and a recomputation or a resumed run repeats it."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class NoiseKey:
    """
    What the noise of one forward depends on, besides recurrence, row, position and channel. `first_row` is the number
    in the whole micro-batch of this rank's first row.
    """

    seed: int = 0
    step: int = 0
    micro_step: int = 0
    first_row: int = 0


def set_noise_key(model: nn.Module, key: NoiseKey | None) -> None:
    """Keys the noise of the forwards to come; a `key` of `None` goes back to torch's global generator."""
    for module in model.modules():
        if hasattr(module, "noise_key"):
            module.noise_key = key


class Noise:
    """
    Standard normal numbers for one forward: of torch's global generator without a key; with one, a hash of key,
    recurrence, row, position and channel, the same on every device up to rounding.

    Args:
        key (`NoiseKey`, *optional*)
        position_ids (`torch.Tensor`): (1 or batch, length).
        batch_size (`int`)
        per_row (`bool`): Without it every row has the noise of row 0, alone or in a batch.
    """

    def __init__(self, key: NoiseKey | None, position_ids: torch.Tensor, batch_size: int, per_row: bool = True):
        self.key = key
        if key is not None:
            rows = torch.arange(batch_size, device=position_ids.device) + key.first_row
            self._cells = _mix(_mix(rows if per_row else 0 * rows)[:, None] + position_ids)  # (batch, length)

    def __call__(
        self, like: torch.Tensor, recurrence: int, stream: int, truncated_at: float | None = None
    ) -> torch.Tensor:
        """
        Noise of the shape and dtype of `like`, (batch, length, channels). `stream` tells noises of one recurrence
        apart; `truncated_at` cuts the normal law off at so many standard deviations.
        """
        if self.key is None and truncated_at is None:
            return torch.randn_like(like)
        if self.key is None:
            uniform = torch.rand(like.shape, device=like.device) * 2 - 1  # its ends are cut off by `share`
        else:
            key = self.key
            cells = self._cells.to(like.device)
            for start in (0, 1):  # 64 bits of the rest
                salt = start
                for number in (key.seed, key.step, key.micro_step, recurrence, stream):
                    salt = _mix(salt ^ number & _MASK)
                cells = _mix(cells ^ salt)
            channels = _mix(torch.arange(like.shape[-1], device=like.device))
            # 23 bits and the half that keeps them off the ends, where erfinv is infinite, are what fp32 holds exactly.
            uniform = ((_mix(cells[..., None] ^ channels) >> 9).float() * 2 + 1) / 2**23 - 1
        share = 1.0 if truncated_at is None else math.erf(truncated_at / math.sqrt(2))
        return (math.sqrt(2) * torch.erfinv(share * uniform)).to(like.dtype)


_MASK = (1 << 32) - 1


def _mix(x):
    """
    Of a tensor or a number, a hash of 32 bits in int64 (multipliers and shifts of T. Mueller's), whose products stay
    below 2**63: compilers make of an overflow what they like.
    """
    x = x + 0x9E3779B9 & _MASK
    for _ in range(2):
        x = (x ^ x >> 16) * 0x45D9F3B & _MASK
    return x ^ x >> 16
