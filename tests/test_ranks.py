"""
The training command on two gloo ranks equals the command on one process: DDP and FSDP2, every family that grows, loops
or is gated, every optimizer, stopped and killed; and launchers whose ranks do not see each other are refused.

`test_ranks.py RUNS.json` is one rank that runs the commands of RUNS one after the other, started by torchrun: a start
from nothing for each of them would take minutes.
"""

import copy
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conftest import TINY_MODELS, randomise
from safetensors.torch import load_file
from test_runs import content, environment, numbers, step_done, write_library

from modeling_looped.recipes import launch
from modeling_looped.recipes.pretrain import PretrainRecipe, newest_checkpoint, rows_per_rank
from modeling_looped.recipes.tokens import train_tokenizer


pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# AdamW divides a gradient by its own size, and Muon makes all singular values one: where a gradient is almost nothing,
# its rounding decides on a step of the learning rate's size. Rates of 1e-4 keep that below 1e-6, and weights larger
# than at initialisation make such gradients rare. Weights move by 4e-4 and more in all.
RATES = dict.fromkeys(("adamw_lr", "matrix_lr", "embedding_lr", "other_lr"), 1e-4)
RECIPE = {
    "data": {
        "sources": {
            "packed": {"path": "packed.jsonl", "share": 0.75},
            "streamed": {"path": "streamed.jsonl", "share": 0.25, "streaming": True},
        },
        "tokenizer": "tokenizer",
        "sequence_length": 32,
        "validation": {"path": "validation.jsonl"},
        "validation_tokens": 300,
    },
    "training": {
        **RATES, "total_steps": 6, "batch_size": 8, "micro_steps": 2, "checkpoint_every": 3, "precision": "no",
        "activation_checkpointing": True,
    },
    "run": {"tracker": "none", "keep_last": 9},
}  # fmt: skip
DRAWN = {"depth_scheme": "uniform"}  # 1 to 5 passes
GROWING = {"growth_operator": "lidas", "growth_block_size": 2, "decay": "trapezoid"}  # 2, 4 and 6 layers
FIELDS = {
    # Truncated to 2 passes. RecurrentGPT has noise, which each rank draws for its rows of the whole batch.
    "looped_gpt": {"trained_recurrences": 5, "backprop_recurrences": 2},
    "recurrent_gpt": {"trained_recurrences": 5, "backprop_recurrences": 2},
    "grown_llama": {"depth_plan": "6x1"},
    "mixture_of_recursions": {},
}
# Without injection, truncation cuts the prelude off in some steps; a curriculum truncates too.
CUT_OFF = {**DRAWN, "backprop_curriculum_steps": 4}
# Name: family, what is sharded, and the training section's own.
RUNS = {
    "looped_gpt adamw ddp": ("looped_gpt", False, {"optimizer": "adamw", "gradient_clip": 0.5, **DRAWN}),
    "looped_gpt muonh ddp": ("looped_gpt", False, {"optimizer": "muonh", **DRAWN}),
    "recurrent_gpt muon ddp": ("recurrent_gpt", False, {"optimizer": "muon", **DRAWN}),
    "grown_llama adamw ddp": ("grown_llama", False, {"optimizer": "adamw", **GROWING}),
    "no injection ddp": ("no_injection", False, {"optimizer": "muonh", **CUT_OFF}),
    "mixture_of_recursions ddp": ("mixture_of_recursions", False, {"optimizer": "adamw"}),
    "looped_gpt adamw fsdp": ("looped_gpt", True, {"optimizer": "adamw", "gradient_clip": 0.5, **DRAWN}),
    "looped_gpt muonh fsdp": ("looped_gpt", True, {"optimizer": "muonh", **DRAWN}),
    "recurrent_gpt adamw fsdp": ("recurrent_gpt", True, {"optimizer": "adamw", **DRAWN}),
    "recurrent_gpt muon fsdp": ("recurrent_gpt", True, {"optimizer": "muon", **DRAWN}),
    "grown_llama adamw fsdp": ("grown_llama", True, {"optimizer": "adamw", **GROWING}),
    "grown_llama muon fsdp": ("grown_llama", True, {"optimizer": "muon", **GROWING}),
    "grown_llama muonh fsdp": ("grown_llama", True, {"optimizer": "muonh", **GROWING}),
}
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
COMMAND = ["-m", "modeling_looped.recipes.pretrain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, tokenizer, a first checkpoint of each family and a recipe of each run, from which all commands start."""
    folder = tmp_path_factory.mktemp("ranks")
    texts = write_library(folder)
    train_tokenizer(texts, 300).save_pretrained(folder / "tokenizer")
    for name, fields in {**FIELDS, "no_injection": {"trained_recurrences": 5, "injection": "none"}}.items():
        model = randomise(TINY_MODELS.get(name, TINY_MODELS["looped_gpt"])(vocab_size=300, **fields), std=0.1)
        if name == "grown_llama":
            with torch.no_grad():  # the first norm divides gradients by the embeddings' size, and with them rounding
                model.model.embed_tokens.weight.mul_(10)
        model.save_pretrained(folder / name)
    for name, (family, _, training) in RUNS.items():
        recipe = copy.deepcopy({"model": {"checkpoint": family}, **RECIPE})
        recipe["training"] |= training
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """The run of a recipe on one process."""

    def run(name: str) -> Path:
        output = folder / "one" / name
        if not output.exists():
            here = Path.cwd()
            os.chdir(folder)
            try:
                launch.main("pretrain", ["--config", f"{name}.yaml", "--output_dir", str(output)])
            finally:
                os.chdir(here)
        return output

    return run


class Launched:
    """A launcher and its ranks, which all end with the block."""

    def __init__(self, command: list, folder: Path, **variables: str):
        # The project's GPUs, if any, are not for gloo ranks.
        variables = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **variables}
        self.log = folder / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=folder, env={**environment(), **variables},
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        """Ranks that wait for each other outlive their launcher, so the whole session ends."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def wait(self, seconds: float = 400) -> tuple[int, str]:
        return self.process.wait(timeout=seconds), self.log.read_text()

    def wait_for(self, moment, seconds: float = 200) -> None:
        began = time.monotonic()
        while not moment():
            assert self.process.poll() is None and time.monotonic() - began < seconds, self.log.read_text()[-4000:]
            time.sleep(0.001)

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@pytest.fixture(scope="module")
def two(folder) -> Path:
    """All of RUNS on two ranks, from one launch."""
    asks = []
    for name, (_, sharded, _) in RUNS.items():
        arguments = ["--config", f"{name}.yaml", "--output_dir", f"two/{name}"]
        asks.append({"arguments": arguments, "variables": SHARDED if sharded else {}})
    (folder / "runs.json").write_text(json.dumps(asks))
    with Launched([*TORCHRUN, __file__, "runs.json"], folder) as launched:
        status, text = launched.wait()
    assert status == 0, text[-6000:]
    return folder / "two"


def differences(left, right) -> float:
    """The largest of two tensors, in units of the larger of 1 and the largest entry."""
    if left.numel() == 0:
        return 0.0
    return ((left - right).abs().max() / right.abs().max().clamp(min=1)).item()


def assert_same_numbers(output: Path, expected: Path, tolerance: float = 1e-6) -> None:
    """Losses in units of their size; everything else that a step writes is equal."""
    ours, theirs = numbers(output), numbers(expected)
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.keys() == right.keys()
        for name, value in right.items():
            if name == "loss" or name.startswith("validation"):
                assert abs(left[name] - value) <= tolerance * value, (left, right)
            else:
                assert left[name] == value, (left, right)


def assert_same_checkpoint(left: Path, right: Path, tolerance: float = 1e-6) -> None:
    assert sorted(path.name for path in left.iterdir()) == sorted(path.name for path in right.iterdir())
    for name in sorted(path.name for path in right.iterdir()):
        if name.endswith((".py", "config.json", "recipe.yaml")):
            assert (left / name).read_text() == (right / name).read_text(), name
    assert (left / "README.md").read_text().splitlines()[:12] == (right / "README.md").read_text().splitlines()[:12]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert differences(ours[name], value) < tolerance, name
    ours, theirs = (torch.load(folder / "optimizers.pt", weights_only=True) for folder in (left, right))
    for a, b in zip(ours["optimizers"], theirs["optimizers"], strict=True):
        assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
        for number, state in b["state"].items():
            assert state.keys() == a["state"][number].keys()
            for name, value in state.items():
                assert differences(a["state"][number][name], value) < tolerance, (number, name)


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_and_save_what_one_process_does(folder, one, two, name):
    expected, family = one(name), RUNS[name][0]
    assert_same_numbers(two / name, expected)
    for step in (3, 6):
        assert_same_checkpoint(two / name / f"step-{step}", expected / f"step-{step}")
    before, after = (load_file(path / "model.safetensors") for path in (folder / family, expected / "step-6"))
    assert max((after[name] - value).abs().max() for name, value in before.items() if "layers" not in name) > 3e-4
    lines = [line for line in numbers(expected) if "loss" in line]
    held_out = [line["validation_nats_per_token"] for line in numbers(expected) if "loss" not in line]
    assert held_out[0] - held_out[-1] > 1e-3, "nothing was trained"
    if RUNS[name][2].get("depth_scheme"):
        assert len({line["num_recurrences"] for line in lines}) > 2


def test_a_run_on_two_ranks_that_one_is_asked_to_stop_and_that_is_killed_equals_an_uninterrupted_one(
    folder, one, two, tmp_path
):
    """By torchrun, torchrun, and accelerate launch; and at the end on one process."""
    name, output = "grown_llama adamw ddp", tmp_path / "run"
    often = ["--resume", "auto", "--checkpoint_every", "2"]
    arguments = [*COMMAND, "--config", f"{name}.yaml", "--output_dir", output, *often]
    with Launched([*TORCHRUN, *arguments], folder) as launched:
        launched.wait_for(step_done(output, 1))
        launched.ranks()[1].send_signal(signal.SIGTERM)
        status, text = launched.wait()
    stopped = newest_checkpoint(output)
    assert status == 0 and f"saved as {stopped}: go on with --resume auto." in text, text[-4000:]
    assert int(stopped.name.removeprefix("step-")) < 6
    with Launched([*TORCHRUN, *arguments], folder) as launched:
        launched.wait_for(step_done(output, max(4, int(stopped.name.removeprefix("step-")) + 1)))
    assert newest_checkpoint(output).name != "step-6", "it finished before it was killed"
    shutil.copytree(output, tmp_path / "alone")
    with Launched([*ACCELERATE, "--multi_gpu", "--num_processes", "2", *arguments], folder) as launched:
        status, text = launched.wait()
    assert status == 0, text[-4000:]
    here = Path.cwd()
    os.chdir(folder)
    try:
        launch.main("pretrain", [str(part) for part in (*arguments[2:5], tmp_path / "alone", *arguments[6:])])
    finally:
        os.chdir(here)

    def training(run: Path) -> list[dict]:
        return [line for line in numbers(run) if "loss" in line]

    for run in (output, tmp_path / "alone"):
        assert [line["step"] for line in training(run)] == [1, 2, 3, 4, 5, 6]
        for left, right in zip(training(run), training(one(name)), strict=True):
            assert abs(left["loss"] - right["loss"]) <= 1e-6 * right["loss"]
        assert_same_weights(run / "step-6", one(name) / "step-6")


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    assert max(differences(ours[name], value) for name, value in theirs.items()) < 1e-6


def test_a_sharded_run_from_the_ready_configuration_is_killed_goes_on_and_equals_one_process(folder, one, tmp_path):
    name, output = "grown_llama muonh fsdp", tmp_path / "run"
    ready = Path(launch.__file__).parent / "accelerate" / "fsdp2.yaml"
    arguments = [*COMMAND, "--config", f"{name}.yaml", "--output_dir", output, "--resume", "auto"]
    command = [*ACCELERATE, "--config_file", ready, "--num_processes", "2", *arguments]
    with Launched(command, folder) as launched:
        launched.wait_for(step_done(output, 4))
    assert newest_checkpoint(output).name == "step-3"
    with Launched(command, folder) as launched:
        status, text = launched.wait()
    assert status == 0, text[-4000:]
    assert_same_numbers(output, one(name))
    assert_same_checkpoint(output / "step-6", one(name) / "step-6")


def test_ranks_that_do_not_see_each_other_are_refused_before_anything_is_written(folder):
    before = content(folder)
    arguments = [*COMMAND, "--config", "looped_gpt adamw ddp.yaml", "--output_dir", "refused"]
    with Launched([*TORCHRUN, *arguments], folder, ACCELERATE_USE_CPU="false") as launched:
        status, text = launched.wait()
    assert status != 0
    assert "The launcher started 2 processes and Accelerate sees 1: on CPUs, set ACCELERATE_USE_CPU=true" in text
    after = content(folder)
    del after["log.txt"]
    before.pop("log.txt", None)
    assert after == before


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "do not run under DeepSpeed"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 1"),
        ({**SHARDED, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true"),
        (SHARDED, "FSDP needs more than one process"),
        ({"WORLD_SIZE": "2"}, "ACCELERATE_USE_CPU=true"),
    ],
)
def test_launchers_that_do_not_fit_are_refused_before_anything_is_written(
    folder, monkeypatch, capsys, variables, named
):
    monkeypatch.chdir(folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = content(folder)
    with pytest.raises(SystemExit) as end:
        launch.main("pretrain", ["--config", "looped_gpt adamw ddp.yaml", "--output_dir", "refused"])
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 2 and named in sentence
    assert content(folder) == before


def test_a_batch_that_two_ranks_cannot_share_is_refused():
    assert rows_per_rank(PretrainRecipe(batch_size=8, micro_steps=2), 2) == 2
    with pytest.raises(ValueError, match="batch_size=6 does not split over 2 processes and 2 micro-steps"):
        rows_per_rank(PretrainRecipe(batch_size=6, micro_steps=2), 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for ask in json.loads(Path(sys.argv[1]).read_text()):
        for variable in SHARDED:
            os.environ.pop(variable, None)
        os.environ.update(ask["variables"])
        sys.argv = ["-m", *ask["arguments"]]
        runpy.run_module("modeling_looped.recipes.pretrain", run_name="__main__", alter_sys=True)
