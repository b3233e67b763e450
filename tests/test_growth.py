"""Growing a stack: the maps, the equality with looping at birth, the optimizer's state, the schedule, the ancestry."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomise
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM, LoopedGPTConfig, LoopedGPTForCausalLM
from modeling_looped.conversion.depth import grow_checkpoint
from modeling_looped.growth import (
    OPERATORS,
    ancestry,
    grow,
    growth_schedule,
    growth_steps,
    lidas_sources,
    midas_sources,
    shrink,
)
from modeling_looped.interventions import swap
from modeling_looped.looping import loop
from modeling_looped.recipes.optimizers import make_adamw, make_optimizers
from modeling_looped.recipes.pretrain import PretrainRecipe, newest_checkpoint, pretrain
from modeling_looped.recipes.tokens import TokenRows


SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "pad_token_id": 0}
IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
both_operators = pytest.mark.parametrize("operator", ["midas", "lidas"])


def dense(num_layers: int, **fields) -> GrownLlamaForCausalLM:
    config = GrownLlamaConfig(**SIZE, num_hidden_layers=num_layers, max_position_embeddings=64, **fields)
    return randomise(GrownLlamaForCausalLM(config), std=0.15).eval()


def span(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


# Section 3.4 of the specification, literally.
MAPS = {
    (4, "midas"): [0, 1, 2, 3, 0, 1, 2, 3],
    (4, "lidas"): [0, 1, 2, 3, 0, 1, 2, 3],
    (8, "midas"): [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7],
    (8, "lidas"): [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7],
    (12, "midas"): [*span(0, 8), 4, 5, 6, 7, *span(8, 12)],
    (12, "lidas"): [*span(0, 8), 4, 5, 6, 7, *span(8, 12)],
    (16, "midas"): [*span(0, 8), 4, 5, 6, 7, *span(8, 16)],
    (16, "lidas"): [*span(0, 10), 6, 7, 8, 9, *span(10, 16)],
    (20, "midas"): [*span(0, 12), 8, 9, 10, 11, *span(12, 20)],
    (20, "lidas"): [*span(0, 12), 8, 9, 10, 11, *span(12, 20)],
    (24, "midas"): [*span(0, 12), 8, 9, 10, 11, *span(12, 24)],
    (24, "lidas"): [*span(0, 14), 10, 11, 12, 13, *span(14, 24)],
    (28, "midas"): [*span(0, 16), 12, 13, 14, 15, *span(16, 28)],
    (28, "lidas"): [*span(0, 16), 12, 13, 14, 15, *span(16, 28)],
}
CREATED = {
    (24, "midas"): "0000 2222 4444 5555 3333 1111",
    (24, "lidas"): "0000 1122 3344 5555 4433 2211",
    (32, "midas"): "0000 2222 4444 6666 7777 5555 3333 1111",
    (32, "lidas"): "0000 1122 3344 5566 7777 6655 4433 2211",
}


@pytest.mark.parametrize(("num_layers", "operator"), list(MAPS))
def test_the_source_of_every_layer_is_the_printed_one(num_layers, operator):
    assert OPERATORS[operator](num_layers, 4) == MAPS[num_layers, operator]


def duplicated(sources: list[int]) -> list[int]:
    return sorted({source for source in sources if sources.count(source) == 2})


def test_blocks_of_three_and_eight_duplicate_the_printed_ranges():
    starts = {3: 0, 6: 1, 9: 3, 12: 4, 15: 6, 18: 7, 21: 9}
    assert all(duplicated(lidas_sources(depth, 3)) == span(s, s + 3) for depth, s in starts.items())
    assert [duplicated(lidas_sources(depth, 8))[0] for depth in (8, 16, 24)] == [0, 4, 8]
    assert [duplicated(midas_sources(depth, 8))[0] for depth in (8, 16, 24)] == [0, 0, 8]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8])
def test_operators_add_one_block_and_agree_where_the_number_of_blocks_is_odd(block_size):
    for blocks in range(1, 9):
        midas, lidas = (operator(blocks * block_size, block_size) for operator in OPERATORS.values())
        assert len(duplicated(midas)) == len(duplicated(lidas)) == block_size
        assert len(midas) == len(lidas) == (blocks + 1) * block_size
        if blocks % 2 or block_size == 1:
            assert midas == lidas or block_size == 1
        else:
            assert midas != lidas


def grown_config(operator: str, depth: int, block_size: int = 4) -> GrownLlamaConfig:
    model = dense(block_size)
    while model.config.num_hidden_layers < depth:
        grow(model, operator, block_size)
    return model.config


@pytest.mark.parametrize(("depth", "operator"), list(CREATED))
def test_the_history_replays_to_the_printed_growth_that_made_each_layer(depth, operator):
    found = ancestry(grown_config(operator, depth))
    assert "".join(map(str, found.created)) == CREATED[depth, operator].replace(" ", "")
    assert found.origin == tuple(layer % 4 for layer in range(depth))  # roles keep their phase


def block_splits(splits, phase: int) -> dict[tuple[int, int], int]:
    blocks = len(splits) // 4
    return {(i, j): splits[4 * i + phase][4 * j + phase] for i in range(blocks) for j in range(i + 1, blocks)}


def test_midas_splits_are_the_printed_matrix_and_not_symmetric_about_the_centre():
    splits = ancestry(grown_config("midas", 24)).splits
    rows = ["= 2 2 2 2 1", "2 = 4 4 3 1", "2 4 = 5 3 1", "2 4 5 = 3 1", "2 3 3 3 = 1", "1 1 1 1 1 ="]
    printed = {(i, j): int(row.split()[j]) for i, row in enumerate(rows) for j in range(i + 1, 6)}
    assert all(block_splits(splits, phase) == printed for phase in range(4))
    assert any(splits[i][j] != splits[23 - i][23 - j] for i in range(24) for j in range(i) if (i - j) % 4 == 0)


def test_lidas_splits_are_the_printed_ones_and_symmetric_about_the_centre():
    splits = ancestry(grown_config("lidas", 24)).splits
    printed = {
        "1,1,2,2": [(0, 1), (0, 2), (0, 3), (0, 4)],
        "3,3,4,4": [(1, 2), (1, 3)],
        "5,5,5,5": [(2, 3)],
        "4,4,3,3": [(3, 4), (2, 4)],
        "2,2,1,1": [(4, 5), (1, 5), (2, 5), (3, 5)],
        "1,1,1,1": [(0, 5)],
        "3,3,3,3": [(1, 4)],
    }
    for numbers, pairs in printed.items():
        for pair in pairs:
            assert ",".join(str(block_splits(splits, phase)[pair]) for phase in range(4)) == numbers
    assert all(splits[i][j] == splits[23 - i][23 - j] for i in range(24) for j in range(24) if (i - j) % 4 == 0)
    assert all(splits[i][j] == 0 for i in range(24) for j in range(24) if (i - j) % 4)  # never shared weights


@both_operators
@pytest.mark.parametrize("num_layers", [8, 12, 16])
@pytest.mark.parametrize("cached", [False, True])
def test_growing_equals_looping_at_birth_bit_for_bit(operator, num_layers, cached):
    def logits(model):
        if not cached:
            return model(IDS, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        return torch.cat([model(chunk, cache=cache).logits for chunk in IDS.split([5, 1, 3], dim=1)], dim=1)

    old = dense(num_layers)
    grown = grow(copy.deepcopy(old), operator, 4)
    block = duplicated(OPERATORS[operator](num_layers, 4))
    with torch.no_grad():
        before, after = logits(old), logits(grown)
        with loop(old, block[0], block[-1] + 1, 1):
            looped = logits(old)
        ordered = GrownLlamaForCausalLM(copy.deepcopy(old.config))
        ordered.load_state_dict(old.state_dict())
        ordered.config.depth_plan = " ".join(map(str, OPERATORS[operator](num_layers, 4)))
        by_order = logits(ordered.eval())
    assert torch.equal(after, looped) and torch.equal(after, by_order)
    assert (after - before).abs().max() > 1e-2  # growth preserves no function


@both_operators
def test_growth_copies_parameters_into_storage_of_their_own_and_leaves_the_rest(operator):
    model = dense(8, tie_word_embeddings=True)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    modules = model.model.embed_tokens, model.model.norm, model.lm_head
    size = sum(p.numel() for p in model.parameters())
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert grow(model, operator, 4) is model
    assert (model.model.embed_tokens, model.model.norm, model.lm_head) == modules
    assert sum(p.numel() for p in model.parameters()) == size + 4 * per_layer
    pointers = [p.data_ptr() for p in model.parameters()]
    assert len(set(pointers)) == len(pointers)
    sources = OPERATORS[operator](8, 4)
    for position, source in enumerate(sources):
        for name, parameter in model.model.layers[position].named_parameters():
            old, value = before[f"model.layers.{source}.{name}"]
            assert torch.equal(parameter, value)
            assert (parameter is old) == (source not in sources[:position])
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == span(0, 12)
    assert model.config.depth_plan == "12x1" and model.config.num_hidden_layers == 12
    assert model.config.history == [{"operator": operator, "block_size": 4, "num_layers": 8}]


def adamw(model):
    return make_adamw(model, 1e-3, 0.1)


def muon(model):
    return make_optimizers(model, 1e-2, 1e-3, 1e-3)


@both_operators
@pytest.mark.parametrize("make", [adamw, muon])
def test_the_optimizer_knows_every_parameter_once_in_a_new_ones_order_with_the_state_of_its_source(operator, make):
    model = dense(8).train()
    optimizers = make(model)

    def step():
        model(IDS, labels=IDS).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    held = {name: parameter for name, parameter in model.named_parameters()}
    state = {name: copy.deepcopy(o.state[p]) for name, p in held.items() for o in optimizers if p in o.state}
    assert len(state) == len(held)
    grow(model, operator, 4, optimizers)
    for optimizer, fresh in zip(optimizers, make(model), strict=True):
        for group, new in zip(optimizer.param_groups, fresh.param_groups, strict=True):
            assert [id(p) for p in group["params"]] == [id(p) for p in new["params"]]
    known = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(known) == sorted(id(p) for p in model.parameters())

    sources = OPERATORS[operator](8, 4)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[1] == "layers":
            name = ".".join([*parts[:2], str(sources[int(parts[2])]), *parts[3:]])
        (found,) = [o.state[parameter] for o in optimizers if parameter in o.state]
        assert found.keys() == state[name].keys() and len(found) > 0
        for key, value in found.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state[name][key]))
    twin = sources.index(duplicated(sources)[0]), len(sources) - 1 - sources[::-1].index(duplicated(sources)[0])
    first, second = (model.model.layers[i].mlp.up_proj.weight for i in twin)
    assert torch.equal(first, second)
    step()  # with gradients of their own
    assert not torch.equal(first, second)


def test_frozen_layers_and_foreign_parameters_stay_out_of_the_optimizer():
    model = dense(4)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    others = [torch.nn.Parameter(torch.ones(3)), *(p for p in model.parameters() if p.requires_grad)]
    optimizer = torch.optim.SGD(others, lr=0.1, momentum=0.9)
    grow(model, "lidas", 4, optimizer)
    assert optimizer.param_groups[0]["params"][0] is others[0]
    known = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert known == {id(others[0])} | {id(p) for p in model.parameters() if p.requires_grad}
    assert not any(p.requires_grad for i in (0, 4) for p in model.model.layers[i].parameters())


@pytest.mark.parametrize(
    "build",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZE, num_hidden_layers=8)),
        lambda: Qwen3ForCausalLM(
            Qwen3Config(
                **SIZE,
                num_hidden_layers=8,
                num_key_value_heads=2,
                head_dim=16,
                use_sliding_window=True,
                sliding_window=4,
                max_window_layers=5,
            )
        ),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_head=2, n_layer=8, pad_token_id=0)),
    ],
    ids=["llama", "qwen3", "gpt2"],
)
def test_any_decoder_grows_and_its_checkpoint_keeps_the_history(build, tmp_path):
    torch.manual_seed(0)
    model = randomise(build(), std=0.1).eval()
    with torch.no_grad():
        with loop(model, 2, 6, 1):
            looped = model(IDS).logits
        grow(model, "lidas", 4)
        assert torch.equal(model(IDS).logits, looped)
        assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 13)
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path).eval()
        assert torch.equal(again(IDS).logits, looped)
    assert again.config.num_hidden_layers == 12 and ancestry(again.config).created[6:10] == (1, 1, 1, 1)


def test_what_cannot_grow_is_refused_in_one_sentence_and_left_alone():
    with pytest.raises(ValueError, match="operator='middle' must be one of midas, lidas"):
        grow(dense(4), "middle", 4)
    with pytest.raises(ValueError, match="num_layers=6 must be a multiple of block_size=4"):
        grow(dense(6), "midas", 4)
    with pytest.raises(ValueError, match="block_size=0"):
        grow(dense(4), "midas", 0)
    looped = GrownLlamaForCausalLM(GrownLlamaConfig(**SIZE, depth_plan="Loop(4x2)"))
    with pytest.raises(ValueError, match=r"plan Loop\(4x2\).*unroll it first"):
        grow(looped, "midas", 4)
    assert looped.config.depth_plan == "Loop(4x2)" and len(looped.model.layers) == 4
    plain = LlamaForCausalLM(LlamaConfig(**SIZE, num_hidden_layers=4))
    with loop(plain, 0, 2, 1), pytest.raises(ValueError, match="unroll it first"):
        grow(plain, "midas", 4)
    with swap(plain, 0, 1), pytest.raises(ValueError, match="unroll it first"):
        grow(plain, "midas", 4)
    sections = LoopedGPTForCausalLM(LoopedGPTConfig(vocab_size=97, hidden_size=32, num_attention_heads=2))
    with pytest.raises(ValueError, match="alone can grow"):
        grow(sections, "midas", 4)
    with pytest.raises(ValueError, match="has no history"):
        ancestry(plain.config)
    broken = grown_config("lidas", 12)
    broken.history[1]["num_layers"] = 12
    with pytest.raises(ValueError, match="growth 2 starts from num_layers=12.*end at 8"):
        ancestry(broken)


# Section 3.5.
BUDGETS = {
    (6, "floor"): [8095, 16190, 24285, 32380, 40476, 48571],
    (8, "floor"): [4722, 9444, 14166, 18888, 23611, 28333, 33055, 37777],
    (6, "largest_remainder"): [8095, 16191, 24286, 32381, 40476, 48571],
    (8, "largest_remainder"): [4722, 9444, 14167, 18889, 23611, 28333, 33056, 37778],
}
GROWS_AFTER = {
    (6, "floor"): [8095, 24285, 48570, 80950, 121426],
    (8, "floor"): [4722, 14166, 28332, 47220, 70831, 99164, 132219],
    (6, "largest_remainder"): [8095, 24286, 48572, 80953, 121429],
    (8, "largest_remainder"): [4722, 14166, 28333, 47222, 70833, 99166, 132222],
}


@pytest.mark.parametrize(("stages", "rounding"), list(BUDGETS))
def test_prop_1_budgets_and_growth_steps_are_the_printed_ones(stages, rounding):
    budgets = growth_schedule(170_000, stages, rounding=rounding)
    assert budgets == BUDGETS[stages, rounding] and growth_steps(budgets) == GROWS_AFTER[stages, rounding]
    if rounding == "largest_remainder":
        assert sum(budgets) == 170_000


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 5, 6, 8])
def test_budgets_grow_with_the_stage_and_add_up(alpha, stages):
    for total in (1700, 170_000, 999):
        budgets = growth_schedule(total, stages, alpha)
        assert sum(budgets) == total and len(budgets) == stages
        assert all(a <= b + 1 for a, b in zip(budgets, budgets[1:]))
    assert growth_schedule(1700, 6) == [81, 162, 243, 324, 405, 485]
    assert growth_schedule(170_000, 4, 0) == [42_500] * 4


def test_a_schedule_that_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="rounding='nearest'"):
        growth_schedule(100, 4, rounding="nearest")
    with pytest.raises(ValueError, match="total_steps=3 must be a whole number of at least 4"):
        growth_schedule(3, 4)
    with pytest.raises(ValueError, match="total_steps=20 leaves stage 1 of 6 without a step at alpha=3"):
        growth_schedule(20, 6, 3)


# In a training run.


def rows(seed: int = 0) -> TokenRows:
    stream = np.random.default_rng(3).integers(1, 97, 2000).astype(np.int32)
    return TokenRows(stream, 16, seed)


def recipe(**fields) -> PretrainRecipe:
    values = {"total_steps": 20, "batch_size": 4, "decay": "trapezoid", "warmup_steps": 2, "precision": "no"}
    return PretrainRecipe(
        **{**values, "checkpoint_every": 100, "growth_operator": "lidas", "growth_block_size": 2, **fields}
    )


def new_model(depth: int = 8) -> GrownLlamaForCausalLM:
    torch.manual_seed(0)
    return GrownLlamaForCausalLM(GrownLlamaConfig(**SIZE, num_hidden_layers=depth, max_position_embeddings=16))


def test_the_published_learning_rates_come_out_and_growth_does_not_interrupt_them():
    published = PretrainRecipe(
        total_steps=200_000, warmup_steps=2000, decay="trapezoid", decay_steps=30_000, growth_operator="lidas"
    )
    peak = 5e-4
    for step, rate in ((1000, 2.5e-4), (177_500, 2.5e-4), (185_000, 1.4645e-4), (192_500, 6.699e-5), (100_000, 5e-4)):
        assert peak * published.learning_rate(step) == pytest.approx(rate, rel=1e-4)
    assert published.learning_rate(200_000) == 0 and published.plateau_end == 170_000
    after = published.growth_steps(GrownLlamaConfig(**SIZE, num_hidden_layers=24))
    assert after == GROWS_AFTER[6, "largest_remainder"]
    assert all(published.learning_rate(step) == published.learning_rate(step + 1) == 1 for step in after)
    assert max(after) < 170_000


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_grown_run_has_the_depths_of_its_schedule(optimizer, tmp_path, monkeypatch):
    from modeling_looped.recipes import pretrain as module

    depths = []

    def recorded(model, key, set_noise_key=module.set_noise_key):
        if key is not None:
            depths.append(model.config.num_hidden_layers)
        return set_noise_key(model, key)

    monkeypatch.setattr(module, "set_noise_key", recorded)
    model = new_model()
    result = pretrain(model, rows(), recipe(optimizer=optimizer), tmp_path, progress=False)
    budgets = recipe().growth_budgets(8)
    assert budgets == [2, 3, 5, 7] and result.finished
    assert depths == [2] * 2 + [4] * 3 + [6] * 5 + [8] * 10
    assert len(model.model.layers) == 8 and [entry["num_layers"] for entry in model.config.history] == [2, 4, 6]


def stop_after(steps: int, model, output: Path, settings: PretrainRecipe) -> list[float]:
    """Runs one step a call, each call continuing the one before, as if it had been killed after every step."""
    losses = []
    while len(losses) < steps:
        result = pretrain(copy.deepcopy(model), rows(), settings, output, progress=False, limit_seconds=0)
        losses += result.losses
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_growing_in_training_equals_saving_growing_the_file_and_resuming(optimizer, tmp_path):
    settings = recipe(optimizer=optimizer)
    whole = pretrain(new_model(), rows(), settings, tmp_path / "whole", progress=False).losses
    after = settings.growth_steps(new_model().config)
    assert after == [2, 5, 10]
    losses = stop_after(after[0], new_model(), tmp_path / "stage-0", settings)
    for stage, steps in enumerate([*(b - a for a, b in zip(after, after[1:])), 20 - after[-1]]):
        source = newest_checkpoint(tmp_path / f"stage-{stage}")
        told = grow_checkpoint(str(source), str(tmp_path / f"stage-{stage + 1}" / source.name), "lidas", 2)
        assert f"{2 * (stage + 2)} executed" in str(told)
        losses += stop_after(steps, new_model(), tmp_path / f"stage-{stage + 1}", settings)
    assert losses == whole


def test_a_run_killed_after_any_step_repeats_itself_through_its_growths(tmp_path):
    whole = pretrain(new_model(), rows(), recipe(), tmp_path / "whole", progress=False).losses
    assert stop_after(20, new_model(), tmp_path / "killed", recipe()) == whole
    left, right = (GrownLlamaForCausalLM.from_pretrained(newest_checkpoint(tmp_path / n)) for n in ("whole", "killed"))
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))
    assert left.config.history == right.config.history


def test_a_retrofitted_recurrence_trains_through_both_passes_and_continues(tmp_path):
    """Section 4.2: the third block of the paper is the second of these eight layers."""
    settings = recipe(growth_operator=None, retrofit_layers=[2, 4], total_steps=6, optimizer="adamw")
    model = new_model()
    whole = pretrain(model, rows(), settings, tmp_path / "whole", progress=False).losses
    assert model.config.depth_plan == "Loop(2-2x2-4)" and model.config.num_hidden_layers == 10
    assert model.config.trained_recurrences == 2
    assert stop_after(6, new_model(), tmp_path / "killed", settings) == whole
    again = GrownLlamaForCausalLM.from_pretrained(newest_checkpoint(tmp_path / "killed"))
    assert again.config.depth_plan == "Loop(2-2x2-4)"
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    plain = pretrain(
        new_model(), rows(), recipe(growth_operator=None, total_steps=6, optimizer="adamw"), tmp_path / "plain"
    )
    assert plain.losses[0] != whole[0]
    with pytest.raises(ValueError, match=r"retrofit_layers=\[2\] must be two whole numbers"):
        recipe(growth_operator=None, retrofit_layers=[2])
    with pytest.raises(ValueError, match="that growth_operator grows"):
        recipe(retrofit_layers=[2, 4])


def test_recipes_of_growth_that_do_not_fit_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="growth_operator='twice' must be"):
        recipe(growth_operator="twice")
    with pytest.raises(ValueError, match="decay_steps=3 must be .* decay='trapezoid'"):
        PretrainRecipe(decay="linear", decay_steps=3)
    with pytest.raises(ValueError, match="growth_block_size=3 must divide the model's 8 layers"):
        pretrain(new_model(), rows(), recipe(growth_block_size=3), tmp_path, progress=False)
    looped = GrownLlamaForCausalLM(GrownLlamaConfig(**SIZE, depth_plan="Loop(2x4)"))
    with pytest.raises(ValueError, match="no dense stack"):
        pretrain(looped, rows(), recipe(), tmp_path, progress=False)
    sections = LoopedGPTForCausalLM(
        LoopedGPTConfig(vocab_size=97, hidden_size=32, num_attention_heads=2, num_recurrences=1)
    )
    with pytest.raises(ValueError, match="cannot grow in training"):
        pretrain(sections, rows(), recipe(), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_grows_on_the_command_line_only_into_an_empty_folder(tmp_path):
    source, output = str(tmp_path / "source"), tmp_path / "grown"
    dense(4).save_pretrained(source)
    told = str(grow_checkpoint(source, str(output), "midas", 4, 12, dry_run=True))
    assert "4x1" in told and "12x1" in told and "Nothing was written" in told and not output.exists()
    grow_checkpoint(source, str(output), "midas", 4, 12)
    config = json.loads((output / "config.json").read_text())
    assert config["depth_plan"] == "12x1" and len(config["history"]) == 2
    before = (output / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is not empty: pass --overwrite"):
        grow_checkpoint(source, str(output), "lidas", 4)
    with pytest.raises(ValueError, match="is the checkpoint that is read"):
        grow_checkpoint(source, source, "lidas", 4, overwrite=True)
    with pytest.raises(ValueError, match="num_layers=10 must be 4 and a multiple of block_size=4 more"):
        grow_checkpoint(source, str(tmp_path / "other"), "lidas", 4, 10)
    assert (output / "model.safetensors").read_bytes() == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text").write_text("kept")
    with pytest.raises(ValueError, match="holds something else than a checkpoint"):
        grow_checkpoint(source, str(tmp_path / "notes"), "lidas", 4, overwrite=True)


def test_shrinking_keeps_the_first_layers(tmp_path):
    model = dense(8)
    first = model.model.layers[1]
    assert len(shrink(model, 4).model.layers) == 4 and model.model.layers[1] is first
    assert model.config.depth_plan == "4x1" and model(IDS).logits.shape == (2, 9, 97)
