"""
transformers' own model tests on LoopedGPT and on the native Llama, from one harness, so that outcomes compare.

`../test_upstream.py` puts this file among the tests of transformers' sdist and runs one class per process; elsewhere
its relative imports find nothing.
"""

import unittest

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from modeling_looped import (
    LoopedGPTConfig,
    LoopedGPTForCausalLM,
    LoopedGPTForQuestionAnswering,
    LoopedGPTForSequenceClassification,
    LoopedGPTForTokenClassification,
    LoopedGPTModel,
)

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask


# The suite decides by class name, in these tables, which labels a head takes.
for table, head in {
    "MODEL_MAPPING_NAMES": "LoopedGPTModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "LoopedGPTForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "LoopedGPTForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "LoopedGPTForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "LoopedGPTForQuestionAnswering",
}.items():
    getattr(modeling_auto, table)["looped_gpt"] = head


class SmallModel:
    """What the suite asks about a model: a configuration, a batch, and their sizes."""

    batch_size, seq_length, vocab_size = 13, 7, 99
    hidden_size, num_attention_heads = 32, 4
    is_training = True

    def __init__(self, config_class: type, fields: dict):
        self.config_class, self.fields = config_class, fields
        self.num_hidden_layers = self.get_config().num_hidden_layers

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=64,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict]:
        shape = [self.batch_size, self.seq_length]
        # Without special tokens: a padding id in a row would move the position that classification reads.
        inputs = {"input_ids": ids_tensor(shape, self.vocab_size).clamp(min=3)}
        return self.get_config(), {**inputs, "attention_mask": random_attention_mask(shape)}


class Suite(ModelTesterMixin):
    config_class: type
    fields: dict

    def setUp(self):
        self.model_tester = SmallModel(self.config_class, self.fields)
        # A width that the default number of heads of both families divides.
        self.config_tester = ConfigTester(self, config_class=self.config_class, hidden_size=320)

    def test_config(self):
        self.config_tester.run_common_tests()


class LlamaTest(Suite, unittest.TestCase):
    config_class = LlamaConfig
    fields = {"num_hidden_layers": 2}
    all_model_classes = (
        LlamaModel,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaForQuestionAnswering,
    )


class LoopedGPTTest(Suite, unittest.TestCase):
    config_class = LoopedGPTConfig
    fields = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1, "num_recurrences": 2}
    all_model_classes = (
        LoopedGPTModel,
        LoopedGPTForCausalLM,
        LoopedGPTForSequenceClassification,
        LoopedGPTForTokenClassification,
        LoopedGPTForQuestionAnswering,
    )
