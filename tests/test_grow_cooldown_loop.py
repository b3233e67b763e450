"""The growing paper's recipe from end to end: every step is a command, and finished ones are not repeated."""

import csv

import pytest

from modeling_looped.recipes.data import DataRecipe
from modeling_looped.recipes.grow_cooldown_loop import FULL, QUICK, main, steps
from modeling_looped.recipes.launch import CooldownRecipe
from modeling_looped.recipes.pretrain import PretrainRecipe, RunOptions
from modeling_looped.recipes.recipe import ModelSource, parse_recipe


@pytest.mark.parametrize(("size", "toy"), [(FULL, []), (QUICK, ["--toy"])])
def test_the_steps_stand_where_the_recipes_end(tmp_path, size, toy):
    def training(kind, options):
        sections = {"model": ModelSource, "data": DataRecipe, "training": kind, "run": RunOptions}
        return parse_recipe(sections, "", [*options, *toy, "--dry-run"]).sections["training"]

    planned = {name: options for name, _, options, _ in steps(tmp_path, size)}
    grow = training(PretrainRecipe, planned["grow"])
    assert (grow.plateau_end, grow.total_steps) == (size.plateau, size.grown)
    plain, looped = (training(CooldownRecipe, planned[name]) for name in ("cooldown", "cooldown-loop"))
    assert plain.total_steps == looped.total_steps == size.cooled
    assert plain.retrofit_layers is None and looped.retrofit_layers == [4, 8]


@pytest.mark.slow
def test_the_whole_recipe_runs_once_and_leaves_a_table_and_a_figure(tmp_path, capfd):
    main(str(tmp_path), quick=True)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == 5 * 3
    assert [int(row["executed_layers"]) for row in rows[:3]] == [12, 16, 20]
    assert [int(row["executed_layers"]) for row in rows[-3:]] == [16, 20, 24]
    assert all(0 < float(row["problems_nats"]) < 10 for row in rows)
    assert (tmp_path / "results.png").stat().st_size > 10_000
    assert capfd.readouterr().out.count("looped cooldown --config toy_cooldown") == 2
    before = (tmp_path / "results.csv").read_bytes()
    main(str(tmp_path), quick=True)
    assert "--config" not in capfd.readouterr().out and (tmp_path / "results.csv").read_bytes() == before
