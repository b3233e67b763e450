"""The study of growing at toy scale: its recipe, its accounting, and that it goes on where it was stopped."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import GrownLlamaForCausalLM
from modeling_looped.accounting import grown_flops_per_token, grown_training_flops
from modeling_looped.recipes import growing as module
from modeling_looped.recipes.growing import growing, planned_runs, read_recipe
from modeling_looped.recipes.tokens import train_tokenizer


pytestmark = pytest.mark.slow  # studies, which train models


TEXTS = [f"{number} and {number} make {2 * number}.\n" * 8 for number in range(60)]
BUNDLED = Path(module.__file__).parent / "grow_toy.yaml"


def write(tmp_path: Path, **changes) -> str:
    """The bundled recipe at width 16 and six steps, with its paths in `tmp_path`."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    bundled = yaml.safe_load(BUNDLED.read_text())
    fields = {
        **bundled,
        "train_data": str(data),
        "validation_data": str(data),
        "validation_tokens": 100,
        "repeat_tokens": 64,
        "seeds": [3],
        "model": {
            **bundled["model"],
            "hidden_size": 16,
            "intermediate_size": 24,
            "vocab_size": 280,
            "max_position_embeddings": 16,
        },
        "training": {
            **bundled["training"],
            "total_steps": 7,
            "batch_size": 2,
            "warmup_steps": 1,
            "growth_block_size": 2,
        },
        "systems": {
            "dense": {"depth_plan": "6x1"},
            "grown": {"depth_plan": "6x1", "growth_operator": "lidas"},
            "looped": {"depth_plan": "Loop(1-2x2-1)"},
        },
        "repeat_block": 2,
        **{
            name: str(tmp_path / "results" / Path(bundled[name]).name)
            for name in bundled
            if name.endswith(("results", "figure"))
        },
        **changes,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "recipe.yaml")


def read(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_bundled_recipe_is_the_replication_plan():
    recipe = read_recipe("grow_toy")
    plans = {name: (stack.depth_plan, stack.growth_operator) for name, stack in recipe.systems.items()}
    assert plans == {
        "baseline-24": ("24x1", None),
        "midas": ("24x1", "midas"),
        "lidas": ("24x1", "lidas"),
        "loop-4x6": ("Loop(4x6)", None),
        "loop-4-4x4-4": ("Loop(4-4x4-4)", None),
        "standard-4": ("4x1", None),
        "standard-12": ("12x1", None),
    }
    assert recipe.training.plateau_end == 0.85 * recipe.training.total_steps and recipe.training.growth_block_size == 4
    assert 128 <= recipe.model.hidden_size <= 256 and len(recipe.seeds) == 2


def flops_by_step(run) -> list[int]:
    """Step by step, each at the depth that it runs."""
    grows_after, block = run.recipe.growth_steps(run.config), run.recipe.growth_block_size
    per_step = run.recipe.batch_size * run.config.max_position_embeddings
    flops = []
    for step in range(run.recipe.total_steps):
        left = sum(after > step for after in grows_after)  # growths that are still to come
        layers = run.config.num_hidden_layers - left * block
        flops.append(per_step * grown_flops_per_token(run.config, num_layers=layers))
    return flops


def test_flops_follow_the_depth_of_every_step():
    recipe = read_recipe("grow_toy")
    tokenizer = train_tokenizer(TEXTS, 280)
    runs = {run.system: run for run in planned_runs(recipe, tokenizer, seeds=[0])}
    steps, per_step = recipe.training.total_steps, recipe.training.batch_size * recipe.model.max_position_embeddings
    full = grown_flops_per_token(runs["baseline-24"].config) * per_step
    assert flops_by_step(runs["baseline-24"]) == flops_by_step(runs["loop-4x6"]) == [full] * steps
    assert all(run.training_flops == sum(flops_by_step(run)) for run in runs.values())
    for operator in ("midas", "lidas"):
        run = runs[operator]
        by_stage = grown_training_flops(run.config, run.recipe.growth_budgets(24), 4, steps, per_step)
        assert sum(flops_by_step(run)) == by_stage < full * steps
    assert sum(flops_by_step(runs["standard-4"])) < sum(flops_by_step(runs["standard-12"])) < full * steps


def test_a_study_goes_on_where_it_was_stopped_and_says_what_repeats_cost(tmp_path):
    recipe, output = write(tmp_path), str(tmp_path / "output")
    results = tmp_path / "results" / "growing_toy.csv"
    assert not growing(recipe, output, limit_minutes=0, progress=False) and not results.exists()
    assert growing(recipe, output, progress=False, systems=["grown"])
    (first,) = read(results)
    assert growing(recipe, output, progress=False)
    rows = read(results)
    assert rows[0] == first and [row["system"] for row in rows] == ["grown", "dense", "looped"]
    grown, dense, looped = rows
    assert grown["grows_after"] == "1 3" and dense["grows_after"] == ""
    assert int(grown["training_flops"]) < int(dense["training_flops"])
    assert int(grown["parameters"]) == int(dense["parameters"]) > int(looped["parameters"])
    assert all(len(row["training_curve"].split()) == 1 for row in rows)  # seven steps are less than ten

    repeated = read(tmp_path / "results" / "growing_toy_repeats.csv")
    by_system = {name: [row for row in repeated if row["system"] == name] for name in ("grown", "dense", "looped")}
    assert [len(by_system[name]) for name in by_system] == [1 + 2 * 5, 1 + 2 * 5, 1 + 2]
    assert {(row["start"], row["stop"]) for row in by_system["looped"][1:]} == {("1", "3")}
    for name in ("growing_toy.png", "growing_toy_repeats.png"):
        assert (tmp_path / "results" / name).read_bytes()[:4] == b"\x89PNG"

    (checkpoint,) = Path(output).glob("*/grown-3/step-7")
    model = GrownLlamaForCausalLM.from_pretrained(checkpoint)
    assert model.config.depth_plan == "6x1" and len(model.config.history) == 2
    stamp = checkpoint.stat().st_mtime_ns
    assert growing(recipe, output, progress=False)  # nothing left to do
    assert checkpoint.stat().st_mtime_ns == stamp and read(results) == rows


def test_checkpoints_come_back_without_a_second_row(tmp_path):
    recipe = write(tmp_path)
    growing(recipe, str(tmp_path / "first"), progress=False, systems=["dense"])
    rows = read(tmp_path / "results" / "growing_toy.csv")
    growing(recipe, str(tmp_path / "second"), progress=False, systems=["dense"])
    assert read(tmp_path / "results" / "growing_toy.csv") == rows
    left, right = (
        GrownLlamaForCausalLM.from_pretrained(next((tmp_path / name).glob("*/dense-3/step-7")))
        for name in ("first", "second")
    )
    assert all((a == b).all() for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"systems": {"a": {"depth_plann": "4x1"}}}, "systems, a: there is no key 'depth_plann': did you mean"),
        ({"training": {"seed": 3}}, "training: leave seed out"),
        ({"training": {"total_steps": 0}}, "total_steps=0 must be at least 1"),
        ({"model": {"hidden_size": 16}}, "model: intermediate_size, num_attention_heads, vocab_size"),
        ({"systems": {"a": {"depth_plan": "4by2"}}}, "'4by2' does not fit"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_in_one_sentence(tmp_path, changes, sentence):
    recipe = write(tmp_path, **changes)
    result = CliRunner().invoke(app, ["compare", recipe, str(tmp_path / "output")])
    assert result.exit_code == 2
    assert sentence in result.output and "Traceback" not in result.output
    assert not (tmp_path / "results").exists()


def test_rows_of_other_settings_and_unknown_systems_are_refused(tmp_path):
    recipe, output = write(tmp_path), str(tmp_path / "output")
    with pytest.raises(ValueError, match="there is no 'midas'; there are dense, grown, looped"):
        growing(recipe, output, progress=False, systems=["midas"])
    growing(recipe, output, progress=False, systems=["looped"])
    with pytest.raises(ValueError, match="holds rows of other settings"):
        growing(write(tmp_path, repeats=[1]), output, progress=False)
    result = CliRunner().invoke(app, ["compare", "compare_depth_reuse", output, "--seeds", "0"])
    assert result.exit_code == 2 and "are for studies of growing" in result.output
