"""Ready configurations: the iso-depth family and the nine cells of RecurrentGPT."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_looped import LoopedGPTConfig, RecurrentGPTConfig
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
}
CELLS = {  # heads of 64, layers of the dense model, and the layout at equal FLOPs and at equal parameters
    "small": (12, 12, {"isoflops": (1, 1, 10, 1), "isoparams": (1, 10, 10, 1)}),
    "medium": (16, 24, {"isoflops": (2, 5, 4, 2), "isoparams": (2, 20, 4, 2)}),
    "large": (20, 36, {"isoflops": (1, 5, 6, 5), "isoparams": (3, 30, 6, 3)}),
}


def of_the_paper(name: str) -> LoopedGPTConfig | RecurrentGPTConfig:
    """The configuration of a folder, from its name alone."""
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


@pytest.mark.parametrize("scale", CELLS)
def test_the_cells_of_a_scale_have_one_dense_twin_and_equal_depth_or_layers(scale):
    dense, isoflops, isoparams = (of_the_paper(f"recurrent-gpt-{scale}-{cell}") for cell in ("dense", *CELLS[scale][2]))
    layers = CELLS[scale][1]
    assert isoflops.dense_twin().to_dict() == isoparams.dense_twin().to_dict() == dense.to_dict()
    assert dense.num_hidden_layers == isoflops.num_hidden_layers == isoparams.depth_plan().unique_layers == layers


def test_every_published_size_has_a_ready_configuration():
    assert set(TOTALS) <= {path.parent.name for path in CONFIGURATIONS}


def test_iso_depth_takes_any_field_and_any_split():
    one_each = {"num_prelude_layers": 1, "num_coda_layers": 1}
    config = LoopedGPTConfig.iso_depth(6, 3, effective_depth=11, **one_each, vocab_size=100)
    assert str(config.depth_plan()) == "Loop(1-3x3-1)" and config.vocab_size == 100
    dense = LoopedGPTConfig.iso_depth(6, 1)
    assert str(dense.depth_plan()) == "20x1" and dense.injection == "none"


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
