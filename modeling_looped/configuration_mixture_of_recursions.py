"""MixtureOfRecursions configuration: arXiv 2507.10524, section 13.2 of the specification of arXiv 2608.15062."""

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .configuration_looped import LoopedConfigMixin, one_sentence_errors, require_choice, require_int, require_sign


CHOICES = {
    "routing": ("expert_choice", "token_choice"),
    "router": ("linear", "mlp"),
    "router_function": ("sigmoid", "softmax"),
    "balancing": ("loss", "bias"),
}


@one_sentence_errors
@strict
class MixtureOfRecursionsConfig(LoopedConfigMixin, PreTrainedConfig):
    r"""
    A GPT-2 whose core runs up to `num_recurrences` times, and a router that decides for each token how often. The
    fields of shape are RecurrentGPT's.

    Args:
        vocab_size (`int`, defaults to 50304): Rows of the embedding, which is also the head.
        hidden_size (`int`, defaults to 768): Width d.
        intermediate_size (`int`, *optional*): Width of the GELU MLP, 4 * `hidden_size` by default.
        num_attention_heads (`int`, defaults to 12): Heads.
        num_prelude_layers (`int`, defaults to 1): Layers that run once, first.
        num_core_layers (`int`, defaults to 1): Layers that run up to `num_recurrences` times.
        num_coda_layers (`int`, defaults to 1): Layers that run once, last.
        num_recurrences (`int`, defaults to 10): The most passes over the core, at most `trained_recurrences`.
        trained_recurrences (`int`, *optional*):
            N, which the routers are built for, `num_recurrences` at construction by default. Pass i = 0, 1, ... has
            the capacity (N - i) / N.
        num_dense_layers (`int`, *optional*): As in `RecurrentGPTConfig`.
        routing (`str`, defaults to `"expert_choice"`):
            `"expert_choice"`: pass i takes the tokens with the highest logits among those that pass i - 1 took, as many
            as its capacity allows; outside training, and on a cache, which must not look ahead, those of probability
            above 1/2. `"token_choice"`: each token chooses its number of passes when it leaves the prelude.
        router (`str`, defaults to `"linear"`): `"linear"`, or an `"mlp"` with hidden width 2 d.
        router_function (`str`, *optional*): `"sigmoid"` or `"softmax"` weights of token choice, `"softmax"` by default.
        router_scale (`float`, *optional*): alpha, which scales the weights: 0.1, but 1 for softmax.
        router_temperature (`float`, defaults to 1.0): Divides the router's input.
        selection_loss (`float`, defaults to 0.001):
            Expert choice: weight of the cross-entropy between each pass's logits and who was taken.
        balancing (`str`, defaults to `"loss"`): Token choice: by a `"loss"`, or by a `"bias"` on the selection.
        balancing_loss (`float`, defaults to 0.1): Its weight.
        balancing_rate (`float`, defaults to 0.001): Step of the bias, once in a forward in training.
        z_loss (`float`, *optional*): Weight of the squared log partition of the logits: 0, in token choice 1e-5.
        kv_sharing (`str`, defaults to `"all"`):
            `"all"`: each pass attends to the keys and values of the tokens that it runs (recursion-wise caching).
            `"first"`: all attend to those of the first pass (recursive sharing).
        layer_norm_eps (`float`, defaults to 1e-5): Epsilon of every LayerNorm.
        initializer_range (`float`, defaults to 0.02): Deviation of the initial weights.
        max_position_embeddings (`int`, defaults to 1024): Learned positions; there are none beyond.
    """

    model_type = "mixture_of_recursions"
    keys_to_ignore_at_inference = ["cache", "recurrent_states", "exit_states", "auxiliary_loss"]
    learned_positions = True
    kv_strategies = ("all", "first")
    auto_classes = {
        "AutoConfig": "configuration_mixture_of_recursions.MixtureOfRecursionsConfig",
        "AutoModel": "modeling_mixture_of_recursions.MixtureOfRecursionsModel",
        "AutoModelForCausalLM": "modeling_mixture_of_recursions.MixtureOfRecursionsForCausalLM",
        "AutoModelForSequenceClassification": (
            "modeling_mixture_of_recursions.MixtureOfRecursionsForSequenceClassification"
        ),
        "AutoModelForTokenClassification": "modeling_mixture_of_recursions.MixtureOfRecursionsForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_mixture_of_recursions.MixtureOfRecursionsForQuestionAnswering",
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
    num_dense_layers: int | None = None
    routing: str = "expert_choice"
    router: str = "linear"
    router_function: str | None = None
    router_scale: float | int | None = None
    router_temperature: float | int = 1.0
    selection_loss: float | int = 0.001
    balancing: str = "loss"
    balancing_loss: float | int = 0.1
    balancing_rate: float | int = 0.001
    z_loss: float | int | None = None
    kv_sharing: str = "all"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1024
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        chooses = self.routing == "token_choice"
        if self.router_function is None:
            self.router_function = "softmax" if chooses else "sigmoid"
        if self.router_scale is None:
            self.router_scale = 1.0 if self.router_function == "softmax" else 0.1
        if self.z_loss is None:
            self.z_loss = 1e-5 if chooses else 0.0
        super().__post_init__(**kwargs)
        if self.num_dense_layers is None:
            self.num_dense_layers = self.effective_depth_if_valid()

    @classmethod
    def twin_of(cls, config: PreTrainedConfig, **changes) -> "MixtureOfRecursionsConfig":
        """The mixture with the layers, the passes and the vocabulary of a RecurrentGPT configuration."""
        common = cls.__annotations__.keys() & type(config).__annotations__.keys() - {"kv_sharing"}
        return cls(**{**{name: getattr(config, name) for name in common}, **changes})

    def capacity(self, recurrence: int, tokens):
        """How many of `tokens` tokens, a number or a tensor of them, a pass has room for; it takes one at least."""
        return (self.trained_recurrences - recurrence) * tokens // self.trained_recurrences

    def pass_shares(self, num_recurrences: int | None = None) -> tuple[float, ...]:
        passes, most = self.recurrences_or_default(num_recurrences), self.trained_recurrences
        return tuple((most - recurrence) / most for recurrence in range(passes))

    def weights_of_each_pass(self) -> str | None:
        return f"routing={self.routing!r}"

    def validate_architecture(self):
        """Called by transformers when a configuration is built, validated or saved."""
        self.validate_depth()
        require_int("num_dense_layers", self.num_dense_layers, 1)
        require_choice(self, CHOICES)
        if self.routing == "expert_choice" and self.router_function == "softmax":
            raise ValueError("router_function='softmax' needs routing='token_choice': passes take tokens one by one.")
        require_sign(
            self,
            ("router_scale", "router_temperature", "layer_norm_eps", "initializer_range"),
            or_zero=("selection_loss", "balancing_loss", "balancing_rate", "z_loss"),
        )


__all__ = ["MixtureOfRecursionsConfig"]
