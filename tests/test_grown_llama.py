"""GrownLlama is transformers' Llama, to the bit, with its layers visited in the order of a plan."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import gradients, is_bit_equal, randomise, tiny_grown_config, tiny_grown_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM


equal = partial(torch.testing.assert_close, atol=0, rtol=0)
IDS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))
ROWS = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(2))
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NATIVE = {  # checkpoints that this family reads
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "head size": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=24)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "scaled rotary": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3, rms_norm_eps=1e-5)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None, head_dim=24)),
}
PLANS = ("Loop(1-2x3-1)", "Loop(2x3)", "Loop(1-2x2)", "Loop(2x2-1)", "0 1 0 2", "0 2 1 2", "2 0", "1 1", "0 1 2 1 2 3")
both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def saved(folder: Path, name: str = "llama") -> Path:
    """A checkpoint of transformers' own, with random weights."""
    model_class, config = NATIVE[name]
    randomise(model_class(config)).save_pretrained(folder)
    return folder


def unrolled(model: GrownLlamaForCausalLM, num_recurrences: int | None = None) -> LlamaForCausalLM:
    """transformers' Llama, with a layer of its own for every executed one."""
    config, order = model.config, model.config.plan(num_recurrences).order
    same = {name: getattr(config, name) for name in LlamaConfig.__annotations__ if name in config.__annotations__}
    llama = LlamaForCausalLM(LlamaConfig(**same, num_hidden_layers=len(order)))
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    for position, layer in enumerate(order):
        for name, tensor in model.model.layers[layer].state_dict().items():
            weights[f"model.layers.{position}.{name}"] = tensor
    llama.load_state_dict(weights)
    llama.set_attn_implementation(config._attn_implementation)
    return llama.to(model.dtype).eval()


@torch.no_grad()
def cached(model: PreTrainedModel, **kwargs) -> tuple[torch.Tensor, list]:
    """Logits of `IDS` in chunks, and what they left in the cache for each executed position."""
    cache, logits = None, []
    for chunk in IDS.split([5, 1, 1, 4], dim=1):
        output = model(chunk, cache=cache, use_cache=True, **kwargs)
        cache = output.cache
        logits.append(output.logits)
    slots = range(len(cache.layers))
    if isinstance(model, GrownLlamaForCausalLM):
        slots = model.config.plan(kwargs.get("num_recurrences")).cache_slots
    assert sorted(slots) == list(range(len(cache.layers)))
    return torch.cat(logits, dim=1), [cache.layers[slot] for slot in slots]


@torch.no_grad()
def check_same_function(model: PreTrainedModel, other: PreTrainedModel, **kwargs) -> None:
    """Every bit of the logits, uncached and cached, of the keys and values of each position, and the generated text."""
    expected = other(IDS, use_cache=False).logits
    found = model(IDS, use_cache=False, **kwargs).logits
    assert found.dtype is expected.dtype
    equal(found, expected)
    (found, held), (expected, expected_held) = cached(model, **kwargs), cached(other)
    equal(found, expected)
    assert len(held) == len(expected_held)
    for one, two in zip(held, expected_held):
        equal(one.keys, two.keys)
        equal(one.values, two.values)
    settings = {"max_new_tokens": 6, "do_sample": False}
    equal(model.generate(IDS, **settings, **kwargs), other.generate(IDS, **settings))


# A Llama is a GrownLlama


@pytest.mark.parametrize("name", NATIVE)
@both_attentions
@both_dtypes
def test_a_llama_checkpoint_loads_as_it_is_and_gives_every_bit(name, attention, dtype, tmp_path):
    settings = {"dtype": dtype, "attn_implementation": attention}
    native = NATIVE[name][0].from_pretrained(saved(tmp_path, name), **settings)
    grown = GrownLlamaForCausalLM.from_pretrained(tmp_path, **settings)
    assert grown.config.depth_plan == "6x1" and grown.dtype is dtype
    assert is_bit_equal(grown.state_dict(), native.state_dict())
    check_same_function(grown, native)


def test_what_is_saved_of_a_llama_checkpoint_is_a_grown_llama(tmp_path):
    grown = GrownLlamaForCausalLM.from_pretrained(saved(tmp_path / "llama"))
    assert grown.config.model_type == "grown_llama"
    grown.save_pretrained(tmp_path / "grown")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert type(again) is GrownLlamaForCausalLM and again.config.depth_plan == "6x1"
    assert is_bit_equal(again.state_dict(), grown.state_dict())


def test_a_llama_reads_the_weights_of_a_grown_stack(tmp_path):
    grown = tiny_grown_llama(depth_plan="6x1")
    grown.save_pretrained(tmp_path)
    native = LlamaForCausalLM.from_pretrained(tmp_path, config=LlamaConfig(**SHAPE))
    check_same_function(grown, native.eval())


def test_a_checkpoint_that_attends_in_a_window_is_refused(tmp_path):
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no sliding_window \(got 8\)"):
        GrownLlamaForCausalLM.from_pretrained(tmp_path)


def test_defaults_are_those_of_llama():
    grown, native = GrownLlamaConfig(), LlamaConfig()
    assert grown.depth_plan == "32x1"
    for name in LlamaConfig.__annotations__:
        if name not in ("model_type", "base_model_tp_plan", "base_model_pp_plan", "base_model_fsdp_plan"):
            assert getattr(grown, name) == getattr(native, name), name


def test_a_new_model_is_initialised_as_a_new_llama():
    fields = {**SHAPE, "hidden_size": 128, "vocab_size": 2000, "initializer_range": 0.03}
    grown, native = GrownLlamaForCausalLM(GrownLlamaConfig(**fields)), LlamaForCausalLM(LlamaConfig(**fields))
    expected = dict(native.named_parameters())
    for name, parameter in grown.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.03, rel=0.03)
        else:
            equal(parameter, expected.pop(name))
    assert (grown.model.embed_tokens.weight[0] == 0).all() and (native.model.embed_tokens.weight[0] == 0).all()
    assert not any("norm" in name for name in expected)


# A plan is the unrolled Llama


@pytest.mark.parametrize("plan", PLANS)
@both_attentions
@both_dtypes
def test_a_plan_gives_every_bit_of_the_unrolled_llama(plan, attention, dtype):
    model = tiny_grown_llama(depth_plan=plan, head_dim=24, attention_bias=True).to(dtype)
    model.set_attn_implementation(attention)
    check_same_function(model, unrolled(model))


@pytest.mark.parametrize(("plan", "turned"), [("Loop(1-2x3-1)", 5), ("Loop(1-2x3-1)", 1), ("2x1", 3), ("1-2x1-1", 2)])
def test_recurrences_of_a_call_give_every_bit_of_the_unrolled_llama(plan, turned):
    model = tiny_grown_llama(depth_plan=plan)
    check_same_function(model, unrolled(model, turned), num_recurrences=turned)
    model.config.num_recurrences = turned
    check_same_function(model, unrolled(model))


def test_eight_layers_loop_as_a_whole_when_asked_for_two_passes():
    model = tiny_grown_llama(depth_plan="8x1")
    order = model.config.plan(2).order
    assert order == (*range(8), *range(8))
    check_same_function(model, unrolled(model, 2), num_recurrences=2)


@pytest.mark.parametrize("plan", ["0 1 0 2", "0 2 0", "2 0"])
def test_an_order_may_repeat_and_leave_out_layers_which_stay_stored_and_untrained(plan):
    model = tiny_grown_llama(depth_plan=plan)
    assert len(model.model.layers) == model.config.num_unique_layers == 3
    assert model.config.num_hidden_layers == len(plan.split())
    model(ROWS, labels=ROWS).loss.backward()
    never = set(range(3)) - set(model.config.plan().order)
    for index, layer in enumerate(model.model.layers):
        assert all((parameter.grad is None) is (index in never) for parameter in layer.parameters())


def test_every_executed_layer_has_a_cache_slot_of_its_own():
    for plan in PLANS:
        model = tiny_grown_llama(depth_plan=plan)
        _, layers = cached(model)
        assert len(layers) == model.config.num_hidden_layers
        assert [layer.get_seq_length() for layer in layers] == [11] * len(layers)


# Training


def assert_close_gradients(found: dict, expected: dict) -> None:
    """To 1e-5 of each tensor's largest entry."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("plan", ["Loop(1-2x3-1)", "Loop(4x2)", "0 1 0 2", "1 1 0"])
def test_the_gradient_of_a_tied_layer_is_the_sum_over_its_executions(plan):
    model = tiny_grown_llama(depth_plan=plan).train()
    llama = unrolled(model).train()
    untied = gradients(llama, llama(ROWS, labels=ROWS).loss)
    expected = {name: gradient for name, gradient in untied.items() if ".layers." not in name}
    order = model.config.plan().order
    for layer in set(order):
        for name, _ in model.model.layers[layer].named_parameters():
            shares = [untied[f"model.layers.{i}.{name}"] for i, visited in enumerate(order) if visited == layer]
            expected[f"model.layers.{layer}.{name}"] = sum(shares)
            if len(shares) > 1:
                assert (shares[0] - shares[-1]).abs().max() > 0.01 * shares[0].abs().max(), "executions differ"
    assert_close_gradients(gradients(model, model(ROWS, labels=ROWS).loss), expected)


@both_attentions
@both_dtypes
def test_a_training_step_without_repeats_is_llama_s_to_the_bit(attention, dtype):
    model = tiny_grown_llama(depth_plan="4x1", tie_word_embeddings=True).to(dtype)
    model.set_attn_implementation(attention)
    llama, results = unrolled(model), []
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for one in (model.train(), llama.train()):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        loss = one(ROWS, labels=ROWS).loss
        found = gradients(one, loss)
        one(ROWS, labels=ROWS).loss.backward()
        optimizer.step()
        results.append((loss, found, dict(one.named_parameters())))
    (loss, found, weights), (expected_loss, expected, expected_weights) = results
    equal(loss, expected_loss)
    assert is_bit_equal(found, expected) and is_bit_equal(weights, expected_weights)
    assert not is_bit_equal(weights, start)


@both_dtypes
def test_the_loss_of_a_loop_is_that_of_the_unrolled_llama_to_the_bit(dtype):
    model = tiny_grown_llama().to(dtype).train()
    llama = unrolled(model).train()
    equal(model(ROWS, labels=ROWS).loss, llama(ROWS, labels=ROWS).loss)


def test_autocast_trains_a_loop_as_it_trains_the_unrolled_llama():
    model = tiny_grown_llama().train()
    llama = unrolled(model).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [one(ROWS, labels=ROWS).loss for one in (model, llama)]
    equal(*losses)
    head = [gradients(one, loss)["lm_head.weight"] for one, loss in zip((model, llama), losses)]
    equal(*head)


# Depth


@pytest.mark.parametrize(
    ("plan", "counts", "unique", "executed", "order"),
    [
        ("Loop(4x6)", (0, 4, 6, 0), 4, 24, tuple(t % 4 for t in range(24))),
        ("Loop(4x8)", (0, 4, 8, 0), 4, 32, tuple(t % 4 for t in range(32))),
        ("Loop(4-4x4-4)", (4, 4, 4, 4), 12, 24, (0, 1, 2, 3, *[4, 5, 6, 7] * 4, 8, 9, 10, 11)),
        ("24x1", (0, 24, 1, 0), 24, 24, tuple(range(24))),
        ("2-3x1-1", (2, 3, 1, 1), 6, 6, tuple(range(6))),
        ("0 1 2 1 2 3", (1, 2, 2, 1), 4, 6, (0, 1, 2, 1, 2, 3)),
        ("0 1 0 2", (3, 0, 1, 0), 3, 4, (0, 1, 0, 2)),
        ("0 3", (4, 0, 1, 0), 4, 2, (0, 3)),
    ],
)
def test_the_counts_follow_from_the_plan(plan, counts, unique, executed, order):
    config = tiny_grown_config(depth_plan=plan)
    found = config.num_prelude_layers, config.num_core_layers, config.num_recurrences, config.num_coda_layers
    assert found == counts
    assert (config.num_unique_layers, config.num_hidden_layers) == (unique, executed)
    assert config.plan().order == order and config.trained_recurrences == counts[2]


def test_a_number_of_layers_is_a_dense_plan_and_may_stand_beside_one_that_agrees():
    assert GrownLlamaConfig(num_hidden_layers=6).depth_plan == "6x1"
    assert GrownLlamaConfig(num_hidden_layers=6, num_recurrences=2).depth_plan == "Loop(6x2)"
    assert GrownLlamaConfig(num_hidden_layers=24, depth_plan="Loop(4-4x4-4)").depth_plan == "Loop(4-4x4-4)"
    assert GrownLlamaConfig(num_hidden_layers=4, depth_plan="0 1 0 2").num_unique_layers == 3


def test_turning_the_block_rewrites_the_plan_and_keeps_what_was_trained():
    config = tiny_grown_config(depth_plan="Loop(4-4x4-4)")
    for passes, plan in ((5, "Loop(4-4x5-4)"), (1, "Loop(4-4x1-4)"), (4, "Loop(4-4x4-4)")):
        config.num_recurrences = passes
        assert (config.depth_plan, config.num_recurrences) == (plan, passes)
        assert (config.num_prelude_layers, config.num_core_layers, config.num_coda_layers) == (4, 4, 4)
    config.num_hidden_layers = 20
    assert config.depth_plan == "Loop(4-4x3-4)" and config.trained_recurrences == 4
    whole = tiny_grown_config(depth_plan="4x1")
    whole.num_recurrences = 2
    assert whole.depth_plan == "Loop(4x2)"
    order = tiny_grown_config(depth_plan="0 1 0 2")
    order.num_recurrences = 1  # what it is
    assert order.depth_plan == "0 1 0 2"


def test_a_turned_model_comes_back_with_its_plan_and_its_history(tmp_path):
    history = [{"operator": "lidas", "block_size": 2, "num_layers": 2}]
    for plan, turned in (("Loop(1-2x3-1)", "Loop(1-2x5-1)"), ("0 1 0 2", None)):
        model = tiny_grown_llama(depth_plan=plan, history=history)
        if turned:
            model.config.num_recurrences = 5
        folder = tmp_path / plan
        model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        assert (written["depth_plan"], written["history"]) == (turned or plan, history)
        assert not {"num_hidden_layers", "num_recurrences", "num_core_layers"} & written.keys()
        config = AutoConfig.from_pretrained(folder)
        assert (config.depth_plan, config.history) == (turned or plan, history)
        assert config.trained_recurrences == model.config.trained_recurrences
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        check_same_function(loaded, model)


OVERRIDES: dict[str, tuple[dict, tuple[int, ...]]] = {  # of a checkpoint of six layers
    "a plan": ({"depth_plan": "Loop(1-2x3-3)"}, (0, 1, 2, 1, 2, 1, 2, 3, 4, 5)),
    "an order": ({"depth_plan": "0 1 2 3 1 2 5 4"}, (0, 1, 2, 3, 1, 2, 5, 4)),
    "recurrences": ({"num_recurrences": 2}, (*range(6), *range(6))),
    "a depth": ({"num_hidden_layers": 12}, (*range(6), *range(6))),
    "a plan, turned": ({"depth_plan": "Loop(1-2x3-3)", "num_recurrences": 2}, (0, 1, 2, 1, 2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_llama_checkpoint_is_looped_by_an_override(name, tmp_path):
    override, order = OVERRIDES[name]
    model = GrownLlamaForCausalLM.from_pretrained(saved(tmp_path), **override)
    assert model.config.plan().order == order and model.config.trained_recurrences == 1
    dense = LlamaForCausalLM.from_pretrained(tmp_path)
    assert is_bit_equal(model.state_dict(), dense.state_dict())
    check_same_function(model, unrolled(model))
    assert not torch.equal(model(IDS).logits, dense(IDS).logits)


def test_layers_that_run_again_stay_gathered_under_the_fsdp_plan():
    def kept(plan: str) -> set[str]:
        whole = tiny_grown_config(depth_plan=plan).base_model_fsdp_plan
        return {name for name, how in whole.items() if how == "keep_full_weight" and name.startswith("layers.")}

    assert kept("Loop(1-2x3-1)") == {"layers.1", "layers.2"}
    assert kept("0 1 0 2") == {"layers.0"}
    assert kept("4x1") == set()


@pytest.mark.parametrize("kv_sharing", [1, "first", "average", "last"])
@pytest.mark.parametrize("plan", ["0 1 2 1 2 3", "0 1 0 2"])
def test_kv_sharing_needs_a_loop(plan, kv_sharing):
    with pytest.raises(ValueError, match=f"kv_sharing={kv_sharing!r}.*depth_plan='{plan}'"):
        tiny_grown_config(depth_plan=plan, kv_sharing=kv_sharing)
