"""GrownLlama configuration: a Llama with a depth plan and a growth history (arXiv 2602.16490, section 3)."""

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from .configuration_looped import ConfigurationError, LoopedConfigMixin, one_sentence_errors, require_int, require_sign
from .depth_plan import DepthPlan, loop_text


def _of_the_plan(index: int, name: str) -> property:
    """A read-only count: a section's number of layers."""

    def getter(self) -> int:
        return self._counts[index]

    def setter(self, value):
        raise ValueError(
            f"{name}={value!r} cannot be set: it follows from depth_plan={self.depth_plan!r}, so change that."
        )

    return property(getter, setter, doc=f"`{name}` of the plan, read-only.")


@one_sentence_errors
@strict
class GrownLlamaConfig(LoopedConfigMixin, PreTrainedConfig):
    r"""
    A Llama whose depth is a plan: grown, looped, or both. Fields and defaults are `LlamaConfig`'s, and a Llama's
    `config.json` is one of GrownLlama without loops. `num_prelude_layers`, `num_core_layers` and `num_coda_layers` are
    read off the plan; `num_recurrences` too, and setting it turns the looped block of the plan.

    Args:
        vocab_size (`int`, defaults to 32000): Rows of the embedding and of the head.
        hidden_size (`int`, defaults to 4096): Width d.
        intermediate_size (`int`, defaults to 11008): Width of the gated MLP.
        depth_plan (`str`, *optional*):
            The order in which depth visits the layers: `"Loop(4-4x4-4)"`, `"Loop(4x6)"`, `"24x1"` (dense), or an
            explicit order such as `"0 1 2 1 2 3"`. Without it, `num_hidden_layers` L means `"Lx1"`, and 32 layers
            are the default. Where both are given, `num_hidden_layers` is the number of executed layers and must agree.
        history (`list[dict]`, *optional*):
            The growths that made this stack, first to last, as `growth.grow` records them:
            `{"operator": "lidas", "block_size": 4, "num_layers": 8}` for one of an 8-layer stack.
            `growth.ancestry(config)` replays them.
        trained_recurrences (`int`, *optional*):
            The most passes the model was trained with, those of the plan at construction by default. Going beyond
            it warns.
        kv_sharing (`str` or `int`, defaults to `"all"`): As in `LoopedGPTConfig`.
        num_attention_heads (`int`, defaults to 32): Query heads.
        num_key_value_heads (`int`, *optional*): Key-value heads, as many as query heads by default.
        head_dim (`int`, *optional*): `hidden_size // num_attention_heads` by default.
        hidden_act (`str`, defaults to `"silu"`): Activation of the gate.
        max_position_embeddings (`int`, defaults to 2048): Training length.
        initializer_range (`float`, defaults to 0.02): Deviation of the initial weights.
        rms_norm_eps (`float`, defaults to 1e-6): Epsilon of every RMSNorm.
        rope_parameters (`dict`, *optional*): As in transformers; base 10,000 by default.
        attention_bias (`bool`, defaults to `False`): Biases in attention.
        mlp_bias (`bool`, defaults to `False`): Biases in the MLP.
        attention_dropout (`float`, defaults to 0.0): Dropout of attention weights.

    ```python
    >>> from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
    >>> config = GrownLlamaConfig(hidden_size=256, intermediate_size=688, num_attention_heads=4, depth_plan="Loop(4-4x4-4)")
    >>> config.num_hidden_layers, config.num_core_layers, config.num_recurrences
    (24, 4, 4)
    >>> model = GrownLlamaForCausalLM(config)
    ```
    """

    model_type = "grown_llama"
    min_core_layers = 0
    keys_to_ignore_at_inference = ["cache"]
    auto_classes = {
        "AutoConfig": "configuration_grown_llama.GrownLlamaConfig",
        "AutoModel": "modeling_grown_llama.GrownLlamaModel",
        "AutoModelForCausalLM": "modeling_grown_llama.GrownLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_grown_llama.GrownLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_grown_llama.GrownLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_grown_llama.GrownLlamaForQuestionAnswering",
    }
    layer_tp_plan = {**LoopedConfigMixin.layer_tp_plan, "mlp.gate_proj": "colwise"}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    depth_plan: str | None = None
    history: list[dict] | None = None
    trained_recurrences: int | None = None
    kv_sharing: str | int = "all"
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False

    num_prelude_layers = _of_the_plan(0, "num_prelude_layers")
    num_core_layers = _of_the_plan(1, "num_core_layers")
    num_coda_layers = _of_the_plan(3, "num_coda_layers")

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # "llama", in a Llama's config.json
        depth = kwargs.pop("num_hidden_layers", None)
        if depth is not None:
            require_int("num_hidden_layers", depth, 1)
        require_int("num_attention_heads", self.num_attention_heads, 1)
        if self.depth_plan is None:
            self.depth_plan = f"{32 if depth is None else depth}x1"
        elif depth is not None and depth != self._plan.effective_depth:
            raise ConfigurationError(
                f"num_hidden_layers={depth} and depth_plan={self.depth_plan!r}, which executes "
                f"{self._plan.effective_depth} layers, disagree: give one of the two."
            )
        if kwargs.get("sliding_window") is not None:
            raise ConfigurationError(
                f"GrownLlamaConfig has no sliding_window (got {kwargs['sliding_window']!r}), without which this "
                "checkpoint would attend further than it was trained to."
            )
        for name in ("num_prelude_layers", "num_core_layers", "num_coda_layers"):
            if name in kwargs:
                setattr(self, name, kwargs[name])
        self.num_recurrences = kwargs.pop("num_recurrences", self.num_recurrences)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "depth_plan" and isinstance(value, str):  # read once: every forward asks for it
            super().__setattr__("_plan", DepthPlan.parse(value))

    def to_dict(self) -> dict:
        values = super().to_dict()
        values.pop("_plan", None)
        return values

    def base_plan(self, num_recurrences: int | None = None) -> DepthPlan:
        """`plan` without interventions."""
        plan = self._plan
        if plan.is_explicit or num_recurrences in (None, plan.sections[2]):
            return plan
        prelude, core, _, coda = plan.sections
        return DepthPlan.looped(prelude, core, num_recurrences, coda)

    @property
    def num_unique_layers(self) -> int:
        """Stored layers."""
        return max(self.base_plan().order) + 1

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        """prelude, core, recurrences, coda; an order that is no loop is all prelude."""
        plan = self.base_plan()
        return plan.sections or (self.num_unique_layers, 0, 1, 0)

    @property
    def num_recurrences(self) -> int:
        """Passes over the looped block. Setting it turns the plan; an explicit order has no block to turn."""
        return self._counts[2]

    @num_recurrences.setter
    def num_recurrences(self, value: int):
        self.check_recurrences(value)
        if value != self.num_recurrences:
            prelude, core, _, coda = self._counts
            self.depth_plan = loop_text(prelude, core, value, coda)

    def check_recurrences(self, num_recurrences: int) -> None:
        require_int("num_recurrences", num_recurrences, 1)
        if num_recurrences != self.num_recurrences and self.base_plan().is_explicit:
            raise ValueError(
                f"num_recurrences={num_recurrences} turns nothing in the explicit order depth_plan={self.depth_plan!r}: "
                "leave it out, or write a plan such as Loop(4-4x4-4)."
            )

    def validate_architecture(self):
        """Part of `@strict` validation."""
        self.validate_depth()
        if self.kv_sharing != "all" and self.base_plan().is_explicit:
            raise ValueError(
                f"kv_sharing={self.kv_sharing!r} needs a loop, and depth_plan={self.depth_plan!r} is an explicit order: "
                "use 'all', or write a plan such as Loop(4-4x4-4)."
            )
        require_int("num_key_value_heads", self.num_key_value_heads, 1)
        require_sign(self, ("rms_norm_eps", "head_dim"))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}."
            )

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        return {f"layers.*.{key}": how for key, how in self.layer_tp_plan.items()}

    @property
    def base_model_fsdp_plan(self) -> dict[str, str]:
        # A layer that runs several times stays gathered between its passes.
        order = self.base_plan().order
        kept = {f"layers.{i}": "keep_full_weight" for i in sorted(set(order)) if order.count(i) > 1}
        return {"embed_tokens": "free_full_weight", "layers.*": "free_full_weight", **kept, "norm": "keep_full_weight"}


__all__ = ["GrownLlamaConfig"]
