"""Outputs of a looped model: states after each recurrence, and recorded outputs at the depth of the call."""

from dataclasses import dataclass
from functools import wraps

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


# No configuration has this field, which keeps transformers from dropping indices beyond the configured depth.
DEPTH_OF_THE_CALL = "depth_of_the_call"


@dataclass
class LoopedModelOutput(BaseModelOutputWithPast):
    """
    Args:
        recurrent_states (`tuple[torch.Tensor]`, with `output_recurrences=True`):
            What the coda would get after k passes, k = 0, 1, ...: each (batch, length, width).
        gate_statistics (`dict[str, torch.Tensor]`, with `output_recurrences=True`, of gated models):
            Each (passes, batch, length): `mean` of the gate over channels, `copied` and `written` (the shares of
            channels above 0.95 and below 0.05), `proposal_norm` and `update_norm` (of o and of (1 - g) * o).
        exit_states (`tuple[torch.Tensor]`, with `output_exits=True`):
            The last hidden state of an exit after k passes, k = 0, 1, ...: what the head reads.
        auxiliary_loss (`torch.Tensor`): What routing adds to the loss, in training.
    """

    recurrent_states: tuple[torch.Tensor, ...] | None = None
    gate_statistics: dict[str, torch.Tensor] | None = None
    exit_states: tuple[torch.Tensor, ...] | None = None
    auxiliary_loss: torch.Tensor | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """
    Args:
        recurrent_states (`tuple[torch.Tensor]`): As in `LoopedModelOutput`.
        gate_statistics (`dict[str, torch.Tensor]`): As in `LoopedModelOutput`.
        exit_states (`tuple[torch.Tensor]`): As in `LoopedModelOutput`; `model.logits(state)` makes their logits.
        auxiliary_loss (`torch.Tensor`): As in `LoopedModelOutput`, and contained in `loss`.
    """

    recurrent_states: tuple[torch.Tensor, ...] | None = None
    gate_statistics: dict[str, torch.Tensor] | None = None
    exit_states: tuple[torch.Tensor, ...] | None = None
    auxiliary_loss: torch.Tensor | None = None


def states_of_this_depth(forward):
    """
    Above `capture_outputs`, which would resolve a negative index of `output_hidden_states=[-1]` by the configured
    depth, and so return another layer's state where the call has a `num_recurrences` of its own.
    """

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        selected = kwargs.get("output_hidden_states")
        if isinstance(selected, (int, list, tuple)) and not isinstance(selected, bool):
            indices = [selected] if isinstance(selected, int) else selected
            recorded = self.config.plan(kwargs.get("num_recurrences")).effective_depth + 1
            # An index out of range selects nothing, as in transformers: the one past the end does that.
            kwargs["output_hidden_states"] = [i % recorded if -recorded <= i < recorded else recorded for i in indices]
        return forward(self, *args, **kwargs)

    return wrapper
