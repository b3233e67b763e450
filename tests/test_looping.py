"""Loops over a model that exists: what copied layers compute, and nothing left behind; and back to plain layers."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODELS, gradients, is_bit_equal, randomise, tiny_grown_llama, tiny_model, tiny_recurrent_gpt
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from modeling_looped import (
    DepthPlan,
    GrownLlamaForQuestionAnswering,
    GrownLlamaForSequenceClassification,
    GrownLlamaForTokenClassification,
    GrownLlamaModel,
)
from modeling_looped.interventions import executed_plan, plan_edits, reverse, skip, swap
from modeling_looped.looping import add_recurrence, load, loop, unroll


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GATED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
TYPES = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
PLAIN = {
    "llama": (LlamaForCausalLM, LlamaConfig, GATED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**GATED, "head_dim": 8}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {**GATED, "head_dim": 8}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {**GATED, "head_dim": 8, "sliding_window": 4, "layer_types": TYPES},
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config, SHAPE),
    "olmo": (OlmoForCausalLM, OlmoConfig, GATED),
    "mistral": (MistralForCausalLM, MistralConfig, {**GATED, "head_dim": 8, "sliding_window": 4}),
}
DENSE = tuple(range(6))
BLOCK = 2, 4, 2  # start, stop, repeats
ORDER = (0, 1, 2, 3, 2, 3, 2, 3, 4, 5)
IDS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))


def plain(name: str, order: tuple[int, ...] = DENSE, **fields) -> PreTrainedModel:
    """A model of transformers with as many layers as `order` has, of the kinds that it names."""
    model_class, config_class, defaults = PLAIN[name]
    fields = {**defaults, "num_hidden_layers": len(order), **fields}
    if "layer_types" in fields:
        fields["layer_types"] = [fields["layer_types"][layer] for layer in order]
    return randomise(model_class(config_class(**fields)), std=0.1).eval()


def copy_layers(
    model: PreTrainedModel, into: PreTrainedModel, order: tuple[int, ...], name: str = r"layers|h"
) -> PreTrainedModel:
    """`into` with a copy of layer `order[i]` of `model` as its layer i, and the rest of `model` as it is."""
    state = {}
    for key, tensor in model.state_dict().items():
        if (match := re.fullmatch(rf"((?:.+\.)?(?:{name})\.)(\d+)(\..+)", key)) is None:
            state[key] = tensor
        else:
            places = [place for place, layer in enumerate(order) if layer == int(match[2])]
            state |= {f"{match[1]}{place}{match[3]}": tensor for place in places}
    into.load_state_dict(state)
    return into.eval()


@lru_cache
def base(case: str) -> PreTrainedModel:
    return TINY_MODELS[case]() if case in TINY_MODELS else plain(case)


@lru_cache
def block(case: str) -> tuple[int, int, int]:
    """The loop of a case: in the families of this package, over the prelude, since the core has loops of its own."""
    return (0, 1, 2) if case in TINY_MODELS else BLOCK


@lru_cache
def reference(case: str) -> PreTrainedModel:
    """The looped model of a case as one of the original class, whose passes over the block are copied layers."""
    if case not in TINY_MODELS:
        return copy_layers(base(case), plain(case, ORDER), ORDER)
    order = (0, 0, 0, 1, 2, 3) if case == "grown_llama" else (0, 0, 0)
    name = "layers" if case == "grown_llama" else "prelude"
    return copy_layers(base(case), TINY_MODELS[case](num_prelude_layers=3), order, name)


def looped(case: str) -> PreTrainedModel:
    model = copy.deepcopy(base(case))
    loop(model, *block(case))
    return model


every_case = pytest.mark.parametrize("case", [*PLAIN, *TINY_MODELS])
every_plain = pytest.mark.parametrize("case", PLAIN)


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor = IDS, **kwargs) -> torch.Tensor:
    return model(ids, **{"use_cache": False, **kwargs}).logits


def layer_list(model: PreTrainedModel) -> nn.ModuleList:
    names = ("layers", "h")
    return next(getattr(module, name) for module in model.modules() for name in names if hasattr(module, name))


def generate(model: PreTrainedModel, ids: torch.Tensor = IDS, **kwargs):
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids, **{**settings, **kwargs})
    return output.sequences, torch.stack(output.logits, dim=1), output.cache


# The same function


@every_case
def test_a_loop_gives_every_bit_of_the_logits_of_copied_layers(case):
    model = looped(case)
    found = logits(model)
    assert torch.equal(found, logits(reference(case)))
    assert (found - logits(base(case))).abs().max() > 0.05, "the block does nothing in this model"
    assert torch.equal(model(IDS, use_cache=True).logits, found)
    assert model.config.num_hidden_layers == reference(case).config.num_hidden_layers


@every_plain
def test_a_loop_gives_every_bit_of_the_logits_of_the_unrolled_model(case):
    model = looped(case)
    unrolled = unroll(model)
    assert type(unrolled) is type(model) and type(unrolled.config) is PLAIN[case][1]
    assert torch.equal(logits(unrolled), logits(model))
    found, expected = (one.config.to_dict() for one in (unrolled, reference(case)))
    of_no_matter = {"dtype": 0, "architectures": 0, "_name_or_path": 0}
    assert found | of_no_matter == expected | of_no_matter
    assert is_bit_equal(dict(unrolled.state_dict()), dict(reference(case).state_dict()))
    assert executed_plan(model).order == ORDER, "the model itself stays looped"
    assert torch.equal(generate(unrolled)[0], generate(model)[0])


def test_a_coda_is_looped_where_it_is():
    """The prelude in `every_case`; here the coda, at every depth of the call."""
    for family, build in TINY_MODELS.items():
        order, name = ((0, 1, 2, 3, 3), "layers") if family == "grown_llama" else ((0, 0), "coda")
        model, expected = copy.deepcopy(base(family)), copy_layers(base(family), build(num_coda_layers=2), order, name)
        with loop(model, 3, 4, 1):
            for passes in (1, 2, 3):
                found = logits(model, num_recurrences=passes)
                assert torch.equal(found, logits(expected, num_recurrences=passes)), family


@every_case
def test_states_and_attentions_are_those_of_copied_layers(case):
    model, expected = looped(case), copy.deepcopy(reference(case))
    depth = len(ORDER) if case in PLAIN else 10
    for one in (model, expected):
        one.set_attn_implementation("eager")
    ask = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        found, wanted = model(IDS, **ask), expected(IDS, **ask)
        last = model(IDS, **{**ask, "output_hidden_states": [-1]}).hidden_states
    assert len(found.hidden_states) == depth + 1 and len(found.attentions) == depth
    pairs = zip((*found.hidden_states, *found.attentions), (*wanted.hidden_states, *wanted.attentions), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(last[-1], found.hidden_states[-1])
    assert not any(isinstance(one, torch.Tensor) for one in last[:-1])


@every_case
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding_leaves_the_rows_what_they_are_alone(case, attention):
    model = looped(case)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for use_cache in (False, True):
        with torch.no_grad():
            found = model(IDS * mask, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
        torch.testing.assert_close(found[0], logits(model, IDS[:1])[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(found[1, 5:], logits(model, IDS[1:, 5:])[0], atol=1e-4, rtol=0)


METHODS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "uncached": {"use_cache": False},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


# The families' own generation has a file of its own.
@pytest.mark.parametrize(
    ("case", "method"),
    [*((case, method) for case in PLAIN for method in METHODS), *((family, "dynamic") for family in TINY_MODELS)],
)
def test_generation_is_that_of_copied_layers(case, method):
    ids = IDS[:1] if method == "prompt_lookup" else IDS
    found, wanted = (generate(model, ids, **METHODS[method]) for model in (looped(case), reference(case)))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    if method == "dynamic":
        assert torch.equal(found[0], generate(reference(case), ids, use_cache=False)[0])


@every_case
def test_generation_from_a_left_padded_batch_is_that_of_its_rows(case):
    model, mask = looped(case), torch.ones_like(IDS)
    mask[1, :5] = 0
    alone = [generate(model, row)[0][0, -4:] for row in (IDS[:1], IDS[1:, 5:])]
    for implementation in ("dynamic", "static") if case in ("llama", "gemma3", "gpt2", "looped_gpt") else ("dynamic",):
        found = generate(model, IDS * mask, attention_mask=mask, cache_implementation=implementation)[0]
        assert torch.equal(found[:, -4:], torch.stack(alone))


@every_case
def test_generation_continues_from_the_cache_that_it_returned(case):
    model = looped(case)
    at_once, scores, _ = generate(reference(case), max_new_tokens=5)
    first, _, cache = generate(model, max_new_tokens=3)
    second, later, cache = generate(model, first, max_new_tokens=2, cache=cache)
    assert torch.equal(second, at_once) and torch.equal(later, scores[:, 3:])
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [15] * model.config.num_hidden_layers


@every_case
def test_a_cache_of_the_config_has_a_slot_for_every_executed_layer(case):
    model, expected = looped(case), reference(case)
    for build in (lambda config: DynamicCache(config=config), lambda config: StaticCache(config, max_cache_len=16)):
        results = []
        for one in (model, expected):
            cache = build(one.config)
            with torch.no_grad():
                chunks = [one(chunk, cache=cache).logits for chunk in IDS.split([5, 1, 5], dim=1)]
            results.append((torch.cat(chunks, dim=1), [type(layer) for layer in cache.layers]))
        assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
        torch.testing.assert_close(results[0][0], logits(model), atol=1e-4, rtol=0)


def test_the_first_executed_layers_draft_for_all_of_them():
    model = looped("llama")
    expected = generate(model, IDS[:1])[0]
    found = model.generate(IDS[:1], assistant_early_exit=5, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected) and model.config.num_hidden_layers == len(ORDER)


# Undoing


HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
]


class Everything:
    """What a model is, to be compared with what it is later."""

    def __init__(self, model: PreTrainedModel):
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        config = model.config
        plan = executed_plan(model)
        self.config = copy.deepcopy(config.__dict__), config.to_dict(), config.to_json_string(), plan, plan.ends
        self.classes = type(config), type(model), id(config)
        self.modules = [(name, id(module), module.training) for name, module in model.named_modules()]
        self.parameters = [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)]
        self.hooks = {
            (name, kind): dict(getattr(module, kind)) for name, module in model.named_modules() for kind in HOOKS
        }
        self.attributes = {name: set(vars(module)) for name, module in model.named_modules()}

    def __eq__(self, other: "Everything") -> bool:
        assert is_bit_equal(self.weights, other.weights)
        for name in ("config", "classes", "modules", "parameters", "hooks", "attributes"):
            assert getattr(self, name) == getattr(other, name), name
        return True


def ready(case: str) -> tuple[PreTrainedModel, Everything]:
    """A model with hooks, which transformers installs to record outputs, and what it is."""
    model = copy.deepcopy(base(case))
    model(IDS, output_hidden_states=True)
    return model, Everything(model)


@every_case
def test_undoing_a_loop_leaves_everything_as_it_was(case):
    model, before = ready(case)
    handle = loop(model, *block(case))
    assert torch.equal(logits(model), logits(reference(case)))
    generate(model)
    handle.undo()
    assert Everything(model) == before
    assert torch.equal(logits(model), logits(base(case)))
    handle.undo()
    assert Everything(model) == before


@every_case
def test_a_loop_holds_for_a_with_block_and_ends_with_an_exception(case):
    model, before = ready(case)
    with loop(model, *block(case)) as handle:
        assert torch.equal(logits(model), logits(reference(case)))
        assert handle.plan.effective_depth == model.config.num_hidden_layers
    assert Everything(model) == before
    with pytest.raises(KeyError), loop(model, *block(case)), loop(model, *block(case)):
        raise KeyError
    assert Everything(model) == before


@every_case
def test_what_happens_to_a_model_under_a_loop_is_there_after_it(case):
    model = copy.deepcopy(base(case))
    handle = loop(model, *block(case))
    model.train()
    model.to(torch.bfloat16)
    model.config.use_cache = False
    handle.undo()
    assert all(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.use_cache is False
    with loop(model, *block(case)):
        model.eval()
    assert not any(module.training for module in model.modules())


@every_plain
def test_loops_compose_in_the_order_of_the_plan(case):
    model, before = ready(case)
    plan = DepthPlan.parse("6x1").repeat(1, 3, 1).repeat(3, 5, 2)
    assert plan.order == (0, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4, 5)
    handles = loop(model, 1, 3, 1), loop(model, 3, 5, 2)
    assert executed_plan(model) == plan == handles[0].plan == handles[1].plan
    assert torch.equal(logits(model), logits(copy_layers(model, plain(case, plan.order), plan.order)))
    assert plan_edits(model) == (("repeat", (1, 3, 1)), ("repeat", (3, 5, 2)))
    nested = plan.repeat(1, 5, 1)  # over both
    assert nested.order == (0, 1, 2, 1, 2, 3, 4, 1, 2, 3, 4, 3, 4, 3, 4, 5)
    with loop(model, 1, 5, 1):
        assert executed_plan(model) == nested
        assert torch.equal(logits(model), logits(copy_layers(model, plain(case, nested.order), nested.order)))
    for handle in handles:
        handle.undo()
    assert Everything(model) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("case", ["gemma3", "grown_llama", "looped_gpt"])
def test_loops_are_undone_in_any_order(case, order):
    model, before = ready(case)
    loops = [(0, 1, 1), (2, 3, 2), (3, 4, 1)]
    start = executed_plan(model)
    handles = dict(enumerate(loop(model, *one) for one in loops))
    for number in order:
        handles.pop(number).undo()
        expected = start
        for left in handles:
            expected = expected.repeat(*loops[left])
        assert executed_plan(model) == expected and model.config.num_hidden_layers == expected.effective_depth
        with torch.no_grad():
            assert len(model(IDS, output_hidden_states=True).hidden_states) == expected.effective_depth + 1
    assert Everything(model) == before


@every_case
def test_the_same_loop_twice_is_one_of_twice_the_repeats(case):
    model, (start, stop, repeats) = copy.deepcopy(base(case)), block(case)
    with loop(model, start, stop, 1), loop(model, start, stop, repeats - 1):
        twice = logits(model)
        assert torch.equal(model(IDS, use_cache=True).logits, twice)
    assert torch.equal(twice, logits(reference(case)))


def test_two_loops_inside_a_pass_are_one_of_twice_the_repeats():
    for family, build in TINY_MODELS.items():
        model = build(num_core_layers=4, num_recurrences=1)  # positions 0 | 1 2 3 4 | 5
        with loop(model, 2, 4, 2) as once:
            expected, ends = logits(model), once.plan.ends
        with loop(model, 2, 4, 1), loop(model, 2, 4, 1) as twice:
            assert twice.plan.order == (0, 1, 2, 3, 2, 3, 2, 3, 4, 5) and twice.plan.ends == ends == (1, 9, 10), family
            assert torch.equal(logits(model), expected), family


@pytest.mark.parametrize("case", ["gemma3", "gpt2", "looped_gpt", "grown_llama"])
@pytest.mark.parametrize("carry", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_a_copy_of_a_looped_model_is_looped_on_its_own(case, carry):
    model = copy.deepcopy(base(case))
    before = Everything(model)
    handle = loop(model, *block(case))
    other, others_handle = carry((model, handle))
    expected = logits(model)
    assert torch.equal(logits(other), expected) and torch.equal(generate(other)[0], generate(model)[0])
    handle.undo()
    assert Everything(model) == before
    assert torch.equal(logits(other), expected)
    handle = loop(model, *block(case))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), expected)
    others_handle.undo()
    assert type(other.config) is before.classes[0] and other.config.to_dict() == before.config[1]
    assert executed_plan(other) == executed_plan(base(case)) and executed_plan(model) == handle.plan
    alone = carry(model)  # without the handle
    assert torch.equal(logits(alone), expected) and executed_plan(alone) == executed_plan(model)


# Saving


def tensors(path: Path) -> list[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return list(file.keys())


@every_case
def test_a_looped_model_is_saved_as_the_model_with_a_note(case, tmp_path):
    base(case).save_pretrained(tmp_path / "plain")
    model = looped(case)
    model.save_pretrained(tmp_path / "looped")
    assert tensors(tmp_path / "looped") == tensors(tmp_path / "plain")
    assert is_bit_equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("looped", "plain")))
    saved, original = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("looped", "plain"))
    assert saved.pop("looped_layers") == [list(block(case))]
    assert saved == original

    loaded = load(str(tmp_path / "looped"))
    assert torch.equal(logits(loaded), logits(model)) and executed_plan(loaded) == executed_plan(model)
    assert type(loaded) is type(model)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "looped")), logits(base(case)))
    assert torch.equal(logits(load(str(tmp_path / "plain"))), logits(base(case))), "without loops, from_pretrained"

    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "looped/config.json").read_text()
    assert model.config.num_hidden_layers == reference(case).config.num_hidden_layers, "saving changes nothing"


def test_several_loops_and_headless_models_are_saved(tmp_path):
    for build in (lambda: copy.deepcopy(base("gemma3")).model, lambda: tiny_grown_llama().model):
        model = build()
        loops = [[0, 1, 1], [1, 3, 2], [0, 1, 1]]
        for one in loops:
            loop(model, *one)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["looped_layers"] == loops
        loaded = load(str(tmp_path), AutoModel, dtype=torch.float32)
        assert executed_plan(loaded) == executed_plan(model)
        assert torch.equal(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state)


def test_loading_hands_every_argument_on(tmp_path):
    looped("llama").save_pretrained(tmp_path)
    assert load(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
    model, info = load(str(tmp_path), output_loading_info=True)
    assert executed_plan(model).order == ORDER and not info["missing_keys"]


def test_a_checkpoint_loaded_without_its_loops_keeps_the_note(tmp_path):
    looped("llama").save_pretrained(tmp_path / "first")
    unlooped = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    handle = loop(unlooped, 0, 1, 1)
    handle.undo()
    unlooped.save_pretrained(tmp_path / "second")
    assert torch.equal(logits(load(str(tmp_path / "second"))), logits(looped("llama")))


WITHOUT_THE_PACKAGE = """
import sys

sys.modules["modeling_looped"] = None  # import modeling_looped raises ImportError

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
ids, names = torch.load("job.pt")
found = {}
for name in names:
    model = AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        found[name] = type(model).__module__, model(ids, use_cache=False).logits
    found[name + " generated"] = model.generate(ids, max_new_tokens=5, do_sample=False)
torch.save(found, "found.pt")
"""


def test_looped_and_unrolled_checkpoints_load_where_there_is_no_package(tmp_path):
    expected = {}
    for case in ("llama", "gemma3", "gpt2"):
        model = looped(case)
        model.save_pretrained(tmp_path / case)
        unroll(model).save_pretrained(tmp_path / f"{case} unrolled")
        expected |= {case: base(case), f"{case} unrolled": model}
    grown = tiny_grown_llama(depth_plan="Loop(4x6)")
    unroll(grown).save_pretrained(tmp_path / "grown unrolled")
    expected["grown unrolled"] = grown
    torch.save((IDS, list(expected)), tmp_path / "job.pt")
    process = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_THE_PACKAGE],
        cwd=tmp_path,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt")
    for name, model in expected.items():
        module, values = found[name]
        assert module.startswith("transformers.") and torch.equal(values, logits(model)), name
        wanted = model.generate(IDS, max_new_tokens=5, do_sample=False)
        assert torch.equal(found[f"{name} generated"], wanted), name


def fine_tune(model: nn.Module, folder: Path, **arguments) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(2, 1)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True}
    settings |= {"report_to": "none", "disable_tqdm": True, "save_steps": 1, "seed": 0}
    trainer = Trainer(model, TrainingArguments(str(folder), **{**settings, **arguments}), train_dataset=rows)
    trainer.train(resume_from_checkpoint=arguments.get("resume_from_checkpoint"))
    return trainer


@pytest.mark.parametrize("case", ["gemma3", "grown_llama"])
def test_the_trainer_trains_saves_and_resumes_a_looped_model(case, tmp_path):
    model = looped(case)
    fine_tune(model, tmp_path / "run")
    assert (logits(model.eval()) - logits(looped(case))).abs().max() > 0.05
    for step in (1, 2):
        config = json.loads((tmp_path / f"run/checkpoint-{step}/config.json").read_text())
        assert config["looped_layers"] == [list(block(case))]
    assert torch.equal(logits(load(str(tmp_path / "run/checkpoint-2"))), logits(model))
    resumed = looped(case)
    fine_tune(resumed, tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert is_bit_equal(resumed.state_dict(), model.state_dict())


# Training


def loss(model: nn.Module) -> torch.Tensor:
    return model(IDS, labels=IDS, use_cache=False).loss


@every_plain
def test_the_gradient_of_a_looped_layer_is_the_sum_of_those_of_its_copies(case):
    model, expected = looped(case).double(), copy.deepcopy(reference(case)).double()
    found, copies = gradients(model, loss(model)), gradients(expected, loss(expected))
    for name, gradient in found.items():
        if (match := re.fullmatch(r"(.+\.(?:layers|h)\.)(\d+)(\..+)", name)) is None:
            wanted = copies[name]
        else:
            places = [place for place, layer in enumerate(ORDER) if layer == int(match[2])]
            wanted = sum(copies[f"{match[1]}{place}{match[3]}"] for place in places)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    assert sum(gradient.abs().max() > 0 for gradient in found.values()) == len(found)


# Not of mixtures, whose gradients reentrant checkpointing adds in another order, loop or no loop.
@pytest.mark.parametrize("case", [*PLAIN, "looped_gpt", "recurrent_gpt", "grown_llama"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_leaves_every_bit_of_the_gradients(case, reentrant):
    model = looped(case).train()
    torch.manual_seed(0)  # dropout and noise
    expected = gradients(model, loss(model))
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(0)
    assert is_bit_equal(gradients(model, loss(model)), expected)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())


LORA = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gemma3": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "grown_llama": ["q_proj", "v_proj", "down_proj"],
}


def lora(case: str, layers: list[int]) -> LoraConfig:
    conv1d = {"fan_in_fan_out": True} if case == "gpt2" else {}
    pattern = {"layers_to_transform": layers, "layers_pattern": ["h" if case == "gpt2" else "layers"]}
    return LoraConfig(r=4, target_modules=LORA[case], task_type="CAUSAL_LM", **pattern, **conv1d)


@pytest.mark.parametrize(
    ("case", "first"), [("llama", "loop"), ("gemma3", "adapter"), ("gpt2", "loop"), ("grown_llama", "adapter")]
)
def test_adapters_on_a_looped_block_train_merge_and_come_back(case, first, tmp_path):
    start, stop = (1, 3) if case in TINY_MODELS else (2, 4)
    torch.manual_seed(0)
    model = copy.deepcopy(base(case))
    if first == "loop":
        handle = loop(model, start, stop, 1)
        adapted = get_peft_model(model, lora(case, list(range(start, stop))))
    else:
        adapted = get_peft_model(model, lora(case, list(range(start, stop))))
        handle = loop(adapted, start, stop, 1)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {int(re.search(r"\.(?:layers|h)\.(\d+)\.", name)[1]) for name in trained} == set(range(start, stop))
    untouched = logits(adapted)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(3):
        losses.append(loss(adapted))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    assert (logits(adapted) - untouched).abs().max() > 0.01
    adapted.save_pretrained(tmp_path)

    handle.undo()
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), logits(base(case)))
    weights = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    at_each = {}
    for repeats in (0, 1, 2):
        handle = loop(adapted, start, stop, repeats) if repeats else None
        apart = at_each[repeats] = logits(adapted)
        adapted.merge_adapter()
        torch.testing.assert_close(logits(adapted), apart, atol=1e-4, rtol=0)
        adapted.unmerge_adapter()
        torch.testing.assert_close(logits(adapted), apart, atol=1e-4, rtol=0)
        if handle is not None:
            handle.undo()
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0)
    assert (at_each[1] - at_each[2]).abs().max() > 0.01

    again = copy.deepcopy(base(case))
    loop(again, start, stop, 1)
    again = PeftModel.from_pretrained(again, tmp_path).eval()
    torch.testing.assert_close(logits(again), at_each[1], atol=1e-5, rtol=0)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), at_each[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(unroll(merged)), logits(merged), atol=0, rtol=0)


def test_the_trainer_trains_an_adapter_on_a_looped_model(tmp_path):
    adapted = get_peft_model(looped("llama"), lora("llama", [2, 3]))
    before = logits(adapted)
    fine_tune(adapted, tmp_path)
    adapted.eval()
    assert (logits(adapted) - before).abs().max() > 0.01
    again = PeftModel.from_pretrained(looped("llama"), tmp_path / "checkpoint-2").eval()
    assert torch.equal(logits(again), logits(adapted))


# Errors


def llama(**fields) -> LlamaForCausalLM:
    return plain("llama", **fields)


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=6, state_size=4))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=6, num_heads=4))


def with_lora(unwrapped: bool = False) -> nn.Module:
    model = get_peft_model(looped("llama"), lora("llama", [2]))
    return model.get_base_model() if unwrapped else model


def with_ia3() -> nn.Module:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    return get_peft_model(looped("llama"), config).get_base_model()


Refused = tuple[Callable[[], nn.Module], Callable[[nn.Module], object], list[str]]
REFUSED: dict[str, Refused] = {
    "an empty block": (llama, lambda model: loop(model, 3, 3, 1), ["stop=3", "at least 4", "6x1"]),
    "a block backwards": (llama, lambda model: loop(model, 4, 2, 1), ["stop=2", "at least 5"]),
    "past the last layer": (llama, lambda model: loop(model, 4, 7, 1), ["4 to 6", "6x1"]),
    "far past the last layer": (llama, lambda model: loop(model, 6, 7, 1), ["6", "6x1"]),
    "a negative layer": (llama, lambda model: loop(model, -1, 2, 1), ["start=-1", "at least 0"]),
    "negative repeats": (llama, lambda model: loop(model, 1, 3, -1), ["repeats=-1", "at least 0"]),
    "half a layer": (llama, lambda model: loop(model, 0.5, 3, 1), ["start=0.5"]),
    "a layer by name": (llama, lambda model: loop(model, "1", 3, 1), ["start='1'"]),
    "an end as float": (llama, lambda model: loop(model, 1, 3.0, 1), ["stop=3.0"]),
    "half a repeat": (llama, lambda model: loop(model, 1, 3, 1.5), ["repeats=1.5"]),
    "repeats as truth": (llama, lambda model: loop(model, 1, 3, True), ["repeats=True"]),
    "no repeats at all": (llama, lambda model: loop(model, 1, 3, None), ["repeats=None"]),
    "a block that the plan tears": (
        lambda: tiny_grown_llama(depth_plan="Loop(2-2x2-2)"),
        lambda model: loop(model, 3, 5, 1) and loop(model, 2, 4, 1) and loop(model, 0, 6, 1),
        ["0 to 5", "one after the other"],
    ),
    "Mamba": (mamba, lambda model: loop(model, 1, 3, 1), ["MambaForCausalLM", "only decoders"]),
    "T5": (t5, lambda model: loop(model, 1, 3, 1), ["T5ForConditionalGeneration", "only decoders"]),
    "a module": (lambda: nn.Linear(2, 2), lambda model: loop(model, 0, 1, 1), ["Linear", "unwrap"]),
    "a retrofit past the end": (llama, lambda model: add_recurrence(model, 4, 7), ["4 to 6"]),
    "a retrofit of nothing": (tiny_grown_llama, lambda model: add_recurrence(model, 2, 2), ["stop=2"]),
    "unroll with LoRA": (with_lora, unroll, ["adapters", "merge_and_unload"]),
    "unroll inside of LoRA": (lambda: with_lora(True), unroll, ["adapters", "merge_and_unload"]),
    "unroll with IA3": (with_ia3, unroll, ["adapters", "merge_and_unload"]),
    "unroll LoopedGPT": (tiny_model, unroll, ["LoopedGPTForCausalLM", "only GrownLlama"]),
    "unroll RecurrentGPT": (tiny_recurrent_gpt, unroll, ["RecurrentGPTForCausalLM", "only GrownLlama"]),
    "unroll a mixture": (TINY_MODELS["mixture_of_recursions"], unroll, ["MixtureOfRecursions", "only GrownLlama"]),
    "unroll a module": (lambda: nn.Linear(2, 2), unroll, ["Linear"]),
    "unroll passes of a Llama": (
        lambda: looped("llama"),
        lambda model: unroll(model, num_recurrences=2),
        ["num_recurrences=2", "looping.loop"],
    ),
    "unroll no pass": (tiny_grown_llama, lambda model: unroll(model, num_recurrences=0), ["num_recurrences=0"]),
    "unroll shared keys": (
        lambda: tiny_grown_llama(kv_sharing="first"),
        unroll,
        ["kv_sharing='first'", "'all'"],
    ),
    "unroll kept keys": (
        lambda: tiny_grown_llama(kv_sharing=2),
        unroll,
        ["kv_sharing=2", "'all'"],
    ),
    "swap out of range": (llama, lambda model: swap(model, 5, 1), ["s=5", "at most 4", "6x1"]),
    "swap too long": (llama, lambda model: swap(model, 0, 4), ["length=4", "at most 3"]),
    "swap of nothing": (llama, lambda model: swap(model, 0, 0), ["length=0", "at least 1"]),
    "skip of all": (llama, lambda model: skip(model, 0, 6), ["length=6", "at most 5"]),
    "reverse past the end": (llama, lambda model: reverse(model, 4, 3), ["s=4", "at most 3"]),
    "append under a loop": (lambda: looped("llama"), lambda model: model.model.layers.append(nn.Identity()), ["undo"]),
    "delete under a loop": (lambda: looped("llama"), lambda model: model.model.layers.__delitem__(0), ["undo"]),
    "set under a loop": (
        lambda: looped("llama"),
        lambda model: model.model.layers.__setitem__(0, nn.Identity()),
        ["undo"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence_and_changes_nothing(case):
    build, act, named = REFUSED[case]
    model = build()
    whole = isinstance(model, PreTrainedModel) and case not in ("Mamba", "T5", "a block that the plan tears")
    before = Everything(model) if whole else model.state_dict()
    with pytest.raises(ValueError) as error:
        act(model)
    message = str(error.value)
    assert all(part in message for part in named), message
    assert "\n" not in message and message.endswith(".") and len(message) < 250, message
    assert (Everything(model) if whole else model.state_dict().keys()) == (before if whole else before.keys())


# Unrolling


def grown(plan: str = "Loop(4x6)", **fields):
    return tiny_grown_llama(depth_plan=plan, **fields)


def test_grown_llama_unrolls_to_a_llama_with_every_bit_of_its_logits():
    model = grown()
    unrolled = unroll(model)
    assert type(unrolled) is LlamaForCausalLM and type(unrolled.config) is LlamaConfig
    assert unrolled.config.num_hidden_layers == len(unrolled.model.layers) == 24
    assert torch.equal(logits(unrolled), logits(model))
    assert not any(hasattr(unrolled.config, name) for name in ("depth_plan", "history", "kv_sharing", "auto_map"))
    by_hand = LlamaForCausalLM(unrolled.config)
    copy_layers(model, by_hand, tuple(range(4)) * 6)
    assert torch.equal(logits(by_hand), logits(model))
    for method in METHODS.values():
        ids = IDS[:1] if "prompt_lookup_num_tokens" in method else IDS
        assert torch.equal(generate(unrolled, ids, **method)[0], generate(model, ids, **method)[0])


@pytest.mark.parametrize("plan", ["6x1", "Loop(1-2x3-1)", "0 1 2 1 2 3"])
def test_every_plan_unrolls_to_its_executed_layers(plan):
    model = grown(plan, kv_sharing="all")
    unrolled = unroll(model)
    assert len(unrolled.model.layers) == DepthPlan.parse(plan).effective_depth
    assert torch.equal(logits(unrolled), logits(model))


def test_an_order_that_is_no_loop_unrolls_too():
    model = grown("0 1 0 2 1 3")
    unrolled = unroll(model)
    assert torch.equal(logits(unrolled), logits(model))
    assert torch.equal(logits(unrolled), logits(copy_layers(model, copy.deepcopy(unrolled), (0, 1, 0, 2, 1, 3))))


def test_the_number_of_passes_to_unroll_is_an_argument():
    model = grown("Loop(1-2x3-1)")
    for passes in (1, 2, 5):
        unrolled = unroll(model, num_recurrences=passes)
        assert unrolled.config.num_hidden_layers == 2 + 2 * passes
        assert torch.equal(logits(unrolled), logits(model, num_recurrences=passes))


def test_one_kept_pass_of_one_can_be_unrolled():
    model = grown("Loop(1-2x3-1)", kv_sharing="first")
    assert torch.equal(logits(unroll(model, num_recurrences=1)), logits(model, num_recurrences=1))


def test_loops_and_interventions_on_a_grown_llama_unroll_with_it():
    model = grown("Loop(1-2x3-1)")
    with loop(model, 0, 1, 2), swap(model, 4, 1):
        assert torch.equal(logits(unroll(model)), logits(model))
        assert len(unroll(model).model.layers) == 10
    assert len(unroll(model).model.layers) == 8


@pytest.mark.parametrize("build", [grown, lambda: looped("llama"), lambda: looped("gpt2")])
def test_unrolled_layers_train_on_their_own(build):
    model = build().train()
    unrolled = unroll(model)
    owned = {parameter.data_ptr() for parameter in model.parameters()}
    storages = [parameter.data_ptr() for parameter in unrolled.parameters()]
    assert len(set(storages)) == len(storages) and not owned & set(storages)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies = copy.deepcopy(unrolled.state_dict())
    loss(unrolled).backward()
    torch.optim.SGD(unrolled.parameters(), lr=0.1).step()
    assert is_bit_equal(model.state_dict(), before)
    trained = layer_list(unrolled)
    order = executed_plan(model).order
    (first, second) = [place for place, layer in enumerate(order) if layer == order[-1] or layer == 2][:2]
    assert not is_bit_equal(dict(trained[first].state_dict()), dict(trained[second].state_dict()))
    assert not is_bit_equal(dict(unrolled.state_dict()), copies)


@pytest.mark.parametrize(
    ("tied", "dtype", "training"),
    [
        (False, torch.float32, False),
        (True, torch.float32, True),
        (False, torch.bfloat16, True),
        (True, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("kind", ["grown_llama", "llama"])
def test_unrolling_keeps_dtype_mode_tying_and_generation_config(tied, dtype, training, kind):
    fields = {"tie_word_embeddings": tied, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    if kind == "llama":
        model = llama(**fields)
        loop(model, *BLOCK)
    else:
        model = grown("Loop(1-2x3-1)", **fields)
    model = model.to(dtype).train(training)
    model.generation_config.max_new_tokens = 3
    model.generation_config.temperature = 0.7
    unrolled = unroll(model)
    assert all(parameter.dtype == dtype for parameter in unrolled.parameters()) and unrolled.dtype == dtype
    assert all(module.training == training for module in unrolled.modules())
    assert unrolled.generation_config.to_dict() == model.generation_config.to_dict()
    assert unrolled.generation_config is not model.generation_config
    assert unrolled.config.tie_word_embeddings == tied
    assert unrolled.config.rope_parameters == model.config.rope_parameters
    assert (unrolled.lm_head.weight is unrolled.model.embed_tokens.weight) == tied
    assert is_bit_equal({"head": unrolled.lm_head.weight}, {"head": model.lm_head.weight})
    if dtype == torch.float32:
        assert torch.equal(logits(unrolled), logits(model))


@pytest.mark.parametrize("case", ["grown_llama", "llama", "gpt2"])
def test_unrolling_keeps_the_attention_implementation(case):
    model = looped(case) if case in PLAIN else grown("Loop(1-2x3-1)")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert unroll(model).config._attn_implementation == implementation


HEADS = [
    (GrownLlamaForSequenceClassification, LlamaForSequenceClassification),
    (GrownLlamaForTokenClassification, LlamaForTokenClassification),
    (GrownLlamaForQuestionAnswering, LlamaForQuestionAnswering),
    (GrownLlamaModel, LlamaModel),
]


@pytest.mark.parametrize(("ours", "theirs"), HEADS, ids=lambda head: head.__name__)
def test_every_head_unrolls_to_llamas(ours, theirs, tmp_path):
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    config = grown("Loop(1-2x3-1)", num_labels=3, **labels).config
    model = randomise(ours(config)).eval()
    unrolled = unroll(model)
    assert type(unrolled) is theirs and unrolled.config.id2label == {0: "a", 1: "b", 2: "c"}
    unrolled.save_pretrained(tmp_path)
    for one in (unrolled, theirs.from_pretrained(tmp_path)):
        with torch.no_grad():
            pairs = list(zip(one(IDS).to_tuple(), model(IDS).to_tuple()))
        pairs = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        assert pairs and all(torch.equal(*pair) for pair in pairs)


def test_a_model_whose_layers_know_their_number_is_not_unrolled_to_another_function():
    """GPT-2 may divide attention by the number of the layer, which a copy further down does otherwise."""
    model = plain("gpt2", scale_attn_by_inverse_layer_idx=True)
    loop(model, *BLOCK)
    try:
        unrolled = unroll(model)
    except ValueError as error:
        assert "scal" in str(error) and "\n" not in str(error)
    else:
        assert torch.equal(logits(unrolled), logits(model))


# A text model inside another


def gemma3_with_sight() -> Gemma3ForConditionalGeneration:
    text = {**GATED, "head_dim": 8, "sliding_window": 4, "layer_types": TYPES, "num_hidden_layers": 6}
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**sight, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    )
    return randomise(Gemma3ForConditionalGeneration(config), std=0.1).eval()


def test_the_text_model_of_a_larger_one_is_looped_saved_and_unrolled(tmp_path):
    model, ids = gemma3_with_sight(), IDS % 90 + 1
    unlooped = logits(model, ids)
    model.save_pretrained(tmp_path)  # which notes the class in the configuration
    before = Everything(model)
    handle = loop(model, *BLOCK)
    found = logits(model, ids)
    assert model.config.text_config.num_hidden_layers == len(ORDER)
    assert (found - unlooped).abs().max() > 0.05
    assert torch.equal(logits(unroll(model), ids), found)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["text_config"]["looped_layers"] == [list(BLOCK)] and saved["text_config"]["num_hidden_layers"] == 6
    assert torch.equal(logits(load(str(tmp_path), Gemma3ForConditionalGeneration), ids), found)
    handle.undo()
    assert Everything(model) == before and torch.equal(logits(model, ids), unlooped)


# Retrofitted recurrence


def test_a_baseline_with_a_retrofitted_block_executes_28_layers(tmp_path):
    model = grown("24x1", hidden_size=32, intermediate_size=48, num_attention_heads=4)
    with loop(model, 8, 12, 1):
        expected = logits(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert add_recurrence(model, 8, 12) is model
    assert model.config.depth_plan == "Loop(8-4x2-12)" and model.config.num_hidden_layers == 28
    config = model.config
    assert (config.num_unique_layers, config.num_recurrences, config.trained_recurrences) == (24, 2, 2)
    assert torch.equal(logits(model), expected) and is_bit_equal(model.state_dict(), weights)
    assert len(model(IDS, use_cache=True).cache.layers) == 28
    model.save_pretrained(tmp_path)
    for loaded in (load(str(tmp_path)), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(logits(loaded), expected) and loaded.config.depth_plan == "Loop(8-4x2-12)"
    assert "looped_layers" not in json.loads((tmp_path / "config.json").read_text())


def test_a_looped_model_gets_one_more_pass():
    model = grown("Loop(4-4x4-4)", hidden_size=32, intermediate_size=48, num_attention_heads=4)
    five = logits(model, num_recurrences=5)
    with loop(model, 4, 8, 1):
        assert torch.equal(logits(model), five)
    add_recurrence(model, 4, 8)
    assert model.config.depth_plan == "Loop(4-4x5-4)" and model.config.trained_recurrences == 5
    assert torch.equal(logits(model), five)
    add_recurrence(model, 0, 4)  # another block: no loop of one block any more
    order = (*range(4), *range(4), *list(range(4, 8)) * 5, *range(8, 12))
    assert DepthPlan.parse(model.config.depth_plan).order == order and model.config.num_hidden_layers == 32
    assert torch.equal(logits(model), logits(unroll(model)))


def test_a_retrofitted_block_learns_through_every_pass():
    model = add_recurrence(grown("6x1").train(), 2, 4).double()
    copies = unroll(model)
    found, apart = gradients(model, loss(model)), gradients(copies, loss(copies))
    order = (0, 1, 2, 3, 2, 3, 4, 5)
    for layer in range(6):
        places = [place for place, one in enumerate(order) if one == layer]
        weight = "model.layers.{}.mlp.up_proj.weight"
        each = [apart[weight.format(place)] for place in places]
        assert all(gradient.abs().max() > 0 for gradient in each)
        torch.testing.assert_close(found[weight.format(layer)], sum(each), rtol=1e-9, atol=1e-12)


def test_any_decoder_gets_a_recurrence_that_stays(tmp_path):
    model = llama()
    assert add_recurrence(model, 2, 4) is model
    with loop(expected := llama(), 2, 4, 1):
        wanted = logits(expected)
    assert torch.equal(logits(model), wanted)
    assert any(gradient.abs().max() > 0 for gradient in gradients(model, loss(model)).values())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(str(tmp_path))), wanted)
