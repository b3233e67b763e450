"""The comparison of systems that reuse layers: what its rows rest on, at two steps a run."""

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

from modeling_looped.recipes import compare as module
from modeling_looped.recipes.compare import compare, planned_runs, read_recipe
from modeling_looped.recipes.tokens import TokenRows, train_tokenizer


pytestmark = pytest.mark.slow  # studies, which train models


TEXTS = [f"{number} and {number} make {2 * number}.\n" * 8 for number in range(60)]


def values(tmp_path: Path) -> dict:
    """The bundled recipe, smaller, with its paths in `tmp_path`."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    bundled = yaml.safe_load((Path(module.__file__).parent / "compare_depth_reuse.yaml").read_text())
    return {
        **bundled,
        "train_data": str(data),
        "validation_data": str(data),
        "validation_tokens": 100,
        "results": str(tmp_path / "results" / "rows.csv"),
        "figure": str(tmp_path / "results" / "figure.png"),
        "seeds": [3],
        "model": {**bundled["model"], "hidden_size": 16, "vocab_size": 280, "max_position_embeddings": 16},
        "training": {**bundled["training"], "total_steps": 2, "batch_size": 2, "warmup_steps": 1},
    }


def write(tmp_path: Path, fields: dict) -> str:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return str(tmp_path / "recipe.yaml")


def test_every_run_appends_one_row_from_the_same_tokens_and_is_then_skipped(tmp_path, monkeypatch):
    trained, seen = [], []
    batch, pretrain = TokenRows.batch, module.pretrain

    def recorded_batch(self, first, count):
        seen[-1].append(batch(self, first, count))
        return seen[-1][-1]

    def recorded_pretrain(model, *args, **kwargs):
        trained.append(model.config.model_type)
        seen.append([])
        return pretrain(model, *args, **kwargs)

    monkeypatch.setattr(TokenRows, "batch", recorded_batch)
    monkeypatch.setattr(module, "pretrain", recorded_pretrain)
    fields, output = values(tmp_path), str(tmp_path / "output")
    del fields["cells"]["isoPARAMS"]
    recipe = write(tmp_path, fields)
    assert not compare(recipe, output, limit_minutes=0) and not trained
    assert compare(recipe, output, progress=False)
    results = tmp_path / "results" / "rows.csv"
    rows = list(csv.DictReader(results.open()))
    assert len(rows) == len(trained) == 1 + 3 * 2
    assert len({(row["system"], row["cell"], row["matching"]) for row in rows}) == len(rows)
    longest = torch.cat(max(seen, key=len))
    for row, batches in zip(rows, seen):
        assert len(batches) == int(row["steps"]), "one batch a step"
        assert torch.equal(torch.cat(batches), longest[: 2 * len(batches)])
        losses = dict(part.split(":") for part in row["losses_by_recurrence"].split())
        assert losses[row["recurrences"]] == row["nats_per_token"]
        assert float(row["nats_per_token"]) < 7 and int(row["realised_training_flops"]) > 0
        if row["system"] == "recurrent_gpt":
            assert list(losses) == ["0", "1", "2", "3", "4"]
    assert (tmp_path / "results" / "figure.png").stat().st_size > 10_000

    before = results.read_bytes()
    assert compare(recipe, output, progress=False)
    assert results.read_bytes() == before and len(trained) == len(rows)
    fields["training"]["adamw_lr"] = 0.01
    with pytest.raises(ValueError, match="rows of other settings"):
        compare(write(tmp_path, fields), output)


def test_flops_matched_runs_spend_the_dense_budget_to_half_a_step():
    recipe = read_recipe("compare_depth_reuse")
    runs = planned_runs(recipe, train_tokenizer(TEXTS, 280))
    dense = runs[0].expected_flops_per_token() * runs[0].tokens
    assert (runs[0].system, runs[0].recipe.total_steps) == ("dense", recipe.training.total_steps)
    matched = [run for run in runs if run.matching == "flops"]
    assert len(matched) == 3 * 2 * 3 and len({run.key for run in runs}) == len(runs)
    for run in matched:
        step = run.expected_flops_per_token() * run.tokens / run.recipe.total_steps
        assert abs(run.expected_flops_per_token() * run.tokens - dense) <= step / 2
        assert abs(run.recipe.warmup_steps / run.recipe.total_steps - 0.1) < 0.01
        assert abs(run.realised_flops() / dense - 1) < 0.1, "the draws of one run scatter about the law"
    assert {run.recipe.total_steps for run in runs if run.matching == "steps"} == {recipe.training.total_steps}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sytems": ["dense"]}, "no key 'sytems': did you mean 'systems'"),
        ({"systems": ["dense", "recurent_gpt"]}, "did you mean 'recurrent_gpt'"),
        ({"model": {"hidden_sise": 16}}, "model: there is no key 'hidden_sise': did you mean 'hidden_size'"),
        ({"model": {"hidden_size": 16}}, "num_attention_heads, .* missing"),
        ({"training": {"adamw_lr": "high"}}, "adamw_lr='high' must be of type float"),
        ({"training": {"seed": 1}}, "leave seed out"),
        ({"training": {"optimizer": "sgd"}}, "training: optimizer='sgd'"),
        ({"cells": {"isoFLOPS": {"num_core_layer": 1}}}, "isoFLOPS: .*did you mean 'num_core_layers'"),
        ({"cells": 3}, "cells=3 must be of type dict"),
        ({"validation_tokens": 10}, "validation_tokens=10"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(tmp_path, change, named):
    with pytest.raises(ValueError, match=named):
        read_recipe(write(tmp_path, {**values(tmp_path), **change}))


def test_a_recipe_that_is_nowhere_is_refused_with_those_that_are_bundled():
    with pytest.raises(ValueError, match="'compare_dept' .*compare_depth_reuse"):
        read_recipe("compare_dept")
