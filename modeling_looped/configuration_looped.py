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


class LoopedConfigMixin:
    """
    Depth for a configuration with the fields `num_prelude_layers`, `num_core_layers`, `num_coda_layers`,
    `num_recurrences` and `kv_sharing`. Everything about depth is asked of `depth_plan()`.
    """

    # One layer's tensor-parallel plan; the sections that exist get it (a plan must not name empty sections).
    layer_tp_plan: ClassVar[dict[str, str]] = {}
    # The classes that a checkpoint's code offers to the Auto classes, whichever of them was saved.
    auto_classes: ClassVar[dict[str, str]] = {}

    def __post_init__(self, **kwargs):
        known = set(self.__dataclass_fields__)
        for name in kwargs:
            near = get_close_matches(name, known, n=1, cutoff=0.85)
            if near and not hasattr(self, name):
                raise ConfigurationError(f"{type(self).__name__} has no field {name!r}: did you mean {near[0]!r}?")
        super().__post_init__(**kwargs)
        self.auto_map = dict(self.auto_classes)

    def depth_plan(self, num_recurrences: int | None = None) -> DepthPlan:
        """The plan at `num_recurrences` passes over the core (the configured number by default)."""
        passes = self.num_recurrences if num_recurrences is None else num_recurrences
        return DepthPlan.looped(self.num_prelude_layers, self.num_core_layers, passes, self.num_coda_layers)

    @property
    def num_hidden_layers(self) -> int:
        """Executed layers, which is what caches and recorded outputs count. Setting it turns the recurrences."""
        return self.depth_plan().effective_depth

    @num_hidden_layers.setter
    def num_hidden_layers(self, value: int):
        require_int("num_hidden_layers", value, 1)
        require_int("num_core_layers", self.num_core_layers, 1)
        once = self.num_prelude_layers + self.num_coda_layers
        passes, rest = divmod(value - once, self.num_core_layers)
        if rest or passes < 1:
            raise ValueError(
                f"num_hidden_layers={value} is not {once} + {self.num_core_layers} x num_recurrences for any "
                "num_recurrences >= 1: the layers that run once stay, and the core runs whole."
            )
        self.num_recurrences = passes

    def cache_config(self, num_recurrences: int | None = None):
        """
        The configuration to build a cache with, `DynamicCache(config=model.config.cache_config(8))`, for
        `num_recurrences` passes and this configuration's `kv_sharing`.
        """
        config = copy.copy(self)
        passes = self.num_recurrences if num_recurrences is None else num_recurrences
        config.num_recurrences = passes if self.kv_sharing == "all" else min(passes, self.kv_sharing)
        return config

    def shares_kv(self, num_recurrences: int | None = None) -> bool:
        """Whether `num_recurrences` passes (the configured number by default) are more than the cache keeps."""
        passes = self.num_recurrences if num_recurrences is None else num_recurrences
        return self.kv_sharing != "all" and self.kv_sharing < passes

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
        return {"embed_tokens": "free_full_weight", **layers, "core.*": "keep_full_weight", "norm": "keep_full_weight"}
