"""Golden values of arXiv 2604.21106, sections 3.5 and 3.6 of its spec, and what plans and advice promise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import least_squares

from modeling_looped import LoopedGPTConfig
from modeling_looped.accounting import (
    forward_flops_per_token,
    inference_bytes,
    kv_cache_bytes,
    parameter_counts,
    training_flops_per_token,
)
from modeling_looped.scaling.allocation import (
    BUDGETS,
    allocation_exponents,
    compute_optimal,
    cost_equivalent,
    dense_equivalent,
    effective_ratio,
    empirical_optima,
    empirical_optimum,
    family_config,
    frontier,
    inference_cost,
    predicted_loss,
    unique_ratio,
)
from modeling_looped.scaling.family import ISO_DEPTH, Family
from modeling_looped.scaling.fit import bootstrap, fit_chinchilla, fit_joint_law
from modeling_looped.scaling.law import PUBLISHED, ChinchillaLaw
from modeling_looped.scaling.plan import (
    CELL_NOISE,
    PUBLISHED_RANGES,
    RUN_NOISE,
    Hardware,
    advise,
    fitted_ranges,
    plan_sweep,
    residual_noise,
    simulated_interval,
)


RUNS = Path(__file__).parent / "fixtures" / "iso_depth_runs.csv"
HARDWARE = Hardware(flops_per_second=4e14, devices=8)
# Refits of Table 1, section 3.4.
PER_ARCHITECTURE = {
    1: ChinchillaLaw(57.9, 0.2510, 151.6, 0.2679, 1.5655),
    2: ChinchillaLaw(33.1, 0.2158, 898, 0.3640, 1.6016),
    4: ChinchillaLaw(23.1, 0.1908, 1325, 0.3883, 1.5568),
    8: ChinchillaLaw(41.2, 0.2354, 778, 0.3619, 1.6932),
}
# r: N* and loss at each of the six budgets, from the authors' project page.
PUBLISHED_OPTIMA = {
    1: [(67800356, 2.852291), (108947506, 2.718431), (166600375, 2.604769), (253251357, 2.497633),
        (353365903, 2.401371), (544939137, 2.308794)],
    2: [(38242361, 2.913698), (63186384, 2.773798), (101320457, 2.645158), (161693393, 2.533693),
        (253729995, 2.431210), (381108164, 2.338866)],
    4: [(28102937, 2.935720), (45287637, 2.796329), (71622030, 2.670620), (118677055, 2.559091),
        (183437985, 2.458229), (305815135, 2.359908)],
    8: [(22610504, 2.976786), (39232872, 2.838085), (65349432, 2.708921), (96756236, 2.597685),
        (155473313, 2.494992), (243090368, 2.402100)],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    frame = pd.read_csv(RUNS, comment="#")
    return frame[frame["variant"] == "baseline"]


@pytest.mark.parametrize(
    ("budget", "r", "s", "millions", "million_tokens", "loss"),
    [
        (1e18, 1, 10.92, 117.2, 847, 2.7279),
        (1e18, 2, 11.41, 77.9, 781, 2.7694),
        (1e18, 4, 11.87, 56.5, 726, 2.8085),
        (1e18, 8, 12.21, 45.2, 679, 2.8458),
        (1e19, 1, 22.89, 515.3, 2443, 2.3997),
        (1e19, 2, 23.91, 342.0, 2234, 2.4308),
        (1e19, 4, 24.86, 248.1, 2060, 2.4601),
        (1e19, 8, 25.56, 198.1, 1912, 2.4882),
    ],
)
def test_the_published_law_s_optima_come_out(budget, r, s, millions, million_tokens, loss):
    best = compute_optimal(PUBLISHED, budget, r)
    assert best.s == pytest.approx(s, abs=0.0051)
    assert best.n_unique / 1e6 == pytest.approx(millions, abs=0.051)
    assert best.tokens / 1e6 == pytest.approx(million_tokens, abs=0.51)
    assert best.loss == pytest.approx(loss, abs=5.1e-5)
    assert best.flops == pytest.approx(budget) and best.binding == ()
    # No neighbour at the same cost is better.
    for width in (0.98 * best.width, 1.02 * best.width):
        tokens = budget / ISO_DEPTH.flops_per_token(width, r)
        assert predicted_loss(PUBLISHED, width, tokens, r) > best.loss


@pytest.mark.parametrize(
    ("r", "power_law", "exact"),
    [
        (1, (0.566, 0.532), (0.50, 0.59)),
        (2, (0.704, 0.417), (0.62, 0.48)),
        (4, (0.756, 0.372), (0.67, 0.43)),
        (8, (0.674, 0.438), (0.60, 0.49)),
    ],
)
def test_exponents_come_out_as_the_paper_takes_them_and_as_exact_flops_give_them(r, power_law, exact):
    law = PER_ARCHITECTURE[r]
    assert allocation_exponents(law, r) == pytest.approx(power_law, abs=0.0015)
    assert allocation_exponents(law, r, "exact") == pytest.approx(exact, abs=0.0051)


def test_exponents_of_fits_to_the_runs_are_those_of_figure_3(runs):
    for r, expected in {1: (0.57, 0.53), 4: (0.76, 0.37)}.items():
        law = fit_chinchilla(runs[runs["r"] == r], restarts=60)
        assert allocation_exponents(law, r) == pytest.approx(expected, abs=0.0051)


def test_where_flops_are_6_n_the_exponent_is_chinchilla_s():
    law, family = PER_ARCHITECTURE[1], Family(vocab_size=1, sequence_length=1)
    textbook = law.beta / (law.alpha + law.beta)
    assert allocation_exponents(law, 1, family=family) == pytest.approx((textbook, 1 - textbook), abs=1e-3)
    exact = allocation_exponents(law, 1, "exact", family=family)
    assert exact == pytest.approx((textbook, 1 - textbook), abs=3e-3)


def test_vertices_of_parabolas_are_the_published_optima(runs):
    optima = empirical_optima(runs)
    assert len(optima) == 24
    for r, expected in PUBLISHED_OPTIMA.items():
        of_r = optima[optima["r"] == r]
        assert list(of_r["budget_flops"]) == list(BUDGETS)
        assert of_r["n_unique"].to_numpy() == pytest.approx([n for n, _ in expected], rel=3e-3)
        assert of_r["loss"].to_numpy() == pytest.approx([loss for _, loss in expected], abs=1.5e-4)


def test_the_loss_frontier_s_gaps_shrink_as_published(runs):
    gaps = empirical_optima(runs).pivot(index="r", columns="budget_flops", values="gap")
    assert (gaps.loc[1] == 0).all()
    assert gaps.loc[2].to_numpy() == pytest.approx([0.0614, 0.0554, 0.0404, 0.0361, 0.0298, 0.0301], abs=2e-4)
    assert gaps.loc[4].to_numpy() == pytest.approx([0.0834, 0.0779, 0.0659, 0.0615, 0.0569, 0.0511], abs=2e-4)
    assert gaps.loc[8].to_numpy() == pytest.approx([0.1245, 0.1197, 0.1042, 0.1001, 0.0936, 0.0933], abs=2e-4)


def test_a_frontier_is_made_of_optima_of_a_joint_law_or_of_one_for_each_architecture():
    table = frontier(PUBLISHED, [1e18, 1e19], (1, 4))
    assert list(table["r"]) == [1, 4, 1, 4] and list(table["budget_flops"]) == [1e18, 1e18, 1e19, 1e19]
    assert table["loss"][3] == compute_optimal(PUBLISHED, 1e19, 4).loss
    assert table["gap"].to_numpy() == pytest.approx([0, 0.0806, 0, 0.0604], abs=1e-4)
    separate = frontier(PER_ARCHITECTURE, [1e18], (1, 4))
    assert separate["loss"][1] == compute_optimal(PER_ARCHITECTURE[4], 1e18, 4).loss
    with pytest.raises(ValueError, match="no law for r=16"):
        frontier(PER_ARCHITECTURE, [1e18], (1, 16))


@pytest.mark.parametrize("r", [2, 4, 8])
def test_a_higher_phi_means_fewer_parameters_and_more_tokens(r):
    optima = [compute_optimal(replace(PUBLISHED, phi=phi), 1e19, r) for phi in (0.2, 0.4, 0.6, 0.8)]
    assert (np.diff([best.n_unique for best in optima]) < 0).all()
    assert (np.diff([best.tokens for best in optima]) > 0).all()
    assert (np.diff([best.loss for best in optima]) < 0).all()
    assert compute_optimal(replace(PUBLISHED, phi=0.9), 1e19, 1) == compute_optimal(PUBLISHED, 1e19, 1)


def test_constraints_bind_and_are_reported():
    free = compute_optimal(PUBLISHED, 1e19, 4)
    assert compute_optimal(PUBLISHED, 1e19, 4, {"tokens": 1e12, "width": 4096, "memory_bytes": 1e11}) == free
    narrow = compute_optimal(PUBLISHED, 1e19, 4, {"width": 1024})
    assert narrow.width == 1024 and narrow.binding == ("width",) and narrow.flops == pytest.approx(1e19)
    small = compute_optimal(PUBLISHED, 1e19, 4, {"unique_parameters": 1e8, "width": 1024})
    assert small.n_unique == pytest.approx(1e8) and small.binding == ("unique_parameters",)
    little = compute_optimal(PUBLISHED, 1e19, 4, {"tokens": 1e9})
    assert little.tokens == pytest.approx(1e9) and little.binding == ("tokens",)
    assert little.width > free.width and little.flops == pytest.approx(1e19)
    both = compute_optimal(PUBLISHED, 1e19, 4, {"tokens": 1e9, "width": 1024})
    assert both.binding == ("width", "tokens") and both.width == 1024 and both.tokens == 1e9
    assert both.flops == pytest.approx(1e9 * ISO_DEPTH.flops_per_token(1024, 4)) and both.flops < 1e19
    for limited in (narrow, small, little, both):
        assert limited.loss > free.loss


def test_a_limit_on_memory_counts_the_accounting_s_bytes():
    for r in (1, 4):
        config = LoopedGPTConfig.iso_depth(14, r)
        limit = inference_bytes(config, 2048)
        best = compute_optimal(PUBLISHED, 1e19, r, {"memory_bytes": limit})
        assert best.width == pytest.approx(14 * 64, rel=1e-6) and best.binding == ("memory_bytes",)


def test_the_least_budget_gets_the_narrowest_model():
    assert compute_optimal(PUBLISHED, 1e13, 4).binding == ("one head",)
    assert compute_optimal(PUBLISHED, 1e13, 4).width == ISO_DEPTH.head_dim


@pytest.mark.parametrize(
    ("phi", "without_injection"),
    [
        (0, (0.6, 0.4, 0.3)),
        (0.38, (0.7205, 0.5387, 0.4204)),
        (0.46, (0.7502, 0.5784, 0.4603)),
        (0.65, (0.8277, 0.6925, 0.5864)),
        (1, (1, 1, 1)),
    ],
)
def test_effective_ratios_are_the_table_s(phi, without_injection):
    assert [effective_ratio(r, phi) for r in (2, 4, 8)] == pytest.approx(without_injection, abs=5.1e-5)
    assert effective_ratio(1, phi) == pytest.approx(1)


def test_the_three_conventions_of_the_effective_ratio_are_told_apart():
    kept = [effective_ratio(r, 0.46, "paper") for r in (2, 4, 8)]
    assert kept == pytest.approx([0.7617, 0.5942, 0.4820], abs=5.1e-5)
    figure_1 = [effective_ratio(r, 0.459, "regression") for r in (2, 4, 8)]
    assert figure_1 == pytest.approx([0.7532, 0.5835, 0.4669], abs=5.1e-5)


def test_410m_at_four_recurrences_is_worth_580m_and_costs_1b():
    assert unique_ratio(4) == pytest.approx(0.4083, abs=5e-5) and unique_ratio(4, injection=False) == pytest.approx(0.4)
    assert [unique_ratio(r) for r in (1, 2, 8)] == pytest.approx([1, 0.6083, 0.3083], abs=5e-5)
    assert dense_equivalent(1e9, 4, 0.46) == pytest.approx(578.4e6, abs=0.05e6)
    assert cost_equivalent(1e9, 4) == 1e9
    overhead = [cost_equivalent(1, r, injection=True) - 1 for r in (1, 2, 4, 8)]
    assert overhead == pytest.approx([0, 1 / 60, 1 / 30, 1 / 15], abs=1e-6)


def test_costs_are_the_accounting_s_integers():
    config = LoopedGPTConfig.iso_depth(10, 4)
    cost = inference_cost(640, 4, context=1000, batch=3)
    assert cost.flops_per_token == forward_flops_per_token(config, 1000)
    assert cost.weight_bytes == 2 * parameter_counts(config)["total"] == 2 * 81194880
    assert cost.cache_bytes == kv_cache_bytes(config, 1000, 3)
    assert cost.total_bytes == inference_bytes(config, 1000, 3) and cost.loss is None
    assert inference_cost(config, context=1000, batch=3) == cost
    fp32 = inference_cost(config, 8, dtype=torch.float32, law=PUBLISHED, tokens=1e9)
    assert fp32.cache_bytes == kv_cache_bytes(config, 2048, num_recurrences=8, bytes_per_value=4)
    assert fp32.flops_per_token == forward_flops_per_token(config, 2048, 8)
    assert inference_cost(640, 4, law=PUBLISHED, tokens=1e9).loss == predicted_loss(PUBLISHED, 640, 1e9, 4)


def test_a_family_s_configuration_is_the_paper_s():
    for r in (1, 2, 4, 8, 16):
        assert family_config(640, r).to_dict() == LoopedGPTConfig.iso_depth(10, r).to_dict()
    small = Family(prelude=1, looped=6, coda=1, injection="additive", vocab_size=100, sequence_length=64, head_dim=16)
    config = family_config(48, 3, small)
    assert str(config.plan()) == "Loop(1-2x3-1)"
    assert parameter_counts(config)["unique"] == small.n_all(48, 3)
    assert training_flops_per_token(config) == small.flops_per_token(48, 3)


@pytest.fixture(scope="module")
def plan():
    return plan_sweep(5e19, HARDWARE, recurrences=(1, 4), target_width=0.22, simulations=200)


def test_a_plan_costs_what_its_runs_cost(plan):
    of_run = plan.runs
    assert plan.total_flops == of_run["flops"].sum() <= 5e19
    assert plan.hours == pytest.approx(plan.total_flops / (8 * 4e14 * 3600))
    assert of_run["device_hours"].sum() == pytest.approx(8 * plan.hours)
    assert (of_run["tokens"] == of_run["iterations"] * 262144).all()
    assert (of_run["flops"] / of_run["budget_flops"]).between(0.97, 1.03).all()
    for row in of_run.itertuples():
        assert row.flops == row.tokens * training_flops_per_token(LoopedGPTConfig.iso_depth(int(row.s), row.r))
    assert (of_run.groupby(["budget_flops", "r"])["d_model"].nunique() >= 3).all()
    assert of_run["budget_flops"].nunique() >= 2 and set(of_run["r"]) == {1, 4}
    assert f"{len(of_run)} runs" in str(plan)


def test_a_plan_s_interval_is_that_of_independent_simulations(plan):
    assert plan.reached and plan.width <= 0.22 and plan.interval[0] < PUBLISHED.phi < plan.interval[1]
    widths, r, tokens = (plan.runs[name].to_numpy(float) for name in ("d_model", "r", "tokens"))
    once, rec = ISO_DEPTH.split(widths, r)
    cells = plan.runs.groupby(["budget_flops", "r"]).ngroup().to_numpy()

    def log_loss(x):
        of_size = np.exp(x[0] - x[1] * np.log(once + r ** np.clip(x[5], -3, 3) * rec))
        return np.log(of_size + np.exp(x[2] - x[3] * np.log(tokens)) + np.exp(x[4]))

    law = PUBLISHED
    truth = [np.log(law.A), law.alpha, np.log(law.B), law.beta, np.log(law.E), law.phi]
    random, phis = np.random.default_rng(123), []
    for _ in range(200):
        noise = random.normal(0, CELL_NOISE, 1 + cells.max())[cells] + random.normal(0, RUN_NOISE, len(cells))
        measured = np.log(np.exp(log_loss(truth)) + noise)
        options = {"loss": "huber", "f_scale": 1e-3, "x_scale": "jac", "max_nfev": 2000}
        phis.append(least_squares(lambda x: log_loss(x) - measured, truth, **options).x[5])
    low, high = np.percentile(phis, [2.5, 97.5])
    assert np.median(phis) == pytest.approx(PUBLISHED.phi, abs=0.02)
    assert high - low == pytest.approx(plan.width, rel=0.2)


def test_a_plan_is_the_same_twice_and_a_wider_interval_is_cheaper(plan):
    wide, again = (
        plan_sweep(1.5e19, HARDWARE, recurrences=(1, 4), target_width=0.4, simulations=30) for _ in range(2)
    )
    assert again.interval == wide.interval and again.runs.equals(wide.runs)
    assert wide.reached and wide.total_flops < plan.total_flops


def test_a_plan_that_cannot_be_good_enough_says_so():
    plan = plan_sweep(2e19, HARDWARE, recurrences=(1, 4), target_width=0.02, simulations=20)
    assert not plan.reached and plan.total_flops <= 2e19
    assert "wider than the 0.02 asked for" in str(plan)


def test_noise_of_the_paper_s_runs_gives_the_paper_s_interval(runs):
    assert residual_noise(PUBLISHED, runs) == pytest.approx((RUN_NOISE, CELL_NOISE), abs=1e-4)
    low, high = simulated_interval(PUBLISHED, runs, simulations=200)
    assert 0.39 <= low <= 0.44 and 0.49 <= high <= 0.55  # section 3.4 of the spec, for the bootstrap
    quiet = simulated_interval(PUBLISHED, runs, 1e-6, 0, simulations=20)
    assert quiet == pytest.approx((PUBLISHED.phi, PUBLISHED.phi), abs=1e-3)


def test_devices_with_little_memory_get_narrow_models():
    limit = 16 * 200_000_000
    plan = plan_sweep(2e19, replace(HARDWARE, memory_bytes=limit), recurrences=(1, 4), target_width=0.5, simulations=20)
    assert (ISO_DEPTH.total_parameters(plan.runs["d_model"], plan.runs["r"]) <= 200_000_000).all()
    with pytest.raises(ValueError, match="holds fewer than three widths .* lower smallest_budget"):
        plan_sweep(2e19, replace(HARDWARE, memory_bytes=1e8), target_width=0.5, simulations=20)


def test_without_limits_advice_is_the_dense_model_at_its_optimum():
    advice = advise(PUBLISHED, None, 1e19)
    assert advice.num_recurrences == 1 and advice.interval is None and advice.notes == ()
    best = compute_optimal(PUBLISHED, 1e19, 1)
    assert abs(advice.width - best.width) < 128 and advice.loss == pytest.approx(best.loss, abs=3e-4)
    assert list(advice.table["r"]) == [1, 2, 4, 8]
    assert (advice.table["lifetime_flops"] <= 1e19 * (1 + 1e-9)).all()


def test_advice_is_the_best_of_all_whole_heads_within_memory():
    budget, memory, inference = 1e21, 5e8, 1e10
    advice = advise(PUBLISHED, None, budget, memory, inference)
    best = []
    for r in (1, 2, 4, 8):
        for width in range(128, 2048, 128):
            config = family_config(width, r)
            tokens = (budget - inference * forward_flops_per_token(config)) / training_flops_per_token(config)
            if inference_bytes(config, 2048) <= memory and tokens > 0:
                best.append((predicted_loss(PUBLISHED, width, tokens, r), r, width, tokens))
    assert (advice.loss, advice.num_recurrences, advice.width, advice.tokens) == pytest.approx(min(best))
    assert advice.num_recurrences > 1
    row = advice.table[advice.table["r"] == advice.num_recurrences].iloc[0]
    assert row["binding"] == ("memory_bytes",) and row["weight_bytes"] + row["cache_bytes"] <= memory
    assert row["inference_flops"] == inference * forward_flops_per_token(family_config(advice.width, row["r"]))
    assert row["lifetime_flops"] == pytest.approx(budget)


def test_much_serving_makes_models_narrower_and_little_data_makes_them_wider():
    widths = [advise(PUBLISHED, None, 1e19, inference_tokens=tokens).width for tokens in (0, 5e9, 5e10)]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]
    short = advise(PUBLISHED, None, 1e19, max_tokens=1e9)
    assert short.tokens <= 1e9 and short.width > widths[0]


def test_advice_has_the_error_of_the_draws(runs):
    law = fit_joint_law(runs, restarts=60)
    draws = bootstrap(runs, law, resamples=30, random_starts=0)
    advice = advise(law, draws, 1e19, memory_bytes=4e8, fitted=fitted_ranges(runs))
    assert advice.interval[0] < advice.loss < advice.interval[1]
    assert advice.interval[1] - advice.interval[0] < 0.05
    assert advice.table["best_share"].sum() == pytest.approx(1)
    laws = [replace(law, **row) for row in draws.draws.to_dict("records")]
    assert advise(law, laws, 1e19, memory_bytes=4e8).interval == advice.interval
    losses = [predicted_loss(draw, advice.width, advice.tokens, advice.num_recurrences) for draw in laws]
    assert advice.interval == pytest.approx(tuple(np.percentile(losses, [2.5, 97.5])))
    assert f"{advice.interval[0]:.4f}" in str(advice)


def test_advice_says_where_it_extrapolates(runs):
    seen = fitted_ranges(runs)
    assert seen == {name: pytest.approx(edges) for name, edges in PUBLISHED_RANGES.items()}
    far = advise(PUBLISHED, None, 1e22)
    assert "extrapolates" in far.notes[0] and "training FLOPs 1e+22 (fitted from 4.64e+17 to 2.15e+19)" in far.notes[0]
    deep = advise(PUBLISHED, None, 1e19, recurrences=(16,))
    assert deep.notes[0].endswith("recurrences 16 (fitted from 1 to 8).") and "training" not in deep.notes[0]
    assert advise(PUBLISHED, None, 1e18).notes == ()


def test_a_recurrence_count_without_a_model_is_left_out_with_its_reason():
    needed = {r: inference_bytes(family_config(128, r), 2048) for r in (1, 8)}
    advice = advise(PUBLISHED, None, 1e18, memory_bytes=(needed[1] + needed[8]) / 2, recurrences=(1, 8))
    assert list(advice.table["r"]) == [8] and any("r = 1 has no model" in note for note in advice.notes)


def cell(**columns):
    return pd.DataFrame(
        {"budget_flops": 1e18, "r": 1, "n_unique": [1e8, 2e8, 4e8], "val_loss": [3.1, 3.0, 3.1], **columns}
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: compute_optimal(PUBLISHED, -1e18, 1), "budget=-1e[+]18 must be a positive number"),
        (lambda: compute_optimal(PUBLISHED, float("nan"), 1), "budget=nan must be a positive number"),
        (lambda: compute_optimal(PUBLISHED, 1e6, 1), "less than one token costs at the narrowest width"),
        (lambda: compute_optimal(PUBLISHED, 1e18, 1, {"ram": 1}), "constraint 'ram' is unknown: choose among"),
        (lambda: compute_optimal(PUBLISHED, 1e18, 1, {"tokens": 0}), "constraint tokens=0 must be positive"),
        (lambda: compute_optimal(PUBLISHED, 1e18, 1, {"width": 64}), "width=64 leaves no model: one head of 128"),
        (lambda: compute_optimal(PUBLISHED, 1e18, 4, {"memory_bytes": 1e6}), "memory_bytes=1e[+]06 leaves no model"),
        (lambda: compute_optimal(PUBLISHED, 1e18, 4, {"unique_parameters": 9}), "unique_parameters=9 leaves no model"),
        (lambda: compute_optimal(replace(PUBLISHED, decomposition="own"), 1e18, 4), "decomposition='own' must be"),
        (lambda: allocation_exponents(PUBLISHED, 1, "guess"), "method='guess' must be 'power_law' or 'exact'"),
        (lambda: allocation_exponents(PUBLISHED, 1, "exact", [1e18]), "have no slope"),
        (lambda: empirical_optimum(cell(n_unique=[1e8] * 3)), "have 1 widths, and a parabola needs three"),
        (lambda: empirical_optimum(cell(val_loss=[3.0, 3.1, 3.0])), "have no minimum"),
        (lambda: empirical_optimum(cell(r=[1, 2, 4])), "one budget and one number of recurrences"),
        (lambda: inference_cost(700, 4), "width=700 must be a multiple of head_dim=128"),
        (lambda: inference_cost(640), "num_recurrences is needed beside a width"),
        (lambda: inference_cost(640, 3), r"num_recurrences=3 does not split .* choose one of \[1, 2, 4, 8, 16\]"),
        (lambda: inference_cost(640, 4, law=PUBLISHED), "A loss needs both"),
        (lambda: inference_cost(640, 4, dtype="float7"), "dtype='float7' must be one of torch"),
        (lambda: inference_cost(640, 4, context=0), "context=0 must be a whole number"),
        (lambda: Hardware(-1), "flops_per_second=-1 of the hardware must be positive"),
        (lambda: plan_sweep(0, HARDWARE), "budget=0 must be a positive number"),
        (lambda: plan_sweep(1e18, HARDWARE), "budget_flops=1e[+]18 is less than the smallest sweep"),
        (lambda: plan_sweep(1e20, HARDWARE, recurrences=(4,)), "cannot show phi"),
        (lambda: plan_sweep(1e20, HARDWARE, recurrences=(1, 3)), "recurrences has 3, which is not among"),
        (lambda: plan_sweep(1e20, HARDWARE, noise=0), "noise=0 must be positive"),
        (lambda: plan_sweep(1e20, HARDWARE, simulations=5), "simulations=5 give no 95 % interval"),
        (lambda: advise(PUBLISHED, None, -1), "budget=-1 must be a positive number"),
        (lambda: advise(PUBLISHED, None, 1e18, memory_bytes=1e5), "No recurrence count meets the limits. r = 1 has no"),
        (lambda: advise(PUBLISHED, None, 1e18, inference_tokens=1e15), "costs its narrowest the whole budget"),
        (lambda: advise(PUBLISHED, None, 1e18, inference_tokens=-1), "inference_tokens=-1 must not be negative"),
        (lambda: advise(PUBLISHED, None, 1e18, fitted={"phi": (0, 1)}), "fitted has 'phi', which is unknown"),
        (lambda: advise(PUBLISHED, None, 1e18, recurrences=(3,)), "num_recurrences=3 does not split"),
    ],
)
def test_an_error_is_one_clear_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)
