"""GrownLlama: transformers' Llama, its layers visited in the order of a depth plan (arXiv 2602.16490)."""

import torch
from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import auto_docstring
from transformers.utils.output_capturing import OutputRecorder

from .configuration_grown_llama import GrownLlamaConfig
from .generation_looped import LoopedGenerationMixin
from .looped_cache import CacheSlot, SharedKeyValues
from .looped_model import (
    LoopedForCausalLMMixin,
    LoopedModelMixin,
    LoopedPreTrainedModel,
    LoopedTaskMixin,
    register_code,
)
from .looped_outputs import DEPTH_OF_THE_CALL


class GrownLlamaDecoderLayer(LlamaDecoderLayer):
    """Llama's, with a cache slot for each executed position."""

    tells_recurrence = False  # to attention, where adapters of each pass look for it

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_values: SharedKeyValues | None = None,
        cache_slot: int = 0,
        recurrence: int | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if self.tells_recurrence:
            kwargs["recurrence"] = recurrence
        cache = None if key_values is None else CacheSlot(key_values, cache_slot, recurrence)
        return super().forward(hidden_states, cache=cache, **kwargs)


@auto_docstring
class GrownLlamaPreTrainedModel(LoopedPreTrainedModel):
    config_class = GrownLlamaConfig
    config: GrownLlamaConfig
    _no_split_modules = ["GrownLlamaDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": OutputRecorder(GrownLlamaDecoderLayer, num_hidden_layers_key=DEPTH_OF_THE_CALL),
        "attentions": LlamaAttention,
    }


@auto_docstring
class GrownLlamaModel(LoopedModelMixin, GrownLlamaPreTrainedModel):
    layer_class = GrownLlamaDecoderLayer

    def __init__(self, config: GrownLlamaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def build_layers(self):
        layers = (self.layer_class(self.config, index) for index in range(self.config.num_unique_layers))
        self.layers = nn.ModuleList(layers)

    def unique_layers(self):
        return self.layers

    def embed(self, inputs_embeds, position_ids, cache):
        return inputs_embeds, self.rotary_emb(inputs_embeds, position_ids=position_ids)

    def recur(self, call, prelude_output):
        """The residual stream goes from pass to pass as it is: nothing is injected, normed or cut (section 3.1)."""
        state = prelude_output
        for recurrence in range(call.num_recurrences):
            call.record(state)
            state = call.run_core(state, recurrence)
        call.record(state)
        return state


@auto_docstring
class GrownLlamaForCausalLM(LoopedForCausalLMMixin, GrownLlamaPreTrainedModel, LoopedGenerationMixin):
    model_class = GrownLlamaModel

    def logits(self, hidden_states):
        """Of last hidden states or of `exit_states`: (batch, length, vocabulary), in their dtype, as Llama's."""
        return self.lm_head(hidden_states)


class GrownLlamaTaskModel(LoopedTaskMixin, GrownLlamaPreTrainedModel):
    model_class = GrownLlamaModel


class GrownLlamaForSequenceClassification(GenericForSequenceClassification, GrownLlamaTaskModel): ...


class GrownLlamaForTokenClassification(GenericForTokenClassification, GrownLlamaTaskModel): ...


class GrownLlamaForQuestionAnswering(GenericForQuestionAnswering, GrownLlamaTaskModel): ...


register_code(GrownLlamaConfig, globals())

__all__ = [
    "GrownLlamaPreTrainedModel",
    "GrownLlamaModel",
    "GrownLlamaForCausalLM",
    "GrownLlamaForSequenceClassification",
    "GrownLlamaForTokenClassification",
    "GrownLlamaForQuestionAnswering",
]
