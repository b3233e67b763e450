"""Depth draws: laws, purity, and the Trainer callback."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_model
from transformers import Trainer, TrainingArguments

from modeling_looped.depth_sampling import DepthSampler, DepthSamplingCallback
from modeling_looped.keyed_noise import NoiseKey


def draws(sampler: DepthSampler, count: int = 20_000) -> np.ndarray:
    return np.array([sampler.draw(0, step) for step in range(count)])


def test_a_draw_is_a_function_of_seed_step_and_micro_step():
    sampler = DepthSampler("uniform", maximum=1000)
    assert sampler.draw(1, 2, 3) == sampler.draw(1, 2, 3)
    assert len({sampler.draw(1, 2, 3), sampler.draw(2, 2, 3), sampler.draw(1, 3, 3), sampler.draw(1, 2, 4)}) == 4


def test_uniform_covers_every_depth_equally():
    counts = np.bincount(draws(DepthSampler("uniform", maximum=6)), minlength=7)
    assert counts[0] == 0
    expected = 20_000 / 6
    # Chi-square with 5 degrees of freedom: 20.5 is its 99.9 % point.
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 20.5


@pytest.mark.parametrize(
    ("mean", "variance", "mode", "first", "second", "beyond", "beyond_twice", "beyond_thrice", "clamped"),
    [
        (4, 8.50, 3, 0.058, 0.127, 0.490, 0.112, 0.021, 3.41),
        (6, 16.3, 5, 0.021, 0.059, 0.471, 0.092, 0.016, 5.02),
        (10, 38.4, 8, 0.004, 0.014, 0.447, 0.075, 0.012, 8.23),
        (32, 321, 24, 0.0, 0.0001, 0.417, 0.057, 0.009, 25.9),
    ],
)
def test_poisson_lognormal_is_huginn_s_law(
    mean, variance, mode, first, second, beyond, beyond_twice, beyond_thrice, clamped
):
    drawn = draws(DepthSampler("poisson-lognormal", maximum=10_000, mean=mean))
    assert abs(drawn.mean() - (mean + 1)) < 0.01 * (mean + 1)
    assert abs(drawn.var() - variance) < 0.05 * variance
    counts = np.bincount(drawn)
    assert counts.max() - counts[mode] < 3 * np.sqrt(2 * counts.max()), "at mean 4, 3 leads 4 by 0.15 % only"
    for measured, expected in [
        (drawn == 1, first),
        (drawn == 2, second),
        (drawn > mean, beyond),
        (drawn > 2 * mean, beyond_twice),
        (drawn > 3 * mean, beyond_thrice),
    ]:
        error = np.sqrt(max(expected, 1e-4) * (1 - expected) / len(drawn))
        assert abs(measured.mean() - expected) < 3.5 * error + 5e-4, "the table's rounding is the second part"
    at_most = draws(DepthSampler("poisson-lognormal", maximum=mean, mean=mean))
    assert np.array_equal(at_most, np.minimum(drawn, mean))
    assert abs(at_most.mean() - clamped) < 0.01 * clamped


def test_lognormal_clip_puts_most_of_its_mass_on_the_bound():
    drawn = draws(DepthSampler("lognormal-clip", minimum=2, maximum=10, mean=10), 5_000)
    assert drawn.min() >= 2 and 0.68 < (drawn == 10).mean() < 0.8


@pytest.mark.parametrize(("curriculum", "half"), [("linear", 0.5), ("1-sqrt", 1 - 0.5**0.5)])
def test_a_curriculum_grows_every_law_from_its_minimum_to_itself(curriculum, half):
    growing = {"minimum": 2, "curriculum": curriculum, "curriculum_steps": 40_000}
    fixed = DepthSampler("fixed", maximum=12, **growing)
    assert [fixed.draw(0, step) for step in (0, 20_000, 40_000, 90_000)] == [2, round(2 + half * 10), 12, 12]
    depths = [fixed.draw(0, step) for step in range(0, 40_001, 100)]
    assert depths == sorted(depths) and set(depths) == set(range(2, 13))

    uniform = DepthSampler("uniform", maximum=12, **growing)
    assert {uniform.draw(seed, 0) for seed in range(50)} == {2}
    assert {uniform.draw(seed, 20_000) for seed in range(300)} == set(range(2, round(2 + half * 10) + 1))

    for scheme in ("poisson-lognormal", "lognormal-clip"):
        law, halfway = (
            DepthSampler(scheme, maximum=12, minimum=2, mean=mean, **more)
            for mean, more in [(8, {"curriculum": curriculum, "curriculum_steps": 1000}), (2 + half * 6, {})]
        )
        assert [law.draw(seed, 500) for seed in range(200)] == [halfway.draw(seed, 500) for seed in range(200)]
        plain = DepthSampler(scheme, maximum=12, minimum=2, mean=8)
        assert [law.draw(3, step) for step in range(1000, 1100)] == [plain.draw(3, step) for step in range(1000, 1100)]


def test_fixed_is_fixed():
    assert set(draws(DepthSampler("fixed", maximum=3), 50)) == {3}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scheme": "gamma", "maximum": 4}, "scheme"),
        ({"scheme": "uniform", "maximum": 0}, "maximum"),
        ({"scheme": "poisson-lognormal", "maximum": 4}, "mean"),
        ({"scheme": "uniform", "maximum": 4, "curriculum": "sqrt", "curriculum_steps": 5}, "curriculum='sqrt'"),
        ({"scheme": "uniform", "maximum": 4, "curriculum": "linear"}, "curriculum_steps=None"),
        ({"scheme": "uniform", "maximum": 4, "curriculum": "linear", "curriculum_steps": 0}, "curriculum_steps=0"),
        ({"scheme": "uniform", "maximum": 4, "curriculum_steps": 5}, "needs a curriculum"),
    ],
)
def test_an_impossible_law_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        DepthSampler(**fields)


def test_the_trainer_callback_draws_each_micro_step_and_leaves_the_configured_depth(tmp_path):
    model = tiny_model(num_recurrences=3, trained_recurrences=6)
    ran = {True: [], False: []}
    passes, keys = [], []
    model.model.noise_key = None  # as on models that have noise
    model.model.core[0].register_forward_hook(lambda *_: passes.append(1))
    model.model.register_forward_pre_hook(lambda *_: passes.clear())
    model.model.register_forward_hook(lambda module, *_: ran[module.training].append(len(passes)))
    model.model.register_forward_hook(lambda module, *_: keys.append((module.training, module.noise_key)))
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    sampler = DepthSampler("uniform", maximum=6)
    Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[DepthSamplingCallback(sampler)]
    ).train()
    assert ran[True] == [sampler.draw(7, step, micro_step) for step in range(3) for micro_step in range(2)]
    assert set(ran[False]) == {3}, "evaluation runs the configured depth"
    assert model.config.num_recurrences == 3
    expected = [NoiseKey(7, step, micro_step, 0) for step in range(3) for micro_step in range(2)]
    assert [key for training, key in keys if training] == expected
    assert {key for training, key in keys if not training} == {None} and model.model.noise_key is None


def test_the_callback_counts_the_rows_of_lower_ranks():
    model = torch.nn.Module()
    model.config, model.noise_key = SimpleNamespace(num_recurrences=4), None
    arguments = SimpleNamespace(seed=5, process_index=3, per_device_train_batch_size=8)
    callback = DepthSamplingCallback(DepthSampler("fixed", maximum=4))
    callback.on_step_begin(arguments, SimpleNamespace(global_step=2), None, model=model)
    assert model.noise_key == NoiseKey(seed=5, step=2, micro_step=0, first_row=24)
