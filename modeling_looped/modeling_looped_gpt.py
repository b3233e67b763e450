"""LoopedGPT: prelude - core x r - coda at a fixed effective depth (arXiv 2604.21106, appendix C)."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half
from transformers.utils import auto_docstring
from transformers.utils.output_capturing import OutputRecorder

from .configuration_looped_gpt import LoopedGPTConfig
from .generation_looped import LoopedGenerationMixin
from .looped_layers import LoopedAttention, LoopedDecoderLayer, LoopedMLP
from .looped_model import (
    LoopedForCausalLMMixin,
    LoopedModelMixin,
    LoopedPreTrainedModel,
    LoopedTaskMixin,
    register_code,
)
from .looped_outputs import DEPTH_OF_THE_CALL


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


class LoopedGPTAttention(LoopedAttention):
    """Rotary, then parameter-free RMSNorm of queries and keys (QK norm)."""

    def place(self, query, key, position_embeddings):
        # Together: what is done to both is many small operations, which decoding waits for.
        cos, sin = position_embeddings
        both = torch.cat([query, key], dim=2)
        both = F.rms_norm(both * cos + rotate_half(both) * sin, (self.head_dim,), eps=self.config.rms_norm_eps)
        return both.split([query.shape[2], key.shape[2]], dim=2)


class LoopedGPTDecoderLayer(LoopedDecoderLayer):
    def __init__(self, config: LoopedGPTConfig):
        super().__init__(
            input_layernorm=nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            self_attn=LoopedGPTAttention(config),
            post_attention_layernorm=nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps),
            mlp=LoopedMLP(config, "relu2"),
        )


class LoopedGPTInjection(nn.Module):
    """
    How the prelude output e enters the recurrences (section 1.5 of appendix C), in the steps of `LoopedModelMixin`.
    Here `"none"`: h from h = e.
    """

    def __init__(self, config: LoopedGPTConfig):
        super().__init__()

    def forward(self, step: str, *args) -> torch.Tensor:
        """One of the steps below, by name: offloading and sharding hooks fetch weights when a module is called."""
        return getattr(self, step)(*args)

    def open(self, prelude_output: torch.Tensor, noise=None) -> torch.Tensor:
        return prelude_output

    def read(self, anchor: torch.Tensor, state: torch.Tensor, recurrence: int, noise=None) -> torch.Tensor:
        return state

    def write(self, anchor, state: torch.Tensor, output: torch.Tensor, recurrence: int, *_) -> torch.Tensor:
        return output

    def close(self, state: torch.Tensor) -> torch.Tensor:
        return state


class LoopedGPTAdditiveInjection(LoopedGPTInjection):
    """u = h + e, from h = 0."""

    def open(self, prelude_output, noise=None):
        return torch.zeros_like(prelude_output)

    def read(self, anchor, state, recurrence, noise=None):
        return state + anchor.to(state.device)


class LoopedGPTInjectionProjection(nn.Linear):
    """[e; h] -> u, in its weight's dtype, which quantisation and fp16 leave in fp32."""

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return super().forward(both.to(self.weight.dtype)).to(both.dtype)


class LoopedGPTLinearInjection(LoopedGPTInjection):
    """u = W [e; h], starting as u = e."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        self.proj = LoopedGPTInjectionProjection(2 * config.hidden_size, config.hidden_size, bias=False)

    def read(self, anchor, state, recurrence, noise=None):
        return self.proj(torch.cat([anchor.to(state.device), state], dim=-1))


class LoopedGPTHyperconnection(LoopedGPTInjection):
    """K lanes around the core, mixed by static weights of each pass (appendix G.1). State: (K, batch, length, d)."""

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        passes, lanes = config.trained_recurrences, config.num_lanes
        self.alpha = nn.Parameter(torch.empty(passes, lanes))
        self.mixing = nn.Parameter(torch.empty(passes, lanes, lanes))
        self.beta = nn.Parameter(torch.empty(passes, lanes))

    def open(self, prelude_output, noise=None):
        return prelude_output.expand(self.alpha.shape[1], *prelude_output.shape)

    def read(self, anchor, state, recurrence, noise=None):
        return (self.alpha[recurrence].view(-1, 1, 1, 1) * state).sum(0).to(state.dtype)

    def write(self, anchor, state, output, recurrence, *_):
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
class LoopedGPTPreTrainedModel(LoopedPreTrainedModel):
    config_class = LoopedGPTConfig
    config: LoopedGPTConfig
    _no_split_modules = ["LoopedGPTDecoderLayer"]
    # Also what every quantiser leaves alone: quantisers match from the start of a name, hence the optional prefix.
    _keep_in_fp32_modules = [r"(?:.+\.)?injection"]
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
class LoopedGPTModel(LoopedModelMixin, LoopedGPTPreTrainedModel):
    layer_class = LoopedGPTDecoderLayer

    def __init__(self, config: LoopedGPTConfig):
        super().__init__(config)
        self.embedding_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.injection = INJECTION_CLASSES[config.injection](config)
        self.recurrence_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LoopedGPTRotaryEmbedding(config)
        self.post_init()

    def embed(self, inputs_embeds, position_ids, cache):
        hidden_states = self.embedding_norm(inputs_embeds)
        return hidden_states, self.rotary_emb(hidden_states, position_ids=position_ids)


@auto_docstring
class LoopedGPTForCausalLM(LoopedForCausalLMMixin, LoopedGPTPreTrainedModel, LoopedGenerationMixin):
    model_class = LoopedGPTModel

    def logits(self, hidden_states):
        logits, cap = super().logits(hidden_states), self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class LoopedGPTTaskModel(LoopedTaskMixin, LoopedGPTPreTrainedModel):
    model_class = LoopedGPTModel


class LoopedGPTForSequenceClassification(GenericForSequenceClassification, LoopedGPTTaskModel): ...


class LoopedGPTForTokenClassification(GenericForTokenClassification, LoopedGPTTaskModel): ...


class LoopedGPTForQuestionAnswering(GenericForQuestionAnswering, LoopedGPTTaskModel): ...


register_code(LoopedGPTConfig, globals())

__all__ = [
    "LoopedGPTPreTrainedModel",
    "LoopedGPTModel",
    "LoopedGPTForCausalLM",
    "LoopedGPTForSequenceClassification",
    "LoopedGPTForTokenClassification",
    "LoopedGPTForQuestionAnswering",
]
