"""RecurrentGPT configuration: arXiv 2608.15062, sections 2, 3, 12 and 13 of its specification."""

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .configuration_looped import LoopedConfigMixin, one_sentence_errors, require_choice, require_int, require_sign


CHOICES = {
    "injection": ("linear", "additive", "none"),
    "gate": ("mlp", "none"),
    "gate_noise_shape": ("token", "element"),
    "anchor": ("prelude", "embedding", "previous", "zeros"),
    "state_init": ("prelude", "noise"),
}


@one_sentence_errors
@strict
class RecurrentGPTConfig(LoopedConfigMixin, PreTrainedConfig):
    r"""
    A GPT-2 whose core runs `num_recurrences` times, with a gate on what each pass writes. The defaults are the paper's
    small isoFLOPS cell (63,611,904 parameters). `num_core_layers=0` is a dense GPT-2.

    Args:
        vocab_size (`int`, defaults to 50304): Rows of the embedding, which is also the head.
        hidden_size (`int`, defaults to 768): Width d.
        intermediate_size (`int`, *optional*): Width of the GELU MLP, 4 * `hidden_size` by default.
        num_attention_heads (`int`, defaults to 12): Heads.
        num_prelude_layers (`int`, defaults to 1): Layers that run once, first.
        num_core_layers (`int`, defaults to 1): Layers that run `num_recurrences` times.
        num_coda_layers (`int`, defaults to 1): Layers that run once, last.
        num_recurrences (`int`, defaults to 10):
            Passes over the core, 0 for an exit after the prelude. Also an argument of `forward` and `generate`.
        trained_recurrences (`int`, *optional*):
            The most passes the model was trained with, `num_recurrences` at construction by default and untouched by
            later overrides. Going beyond it warns once.
        backprop_recurrences (`int`, *optional*):
            Truncated backpropagation: gradients flow through the last so many passes. All of them by default.
        num_dense_layers (`int`, *optional*):
            Layers L of the dense model that this one is compared with: weights that write to the residual stream start
            with deviation `initializer_range` / sqrt(2 L). The effective depth at construction by default.
        injection (`str`, defaults to `"linear"`):
            The core's input of state h and anchor e: `"linear"` W[h; e], `"additive"` h + e, or `"none"` h.
        gate (`str`, defaults to `"mlp"`): `"mlp"` writes g * h + (1 - g) * o; `"none"` writes the core's output o.
        gate_bias_init (`float`, defaults to 4.0): Bias of the gate's logit at the start: g = 0.982.
        gate_temperature (`float`, defaults to 1.0): tau, which divides the gate's logit.
        gate_concat_norm (`bool`, defaults to `True`): LayerNorm over the gate's concatenated inputs, as in the code.
        state_noise (`float`, defaults to 0.1): Deviation of the noise on the state that the injection reads.
        gate_noise (`float`, defaults to 0.1): Deviation of the noise on the gate's logit, after the temperature.
        gate_noise_shape (`str`, defaults to `"token"`): One number for a `"token"`, or for each `"element"`.
        noise_at_eval (`bool`, defaults to `False`): Both noises outside training too, as in the authors' evaluations.
        anchor (`str`, defaults to `"prelude"`):
            What enters each pass anew, in injection and gate: the output of the `"prelude"`, the `"embedding"`, the
            `"previous"` state, or `"zeros"`.
        state_init (`str`, defaults to `"prelude"`):
            h(0): the prelude's output, or truncated normal `"noise"` with a LayerNorm after the loop (Huginn's).
        loss_per_recurrence (`bool`, defaults to `False`): Train on the mean loss of all exits but k = 0 (Ouro's).
        lora_rank (`int`, *optional*): Low-rank weights of each pass on the core's linear maps (relaxed recursion).
        kv_sharing (`str` or `int`, defaults to `"all"`): As in `LoopedGPTConfig`.
        layer_norm_eps (`float`, defaults to 1e-5): Epsilon of every LayerNorm.
        initializer_range (`float`, defaults to 0.02): Deviation of the initial weights.
        max_position_embeddings (`int`, defaults to 1024): Learned positions; there are none beyond.

    ```python
    >>> from modeling_looped import RecurrentGPTConfig
    >>> config = RecurrentGPTConfig()
    >>> str(config.plan()), str(config.dense_twin().plan())
    ('Loop(1-1x10-1)', '12x1')
    ```
    """

    model_type = "recurrent_gpt"
    keys_to_ignore_at_inference = ["cache", "recurrent_states", "gate_statistics", "exit_states"]
    min_recurrences = 0
    min_core_layers = 0
    learned_positions = True
    auto_classes = {
        "AutoConfig": "configuration_recurrent_gpt.RecurrentGPTConfig",
        "AutoModel": "modeling_recurrent_gpt.RecurrentGPTModel",
        "AutoModelForCausalLM": "modeling_recurrent_gpt.RecurrentGPTForCausalLM",
        "AutoModelForSequenceClassification": "modeling_recurrent_gpt.RecurrentGPTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_recurrent_gpt.RecurrentGPTForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_recurrent_gpt.RecurrentGPTForQuestionAnswering",
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_attention_heads: int = 12
    num_prelude_layers: int = 1
    num_core_layers: int = 1
    num_coda_layers: int = 1
    num_recurrences: int = 10
    trained_recurrences: int | None = None
    backprop_recurrences: int | None = None
    num_dense_layers: int | None = None
    injection: str = "linear"
    gate: str = "mlp"
    gate_bias_init: float | int = 4.0
    gate_temperature: float | int = 1.0
    gate_concat_norm: bool = True
    state_noise: float | int = 0.1
    gate_noise: float | int = 0.1
    gate_noise_shape: str = "token"
    noise_at_eval: bool = False
    anchor: str = "prelude"
    state_init: str = "prelude"
    loss_per_recurrence: bool = False
    lora_rank: int | None = None
    kv_sharing: str | int = "all"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1024
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.num_dense_layers is None:
            self.num_dense_layers = self.effective_depth_if_valid()

    def dense_twin(self) -> "RecurrentGPTConfig":
        """The dense GPT-2 of `num_dense_layers` layers that this model is compared with."""
        shape = {"num_prelude_layers": self.num_dense_layers, "num_core_layers": 0, "num_coda_layers": 0}
        return self._twin(**shape, num_recurrences=1, trained_recurrences=1)

    def heavy_tail_twin(self) -> "RecurrentGPTConfig":
        """
        Huginn's recurrence around the same blocks (section 13.1 (b)): state from noise, no gate, no further noise.
        To be trained with depths from `DepthSampler("poisson-lognormal", mean=R, maximum=2 R)`; a RecurrentGPT that is
        trained with these depths, and keeps all else, is (a).
        """
        most = 2 * self.num_recurrences
        return self._twin(gate="none", state_init="noise", state_noise=0.0, gate_noise=0.0, trained_recurrences=most)

    def _twin(self, **changes) -> "RecurrentGPTConfig":
        own = {name: getattr(self, name) for name in RecurrentGPTConfig.__annotations__}
        return RecurrentGPTConfig(**{**own, **changes})

    def weights_of_each_pass(self) -> str | None:
        return None if self.lora_rank is None else f"lora_rank={self.lora_rank}"

    def validate_architecture(self):
        """Called by transformers when a configuration is built, validated or saved."""
        self.validate_depth()
        if self.num_prelude_layers + self.num_core_layers + self.num_coda_layers == 0:
            raise ValueError("num_core_layers=0 without prelude and coda is no model: give at least one layer.")
        require_int("num_dense_layers", self.num_dense_layers, 1)
        if self.num_core_layers == 0 and self.num_recurrences != 1:
            raise ValueError(f"num_recurrences={self.num_recurrences} must be 1 with num_core_layers=0 (dense).")
        require_choice(self, CHOICES)
        require_sign(self, ("gate_temperature", "layer_norm_eps", "initializer_range"), ("state_noise", "gate_noise"))
        if self.lora_rank is not None:
            require_int("lora_rank", self.lora_rank, 1, ", or None for none")


__all__ = ["RecurrentGPTConfig"]
