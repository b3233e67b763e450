"""
transformers' own model tests on the families here and on the native Llama, from one harness, so that outcomes compare.

`../test_upstream.py` puts this file among the tests of transformers' sdist and runs one class per process; elsewhere
its relative imports find nothing.
"""

import unittest

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

import modeling_looped

from . import test_modeling_common
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask


LOOP = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1, "num_recurrences": 2}
# By the start of its class names: where a family is, and fields besides those of `SmallModel`.
FAMILIES = {
    "Llama": (transformers, {"num_hidden_layers": 2, "num_key_value_heads": 2}),
    "LoopedGPT": (modeling_looped, {**LOOP, "num_key_value_heads": 2}),
    "RecurrentGPT": (modeling_looped, LOOP),
    "MixtureOfRecursions": (modeling_looped, LOOP),
    "GrownLlama": (modeling_looped, {"depth_plan": "Loop(1-1x2-1)", "num_key_value_heads": 2}),
}
# Of each head, the table of class names by which the suite decides which labels it takes.
HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


def set_epsilon(config: PreTrainedConfig) -> None:
    """In place of one that gives every configuration the names of all models' epsilons, most of them misspelt here."""
    for name in ("rms_norm_eps", "layer_norm_eps"):
        if hasattr(config, name):
            setattr(config, name, 1.0)


test_modeling_common.set_config_for_less_flaky_test = set_epsilon


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
        # A width that the default number of heads of every family divides.
        self.config_tester = ConfigTester(self, config_class=self.config_class, hidden_size=960)

    def test_config(self):
        self.config_tester.run_common_tests()


for family, (package, fields) in FAMILIES.items():
    config_class = getattr(package, f"{family}Config")
    for head, table in HEADS.items():
        getattr(modeling_auto, table)[config_class.model_type] = family + head
    globals()[f"{family}Test"] = type(
        f"{family}Test",
        (Suite, unittest.TestCase),
        {
            "__module__": __name__,
            "config_class": config_class,
            "fields": fields,
            "all_model_classes": tuple(getattr(package, family + head) for head in HEADS),
        },
    )
