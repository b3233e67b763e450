"""Run by tests/gpu/check.sh: what a CPU cannot show."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

from modeling_looped import (
    GrownLlamaConfig,
    LoopedGPTConfig,
    LoopedGPTForCausalLM,
    MixtureOfRecursionsConfig,
    RecurrentGPTConfig,
)
from modeling_looped.keyed_noise import Noise, NoiseKey


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model(injection: str = "linear", dtype: torch.dtype = torch.float32, **fields) -> LoopedGPTForCausalLM:
    """Weights large enough for the loop to matter, in eval mode on the GPU."""
    config = LoopedGPTConfig(
        vocab_size=512, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, injection=injection,
        pad_token_id=0, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    built = LoopedGPTForCausalLM(config)
    with torch.no_grad():
        built.lm_head.weight.normal_(std=0.2)
    return built.to("cuda", dtype).eval()


def other_model(config_class: type, **fields) -> PreTrainedModel:
    """The same of another family."""
    shape = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4}
    if config_class is not GrownLlamaConfig:
        shape |= {"num_core_layers": 2, "num_recurrences": 4}
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config_class(**shape, pad_token_id=0, **fields))
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    return built.to("cuda").eval()


OTHERS = [
    (RecurrentGPTConfig, {}),
    (RecurrentGPTConfig, {"kv_sharing": "first"}),
    (RecurrentGPTConfig, {"state_init": "noise", "gate": "none"}),
    (MixtureOfRecursionsConfig, {}),
    (MixtureOfRecursionsConfig, {"routing": "token_choice"}),
    (GrownLlamaConfig, {"intermediate_size": 512, "depth_plan": "Loop(1-2x4-1)"}),
]


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(1, 512, (2, 33), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return ids * mask, mask


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
@pytest.mark.parametrize("recurrences", [1, 4, 6])
def test_attention_kernels_equal_sdpa_in_bf16(implementation, recurrences):
    built = model(dtype=torch.bfloat16)
    ids, mask = prompt()
    with torch.no_grad():
        expected = built(ids, attention_mask=mask, num_recurrences=recurrences).logits
        try:
            built.set_attn_implementation(implementation)
        except (ImportError, ValueError) as error:
            pytest.skip(f"{implementation} is not installed: {str(error).splitlines()[0]}")
        logits = built(ids, attention_mask=mask, num_recurrences=recurrences).logits
    difference = (logits - expected)[mask.bool()].abs()
    assert difference.mean() < 0.02 * expected.std() and difference.max() < 0.3 * expected.std()


@pytest.mark.parametrize("injection", ["linear", "additive", "none", "hyperconnection"])
@pytest.mark.parametrize("cache", ["static", "offloaded"])
def test_caches_that_need_a_gpu_give_the_uncached_text(injection, cache):
    built, (ids, mask) = model(injection), prompt()
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = built.generate(ids, use_cache=False, **settings)
    assert torch.equal(built.generate(ids, cache_implementation=cache, **settings), expected)


@pytest.mark.parametrize("recurrences", [1, 4])
def test_cuda_graph_decode_gives_the_eager_text(recurrences):
    built, (ids, mask) = model(), prompt()
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "num_recurrences": recurrences}
    expected = built.generate(ids, **settings)
    compiled = built.generate(
        ids,
        cache_implementation="static",
        compile_config=CompileConfig(mode="reduce-overhead", fullgraph=True),
        **settings,
    )
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize(("config_class", "fields"), OTHERS)
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
def test_the_other_families_give_the_uncached_text_from_every_cache(config_class, fields, cache):
    built, (ids, mask) = other_model(config_class, **fields), prompt()
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = built.generate(ids, use_cache=False, **settings)
    assert torch.equal(built.generate(ids, cache_implementation=cache, **settings), expected)


def test_keyed_noise_is_the_same_on_both_devices():
    like, positions = torch.empty(4, 64, 128), torch.arange(64)[None]
    on_cpu = Noise(NoiseKey(1, 2, 3), positions, 4)(like, 1, 0)
    on_gpu = Noise(NoiseKey(1, 2, 3), positions.cuda(), 4)(like.cuda(), 1, 0)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-4, rtol=0)
