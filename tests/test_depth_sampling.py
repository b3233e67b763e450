"""Depth draws: laws, purity, and the Trainer callback."""

import numpy as np
import pytest
import torch
from conftest import tiny_model
from transformers import Trainer, TrainingArguments

from modeling_looped.depth_sampling import DepthSampler, DepthSamplingCallback


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


@pytest.mark.parametrize(("mean", "variance", "first"), [(4, 8.50, 0.058), (6, 16.3, 0.021), (10, 38.4, 0.004)])
def test_poisson_lognormal_has_huginn_s_moments(mean, variance, first):
    drawn = draws(DepthSampler("poisson-lognormal", maximum=10_000, mean=mean))
    assert abs(drawn.mean() - (mean + 1)) < 0.02 * (mean + 1)
    assert abs(drawn.var() - variance) < 0.06 * variance
    assert abs((drawn == 1).mean() - first) < 0.006


def test_lognormal_clip_puts_most_of_its_mass_on_the_bound():
    drawn = draws(DepthSampler("lognormal-clip", minimum=2, maximum=10, mean=10), 5_000)
    assert drawn.min() >= 2 and 0.68 < (drawn == 10).mean() < 0.8


def test_fixed_is_fixed():
    assert set(draws(DepthSampler("fixed", maximum=3), 50)) == {3}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scheme": "gamma", "maximum": 4}, "scheme"),
        ({"scheme": "uniform", "maximum": 0}, "maximum"),
        ({"scheme": "poisson-lognormal", "maximum": 4}, "mean"),
    ],
)
def test_an_impossible_law_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        DepthSampler(**fields)


def test_the_trainer_callback_draws_each_micro_step_and_leaves_the_configured_depth(tmp_path):
    model = tiny_model(num_recurrences=3, trained_recurrences=6)
    ran = {True: [], False: []}
    passes = []
    model.model.core[0].register_forward_hook(lambda *_: passes.append(1))
    model.model.register_forward_pre_hook(lambda *_: passes.clear())
    model.model.register_forward_hook(lambda module, *_: ran[module.training].append(len(passes)))
    rows = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)} for _ in range(12)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=1,
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
