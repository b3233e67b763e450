"""Malformed configurations and inputs: each gives one clear line that names the field, its value and a remedy."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from conftest import HEAVY_TAIL, TINY_CONFIGS, TINY_MODELS
from transformers import DynamicCache, StaticCache

from modeling_looped import LoopedGPTConfig


INPUT_IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
HYPER = {"injection": "hyperconnection"}
LORA = {"lora_rank": 4}
PLAN, ORDER = "Loop(1-2x3-1)", "0 1 0 2"
DENSE = {"num_prelude_layers": 4, "num_core_layers": 0, "num_coda_layers": 0, "num_recurrences": 1}
Malformed = Callable[[SimpleNamespace], object]  # of a family's `config` and `model`, which take fields


def config(**fields) -> Malformed:
    return lambda tiny: tiny.config(**fields)


def iso_depth(**arguments) -> Malformed:
    return lambda tiny: LoopedGPTConfig.iso_depth(**{"size": 10, "num_recurrences": 4, **arguments})


def forward(model_fields: dict | None = None, **arguments) -> Malformed:
    return lambda tiny: tiny.model(**model_fields or {})(**{"input_ids": INPUT_IDS, **arguments})


def generate(model_fields: dict | None = None, **arguments) -> Malformed:
    settings = {"max_new_tokens": 2, **arguments}
    return lambda tiny: tiny.model(**model_fields or {}).generate(INPUT_IDS[:1], **settings)


def both_inputs(tiny):
    model = tiny.model()
    model(input_ids=INPUT_IDS, inputs_embeds=model.get_input_embeddings()(INPUT_IDS))


def set_then(use: Callable, **fields) -> Malformed:
    """A value that is assigned to a finished configuration, which `use` then gets, with the family."""

    def run(tiny):
        finished = tiny.config()
        for name, value in fields.items():
            setattr(finished, name, value)
        use(tiny, finished)

    return run


def build(tiny, finished) -> None:
    type(tiny.model())(finished)


def small_cache(cache_class: type, **options) -> Malformed:
    return lambda tiny: forward(cache=cache_class(config=tiny.config(), **options), num_recurrences=5)(tiny)


def deeper_than_the_cache(slots: int) -> Malformed:
    """Two recurrences for the prompt, then three for the next token, which the third would attend to alone."""

    def run(tiny):
        model = tiny.model()
        cache = DynamicCache(config=model.config.cache_config(slots))
        model(INPUT_IDS, cache=cache, num_recurrences=2)
        model(INPUT_IDS[:, :1], cache=cache, num_recurrences=3)

    return run


def on_a_filled_cache(**arguments) -> Malformed:
    def run(tiny):
        model = tiny.model()
        model(INPUT_IDS[:, :1], cache=model(INPUT_IDS, use_cache=True).cache, **arguments)

    return run


def in_training(checkpointing: dict, **fields) -> Malformed:
    def run(tiny):
        model = tiny.model(**fields).train()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=checkpointing)
        model(INPUT_IDS)

    return run


# Of every family
COMMON = {
    # Configurations: types
    "hidden_size as text": (config(hidden_size="64"), ["hidden_size", "'64'", "int"]),
    "vocab_size as float": (config(vocab_size=97.0), ["vocab_size", "97.0", "int"]),
    "num_recurrences as float": (config(num_recurrences=2.5), ["num_recurrences", "2.5", "int"]),
    "num_recurrences as bool": (config(num_recurrences=True), ["num_recurrences", "True", "int"]),
    "kv_sharing as float": (config(kv_sharing=1.5), ["kv_sharing", "1.5", "str"]),
    # Configurations: values
    "no trained recurrence": (config(trained_recurrences=0), ["trained_recurrences=0", "at least 1"]),
    "negative prelude": (config(num_prelude_layers=-1), ["num_prelude_layers=-1", "at least 0"]),
    "no vocabulary": (config(vocab_size=0), ["vocab_size=0", "at least 1"]),
    "heads that do not divide": (config(num_attention_heads=5), ["hidden_size=64", "num_attention_heads=5"]),
    "unknown kv_sharing": (config(kv_sharing="some"), ["kv_sharing='some'", "'all'", "'first'"]),
    "misspelt field": (config(num_recurence=3), ["'num_recurence'", "'num_recurrences'"]),
    # Configurations: depth
    "depth of no r": (config(num_hidden_layers=7), ["num_hidden_layers=7", "2 + 2 x num_recurrences"]),
    "depth as text": (config(num_hidden_layers="eight"), ["num_hidden_layers='eight'", "whole number"]),
    "assigned recurrences": (set_then(build, num_recurrences=-1), ["num_recurrences=-1", "at least"]),
    "assigned depth": (set_then(lambda *_: None, num_hidden_layers=7), ["num_hidden_layers=7", "2 + 2 x"]),
    # Inputs
    "forward with half a recurrence": (forward(num_recurrences=2.5), ["num_recurrences=2.5", "whole number"]),
    "forward with a tensor": (forward(num_recurrences=torch.tensor(2)), ["num_recurrences=tensor(2)", "whole number"]),
    "neither input": (forward(input_ids=None), ["exactly one of input_ids or inputs_embeds"]),
    "both inputs": (both_inputs, ["exactly one of input_ids or inputs_embeds"]),
    "generate without recurrence": (generate(num_recurrences=-1), ["num_recurrences=-1", "at least"]),
    "generate misspelt": (generate(num_recurrence=2), ["'num_recurrence'"]),
    "draft of no depth": (generate(assistant_early_exit=5), ["num_hidden_layers=5", "2 + 2 x num_recurrences"]),
    "exits on a cache": (on_a_filled_cache(output_exits=True), ["output_exits=True", "leave the cache out"]),
    "shallower cache": (
        deeper_than_the_cache(slots=3),
        ["num_recurrences=3", "9 earlier tokens", "pass 3 has seen 0", "start a new cache"],
    ),
    "shallower and smaller cache": (
        deeper_than_the_cache(slots=2),
        ["6 slots", "num_recurrences=3 needs 8", "cache_config(3)"],
    ),
    "first under reentrant checkpointing": (
        in_training({"use_reentrant": True}, kv_sharing="first"),
        ["kv_sharing='first'", "reentrant", "'use_reentrant': False"],
    ),
}
# Of families that truncate backpropagation
TRUNCATING = {
    "backprop_recurrences as text": (config(backprop_recurrences="all"), ["backprop_recurrences", "'all'", "None"]),
    "no backpropagation": (config(backprop_recurrences=0), ["backprop_recurrences=0", "at least 1", "None"]),
}
# Of families that any number of passes suits
OF_ANY_DEPTH = {
    "kv_sharing of nothing": (config(kv_sharing=0), ["kv_sharing=0", "at least 1", "'all'", "'average'"]),
    "small dynamic cache": (small_cache(DynamicCache), ["8 slots", "num_recurrences=5 needs 12", "cache_config(5)"]),
    "small static cache": (
        small_cache(StaticCache, max_cache_len=20),
        ["8 slots", "num_recurrences=5 needs 12", "cache_config(5)"],
    ),
}
# Of one family
OWN = {
    "looped_gpt": {
        **TRUNCATING,
        **OF_ANY_DEPTH,
        "no recurrence": (config(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
        "no core layer": (config(num_core_layers=0), ["num_core_layers=0", "at least 1"]),
        "forward without recurrence": (forward(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
        "depth below one pass": (config(num_hidden_layers=2), ["num_hidden_layers=2", "num_recurrences >= 1"]),
        "depth without a core": (
            config(num_core_layers=0, num_hidden_layers=8),
            ["num_core_layers=0", "at least 1"],
        ),
        "odd head size": (
            config(num_attention_heads=64),
            ["hidden_size=64", "num_attention_heads=64", "even head size"],
        ),
        "key-value heads": (config(num_key_value_heads=3), ["num_key_value_heads=3", "num_attention_heads=4"]),
        "unknown injection": (
            config(injection="gated"),
            ["injection='gated'", "linear, additive, none, hyperconnection"],
        ),
        "one lane": (config(**HYPER, num_lanes=1), ["num_lanes=1", "at least 2", "hyperconnection"]),
        "truncated hyperconnection": (
            config(**HYPER, backprop_recurrences=2),
            ["backprop_recurrences=2", "num_recurrences=3", "hyperconnection", "None"],
        ),
        "hyperconnection beyond its weights": (
            config(**HYPER, num_recurrences=4, trained_recurrences=2),
            ["num_recurrences=4", "trained_recurrences=2", "hyperconnection"],
        ),
        "forward beyond the lanes": (
            forward(HYPER, num_recurrences=4),
            ["num_recurrences=4", "trained_recurrences=3", "hyperconnection"],
        ),
        "softcap of zero": (config(logit_softcap=0), ["logit_softcap=0", "positive", "None"]),
        "rotary dtype": (config(rotary_dtype="float16"), ["rotary_dtype='float16'", "'float32'", "'bfloat16'"]),
        "iso_depth that does not split": (
            iso_depth(num_recurrences=5),
            ["num_recurrences=5", "16 layers", "1, 2, 4, 8, 16"],
        ),
        "iso_depth without room": (
            iso_depth(effective_depth=3),
            ["effective_depth=3", "prelude of 2", "coda of 2", "8"],
        ),
        "iso_depth as text": (iso_depth(effective_depth="20"), ["effective_depth='20'", "whole number"]),
        "iso_depth of no size": (iso_depth(size=0), ["size=0", "at least 1"]),
    },
    "recurrent_gpt": {
        **TRUNCATING,
        **OF_ANY_DEPTH,
        "recurrences below zero": (config(num_recurrences=-1), ["num_recurrences=-1", "at least 0"]),
        "depth below no pass": (config(num_hidden_layers=1), ["num_hidden_layers=1", "num_recurrences >= 0"]),
        "no layer at all": (
            config(**{**DENSE, "num_prelude_layers": 0}),
            ["num_core_layers=0", "no model", "at least one layer"],
        ),
        "dense recurrences": (config(**{**DENSE, "num_recurrences": 2}), ["num_recurrences=2", "num_core_layers=0"]),
        "turning a dense model": (forward(DENSE, num_recurrences=2), ["num_recurrences=2", "dense", "leave it out"]),
        "no pass over a core alone": (
            forward({"num_prelude_layers": 0, "num_coda_layers": 0}, num_recurrences=0),
            ["num_recurrences=0", "prelude and coda", "at least 1"],
        ),
        "no dense layers": (config(num_dense_layers=0), ["num_dense_layers=0", "at least 1"]),
        "unknown injection": (config(injection="gated"), ["injection='gated'", "linear, additive, none"]),
        "unknown gate": (config(gate="linear"), ["gate='linear'", "mlp, none"]),
        "unknown anchor": (config(anchor="embed"), ["anchor='embed'", "prelude, embedding, previous, zeros"]),
        "unknown start": (config(state_init="zeros"), ["state_init='zeros'", "prelude, noise"]),
        "unknown shape of noise": (config(gate_noise_shape="row"), ["gate_noise_shape='row'", "token, element"]),
        "negative noise": (config(state_noise=-0.1), ["state_noise=-0.1", "not be negative", "0 turns it off"]),
        "temperature of zero": (config(gate_temperature=0), ["gate_temperature=0", "positive"]),
        "rank of zero": (config(lora_rank=0), ["lora_rank=0", "at least 1", "None"]),
        "forward beyond the low-rank weights": (
            forward(LORA, num_recurrences=4),
            ["num_recurrences=4", "trained_recurrences=3", "lora_rank=4"],
        ),
        "generate beyond the low-rank weights": (
            generate(LORA, num_recurrences=4),
            ["num_recurrences=4", "trained_recurrences=3", "lora_rank=4"],
        ),
        "heavy tail beyond the positions": (
            forward({**HEAVY_TAIL, "max_position_embeddings": 8}),
            ["Position 8", "max_position_embeddings=8", "Shorten"],
        ),
        "generate beyond the positions": (
            generate(max_new_tokens=130),
            ["139 tokens", "max_position_embeddings=128", "max_new_tokens"],
        ),
    },
    "grown_llama": {
        **OF_ANY_DEPTH,
        # In place of those of every family: here the counts follow from the plan.
        "num_recurrences as float": (config(num_recurrences=2.5), ["num_recurrences=2.5", "whole number"]),
        "num_recurrences as bool": (config(num_recurrences=True), ["num_recurrences=True", "whole number"]),
        "negative prelude": (
            config(depth_plan=PLAN, num_prelude_layers=-1),
            ["num_prelude_layers=-1", f"depth_plan='{PLAN}'", "change that"],
        ),
        "depth of no r": (
            config(num_hidden_layers=7),
            ["num_hidden_layers=7", f"depth_plan='{PLAN}'", "8 layers", "one of the two"],
        ),
        "core beside the plan": (
            config(depth_plan=PLAN, num_core_layers=2),
            ["num_core_layers=2", f"depth_plan='{PLAN}'", "change that"],
        ),
        "assigned coda": (
            set_then(lambda *_: None, num_coda_layers=2),
            ["num_coda_layers=2", f"depth_plan='{PLAN}'", "change that"],
        ),
        "no recurrence": (config(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
        "forward without recurrence": (forward(num_recurrences=0), ["num_recurrences=0", "at least 1"]),
        "depth of nothing": (config(depth_plan=None, num_hidden_layers=0), ["num_hidden_layers=0", "at least 1"]),
        "unknown plan": (config(depth_plan="Loop(4*6)"), ["'Loop(4*6)'", "'4*6'", "LxR"]),
        "plan without brackets": (config(depth_plan="Loop 4x6"), ["'Loop 4x6'", "brackets", "Loop(4x6)"]),
        "plan of no pass": (config(depth_plan="4x0"), ["'4x0'", "at least 1"]),
        "plan as number": (config(depth_plan=46), ["depth_plan=46", "str"]),
        "assigned plan": (set_then(build, depth_plan="Loop(4*6)"), ["'Loop(4*6)'", "'4*6'", "LxR"]),
        "turning an order": (
            config(depth_plan=ORDER, num_recurrences=2),
            ["num_recurrences=2", f"depth_plan='{ORDER}'", "leave it out"],
        ),
        "forward that turns an order": (
            forward({"depth_plan": ORDER}, num_recurrences=2),
            ["num_recurrences=2", f"depth_plan='{ORDER}'", "leave it out"],
        ),
        "generate that turns an order": (
            generate({"depth_plan": ORDER}, num_recurrences=2),
            ["num_recurrences=2", f"depth_plan='{ORDER}'", "leave it out"],
        ),
        "sliding window": (config(sliding_window=16), ["sliding_window", "16", "attend further"]),
        "no head": (config(num_attention_heads=0), ["num_attention_heads=0", "at least 1"]),
        "key-value heads": (config(num_key_value_heads=3), ["num_key_value_heads=3", "num_attention_heads=4"]),
        "head of no size": (config(head_dim=0), ["head_dim=0", "positive"]),
        "odd head size": (config(head_dim=7), ["head_dim", "7", "even"]),
        "history as text": (config(history="lidas"), ["history='lidas'", "list[dict]"]),
    },
}
CASES = [
    pytest.param(family, *case, id=f"{family}: {name}")
    for family, own in OWN.items()
    for name, case in {**COMMON, **own}.items()
]


@pytest.mark.parametrize(("family", "malformed", "words"), CASES)
def test_malformed_configs_and_inputs_give_one_clear_line(family: str, malformed: Malformed, words: list[str]):
    with pytest.raises(ValueError) as error:
        malformed(SimpleNamespace(config=TINY_CONFIGS[family], model=TINY_MODELS[family]))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and "<class" not in message and len(message) < 250, message
