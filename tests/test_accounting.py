"""Exact integers of the paper's tables."""

import pytest
import torch
from conftest import INJECTIONS, tiny_config, tiny_grown_config
from transformers import DynamicCache

from modeling_looped import (
    GrownLlamaConfig,
    GrownLlamaForCausalLM,
    LoopedGPTConfig,
    LoopedGPTForCausalLM,
    MixtureOfRecursionsConfig,
    MixtureOfRecursionsForCausalLM,
    RecurrentGPTConfig,
    RecurrentGPTForCausalLM,
)
from modeling_looped.accounting import (
    accounting_table,
    dense_comparison,
    forward_flops_per_token,
    grown_flops_per_token,
    grown_training_flops,
    inference_bytes,
    kv_cache_bytes,
    paper_flops_per_token,
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


@pytest.mark.parametrize(
    ("family", "kv_sharing"),
    [(LoopedGPTForCausalLM, sharing) for sharing in ("all", 1, 2)]
    + [(RecurrentGPTForCausalLM, sharing) for sharing in ("all", "first", "average", "last")]
    + [(MixtureOfRecursionsForCausalLM, sharing) for sharing in ("all", "first")]
    + [(GrownLlamaForCausalLM, sharing) for sharing in ("all", 2, "first", "average")],
)
def test_cache_bytes_equal_a_filled_cache(family, kv_sharing):
    shape = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4}
    loop = {"num_core_layers": 2, "num_recurrences": 3}
    if family is GrownLlamaForCausalLM:  # with heads of another size than the width divided by their number
        loop = {"depth_plan": "Loop(1-2x3-1)", "intermediate_size": 172, "num_key_value_heads": 2, "head_dim": 24}
    config = family.config_class(**shape, **loop, kv_sharing=kv_sharing)
    model = family(config).eval()
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


def test_a_changed_configuration_is_counted_anew():
    config = tiny_config()
    before = parameter_counts(config)
    config.num_coda_layers += 1
    assert parameter_counts(config)["coda"] == 2 * before["coda"]
    config.tie_word_embeddings = True
    assert parameter_counts(config)["head"] == 0


# scale: width, heads, layers of the dense twin, layout at isoFLOPS and at isoPARAMS
RECURRENT_GPT = {
    "small": (768, 12, 12, (1, 1, 10, 1), (1, 10, 10, 1)),
    "medium": (1024, 16, 24, (2, 5, 4, 2), (2, 20, 4, 2)),
    "large": (1280, 20, 36, (1, 5, 6, 5), (3, 30, 6, 3)),
}


def recurrent_gpt(scale: str, iso_params: bool = False, **fields) -> RecurrentGPTConfig:
    width, heads, dense, *layouts = RECURRENT_GPT[scale]
    prelude, core, recurrences, coda = layouts[iso_params]
    layout = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_prelude_layers": prelude,
        "num_core_layers": core,
        "num_recurrences": recurrences,
        "num_coda_layers": coda,
        "num_dense_layers": dense,
    }
    return RecurrentGPTConfig(**{**layout, **fields})


@pytest.mark.parametrize("scale", RECURRENT_GPT)
@pytest.mark.parametrize("iso_params", [False, True])
def test_recurrent_gpt_is_blocks_and_one_injection(scale, iso_params):
    config = recurrent_gpt(scale, iso_params)
    counts, width = parameter_counts(config), config.hidden_size
    unique = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    assert counts["embedding"] == (50304 + 1024) * width and counts["head"] == 0
    assert counts["prelude"] + counts["core"] + counts["coda"] == unique * 12 * width**2
    assert counts["injection"] == 5 * width**2 + 5 * width
    assert counts["norms"] == (2 * unique + 1) * width
    assert counts["unique"] == sum(counts[part] for part in ("prelude", "core", "coda", "injection", "norms"))


@pytest.mark.parametrize(
    ("scale", "dense", "blocks", "overhead", "ratio", "training_ratio"),
    [
        ("small", "0.2076", "0.2076", "0.0590", "1.284", "0.781"),
        ("medium", "0.7046", "0.7046", "0.0419", "1.060", "0.725"),
        ("large", "1.6043", "1.6043", "0.0983", "1.061", "0.689"),
    ],
)
def test_recurrent_gpt_s_flops_table_comes_out_to_the_printed_digit(
    scale, dense, blocks, overhead, ratio, training_ratio
):
    row = dense_comparison(recurrent_gpt(scale))
    assert [f"{flops / 1e9:.4f}" for flops in (row.dense, row.blocks, row.overhead)] == [dense, blocks, overhead]
    assert [f"{share:.3f}" for share in (row.ratio, row.training_ratio)] == [ratio, training_ratio]


@pytest.mark.parametrize(("scale", "ratio"), [("small", "8.784"), ("medium", "3.560"), ("large", "5.228")])
def test_iso_params_costs_the_printed_ratio(scale, ratio):
    assert f"{dense_comparison(recurrent_gpt(scale, iso_params=True)).ratio:.3f}" == ratio


@pytest.mark.parametrize("recurrences", [0, 1, 4, 8])
def test_the_two_conventions_differ_by_head_and_norms(recurrences):
    config = recurrent_gpt("medium")
    width, blocks = 1024, 4 + 5 * recurrences
    paper = blocks * (24 * width**2 + 4 * 512 * width) + recurrences * 10 * width**2
    assert paper_flops_per_token(config, 512, recurrences) == paper
    iso_depth = paper + 2 * 50304 * width + blocks * 2 * 2 * width
    assert forward_flops_per_token(config, 512, recurrences) == iso_depth
    assert training_flops_per_token(config, 512, recurrences) == 3 * iso_depth


def test_low_rank_weights_of_a_pass_run_in_that_pass():
    plain, relaxed = (recurrent_gpt("small", lora_rank=rank) for rank in (None, 16))
    one_pass = 16 * (4 * (768 + 768) + 2 * (768 + 3072))
    assert parameter_counts(relaxed)["core"] == parameter_counts(plain)["core"] + 10 * one_pass
    for passes in (3, 10):
        more = 2 * passes * one_pass
        assert forward_flops_per_token(relaxed, num_recurrences=passes) == (
            forward_flops_per_token(plain, num_recurrences=passes) + more
        )
        assert paper_flops_per_token(relaxed, None, passes) == paper_flops_per_token(plain, None, passes) + more


def test_what_an_ablation_leaves_of_the_injection_is_counted():
    for fields, matrices in (({"gate": "none"}, 2), ({"injection": "additive"}, 3)):
        config = recurrent_gpt("small", **fields)
        assert dense_comparison(config).overhead == 10 * 2 * matrices * 768**2


@pytest.mark.parametrize(
    ("kv_sharing", "gib", "ratios"),
    [
        (None, ("0.754", "1.410", "3.660"), ("1.000", "1.000", "1.000")),
        ("all", ("0.412", "1.069", "3.319"), ("0.547", "0.758", "0.907")),
        ("average", ("0.354", "0.600", "1.444"), ("0.469", "0.425", "0.394")),
    ],
)
def test_medium_takes_the_printed_memory(kv_sharing, gib, ratios):
    dense = recurrent_gpt("medium").dense_twin()
    config = dense if kv_sharing is None else recurrent_gpt("medium", kv_sharing=kv_sharing)
    held, twin = ([inference_bytes(one, 1024, rows) for rows in (1, 8, 32)] for one in (config, dense))
    assert tuple(f"{size / 2**30:.3f}" for size in held) == gib
    assert tuple(f"{size / other:.3f}" for size, other in zip(held, twin)) == ratios


def test_the_table_of_a_recurrent_gpt_shows_both_conventions():
    table = accounting_table(recurrent_gpt("small"), [1, 10])
    general, paper = table.split("\n\n")[2:]
    assert "2604.21106" in general and "2608.15062" in paper
    assert paper.splitlines()[-1].split() == ["10", "0.2076", "0.2076", "0.0590", "1.284", "0.781"]
    assert "2608.15062" not in accounting_table(tiny_config())


def test_a_mixture_counts_the_tokens_that_a_pass_takes():
    shape = {"num_core_layers": 2, "num_recurrences": 3, "num_dense_layers": 8}
    config, width, length = MixtureOfRecursionsConfig(**shape), 768, 512
    counts = parameter_counts(config)
    assert counts["injection"] == 3 * width and counts["core"] == 2 * 12 * width**2
    once = forward_flops_per_token(RecurrentGPTConfig(**shape), length, 0)
    weights, attention = 2 * 2 * (12 * width**2 + 2 * width), 2 * 4 * width * length
    one, two = 1 + 2 / 3 + 1 / 3, 1 + 4 / 9 + 1 / 9
    routers = 2 * width * (1 + 1 + 2 / 3)
    assert forward_flops_per_token(config, length) == round(once + weights * one + attention * two + routers)
    assert training_flops_per_token(config, length) == round(3 * (once + weights * one + attention * two + routers))
    config.kv_sharing = "first"  # every pass's queries meet all keys of the first
    assert forward_flops_per_token(config, length) == round(once + weights * one + attention * one + routers)
    chosen = MixtureOfRecursionsConfig(**shape, routing="token_choice", kv_sharing="first")
    at_entry = round(once + weights * one + attention * one + 2 * 3 * width)
    assert forward_flops_per_token(chosen, length) == at_entry


def test_a_grown_llama_is_counted_as_the_built_model_whatever_names_its_layers():
    for plan, sections in (("Loop(1-2x3-1)", (1, 2, 1)), ("4x1", (0, 4, 0)), ("0 2 1 2", (3, 0, 0))):
        config = tiny_grown_config(depth_plan=plan, head_dim=24, attention_bias=True, tie_word_embeddings=True)
        with torch.device("meta"):
            model = GrownLlamaForCausalLM(config)
        counts = parameter_counts(config)
        layer = 64 * 24 * (4 + 2 + 2 + 4) + 3 * 64 * 172
        assert tuple(counts[section] for section in ("prelude", "core", "coda")) == tuple(n * layer for n in sections)
        assert counts["total"] == sum(p.numel() for p in model.parameters())
        biases = 24 * (4 + 2 + 2) + 64
        assert counts["norms"] == sum(sections) * (2 * 64 + biases) + 64
        assert (counts["embedding"], counts["head"], counts["injection"]) == (97 * 64, 0, 0)


@pytest.mark.parametrize(
    ("plan", "executed"),
    [("Loop(1-2x3-1)", 8), ("4x1", 4), ("Loop(4x2)", 8), ("0 1 0 2", 4), ("0 2", 2), ("0 1 2 1 2", 5)],
)
def test_flops_of_a_grown_llama_follow_the_executed_layers(plan, executed):
    config, length, attended = tiny_grown_config(depth_plan=plan, head_dim=24), 50, 4 * 24
    matrices = 64 * 24 * (4 + 2 + 2 + 4) + 3 * 64 * 172
    growing = executed * (6 * matrices + 12 * length * attended) + 6 * 97 * 64
    assert grown_flops_per_token(config, length) == growing
    norms = executed * 2 * 2 * 64  # which the iso-depth convention counts
    assert forward_flops_per_token(config, length) == growing // 3 + norms
    assert training_flops_per_token(config, length) == growing + 3 * norms


def test_more_recurrences_of_a_grown_llama_run_more_of_its_block():
    config = tiny_grown_config()
    deeper = tiny_grown_config(num_recurrences=5)
    for flops in (forward_flops_per_token, training_flops_per_token):
        assert flops(config, 50, 5) == flops(deeper, 50) > flops(config, 50)
    assert kv_cache_bytes(config, 7, num_recurrences=5) == kv_cache_bytes(deeper, 7)
    assert grown_flops_per_token(config, 50, 12) == grown_flops_per_token(deeper, 50)


def test_an_edit_of_the_plan_is_counted_while_it_lasts():
    config = tiny_grown_config(depth_plan="4x1")
    one_layer = forward_flops_per_token(config) - forward_flops_per_token(tiny_grown_config(depth_plan="3x1"))
    before = forward_flops_per_token(config), grown_flops_per_token(config)
    config.plan_edits = (("repeat", (1, 3, 2)), ("skip", (0, 1)))
    assert forward_flops_per_token(config) == before[0] + 3 * one_layer
    config.plan_edits = ()
    assert (forward_flops_per_token(config), grown_flops_per_token(config)) == before


# Section 4.3 of arXiv 2602.16490's specification: width, MLP width, query and key-value heads, layers, tokens of a step
SMOLLM = {"360m": (960, 2560, 15, 5, 32, 2**20), "1.7b": (2048, 8192, 32, 32, 24, 2**21)}
STEPS, GROWING_STEPS, BLOCK = 200_000, 170_000, 4


def smollm(scale: str, plan: str | None = None) -> GrownLlamaConfig:
    width, mlp, heads, kv_heads, layers, _ = SMOLLM[scale]
    return GrownLlamaConfig(
        vocab_size=49152,
        hidden_size=width,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        depth_plan=plan or f"{layers}x1",
        tie_word_embeddings=True,
    )


def stage_budgets(stages: int, alpha: int = 1, rounding: str = "floor") -> list[int]:
    """T_i = i^alpha / sum of all j^alpha, of the growing steps, rounded down or by largest remainder."""
    weights = [stage**alpha for stage in range(1, stages + 1)]
    budgets = [GROWING_STEPS * weight // sum(weights) for weight in weights]
    remainders = [GROWING_STEPS * weight % sum(weights) for weight in weights]
    if rounding == "largest_remainder":
        largest = sorted(range(stages), key=lambda stage: -remainders[stage])
        for stage in largest[: GROWING_STEPS - sum(budgets)]:
            budgets[stage] += 1
    return budgets


def trained(scale: str, plan: str | None = None, budgets: tuple | list = (), block: int = BLOCK) -> int:
    return grown_training_flops(smollm(scale, plan), budgets, block, STEPS, SMOLLM[scale][-1], 2048)


@pytest.mark.parametrize(
    ("scale", "standard", "floor", "largest_remainder", "ratio", "saved"),
    [
        ("360m", "613527.488", "476147.897", "476144.434", "1.289", "0.7761"),
        ("1.7b", "4813222.102", "3736608.182", "3736573.983", "1.288", "0.7763"),
    ],
)
def test_the_flops_of_growing_come_out_to_the_printed_digit(
    scale, standard, floor, largest_remainder, ratio, saved
):
    stages = SMOLLM[scale][4] // BLOCK
    whole, grown = trained(scale), trained(scale, budgets=stage_budgets(stages))
    remainder = trained(scale, budgets=stage_budgets(stages, rounding="largest_remainder"))
    assert [f"{flops / 1e15:.3f}" for flops in (whole, grown, remainder)] == [standard, floor, largest_remainder]
    assert [f"{whole / grown:.3f}", f"{grown / whole:.4f}"] == [ratio, saved]


@pytest.mark.parametrize(
    ("scale", "plan", "training", "inference"),
    [
        ("360m", "4x1", "1.286e+20", "2.144e+14"),
        ("360m", "8x1", "1.979e+20", "3.299e+14"),
        ("360m", "16x1", "3.365e+20", "5.608e+14"),
        ("360m", "32x1", "6.135e+20", "1.0225e+15"),
        ("1.7b", "4x1", "1.013e+21", "1.689e+15"),
        ("1.7b", "12x1", "2.533e+21", "4.222e+15"),
        ("1.7b", "24x1", "4.813e+21", "8.022e+15"),
    ],
)
def test_the_flops_of_every_depth_come_out_as_printed_and_training_is_600000_forwards(scale, plan, training, inference):
    total = trained(scale, plan)
    forward = grown_flops_per_token(smollm(scale, plan), 2048) * SMOLLM[scale][-1] / 3
    assert [f"{total:.3e}", f"{forward:.{len(inference) - 6}e}"] == [training, inference]
    assert total == 600_000 * forward


@pytest.mark.parametrize(("plan", "scale"), [("Loop(4x8)", "360m"), ("Loop(4x6)", "1.7b"), ("Loop(4-4x4-4)", "1.7b")])
def test_a_loop_costs_what_the_untied_model_of_its_depth_costs(plan, scale):
    assert trained(scale, plan) == trained(scale)


@pytest.mark.parametrize(("alpha", "ratio"), [(0, "0.6645"), (1, "0.7763"), (2, "0.8451"), (3, "0.8871")])
def test_steeper_schedules_save_what_is_printed(alpha, ratio):
    assert f"{trained('1.7b', budgets=stage_budgets(6, alpha)) / trained('1.7b'):.4f}" == ratio


def test_a_retrofitted_loop_costs_what_is_printed():
    retrofitted, standard = "Loop(8-4x2-12)", trained("1.7b")
    assert smollm("1.7b", retrofitted).num_hidden_layers == 28
    assert f"{trained('1.7b', retrofitted, stage_budgets(6)) / standard:.3f}" == "0.800"
    assert f"{trained('1.7b', retrofitted, [GROWING_STEPS], 24) / standard:.3f}" == "1.024"
    for scale, plan, ratio in (("1.7b", retrofitted, "1.158"), ("360m", "Loop(8-4x2-20)", "1.113")):
        more, base = (grown_flops_per_token(smollm(scale, one), 2048) for one in (plan, None))
        assert f"{more / base:.3f}" == ratio


def test_stages_longer_than_the_run_are_refused():
    with pytest.raises(ValueError, match=r"budgets=\[6, 5\] are 11 steps, more than total_steps=10"):
        grown_training_flops(smollm("360m"), [6, 5], 4, 10, 1)


def test_the_table_of_a_grown_llama_shows_its_paper_s_convention():
    table = accounting_table(smollm("1.7b", "Loop(4-4x4-4)"), [4, 5])
    general, growing = table.split("\n\n")[2:]
    assert "2604.21106" in general and "2602.16490" in growing
    per_token = 28 * (6 * 67_108_864 + 12 * 2048 * 2048) + 6 * 49152 * 2048
    assert growing.splitlines()[-1].split() == ["5", "28", f"{per_token // 3:,}", f"{per_token:,}"]
    assert "2602.16490" not in accounting_table(tiny_config())
