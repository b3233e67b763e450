"""Ready configurations: the iso-depth family, the nine cells of RecurrentGPT, and SmolLM looped and shortened."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_looped import GrownLlamaConfig, LoopedGPTConfig, RecurrentGPTConfig
from modeling_looped.accounting import parameter_counts


CONFIGURATIONS = sorted((Path(__file__).resolve().parents[1] / "configuration").glob("*/config.json"))
TOTALS = {  # with two embeddings of 32,064 rows
    "looped-gpt-s6-r1": 60031104,
    "looped-gpt-s6-r4": 39083136,
    "looped-gpt-s10-r1": 139373440,
    "looped-gpt-s10-r2": 100860800,
    "looped-gpt-s10-r4": 81194880,
    "looped-gpt-s10-r8": 71361920,
    "looped-gpt-s20-r1": 475354880,
    "looped-gpt-s20-r4": 242671360,
    "looped-gpt-s34-r1": 1276030336,
    "looped-gpt-s34-r4": 603611520,
    # Section 3 of arXiv 2608.15062's specification.
    "recurrent-gpt-small-dense": 124373760,
    "recurrent-gpt-small-isoflops": 63611904,
    "recurrent-gpt-small-isoparams": 127326720,
    "recurrent-gpt-medium-dense": 354599936,
    "recurrent-gpt-medium-isoflops": 171073536,
    "recurrent-gpt-medium-isoparams": 359847936,
    "recurrent-gpt-large-dense": 773582080,
    "recurrent-gpt-large-isoflops": 290196480,
    "recurrent-gpt-large-isoparams": 781780480,
    # Section 1.1 of arXiv 2602.16490's specification. What MIDAS and LIDAS grow is the baseline in the end.
    "grown-llama-360m-baseline": 361821120,
    "grown-llama-360m-loop-4x8": 86516160,
    "grown-llama-360m-loop-8x4": 125845440,
    "grown-llama-360m-loop-16x2": 204504000,
    "grown-llama-360m-standard-4": 86516160,
    "grown-llama-360m-standard-8": 125845440,
    "grown-llama-360m-standard-16": 204504000,
    "grown-llama-1.7b-baseline": 1711376384,
    "grown-llama-1.7b-loop-4x6": 369117184,
    "grown-llama-1.7b-loop-12x2": 906020864,
    "grown-llama-1.7b-loop-4-4x4-4": 906020864,
    "grown-llama-1.7b-standard-4": 369117184,
    "grown-llama-1.7b-standard-12": 906020864,
}
DEPTHS = {  # unique and executed layers, from the same table
    "grown-llama-360m-baseline": (32, 32),
    "grown-llama-360m-loop-4x8": (4, 32),
    "grown-llama-360m-loop-8x4": (8, 32),
    "grown-llama-360m-loop-16x2": (16, 32),
    "grown-llama-360m-standard-4": (4, 4),
    "grown-llama-360m-standard-8": (8, 8),
    "grown-llama-360m-standard-16": (16, 16),
    "grown-llama-1.7b-baseline": (24, 24),
    "grown-llama-1.7b-loop-4x6": (4, 24),
    "grown-llama-1.7b-loop-12x2": (12, 24),
    "grown-llama-1.7b-loop-4-4x4-4": (12, 24),
    "grown-llama-1.7b-standard-4": (4, 4),
    "grown-llama-1.7b-standard-12": (12, 12),
}
CELLS = {  # heads of 64, layers of the dense model, and the layout at equal FLOPs and at equal parameters
    "small": (12, 12, {"isoflops": (1, 1, 10, 1), "isoparams": (1, 10, 10, 1)}),
    "medium": (16, 24, {"isoflops": (2, 5, 4, 2), "isoparams": (2, 20, 4, 2)}),
    "large": (20, 36, {"isoflops": (1, 5, 6, 5), "isoparams": (3, 30, 6, 3)}),
}
SMOLLM = {  # width, MLP width, query and key-value heads, layers of the baseline
    "360m": (960, 2560, 15, 5, 32),
    "1.7b": (2048, 8192, 32, 32, 24),
}


def of_the_paper(name: str) -> LoopedGPTConfig | RecurrentGPTConfig | GrownLlamaConfig:
    """The configuration of a folder, from its name alone."""
    if name.startswith("grown-llama"):
        scale, kind, *layout = name.removeprefix("grown-llama-").split("-", 2)
        width, mlp, heads, kv_heads, layers = SMOLLM[scale]
        plans = {"baseline": f"{layers}x1", "standard": f"{''.join(layout)}x1", "loop": f"Loop({''.join(layout)})"}
        return GrownLlamaConfig(
            vocab_size=49152,
            hidden_size=width,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            depth_plan=plans[kind],
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=True,
        )
    if name.startswith("looped-gpt"):
        size, recurrences = (int(part[1:]) for part in name.split("-")[2:])
        return LoopedGPTConfig.iso_depth(size, recurrences)
    scale, cell = name.split("-")[2:]
    heads, layers, layouts = CELLS[scale]
    prelude, core, recurrences, coda = layouts.get(cell, (layers, 0, 1, 0))
    return RecurrentGPTConfig(
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_prelude_layers=prelude,
        num_core_layers=core,
        num_coda_layers=coda,
        num_recurrences=recurrences,
        num_dense_layers=layers,
    )


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_a_ready_configuration_is_the_paper_s_and_builds(path):
    config, family = AutoConfig.from_pretrained(path.parent), of_the_paper(path.parent.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    of_the_file = {"architectures": [type(model).__name__], "_name_or_path": str(path.parent)}
    assert config.to_dict() == {**family.to_dict(), **of_the_file}
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == parameter_counts(config)["total"] == TOTALS.get(path.parent.name, total)


@pytest.mark.parametrize("name", DEPTHS)
def test_a_looped_or_shortened_smollm_stores_and_runs_the_printed_layers(name):
    config = AutoConfig.from_pretrained(CONFIGURATIONS[0].parents[1] / name)
    assert (config.num_unique_layers, config.num_hidden_layers) == DEPTHS[name]
    assert config.plan().unique_layers == config.num_unique_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(model.model.layers) == config.num_unique_layers
    assert (config.max_position_embeddings, config.head_dim) == (2048, 64)
    assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("scale", CELLS)
def test_the_cells_of_a_scale_have_one_dense_twin_and_equal_depth_or_layers(scale):
    dense, isoflops, isoparams = (of_the_paper(f"recurrent-gpt-{scale}-{cell}") for cell in ("dense", *CELLS[scale][2]))
    layers = CELLS[scale][1]
    assert isoflops.dense_twin().to_dict() == isoparams.dense_twin().to_dict() == dense.to_dict()
    assert dense.num_hidden_layers == isoflops.num_hidden_layers == isoparams.plan().unique_layers == layers


def test_every_published_size_has_a_ready_configuration():
    assert set(TOTALS) <= {path.parent.name for path in CONFIGURATIONS}


def test_iso_depth_takes_any_field_and_any_split():
    one_each = {"num_prelude_layers": 1, "num_coda_layers": 1}
    config = LoopedGPTConfig.iso_depth(6, 3, effective_depth=11, **one_each, vocab_size=100)
    assert str(config.plan()) == "Loop(1-3x3-1)" and config.vocab_size == 100
    dense = LoopedGPTConfig.iso_depth(6, 1)
    assert str(dense.plan()) == "20x1" and dense.injection == "none"


@pytest.mark.parametrize("recurrences", [3, 5, 32])
def test_an_impossible_split_names_the_possible_ones(recurrences):
    with pytest.raises(ValueError, match=r"choose one of \[1, 2, 4, 8, 16\]"):
        LoopedGPTConfig.iso_depth(10, recurrences)


def test_depth_is_executed_layers_and_can_be_set_through_them():
    config = LoopedGPTConfig.iso_depth(6, 4)
    assert config.num_hidden_layers == 20
    config.num_hidden_layers = 12
    assert config.num_recurrences == 2 and config.trained_recurrences == 4
    assert "num_hidden_layers" not in config.to_dict()
    assert LoopedGPTConfig(num_hidden_layers=28).trained_recurrences == 6
    exits = RecurrentGPTConfig(num_hidden_layers=2)
    assert (exits.num_recurrences, exits.trained_recurrences) == (0, 1)
    dense = RecurrentGPTConfig().dense_twin()
    dense.num_hidden_layers = 12  # what it is
    assert dense.num_recurrences == 1
