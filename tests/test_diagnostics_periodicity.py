"""The periodicity of a curve over layers, against the published curves and a slow computation."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from modeling_looped.diagnostics.periodicity import periodicity


ATTENTION, LAYER = "fig3_attn_rel_contrib(layer0/23 clipped)", "fig14_layer_rel_contrib"
# Section 6.6 of the specification: autocorrelation at lag 4, eta squared, share of power.
TABLE = {
    "Baseline": ("-0.13", "0.17", "0.18"),
    "LIDAS": ("0.45", "0.71", "0.76"),
    "Loop(4x6)": ("0.69", "0.90", "0.90"),
    "Loop(4-4x4-4)": ("0.13", "0.34", "0.40"),
}
OF_LAYER = {"Baseline": "0.20", "LIDAS": "0.37", "Loop(4x6)": "0.23", "Loop(4-4x4-4)": "0.38"}


def curve(shared, figure: str, model: str) -> np.ndarray:
    """24 layers; what the figure cuts off is not a number."""
    figures = json.loads((shared / "reference" / "growing_looping_figures.json").read_text())
    values = np.full(24, np.nan)
    for layer, value in figures[figure][model].items():
        values[int(layer)] = value
    return values


@pytest.mark.parametrize("model", TABLE)
def test_the_table_of_the_specification_follows_from_the_published_attention_contributions(shared, model):
    found = periodicity(curve(shared, ATTENTION, model), 4)
    assert (found.first, found.last) == (4, 19)
    assert tuple(f"{x:.2f}" for x in (found.autocorrelation, found.eta_squared, found.power)) == TABLE[model]


@pytest.mark.parametrize("model", OF_LAYER)
def test_eta_squared_of_layer_contributions_is_that_of_the_specification(shared, model):
    found = periodicity(curve(shared, LAYER, model), 4, curve="layer contribution")
    assert f"{found.eta_squared:.2f}" == OF_LAYER[model]


def test_loops_and_grown_models_are_periodic_beyond_chance_and_the_baseline_is_not(shared):
    p = {model: periodicity(curve(shared, ATTENTION, model), 4).p_value for model in TABLE}
    assert p["Loop(4x6)"] < 0.001 and p["LIDAS"] < 0.01 and p["Baseline"] > 0.2


def test_the_three_numbers_are_those_of_a_slow_computation():
    values = np.random.default_rng(3).normal(size=21)
    found = periodicity(values, 3, permutations=10)
    assert (found.first, found.last) == (3, 17)
    x = np.array([values[i] for i in range(3, 18)])
    design = np.stack([np.ones(15), np.arange(15)], 1)
    x = x - design @ np.linalg.lstsq(design, x, rcond=None)[0]
    total = sum(v * v for v in x)
    assert found.autocorrelation == pytest.approx(sum(x[i] * x[i + 3] for i in range(12)) / total)
    assert found.eta_squared == pytest.approx(sum(5 * np.mean(x[phase::3]) ** 2 for phase in range(3)) / total)
    power = [abs(sum(x[t] * np.exp(-2j * np.pi * k * t / 15) for t in range(15))) ** 2 for k in range(1, 8)]
    assert found.power == pytest.approx(power[4] / sum(power))  # frequency 1 / 3 is bin 5


def test_a_curve_of_one_pattern_is_all_period_and_a_trend_takes_nothing_from_it():
    pattern = np.tile([0.0, 3.0, -1.0, 2.0], 40)
    found = periodicity(pattern + 0.7 * np.arange(160), 4, permutations=200)
    assert found.eta_squared == pytest.approx(1, abs=0.01) and found.power == pytest.approx(1, abs=0.01)
    assert found.p_value == pytest.approx(1 / 201)


def test_a_trend_and_a_factor_change_no_number():
    values = np.random.default_rng(0).normal(size=16)
    one, other = (periodicity(v, 4, permutations=500) for v in (values, 5 * values + 3 * np.arange(16) - 2))
    for name in ("autocorrelation", "eta_squared", "power", "p_value"):
        assert getattr(one, name) == pytest.approx(getattr(other, name))


def test_the_p_value_is_the_share_of_all_orders_where_all_are_drawn():
    from itertools import permutations

    values = np.random.default_rng(5).normal(size=6)
    found = periodicity(values, 3, first=0, last=5, permutations=20_000)
    x = found.detrended
    exact = np.mean(
        [
            sum(2 * np.mean(np.array(order)[phase::3]) ** 2 for phase in range(3)) / np.square(x).sum()
            >= found.eta_squared * (1 - 1e-12)
            for order in permutations(x)
        ]
    )
    assert found.p_value == pytest.approx(exact, abs=0.015)


def test_noise_has_uniform_p_values():
    generator = np.random.default_rng(1)
    p = [periodicity(generator.normal(size=24), 4, permutations=200).p_value for _ in range(300)]
    assert np.mean(np.array(p) <= 0.1) == pytest.approx(0.1, abs=0.05)


def test_phases_count_from_the_first_executed_layer():
    values = np.random.default_rng(2).normal(size=24)
    found = periodicity(values, 4, first=6, last=17, permutations=10)
    assert found.phase_means[2] == pytest.approx(found.detrended[[0, 4, 8]].mean())  # layers 6, 10, 14
    assert list(found.to_frame()["phase"][:3]) == [2, 3, 0]


def test_one_seed_gives_one_p_value():
    values = np.random.default_rng(2).normal(size=24)
    assert periodicity(values, 4).p_value == periodicity(values, 4).p_value
    assert periodicity(values, 4, seed=1).p_value != periodicity(values, 4).p_value


@pytest.mark.parametrize(
    "values, options, message",
    [
        (np.ones(24), {"block": 4}, "straight line"),
        (np.arange(24) * 0.3, {"block": 4}, "straight line"),
        (np.arange(12.0), {"block": 4}, "not two blocks"),
        (np.arange(26.0), {"block": 4}, "no multiple of block=4"),
        (np.arange(24.0), {"block": 4, "last": 18}, "no multiple of block=4"),
        (np.arange(24.0), {"block": 4, "first": 8, "last": 27}, "first and last"),
        (np.arange(24.0), {"block": 1}, "block=1"),
        (np.ones((2, 24)), {"block": 4}, "one number a layer"),
        (np.where(np.arange(24) == 7, np.nan, np.arange(24)), {"block": 4}, r"values\[7\] is not a number"),
    ],
)
def test_what_does_not_fit_is_said(values, options, message):
    with pytest.raises(ValueError, match=message):
        periodicity(values, **options)


def test_it_draws_itself_and_says_its_number(shared):
    found = periodicity(curve(shared, ATTENTION, "Loop(4x6)"), 4)
    axes = Figure().subplots()
    found.plot(axes, label="Loop(4x6)")
    assert len(axes.get_lines()) >= 2
    assert found.headline() == (
        "90% of the variance of the attention contribution over layers 4 to 19 is a pattern of 4 layers (p < 0.001)."
    )
