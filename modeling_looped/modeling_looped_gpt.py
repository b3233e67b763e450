"""LoopedGPT: prelude - core x r - coda at a fixed effective depth (arXiv 2604.21106, appendix C)."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, eager_attention_forward, rotate_half
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_looped_gpt import LoopedGPTConfig
from .generation_looped import LoopedGenerationMixin
from .looped_cache import check_cache, drop_last_chunk, slot_schedule
from .looped_outputs import DEPTH_OF_THE_CALL, states_of_this_depth
from .strict_loading import StrictLoadingMixin


logger = logging.get_logger(__name__)


class LoopedGPTRotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's tables with the negative angle, in fp32 whatever the model's dtype (or rounded to bf16), and with a
    dimension for the heads: (batch, length, 1, head size).
    """

    def forward(self, x, position_ids):
        cos, sin = super().forward(x.new_empty(0, dtype=torch.float32), position_ids)
        if self.config.rotary_dtype == "bfloat16":
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        return cos.unsqueeze(2), -sin.unsqueeze(2)


class LoopedGPTAttention(nn.Module):
    """Bias-free causal attention: rotary, then parameter-free RMSNorm of queries and keys (QK norm)."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        cache_slot: int = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        per_head = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(per_head)
        key = self.k_proj(hidden_states).view(per_head)
        value = self.v_proj(hidden_states).view(per_head).transpose(1, 2)

        # Queries and keys together: what is done to both is many small operations, which decoding waits for.
        cos, sin = position_embeddings
        both = torch.cat([query, key], dim=2)
        both = F.rms_norm(both * cos + rotate_half(both) * sin, (self.head_dim,), eps=self.config.rms_norm_eps)
        query, key = both.to(value.dtype).transpose(1, 2).split([query.shape[2], key.shape[2]], dim=1)

        if cache is not None:
            key, value = cache.update(key, value, cache_slot, kwargs=kwargs)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attention(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(output.reshape(*input_shape, -1)), weights


class LoopedGPTMLP(nn.Module):
    """Linear, squared ReLU, linear, without biases."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN["relu2"]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class LoopedGPTDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block, the same in prelude, core and coda."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LoopedGPTAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LoopedGPTMLP(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LoopedGPTInjection(nn.Module):
    """
    How the prelude output e enters the recurrences (section 1.5 of appendix C): `open` makes the state that the core
    carries, `read` the core's input, `write` the next state, and `close` the coda's input. Here `"none"`: h from h = e.
    """

    def __init__(self, config: LoopedGPTConfig):
        super().__init__()

    def forward(self, step: str, *args) -> torch.Tensor:
        """One of the steps below, by name: offloading and sharding hooks fetch weights when a module is called."""
        return getattr(self, step)(*args)

    def open(self, prelude_output: torch.Tensor) -> torch.Tensor:
        return prelude_output

    def read(self, prelude_output: torch.Tensor, state: torch.Tensor, recurrence: int) -> torch.Tensor:
        return state

    def write(self, state: torch.Tensor, output: torch.Tensor, recurrence: int) -> torch.Tensor:
        return output

    def close(self, state: torch.Tensor) -> torch.Tensor:
        return state


class LoopedGPTAdditiveInjection(LoopedGPTInjection):
    """u = h + e, from h = 0."""

    def open(self, prelude_output):
        return torch.zeros_like(prelude_output)

    def read(self, prelude_output, state, recurrence):
        return state + prelude_output.to(state.device)


class LoopedGPTInjectionProjection(nn.Linear):
    """[e; h] -> u, in its weight's dtype, which quantisation and fp16 leave in fp32."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return super().forward(both.to(self.weight.dtype)).to(both.dtype)


class LoopedGPTLinearInjection(LoopedGPTInjection):
    """u = W [e; h], starting as u = e."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        self.proj = LoopedGPTInjectionProjection(2 * config.hidden_size, config.hidden_size, bias=False)

    def read(self, prelude_output, state, recurrence):
        return self.proj(torch.cat([prelude_output.to(state.device), state], dim=-1))


class LoopedGPTHyperconnection(LoopedGPTInjection):
    """K lanes around the core, mixed by static weights of each pass (appendix G.1). State: (K, batch, length, d)."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        passes, lanes = config.trained_recurrences, config.num_lanes
        self.alpha = nn.Parameter(torch.empty(passes, lanes))
        self.mixing = nn.Parameter(torch.empty(passes, lanes, lanes))
        self.beta = nn.Parameter(torch.empty(passes, lanes))

    def open(self, prelude_output):
        return prelude_output.expand(self.alpha.shape[1], *prelude_output.shape)

    def read(self, prelude_output, state, recurrence):
        return (self.alpha[recurrence].view(-1, 1, 1, 1) * state).sum(0).to(state.dtype)

    def write(self, state, output, recurrence):
        mixing = self.mixing[recurrence].view(*self.mixing.shape[1:], 1, 1, 1)
        lanes = (mixing * state).sum(1) + self.beta[recurrence].view(-1, 1, 1, 1) * output
        return lanes.to(state.dtype)  # the weights stay in fp32 in an fp16 model

    def close(self, state):
        return state.sum(0)


INJECTION_CLASSES = {
    "linear": LoopedGPTLinearInjection,
    "additive": LoopedGPTAdditiveInjection,
    "none": LoopedGPTInjection,
    "hyperconnection": LoopedGPTHyperconnection,
}


@auto_docstring
class LoopedGPTPreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    config_class = LoopedGPTConfig
    config: LoopedGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LoopedGPTDecoderLayer"]
    # Also what every quantiser leaves alone: quantisers match from the start of a name, hence the optional prefix.
    _keep_in_fp32_modules = [r"(?:.+\.)?injection"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(LoopedGPTDecoderLayer, num_hidden_layers_key=DEPTH_OF_THE_CALL),
        "attentions": LoopedGPTAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module):
        """Appendix C.1. No output projection starts at zero: the official optimiser keeps their norms."""
        if isinstance(module, LoopedGPTInjectionProjection):
            init.copy_(module.weight, torch.eye(*module.weight.shape))
        elif isinstance(module, LoopedGPTHyperconnection):
            passes, lanes = module.alpha.shape
            init.copy_(module.alpha, F.one_hot(torch.arange(passes) % lanes, lanes))
            init.copy_(module.mixing, torch.eye(lanes).expand(passes, -1, -1))
            init.ones_(module.beta)
        elif module is getattr(self, "lm_head", None):
            init.normal_(module.weight, std=0.001)
        elif isinstance(module, nn.Linear):
            bound = math.sqrt(3 / module.in_features)
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        else:
            super()._init_weights(module)


@auto_docstring
class LoopedGPTModel(LoopedGPTPreTrainedModel):
    def __init__(self, config: LoopedGPTConfig):
        config.validate()  # overrides of from_pretrained are plain assignments, which nothing has checked yet
        super().__init__(config)

        def layers(count):
            return nn.ModuleList(LoopedGPTDecoderLayer(config) for _ in range(count))

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.prelude = layers(config.num_prelude_layers)
        self.core = layers(config.num_core_layers)
        self.coda = layers(config.num_coda_layers)
        self.injection = INJECTION_CLASSES[config.injection](config)
        self.recurrence_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LoopedGPTRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @states_of_this_depth
    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_recurrences: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        num_recurrences (`int`, *optional*):
            Passes over the core in this call, `config.num_recurrences` by default.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        num_recurrences = self._checked_recurrences(num_recurrences)
        schedule = slot_schedule(self.config.depth_plan(num_recurrences), self.config.kv_sharing)

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if cache is not None:
            check_cache(cache, schedule, num_recurrences)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
            position_ids = position_ids.unsqueeze(0)
        # Before a cache of our own exists: position_ids that restart (packed rows) are only looked at without one.
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config.cache_config(num_recurrences))

        slots = iter(schedule)

        def run(layers: nn.ModuleList, hidden_states: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                slot, rewritten = next(slots)
                if rewritten and cache is not None:
                    drop_last_chunk(cache, slot, hidden_states.shape[1])
                hidden_states = layer(
                    hidden_states,
                    attention_mask=causal_mask,
                    position_embeddings=position_embeddings,
                    position_ids=position_ids,
                    cache=cache,
                    cache_slot=slot,
                    **kwargs,
                )
            return hidden_states

        hidden_states = self.embedding_norm(inputs_embeds)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        prelude_output = run(self.prelude, hidden_states)

        state = self.injection("open", prelude_output)
        detached = num_recurrences - (self.config.backprop_recurrences or num_recurrences)
        for recurrence in range(num_recurrences):
            hidden_states = run(self.core, self.injection("read", prelude_output, state, recurrence))
            state = self.injection("write", state, self.recurrence_norm(hidden_states), recurrence)
            if recurrence < detached:  # truncated backpropagation, section 5.1
                state = state.detach()
                if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                    state.requires_grad_()  # reentrant checkpointing drops a layer whose input wants no gradient

        hidden_states = run(self.coda, self.injection("close", state))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _checked_recurrences(self, num_recurrences: int | None) -> int:
        if num_recurrences is None:
            num_recurrences = self.config.num_recurrences
        self.config.check_recurrences(num_recurrences)
        trained = self.config.trained_recurrences
        if num_recurrences > trained and not torch.compiler.is_compiling():
            logger.warning_once(
                f"num_recurrences={num_recurrences} is more than the {trained} that this model was trained with: "
                "the loss usually rises beyond them."
            )
        return num_recurrences


@auto_docstring
class LoopedGPTForCausalLM(LoopedGPTPreTrainedModel, LoopedGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        self.model = LoopedGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_recurrences: int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        num_recurrences (`int`, *optional*):
            Passes over the core in this call, `config.num_recurrences` by default.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_recurrences=num_recurrences,
            **kwargs,
        )
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states).float()
        cap = self.config.logit_softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LoopedGPTTaskModel(LoopedGPTPreTrainedModel):
    """Base of the heads that transformers' generic mixins build."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        # The mixins build the base model through AutoModel, which asks the user for trust once more, or refuses, where
        # the configuration class comes from the code beside a checkpoint.
        AutoModel.register(type(config), LoopedGPTModel, exist_ok=True)


class LoopedGPTForSequenceClassification(GenericForSequenceClassification, LoopedGPTTaskModel): ...


class LoopedGPTForTokenClassification(GenericForTokenClassification, LoopedGPTTaskModel): ...


class LoopedGPTForQuestionAnswering(GenericForQuestionAnswering, LoopedGPTTaskModel): ...


# Every save_pretrained then puts this code beside the weights, for machines without the package.
LoopedGPTConfig.register_for_auto_class("AutoConfig")
for auto_class, reference in LoopedGPTConfig.auto_classes.items():
    if auto_class != "AutoConfig":
        globals()[reference.split(".")[1]].register_for_auto_class(auto_class)

__all__ = [
    "LoopedGPTPreTrainedModel",
    "LoopedGPTModel",
    "LoopedGPTForCausalLM",
    "LoopedGPTForSequenceClassification",
    "LoopedGPTForTokenClassification",
    "LoopedGPTForQuestionAnswering",
]
