"""Looped, recurrent-depth and depth-grown language models for transformers. Importing it registers them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_looped_gpt import LoopedGPTConfig
from .depth_plan import DepthPlan
from .modeling_looped_gpt import (
    LoopedGPTForCausalLM,
    LoopedGPTForQuestionAnswering,
    LoopedGPTForSequenceClassification,
    LoopedGPTForTokenClassification,
    LoopedGPTModel,
    LoopedGPTPreTrainedModel,
)


__version__ = "0.1.0"

AutoConfig.register("looped_gpt", LoopedGPTConfig)
AutoModel.register(LoopedGPTConfig, LoopedGPTModel)
AutoModelForCausalLM.register(LoopedGPTConfig, LoopedGPTForCausalLM)
AutoModelForSequenceClassification.register(LoopedGPTConfig, LoopedGPTForSequenceClassification)
AutoModelForTokenClassification.register(LoopedGPTConfig, LoopedGPTForTokenClassification)
AutoModelForQuestionAnswering.register(LoopedGPTConfig, LoopedGPTForQuestionAnswering)
