"""Attention, MLP and pre-norm block of the looped families, whose keys and values may be another pass's."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .looped_cache import SharedKeyValues


def projection(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class LoopedAttention(nn.Module):
    """Bias-free causal attention. A family says in `place` what positions do to queries and keys."""

    def __init__(self, config: PreTrainedConfig, projection=projection, output_projection=projection):
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", heads)
        self.head_dim = width // heads
        self.num_key_value_groups = heads // kv_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q_proj = projection(width, width)
        self.k_proj = projection(width, kv_heads * self.head_dim)
        self.v_proj = projection(width, kv_heads * self.head_dim)
        self.o_proj = output_projection(width, width)

    def place(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, length, heads, head size), of which `key` may have no head at all, in and out."""
        return query, key

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings=None,
        attention_mask: torch.Tensor | None = None,
        key_values: SharedKeyValues | None = None,
        cache_slot: int = 0,
        recurrence: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        per_head = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(per_head)
        first = None if key_values is None else key_values.of_first_pass(cache_slot, recurrence)
        if first is None:
            key = self.k_proj(hidden_states).view(per_head)
            value = self.v_proj(hidden_states).view(per_head).transpose(1, 2)
            query, key = (x.to(value.dtype).transpose(1, 2) for x in self.place(query, key, position_embeddings))
            if key_values is not None:
                key, value = key_values.update(key, value, cache_slot, recurrence, kwargs=kwargs)
                attention_mask = key_values.visible(attention_mask, value, recurrence)
        else:
            key, value = first
            query = self.place(query, query[:, :, :0], position_embeddings)[0].to(value.dtype).transpose(1, 2)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(output.reshape(*input_shape, -1)), weights


class LoopedMLP(nn.Module):
    """Linear, activation, linear, without biases."""

    def __init__(self, config: PreTrainedConfig, activation: str, projection=projection, output_projection=projection):
        super().__init__()
        self.up_proj = projection(config.hidden_size, config.intermediate_size)
        self.down_proj = output_projection(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[activation]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class LoopedDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block, the same in prelude, core and coda."""

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ):
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
