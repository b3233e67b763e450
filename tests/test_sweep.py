"""The queue of runs behind a measured phi: what it asks for, that it continues, and what its CSV holds."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from test_runs import environment, write_library

from modeling_looped.accounting import parameter_counts, training_flops_per_token
from modeling_looped.recipes.sweep import COLUMNS, collect_sweep, read_sweep, run_sweep, slurm_array, sweep_status
from modeling_looped.scaling.family import Family


VALUES = {
    "cells": [{"budget": 3e9, "widths": [16, 32]}, {"budget": 1.2e9, "widths": [16]}],
    "recurrences": [1, 2],
    "prelude": 1,
    "looped": 2,
    "coda": 1,
    "head_dim": 16,
    "fields": {"vocab_size": 280, "max_position_embeddings": 32},
    "variants": {"baseline": {"injection": "linear"}, "lanes": {"injection": "hyperconnection"}},
    "data": {"sources": {"texts": {"path": "packed.jsonl"}}, "tokenizer": "train", "validation": {"path": "validation.jsonl"}, "validation_tokens": 500},
    "training": {"batch_size": 4, "checkpoint_every": 10},
    "matrix_scale": 2.0,
    "other_scale": 0.5,
}  # fmt: skip


@pytest.fixture
def library(tmp_path, monkeypatch):
    write_library(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(VALUES))
    return tmp_path


def without_seconds(path) -> list[dict]:
    with open(path, newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def test_the_queue_is_the_grid_and_shares_the_runs_without_a_loop(library):
    runs = read_sweep("grid.yaml").runs()
    assert [(run.variant, run.budget, run.r, run.width) for run in runs] == [
        ("baseline", 1.2e9, 1, 16), ("baseline", 1.2e9, 2, 16),
        ("baseline", 3e9, 1, 16), ("baseline", 3e9, 1, 32), ("baseline", 3e9, 2, 16), ("baseline", 3e9, 2, 32),
        ("lanes", 1.2e9, 2, 16), ("lanes", 3e9, 2, 16), ("lanes", 3e9, 2, 32),
    ]  # fmt: skip
    assert len({run.name for run in runs}) == len(runs)
    assert "#SBATCH --array=0-8\n" in slurm_array("grid.yaml", "out")
    assert '\nlooped sweep run grid.yaml out --only "$SLURM_ARRAY_TASK_ID"\n' in slurm_array("grid.yaml", "out")


def test_a_run_has_the_depth_the_budget_and_the_rates_of_the_paper(library):
    recipe = read_sweep("grid.yaml")
    for run in recipe.runs():
        config, training = recipe.config(run.variant, run.r, run.width), run.training(recipe)
        assert config.plan().effective_depth == 4 and config.hidden_size == run.width
        per_token = training_flops_per_token(config, 32)
        assert training.total_steps == round(run.budget / (per_token * 4 * 32))
        tokens = int(run.budget / per_token)
        reference = 0.014 * (128 / 2**18) ** 0.558 * (tokens / (1_016_083_200 if run.r > 1 else 983_315_200)) ** -0.32
        assert training.matrix_lr == pytest.approx(2 * reference)
        assert training.other_lr == pytest.approx(0.5 * 0.005 * (run.width / 640) ** -0.5)
        row = run.row(recipe, 1.0, 0.0)
        assert tuple(row) == COLUMNS and row["n_unique"] == parameter_counts(config)["unique"]
        assert row["tokens"] == training.total_steps * 128
        family = Family(1, 2, 1, "linear", 280, 32, 16)
        split = tuple(map(round, family.split(run.width, run.r, "paper")))
        assert (row["n_once_paper"], row["n_rec_paper"]) == split
        if run.variant == "baseline":
            assert family.n_all(run.width, run.r) == row["n_unique"]
            assert family.flops_per_token(run.width, run.r) == row["flops_per_token"]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"recurrences": [3]}, "3 must divide the 2 layers"),
        ({"cells": [{"budget": 1e9, "widths": [24]}]}, "width 24 must be a multiple of head_dim=16"),
        ({"cells": [{"budget": -1.0, "widths": [16]}]}, "budget=-1.0 must be positive"),
        ({"variants": {}}, "variants is empty"),
        ({"training": {"matrix_lr": 0.1}}, "leave matrix_lr out"),
        ({"training": {"batchsize": 4}}, "there is no key 'batchsize': did you mean 'batch_size'"),
        ({"data": {"sources": {}}}, "sources is empty"),
        ({"bugdets": []}, "there is no key 'bugdets'"),
    ],
)
def test_what_cannot_be_swept_is_said_before_anything_is_written(change, words, library):
    (library / "grid.yaml").write_text(yaml.safe_dump({**VALUES, **change}))
    with pytest.raises(ValueError, match=words):
        run_sweep("grid.yaml", "out")
    assert not (library / "out").exists()


@pytest.mark.slow
def test_a_sweep_in_pieces_is_one_in_a_single_call(library, capfd):
    cells = [{"budget": 1.2e9, "widths": [16]}, {"budget": 3e9, "widths": [32]}]
    (library / "grid.yaml").write_text(yaml.safe_dump({**VALUES, "cells": cells}))
    assert run_sweep("grid.yaml", "whole", workers=2, threads=1)
    status = sweep_status("whole")
    assert status.count(" nats, ") == 6 and status.endswith("0 FLOPs are left")
    assert collect_sweep("whole", "whole.csv") == 6
    rows = without_seconds("whole.csv")
    assert [row["provenance"] for row in rows] == ["measured"] * 6
    losses = {(row["variant"], row["budget_flops"], row["r"], row["d_model"]): float(row["val_loss"]) for row in rows}
    assert len(set(losses.values())) == 6 and all(3 < loss < 6 for loss in losses.values())

    assert not run_sweep("grid.yaml", "pieces", only=[2], threads=1)
    assert "waiting" in sweep_status("pieces")
    # The last one is killed in the middle, and another call goes on with it.
    command = [sys.executable, "-m", "looped_cli", "sweep", "run", "grid.yaml", "pieces", "--only", "5", "--threads", "1"]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    while not list(library.glob("pieces/runs/lanes-3e+09-r2-d32/run/step-10")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert "stopped at step 10" in sweep_status("pieces")
    assert run_sweep("grid.yaml", "pieces", threads=1)
    collect_sweep("pieces", "pieces.csv")
    assert without_seconds("pieces.csv") == rows
    capfd.readouterr()
    assert run_sweep("grid.yaml", "pieces", threads=1)  # nothing is left
    assert capfd.readouterr().out == ""
    with pytest.raises(ValueError, match="holds a sweep of another recipe"):
        run_sweep("grid.yaml", "pieces", train_data="streamed.jsonl")

    # What is in a CSV is not run again.
    (library / "short.csv").write_text("".join((library / "whole.csv").read_text().splitlines(keepends=True)[:-1]))
    assert run_sweep("grid.yaml", "rest", threads=1, have="short.csv")
    assert [path.parent.name for path in library.glob("rest/runs/*/result.json")] == ["lanes-3e+09-r2-d32"]

    # A CSV keeps what it has, and takes what is new.
    lines = (library / "whole.csv").read_text().splitlines(keepends=True)
    (library / "part.csv").write_text("# measured elsewhere\n" + "".join(lines[:2]).replace("baseline", "other"))
    assert collect_sweep("pieces", "part.csv") == 7
    (library / "foreign.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        collect_sweep("pieces", "foreign.csv")


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_and_is_tried_again_when_asked(library):
    values = {**VALUES, "recurrences": [1], "cells": [{"budget": 1.2e9, "widths": [16]}], "run": {"evaluate_every_tokens": 256}}
    (library / "grid.yaml").write_text(yaml.safe_dump(values))
    assert not run_sweep("grid.yaml", "out", threads=1, launcher="false")
    assert "failed: " in sweep_status("out")
    assert not run_sweep("grid.yaml", "out", threads=1)
    with pytest.raises(ValueError, match="no run is finished yet"):
        collect_sweep("out", "out.csv")
    assert run_sweep("grid.yaml", "out", threads=1, retry=True)
    (result,) = library.glob("out/runs/*/result.json")
    assert json.loads(result.read_text())["versions"]


def test_a_number_that_is_no_run_is_refused_and_so_is_a_folder_with_something_else(library):
    with pytest.raises(ValueError, match="--only 9: the sweep has the runs 0 to 8"):
        run_sweep("grid.yaml", "out", only=[9])
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        run_sweep("grid.yaml", str(library))
    with pytest.raises(ValueError, match="holds no sweep"):
        sweep_status("nowhere")
