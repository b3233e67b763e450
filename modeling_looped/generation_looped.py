"""Generation with a number of recurrences per call: `model.generate(..., num_recurrences=8)`."""

from transformers.generation import GenerationMixin
from transformers.utils import logging


logger = logging.get_logger(__name__)


class LoopedGenerationMixin(GenerationMixin):
    """What `generate` has to know about depth that can be turned. Everything else is transformers' own."""

    def _prepare_generation_config(self, generation_config, **kwargs):
        # `GenerationConfig.update` swallows a keyword of the same name as one of its attributes: hand it on.
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        default = getattr(generation_config, "num_recurrences", None)
        if default is not None and model_kwargs.get("num_recurrences") is None:
            model_kwargs["num_recurrences"] = default
        return generation_config, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if generation_config.use_cache is False and self.config.kv_sharing != "all":
            logger.warning_once(
                f"generate(use_cache=False) computes the exact function; with a cache, kv_sharing="
                f"{self.config.kv_sharing!r} compresses the keys and values of earlier tokens, and texts can differ."
            )
        config = self.config
        self.config = config.cache_config(model_kwargs.get("num_recurrences"))
        try:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        finally:
            self.config = config

    def _get_candidate_generator(self, *, generation_config, model_kwargs, **kwargs):
        if generation_config.assistant_early_exit is not None:
            # The draft's depth is `assistant_early_exit` executed layers; the call's own is the verifier's.
            model_kwargs = {key: value for key, value in model_kwargs.items() if key != "num_recurrences"}
        return super()._get_candidate_generator(
            generation_config=generation_config, model_kwargs=model_kwargs, **kwargs
        )
