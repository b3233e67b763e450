"""Mixture-of-Recursions: a shared core and a router that gives each token its number of passes (arXiv 2507.10524)."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.utils import auto_docstring

from .configuration_mixture_of_recursions import MixtureOfRecursionsConfig
from .generation_looped import LoopedGenerationMixin
from .looped_cache import SharedKeyValues
from .looped_model import LoopedForCausalLMMixin, LoopedTaskMixin, register_code
from .modeling_recurrent_gpt import (
    LearnedPositionsMixin,
    RecurrentGPTDecoderLayer,
    RecurrentGPTPreTrainedModel,
    layer_norm,
)


def is_allowed(attention_mask: torch.Tensor) -> torch.Tensor:
    """transformers' 4D mask, boolean or additive, as boolean."""
    return attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    A boolean mask as numbers to add to the scores: finite ones, so that a token without anything to attend to, whose
    output nobody reads, gets no NaN.
    """
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


class RoutedKeyValues(SharedKeyValues):
    """
    Keys and values of which a pass sees those of the tokens that it runs (recursion-wise caching). The others have
    zeros in its slots, and are known by them: so the routing of earlier tokens stays in the cache, through beams,
    crops and offloading, without a place of its own.
    """

    def __init__(self, *args):
        super().__init__(*args)
        # Of each pass, because activation checkpointing runs passes again after later ones.
        self._active: dict[int, torch.Tensor] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self._core: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slots of the first pass, with empty tensors

    def route(self, recurrence: int, active: torch.Tensor) -> None:
        """Says which tokens a pass runs: (batch, length)."""
        self._active[recurrence] = active

    def update(self, key, value, slot, recurrence, **kwargs):
        if recurrence:  # the first pass runs every token
            sits_out = ~self._active[recurrence][:, None, :, None]
            key, value = key.masked_fill(sits_out, 0), value.masked_fill(sits_out, 0)
        elif recurrence == 0:
            self._core[slot] = key[:, :, :0], value[:, :, :0]
        return super().update(key, value, slot, recurrence, **kwargs)

    def visible(self, attention_mask, value, recurrence):
        if not recurrence:
            return attention_mask
        if recurrence not in self._masks:
            seen = (value[:, 0] != 0).any(-1)[:, None, None, :]
            self._masks[recurrence] = additive(is_allowed(attention_mask) & seen, value.dtype)
        return self._masks[recurrence]

    def sit_out(self, recurrence: int) -> None:
        """What a pass that no token of this chunk runs leaves in the cache."""
        if self.cache is None or self.hands_on:
            return
        rows, length = self._active[recurrence].shape
        for slot, key_and_value in self._core.items():
            zeros = (x.new_zeros(rows, x.shape[1], length, x.shape[3]) for x in key_and_value)
            self.cache.update(*zeros, slot + recurrence * len(self._core))


class MixtureOfRecursionsRouter(nn.Module):
    """(batch, length, width) -> (batch, length, `choices`) logits."""

    def __init__(self, config: MixtureOfRecursionsConfig, choices: int):
        super().__init__()
        self.temperature = config.router_temperature
        width = config.hidden_size
        if config.router == "linear":
            self.proj = nn.Linear(width, choices, bias=False)
        else:
            hidden = nn.Linear(width, 2 * width, bias=False)
            self.proj = nn.Sequential(hidden, nn.GELU(), nn.Linear(2 * width, choices, bias=False))
        if config.routing == "token_choice" and config.balancing == "bias":
            self.register_buffer("balance", torch.zeros(choices))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj(hidden_states / self.temperature)


@auto_docstring
class MixtureOfRecursionsPreTrainedModel(RecurrentGPTPreTrainedModel):
    config_class = MixtureOfRecursionsConfig
    config: MixtureOfRecursionsConfig
    # Their kernels take no mask of one's own.
    _supports_flash_attn = False
    _supports_flex_attn = False


@auto_docstring
class MixtureOfRecursionsModel(LearnedPositionsMixin, MixtureOfRecursionsPreTrainedModel):
    mask_options = {"allow_is_causal_skip": False}

    def __init__(self, config: MixtureOfRecursionsConfig):
        super().__init__(config)
        by_expert = config.routing == "expert_choice"
        routers, choices = (config.trained_recurrences, 1) if by_expert else (1, config.trained_recurrences)
        self.router = nn.ModuleList(MixtureOfRecursionsRouter(config, choices) for _ in range(routers))
        self.norm = layer_norm(config)
        self.post_init()

    def build_layer(self, section):
        return RecurrentGPTDecoderLayer(self.config, in_core=False)

    @property
    def takes_the_best(self) -> bool:
        """Whether passes take their tokens from the whole text, as expert choice does in training."""
        return self.config.routing == "expert_choice" and self.training

    def fills_cache(self):
        return not self.takes_the_best

    def _key_values(self, cache, num_recurrences):
        if cache is None and self.takes_the_best:
            return super()._key_values(cache, num_recurrences)
        kept = self.config.kept_recurrences(num_recurrences)
        return RoutedKeyValues(cache, self.config.kv_sharing, num_recurrences, kept)

    def recur(self, call, prelude_output):
        if self.config.routing == "token_choice":
            return self._token_choice(call, prelude_output)
        if self.takes_the_best and not isinstance(call.key_values, RoutedKeyValues):
            return self._take_the_best(call, prelude_output)
        return self._take_above_half(call, prelude_output)

    def _take_the_best(self, call, state: torch.Tensor) -> torch.Tensor:
        """
        Expert choice in training: the core runs on the tokens that a pass took and on nothing else. Padding is no
        token, and a row has the capacities of its own length.
        """
        config, (batch, length) = self.config, state.shape[:2]
        allowed = is_allowed(call.attention_mask).expand(batch, 1, length, length)
        valid = allowed.diagonal(dim1=2, dim2=3).squeeze(1)  # (batch, candidates); padding cannot attend to itself
        lengths = valid.sum(1, keepdim=True)
        index = torch.arange(length, device=state.device).expand(batch, length)
        loss = state.new_zeros(())
        for recurrence in range(call.num_recurrences):
            call.record(state)
            logits = self.router[recurrence](pick(state, index)).squeeze(-1)
            most = max(1, config.capacity(recurrence, length))
            capacity = config.capacity(recurrence, lengths).clamp(min=1)
            best = logits.float().masked_fill(~valid, -torch.inf).topk(most, sorted=True).indices
            kept = (torch.arange(most, device=state.device) < capacity) & valid.gather(1, best)
            best, order = best.sort()  # back into the order of the text
            kept = kept.gather(1, order)
            taken = torch.zeros_like(valid).scatter(1, best, kept)
            loss = loss + config.selection_loss * cross_entropy(logits, taken, valid)
            loss = loss + config.z_loss * mean_square(logits, valid)

            index, valid, logits = index.gather(1, best), kept, logits.gather(1, best)
            mask = allowed.gather(2, index[:, None, :, None].expand(-1, 1, -1, length))
            if recurrence == 0 or call.key_values is None:
                mask = mask.gather(3, index[:, None, None, :].expand(-1, 1, most, -1)) & valid[:, None, None, :]
            hidden_states = pick(state, index)
            output = call.run_core(hidden_states, recurrence, attention_mask=additive(mask, state.dtype))
            weight = config.router_scale * torch.sigmoid(logits).unsqueeze(-1)
            updated = torch.where(valid.unsqueeze(-1), hidden_states + weight * output, hidden_states)
            state = state.scatter(1, index.unsqueeze(-1).expand_as(updated), updated.to(state.dtype))
        call.record(state)
        call.auxiliary_loss = loss
        return state

    def _take_above_half(self, call, state: torch.Tensor) -> torch.Tensor:
        """Expert choice without looking ahead: what the selection loss taught the routers to say of a token alone."""
        config = self.config
        active = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
        for recurrence in range(call.num_recurrences):
            call.record(state)
            logits = self.router[recurrence](state)
            if recurrence > 0:  # the first pass has room for all
                active = active & (logits.squeeze(-1) > 0)
            weight = config.router_scale * torch.sigmoid(logits)
            state = self._pass(call, state, recurrence, active, lambda output: state + weight * output)
        call.record(state)
        return state

    def _token_choice(self, call, state: torch.Tensor) -> torch.Tensor:
        config = self.config
        logits = self.router[0](state)
        chosen = logits if config.balancing == "loss" else logits + self.router[0].balance
        depth = chosen.argmax(-1).clamp(max=call.num_recurrences - 1)
        softmax = logits.float().softmax(-1)
        weights = config.router_scale * (softmax if config.router_function == "softmax" else logits.float().sigmoid())
        weight = weights.gather(-1, depth.unsqueeze(-1)).to(state.dtype)
        if self.training:
            call.auxiliary_loss = self._balance(call, logits, softmax, chosen)
        for recurrence in range(call.num_recurrences):
            call.record(state)
            ends = (depth == recurrence).unsqueeze(-1)
            state = self._pass(
                call,
                state,
                recurrence,
                depth >= recurrence,
                lambda output: torch.where(ends, state + weight * output, output),
            )
        call.record(state)
        return state

    def _pass(self, call, state: torch.Tensor, recurrence: int, active: torch.Tensor, update) -> torch.Tensor:
        """One pass over all tokens of the chunk, of which the inactive ones neither change nor are seen."""
        call.key_values.route(recurrence, active)
        skippable = recurrence > 0 and not (self.training or self.config.plan_edits or torch.compiler.is_compiling())
        skippable = skippable and call.statistics is None  # whoever asks what passes do has them all run
        if skippable and not active.any():
            call.key_values.sit_out(recurrence)
            return state
        return torch.where(active.unsqueeze(-1), update(call.run_core(state, recurrence)).to(state.dtype), state)

    def _balance(self, call, logits: torch.Tensor, softmax: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Towards equally many tokens for each depth: a loss, or a step of the bias."""
        config = self.config
        allowed = is_allowed(call.attention_mask)
        length = logits.shape[1]
        real = allowed[:, 0, :, -length:].diagonal(dim1=1, dim2=2).expand(logits.shape[:2]).unsqueeze(-1)
        counts = real.sum().clamp(min=1)
        share = (F.one_hot(chosen.argmax(-1), config.trained_recurrences) * real).sum((0, 1)) / counts
        loss = config.z_loss * mean_square(logits.float().logsumexp(-1), real.squeeze(-1))
        if config.balancing == "loss":
            probability = (softmax * real).sum((0, 1)) / counts
            return loss + config.balancing_loss * config.trained_recurrences * (probability * share).sum()
        self.router[0].balance += config.balancing_rate * torch.sign(share.mean() - share)
        return loss


def pick(state: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows `index`, (batch, n), of each text of `state`, (batch, length, width)."""
    return state.gather(1, index.unsqueeze(-1).expand(-1, -1, state.shape[-1]))


def cross_entropy(logits: torch.Tensor, taken: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean over the candidates of the cross-entropy between a router's logits and who was taken."""
    loss = F.binary_cross_entropy_with_logits(logits.float(), taken.float(), reduction="none")
    return (loss * valid).sum() / valid.sum().clamp(min=1)


def mean_square(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return (values.float().square() * valid).sum() / valid.sum().clamp(min=1)


@auto_docstring
class MixtureOfRecursionsForCausalLM(
    LoopedForCausalLMMixin, MixtureOfRecursionsPreTrainedModel, LoopedGenerationMixin
):
    model_class = MixtureOfRecursionsModel
    supports_continuous_batching = False


class MixtureOfRecursionsTaskModel(LoopedTaskMixin, MixtureOfRecursionsPreTrainedModel):
    model_class = MixtureOfRecursionsModel


class MixtureOfRecursionsForSequenceClassification(GenericForSequenceClassification, MixtureOfRecursionsTaskModel): ...


class MixtureOfRecursionsForTokenClassification(GenericForTokenClassification, MixtureOfRecursionsTaskModel): ...


class MixtureOfRecursionsForQuestionAnswering(GenericForQuestionAnswering, MixtureOfRecursionsTaskModel): ...


register_code(MixtureOfRecursionsConfig, globals())

__all__ = [
    "MixtureOfRecursionsPreTrainedModel",
    "MixtureOfRecursionsModel",
    "MixtureOfRecursionsForCausalLM",
    "MixtureOfRecursionsForSequenceClassification",
    "MixtureOfRecursionsForTokenClassification",
    "MixtureOfRecursionsForQuestionAnswering",
]
