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
    """Keys the noise of the forwards to come; `None` goes back to torch's global generator."""
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

    def __call__(self, like: torch.Tensor, recurrence: int, stream: int, truncated_at: float | None = None):
        """
        Noise of the shape and dtype of `like`, (batch, length, channels). `stream` tells noises of one recurrence
        apart; `truncated_at` cuts the normal law off at so many standard deviations.
        """
        share = 1.0 if truncated_at is None else math.erf(truncated_at / math.sqrt(2))
        if self.key is None:
            if truncated_at is None:
                return torch.randn_like(like)
            uniform = torch.rand(like.shape, device=like.device) * 2 - 1  # ends are cut off by `share`
        else:
            key = self.key
            salt = _mix_int(key.seed, key.step, key.micro_step, recurrence, stream)
            channels = torch.arange(like.shape[-1], device=like.device)
            cells = _mix(self._cells.to(like.device)[..., None] + (channels * _ODD + salt))
            # 23 bits and the half that keeps them off the ends, where erfinv is infinite, are what fp32 holds exactly.
            uniform = ((cells >> 41 & 0x7FFFFF).float() * 2 + 1) / 2**23 - 1
        return (math.sqrt(2) * torch.erfinv(share * uniform)).to(like.dtype)


# splitmix64 (Steele, Lea, Flood 2014), as signed numbers: torch multiplies modulo 2**64.
_ODD, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _ODD
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


def _mix_int(*numbers: int) -> int:
    """The same on Python's integers: one signed 64-bit number out of several."""
    mask, x = (1 << 64) - 1, 0
    for number in numbers:
        x = (x + number + _ODD) & mask
        x = ((x ^ x >> 30) * _FIRST) & mask
        x = ((x ^ x >> 27) * _SECOND) & mask
        x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
