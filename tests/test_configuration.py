"""Ready configurations and the iso-depth family."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_looped import LoopedGPTConfig
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
}


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.parent.name)
def test_a_ready_configuration_is_the_paper_s_and_builds(path):
    config = AutoConfig.from_pretrained(path.parent)
    size, recurrences = (int(part[1:]) for part in path.parent.name.split("-")[2:])
    family = LoopedGPTConfig.iso_depth(size, recurrences)
    of_the_file = {"architectures": ["LoopedGPTForCausalLM"], "_name_or_path": str(path.parent)}
    assert config.to_dict() == {**family.to_dict(), **of_the_file}
    assert config.num_hidden_layers == 20
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == parameter_counts(config)["total"] == TOTALS.get(path.parent.name, total)


def test_every_published_size_has_a_ready_configuration():
    assert set(TOTALS) <= {path.parent.name for path in CONFIGURATIONS}


def test_iso_depth_takes_any_field_and_any_split():
    config = LoopedGPTConfig.iso_depth(6, 3, effective_depth=11, num_prelude_layers=1, num_coda_layers=1, vocab_size=100)
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
