"""Checkpoints loaded in eight or four bits by the libraries that do it on a CPU; each library where it is installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoint_folders import PROMPTS, SENTENCES, write_checkpoints
from conftest import tiny_recurrent_gpt
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)


pytestmark = pytest.mark.slow  # the whole of it takes a minute
SHORT = {"max_new_tokens": 12, "do_sample": False}


def torchao_int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


METHODS = {
    "quanto-int8": lambda: QuantoConfig(weights="int8"),
    "torchao-int8": torchao_int8,
    "bitsandbytes-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
PACKAGES = {
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "torchao": ("torchao",) * 2,
    "bitsandbytes": ("bitsandbytes",) * 2,
}
FAMILIES = ("looped_gpt", "recurrent_gpt", "mixture_of_recursions", "grown_llama")
# |logits - plain logits| / |plain logits| over all tokens of SENTENCES, the larger of one pass and three, as measured.
DISTANCES = {
    "quanto-int8": (0.0233, 0.0292, 0.0241, 0.0589),
    "torchao-int8": (0.0243, 0.0289, 0.0221, 0.0660),
    "bitsandbytes-int8": (0.0295, 0.0157, 0.0087, 0.0876),
    "bitsandbytes-nf4": (0.414, 0.180, 0.109, 0.706),
}
# The linear maps beside those of the layers. The head and LoopedGPT's injection stay as they are.
BESIDE = {
    "looped_gpt": set(),
    "recurrent_gpt": {"model.injection.proj", "model.injection.gate_hidden", "model.injection.gate_logit"},
    "mixture_of_recursions": {"model.router.0.proj", "model.router.1.proj", "model.router.2.proj"},
    "grown_llama": set(),
}
every_method = pytest.mark.parametrize("method", METHODS)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def quantised(folder: Path, method: str) -> PreTrainedModel:
    module, package = PACKAGES[method.partition("-")[0]]
    if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=METHODS[method](), device_map="cpu")


def quantised_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the name of their module: the weights that are no plain tensors any more."""
    return {
        name.removesuffix(".weight"): parameter
        for name, parameter in model.named_parameters()
        if type(parameter) is not torch.nn.Parameter
    }


def rounded(folder: Path, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The plain model with the values that quantised weights stand for."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in weights.items():
            if hasattr(weight, "quant_state"):
                from bitsandbytes.functional import dequantize_4bit

                values = dequantize_4bit(weight.data, weight.quant_state)
            else:
                values = weight.dequantize()
            model.get_submodule(name).weight.copy_(values)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, tokenizer, num_recurrences: int) -> torch.Tensor:
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return model(**inputs, num_recurrences=num_recurrences).logits[inputs["attention_mask"].bool()]


def texts(model: PreTrainedModel, tokenizer, num_recurrences: int) -> torch.Tensor:
    tokenizer.padding_side = "left"
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    return model.generate(**inputs, **SHORT, num_recurrences=num_recurrences)


@every_method
@every_family
def test_a_quantised_model_is_that_of_its_rounded_weights_at_every_depth_and_near_the_plain_one(
    family, method, folders, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(folders[family])
    model, plain = quantised(folders[family], method), AutoModelForCausalLM.from_pretrained(folders[family])
    weights = quantised_weights(model)
    distances = []
    for depth in (1, 3):
        found, expected = logits(model, tokenizer, depth), logits(plain, tokenizer, depth)
        distances.append(((found - expected).norm() / expected.norm()).item())
    assert 0 < min(distances) and max(distances) < 1.15 * dict(zip(FAMILIES, DISTANCES[method]))[family]
    if method == "bitsandbytes-int8":  # it rounds what goes into a map too: no plain model does that
        assert texts(model, tokenizer, 3).shape[0] == len(PROMPTS)
    else:
        same = rounded(folders[family], weights)
        for depth in (1, 3):
            expected = logits(same, tokenizer, depth)
            torch.testing.assert_close(logits(model, tokenizer, depth), expected, rtol=0, atol=1e-4)
            assert torch.equal(texts(model, tokenizer, depth), texts(same, tokenizer, depth))

    if method.startswith("quanto"):
        with pytest.raises(ValueError, match="not serializable"):  # transformers' own word
            model.save_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(logits(loaded, tokenizer, 3), logits(model, tokenizer, 3))


@every_method
@every_family
def test_what_is_quantised_is_every_linear_map_but_the_head_and_looped_gpt_s_injection(family, method, folders):
    model = quantised(folders[family], method)
    layers = {name for name, module in model.named_modules() if module in list(model.model.unique_layers())}
    maps = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(name.startswith(f"{layer}.") for layer in layers)
    }
    assert len(maps) == 4 * (7 if family == "grown_llama" else 6)
    expected = maps | BESIDE[family]
    if method.startswith("bitsandbytes") and family in ("recurrent_gpt", "mixture_of_recursions"):
        # It takes torch's own class alone, and the maps of these layers are a class of their own.
        expected = {name for name in BESIDE[family] if not name.endswith("gate_logit")}
    assert quantised_weights(model).keys() == expected


@every_method
def test_recurrent_gpt_s_own_low_rank_weights_survive_or_the_checkpoint_is_refused(method, folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["recurrent_gpt"])
    plain = tiny_recurrent_gpt(vocab_size=len(tokenizer), lora_rank=4, pad_token_id=tokenizer.pad_token_id)
    plain.save_pretrained(tmp_path)
    if method.startswith("quanto"):  # which puts a class of its own in the place of the maps that have them
        with pytest.raises(ValueError, match="unexpected: .*q_proj.lora.down"):
            quantised(tmp_path, method)
        return
    model = quantised(tmp_path, method)
    own = {name: value for name, value in plain.named_parameters() if ".lora." in name}
    assert own and all(torch.equal(model.get_parameter(name), value) for name, value in own.items())
    found, expected = logits(model, tokenizer, 3), logits(plain, tokenizer, 3)
    assert 0 < (found - expected).norm() / expected.norm() < (0.25 if method.endswith("nf4") else 0.04)
