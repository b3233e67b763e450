"""LoopedGPT configuration: arXiv 2604.21106, section 3.1 and appendix C."""

import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .configuration_looped import LoopedConfigMixin, one_sentence_errors, require_choice, require_int, require_sign


INJECTIONS = ("linear", "additive", "none", "hyperconnection")


@one_sentence_errors
@strict
class LoopedGPTConfig(LoopedConfigMixin, PreTrainedConfig):
    r"""
    Prelude - core x r - coda: `num_prelude_layers` run once, `num_core_layers` run `num_recurrences` times, and
    `num_coda_layers` run once. The defaults are the paper's size 10 at r = 4 (81,194,880 parameters).

    Args:
        vocab_size (`int`, defaults to 32064): Rows of the embedding and of the head.
        hidden_size (`int`, defaults to 640): Width d.
        intermediate_size (`int`, *optional*): Width of the squared-ReLU MLP, 4 * `hidden_size` by default.
        num_attention_heads (`int`, defaults to 5): Query heads; the head size is `hidden_size // num_attention_heads`.
        num_key_value_heads (`int`, *optional*): Key-value heads, as many as query heads by default.
        num_prelude_layers (`int`, defaults to 2): Layers that run once, first.
        num_core_layers (`int`, defaults to 4): Layers that run `num_recurrences` times.
        num_coda_layers (`int`, defaults to 2): Layers that run once, last.
        num_recurrences (`int`, defaults to 4):
            Passes over the core. Also an argument of `forward` and `generate` and an override in `from_pretrained`.
        injection (`str`, defaults to `"linear"`):
            How the prelude output e enters each pass with state h (section 1.5 of the paper's appendix C):
            `"linear"` W[e; h] with W starting as [I | 0], `"additive"` h + e from h = 0, `"none"` h from h = e, or
            `"hyperconnection"`, `num_lanes` residual lanes around the core with weights of their own for each pass.
        num_lanes (`int`, defaults to 2): Lanes of the hyperconnection.
        backprop_recurrences (`int`, *optional*):
            Truncated backpropagation: gradients flow through the last so many passes. All of them by default.
        trained_recurrences (`int`, *optional*):
            The most passes the model was trained with, `num_recurrences` at construction by default and untouched
            by later overrides. Going beyond it warns; hyperconnections have no weights there and refuse.
        kv_sharing (`str` or `int`, defaults to `"all"`):
            `"all"` caches keys and values of every pass. `"first"`: every pass attends to those of the first, and
            computes none of its own; the text is still a function of the tokens alone. The others compress earlier
            chunks only, and within a chunk (a prompt, or a decoded token) every pass attends to its own: an int k
            keeps those of the last k passes, of which pass i attends to what the last one congruent to i modulo k
            left; `"last"` is 1; `"average"` keeps the mean over the passes. What is a chunk then matters: assisted
            decoding, which verifies several tokens in one, need not give the greedy text.
        logit_softcap (`float`, *optional*, defaults to 15.0): s in s * tanh(logits / s), in fp32. `None` turns it off.
        rms_norm_eps (`float`, defaults to 1e-6): Epsilon of every RMSNorm, the parameter-free QK norm included.
        rope_parameters (`dict`, *optional*): As in transformers; base 10,000 by default.
        rotary_dtype (`str`, defaults to `"float32"`):
            `"bfloat16"` rounds the rotary tables as the official checkpoints were trained with.
        max_position_embeddings (`int`, defaults to 2048): Training length; positions beyond it extrapolate.

    ```python
    >>> from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM
    >>> config = LoopedGPTConfig.iso_depth(size=10, num_recurrences=4)
    >>> str(config.plan())
    'Loop(2-4x4-2)'
    >>> model = LoopedGPTForCausalLM(config)
    ```
    """

    model_type = "looped_gpt"
    keys_to_ignore_at_inference = ["cache"]
    auto_classes = {
        "AutoConfig": "configuration_looped_gpt.LoopedGPTConfig",
        "AutoModel": "modeling_looped_gpt.LoopedGPTModel",
        "AutoModelForCausalLM": "modeling_looped_gpt.LoopedGPTForCausalLM",
        "AutoModelForSequenceClassification": "modeling_looped_gpt.LoopedGPTForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_looped_gpt.LoopedGPTForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_looped_gpt.LoopedGPTForQuestionAnswering",
    }

    vocab_size: int = 32064
    hidden_size: int = 640
    intermediate_size: int | None = None
    num_attention_heads: int = 5
    num_key_value_heads: int | None = None
    num_prelude_layers: int = 2
    num_core_layers: int = 4
    num_coda_layers: int = 2
    num_recurrences: int = 4
    injection: str = "linear"
    num_lanes: int = 2
    backprop_recurrences: int | None = None
    trained_recurrences: int | None = None
    kv_sharing: str | int = "all"
    logit_softcap: float | int | None = 15.0
    rms_norm_eps: float = 1e-6
    rope_parameters: RopeParameters | dict | None = None
    rotary_dtype: str = "float32"
    max_position_embeddings: int = 2048
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    @property
    def final_logit_softcapping(self) -> float | int | None:
        """`logit_softcap` by transformers' name for it, which trl's trainers ask for."""
        return self.logit_softcap

    @classmethod
    def iso_depth(
        cls,
        size: int,
        num_recurrences: int,
        effective_depth: int = 20,
        num_prelude_layers: int = 2,
        num_coda_layers: int = 2,
        **config_fields,
    ) -> "LoopedGPTConfig":
        """
        The paper's family at a fixed number of executed layers (section 3.1): width 64 * `size` rounded up to heads of
        128, and `effective_depth = num_prelude_layers + r * core + num_coda_layers`. r = 1 is one stack of
        `effective_depth` layers without injection (0-20-0), as in the official code.

        Raises:
            `ValueError`: where `num_recurrences` does not divide the depth between prelude and coda.
        """
        require_int("size", size, 1)
        require_int("num_recurrences", num_recurrences, 1)
        require_int("effective_depth", effective_depth, 1)
        for name, layers in (("num_prelude_layers", num_prelude_layers), ("num_coda_layers", num_coda_layers)):
            require_int(name, layers, 0)
        width = math.ceil(64 * size / 128) * 128
        if num_recurrences == 1:
            num_prelude_layers = num_coda_layers = 0
            config_fields.setdefault("injection", "none")
        between = effective_depth - num_prelude_layers - num_coda_layers
        if between < 1:
            raise ValueError(
                f"effective_depth={effective_depth} leaves no layer between a prelude of {num_prelude_layers} and a "
                f"coda of {num_coda_layers}: make it at least {num_prelude_layers + num_coda_layers + num_recurrences}."
            )
        if between % num_recurrences:
            possible = [r for r in range(1, between + 1) if between % r == 0]
            raise ValueError(
                f"num_recurrences={num_recurrences} does not split the {between} layers between a prelude of "
                f"{num_prelude_layers} and a coda of {num_coda_layers} at effective_depth={effective_depth}: "
                f"choose one of {possible}."
            )
        fields = {
            "hidden_size": width,
            "num_attention_heads": width // 128,
            "num_prelude_layers": num_prelude_layers,
            "num_core_layers": between // num_recurrences,
            "num_coda_layers": num_coda_layers,
            "num_recurrences": num_recurrences,
        }
        return cls(**{**fields, **config_fields})

    def validate_architecture(self):
        """Called by transformers when a configuration is built, validated or saved."""
        self.validate_depth()
        require_int("num_key_value_heads", self.num_key_value_heads, 1)
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be num_attention_heads={self.num_attention_heads} times an "
                "even head size."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}."
            )
        require_choice(self, {"injection": INJECTIONS})
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap={self.logit_softcap} must be positive, or None to turn it off.")
        require_sign(self, ("rms_norm_eps",))
        if self.rotary_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"rotary_dtype={self.rotary_dtype!r} must be 'float32' or 'bfloat16'.")
        if self.injection == "hyperconnection":
            require_int("num_lanes", self.num_lanes, 2, " with injection='hyperconnection'")
            if self.backprop_recurrences is not None and self.backprop_recurrences < self.num_recurrences:
                raise ValueError(
                    f"backprop_recurrences={self.backprop_recurrences} truncates num_recurrences="
                    f"{self.num_recurrences}, which injection='hyperconnection' does not allow: set it to None."
                )

    def weights_of_each_pass(self) -> str | None:
        return "injection='hyperconnection'" if self.injection == "hyperconnection" else None


__all__ = ["LoopedGPTConfig"]
