"""Exact integers of the paper's tables."""

import pytest
import torch
from conftest import INJECTIONS, tiny_config
from transformers import DynamicCache

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM
from modeling_looped.accounting import (
    forward_flops_per_token,
    kv_cache_bytes,
    parameter_counts,
    training_flops_per_token,
)


# size, recurrences, matrices, with norms, total with two embeddings of 32,064 rows, training FLOPs per token
ISO_DEPTH = [
    (6, 1, 35389440, 35405952, 60031104, 475047936),
    (6, 2, 21528576, 21538944, 46164096, 478586880),
    (6, 4, 14450688, 14457984, 39083136, 482125824),
    (6, 8, 10911744, 10917504, 35542656, 489203712),
    (10, 1, 98304000, 98331520, 139373440, 1027676160),
    (10, 2, 59801600, 59818880, 100860800, 1037506560),
    (10, 4, 40140800, 40152960, 81194880, 1047336960),
    (10, 8, 30310400, 30320000, 71361920, 1066997760),
    (20, 1, 393216000, 393271040, 475354880, 3235000320),
    (20, 4, 160563200, 160587520, 242671360, 3313643520),
    (34, 1, 1136394240, 1136487808, 1276030336, 8307062784),
    (34, 4, 464027648, 464068992, 603611520, 8534341632),
]


@pytest.mark.parametrize(("size", "recurrences", "matrices", "unique", "total", "flops"), ISO_DEPTH)
def test_the_paper_s_table_comes_out_to_the_integer(size, recurrences, matrices, unique, total, flops):
    config = LoopedGPTConfig.iso_depth(size, recurrences)
    counts = parameter_counts(config)
    assert sum(counts[part] for part in ("prelude", "core", "coda", "injection")) == matrices
    assert counts["unique"] == unique and counts["total"] == total
    assert training_flops_per_token(config, sequence_length=2048) == flops
    assert forward_flops_per_token(config) * 3 == flops


def test_truncated_backpropagation_and_hyperconnections_are_counted_as_the_official_code_does():
    truncated = {2: 793016320, 4: 799569920, 8: 812677120}
    for recurrences, flops in truncated.items():
        config = LoopedGPTConfig.iso_depth(10, recurrences, backprop_recurrences=recurrences // 2)
        assert training_flops_per_token(config) == flops
        assert forward_flops_per_token(config) * 3 == training_flops_per_token(config, backprop_recurrences=recurrences)
    lanes = {2: 1027737600, 4: 1027799040, 8: 1027921920}
    for recurrences, flops in lanes.items():
        config = LoopedGPTConfig.iso_depth(10, recurrences, injection="hyperconnection")
        assert training_flops_per_token(config) == flops
        assert parameter_counts(config)["injection"] == recurrences * 8


@pytest.mark.parametrize("size", [5, 7, 9, 11])
def test_odd_sizes_round_up_to_whole_heads(size):
    assert LoopedGPTConfig.iso_depth(size, 4).hidden_size == {5: 384, 7: 512, 9: 640, 11: 768}[size]


@pytest.mark.parametrize("injection", INJECTIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_counts_equal_the_built_model(injection, tied):
    config = tiny_config(injection=injection, tie_word_embeddings=tied, num_lanes=3, trained_recurrences=5)
    with torch.device("meta"):
        model = LoopedGPTForCausalLM(config)
    counts = parameter_counts(config)
    parts = {name: sum(p.numel() for p in getattr(model.model, name).parameters() if p.dim() > 1) for name in
             ("prelude", "core", "coda")}
    assert {name: counts[name] for name in parts} == parts
    assert counts["injection"] == sum(p.numel() for p in model.model.injection.parameters())
    assert counts["total"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kv_sharing", ["all", 1, 2])
def test_cache_bytes_equal_a_filled_cache(kv_sharing):
    config = tiny_config(kv_sharing=kv_sharing)
    model = LoopedGPTForCausalLM(config)
    with torch.no_grad():
        cache = model(torch.ones(2, 7, dtype=torch.long), use_cache=True, num_recurrences=3).cache
    assert isinstance(cache, DynamicCache)
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == kv_cache_bytes(config, 7, batch_size=2, bytes_per_value=4)


def test_a_budget_buys_the_paper_s_tokens():
    tokens = {1: 973078528, 2: 963903488, 4: 954728448, 8: 937164800}
    for recurrences, expected in tokens.items():
        flops = training_flops_per_token(LoopedGPTConfig.iso_depth(10, recurrences))
        assert round(1e18 / (flops * 262144)) * 262144 == expected
