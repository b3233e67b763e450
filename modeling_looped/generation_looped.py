"""Generation with a number of recurrences per call: `model.generate(..., num_recurrences=8)`."""

import copy
import inspect

from transformers.generation import GenerationMixin
from transformers.utils import logging


logger = logging.get_logger(__name__)


class LoopedGenerationMixin(GenerationMixin):
    """What `generate` has to know about depth that can be turned. Everything else is transformers' own."""

    # False where attention needs more of a cache than keys and values.
    supports_continuous_batching = True

    def _prepare_generation_config(self, generation_config, **kwargs):
        # `GenerationConfig.update` swallows a keyword of the same name as one of its attributes: hand it on.
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        default = getattr(generation_config, "num_recurrences", None)
        if default is not None and model_kwargs.get("num_recurrences") is None:
            model_kwargs["num_recurrences"] = default
        return generation_config, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, mode, batch_size, max_cache_length):
        self._check_length(model_kwargs, max_cache_length)
        passes = self.config.recurrences_or_default(model_kwargs.get("num_recurrences"))
        compresses = self.config.kv_sharing != "first" and self.config.shares_kv(passes)
        if generation_config.use_cache is False and compresses:
            logger.warning_once(
                f"generate(use_cache=False) computes the exact function; with a cache, kv_sharing="
                f"{self.config.kv_sharing!r} compresses the keys and values of earlier tokens, and texts can differ."
            )
        config = self.config
        self.config = config.cache_config(passes)
        try:
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, mode, batch_size, max_cache_length
            )
        finally:
            self.config = config

    def _check_length(self, model_kwargs: dict, length: int) -> None:
        """Before any token is computed: whether every token of the longest row has a learned position."""
        most = self.config.max_position_embeddings
        if not self.config.learned_positions or length <= most:
            return
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            length -= mask.shape[1] - int(mask.sum(-1).max())
        if length > most:
            raise ValueError(
                f"The text may grow to {length + 1} tokens, and {type(self).__name__} has learned positions for "
                f"max_position_embeddings={most} (the last token needs none): lower max_new_tokens or shorten the prompt."
            )

    def _get_candidate_generator(self, *, generation_config, model_kwargs, assistant_model=None, **kwargs):
        if generation_config.assistant_early_exit is not None:
            # The draft's depth is `assistant_early_exit` executed layers, whatever the call or its config ask for.
            draft = copy.copy(self.config)
            draft.num_hidden_layers = generation_config.assistant_early_exit
            model_kwargs = {**model_kwargs, "num_recurrences": draft.num_recurrences}
        elif assistant_model is not None and "num_recurrences" not in inspect.signature(assistant_model.forward).parameters:
            model_kwargs = {key: value for key, value in model_kwargs.items() if key != "num_recurrences"}
        return super()._get_candidate_generator(
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            assistant_model=assistant_model,
            **kwargs,
        )

    def init_continuous_batching(self, *args, **kwargs):
        if not self.supports_continuous_batching:
            raise ValueError(f"{type(self).__name__} does not run under continuous batching: use generate.")
        if self.config.shares_kv():
            raise ValueError(
                f"Continuous batching needs the keys and values of every pass, and kv_sharing="
                f"{self.config.kv_sharing!r} keeps fewer than num_recurrences={self.config.num_recurrences}: "
                "set config.kv_sharing='all'."
            )
        return super().init_continuous_batching(*args, **kwargs)

    def generate_batch(self, inputs, generation_config=None, *args, num_recurrences=None, **kwargs):
        """
        transformers' continuous batching of `inputs`, lists of token ids, under a `generation_config`; with
        `num_recurrences` for this call, which its forwards cannot be given one by one.
        """
        if num_recurrences is None:
            num_recurrences = getattr(generation_config or self.generation_config, "num_recurrences", None)
        configured = self.config.num_recurrences
        if num_recurrences is not None:
            self.config.check_recurrences(num_recurrences)
            self.config.num_recurrences = num_recurrences
        try:
            return super().generate_batch(inputs, generation_config, *args, **kwargs)
        finally:
            self.config.num_recurrences = configured
