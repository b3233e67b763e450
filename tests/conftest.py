"""Small models that every test shares: random weights large enough for the layers to matter."""

import os
from pathlib import Path

import pytest
import torch

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM


os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tests run side by side, one process a core

SHARED = Path(__file__).resolve().parents[2] / "shared"
INJECTIONS = ("linear", "additive", "none", "hyperconnection")
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_prelude_layers": 1,
    "num_core_layers": 2,
    "num_coda_layers": 1,
    "num_recurrences": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def tiny_config(**fields) -> LoopedGPTConfig:
    """Loop(1-2x3-1), width 64, grouped-query attention, 97 tokens."""
    return LoopedGPTConfig(**{**TINY, **fields})


def randomise(model: torch.nn.Module, std: float = 0.2, seed: int = 0) -> torch.nn.Module:
    """Normal weights everywhere: at the published initialisation the head is almost silent and the loop idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


def tiny_model(seed: int = 0, **fields) -> LoopedGPTForCausalLM:
    return randomise(LoopedGPTForCausalLM(tiny_config(**fields)), seed=seed).eval()


@pytest.fixture
def shared() -> Path:
    """The folder of specifications and data beside a development checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder ../shared with the reference data, which is not part of the project")
    return SHARED
