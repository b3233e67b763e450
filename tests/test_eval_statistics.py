"""Metrics with their errors, and the `evaluate` modules of them."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from lm_eval.api.metrics import mean_stderr

from modeling_looped.eval.held_out import held_out_loss
from modeling_looped.eval.metrics import METRICS, load_metric, metric_path
from modeling_looped.eval.statistics import aggregate, bootstrap_stderr, p_value, paired_bootstrap, resampled


def items(count: int, seed: int, shift: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.stack([random.gamma(4.0, 0.5, count) + shift, random.integers(1, 6, count)], axis=1)


def test_a_metric_of_pairs_is_the_ratio_of_sums_and_not_the_mean_of_ratios():
    assert aggregate([(6.0, 2), (1.0, 2)]) == 7 / 4
    assert aggregate([1.0, 0.0, 0.0, 1.0]) == 0.5


def test_the_bootstrap_error_is_that_of_the_formulas_where_there_are_some():
    scores = items(400, 0)
    assert bootstrap_stderr(scores[:, 0], 4000) == pytest.approx(mean_stderr(scores[:, 0].tolist()), rel=0.05)
    # Of a ratio: the delta method.
    ratio = scores[:, 0].sum() / scores[:, 1].sum()
    formula = np.std(scores[:, 0] - ratio * scores[:, 1], ddof=1) / math.sqrt(len(scores)) / scores[:, 1].mean()
    assert bootstrap_stderr(scores, 4000) == pytest.approx(formula, rel=0.05)
    assert math.isnan(bootstrap_stderr([1.0])) and bootstrap_stderr([1.0, 1.0]) == 0.0


def test_bootstrap_samples_are_those_of_one_draw_after_the_other():
    scores = items(50, 1)
    chosen = np.random.default_rng(7).integers(50, size=(20, 50), dtype=np.int32)
    assert resampled(scores, 20, 7) == pytest.approx(
        [scores[i, 0].sum() / scores[i, 1].sum() for i in chosen], rel=1e-12
    )


def test_a_pair_of_models_is_told_apart_by_the_items_that_they_share():
    one, other = items(200, 2), items(200, 2, shift=0.05)
    difference, error, p = paired_bootstrap(one, other)
    assert difference == pytest.approx(-0.05 * 200 / one[:, 1].sum()) and p < 0.01
    assert error < bootstrap_stderr(one) / 10  # what the items have in common falls out
    assert paired_bootstrap(one, one) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="the same items: there are 200 and 199"):
        paired_bootstrap(one, other[:-1])


def test_p_values_are_right_as_often_as_they_say_and_never_from_a_few_items():
    found = [paired_bootstrap(items(60, 10 + i)[:, 0], items(60, 1000 + i)[:, 0], 400, i)[2] for i in range(300)]
    assert 0.01 < np.mean(np.array(found) < 0.05) < 0.10
    assert paired_bootstrap([0.0] * 3, [1.0] * 3)[2] == 0.25  # three coins that fall alike
    assert math.isnan(p_value(np.array([1.0, math.nan]), 10))


def test_metrics_need_an_item():
    with pytest.raises(ValueError, match="no scores"):
        aggregate([])


def test_the_modules_of_evaluate_load_from_their_path_without_a_network(tmp_path):
    code = """
import evaluate, json
from modeling_looped.eval.metrics import metric_path
loss, bits = (evaluate.load(metric_path(name)) for name in ("continuation_loss", "bits_per_byte"))
found = loss.compute(nats=[3.0, 1.0], tokens=[2, 2], stderr=True)
bits.add(nats=1.0, bytes=2)
bits.add_batch(nats=[1.0, 2.0], bytes=[1, 1])
print(json.dumps({**found, **bits.compute()}))
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {
        "continuation_loss": 1.0,
        "continuation_loss_stderr": pytest.approx(bootstrap_stderr([(3.0, 2), (1.0, 2)])),
        "bits_per_byte": pytest.approx(1 / math.log(2)),
    }


def test_held_out_losses_are_those_of_the_metrics(monkeypatch):
    from conftest import tiny_model

    from modeling_looped.eval import held_out
    from modeling_looped.recipes.tokens import train_tokenizer

    asked = []
    monkeypatch.setattr(held_out, "load_metric", lambda name: asked.append(name) or load_metric(name))
    text = "Some words that come again, some words that do not. " * 20
    (row,) = held_out_loss(tiny_model(vocab_size=300), train_tokenizer([text], 300), [text])
    assert sorted(asked) == sorted(METRICS)
    assert row.bits_per_byte == pytest.approx(row.nats_per_token * row.tokens / math.log(2) / row.bytes)


def test_a_metric_that_is_not_here_is_named():
    with pytest.raises(ValueError, match="metric 'bleu' must be 'bits_per_byte' or 'continuation_loss'"):
        metric_path("bleu")
