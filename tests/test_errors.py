"""Malformed configurations and inputs: each gives one clear line that names the field, its value and a remedy."""

from collections.abc import Callable

import pytest
import torch
from conftest import tiny_config, tiny_model
from transformers import DynamicCache, StaticCache

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM


INPUT_IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
HYPER = {"injection": "hyperconnection"}


def config(**fields) -> Callable[[], LoopedGPTConfig]:
    return lambda: tiny_config(**fields)


def iso_depth(**arguments) -> Callable[[], LoopedGPTConfig]:
    return lambda: LoopedGPTConfig.iso_depth(**{"size": 10, "num_recurrences": 4, **arguments})


def forward(model_fields: dict | None = None, **arguments) -> Callable[[], object]:
    return lambda: tiny_model(**model_fields or {})(**{"input_ids": INPUT_IDS, **arguments})


def generate(**arguments) -> Callable[[], object]:
    return lambda: tiny_model().generate(INPUT_IDS[:1], max_new_tokens=2, **arguments)


def both_inputs():
    model = tiny_model()
    model(input_ids=INPUT_IDS, inputs_embeds=model.get_input_embeddings()(INPUT_IDS))


def set_then(use: Callable[[LoopedGPTConfig], object], **fields) -> Callable[[], object]:
    """A value that is assigned to a finished configuration, which then builds a model or is asked for its depth."""

    def run():
        finished = tiny_config()
        for name, value in fields.items():
            setattr(finished, name, value)
        use(finished)

    return run


def small_cache(cache_class: type, **options) -> Callable[[], object]:
    return lambda: forward(cache=cache_class(config=tiny_config(), **options), num_recurrences=5)()


def deeper_than_the_cache(slots: int) -> None:
    """Two recurrences for the prompt, then three for the next token, which the third would attend to alone."""
    model = tiny_model()
    cache = DynamicCache(config=model.config.cache_config(slots))
    model(INPUT_IDS, cache=cache, num_recurrences=2)
    model(INPUT_IDS[:, :1], cache=cache, num_recurrences=3)


CASES = {
    # Configurations: types
    "hidden_size as text": (config(hidden_size="64"), ["hidden_size", "'64'", "int"]),
    "vocab_size as float": (config(vocab_size=97.0), ["vocab_size", "97.0", "int"]),
    "num_recurrences as float": (config(num_recurrences=2.5), ["num_recurrences", "2.5", "int"]),
    "num_recurrences as bool": (config(num_recurrences=True), ["num_recurrences", "True", "int"]),
    "kv_sharing as float": (config(kv_sharing=1.5), ["kv_sharing", "1.5", "str", "int"]),
    "backprop_recurrences as text": (config(backprop_recurrences="all"), ["backprop_recurrences", "'all'", "None"]),
    # Configurations: values
    "no recurrence": (config(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
    "no trained recurrence": (config(trained_recurrences=0), ["trained_recurrences=0", "at least 1"]),
    "no core layer": (config(num_core_layers=0), ["num_core_layers=0", "at least 1"]),
    "negative prelude": (config(num_prelude_layers=-1), ["num_prelude_layers=-1", "at least 0"]),
    "no vocabulary": (config(vocab_size=0), ["vocab_size=0", "at least 1"]),
    "heads that do not divide": (config(num_attention_heads=5), ["hidden_size=64", "num_attention_heads=5", "times"]),
    "odd head size": (config(num_attention_heads=64), ["hidden_size=64", "num_attention_heads=64", "even head size"]),
    "key-value heads": (config(num_key_value_heads=3), ["num_key_value_heads=3", "divide", "num_attention_heads=4"]),
    "unknown injection": (config(injection="gated"), ["injection='gated'", "linear, additive, none, hyperconnection"]),
    "kv_sharing of nothing": (config(kv_sharing=0), ["kv_sharing=0", "at least 1", "'all'"]),
    "unknown kv_sharing": (config(kv_sharing="some"), ["kv_sharing='some'", "at least 1", "'all'"]),
    "no backpropagation": (config(backprop_recurrences=0), ["backprop_recurrences=0", "at least 1", "None"]),
    "one lane": (config(**HYPER, num_lanes=1), ["num_lanes=1", "at least 2", "hyperconnection"]),
    "truncated hyperconnection": (
        config(**HYPER, backprop_recurrences=2),
        ["backprop_recurrences=2", "num_recurrences=3", "hyperconnection", "None"],
    ),
    "hyperconnection beyond its weights": (
        config(**HYPER, num_recurrences=4, trained_recurrences=2),
        ["num_recurrences=4", "trained_recurrences=2", "hyperconnection"],
    ),
    "softcap of zero": (config(logit_softcap=0), ["logit_softcap=0", "positive", "None"]),
    "rotary dtype": (config(rotary_dtype="float16"), ["rotary_dtype='float16'", "'float32'", "'bfloat16'"]),
    "misspelt field": (config(num_recurence=3), ["'num_recurence'", "'num_recurrences'"]),
    # Configurations: depth
    "depth of no r": (config(num_hidden_layers=7), ["num_hidden_layers=7", "2 + 2 x num_recurrences"]),
    "depth below one pass": (config(num_hidden_layers=2), ["num_hidden_layers=2", "num_recurrences >= 1"]),
    "depth as text": (config(num_hidden_layers="eight"), ["num_hidden_layers='eight'", "whole number"]),
    "depth without a core": (config(num_core_layers=0, num_hidden_layers=8), ["num_core_layers=0", "at least 1"]),
    "iso_depth that does not split": (
        iso_depth(num_recurrences=5),
        ["num_recurrences=5", "16 layers", "1, 2, 4, 8, 16"],
    ),
    "iso_depth without room": (iso_depth(effective_depth=3), ["effective_depth=3", "prelude of 2", "coda of 2", "8"]),
    "iso_depth as text": (iso_depth(effective_depth="20"), ["effective_depth='20'", "whole number"]),
    "iso_depth of no size": (iso_depth(size=0), ["size=0", "at least 1"]),
    "assigned recurrences": (set_then(LoopedGPTForCausalLM, num_recurrences=0), ["num_recurrences=0", "at least 1"]),
    "assigned depth": (set_then(str, num_hidden_layers=7), ["num_hidden_layers=7", "2 + 2 x num_recurrences"]),
    # Inputs
    "forward without recurrence": (forward(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
    "forward with half a recurrence": (forward(num_recurrences=2.5), ["num_recurrences=2.5", "whole number"]),
    "forward with a tensor": (forward(num_recurrences=torch.tensor(2)), ["num_recurrences=tensor(2)", "whole number"]),
    "forward beyond the lanes": (
        forward(HYPER, num_recurrences=4),
        ["num_recurrences=4", "trained_recurrences=3", "hyperconnection"],
    ),
    "neither input": (forward(input_ids=None), ["exactly one of input_ids or inputs_embeds"]),
    "both inputs": (both_inputs, ["exactly one of input_ids or inputs_embeds"]),
    "generate without recurrence": (generate(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
    "generate misspelt": (generate(num_recurrence=2), ["'num_recurrence'"]),
    "draft of no depth": (generate(assistant_early_exit=5), ["num_hidden_layers=5", "2 + 2 x num_recurrences"]),
    "small dynamic cache": (small_cache(DynamicCache), ["8 slots", "num_recurrences=5 needs 12", "cache_config(5)"]),
    "small static cache": (
        small_cache(StaticCache, max_cache_len=20),
        ["8 slots", "num_recurrences=5 needs 12", "cache_config(5)"],
    ),
    "shallower cache": (
        lambda: deeper_than_the_cache(slots=3),
        ["num_recurrences=3", "9 earlier tokens", "pass 3 has seen 0", "start a new cache"],
    ),
    "shallower and smaller cache": (
        lambda: deeper_than_the_cache(slots=2),
        ["6 slots", "num_recurrences=3 needs 8", "cache_config(3)"],
    ),
}


@pytest.mark.parametrize(("malformed", "words"), CASES.values(), ids=CASES)
def test_malformed_configs_and_inputs_give_one_clear_line(malformed: Callable[[], object], words: list[str]):
    with pytest.raises(ValueError) as error:
        malformed()
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "<class" not in message and len(message) < 250, message
