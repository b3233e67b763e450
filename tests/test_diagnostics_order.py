"""Order interventions against a brute-force loop over plans, repeated blocks, and the similarity of blocks."""

import copy

import numpy as np
import pytest
import torch
from conftest import TINY_MODELS, randomise, tiny_grown_llama, tiny_model
from matplotlib.figure import Figure
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from modeling_looped import DepthPlan
from modeling_looped.diagnostics.order import Score, held_out_loss, order_curves, repeat_curves, task_accuracy
from modeling_looped.diagnostics.probe import Probe
from modeling_looped.diagnostics.weights import block_similarity, growth_ancestry
from modeling_looped.growth import grow
from modeling_looped.interventions import executed_plan, plan_edits, repeat, swap
from modeling_looped.looping import unroll
from modeling_looped.recipes.tokens import train_tokenizer


GENERATOR = torch.Generator().manual_seed(1)
ROWS = [torch.randint(1, 97, (length,), generator=GENERATOR).tolist() for length in (12, 7, 9)]
SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def llama(num_layers: int = 6, seed: int = 0, **fields) -> LlamaForCausalLM:
    return randomise(
        LlamaForCausalLM(LlamaConfig(**{**SHAPE, **fields}, num_hidden_layers=num_layers)), 0.1, seed
    ).eval()


@torch.no_grad()
def plain_loss(model, rows=ROWS) -> float:
    """One row at a time, with nothing of ours."""
    nats = [nn.functional.cross_entropy(model(torch.tensor([row]), use_cache=False).logits[0, :-1], torch.tensor(row[1:]), reduction="sum") for row in rows]  # fmt: skip
    return float(sum(nats) / sum(len(row) - 1 for row in rows))


def in_order(dense: LlamaForCausalLM, plan: DepthPlan) -> LlamaForCausalLM:
    """A copy of a dense model with its layers in the order of `plan`, as a list of modules that anybody can write."""
    dense = copy.deepcopy(dense)
    dense.model.layers = nn.ModuleList([dense.model.layers[i] for i in plan.order])
    dense.config.num_hidden_layers = len(plan.order)
    return dense


def state(model) -> dict:
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "training": [m.training for m in model.modules()],
        "random": torch.get_rng_state(),
        "plan": executed_plan(model).order,
        "edits": plan_edits(model),
        "class": type(model.config),
    }


def same(left: dict, right: dict) -> bool:
    weights = all(torch.equal(tensor, right["weights"][name]) for name, tensor in left["weights"].items())
    random = torch.equal(left["random"], right["random"])
    rest = all(left[name] == right[name] for name in left if name not in ("weights", "random"))
    return weights and random and rest


@pytest.mark.parametrize("length, count", [(1, 23), (2, 21), (4, 17), (8, 9)])
def test_swap_is_an_involution_with_as_many_positions_as_the_specification_says(length, count):
    model = llama(24, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    found = order_curves(model, lambda model: 1.0, ("swap",), (length,), kind="loss")
    assert np.count_nonzero(~np.isnan(found.values["swap", length])) == count == 24 - 2 * length + 1
    plan = DepthPlan.parse("24x1")
    for s in range(count):
        assert sorted(plan.swap(s, length).order) == list(range(24))
        assert plan.swap(s, length).swap(s, length).order == plan.order != plan.swap(s, length).order


@pytest.mark.parametrize("name", ["dense", "loop"])
def test_curves_are_those_of_a_loop_over_the_plans_of_an_unrolled_dense_model(name):
    model = llama() if name == "dense" else tiny_grown_llama()
    dense = model if name == "dense" else unroll(model)
    plan = DepthPlan.parse(f"{executed_plan(model).effective_depth}x1")
    found = order_curves(model, held_out_loss(ROWS, 2), lengths=(1, 2) if name == "dense" else (2,))
    assert found.clean == pytest.approx(plain_loss(dense), abs=1e-5)
    assert {("swap", 2), ("skip", 2), ("reverse", 2)} <= set(found.values) and ("reverse", 1) not in found.values
    for (edit, length), values in found.values.items():
        for s, value in enumerate(values):
            try:
                edited = getattr(plan, edit)(s, length)
            except ValueError:
                assert np.isnan(value)
                continue
            assert value == pytest.approx(plain_loss(in_order(dense, edited)), abs=1e-5)
            assert abs(value - found.clean) > 1e-4 or name == "loop"
    if name == "dense":
        assert np.array_equal(found.values["reverse", 2], found.values["swap", 1], equal_nan=True)


@pytest.mark.parametrize("name", [*TINY_MODELS, "llama"])
def test_the_model_is_left_as_it_was_found(name):
    model = llama(seed=3) if name == "llama" else TINY_MODELS[name]()
    model.train()
    model.lm_head.eval()
    score = held_out_loss(ROWS)
    torch.manual_seed(5)
    before, clean = state(model), score(model)
    curves = order_curves(model, score, lengths=(1,))
    repeated = repeat_curves(model, score, 1, (1,), starts=[0])
    assert same(before, state(model))
    assert clean == curves.clean == repeated.clean == score(model)
    assert all(np.isfinite(values).any() for values in curves.values.values()) and np.isfinite(repeated.values).all()


def test_the_model_is_left_as_it_was_found_where_a_score_fails():
    model, calls = tiny_grown_llama(), []

    def fails(model):
        calls.append(model)
        if len(calls) == 3:
            raise RuntimeError("a full disk")
        return 1.0

    before = state(model)
    with pytest.raises(RuntimeError, match="full disk"):
        order_curves(model, fails, kind="loss", num_recurrences=2)
    assert same(before, state(model))


def test_edits_of_a_loop_act_on_one_pass_and_not_on_the_others():
    found = order_curves(tiny_grown_llama(), held_out_loss(ROWS), ("skip",), (1,)).values["skip", 1]
    passes = found[[1, 3, 5]]  # the same layer in three passes of Loop(1-2x3-1)
    assert len(set(passes.round(6))) == 3


def test_an_edit_that_changes_nothing_gives_the_clean_score():
    # In Loop(1x4), neighbours are the same layer.
    found = order_curves(tiny_grown_llama(depth_plan="Loop(1x4)"), held_out_loss(ROWS), ("swap", "reverse"), (1, 2))
    assert np.nanmax(np.abs(found.relative("swap", 1))) == 0
    assert np.nanmax(np.abs(found.relative("reverse", 2))) == 0


@pytest.mark.parametrize("name", ["looped_gpt", "grown_llama", "recurrent_gpt"])
def test_another_number_of_passes_is_measured_as_if_it_were_configured(name):
    score = held_out_loss(ROWS)
    model, configured = TINY_MODELS[name](), TINY_MODELS[name]()
    configured.config.num_recurrences = 2
    torch.manual_seed(0)  # of the first state, where it is random
    asked = order_curves(model, score, ("swap",), (1,), num_recurrences=2)
    torch.manual_seed(0)
    expected = order_curves(configured, score, ("swap",), (1,))
    assert asked.clean == expected.clean != score(model)
    assert asked.depth == 6 and model.config.num_recurrences == 3
    assert np.array_equal(asked.values["swap", 1], expected.values["swap", 1], equal_nan=True)


def test_losses_are_compared_by_difference_and_accuracies_by_division():
    depths = {"value": 0.5}

    def score(model):
        return depths["value"] if executed_plan(model).order == tuple(range(6)) else 0.4

    model = llama()
    loss, accuracy = (
        order_curves(model, Score(kind, score, "made up"), ("swap",), (1,)) for kind in ("loss", "accuracy")
    )
    assert loss.relative()[:5] == pytest.approx(-0.1) and accuracy.relative()[:5] == pytest.approx(0.8)
    assert loss.mean() == pytest.approx(-0.1) and accuracy.mean(first=0, last=4) == pytest.approx(0.8)
    assert "leaves 0.8 of the accuracy of 0.5" in accuracy.headline()
    assert "changes the loss by -0.1 of 0.5" in loss.headline()
    frame = accuracy.to_frame()
    assert len(frame) == 5 and set(frame["relative"].round(6)) == {0.8}


def test_the_mean_is_over_the_papers_range_in_proportion():
    model = llama(24, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    numbers = iter(range(100))
    found = order_curves(model, lambda model: float(next(numbers)), ("swap",), (1,), kind="loss")
    assert found.mean() == found.mean(first=3, last=15) == pytest.approx(np.mean(range(4, 17)))  # s is the number s + 1
    only = order_curves(model, lambda model: 1.0, ("swap",), (1, 2), positions=[0, 21], kind="loss")
    assert np.flatnonzero(~np.isnan(only.values["swap", 1])).tolist() == [0, 21]
    with pytest.raises(ValueError, match="at no position from first=3 to last=15"):
        only.mean()
    assert "positions 0 to 23" in only.headline()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kind": None}, "kind is missing"),
        ({"kind": "error"}, "kind='error' must be one of accuracy, loss"),
        ({"edits": ("permute",)}, "'permute' must be one of swap, skip, reverse"),
        ({"lengths": (4,)}, "lengths: 4 does not fit swap"),
        ({"lengths": (0,)}, "lengths: 0 must be a whole number"),
        ({"edits": ("skip",), "lengths": (6,)}, "lengths: 6 does not fit skip"),
        ({"positions": [6]}, r"positions=\[6\] does not fit swap"),
        ({"edits": ("reverse",), "lengths": (1,)}, "leave nothing to measure"),
        ({"num_recurrences": 2}, "has no loop"),
    ],
)
def test_what_does_not_fit_is_said_before_any_score(options, message):
    def score(model):
        raise AssertionError("work was done")

    with pytest.raises(ValueError, match=message):
        order_curves(llama(), score, **{"kind": "loss", **options})


def test_a_clean_accuracy_of_zero_is_nothing_to_divide_by():
    with pytest.raises(ValueError, match="accuracy of 0.0"):
        order_curves(llama(), lambda model: 0.0, kind="accuracy")


# Repeated blocks


def test_repeating_no_time_is_the_model_itself_and_repeating_is_running_a_longer_stack():
    model = llama()
    found = repeat_curves(model, held_out_loss(ROWS), 2, times=(0, 1, 2))
    assert found.starts == (0, 1, 2, 3, 4)
    assert found.values[0] == pytest.approx(found.clean, abs=0)
    plan = DepthPlan.parse("6x1")
    for i, times in enumerate((1, 2), 1):
        for j, start in enumerate(found.starts):
            order = [*range(start + 2), *[start, start + 1] * times, *range(start + 2, 6)]
            assert plan.repeat(start, start + 2, times).order == tuple(order)
            assert found.values[i, j] == pytest.approx(plain_loss(in_order(model, DepthPlan(tuple(order)))), abs=1e-5)


def test_repeating_the_core_of_a_loop_is_one_more_recurrence():
    model, longer = tiny_grown_llama(), tiny_grown_llama()
    longer.config.num_recurrences = 4
    found = repeat_curves(model, held_out_loss(ROWS), 2, times=(1,), starts=[1])
    assert found.values[0, 0] == pytest.approx(held_out_loss(ROWS)(longer), abs=1e-6)
    with repeat(model, 1, 3):
        assert executed_plan(model) == executed_plan(longer)


def test_the_paper_has_21_blocks_of_4_in_24_layers_and_one_that_runs_again_makes_28():
    model = llama(24, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    found = repeat_curves(model, lambda model: 1.0, 4, kind="loss")
    assert found.starts == tuple(range(21)) and found.values.size == 84
    with repeat(model, 8, 12):
        assert executed_plan(model).effective_depth == 28


def test_blocks_that_a_loop_never_runs_in_one_go_are_left_out():
    score = held_out_loss(ROWS)
    assert repeat_curves(tiny_grown_llama(), score, 3, (1,)).starts == (0, 1)  # 0 1 2 | 1 2 | 1 2 3
    with pytest.raises(ValueError, match="one after the other"):
        repeat_curves(tiny_grown_llama(), score, 4)


def test_the_best_setting_can_be_chosen_on_other_items_than_those_it_is_reported_on():
    def at(start: int):
        """An accuracy that is best where the layer `start` runs again."""
        return lambda model: 0.9 if executed_plan(model).order.count(start) > 1 else 0.5 - 0.01 * start

    model = llama()
    own = repeat_curves(model, at(2), 1, (1,), kind="accuracy")
    assert own.starts[own.choice[1]] == 2 and own.best == 0.9
    assert "flatters" in own.headline() and "Layers 2 to 2, 1 more time: 0.9" in own.headline()
    other = repeat_curves(model, at(2), 1, (1,), select_on=at(4), kind="accuracy")
    assert other.starts[other.choice[1]] == 4 and other.best == pytest.approx(0.48)
    assert "chosen on other items" in other.headline()
    lowest = repeat_curves(model, at(2), 1, (1,), select_on=Score("loss", at(4), "loss"), kind="accuracy")
    assert lowest.starts[lowest.choice[1]] != 4
    assert own.to_frame()["relative"].max() == pytest.approx(0.9 / 0.48)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block": 0}, "block=0"),
        ({"block": 7}, "one after the other"),
        ({"block": 2, "times": ()}, "times is empty"),
        ({"block": 2, "times": (-1,)}, "times=-1"),
        ({"block": 2, "starts": [5]}, "layers 5 to 6"),
    ],
)
def test_a_repetition_that_does_not_fit_is_said_before_any_score(options, message):
    def score(model):
        raise AssertionError("work was done")

    with pytest.raises(ValueError, match=message):
        repeat_curves(llama(), score, kind="loss", **options)


# Scores


@pytest.mark.parametrize("name", [*TINY_MODELS, "llama"])
def test_held_out_loss_is_the_mean_over_real_tokens_whatever_the_batch(name):
    # Noise would be drawn otherwise in a batch.
    fields = {"state_init": "prelude", "state_noise": 0.0, "gate_noise": 0.0} if name == "recurrent_gpt" else {}
    model = llama() if name == "llama" else TINY_MODELS[name](**fields)
    losses = [held_out_loss(ROWS, size)(model) for size in (1, 2, 3)]
    assert losses == pytest.approx([plain_loss(model)] * 3, abs=1e-5)


def test_rows_that_do_not_fit_are_said():
    with pytest.raises(ValueError, match="no texts"):
        held_out_loss([])
    with pytest.raises(ValueError, match="Text 1 has 1 tokens"):
        held_out_loss([[1, 2], [3]])


def test_a_tasks_accuracy_is_measured_on_a_model_in_memory_and_under_an_edit():
    tokenizer = train_tokenizer(["a = 1, b = 2, c = a. What is the value of c? Answer: 1 2 3 4 5 6 7 8 9"] * 4, 300)
    model = llama(seed=1, vocab_size=300, max_position_embeddings=1024)
    score = task_accuracy("looped_var_assign_math_depth_0", tokenizer, limit=6)
    torch.manual_seed(0)
    before, clean = state(model), score(model)
    assert same(before, state(model)) and score.kind == "accuracy" and clean * 6 == pytest.approx(round(clean * 6))
    with swap(model, 0, 3):
        swapped = score(model)
    assert swapped == score(in_order(model, DepthPlan.parse("6x1").swap(0, 3))) != clean
    with pytest.raises(ValueError, match="is a group of tasks: choose one of"):
        task_accuracy("looped_reasoning_primitives", tokenizer)


# Weights


def grown(operator: str, blocks: int = 6, block: int = 4, noise: float = 1.0):
    """A stack that grew block by block, with noise of one size in every weight after each growth for its training."""
    model = tiny_grown_llama(depth_plan=f"{block}x1", hidden_size=32, num_attention_heads=2, intermediate_size=64)
    generator = torch.Generator().manual_seed(7)
    for _ in range(blocks - 1):
        grow(model, operator, block)
        with torch.no_grad():
            for layer in model.model.layers:
                for parameter in layer.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2 * noise)
    return model


def plain_similarity(model, block: int) -> np.ndarray:
    layers = list(model.model.layers)
    blocks = [
        torch.cat([p.flatten() for layer in layers[i : i + block] for p in layer.mlp.parameters()])
        for i in range(0, len(layers), block)
    ]
    return np.array([[nn.functional.cosine_similarity(a, b, dim=0).item() for b in blocks] for a in blocks])


def test_blocks_of_a_lidas_stack_are_alike_on_both_sides_of_the_centre_and_those_of_midas_are_not():
    lidas, midas = block_similarity(grown("lidas")), block_similarity(grown("midas"))
    assert lidas.block == midas.block == 4 and lidas.similarity.shape == (6, 6)
    assert lidas.asymmetry < 0.01 < 0.05 < midas.asymmetry


def test_similarity_is_the_cosine_of_blocks_as_vectors_one_on_the_diagonal():
    model = grown("lidas")
    found = block_similarity(model).similarity
    assert found == pytest.approx(plain_similarity(model, 4), abs=1e-5)
    assert np.diag(found) == pytest.approx(1, abs=1e-6) and found == pytest.approx(found.T)


def test_blocks_are_the_same_until_they_train_and_unrelated_where_they_never_were_one():
    just = block_similarity(grown("midas", blocks=2, noise=0.0))
    assert just.similarity == pytest.approx(np.ones((2, 2)), abs=1e-6) and just.asymmetry < 1e-6
    assert abs(block_similarity(llama(8), 4).mean) < 0.1


def test_later_splits_make_blocks_more_alike():
    model = grown("midas")
    splits, found = growth_ancestry(model).splits, block_similarity(model).similarity
    of_blocks = splits[::4, ::4]
    by_split = [found[of_blocks == growth].mean() for growth in range(1, 6)]
    assert by_split == sorted(by_split)


def test_the_matrix_of_splits_mirrors_itself_for_lidas_and_not_for_midas():
    lidas, midas = growth_ancestry(grown("lidas")), growth_ancestry(grown("midas"))
    assert lidas.is_symmetric and not midas.is_symmetric
    assert lidas.ancestry.created == tuple(map(int, "000011223344555544332211"))
    assert midas.ancestry.created == tuple(map(int, "000022224444555533331111"))
    assert lidas.headline().startswith("24 layers descend from 4 in 5 growths; the stack mirrors itself")
    assert len(lidas.to_frame()) == 24 * 24


def test_a_loops_default_block_is_its_core_where_its_ends_are_whole_blocks():
    assert block_similarity(tiny_grown_llama(depth_plan="Loop(2-2x3-4)")).block == 2
    assert block_similarity(tiny_model(num_prelude_layers=2, num_coda_layers=2)).similarity.shape == (3, 3)
    for model in (tiny_grown_llama(), tiny_grown_llama(depth_plan="8x1"), llama()):
        with pytest.raises(ValueError, match="block is missing"):
            block_similarity(model)
    assert block_similarity(Probe(tiny_grown_llama()), 2).similarity.shape == (2, 2)


def test_mlps_behind_a_norm_are_found_by_their_name():
    config = Gemma2Config(**SHAPE, head_dim=16, num_hidden_layers=4)
    model = randomise(Gemma2ForCausalLM(config))
    assert block_similarity(model, 2).similarity == pytest.approx(plain_similarity(model, 2), abs=1e-5)


@pytest.mark.parametrize(
    "block, message", [(4, "divisor of the 6"), (6, "one block"), (0, "block=0"), (2.0, "block=2.0")]
)
def test_blocks_that_do_not_fit_are_said(block, message):
    with pytest.raises(ValueError, match=message):
        block_similarity(llama(), block)


def test_a_model_that_never_grew_has_no_ancestry():
    with pytest.raises(ValueError, match="no history of growth"):
        growth_ancestry(llama())


def test_everything_draws_itself_and_says_its_number():
    model, score = llama(), held_out_loss(ROWS)
    grown_model = grown("lidas", 3)
    for found in (
        order_curves(model, score, ("swap", "skip")),
        repeat_curves(model, score, 2, (1, 2)),
        block_similarity(grown_model),
        growth_ancestry(grown_model),
    ):
        for label in (None, "a model"):
            axes = Figure().subplots()
            found.plot(axes, label=label)
            assert axes.get_xlabel() and axes.get_ylabel()
        assert found.title and found.reading and found.headline().endswith(".") and len(found.to_frame())
