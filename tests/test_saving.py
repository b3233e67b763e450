"""A checkpoint comes back bit for bit, with the package and without it, and one that does not fit is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    HEAVY_TAIL,
    INJECTIONS,
    TINY_CONFIGS,
    TINY_MODELS,
    randomise,
    tiny_grown_llama,
    tiny_mixture,
    tiny_model,
    tiny_recurrent_gpt,
)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging


# The code that a checkpoint of each family holds.
COMMON = {
    "configuration_looped.py",
    "depth_plan.py",
    "generation_looped.py",
    "keyed_noise.py",
    "looped_cache.py",
    "looped_model.py",
    "looped_outputs.py",
    "strict_loading.py",
    "supported_versions.py",
}
LAYERS = COMMON | {"looped_layers.py"}
CODE = {
    "looped_gpt": LAYERS | {"configuration_looped_gpt.py", "modeling_looped_gpt.py"},
    "recurrent_gpt": LAYERS | {"configuration_recurrent_gpt.py", "modeling_recurrent_gpt.py", "recurrence_lora.py"},
    "grown_llama": COMMON | {"configuration_grown_llama.py", "modeling_grown_llama.py"},
}
CODE["mixture_of_recursions"] = CODE["recurrent_gpt"] | {  # whose blocks it uses
    "configuration_mixture_of_recursions.py",
    "modeling_mixture_of_recursions.py",
}
# Every family, in all forms whose weights differ.
VARIANTS: dict[str, Callable[..., PreTrainedModel]] = {
    **{injection: partial(tiny_model, injection=injection) for injection in INJECTIONS},
    "recurrent_gpt": tiny_recurrent_gpt,
    "recurrent_gpt-heavy_tail": partial(tiny_recurrent_gpt, **HEAVY_TAIL),
    "recurrent_gpt-lora": partial(tiny_recurrent_gpt, lora_rank=4),
    "mixture_of_recursions": tiny_mixture,
    "mixture_of_recursions-token_choice": partial(tiny_mixture, routing="token_choice", balancing="bias", router="mlp"),
    "grown_llama": tiny_grown_llama,
    "grown_llama-biased": partial(tiny_grown_llama, attention_bias=True, mlp_bias=True, head_dim=8),
}
every_variant = pytest.mark.parametrize("build", VARIANTS.values(), ids=VARIANTS)
HEADS = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering)
GOLDEN = Path(__file__).parent / "golden"
INPUT_IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))


def up_proj(family: str, layer: int = 0) -> str:
    """The name of a weight in the core's first layer, or a later one, below the base model."""
    return f"layers.{layer + 1}.mlp.up_proj.weight" if family == "grown_llama" else f"core.{layer}.mlp.up_proj.weight"


@torch.no_grad()
def logits(model: PreTrainedModel, **kwargs) -> torch.Tensor:
    """The first output: logits of a head (start logits in question answering), hidden states of the base model."""
    return model(INPUT_IDS, **kwargs)[0]


def fields(config: PreTrainedConfig) -> dict:
    """All that a configuration says but the folder it came from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def names(folder: Path) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def edited(source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the checkpoint `source` with `edit` done to its weights."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    edit(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module", params=TINY_MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    return TINY_MODELS[family]()


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base_checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base_checkpoint")
    model.model.save_pretrained(folder)
    return folder


# With the package


@every_variant
def test_saved_and_loaded_logits_are_bit_equal(build: Callable, tmp_path: Path):
    model = build()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert fields(loaded.config) == fields(model.config)
    for num_recurrences in (1, 3):
        expected = logits(model, num_recurrences=num_recurrences)
        assert torch.equal(logits(loaded, num_recurrences=num_recurrences), expected)


def test_a_checkpoint_holds_safetensors_and_all_code_and_nothing_pickled(family: str, checkpoint: Path):
    assert names(checkpoint) == CODE[family] | {"config.json", "generation_config.json", "model.safetensors"}


def test_a_small_shard_size_splits_the_file_and_loads_equal(model: PreTrainedModel, tmp_path: Path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = [name for name in names(tmp_path) if name.endswith(".safetensors")]
    assert len(shards) > 3 and "model.safetensors.index.json" in names(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


ODD_FIELDS = {  # no default among them
    "looped_gpt": {
        "num_lanes": 3,
        "logit_softcap": None,
        "rms_norm_eps": 1e-5,
        "rotary_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": True,
    },
    "recurrent_gpt": {
        "num_dense_layers": 7,
        "gate": "none",
        "gate_bias_init": 2.0,
        "gate_temperature": 0.5,
        "gate_concat_norm": False,
        "state_noise": 0.2,
        "gate_noise": 0.0,
        "gate_noise_shape": "element",
        "noise_at_eval": True,
        "anchor": "zeros",
        "state_init": "noise",
        "loss_per_recurrence": True,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.01,
        "tie_word_embeddings": False,
    },
    "mixture_of_recursions": {
        "num_dense_layers": 7,
        "routing": "token_choice",
        "router": "mlp",
        "router_function": "sigmoid",
        "router_scale": 0.3,
        "router_temperature": 2.0,
        "selection_loss": 0.1,
        "balancing": "bias",
        "balancing_loss": 0.2,
        "balancing_rate": 0.1,
        "z_loss": 0.3,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.01,
        "tie_word_embeddings": False,
    },
    "grown_llama": {
        "history": [{"operator": "lidas", "block_size": 2, "num_layers": 2}],
        "head_dim": 8,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "attention_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "initializer_range": 0.01,
        "tie_word_embeddings": True,
    },
}
for _family in ("looped_gpt", "recurrent_gpt"):
    ODD_FIELDS[_family] |= {"injection": "additive", "backprop_recurrences": 2}


@pytest.mark.parametrize("kv_sharing", [2, "first"])
def test_config_json_returns_every_field(family: str, kv_sharing: int | str, tmp_path: Path):
    mixes = family == "mixture_of_recursions"
    config = TINY_CONFIGS[family](
        num_recurrences=5,
        trained_recurrences=6 if mixes else 4,
        kv_sharing="first" if mixes else kv_sharing,
        intermediate_size=100,
        num_labels=5,
        **ODD_FIELDS[family],
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == family and "num_hidden_layers" not in written  # it follows from the others
    assert {**written, **ODD_FIELDS[family], "kv_sharing": config.kv_sharing} == written
    from_text = type(config).from_dict(json.loads(config.to_json_string()))
    for loaded in (AutoConfig.from_pretrained(tmp_path), from_text):
        assert fields(loaded) == fields(config)
        assert (loaded.num_hidden_layers, loaded.num_labels) == (12, 5)


def test_the_base_model_loads_from_a_causal_checkpoint_and_back(
    model: PreTrainedModel, checkpoint: Path, base_checkpoint: Path
):
    base = AutoModel.from_pretrained(checkpoint)
    assert type(base) is type(model.model) and torch.equal(logits(base), logits(model.model))
    causal, info = AutoModelForCausalLM.from_pretrained(base_checkpoint, output_loading_info=True)
    new = set() if model.config.tie_word_embeddings else {"lm_head.weight"}
    assert info["missing_keys"] == new and not info["unexpected_keys"]
    assert torch.equal(logits(causal.model), logits(model.model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(base_checkpoint).model), logits(model.model))


@pytest.mark.parametrize("head", HEADS)
def test_a_new_task_head_is_reported_and_not_refused(head: type, model: PreTrainedModel, checkpoint: Path):
    with CaptureLogger(logging.get_logger("transformers")) as captured:
        loaded = head.from_pretrained(checkpoint, num_labels=3)
    new = "qa_outputs" if head is AutoModelForQuestionAnswering else "score"
    assert f"{new}.weight" in captured.out
    assert ("lm_head.weight" in captured.out) is not model.config.tie_word_embeddings
    assert torch.equal(logits(loaded.base_model), logits(model.model))


@pytest.mark.parametrize("head", HEADS)
def test_task_heads_come_back_bit_equal(head: type, family: str, tmp_path: Path):
    model = randomise(head.from_config(TINY_CONFIGS[family](num_labels=2))).eval()
    model.save_pretrained(tmp_path)
    loaded = head.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(logits(loaded), logits(model))


def test_trainer_checkpoints_hold_the_code_and_load(family: str, tmp_path: Path):
    pytest.importorskip("accelerate", reason="Trainer needs it: pip install 'modeling-looped[train]'")
    from transformers import Trainer, TrainingArguments

    model = TINY_MODELS[family]()
    before = logits(model)
    arguments = TrainingArguments(
        tmp_path, max_steps=1, save_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for row in INPUT_IDS]
    Trainer(model, arguments, train_dataset=rows).train()
    saved = tmp_path / "checkpoint-1"
    assert CODE[family] <= names(saved) and "model.safetensors" in names(saved)
    after = logits(AutoModelForCausalLM.from_pretrained(saved))
    assert torch.equal(after, logits(model.eval())) and not torch.equal(after, before)


# Overrides


def test_num_recurrences_overrides_and_trained_recurrences_stay(
    model: PreTrainedModel, checkpoint: Path, tmp_path: Path
):
    passes = 2 if model.config.model_type == "mixture_of_recursions" else 7  # which has no routers beyond 3
    deeper = AutoModelForCausalLM.from_pretrained(checkpoint, num_recurrences=passes)
    assert (deeper.config.num_recurrences, deeper.config.trained_recurrences) == (passes, 3)
    assert torch.equal(logits(deeper), logits(model, num_recurrences=passes))
    assert not torch.equal(logits(deeper), logits(model))
    deeper.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_recurrences, config.trained_recurrences, config.num_hidden_layers) == (passes, 3, 2 + 2 * passes)


@pytest.mark.parametrize(
    ("variant", "override", "words"),
    [
        ("linear", {"num_recurrences": 0}, ["num_recurrences=0", "at least 1"]),
        ("linear", {"num_recurrences": "5"}, ["num_recurrences", "'5'", "int"]),
        ("linear", {"injection": "none"}, ["unexpected", "model.injection.proj.weight"]),
        ("linear", {"num_core_layers": 3}, ["missing", "model.core.2.mlp.up_proj.weight"]),
        ("linear", {"num_hidden_layers": 5}, ["num_hidden_layers=5", "2 x num_recurrences"]),
        ("hyperconnection", {"num_recurrences": 4}, ["num_recurrences=4", "trained_recurrences=3"]),
        ("hyperconnection", {"trained_recurrences": 4}, ["model.injection.alpha", "(3, 2)", "(4, 2)"]),
        ("hyperconnection", {"backprop_recurrences": 1}, ["backprop_recurrences=1", "hyperconnection"]),
        ("recurrent_gpt", {"num_recurrences": -1}, ["num_recurrences=-1", "at least 0"]),
        ("recurrent_gpt", {"injection": "none"}, ["unexpected", "model.injection.proj.weight"]),
        ("recurrent_gpt", {"gate": "none"}, ["unexpected", "model.injection.gate_logit.bias"]),
        ("recurrent_gpt", {"state_init": "noise"}, ["missing", "model.injection.norm.weight"]),
        ("recurrent_gpt", {"num_hidden_layers": 5}, ["num_hidden_layers=5", "2 x num_recurrences"]),
        ("recurrent_gpt", {"max_position_embeddings": 64}, ["model.embed_positions", "(128, 64)", "(64, 64)"]),
        ("recurrent_gpt-lora", {"num_recurrences": 4}, ["num_recurrences=4", "trained_recurrences=3", "lora_rank=4"]),
        ("recurrent_gpt-lora", {"lora_rank": None}, ["unexpected", "model.core.0.mlp.down_proj.lora.down"]),
        ("recurrent_gpt-lora", {"trained_recurrences": 4}, ["lora.down", "(3, 4, 64)", "(4, 4, 64)"]),
        ("mixture_of_recursions", {"num_recurrences": 4}, ["num_recurrences=4", "trained_recurrences=3", "routing"]),
        ("mixture_of_recursions", {"trained_recurrences": 4}, ["missing", "model.router.3.proj.weight"]),
        ("mixture_of_recursions", {"routing": "token_choice"}, ["unexpected", "model.router.1.proj.weight"]),
        ("mixture_of_recursions", {"kv_sharing": 2}, ["kv_sharing", "2"]),
        ("grown_llama", {"num_recurrences": 0}, ["num_recurrences=0", "at least 1"]),
        ("grown_llama", {"num_hidden_layers": 5}, ["num_hidden_layers=5", "2 x num_recurrences"]),
        ("grown_llama", {"num_prelude_layers": 2}, ["num_prelude_layers=2", "depth_plan='Loop(1-2x3-1)'"]),
        ("grown_llama", {"depth_plan": "Loop(1-3x3-1)"}, ["missing", "model.layers.4.mlp.up_proj.weight"]),
        ("grown_llama", {"depth_plan": "3x1"}, ["unexpected", "model.layers.3.mlp.up_proj.weight"]),
        ("grown_llama", {"depth_plan": "Loop(4*2)"}, ["'Loop(4*2)'", "'4*2'", "LxR"]),
        ("grown_llama", {"mlp_bias": True}, ["missing", "model.layers.0.mlp.up_proj.bias"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_overrides_that_the_weights_cannot_follow_are_refused(
    variant: str, override: dict, words: list[str], tmp_path: Path
):
    VARIANTS[variant]().save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path, **override)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


# Strict loading


def drop(weights: dict, name: str):
    del weights[name]


def add(weights: dict, name: str):
    weights[re.sub(r"\d+", "7", name)] = weights[name].clone()


def shorten(weights: dict, name: str):
    weights[name] = weights[name][:-1].clone()


DEFECTS = {"missing": drop, "unexpected": add, "mismatched": shorten}


def of_the_defect(defect: str, family: str) -> list[str]:
    """What the message names: the key, and the shapes where they differ."""
    if defect == "unexpected":
        return [up_proj(family, 6 if family == "grown_llama" else 7)]
    width = TINY_CONFIGS[family]().intermediate_size
    return [up_proj(family), *([f"({width - 1}, 64)", f"({width}, 64)"] if defect == "mismatched" else [])]


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
@pytest.mark.parametrize("kind", ["base", "causal"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_weights_that_do_not_fit_are_refused_with_their_list(
    auto_class: type, kind: str, defect: str, family: str, checkpoint: Path, base_checkpoint: Path, tmp_path: Path
):
    source, prefix = (base_checkpoint, "") if kind == "base" else (checkpoint, "model.")
    broken = edited(source, tmp_path / "broken", lambda weights: DEFECTS[defect](weights, prefix + up_proj(family)))
    with pytest.raises(ValueError) as error:
        auto_class.from_pretrained(broken)
    message = str(error.value)
    words = [*of_the_defect(defect, family), str(broken)]
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize("defect", DEFECTS)
def test_weights_that_do_not_fit_load_on_request(
    defect: str, family: str, model: PreTrainedModel, checkpoint: Path, tmp_path: Path
):
    name = f"model.{up_proj(family)}"
    broken = edited(checkpoint, tmp_path / "broken", lambda weights: DEFECTS[defect](weights, name))
    loaded, info = AutoModelForCausalLM.from_pretrained(broken, output_loading_info=True)
    # Of a mismatch transformers gives (key, shape in the file, shape in the model).
    keys = {found[0] if isinstance(found, tuple) else found for found in info[f"{defect}_keys"]}
    assert keys == {f"model.{of_the_defect(defect, family)[0]}"} and sum(map(len, info.values())) == 1
    ignoring = AutoModelForCausalLM.from_pretrained(broken, ignore_mismatched_sizes=True)
    for found in (loaded, ignoring):
        last, of_the_original = (list(one.model.unique_layers())[-1].mlp.up_proj.weight for one in (found, model))
        assert torch.equal(last, of_the_original)
        assert torch.isfinite(logits(found)).all()


# Precision, devices, embeddings


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loads_and_runs(build: Callable, dtype: torch.dtype, tmp_path: Path):
    model = build()
    model.save_pretrained(tmp_path / "fp32")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=dtype)
    # fp16 lacks the range for what LoopedGPT's loop accumulates there; bf16 has it.
    in_fp32 = dtype is torch.float16 and model.config.model_type == "looped_gpt"
    kept = {p.dtype for name, p in half.named_parameters() if "injection" in name}
    assert kept <= {torch.float32 if in_fp32 else dtype}
    assert {p.dtype for name, p in half.named_parameters() if "injection" not in name} == {dtype}
    half_logits = logits(half)
    is_llama = model.config.model_type == "grown_llama"  # which does as Llama does, and no better: test_grown_llama.py
    assert half_logits.dtype is (dtype if is_llama else torch.float32)
    in_bf16 = 0.5 if is_llama else 0.4
    assert (half_logits - logits(model)).abs().max() < (0.05 if dtype is torch.float16 else in_bf16)  # of 15
    half.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert again.dtype is dtype and torch.equal(logits(again), half_logits)


@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_come_back(tied: bool, family: str, tmp_path: Path):
    model = TINY_MODELS[family](tie_word_embeddings=tied)
    before = logits(model)
    model.resize_token_embeddings(105)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 105 and logits(loaded).shape[-1] == 105
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert torch.equal(logits(loaded), logits(model))
    torch.testing.assert_close(logits(loaded)[..., :97], before, atol=1e-5, rtol=0)


def test_tied_embeddings_are_stored_once_and_come_back_tied(family: str, tmp_path: Path):
    model = TINY_MODELS[family](tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))


def test_device_map_to_one_device_is_bit_equal(model: PreTrainedModel, checkpoint: Path):
    pytest.importorskip("accelerate", reason="device_map needs it: pip install 'modeling-looped[train]'")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, device_map={"": "cpu"})
    assert torch.equal(logits(loaded), logits(model))


@every_variant
def test_layers_on_disk_give_equal_logits(build: Callable, tmp_path: Path):
    pytest.importorskip("accelerate", reason="device_map needs it: pip install 'modeling-looped[train]'")
    model = build()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", device_map="auto", max_memory={"cpu": 500_000}, offload_folder=tmp_path / "offload"
    )
    config = model.config
    loops = {"mixture_of_recursions": {"model.core"}, "grown_llama": {"model.layers.1", "model.layers.2"}}
    on_disk = {name for name, device in loaded.hf_device_map.items() if device == "disk"}
    assert loops.get(config.model_type, {"model.core", "model.injection"}) <= on_disk
    core = list(loaded.model.unique_layers())[config.num_prelude_layers :][: config.num_core_layers]
    assert {parameter.device.type for layer in core for parameter in layer.parameters()} == {"meta"}
    for num_recurrences in (1, 3):
        expected = logits(model, num_recurrences=num_recurrences)
        assert torch.equal(logits(loaded, num_recurrences=num_recurrences), expected)


def test_quantisation_leaves_the_norms_and_looped_gpt_s_injection_alone(model: PreTrainedModel, checkpoint: Path):
    quanto = pytest.importorskip("optimum.quanto", reason="quantisation is tried with optimum-quanto")
    from transformers import QuantoConfig

    quantised = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=QuantoConfig(weights="int8"))
    found = {name for name, module in quantised.named_modules() if isinstance(module, quanto.QLinear)}
    maps = {name for name, module in model.base_model.named_modules() if isinstance(module, torch.nn.Linear)}
    if model.config.model_type == "looped_gpt":
        maps = {name for name in maps if "injection" not in name}
    maps = {f"model.{name}" for name in maps}
    assert found == maps and len(maps) >= 4 * 6
    originals = dict(model.named_parameters())
    for name, parameter in quantised.named_parameters():
        if name.rpartition(".")[0] not in maps:
            assert torch.equal(parameter, originals[name]), name
    difference = (logits(quantised) - logits(model)).abs().max()
    # Of 15. The unrolled Llama of the same weights differs by 0.514 as well.
    assert 0 < difference < (0.52 if model.config.model_type == "grown_llama" else 0.5)


# Without the package

REMOTE = '''
import json
import sys
from pathlib import Path


class NoPackage:
    """Without it an installed package would be found, and its registered classes would win over the code."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_looped":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NoPackage())
try:
    import modeling_looped
except ModuleNotFoundError:
    pass
else:
    sys.exit("the package is importable")

import shutil

import torch
import transformers
from transformers import AutoConfig

job = json.loads(sys.argv[1])
torch.set_num_threads(job["threads"])
expected = torch.load("expected.pt", weights_only=True)
input_ids = expected["input_ids"]
remote = {"trust_remote_code": True}


def check(model, name):
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        for num_recurrences, output in expected[name].items():
            found = model(input_ids, num_recurrences=num_recurrences)[0]
            assert torch.equal(found, output), (name, num_recurrences, (found - output).abs().max())


for name, auto_class in job["checkpoints"].items():
    auto_class = getattr(transformers, auto_class)
    source, resaved = Path(name), Path("resaved") / name
    config = AutoConfig.from_pretrained(source, **remote)
    assert type(config).__module__.startswith("transformers_modules."), type(config)
    assert (config.num_hidden_layers, str(config.plan())) == (8, "Loop(1-2x3-1)")
    model = auto_class.from_pretrained(source, **remote)
    check(model, name)
    model.save_pretrained(resaved)
    assert {p.name for p in resaved.iterdir()} >= {p.name for p in source.iterdir()} - {"generation_config.json"}
    shutil.rmtree(source)  # what is loaded next leans on nothing of the first copy
    again = auto_class.from_pretrained(resaved, **remote)
    check(again, name)
    if name in expected["generated"]:
        tokens = again.generate(input_ids, num_recurrences=2, max_new_tokens=6, do_sample=False)
        assert torch.equal(tokens, expected["generated"][name]), tokens
        deeper = auto_class.from_pretrained(resaved, num_recurrences=7, **remote)
        assert (deeper.config.num_recurrences, deeper.config.trained_recurrences) == (7, 3)
        check(transformers.AutoModel.from_pretrained(resaved, **remote), name + "-base")
        misfit, weight = job["misfits"][name]
        try:
            auto_class.from_pretrained(resaved, **misfit, **remote)
        except ValueError as error:
            assert weight in str(error), error
        else:
            sys.exit("a checkpoint that does not fit was loaded")

assert "modeling_looped" not in sys.modules
print("checked", len(job["checkpoints"]))
'''


def test_checkpoints_load_and_save_where_the_package_is_not_installed(tmp_path: Path):
    """One clean process for all of it: an empty folder, a cache of its own, and the package out of reach."""
    models = {name: ("AutoModelForCausalLM", build()) for name, build in VARIANTS.items()}
    for family, tiny in TINY_CONFIGS.items():
        for head in HEADS:
            head_model = randomise(head.from_config(tiny(num_labels=2))).eval()
            models[f"{family}-{head.__name__}"] = (head.__name__, head_model)
    no_injection = {"injection": "none"}, "model.injection.proj.weight"
    misfits = {"linear": no_injection, "recurrent_gpt": no_injection}
    misfits["grown_llama"] = {"depth_plan": "Loop(1-2x3-2)"}, "model.layers.4.mlp.up_proj.weight"
    whole = {name: models[name][1] for name in misfits}  # of these more is asked
    models |= {f"{name}-base": ("AutoModel", model.model) for name, model in whole.items()}
    expected = {"input_ids": INPUT_IDS}
    for name, (_, model) in models.items():
        model.save_pretrained(tmp_path / name)
        expected[name] = {passes: logits(model, num_recurrences=passes) for passes in (1, 3)}
    settings = {"num_recurrences": 2, "max_new_tokens": 6, "do_sample": False}
    expected["generated"] = {name: model.generate(INPUT_IDS, **settings) for name, model in whole.items()}
    torch.save(expected, tmp_path / "expected.pt")
    (tmp_path / "remote.py").write_text(REMOTE)

    checkpoints = {name: auto for name, (auto, _) in models.items()}
    job = {"threads": torch.get_num_threads(), "checkpoints": checkpoints, "misfits": misfits}
    process = subprocess.run(
        [sys.executable, "-I", "remote.py", json.dumps(job)],  # -I: neither PYTHONPATH nor the folder of the script
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,  # where transformers would ask for trust
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.splitlines()[-1] == f"checked {len(models)}"

    for name, (auto_class, model) in models.items():  # and what was saved there loads here
        loaded = globals()[auto_class].from_pretrained(tmp_path / "resaved" / name)
        assert type(loaded) is type(model) and torch.equal(logits(loaded), logits(model))


# The past


def golden_logits(model: PreTrainedModel, input_ids: list[list[int]], num_recurrences: int) -> torch.Tensor:
    """The first eight logits at the last two positions."""
    with torch.no_grad():
        return model(torch.tensor(input_ids), num_recurrences=num_recurrences).logits[:, -2:, :8]


def write_golden(family: str, folder: Path) -> None:
    """`LOOPED_WRITE_GOLDEN=looped_gpt pytest tests/test_saving.py -k golden`: not without cause, for it stands for
    checkpoints that users hold."""
    fewer = {"looped_gpt": {"num_key_value_heads": 1}}
    fewer["grown_llama"] = {"num_key_value_heads": 1, "intermediate_size": 44}
    model = TINY_MODELS[family](hidden_size=16, num_attention_heads=2, **fewer.get(family, {}))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for name in names(folder) - {"config.json", "model.safetensors"}:
        (folder / name).unlink()
    input_ids = INPUT_IDS[:, :6].tolist()
    depths = range(model.config.min_recurrences, 4)
    values = {str(r): golden_logits(model, input_ids, r).tolist() for r in depths}
    text = json.dumps({"input_ids": input_ids, "logits": values}, indent=1)
    (folder / "expected_logits.json").write_text(text + "\n")


def test_the_golden_checkpoint_still_loads_and_gives_its_logits(family: str):
    folder = GOLDEN / family
    if os.environ.get("LOOPED_WRITE_GOLDEN") == family:
        write_golden(family, folder)
    expected = json.loads((folder / "expected_logits.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000
    for num_recurrences, values in expected["logits"].items():
        found = golden_logits(model, expected["input_ids"], int(num_recurrences))
        torch.testing.assert_close(found, torch.tensor(values), atol=1e-5, rtol=0)
    every = [torch.tensor(values) for values in expected["logits"].values()]
    assert len(every) >= 3
    assert all((one - other).abs().max() > 0.1 for one, other in zip(every, every[1:]))  # the loop is not idle in it
