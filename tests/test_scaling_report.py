"""`looped phi` prints what fit and bootstrap give, says what it cannot know, and finds a phi that moved."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import looped_cli
from modeling_looped.scaling import figures
from modeling_looped.scaling.allocation import compute_optimal
from modeling_looped.scaling.figures import FIGURES, colors, frontier_figure, iso_flop_figure, prediction_figure
from modeling_looped.scaling.fit import bootstrap, fit_chinchilla, fit_joint_law
from modeling_looped.scaling.law import PUBLISHED, ChinchillaLaw, JointLaw
from modeling_looped.scaling.comparison import compare_phi, run_names
from modeling_looped.scaling.report import UNIDENTIFIED, phi_report, read_runs, write_phi


RUNS = Path(__file__).parent / "fixtures" / "iso_depth_runs.csv"  # digitised, not author data
QUICK = {"restarts": 20, "resamples": 30, "random_starts": 0}
COMMAND = ["--restarts", "3", "--resamples", "4"]
needs_command = pytest.mark.skipif(not hasattr(looped_cli, "phi_app"), reason="the command is not there yet")


@pytest.fixture(scope="module")
def runs():
    return read_runs(RUNS)


@pytest.fixture(scope="module")
def report(runs):
    return phi_report(runs, **QUICK)


@pytest.fixture(scope="module")
def small(runs):
    """Two budgets, two recurrence counts, three widths each."""
    kept = runs["budget_flops"].isin([4.64e17, 1e18]) & runs["r"].isin([1, 4]) & runs["s"].isin([6, 8, 10])
    return runs[kept]


def simulated(runs, phi: float, noise: float = 0.003, seed: int = 0):
    """Losses of the published law with another phi at r > 1; those at r = 1 stay as they are."""
    law, rng = replace(PUBLISHED, phi=phi), np.random.default_rng(seed)
    losses = law.predict(runs["n_once_ls"], runs["n_rec_ls"], runs["tokens"], runs["r"])
    losses = losses + rng.normal(0, noise, len(runs))
    return runs.assign(val_loss=np.where(runs["r"] > 1, losses, runs["val_loss"]))


def words(text: str) -> str:
    return " ".join(text.split())


# Reading


def test_rows_are_called_by_their_line_in_the_file(runs, tmp_path):
    assert len(runs) == 116 and runs.index[0] == 3  # a comment and a header before it
    lines = RUNS.read_text().splitlines()
    lines[9] = lines[9].replace(",".join(lines[9].split(",")[-2:]), "nan,x")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="'val_loss' has nan in row 10: repeat or leave out that run"):
        phi_report(read_runs(path), **QUICK)


def test_variants_share_the_dense_runs_at_their_own_budgets(runs, small, tmp_path):
    path = tmp_path / "runs.csv"
    other = simulated(small, 0.8)
    other = other[other["r"] > 1].assign(variant="other")
    both = np.concatenate([runs.to_numpy(), other.to_numpy()])
    type(runs)(both, columns=runs.columns).to_csv(path, index=False)
    with pytest.raises(ValueError, match="has the variants baseline, other: choose one"):
        read_runs(path)
    with pytest.raises(ValueError, match="no variant 'third': it has baseline, other"):
        read_runs(path, "third")
    assert len(read_runs(path, "baseline")) == 116
    read = read_runs(path, "other")
    assert set(read["variant"]) == {"other"}
    dense = read[read["r"] == 1]
    assert len(read) - len(dense) == len(other)
    assert sorted(set(dense["budget_flops"])) == [4.64e17, 1e18] and len(dense) == 9
    assert sorted(dense["val_loss"]) == sorted(runs[(runs["r"] == 1) & (runs["budget_flops"] <= 1e18)]["val_loss"])


def test_the_only_looped_variant_of_a_file_is_meant(small, tmp_path):
    path = tmp_path / "runs.csv"
    small.assign(variant=np.where(small["r"] == 1, "baseline", "looped")).to_csv(path, index=False)
    assert len(read_runs(path)) == len(small) and set(read_runs(path)["variant"]) == {"looped"}


# The report


def test_the_table_has_the_law_and_interval_of_fit_and_bootstrap(runs, report):
    law = fit_joint_law(runs, restarts=QUICK["restarts"])
    draws = bootstrap(runs, law, QUICK["resamples"], random_starts=0)
    low, high = draws.interval("phi", 0.95)
    assert report.law == law and report.interval() == (low, high)
    text = report.text()
    assert f"phi = {law.phi:.3f} [{low:.3f}, {high:.3f}], the 95% interval of 30 resamples of 24 cells." in text
    row = next(line for line in text.splitlines() if line.startswith("| fitted"))
    cells = [f"{law.phi:.3f}", f"{law.A:.4g}", f"{law.alpha:.4f}", f"{law.B:.4g}", f"{law.beta:.4f}", f"{law.E:.4f}"]
    assert [cell.strip() for cell in row.split("|")[2:8]] == cells
    alone = fit_chinchilla(runs[runs["r"] == 8], restarts=QUICK["restarts"])
    assert report.chinchilla[8] == alone and f"| {alone.alpha:.4f} |" in text


def test_the_report_has_the_papers_numbers(report):
    assert report.law.phi == pytest.approx(0.459, abs=0.003)
    assert report.none.r2 == pytest.approx(0.9858, abs=2e-4) and report.full.r2 == pytest.approx(0.9552, abs=2e-4)
    assert report.halves["low"].phi == pytest.approx(0.444, abs=0.003)
    assert report.residuals.loc["pooled", "rmse"] == pytest.approx(0.010, abs=5e-4)
    exponents = [round(report.exponents[r]["power_law"].parameters, 2) for r in (1, 2, 4, 8)]
    assert exponents == [0.57, 0.70, 0.76, 0.67]
    gaps = report.optima[report.optima["r"] == 8].sort_values("budget_flops")["gap"].tolist()
    assert gaps == pytest.approx([0.1245, 0.1197, 0.1042, 0.1001, 0.0936, 0.0933], abs=1e-3)
    assert 0.44 < report.leave_one_out["phi"].min() < report.law.phi < report.leave_one_out["phi"].max() < 0.48


def test_json_comes_back_as_the_laws(report):
    values = json.loads(report.to_json())
    laws = {"fitted": report.law, "phi=0": report.none, "phi=1": report.full}
    assert {name: JointLaw.from_dict(law) for name, law in values["laws"].items()} == laws
    chinchilla = {int(r): ChinchillaLaw.from_dict(law) for r, law in values["chinchilla"].items()}
    assert chinchilla == dict(report.chinchilla)
    assert values["phi"]["value"] == report.law.phi and tuple(values["phi"]["interval"]) == report.interval()
    assert len(values["bootstrap"]["phi"]) == 30
    assert len(values["optima"]) == len(values["leave_one_cell_out"]) == 24
    assert values["variant"] == "baseline" and values["num_runs"] == 116


def test_small_cells_are_counted_in_a_warning(runs):
    first = runs.groupby(["budget_flops", "r"]).head(2).index
    kept = runs[runs.index.isin(first) | (runs["budget_flops"] < 1e19)]
    said = phi_report(kept, **{**QUICK, "restarts": 2, "resamples": 4}).text()
    assert "8 of 24 cells have fewer than 3 widths, and so no empirical optimum." in said


def test_runs_of_another_family_get_no_exponents(runs, small):
    half = {name: small[name] / 2 for name in ("n_unique", "n_once_ls", "n_rec_ls")}
    report = phi_report(small.assign(**half), **{**QUICK, "restarts": 2, "resamples": 4})
    assert not report.has_family and not report.exponents and "The runs are not of the family" in report.text()
    assert not [line for line in frontier_figure(report).axes[0].lines if line.get_linestyle() != "None"]


def test_own_counts_are_a_law_without_a_family(runs):
    own = runs[["budget_flops", "r", "tokens", "val_loss"]].assign(n_once=runs["n_once_ls"], n_rec=runs["n_rec_ls"])
    report = phi_report(own, **{**QUICK, "restarts": 2, "resamples": 4})
    assert report.law.decomposition == "own" and len(report.optima) == 24 and not report.exponents
    assert report.runs["n_unique"].tolist() == (own["n_once"] + own["n_rec"]).tolist()


def test_a_phi_that_the_runs_do_not_determine_has_no_digits(small, tmp_path):
    """Losses that depend on tokens alone: any phi will do."""
    losses = 1.6 + 900 * small["tokens"] ** -0.37 + np.random.default_rng(0).normal(0, 0.02, len(small))
    frame = small.assign(val_loss=losses)
    quick = {"restarts": 2, "resamples": 3, "random_starts": 0}
    report = write_phi(frame, tmp_path / "out", **quick)
    assert not report.identified and report.interval() is None
    text = report.text()
    assert f"phi is {UNIDENTIFIED} by these runs: " in text
    assert not re.search(r"phi = -?\d\.\d", text) and f"{report.law.phi:.3f}" not in text
    row = next(line for line in text.splitlines() if line.startswith("| fitted"))
    assert row.split("|")[2].strip() == UNIDENTIFIED and "interval |" not in text
    phi = json.loads((tmp_path / "out" / "phi.json").read_text())["phi"]
    assert phi["value"] is None and phi["interval"] is None and not phi["identified"] and phi["reason"]
    comparison = compare_phi(frame, frame, **quick)
    assert comparison.delta is None and UNIDENTIFIED in comparison.text() and "Delta phi =" not in comparison.text()


# Figures


def test_iso_flop_figure_has_each_cell_with_its_parabola_and_star(report):
    figure = iso_flop_figure(report)
    assert len(figure.axes) == 6
    budget = report.budgets[0]
    lines = figure.axes[0].lines
    points = [line for line in lines if line.get_marker() == "o"]
    stars = [line for line in lines if line.get_marker() == "*"]
    curves = [line for line in lines if line.get_marker() == "None"]
    assert len(points) == len(stars) == len(curves) == 4
    for r, star, curve, cell in zip(report.recurrences, stars, curves, points):
        at = report.optima[(report.optima["budget_flops"] == budget) & (report.optima["r"] == r)].iloc[0]
        assert star.get_xydata()[0] == pytest.approx([at.n_unique, at.loss])
        assert curve.get_ydata().min() == pytest.approx(at.loss, abs=1e-4)
        assert len({line.get_color() for line in (star, curve, cell)} | {colors(report.recurrences)[r]}) == 1
        assert len(cell.get_xdata()) == 4


def test_frontier_has_the_optima_of_both_laws(report):
    axes = frontier_figure(report).axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    lines = [line for line in axes.lines if line.get_marker() != "o"]
    assert len(points) == 4 and len(lines) == 8
    for place, r in enumerate(report.recurrences):
        for law, line in zip((report.law, report.full), lines[2 * place : 2 * place + 2]):
            budget, loss = line.get_xydata()[3]
            assert loss == pytest.approx(compute_optimal(law, budget, r).loss)
        assert lines[2 * place].get_linestyle() == "-" and lines[2 * place + 1].is_dashed()


def test_prediction_figure_has_all_runs_the_diagonal_and_their_error(report):
    axes = prediction_figure(report).axes[0]
    diagonal, *points = axes.lines
    assert (diagonal.get_xdata() == diagonal.get_ydata()).all()
    assert sum(len(line.get_xdata()) for line in points) == 116
    errors = np.concatenate([line.get_xdata() - line.get_ydata() for line in points])
    assert f"RMSE {np.sqrt((errors**2).mean()):.4f} nats" in axes.texts[0].get_text()


def test_a_recurrence_count_keeps_its_colour():
    assert colors([1, 4])[4] == colors([1, 2, 3, 4, 8])[4]
    assert len(set(colors([1, 2, 3, 4, 5, 6, 8, 16]).values())) == 8


def test_only_its_own_files_are_replaced(small, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {"phi_predicted.png": prediction_figure})
    quick = {**QUICK, "restarts": 2, "resamples": 3}
    write_phi(small, tmp_path, **quick)
    assert {path.name for path in tmp_path.iterdir()} == {"phi.json", "phi_predicted.png"}
    write_phi(small, tmp_path, **quick)
    (tmp_path / "phi.json").write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="phi.json, .* not made by looped phi: choose another --output"):
        write_phi(small, tmp_path, **quick)
    assert json.loads((tmp_path / "phi.json").read_text()) == {"mine": 1}
    write_phi(small, tmp_path, overwrite=True, **quick)
    assert json.loads((tmp_path / "phi.json").read_text())["made_by"] == "looped phi"


# Comparison


def test_runs_compared_with_themselves_differ_by_nothing(runs):
    comparison = compare_phi(runs, runs, **QUICK)
    low, high = comparison.interval()
    assert comparison.delta == 0 and low < 0 < high and comparison.p > 0.2
    assert comparison.shared_baseline and "Delta phi = +0.000 [-0.0" in comparison.text()


def test_a_phi_that_moved_is_found_and_joint_draws_know_it_better(runs):
    before, after = simulated(runs, 0.459, seed=1), simulated(runs, 0.6, seed=2)
    comparison = compare_phi(before, after, **QUICK, names=("plain", "lanes"))
    low, high = comparison.interval()
    assert comparison.delta == pytest.approx(0.141, abs=0.04) and 0 < low < comparison.delta < high
    assert comparison.p == 1 / 30 and "p < 0.033 (lanes - plain;" in comparison.text()
    back = compare_phi(after, before, **QUICK)
    assert back.delta == pytest.approx(-comparison.delta) and back.interval()[1] < 0
    # Another seed of the same baseline, within the tolerance: its cells are drawn on their own.
    shifted = after.assign(val_loss=after["val_loss"] + np.where(after["r"] == 1, 1e-4, 0))
    alone = compare_phi(before, shifted, **QUICK)
    assert not alone.shared_baseline and alone.delta == pytest.approx(comparison.delta, abs=0.01)
    correlation = np.corrcoef(*(of.draws["phi"] for of in comparison.bootstraps))[0, 1]
    assert correlation > 0.2


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda f: f[f["budget_flops"] < 1e19], r"Only A has runs at C = 1e19, 2.15e19: leave these out \(--shared-b"),
        (lambda f: f[(f["r"] > 1) | (f["s"] != 8)], r"B lacks 3 of the runs at r = 1: C = 4.64e17, size 512; "),
        (lambda f: f[f["r"] > 1], "There are no runs at r = 1 in B"),
        (
            lambda f: f.assign(val_loss=f["val_loss"] + np.where((f["r"] == 1) & (f["s"] == 34), 0.006, 0)),
            r"1 of 29 losses at r = 1 differ by more than 0.005 nats, most at C = 2.15e19, size 2176: 2\.\d+ in A",
        ),
        (
            lambda f: f.assign(n_once=f["n_once_ls"], n_rec=f["n_rec_ls"]),
            "The decomposition is regression in A and own in B: choose one for both",
        ),
    ],
)
def test_other_baselines_void_the_comparison(runs, change, reason):
    comparison = compare_phi(runs, change(runs), **QUICK)
    assert comparison.delta is None and comparison.interval() is None and comparison.p is None
    assert re.search(reason, comparison.text()) and "The comparison is void" in comparison.text()
    values = json.loads(comparison.to_json())
    assert values["void"] and values["delta_phi"] is None and values["laws"] is None


def test_budgets_of_one_side_can_be_left_out(runs):
    lower = simulated(runs[runs["budget_flops"] < 1e19], 0.8)
    comparison = compare_phi(runs, lower, shared_budgets=True, **QUICK)
    assert not comparison.void and comparison.laws[0].num_runs == comparison.laws[1].num_runs == 80
    assert comparison.laws[0].phi == pytest.approx(0.4537, abs=0.003)
    assert "Left out of A: C = 1e19, 2.15e19." in comparison.text()


def test_names_of_runs_differ():
    assert run_names(("a/x.csv", None), ("b/y.csv", "hc")) == ("x", "y:hc")
    assert run_names(("a/x.csv", None), ("b/x.csv", None)) == ("x (1)", "x (2)")


# The command


def invoke(*arguments) -> tuple[int, str, str]:
    result = CliRunner().invoke(looped_cli.app, ["phi", *map(str, arguments)])
    return result.exit_code, result.stdout, words(result.stderr)


@needs_command
def test_phi_fits_with_and_without_the_word(small, tmp_path):
    path = tmp_path / "runs.csv"
    small.to_csv(path, index=False)
    code, printed, said = invoke(path, "--output", tmp_path / "out", *COMMAND)
    assert code == 0 and printed.startswith("12 runs of baseline at 2 budgets"), said
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"phi.json", *FIGURES}
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    code, same, _ = invoke("fit", "--json", path, "--output", tmp_path / "out", *COMMAND)
    assert code == 0 and json.loads(same) == json.loads((tmp_path / "out" / "phi.json").read_text())
    assert invoke("--help")[0] == 0 and "compare" in invoke("--help")[1]


@needs_command
def test_phi_compare_finds_nothing_in_a_file_against_itself(runs, tmp_path):
    code, printed, said = invoke("compare", RUNS, RUNS, *COMMAND, "--restarts", "20")
    assert code == 0, said
    assert "Delta phi = +0.000 [" in printed and "(iso_depth_runs (2) - iso_depth_runs (1);" in printed
    lower = tmp_path / "lower.csv"
    runs[runs["budget_flops"] < 1e19].to_csv(lower, index=False)
    code, printed, _ = invoke("compare", RUNS, lower, "--json")
    assert code == 1 and "Only iso_depth_runs has runs at C = 1e19" in json.loads(printed)["void"][0]


def doubled(frame):
    return frame.loc[[*frame.index, frame.index[0]]]


ERRORS = {
    "no loss": (
        lambda f: f.assign(val_loss=f["val_loss"].where(f["s"] > 6)),
        "'val_loss' has nan in row 2: repeat or leave out that run",
    ),
    "one budget": (lambda f: f[f["budget_flops"] == 1e18], "'budget_flops' has one value, 1e\\+18, .* add runs at a"),
    "one r": (lambda f: f[f["r"] == 4], "'r' has one value, 4, at which phi cannot be told from A: add runs at"),
    "doubled": (doubled, r"Rows 2 and 14 are the same run \(.*\) with val_loss .*: keep one of them"),
    "negative tokens": (lambda f: f.assign(tokens=-f["tokens"]), r"'tokens' has -\d.* in row 2: it must be positive"),
    "negative count": (lambda f: f.assign(n_rec_ls=-1.0), "'n_rec_ls' has -1 in row 2: it must be zero or positive"),
    "columns": (lambda f: f.drop(columns=["tokens", "r"]), "lacks the column 'r', 'tokens'; it has variant, budget"),
    "no counts": (
        lambda f: f[["budget_flops", "r", "tokens", "val_loss"]],
        "lacks 'n_once_ls' and 'n_rec_ls', and 'd_model' to find them by",
    ),
    "words": (
        lambda f: f.assign(val_loss=["much", *f["val_loss"][1:]]),
        "line 2: val_loss is 'much', and must be a number",
    ),
    "empty": (lambda f: f[:0], "has a header and no runs"),
    "few": (lambda f: f[::3], "has 4 runs, fewer than the law's 6 parameters"),
}


@needs_command
@pytest.mark.parametrize("name", ERRORS)
def test_runs_that_have_no_phi_end_in_a_sentence(name, small, tmp_path):
    change, sentence = ERRORS[name]
    path = tmp_path / "runs.csv"
    change(small).to_csv(path, index=False)
    for arguments in ([path, "--output", tmp_path / "out"], ["compare", path, path]):
        code, printed, said = invoke(*arguments, *COMMAND)
        assert code == 2 and not printed and re.search(sentence, said), said
        assert not (tmp_path / "out").exists()


@needs_command
@pytest.mark.parametrize(
    "text, arguments, sentence",
    [
        (None, [], "runs.csv is not a file: name a CSV with one row a run"),
        ("", [], "runs.csv is no CSV of runs: No columns to parse"),
        ("budget_flops,r,tokens,val_loss\n1,1,1,1\n", ["--variant", "x"], "has no column 'variant', and so no"),
        ("variant,budget_flops,r,tokens,val_loss\na,1,2,1,1\nb,1,2,1,1\n", [], "has the variants a, b: choose one"),
        ("budget_flops,r,tokens,val_loss,d_model\n1,1,1,1,64\n", ["--decomposition", "exact"], "='exact' must be one"),
    ],
)
def test_files_that_are_none_end_in_a_sentence(text, arguments, sentence, tmp_path):
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    code, printed, said = invoke(path, "--output", tmp_path / "out", *arguments)
    assert code == 2 and not printed and sentence in said, said
