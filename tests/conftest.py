"""Small models that every test shares: random weights large enough for the layers to matter."""

import os
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read while the libraries below are imported

import pytest  # noqa: E402
import torch  # noqa: E402

from modeling_looped import (  # noqa: E402
    GrownLlamaConfig,
    GrownLlamaForCausalLM,
    LoopedGPTConfig,
    LoopedGPTForCausalLM,
    MixtureOfRecursionsConfig,
    MixtureOfRecursionsForCausalLM,
    RecurrentGPTConfig,
    RecurrentGPTForCausalLM,
)


torch.set_num_threads(1)  # tests run side by side, one process a core

SHARED = Path(__file__).resolve().parents[2] / "shared"
INJECTIONS = ("linear", "additive", "none", "hyperconnection")
HEAVY_TAIL = {"gate": "none", "state_init": "noise", "state_noise": 0.0, "gate_noise": 0.0}
TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_prelude_layers": 1,
    "num_core_layers": 2,
    "num_coda_layers": 1,
    "num_recurrences": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
}
LAYERS = ("num_prelude_layers", "num_core_layers", "num_coda_layers")


def tiny_config(**fields) -> LoopedGPTConfig:
    """Loop(1-2x3-1), width 64, grouped-query attention, 97 tokens."""
    return LoopedGPTConfig(**{**TINY, "num_key_value_heads": 2, **fields})


def tiny_recurrent_config(**fields) -> RecurrentGPTConfig:
    """Loop(1-2x3-1), width 64, 97 tokens, 128 positions."""
    return RecurrentGPTConfig(**{**TINY, **fields})


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


def tiny_recurrent_gpt(seed: int = 0, **fields) -> RecurrentGPTForCausalLM:
    return randomise(RecurrentGPTForCausalLM(tiny_recurrent_config(**fields)), seed=seed).eval()


def tiny_mixture_config(**fields) -> MixtureOfRecursionsConfig:
    """Loop(1-2x3-1), width 64, 97 tokens; weights that make a pass count in a model of random weights."""
    return MixtureOfRecursionsConfig(**{**TINY, "router_scale": 1.0, **fields})


def tiny_mixture(seed: int = 0, **fields) -> MixtureOfRecursionsForCausalLM:
    return randomise(MixtureOfRecursionsForCausalLM(tiny_mixture_config(**fields)), seed=seed).eval()


def tiny_grown_config(**fields) -> GrownLlamaConfig:
    """
    Loop(1-2x3-1), width 64, grouped-query attention, 97 tokens. Where no plan is given, the counts that the other
    families have as fields make it.
    """
    same = {name: value for name, value in TINY.items() if name not in LAYERS and name != "num_recurrences"}
    if "depth_plan" not in fields:
        prelude, core, coda = (fields.pop(name, TINY[name]) for name in LAYERS)
        fields["depth_plan"] = f"Loop({prelude}-{core}x{TINY['num_recurrences']}-{coda})"
    own = {"num_key_value_heads": 2, "intermediate_size": 172, "bos_token_id": None}
    return GrownLlamaConfig(**{**same, **own, **fields})


def tiny_grown_llama(seed: int = 0, **fields) -> GrownLlamaForCausalLM:
    return randomise(GrownLlamaForCausalLM(tiny_grown_config(**fields)), seed=seed).eval()


# For what every family has to do alike. What differs between families is looked up by these names.
TINY_CONFIGS = {
    "looped_gpt": tiny_config,
    "recurrent_gpt": tiny_recurrent_config,
    "mixture_of_recursions": tiny_mixture_config,
    "grown_llama": tiny_grown_config,
}
TINY_MODELS = {
    "looped_gpt": tiny_model,
    "recurrent_gpt": tiny_recurrent_gpt,
    "mixture_of_recursions": tiny_mixture,
    "grown_llama": tiny_grown_llama,
}


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of token t + 1 at position t, over the tokens that count."""
    targets = labels[:, 1:]
    likelihoods = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -likelihoods[targets != -100].mean()


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The gradient of every parameter, `None` where none arrived, leaving the model without gradients."""
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def is_bit_equal(left: dict, right: dict) -> bool:
    """Of two dictionaries of tensors or `None`."""

    def same(a, b):
        return a is b if a is None or b is None else torch.equal(a, b)

    return left.keys() == right.keys() and all(same(value, right[name]) for name, value in left.items())


@pytest.fixture
def shared() -> Path:
    """The folder of specifications and data beside a development checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder ../shared with the reference data, which is not part of the project")
    return SHARED
