"""Looped, recurrent-depth and depth-grown language models for transformers. Importing it registers them."""

import transformers

from . import modeling_grown_llama, modeling_looped_gpt, modeling_mixture_of_recursions, modeling_recurrent_gpt
from .configuration_grown_llama import GrownLlamaConfig
from .configuration_looped_gpt import LoopedGPTConfig
from .configuration_mixture_of_recursions import MixtureOfRecursionsConfig
from .configuration_recurrent_gpt import RecurrentGPTConfig
from .depth_plan import DepthPlan
from .modeling_grown_llama import (
    GrownLlamaForCausalLM,
    GrownLlamaForQuestionAnswering,
    GrownLlamaForSequenceClassification,
    GrownLlamaForTokenClassification,
    GrownLlamaModel,
    GrownLlamaPreTrainedModel,
)
from .modeling_looped_gpt import (
    LoopedGPTForCausalLM,
    LoopedGPTForQuestionAnswering,
    LoopedGPTForSequenceClassification,
    LoopedGPTForTokenClassification,
    LoopedGPTModel,
    LoopedGPTPreTrainedModel,
)
from .modeling_mixture_of_recursions import (
    MixtureOfRecursionsForCausalLM,
    MixtureOfRecursionsForQuestionAnswering,
    MixtureOfRecursionsForSequenceClassification,
    MixtureOfRecursionsForTokenClassification,
    MixtureOfRecursionsModel,
    MixtureOfRecursionsPreTrainedModel,
)
from .modeling_recurrent_gpt import (
    RecurrentGPTForCausalLM,
    RecurrentGPTForQuestionAnswering,
    RecurrentGPTForSequenceClassification,
    RecurrentGPTForTokenClassification,
    RecurrentGPTModel,
    RecurrentGPTPreTrainedModel,
)


__version__ = "0.1.0"

for _config, _models in (
    (LoopedGPTConfig, modeling_looped_gpt),
    (RecurrentGPTConfig, modeling_recurrent_gpt),
    (MixtureOfRecursionsConfig, modeling_mixture_of_recursions),
    (GrownLlamaConfig, modeling_grown_llama),
):
    transformers.AutoConfig.register(_config.model_type, _config)
    for _auto_class, _reference in _config.auto_classes.items():
        if _auto_class != "AutoConfig":
            getattr(transformers, _auto_class).register(_config, getattr(_models, _reference.split(".")[1]))
