"""Swap, skip, reverse and repeat: the order that they say is the order that runs, in every family, for a while."""

import copy
import itertools
import json
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from conftest import INJECTIONS, TINY_MODELS, randomise, tiny_grown_llama, tiny_mixture, tiny_model, tiny_recurrent_gpt
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from modeling_looped import DepthPlan
from modeling_looped.interventions import PlanEdit, executed_plan, plan_edits, repeat, reverse, skip, swap


IDS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))
SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(**SHAPE, **TOKENS, num_hidden_layers=8, intermediate_size=48, num_key_value_heads=2)
    return randomise(LlamaForCausalLM(config), std=0.1).eval()


def gpt2() -> GPT2LMHeadModel:
    return randomise(GPT2LMHeadModel(GPT2Config(**SHAPE, **TOKENS, num_hidden_layers=8)), std=0.1).eval()


# All of 8 executed layers; the families run Loop(1-2x3-1).
MODELS = {**TINY_MODELS, "llama": llama, "gpt2": gpt2}
DEPTH = 8
EDITS: dict[str, Callable[[PreTrainedModel], PlanEdit]] = {
    "swap 2": lambda model: swap(model, 2),
    "swap 0": lambda model: swap(model, 0),
    "swap 0-2": lambda model: swap(model, 0, 2),
    "swap halves": lambda model: swap(model, 0, 4),
    "skip 0": lambda model: skip(model, 0),
    "skip 4": lambda model: skip(model, 4),
    "skip a pass": lambda model: skip(model, 3, 2),
    "skip the last": lambda model: skip(model, 7),
    "skip half": lambda model: skip(model, 2, 4),
    "reverse 4": lambda model: reverse(model, 2, 4),
    "reverse all": lambda model: reverse(model, 0, 8),
    "repeat 0": lambda model: repeat(model, 0, 1),
    "repeat 1 twice": lambda model: repeat(model, 1, 2, 2),
    "repeat the last": lambda model: repeat(model, 3, 4),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_family = pytest.mark.parametrize("name", TINY_MODELS)
every_edit = pytest.mark.parametrize("edit", EDITS)
# One of each kind, and those that change the number of passes.
SOME = ["swap 0-2", "skip 0", "skip a pass", "skip half", "reverse 4", "repeat 1 twice"]
some_edits = pytest.mark.parametrize("edit", SOME)


@lru_cache
def original(name: str) -> PreTrainedModel:
    return MODELS[name]()


def build(name: str) -> PreTrainedModel:
    return copy.deepcopy(original(name))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, **kwargs) -> torch.Tensor:
    return model(ids, **{"use_cache": False, **kwargs}).logits


@torch.no_grad()
def in_chunks(model: PreTrainedModel, cache=None, lengths: tuple[int, ...] = (6, 1, 4)) -> torch.Tensor:
    chunks = []
    for chunk in IDS.split(lengths, dim=1):
        output = model(chunk, cache=cache, use_cache=True)
        chunks.append(output.logits)
        cache = output.cache
    return torch.cat(chunks, dim=1)


# The order that runs


@torch.no_grad()
def by_hand(model: PreTrainedModel, order: tuple[int, ...]) -> torch.Tensor:
    """Llama's, GPT-2's and GrownLlama's forward written out: transformers' own layers, in `order`."""
    positions = torch.arange(IDS.shape[1])[None]
    if isinstance(model, GPT2LMHeadModel):
        hidden = model.transformer.wte(IDS) + model.transformer.wpe(positions)
        layers, norm, more = model.transformer.h, model.transformer.ln_f, {}
    else:
        hidden = model.model.embed_tokens(IDS)
        layers, norm = model.model.layers, model.model.norm
        more = {"position_embeddings": model.model.rotary_emb(hidden, position_ids=positions)}
    for layer in order:
        hidden = layers[layer](hidden, attention_mask=None, **more)
    return model.lm_head(norm(hidden))


@pytest.mark.parametrize("name", ["llama", "gpt2", "grown_llama"])
@every_edit
def test_the_logits_are_those_of_the_layers_in_the_edited_order(name, edit):
    model, plain = build(name), original(name)
    assert torch.equal(by_hand(plain, executed_plan(plain).order), logits(plain)), "what is written here is the model"
    with EDITS[edit](model) as edited:
        order = edited.plan.order
        assert order != executed_plan(plain).order
        found = logits(model)
        assert torch.equal(found, by_hand(plain, order))
    assert (found - logits(plain)).abs().max() > 0.05


# And of which layer which position is, in words of the test alone.
ORDERS = {
    "swap 2": "01324567",
    "swap 0": "10234567",
    "swap 0-2": "23014567",
    "swap halves": "45670123",
    "skip 0": "1234567",
    "skip 4": "0123567",
    "skip a pass": "012567",
    "skip the last": "0123456",
    "skip half": "0167",
    "reverse 4": "01543267",
    "reverse all": "76543210",
    "repeat 0": "001234567",
    "repeat 1 twice": "0111234567",
    "repeat the last": "012334567",
}


@every_edit
def test_the_edited_order_is_what_the_words_say(edit):
    with EDITS[edit](build("llama")) as edited:
        assert "".join(map(str, edited.plan.order)) == ORDERS[edit]
    if not edit.startswith("repeat"):  # which counts unique layers, and the others executed ones
        looped = executed_plan(original("grown_llama")).order
        with EDITS[edit](build("grown_llama")) as edited:
            assert edited.plan.order == tuple(looped[int(position)] for position in ORDERS[edit])


@pytest.mark.parametrize("injection", INJECTIONS)
def test_of_a_loop_with_injections_one_pass_is_edited_and_what_is_between_stays(injection):
    """LoopedGPT's passes written out: swapped inside the second pass alone."""
    model = tiny_model(injection=injection)
    base, positions = model.model, torch.arange(IDS.shape[1])[None]
    with torch.no_grad():
        embeddings, rotary = base.embed(base.embed_tokens(IDS), positions, None)
        mask = torch.full((1, 1, 11, 11), -torch.inf).triu(1)

        def run(hidden, *layers):
            for layer in layers:
                hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
            return hidden

        anchor = run(embeddings, base.prelude[0])
        state = base.injection("open", anchor)
        for recurrence, order in enumerate(((0, 1), (1, 0), (0, 1))):
            output = run(base.injection("read", anchor, state, recurrence), *(base.core[i] for i in order))
            state = base.injection("write", anchor, state, base.recurrence_norm(output), recurrence)
        expected = model.logits(base.norm(run(base.injection("close", state), base.coda[0])))
    unedited = logits(model)
    with swap(model, 3):
        found = logits(model)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - unedited).abs().max() > 0.05


# Identities


@every_model
def test_swaps_are_permutations_and_undo_themselves(name):
    model, before = build(name), logits(original(name))
    order = executed_plan(model).order
    for length in (1, 2, 4):
        for s in range(DEPTH - 2 * length + 1):
            with swap(model, s, length) as once:
                assert sorted(once.plan.order) == sorted(order)
                with swap(model, s, length) as twice:
                    assert twice.plan.order == order and twice.plan.ends == executed_plan(original(name)).ends
                    assert torch.equal(logits(model), before)


def test_a_swap_has_as_many_places_as_the_depth_leaves():
    model = tiny_grown_llama(depth_plan="Loop(4-4x4-4)")  # 24 executed layers
    for length, places in ((1, 23), (2, 21), (4, 17), (8, 9)):
        valid = []
        for s in range(-1, 25):
            try:
                swap(model, s, length).undo()
            except ValueError:
                continue
            valid.append(s)
        assert valid == list(range(places))


def whole_passes() -> list:
    models = {name: build for name, build in TINY_MODELS.items() if name != "looped_gpt"}
    models |= {f"looped_gpt-{one}": lambda one=one: tiny_model(injection=one) for one in INJECTIONS}
    models["token_choice"] = lambda: tiny_mixture(routing="token_choice")
    models["one-layer core"] = lambda: tiny_model(num_core_layers=1)
    return [pytest.param(build, id=name) for name, build in models.items()]


@pytest.mark.parametrize("make", whole_passes())
def test_skipping_a_pass_is_one_recurrence_less(make):
    model = make()
    core, depth = model.config.num_core_layers, model.config.num_hidden_layers
    assert model.config.num_recurrences == 3
    fewer = {passes: logits(model, num_recurrences=passes) for passes in (1, 2)}
    assert (fewer[1] - fewer[2]).abs().max() > 0.05
    for number in range(3):
        with skip(model, 1 + number * core, core):
            assert torch.equal(logits(model), fewer[2])
            torch.testing.assert_close(in_chunks(model), fewer[2], atol=1e-4, rtol=0)
            assert model.config.num_hidden_layers == depth - core
            with torch.no_grad():
                output = model(IDS, output_recurrences=True, output_hidden_states=True, use_cache=True)
            assert len(output.recurrent_states) == 3 and len(output.hidden_states) == depth - core + 1
            assert len(output.cache.layers) == depth - core
    with skip(model, 1, 2 * core):
        assert torch.equal(logits(model), fewer[1])


@pytest.mark.parametrize("make", whole_passes())
def test_repeating_the_core_is_one_recurrence_more(make):
    model = make()
    core, depth = model.config.num_core_layers, model.config.num_hidden_layers
    if model.config.weights_of_each_pass():  # of which there are none for a fourth pass
        before = logits(model)
        with repeat(model, 1, 1 + core), pytest.raises(ValueError, match="num_recurrences=4 exceeds") as error:
            logits(model)
        assert "\n" not in str(error.value) and torch.equal(logits(model), before)
        with repeat(model, 1, 1 + core):  # and in a model of fewer passes than it was trained with
            assert torch.equal(logits(model, num_recurrences=2), before)
        return
    expected = {times: logits(model, num_recurrences=3 + times) for times in (1, 2)}
    for times in (1, 2):
        with repeat(model, 1, 1 + core, times) as edited:
            assert torch.equal(logits(model), expected[times])
            torch.testing.assert_close(in_chunks(model), expected[times], atol=1e-4, rtol=0)
            assert edited.plan == DepthPlan.looped(1, core, 3 + times, 1)
            with torch.no_grad():
                output = model(IDS, use_cache=True, output_recurrences=True)
            assert len(output.cache.layers) == model.config.num_hidden_layers == depth + times * core
            assert len(output.recurrent_states) == 4 + times
    with repeat(model, 1, 1 + core), repeat(model, 1, 1 + core):
        assert torch.equal(logits(model), expected[2])
        with skip(model, 1, 2 * core):
            assert torch.equal(logits(model), logits(original_of(model)))


def original_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without the edits."""
    other = copy.deepcopy(model)
    other.config.__dict__.pop("plan_edits")
    return other


@every_family
def test_an_edit_holds_at_the_depth_of_the_call(name):
    """Positions count the executed layers of the call, and a pass that it does not run cannot be edited."""
    model = build(name)
    with skip(model, 1, 2):
        assert torch.equal(logits(model, num_recurrences=2), logits(original(name), num_recurrences=1))
        with torch.no_grad():
            states = model(IDS, num_recurrences=2, output_hidden_states=True, use_cache=True)
        assert len(states.hidden_states) == 5 and len(states.cache.layers) == 4
    with swap(model, 6), pytest.raises(ValueError, match="s=6") as error:
        logits(model, num_recurrences=2)
    assert "\n" not in str(error.value)


def test_a_repeat_of_no_times_is_the_identity(tmp_path):
    """Fact 11 of section 9."""
    plan = DepthPlan.parse("Loop(1-2x3-2)")
    assert plan.repeat(1, 3, 0) == plan and plan.repeat(1, 3, 0).ends == plan.ends
    for name in ("llama", "grown_llama", "looped_gpt"):
        model = build(name)
        before = logits(model)
        with repeat(model, 1, 2, 0):
            assert torch.equal(logits(model), before)
            model.save_pretrained(tmp_path / name)
        assert plan_edits(model) == ()
        assert "looped_layers" not in json.loads((tmp_path / name / "config.json").read_text())


# Caches, padding, generation


@every_model
@some_edits
def test_every_cache_holds_what_the_edited_order_needs(name, edit):
    model = build(name)
    with EDITS[edit](model):
        expected, config = logits(model), model.config
        for cache in (DynamicCache(config=config), StaticCache(config, max_cache_len=16)):
            torch.testing.assert_close(in_chunks(model, cache), expected, atol=1e-4, rtol=0)


@every_model
def test_every_place_of_every_edit_is_cached_as_it_is_computed(name):
    model = build(name)
    for edit, lengths in ((swap, (1, 2)), (skip, (1, 2)), (reverse, (3,))):
        for length in lengths:
            for s in range(DEPTH - (2 * length if edit is swap else length) + 1):
                with edit(model, s, length):
                    found = in_chunks(model, lengths=(8, 3))
                    torch.testing.assert_close(found, logits(model), atol=1e-4, rtol=0)


@every_model
def test_the_cache_of_a_forward_has_a_slot_for_every_executed_layer(name):
    model = build(name)
    for edit in EDITS.values():
        with edit(model) as edited, torch.no_grad():
            cache = model(IDS, use_cache=True).cache
            assert len(cache.layers) == edited.plan.effective_depth == model.config.num_hidden_layers
            assert [int(layer.get_seq_length()) for layer in cache.layers] == [11] * len(cache.layers)


@every_model
@pytest.mark.parametrize("edit", ["skip a pass", "repeat 1 twice"])
def test_generation_equals_generation_without_a_cache(name, edit):
    model = build(name)
    settings = {"max_new_tokens": 3, "do_sample": False}
    with EDITS[edit](model):
        expected = model.generate(IDS, use_cache=False, **settings)
        for implementation in ("dynamic", "static"):
            assert torch.equal(model.generate(IDS, cache_implementation=implementation, **settings), expected)
        by_argmax = IDS
        for _ in range(3):
            by_argmax = torch.cat([by_argmax, logits(model, by_argmax)[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(expected, by_argmax)


@every_model
@pytest.mark.parametrize("edit", ["swap 0-2", "skip 0", "repeat 1 twice"])
def test_a_left_padded_row_is_the_row_alone(name, edit):
    model, mask = build(name), torch.ones_like(IDS)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with EDITS[edit](model):
        alone = logits(model, IDS[:1])[0], logits(model, IDS[1:, 5:])[0]
        for attention, use_cache in itertools.product(("eager", "sdpa"), (False, True)):
            model.set_attn_implementation(attention)
            found = logits(model, IDS * mask, attention_mask=mask, position_ids=positions, use_cache=use_cache)
            torch.testing.assert_close(found[0], alone[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(found[1, 5:], alone[1], atol=1e-4, rtol=0)


# What a model says of itself


@every_model
@some_edits
def test_the_config_follows_the_edit_and_comes_back(name, edit):
    model = build(name)
    config, before = model.config, (copy.deepcopy(vars(model.config)), model.config.to_dict(), type(model.config))
    with EDITS[edit](model) as edited:
        depth = edited.plan.effective_depth
        assert executed_plan(model) == edited.plan and len(plan_edits(model)) == 1
        assert model.config is config and config.num_hidden_layers == depth
        with torch.no_grad():
            output = model(IDS, output_hidden_states=True, use_cache=False)
        assert len(output.hidden_states) == depth + 1
        written = {key: value for key, value in config.to_dict().items() if key != "looped_layers"}
        assert written == before[1], "serialised, it is the model that it belongs to"
    assert (vars(config), config.to_dict(), type(config)) == before
    assert torch.equal(logits(model), logits(original(name))) and plan_edits(model) == ()


@every_model
def test_states_come_in_the_edited_order(name):
    model = build(name)
    with torch.no_grad():
        before = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        with swap(model, 3):
            after = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        with skip(model, 7):
            shorter = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert [torch.equal(*pair) for pair in zip(before, after)] == [True] * 4 + [False] * 5
    assert all(torch.equal(*pair) for pair in zip(before[:7], shorter))


@every_model
def test_edits_nest_and_end_with_an_exception(name):
    model, before = build(name), logits(original(name))
    plan = executed_plan(model)
    with swap(model, 2) as outer:
        one = logits(model)
        with pytest.raises(KeyError), skip(model, 5), reverse(model, 0, 3) as inner:
            assert inner.plan == outer.plan == plan.swap(2, 1).skip(5, 1).reverse(0, 3)
            assert torch.equal(logits(model), nested(name, "swap", (2, 1), "skip", (5, 1), "reverse", (0, 3)))
            raise KeyError
        assert executed_plan(model) == plan.swap(2, 1) and torch.equal(logits(model), one)
        outer.undo()
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), before) and executed_plan(model) == plan


def nested(name: str, *edits) -> torch.Tensor:
    model = build(name)
    for method, arguments in zip(edits[::2], edits[1::2]):
        PlanEdit(model, method, arguments)
    return logits(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "grown_llama"])
def test_nested_edits_run_the_order_that_they_leave(name):
    model, plain = build(name), original(name)
    with repeat(model, 1, 3), swap(model, 4, 2), skip(model, 0), reverse(model, 2, 5) as edited:
        assert torch.equal(logits(model), by_hand(plain, edited.plan.order))


@every_model
def test_an_edit_that_others_stand_on_cannot_be_undone_first(name):
    model = build(name)
    longer = repeat(model, 3, 4, 2)
    at_the_end = swap(model, 8)  # positions that the repeat made
    found, plan = logits(model), executed_plan(model)
    with pytest.raises(ValueError, match="s=8") as error:
        longer.undo()
    assert "\n" not in str(error.value)
    assert torch.equal(logits(model), found) and executed_plan(model) == plan
    at_the_end.undo()
    longer.undo()
    assert torch.equal(logits(model), logits(original(name))) and plan_edits(model) == ()


@every_model
def test_edits_of_the_same_kind_are_undone_each_for_itself(name):
    model = build(name)
    first, second = skip(model, 2), skip(model, 2)
    first.undo()
    assert executed_plan(model).effective_depth == DEPTH - 1
    first.undo()
    assert executed_plan(model).effective_depth == DEPTH - 1, "a second call does nothing"
    second.undo()
    assert executed_plan(model).effective_depth == DEPTH


@every_model
def test_saving_under_an_intervention_is_refused_and_writes_nothing(name, tmp_path):
    model = build(name)
    for edit in ("swap 2", "skip 4", "reverse 4"):
        with repeat(model, 0, 1), EDITS[edit](model), pytest.raises(ValueError) as error:
            model.save_pretrained(tmp_path / edit)
        message = str(error.value)
        assert f"({edit.split()[0]})" in message and "undo it first" in message and "\n" not in message
        assert not (tmp_path / edit).exists() or not list((tmp_path / edit).iterdir())
        with EDITS[edit](model), pytest.raises(ValueError, match="undo it first"):
            model.config.save_pretrained(tmp_path / edit)
    model.save_pretrained(tmp_path / "after")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "after")), logits(model))


# Training


@every_model
def test_gradients_flow_through_the_edited_order(name):
    model = build(name).train()
    with skip(model, DEPTH - 1):  # the layer that is left out learns nothing, if it runs nowhere else
        torch.manual_seed(0)
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    last = list(decoder_layers(model))[-1]
    assert all(parameter.grad is None for parameter in last.parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in list(decoder_layers(model))[1].parameters())


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    base = model.base_model
    return base.unique_layers() if hasattr(base, "unique_layers") else getattr(base, "layers", None) or base.h


# Errors


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], object], list[str]]] = {
    f"{edit} of {name}": (act, named)
    for name in MODELS
    for edit, act, named in [
        ("swap past the end", lambda model: swap(model, 7), ["s=7", "at most 6"]),
        ("swap before the start", lambda model: swap(model, -1), ["s=-1", "at least 0"]),
        ("swap of too many", lambda model: swap(model, 0, 5), ["length=5", "at most 4"]),
        ("swap of none", lambda model: swap(model, 0, 0), ["length=0", "at least 1"]),
        ("swap at half a layer", lambda model: swap(model, 1.5), ["s=1.5"]),
        ("swap at a name", lambda model: swap(model, "1"), ["s='1'"]),
        ("skip past the end", lambda model: skip(model, 7, 2), ["s=7", "at most 6"]),
        ("skip of everything", lambda model: skip(model, 0, 8), ["length=8", "at most 7"]),
        ("skip of half a layer", lambda model: skip(model, 0, 0.5), ["length=0.5"]),
        ("reverse past the end", lambda model: reverse(model, 6, 3), ["s=6", "at most 5"]),
        ("reverse of too many", lambda model: reverse(model, 0, 9), ["length=9", "at most 8"]),
        ("repeat of nothing", lambda model: repeat(model, 2, 2), ["stop=2", "at least 3"]),
        ("repeat past the end", lambda model: repeat(model, 7, 9), ["7 to 8"]),
        ("repeat half a time", lambda model: repeat(model, 1, 2, 0.5), ["times=0.5"]),
        ("repeat negative", lambda model: repeat(model, -1, 2), ["start=-1"]),
    ]
}
KV_SHARING = {
    f"{kv_sharing} of {name}": (lambda make=make, kv=kv_sharing: make(kv_sharing=kv), kv_sharing)
    for name, make in {
        "looped_gpt": tiny_model,
        "recurrent_gpt": tiny_recurrent_gpt,
        "mixture_of_recursions": tiny_mixture,
        "grown_llama": tiny_grown_llama,
    }.items()
    for kv_sharing in (("first",) if name == "mixture_of_recursions" else ("first", "last", "average", 2))
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence_and_changes_nothing(case):
    name = case.split()[-1]
    model, (act, named) = original(name), REFUSED[case]
    before, kind = executed_plan(model), type(model.config)
    with pytest.raises(ValueError) as error:
        act(model)
    message = str(error.value)
    assert all(part in message for part in named) and "\n" not in message and message.endswith("."), message
    assert executed_plan(model) == before and plan_edits(model) == ()
    assert type(model.config) is kind


@pytest.mark.parametrize("case", KV_SHARING)
def test_kv_sharing_below_the_passes_is_refused_under_an_edit(case):
    make, kv_sharing = KV_SHARING[case]
    model = make()
    before = logits(model)
    with swap(model, 2):
        for use_cache in (False, True):
            with pytest.raises(ValueError) as error:
                logits(model, use_cache=use_cache)
            message = str(error.value)
            assert f"kv_sharing={kv_sharing!r}" in message and "'all'" in message and "\n" not in message
        with pytest.raises(ValueError, match="kv_sharing"):
            model.generate(IDS, max_new_tokens=2)
        model.config.kv_sharing = "all"  # the remedy
        torch.testing.assert_close(in_chunks(model), logits(model), atol=1e-4, rtol=0)
    model.config.kv_sharing = kv_sharing
    assert torch.equal(logits(model), before)
    if kv_sharing == "first":
        with swap(model, 1):
            assert logits(model, num_recurrences=1).isfinite().all(), "one pass shares with none"


@every_family
def test_the_depth_of_an_edited_config_cannot_be_set(name):
    model = build(name)
    with swap(model, 2), pytest.raises(ValueError, match="num_hidden_layers=6") as error:
        model.config.num_hidden_layers = 6
    assert "\n" not in str(error.value) and model.config.num_hidden_layers == DEPTH
