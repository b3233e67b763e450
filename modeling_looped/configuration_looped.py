"""What the configurations of all looped families share: the depth plan and what follows from it."""

import copy
from difflib import get_close_matches
from functools import wraps
from typing import ClassVar

from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError

from .supported_versions import SUPPORTED_TRANSFORMERS  # noqa: F401  first, so that its error is the first
from .depth_plan import DepthPlan


class ConfigurationError(StrictDataclassError, ValueError):
    """A configuration that cannot be built, in one sentence: the field, its value, and what would do."""


def one_sentence_errors(config_class: type) -> type:
    """Class decorator above `@strict`: its nested, two-line errors become one `ConfigurationError`."""

    def plain(method):
        @wraps(method)
        def wrapper(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except ConfigurationError:
                raise
            except StrictDataclassFieldValidationError:
                name, value = args  # types are checked in __setattr__ alone
                kind = config_class.__dataclass_fields__[name].type
                kind = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
                raise ConfigurationError(f"{config_class.__name__}: {name}={value!r} must be of type {kind}.") from None
            except StrictDataclassError as error:
                raise ConfigurationError(f"{config_class.__name__}: {error.__cause__ or error}") from None

        return wrapper

    for name in ("__init__", "__setattr__", "validate"):
        setattr(config_class, name, plain(getattr(config_class, name)))
    return config_class


def require_int(name: str, value, minimum: int, reason: str = "") -> None:
    """Raises `ValueError` unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {minimum}{reason}.")


def require_choice(config, choices: dict[str, tuple[str, ...]]) -> None:
    """Raises `ValueError` unless each field of `config` has one of its choices."""
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(f"{name}={getattr(config, name)!r} must be one of {', '.join(known)}.")


def require_sign(config, positive: tuple[str, ...], or_zero: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` unless the fields are positive, or, of those in `or_zero`, not negative."""
    for name in positive:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name}={getattr(config, name)} must be positive.")
    for name in or_zero:
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)} must not be negative: 0 turns it off.")


def check_savable(edits: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    """Raises `ValueError` for edits of a plan that a checkpoint cannot say; loops it can."""
    if other := [name for name, _ in edits if name != "repeat"]:
        raise ValueError(f"An intervention ({', '.join(other)}) is in force, which a checkpoint cannot hold: undo it first.")


def looped_layers(edits: tuple[tuple[str, tuple[int, ...]], ...]) -> list[list[int]]:
    """The loops among edits of a plan as a checkpoint says them: [start, stop, repeats] each."""
    return [list(arguments) for name, arguments in edits if name == "repeat" and arguments[2] > 0]


class LoopedConfigMixin:
    """
    Depth for a configuration with the fields `num_prelude_layers`, `num_core_layers`, `num_coda_layers`,
    `num_recurrences`, `trained_recurrences`, `backprop_recurrences` and `kv_sharing`. Everything about depth is asked
    of `plan()`.
    """

    # Edits of the plan, as `interventions` makes them for a while: (DepthPlan method, arguments).
    plan_edits: ClassVar[tuple[tuple[str, tuple], ...]] = ()

    # 0 in families whose coda can follow the prelude.
    min_recurrences: ClassVar[int] = 1
    min_core_layers: ClassVar[int] = 1
    # Of families without truncated backpropagation; a field elsewhere.
    backprop_recurrences = None
    # Whether positions have weights of their own, so that there are none beyond `max_position_embeddings`.
    learned_positions: ClassVar[bool] = False
    # The values of `kv_sharing` that the family knows, whole numbers of kept passes aside.
    kv_strategies: ClassVar[tuple[str, ...]] = ("all", "first", "average", "last")
    # One layer's tensor-parallel plan; the sections that exist get it (a plan must not name empty sections).
    layer_tp_plan: ClassVar[dict[str, str]] = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
        "mlp.up_proj": "colwise",
        "mlp.down_proj": "rowwise",
    }
    # The classes that a checkpoint's code offers to the Auto classes, whichever of them was saved.
    auto_classes: ClassVar[dict[str, str]] = {}

    def __post_init__(self, **kwargs):
        if (depth := kwargs.pop("num_hidden_layers", None)) is not None:
            self.num_hidden_layers = depth
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.trained_recurrences is None:
            self.trained_recurrences = max(1, self.num_recurrences)
        if kwargs.get("backprop_recurrences") is not None:
            raise ConfigurationError(
                f"backprop_recurrences={kwargs['backprop_recurrences']!r}: {type(self).__name__} backpropagates through all "
                "passes, so leave it out."
            )
        known = {*self.__dataclass_fields__, "num_recurrences", "num_hidden_layers"}  # also where they are properties
        for name in kwargs:
            near = get_close_matches(name, known, n=1, cutoff=0.85)
            if near and not hasattr(self, name):
                raise ConfigurationError(f"{type(self).__name__} has no field {name!r}: did you mean {near[0]!r}?")
        super().__post_init__(**kwargs)
        self.auto_map = dict(self.auto_classes)

    def plan(self, num_recurrences: int | None = None) -> DepthPlan:
        """The plan at `num_recurrences` passes over the core (the configured number by default)."""
        plan = self.base_plan(self.recurrences_or_default(num_recurrences))
        for edit, arguments in self.plan_edits:
            plan = getattr(plan, edit)(*arguments)
        return plan

    def base_plan(self, num_recurrences: int) -> DepthPlan:
        """`plan` without interventions."""
        prelude, core, coda = self.num_prelude_layers, self.num_core_layers, self.num_coda_layers
        if core == 0:  # dense
            return DepthPlan(range(prelude + coda), (0, prelude + coda, 1, 0), (prelude, prelude + coda))
        return DepthPlan.looped(prelude, core, num_recurrences, coda)

    def to_dict(self) -> dict:
        values = super().to_dict()
        if values.pop("plan_edits", None) and (loops := looped_layers(self.plan_edits)):
            values["looped_layers"] = loops
        return values

    def save_pretrained(self, *args, **kwargs):
        check_savable(self.plan_edits)
        return super().save_pretrained(*args, **kwargs)

    def recurrences_or_default(self, num_recurrences: int | None) -> int:
        return self.num_recurrences if num_recurrences is None else num_recurrences

    @property
    def num_hidden_layers(self) -> int:
        """Executed layers, which is what caches and recorded outputs count. Setting it turns the recurrences."""
        return self.plan().effective_depth

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int):
        require_int("num_hidden_layers", value, 1)
        if value == self.num_hidden_layers:
            return
        if self.plan_edits:
            raise ValueError(f"num_hidden_layers={value} cannot be set while an intervention edits the plan.")
        once = self.num_prelude_layers + self.num_coda_layers
        if self.num_core_layers == 0 and self.min_core_layers == 0:
            raise ValueError(f"num_hidden_layers={value} must be {self.num_hidden_layers}: this model has no core to turn.")
        require_int("num_core_layers", self.num_core_layers, 1)
        passes, rest = divmod(value - once, self.num_core_layers)
        if rest or passes < self.min_recurrences:
            raise ValueError(
                f"num_hidden_layers={value} is not {once} + {self.num_core_layers} x num_recurrences for any "
                f"num_recurrences >= {self.min_recurrences}: the layers that run once stay, and the core runs whole."
            )
        self.num_recurrences = passes

    def effective_depth_if_valid(self) -> int | None:
        """Executed layers, for defaults; `None` where a count is wrong, which `validate` will then say of the count."""
        counts = (self.num_prelude_layers, self.num_core_layers, self.num_coda_layers, self.num_recurrences)
        return self.num_hidden_layers if min(counts) >= 0 and max(counts[:3]) > 0 else None

    def kept_recurrences(self, num_recurrences: int | None = None) -> int:
        """Of how many passes a cache keeps the keys and values under `kv_sharing`."""
        passes = self.recurrences_or_default(num_recurrences)
        if self.kv_sharing == "all":
            return passes
        return min(passes, self.kv_sharing if isinstance(self.kv_sharing, int) else 1)

    def shares_kv(self, num_recurrences: int | None = None) -> bool:
        """Whether `num_recurrences` passes (the configured number by default) are more than the cache keeps."""
        return self.kept_recurrences(num_recurrences) < self.recurrences_or_default(num_recurrences)

    def cache_config(self, num_recurrences: int | None = None):
        """
        The configuration to build a cache with, `DynamicCache(config=model.config.cache_config(8))`, for
        `num_recurrences` passes and this configuration's `kv_sharing`.
        """
        config = copy.copy(self)
        config.num_recurrences = self.kept_recurrences(num_recurrences)
        return config

    def pass_shares(self, num_recurrences: int | None = None) -> tuple[float, ...]:
        """The share of the tokens that each pass over the core runs on."""
        return (1.0,) * self.recurrences_or_default(num_recurrences)

    def weights_of_each_pass(self) -> str | None:
        """What, if anything, gives every pass weights of its own, of which there are none beyond the trained ones."""
        return None

    def check_recurrences(self, num_recurrences: int) -> None:
        """Raises `ValueError` for a number of passes that this model cannot run."""
        require_int("num_recurrences", num_recurrences, self.min_recurrences)
        if self.num_core_layers == 0 and num_recurrences != self.num_recurrences:
            raise ValueError(f"num_recurrences={num_recurrences} turns nothing in a dense model: leave it out.")
        if num_recurrences == self.num_prelude_layers == self.num_coda_layers == 0:
            raise ValueError("num_recurrences=0 runs no layer in a model without prelude and coda: use at least 1.")
        if num_recurrences > self.trained_recurrences and (reason := self.weights_of_each_pass()):
            raise ValueError(
                f"num_recurrences={num_recurrences} exceeds trained_recurrences={self.trained_recurrences}: with "
                f"{reason} every pass has weights of its own, and there are none beyond."
            )

    def validate_depth(self) -> None:
        """The part of `validate_architecture` that all families have."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"):
            require_int(name, getattr(self, name), 1)
        for name in ("trained_recurrences", "max_position_embeddings"):
            require_int(name, getattr(self, name), 1)
        require_int("num_core_layers", self.num_core_layers, self.min_core_layers)
        require_int("num_recurrences", self.num_recurrences, self.min_recurrences)
        for name in ("num_prelude_layers", "num_coda_layers"):
            require_int(name, getattr(self, name), 0)
        if self.kv_sharing not in self.kv_strategies:
            known = ", ".join(map(repr, self.kv_strategies))
            if "last" not in self.kv_strategies:
                raise ValueError(f"kv_sharing={self.kv_sharing!r} must be one of {known}.")
            require_int("kv_sharing", self.kv_sharing, 1, f" (of passes to keep), or one of {known}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be num_attention_heads={self.num_attention_heads} times a whole "
                "head size."
            )
        if self.backprop_recurrences is not None:
            require_int("backprop_recurrences", self.backprop_recurrences, 1, ", or None for all of them")
        if self.num_core_layers > 0:
            self.check_recurrences(self.num_recurrences)

    @property
    def _sections(self) -> list[str]:
        return [name for name in ("prelude", "core", "coda") if getattr(self, f"num_{name}_layers") > 0]

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        return {f"{name}.*.{key}": how for name in self._sections for key, how in self.layer_tp_plan.items()}

    @property
    def base_model_fsdp_plan(self) -> dict[str, str]:
        # The core stays gathered between its passes: gathering it anew would cost num_recurrences all-gathers.
        layers = {f"{name}.*": "free_full_weight" for name in self._sections}
        if "core" in self._sections:
            layers["core.*"] = "keep_full_weight"
        return {"embed_tokens": "free_full_weight", **layers, "norm": "keep_full_weight"}
