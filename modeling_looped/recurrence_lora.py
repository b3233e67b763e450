"""Relaxed recursion: low-rank weights of each pass on a shared linear map (arXiv 2608.15062, section 13.3)."""

import torch
import torch.nn.functional as F
from torch import nn


LORA_SCALE = 2.0  # alpha / rank


class RecurrenceLoRA(nn.Module):
    """
    The change of one linear map in pass i, x -> 2 B_i A_i x, from B = 0. Which pass it is, the layer says before it
    runs, inside what activation checkpointing recomputes.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, num_recurrences: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(num_recurrences, rank, in_features))
        self.up = nn.Parameter(torch.empty(num_recurrences, out_features, rank))
        self.recurrence = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        down, up = self.down[self.recurrence], self.up[self.recurrence]
        return LORA_SCALE * F.linear(F.linear(hidden_states, down), up)
