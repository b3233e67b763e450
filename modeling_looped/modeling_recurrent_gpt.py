"""RecurrentGPT, or gated recurrent transformer: a shared core, a gate on its writes (arXiv 2608.15062)."""

import math

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.utils import auto_docstring
from transformers.utils.output_capturing import OutputRecorder

from .configuration_recurrent_gpt import RecurrentGPTConfig
from .generation_looped import LoopedGenerationMixin
from .keyed_noise import Noise, NoiseKey
from .looped_layers import LoopedAttention, LoopedDecoderLayer, LoopedMLP
from .looped_model import (
    LoopedForCausalLMMixin,
    LoopedModelMixin,
    LoopedPreTrainedModel,
    LoopedTaskMixin,
    register_code,
)
from .looped_outputs import DEPTH_OF_THE_CALL
from .recurrence_lora import RecurrenceLoRA


# Streams of noise within a recurrence.
STATE, GATE, START = 0, 1, 2


class RecurrentGPTLinear(nn.Linear):
    """A linear map of a block: without bias, and in a core with `lora_rank` with a change of its own in each pass."""

    def __init__(self, in_features: int, out_features: int, config: RecurrentGPTConfig, in_core: bool):
        super().__init__(in_features, out_features, bias=False)
        self.lora = None
        if in_core and config.lora_rank is not None:
            self.lora = RecurrenceLoRA(in_features, out_features, config.lora_rank, config.trained_recurrences)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden_states)
        return output if self.lora is None else output + self.lora(hidden_states)


class RecurrentGPTResidualLinear(RecurrentGPTLinear):
    """One that writes to the residual stream, and starts smaller for it. The type is what the initialisation knows."""


class RecurrentGPTGateLogit(nn.Linear):
    """The gate's last linear map, whose bias starts at `gate_bias_init`."""


class RecurrentGPTDecoderLayer(LoopedDecoderLayer):
    """nanoGPT's block: bias-free, LayerNorm, exact GELU, learned positions."""

    def __init__(self, config: RecurrentGPTConfig, in_core: bool):
        def linear(in_features, out_features):
            return RecurrentGPTLinear(in_features, out_features, config, in_core)

        def residual(in_features, out_features):
            return RecurrentGPTResidualLinear(in_features, out_features, config, in_core)

        super().__init__(
            input_layernorm=layer_norm(config),
            self_attn=LoopedAttention(config, linear, residual),
            post_attention_layernorm=layer_norm(config),
            mlp=LoopedMLP(config, "gelu", linear, residual),
        )
        self.has_lora = in_core and config.lora_rank is not None

    def forward(self, hidden_states: torch.Tensor, recurrence: int | None = None, **kwargs) -> torch.Tensor:
        if self.has_lora:
            for module in self.modules():
                if isinstance(module, RecurrenceLoRA):
                    module.recurrence = recurrence
        return super().forward(hidden_states, recurrence=recurrence, **kwargs)


def layer_norm(config: RecurrentGPTConfig, times: int = 1) -> nn.LayerNorm:
    return nn.LayerNorm(times * config.hidden_size, eps=config.layer_norm_eps, bias=False)


class RecurrentGPTInjection(nn.Module):
    """Projection and gate around each pass (sections 2.3 and 2.4), in the steps of `LoopedModelMixin`."""

    def __init__(self, config: RecurrentGPTConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        if config.injection == "linear":
            self.proj = nn.Linear(2 * width, width, bias=False)
        if config.gate == "mlp":
            self.state_norm = layer_norm(config)
            self.anchor_norm = layer_norm(config)
            self.gate_norm = layer_norm(config, 2) if config.gate_concat_norm else nn.Identity()
            self.gate_hidden = nn.Linear(2 * width, width, bias=False)
            self.gate_logit = RecurrentGPTGateLogit(width, width)
        if config.state_init == "noise":
            self.norm = layer_norm(config)

    def forward(self, step: str, *args) -> torch.Tensor:
        return getattr(self, step)(*args)

    @property
    def is_noisy(self) -> bool:
        return self.training or self.config.noise_at_eval

    def open(self, prelude_output: torch.Tensor, noise: Noise) -> torch.Tensor:
        if self.config.state_init == "prelude":
            return prelude_output
        return math.sqrt(0.4 / self.config.hidden_size) * noise(prelude_output, 0, START, truncated_at=3.0)

    def read(self, anchor: torch.Tensor, state: torch.Tensor, recurrence: int, noise: Noise) -> torch.Tensor:
        anchor = self._anchor(anchor, state)
        if self.config.state_noise > 0 and self.is_noisy:
            state = state + self.config.state_noise * noise(state, recurrence, STATE)
        if self.config.injection == "linear":
            return self.proj(torch.cat([state, anchor], dim=-1))
        return state + anchor if self.config.injection == "additive" else state

    def write(
        self,
        anchor: torch.Tensor,
        state: torch.Tensor,
        output: torch.Tensor,
        recurrence: int,
        noise: Noise,
        statistics: list | None,
    ) -> torch.Tensor:
        if self.config.gate == "none":
            return output
        both = torch.cat([self.state_norm(state), self.anchor_norm(self._anchor(anchor, state))], dim=-1)
        hidden = nn.functional.silu(self.gate_hidden(self.gate_norm(both)))
        logit = self.gate_logit(hidden) / self.config.gate_temperature
        if self.config.gate_noise > 0 and self.is_noisy:
            like = logit if self.config.gate_noise_shape == "element" else logit[..., :1]
            logit = logit + self.config.gate_noise * noise(like, recurrence, GATE)
        gate = torch.sigmoid(logit)
        if statistics is not None:
            statistics.append(gate_statistics(gate, output))
        # g * state + (1 - g) * output, one operation, and exactly the state where g = 1. In the dtype of the state,
        # which autocast keeps in fp32: in bf16, writes of 2 % would be lost to rounding.
        return torch.lerp(output.to(state.dtype), state, gate.to(state.dtype))

    def close(self, state: torch.Tensor) -> torch.Tensor:
        return self.norm(state) if self.config.state_init == "noise" else state

    def _anchor(self, anchor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return state if self.config.anchor == "previous" else anchor.to(state.device)


def gate_statistics(gate: torch.Tensor, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one pass, each (batch, length): see `LoopedModelOutput.gate_statistics`."""
    gate, output = gate.detach().float(), output.detach().float()
    return {
        "mean": gate.mean(-1),
        "copied": (gate > 0.95).float().mean(-1),
        "written": (gate < 0.05).float().mean(-1),
        "proposal_norm": output.norm(dim=-1),
        "update_norm": ((1 - gate) * output).norm(dim=-1),
    }


@auto_docstring
class RecurrentGPTPreTrainedModel(LoopedPreTrainedModel):
    config_class = RecurrentGPTConfig
    config: RecurrentGPTConfig
    _no_split_modules = ["RecurrentGPTDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": OutputRecorder(RecurrentGPTDecoderLayer, num_hidden_layers_key=DEPTH_OF_THE_CALL),
        "attentions": LoopedAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module):
        """Section 2.5."""
        deviation = self.config.initializer_range
        if isinstance(module, RecurrentGPTResidualLinear):
            init.normal_(module.weight, std=deviation / math.sqrt(2 * self.config.num_dense_layers))
        elif isinstance(module, RecurrentGPTGateLogit):
            init.normal_(module.weight, std=deviation)
            init.constant_(module.bias, self.config.gate_bias_init)
        elif isinstance(module, RecurrenceLoRA):
            init.normal_(module.down, std=module.down.shape[-1] ** -0.5)
            init.zeros_(module.up)
        else:
            super()._init_weights(module)


class LearnedPositionsMixin(LoopedModelMixin):
    """The base model with learned absolute positions."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, inputs_embeds, position_ids, cache):
        most = self.config.max_position_embeddings
        if not torch.compiler.is_compiling():
            longest = position_ids.shape[-1] + (cache.get_seq_length() if isinstance(cache, Cache) else 0)
            # Elsewhere than on a CPU, looking at values waits for the device: only where some may be past the end.
            if (longest > most or position_ids.device.type == "cpu") and (last := int(position_ids.max())) >= most:
                raise ValueError(
                    f"Position {last} is past the end: max_position_embeddings={most} were learned. Shorten the text, "
                    "or the number of new tokens."
                )
        return inputs_embeds + self.embed_positions(position_ids), None


@auto_docstring
class RecurrentGPTModel(LearnedPositionsMixin, RecurrentGPTPreTrainedModel):
    def __init__(self, config: RecurrentGPTConfig):
        super().__init__(config)
        if config.num_core_layers > 0:
            self.injection = RecurrentGPTInjection(config)
        self.recurrence_norm = nn.Identity()
        self.norm = layer_norm(config)
        self.noise_key: NoiseKey | None = None
        self.post_init()

    def build_layer(self, section):
        return RecurrentGPTDecoderLayer(self.config, in_core=section == "core")

    def anchor(self, embeddings, prelude_output):
        choices = {"embedding": embeddings, "zeros": torch.zeros_like(prelude_output)}
        return choices.get(self.config.anchor, prelude_output)

    def noise(self, position_ids, batch_size):
        key = self.noise_key
        if key is None and not self.training and self.config.state_init == "noise":
            # Cached equals uncached, and a row in a batch or a beam is the row alone.
            return Noise(NoiseKey(), position_ids, batch_size, per_row=False)
        return Noise(key, position_ids, batch_size)

    def recur(self, call, prelude_output):
        return super().recur(call, prelude_output) if self.config.num_core_layers > 0 else prelude_output


@auto_docstring
class RecurrentGPTForCausalLM(LoopedForCausalLMMixin, RecurrentGPTPreTrainedModel, LoopedGenerationMixin):
    model_class = RecurrentGPTModel


class RecurrentGPTTaskModel(LoopedTaskMixin, RecurrentGPTPreTrainedModel):
    model_class = RecurrentGPTModel


class RecurrentGPTForSequenceClassification(GenericForSequenceClassification, RecurrentGPTTaskModel): ...


class RecurrentGPTForTokenClassification(GenericForTokenClassification, RecurrentGPTTaskModel): ...


class RecurrentGPTForQuestionAnswering(GenericForQuestionAnswering, RecurrentGPTTaskModel): ...


register_code(RecurrentGPTConfig, globals())

__all__ = [
    "RecurrentGPTPreTrainedModel",
    "RecurrentGPTModel",
    "RecurrentGPTForCausalLM",
    "RecurrentGPTForSequenceClassification",
    "RecurrentGPTForTokenClassification",
    "RecurrentGPTForQuestionAnswering",
]
