"""The laws of arXiv 2604.21106, refitted from the losses read off its figure, and what a fit refuses."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from modeling_looped import LoopedGPTConfig
from modeling_looped.accounting import forward_flops_per_token, parameter_counts, training_flops_per_token
from modeling_looped.scaling import (
    ISO_DEPTH,
    PUBLISHED,
    ChinchillaLaw,
    Family,
    JointLaw,
    bootstrap,
    fit_chinchilla,
    fit_joint_law,
    half_budgets,
    leave_one_cell_out,
    predicted_losses,
    read_runs,
    residual_table,
)
from modeling_looped.scaling.fit import LAW_NAMES, Problem, _read


RESTARTS = 40  # one start in seven reaches the best optimum
RUNS = pd.read_csv(Path(__file__).parent / "fixtures" / "iso_depth_runs.csv", comment="#")
OWN = {"n_once": RUNS.n_once_ls, "n_rec": RUNS.n_rec_ls}


@cache
def joint(decomposition="regression", phi=None, highest_budget=3e19) -> JointLaw:
    return fit_joint_law(RUNS[RUNS.budget_flops < highest_budget], decomposition, phi, restarts=RESTARTS)


def simulated(law: JointLaw, noise: float, seed: int, frame: pd.DataFrame = RUNS) -> pd.DataFrame:
    """The reference design with the losses of `law` and independent normal noise, in nats."""
    noises = np.random.default_rng(seed).normal(0, noise, len(frame))
    return frame.assign(val_loss=predicted_losses(frame, law) + noises)


# Families as formulas


def config_of(family: Family, width: int, r: int, **fields) -> LoopedGPTConfig:
    own = {"injection": "none"} if r == 1 else {"injection": family.injection, "num_lanes": family.num_lanes}
    return LoopedGPTConfig.iso_depth(
        1,
        r,
        family.effective_depth,
        family.prelude,
        family.coda,
        hidden_size=width,
        num_attention_heads=width // family.head_dim,
        vocab_size=family.vocab_size,
        max_position_embeddings=family.sequence_length,
        **own,
        **fields,
    )


@pytest.mark.parametrize("r", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [128, 384, 640, 2176])
@pytest.mark.parametrize(
    "family",
    [
        ISO_DEPTH,
        Family(2, 8, 2, vocab_size=1000, sequence_length=256, head_dim=64),
        Family(2, 8, 2, injection="additive", vocab_size=999, sequence_length=100, head_dim=32),
        Family(0, 16, 1, injection="hyperconnection", num_lanes=3),
    ],
    ids=["paper", "2-8-2", "additive", "hyperconnection"],
)
def test_formulas_count_what_the_built_model_has(family, width, r):
    config = config_of(family, width, r)
    counts = parameter_counts(config)
    assert family.n_all(width, r) == counts["unique"]
    assert family.total_parameters(width, r) == counts["total"]
    assert family.flops_per_token(width, r) == training_flops_per_token(config)
    assert family.forward_flops_per_token(width, r) == forward_flops_per_token(config)
    once, core = family.split(width, r, "paper")
    matrices = counts["prelude"] + counts["core"] + counts["coda"] + 2 * width**2 * (config.injection == "linear")
    assert once == (family.prelude + family.coda) * 12 * width**2 and once + core == matrices


def test_truncated_backpropagation_is_counted_as_the_official_code_does():
    truncated = [ISO_DEPTH.flops_per_token(640, r, backprop_recurrences=r // 2) for r in (2, 4, 8)]
    assert truncated == [793016320, 799569920, 812677120]
    config = config_of(ISO_DEPTH, 640, 8, backprop_recurrences=3)
    assert ISO_DEPTH.flops_per_token(640, 8, 3) == training_flops_per_token(config)
    assert ISO_DEPTH.flops_per_token(640, 2, 3) == ISO_DEPTH.flops_per_token(640, 2)


def test_both_decompositions_give_the_reference_table():
    width, r = RUNS.d_model.to_numpy(), RUNS.r.to_numpy()
    for decomposition, names, error in (("paper", "paper", 0), ("regression", "ls", 0.5)):  # which is rounded
        once, core = ISO_DEPTH.split(width, r, decomposition)
        assert np.abs(once - RUNS[f"n_once_{names}"]).max() <= error
        assert np.abs(core - RUNS[f"n_rec_{names}"]).max() <= error
    assert (ISO_DEPTH.n_all(width, r) == RUNS.n_unique).all()
    assert (ISO_DEPTH.flops_per_token(width, r) == RUNS.flops_per_token).all()
    once, core = ISO_DEPTH.split(640, [1, 2, 16], "regression")
    assert once / 640**2 == pytest.approx([50.6259] * 3, abs=1e-4)
    assert core / 640**2 == pytest.approx([16 * 11.8553, 8 * 11.8553, 11.8553], abs=2e-3)


def test_widths_and_recurrences_broadcast_and_may_be_real():
    assert isinstance(ISO_DEPTH.n_all(640.5, 3), float)
    assert ISO_DEPTH.flops_per_token(np.linspace(300, 900, 5)[:, None], [1, 2, 4]).shape == (5, 3)
    once, core = ISO_DEPTH.split(np.linspace(300, 900, 5)[:, None], [1, 2, 4])
    assert once.shape == core.shape == (5, 3)
    assert ISO_DEPTH.recurrences() == [1, 2, 4, 8, 16] and ISO_DEPTH.round_width([1, 700]).tolist() == [128, 640]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Family(looped=0), "looped=0 must be a whole number of at least 1"),
        (lambda: Family(injection="concat"), "injection='concat' must be one of 'linear'"),
        (lambda: ISO_DEPTH.n_all(-1, 2), "width=-1 must be positive"),
        (lambda: ISO_DEPTH.flops_per_token(640, [1, 0]), "r=0 must be positive"),
        (lambda: ISO_DEPTH.split(640, 2, "own"), "decomposition='own' must be one of 'regression', 'paper'"),
    ],
)
def test_impossible_families_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Laws as values


def test_the_published_law_makes_the_published_predictions():
    cores, recurrences = [80e6, 40e6, 20e6, 10e6], [1, 2, 4, 8]
    losses = PUBLISHED.predict(20e6, cores, 1e9, recurrences)
    assert losses == pytest.approx([2.722359, 2.764508, 2.804779, 2.841916], abs=1e-6)
    assert PUBLISHED.predict(20e6, 80e6, 1e9, 1) == losses[0]
    law = replace(PUBLISHED, phi=0.46)
    assert law.effective(0, 1, recurrences) == pytest.approx([1, 1.3755, 1.8921, 2.6027], abs=1e-4)
    gains = law.g(*ISO_DEPTH.split(640, recurrences, "paper"), recurrences)
    unique = np.array([240, 146, 98, 74]) / 240
    assert gains * unique == pytest.approx([1, 0.7617, 0.5942, 0.4820], abs=1e-4)


@pytest.mark.parametrize("law", [PUBLISHED, ChinchillaLaw(58, 0.251, 150, 0.267, 1.56, at_bounds=("alpha",))])
def test_a_law_survives_json(law):
    assert type(law).from_dict(json.loads(json.dumps(law.to_dict()))) == law
    with pytest.raises(ValueError, match="lacks beta"):
        type(law).from_dict({name: value for name, value in law.to_dict().items() if name != "beta"})
    with pytest.raises(ValueError, match="unknown 'gamma'"):
        type(law).from_dict({**law.to_dict(), "gamma": 1})


# The paper's fits


def test_the_regression_decomposition_gives_the_published_law():
    law = joint()
    assert law.phi == pytest.approx(0.459, abs=0.003) and law.r2 == pytest.approx(0.9972, abs=1e-4)
    for name in ("A", "alpha", "B", "beta", "E"):
        assert getattr(law, name) == pytest.approx(getattr(PUBLISHED, name), rel=0.015)
    assert law.num_runs == 116 and law.restarts_at_best >= 3 and law.at_bounds == () and not law.phi_fixed
    assert law.huber == pytest.approx(2.834e-4, rel=1e-3)


def test_the_definition_in_the_paper_s_text_gives_a_smaller_phi():
    law = joint("paper")
    assert law.phi == pytest.approx(0.433, abs=0.003) and law.decomposition == "paper"
    assert law.r2 == pytest.approx(0.99719, abs=2e-5)


@pytest.mark.parametrize(
    ("phi", "alpha", "beta", "E", "r2", "A", "B"),
    [(0, 0.227, 0.390, 1.71, 0.9858, 34.9, 1491), (1, 0.218, 0.410, 1.66, 0.9552, 39.0, 2051)],
)
def test_phi_fixed_gives_the_rows_of_table_2(phi, alpha, beta, E, r2, A, B):
    law = joint(phi=phi)
    assert law.phi == phi and law.phi_fixed
    assert law.alpha == pytest.approx(alpha, abs=0.001) and law.beta == pytest.approx(beta, abs=0.0015)
    assert law.E == pytest.approx(E, abs=0.005) and law.r2 == pytest.approx(r2, abs=1e-4)
    assert law.A == pytest.approx(A, rel=0.01) and law.B == pytest.approx(B, rel=0.01)


# A and B have two figures, so half a unit of the second; alpha, beta and E half a unit of the last, and as much again
# for losses that were read off a figure.
@pytest.mark.parametrize(
    ("r", "A", "alpha", "B", "beta", "E", "huber", "r2"),
    [
        (1, 58, 0.251, 150, 0.267, 1.56, 5.84, 0.9979),
        (2, 33, 0.216, 910, 0.365, 1.60, 5.27, 0.9983),
        (4, 23, 0.191, 1300, 0.388, 1.56, 6.81, 0.9976),
        (8, 41, 0.235, 780, 0.362, 1.69, 5.33, 0.9980),
    ],
)
def test_one_recurrence_count_alone_gives_its_row_of_table_1(r, A, alpha, B, beta, E, huber, r2):
    law = fit_chinchilla(RUNS[RUNS.r == r], restarts=RESTARTS)
    assert law.A == pytest.approx(A, abs=0.5) and law.B == pytest.approx(B, rel=0.04)
    assert law.alpha == pytest.approx(alpha, abs=0.001) and law.beta == pytest.approx(beta, abs=0.001)
    assert law.E == pytest.approx(E, abs=0.01) and law.r2 == pytest.approx(r2, abs=1e-4)
    assert law.huber * 1e5 == pytest.approx(huber, rel=0.01)


def test_four_budgets_give_the_baseline_of_table_3():
    law = joint(highest_budget=5e18)
    assert law.num_runs == 80 and law.phi == pytest.approx(0.453, abs=0.003)
    assert law.alpha == pytest.approx(0.266, abs=0.0015) and law.beta == pytest.approx(0.457, abs=0.0015)
    assert law.E == pytest.approx(1.85, abs=0.005) and law.r2 == pytest.approx(0.9959, abs=1e-4)
    assert joint("paper", highest_budget=5e18).phi == pytest.approx(0.429, abs=0.003)


def test_halves_of_the_budgets_agree_as_in_appendix_f():
    halves = half_budgets(RUNS, restarts=RESTARTS)
    assert halves["low"].num_runs == 56 and halves["low"].phi == pytest.approx(0.44, abs=0.006)
    assert halves["high"].num_runs == 60 and halves["high"].phi == pytest.approx(0.49, abs=0.006)


def test_residuals_are_those_of_table_7():
    table = residual_table(RUNS, joint())
    assert list(table.index) == [1, 2, 4, 8, "pooled"] and list(table.runs) == [29] * 4 + [116]
    assert list(table["mean"][:4]) == pytest.approx([-0.0007, 0.0042, -0.0056, 0.0005], abs=5e-4)
    assert list(table["max"]) == pytest.approx([0.0184, 0.0356, 0.0233, 0.0294, 0.0356], abs=5e-4)
    assert list(table["rmse"]) == pytest.approx([0.0086, 0.0109, 0.0109, 0.0100, 0.010], abs=5e-4)
    one = fit_chinchilla(RUNS[RUNS.r == 4], restarts=20)
    assert residual_table(RUNS[RUNS.r == 4], one).rmse["pooled"] < table.rmse[4]


def test_the_bootstrap_s_interval_is_the_paper_s():
    result = bootstrap(RUNS, joint(), random_starts=0)
    lower, upper = result.interval("phi", 0.95)
    assert 0.39 <= lower <= 0.44 and 0.49 <= upper <= 0.55
    assert result.identified and result.reason is None and result.cells == 24 and result.redrawn == 0
    assert result.draws.shape == (200, 6) and list(result.draws) == list(LAW_NAMES)
    assert lower < result.interval("phi", 0.5)[0] < joint().phi < result.interval("phi", 0.5)[1] < upper


def test_no_cell_decides_phi():
    table = leave_one_cell_out(RUNS, joint(), random_starts=0)
    assert len(table) == 24 and table.runs.sum() == 116
    assert table.phi.between(0.44, 0.48).all() and (table.rmse < 0.025).all()
    cell = RUNS[(RUNS.budget_flops == 1e19) & (RUNS.r == 8)]
    refit = fit_joint_law(RUNS.drop(cell.index), restarts=20)
    row = table[(table.budget_flops == 1e19) & (table.r == 8)].iloc[0]
    assert row.phi == pytest.approx(refit.phi, abs=1e-5)
    assert row["mean"] == pytest.approx((cell.val_loss - predicted_losses(cell, refit)).mean(), abs=1e-6)


# How the fit works


@pytest.mark.parametrize("phi", [None, 0.3])
def test_the_gradient_is_that_of_the_objective(phi):
    runs = _read(RUNS, "regression", ISO_DEPTH)
    weights = np.random.default_rng(1).integers(0, 3, len(RUNS)).astype(float)
    problem = Problem(runs.n_once, runs.n_rec, runs.r, runs.tokens, runs.loss, phi, weights)
    near = np.array([3.3, 0.2, 6.8, 0.37, 0.45, 0.45])
    far = np.random.default_rng(0).uniform([2, 0.1, 4, 0.2, 0, 0.1], [5, 0.4, 8, 0.5, 1, 0.9], (5, 6))
    for x in (near, *far):  # the first has residuals on both sides of delta
        x = x[: len(problem.bounds)]
        value, gradient = problem.objective(x)
        residuals, jacobian = problem.jacobian(x)
        steps = 1e-6 * np.eye(len(x))
        numeric = [(problem.objective(x + step)[0] - problem.objective(x - step)[0]) / 2e-6 for step in steps]
        assert gradient == pytest.approx(np.array(numeric), rel=1e-4, abs=1e-4 * np.abs(numeric).max())
        numeric = [(problem.jacobian(x + step)[0] - problem.jacobian(x - step)[0]) / 2e-6 for step in steps]
        assert jacobian == pytest.approx(np.stack(numeric, axis=1), rel=1e-4, abs=1e-6)
        sizes = np.abs(residuals)
        huber = np.where(sizes <= 1e-3, sizes**2 / 2, 1e-3 * (sizes - 5e-4))
        assert value == pytest.approx(1e6 * weights @ huber)


def test_the_same_seed_gives_the_same_law_on_any_number_of_processes():
    few = RUNS[RUNS.budget_flops < 2e18]
    first, second, forked = (fit_joint_law(few, restarts=12, seed=3, processes=n) for n in (1, 1, 2))
    assert first == second == forked
    law = joint()
    draws = [bootstrap(RUNS, law, 6, seed=5, random_starts=1, processes=n).draws for n in (1, 1, 2)]
    assert draws[0].equals(draws[1]) and draws[0].equals(draws[2])
    assert not draws[0].equals(bootstrap(RUNS, law, 6, seed=6, random_starts=1).draws)


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.65, 1.0])
def test_a_simulated_law_is_found_again(phi):
    truth = replace(PUBLISHED, phi=phi)
    clean = fit_joint_law(simulated(truth, 0, 0), restarts=25)
    for name in LAW_NAMES:
        assert getattr(clean, name) == pytest.approx(getattr(truth, name), rel=1e-3, abs=1e-4)
    frame = simulated(truth, 0.003, seed=1)
    result = bootstrap(frame, fit_joint_law(frame, restarts=25), 60, random_starts=0)
    lower, upper = result.interval("phi", 0.99)
    assert lower < phi < upper and upper - lower < 0.1 and result.identified


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.3, 0.65, 1.0])
def test_the_interval_covers_a_simulated_phi(phi):
    """The refits start from the truth, to which a fit of the same runs would have led them."""
    truth = replace(PUBLISHED, phi=phi)
    intervals = [
        bootstrap(simulated(truth, 0.003, seed), truth, 100, seed, random_starts=0).interval("phi", 0.95)
        for seed in range(100)
    ]
    assert sum(lower < phi < upper for lower, upper in intervals) >= 90


# What a frame has to have


def test_counts_of_one_s_own_need_no_family():
    frame = RUNS.assign(**OWN)[["r", "tokens", "val_loss", "n_once", "n_rec"]]
    law = fit_joint_law(frame, restarts=RESTARTS)
    assert law.decomposition == "own"
    assert [getattr(law, name) for name in LAW_NAMES] == pytest.approx([getattr(joint(), name) for name in LAW_NAMES])
    assert residual_table(frame, law).rmse["pooled"] == pytest.approx(0.0101, abs=2e-4)
    with pytest.raises(ValueError, match="lacks the column 'budget_flops'"):
        bootstrap(frame, law)
    with pytest.raises(ValueError, match="choose decomposition='own'"):
        fit_joint_law(frame, "regression")


def test_the_regression_split_does_not_depend_on_the_other_runs():
    bare = RUNS.drop(columns=["n_once_ls", "n_rec_ls", "n_once_paper", "n_rec_paper"])
    for decomposition in ("regression", "paper"):
        whole, given = (_read(frame, decomposition, ISO_DEPTH) for frame in (bare, RUNS))
        for r in ([1, 4], [2, 8]):
            rows = RUNS.r.isin(r).to_numpy()
            part = _read(bare[rows], decomposition, ISO_DEPTH)
            assert (part.n_once == whole.n_once[rows]).all() and (part.n_rec == whole.n_rec[rows]).all()
        assert np.abs(whole.n_once - given.n_once).max() <= 0.5
    mixed = pd.concat([RUNS[:60], bare[60:]])
    assert np.abs(_read(mixed, "regression", ISO_DEPTH).n_rec - RUNS.n_rec_ls).max() <= 0.5
    few, without_counts = (fit_joint_law(frame[RUNS.r.isin([1, 4])], restarts=20).phi for frame in (RUNS, bare))
    assert few == pytest.approx(without_counts, abs=1e-5)


def at(row: int, column: str, value) -> pd.DataFrame:
    frame = RUNS.astype({column: type(value)})
    frame.loc[row, column] = value
    return frame


def without(*columns: str) -> pd.DataFrame:
    return RUNS.drop(columns=list(columns))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (at(7, "val_loss", float("nan")), "Column 'val_loss' has nan in row 7: repeat or leave out that run"),
        (at(7, "val_loss", float("inf")), "Column 'val_loss' has inf in row 7"),
        (at(3, "val_loss", -2.0), "Column 'val_loss' has -2 in row 3: it must be positive"),
        (at(3, "tokens", 0), "Column 'tokens' has 0 in row 3: it must be positive"),
        (at(3, "n_rec_ls", -5), "Column 'n_rec_ls' has -5 in row 3: it must be zero or positive"),
        (at(3, "r", 0), "Column 'r' has 0 in row 3: it must be at least 1"),
        (at(3, "r", 1.5), "Column 'r' has 1.5 in row 3: it must be a whole number of passes"),
        (at(3, "budget_flops", -1.0), "Column 'budget_flops' has -1 in row 3"),
        (RUNS.assign(val_loss="2.5 nats"), "Column 'val_loss' holds .* values, and must hold numbers"),
        (without("val_loss"), "lacks the column 'val_loss'"),
        (without("r", "tokens"), "lacks the column 'r', 'tokens'"),
        (without("n_once_ls", "d_model"), "lacks 'n_once_ls' and 'n_rec_ls', and 'd_model' to find them by"),
        (pd.concat([RUNS, RUNS[5:6]], ignore_index=True), "Rows 5 and 116 are the same run .*r=2.*keep one"),
        (pd.concat([RUNS, RUNS[5:6].assign(val_loss=3.0)]), "are the same run .* with val_loss 2.9121 and 3: keep one"),
        (RUNS.assign(variant=["a", "b"] * 58), r"Column 'variant' has 'a', 'b'.*frame\[frame.variant == 'a'\]"),
        (RUNS[::30][:5], "has 4 runs, fewer than the law's 6 parameters"),
        (RUNS[:0], "has no runs"),
        (RUNS[RUNS.r == 4], "Column 'r' has one value, 4, at which phi cannot be told from A"),
        (RUNS[RUNS.budget_flops == 1e18], "Column 'budget_flops' has one value, 1e.18, at which B and beta"),
        (RUNS.assign(n_once=RUNS.n_unique, n_rec=0), "No run has n_rec above zero"),
        (RUNS.assign(n_once=0, n_rec=0), "A run has no parameters in row 0"),
        (RUNS.to_dict(), "must be a pandas DataFrame"),
    ],
)
def test_impossible_runs_are_refused_in_one_sentence(frame, message):
    with pytest.raises(ValueError, match=message) as error:
        fit_joint_law(frame, restarts=1)
    assert "\n" not in str(error.value)


def test_impossible_requests_are_refused():
    fixed = replace(PUBLISHED, phi_fixed=True)
    for call, message in (
        (lambda: fit_joint_law(RUNS, "text"), "decomposition='text' must be one of 'regression', 'paper', 'own'"),
        (lambda: fit_joint_law(RUNS, phi=5), r"phi=5 must lie in \(-3, 3\)"),
        (lambda: fit_joint_law(RUNS, restarts=0), "restarts=0 must be a whole number of at least 1"),
        (lambda: fit_chinchilla(RUNS), "Column 'r' has 1, 2, 4, 8, and this law is of one recurrence count"),
        (lambda: fit_chinchilla(RUNS[RUNS.r == 2].drop(columns=["n_unique", "d_model"])), "lacks 'n_unique'"),
        (lambda: half_budgets(RUNS[RUNS.budget_flops < 3e18]), "'budget_flops' has 3 values, and each half needs two"),
        (lambda: bootstrap(RUNS, fixed), "phi was fixed at 0.459"),
        (lambda: leave_one_cell_out(RUNS, fixed), "phi was fixed at 0.459"),
        (lambda: bootstrap(RUNS, PUBLISHED, resamples=1), "resamples=1 must be a whole number of at least 2"),
        (lambda: bootstrap(RUNS, PUBLISHED, 2, random_starts=0).interval("gamma"), "'gamma' is no parameter"),
        (lambda: bootstrap(RUNS, PUBLISHED, 2, random_starts=0).interval("phi", 95), "level=95 must lie between"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_second_seed_is_a_run_of_its_own():
    twice = pd.concat([RUNS.assign(seed=0), RUNS.assign(seed=1)], ignore_index=True)
    assert fit_joint_law(twice, restarts=20).phi == pytest.approx(joint().phi, abs=1e-5)


def test_phi_fixed_needs_no_second_recurrence_count():
    assert fit_joint_law(RUNS[RUNS.r == 1], phi=0.5, restarts=20).num_runs == 29


def test_a_bootstrap_says_where_phi_is_not_identified():
    noisy = simulated(PUBLISHED, 0.5, seed=0)
    result = bootstrap(noisy, PUBLISHED, 12, random_starts=0)
    assert not result.identified and "phi" in result.reason
    tiny = RUNS.assign(n_once=RUNS.n_unique, n_rec=RUNS.n_unique * 1e-6)  # a core too small for its passes to matter
    result = bootstrap(tiny, replace(joint(phi=0), phi_fixed=False, decomposition="own"), 4, random_starts=0)
    assert not result.identified and result.reason
    edge = bootstrap(RUNS, replace(joint(), at_bounds=("phi",)), 4, random_starts=0)
    assert edge.reason.startswith("phi=0.458818 lies on the edge of the box")


def test_resamples_that_cannot_be_fitted_are_drawn_again():
    few = RUNS[RUNS.budget_flops.isin([1e18, 1e19]) & RUNS.r.isin([1, 4])]
    result = bootstrap(few, joint(), 20, random_starts=0)
    assert result.cells == 4 and result.redrawn > 0 and len(result.draws) == 20


@pytest.mark.parametrize("variant", ["baseline", "hyperconnections"])
def test_the_toy_sweeps_table_gives_the_phi_of_its_page(variant):
    results = Path(__file__).resolve().parents[1] / "docs" / "results"
    law = fit_joint_law(read_runs(results / "phi_toy.csv", variant), restarts=100)
    names = {"baseline": "linear injection", "hyperconnections": "hyperconnections"}
    written = re.search(rf"^\| {names[variant]} \| (\d+) \| ([\d.]+) \|", (results / "phi_toy.md").read_text(), re.M)
    assert law.num_runs == int(written[1])
    assert law.phi == pytest.approx(float(written[2]), abs=1e-3)
