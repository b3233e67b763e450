"""
The training commands as a user has them: killed, stopped, out of disk, out of numbers or wrongly asked, and the data
that they read. `tests/test_pretrain.py` has the loop itself, `tests/test_ranks.py` runs of several processes.
"""

import copy
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from modeling_looped.eval.held_out import held_out_loss
from modeling_looped.recipes import launch
from modeling_looped.recipes.corpus import read_texts
from modeling_looped.recipes.data import (
    DataRecipe,
    HeldOut,
    MixedRows,
    PackedSource,
    Source,
    StreamedSource,
    document_positions,
    load_data,
    pack,
    packed_name,
    shares_as_counts,
)
from modeling_looped.recipes.packing import pack_best_fit, pack_stream
from modeling_looped.recipes.pretrain import evaluate, newest_checkpoint
from modeling_looped.recipes.tokens import train_tokenizer


WORDS = "ash bay cedar dune elm fern grove heath isle knoll lake marsh north oak pine quay reed shore tide".split()
NARROW = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}

# A stack that grows from 2 over 4 to 6 layers, after steps 2 and 6, and a plateau that ends at step 12.
GROWING = {
    "model": {
        "architecture": "grown_llama",
        "fields": {**NARROW, "intermediate_size": 48, "num_key_value_heads": 2, "depth_plan": "6x1"},
    },
    "data": {
        "sources": {
            "packed": {"path": "packed.jsonl", "share": 0.75},
            "streamed": {"path": "streamed.jsonl", "share": 0.25, "streaming": True, "skip": 3},
        },
        "tokenizer": "train",
        "packing": "best_fit",
        "validation": {"path": "validation.jsonl"},
        "validation_tokens": 200,
    },
    "training": {
        "total_steps": 16, "batch_size": 4, "optimizer": "adamw", "adamw_lr": 1e-3, "checkpoint_every": 3,
        "decay": "trapezoid", "decay_steps": 4, "growth_operator": "lidas", "growth_block_size": 2, "precision": "no",
    },
    "run": {"tracker": "none", "keep_last": 9},
}  # fmt: skip
LAYERS = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1, "num_recurrences": 3}
LOOPED = {
    "model": {"architecture": "looped_gpt", "fields": {**NARROW, **LAYERS}},
    "data": {**GROWING["data"], "packing": "concatenate", "validation": None},
    "training": {
        "total_steps": 8, "batch_size": 4, "micro_steps": 2, "optimizer": "muonh", "depth_scheme": "uniform",
        "checkpoint_every": 3, "precision": "no",
    },
    "run": {"tracker": "none", "keep_last": 1},
}  # fmt: skip


def write_texts(path: Path, count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(4, 40))) + "\n" for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_library(folder: Path) -> list[str]:
    """The texts that the recipes of these tests name. Returns those to train on."""
    write_texts(folder / "streamed.jsonl", 30, 2)
    write_texts(folder / "validation.jsonl", 5, 3)
    return write_texts(folder / "packed.jsonl", 60, 1)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A folder with the texts of all recipes here, from which the commands start, and tokenizers of two sizes."""
    folder = tmp_path_factory.mktemp("library")
    texts = write_library(folder)
    for size in (300, 280):
        train_tokenizer(texts, size).save_pretrained(folder / f"tokenizer-{size}")
    for name, recipe in (("growing", GROWING), ("looped", LOOPED)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


# The commands


SERVER = """
import json, os, resource, runpy, sys, traceback, warnings
import datasets, torch, transformers, modeling_looped.recipes.launch
torch.set_num_threads(1)
warnings.filterwarnings("ignore", message=".*found in sys.modules.*")  # runpy, of what was imported in advance
for line in sys.stdin:
    ask = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        if ask["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (ask["largest_file"], resource.RLIM_INFINITY))
        sys.argv = ["-m", *ask["arguments"]]
        code = 0
        try:
            runpy.run_module(ask["module"], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Commands:
    """
    `python -m modeling_looped.recipes.pretrain ...` in processes of their own, from the folder `library`. They are
    forked from one that has imported torch, since a dozen starts from nothing would take minutes.
    """

    def __init__(self, library: Path, log: Path):
        self.library, self.log = library, log
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            cwd=library, env=environment(),
        )  # fmt: skip

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)

    def run(self, *arguments, kill=None, number=signal.SIGKILL, largest_file=None, then=None) -> tuple[int, str]:
        """
        The exit status and what was printed. As soon as `kill()` holds, looked at every millisecond, the process gets
        the signal `number`; or `then` is called instead. No file may become larger than `largest_file` bytes.
        """
        ask = {
            "module": "modeling_looped.recipes.pretrain",
            "arguments": list(map(str, arguments)),
            "log": str(self.log),
            "largest_file": largest_file,
        }
        print(json.dumps(ask), file=self.server.stdin, flush=True)
        child = int(self.server.stdout.readline())
        ended = False
        while kill is not None and not ended:
            if kill():
                os.kill(child, number) if then is None else then()
                break
            ended = bool(select.select([self.server.stdout], [], [], 0.001)[0])
        return int(self.server.stdout.readline()), self.log.read_text()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def commands(library, tmp_path_factory):
    commands = Commands(library, tmp_path_factory.mktemp("log") / "log.txt")
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(commands, library):
    """The uninterrupted run of a recipe, by its name."""

    def run(name: str) -> Path:
        output = library / f"whole-{name}"
        if not output.exists():
            status, text = commands.run("--config", f"{name}.yaml", "--output_dir", output)
            assert status == 0, text
        return output

    return run


def numbers(output: Path) -> list[dict]:
    """The lines of metrics.jsonl without what a clock measured."""
    clock = ("seconds", "tokens_per_second", "mfu")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def is_same(left, right) -> bool:
    """Of nested lists and mappings of tensors and numbers, bit for bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(is_same, left, right))
    return left == right


def assert_same_checkpoint(left: Path, right: Path) -> None:
    assert sorted(path.name for path in left.iterdir()) == sorted(path.name for path in right.iterdir())
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (left, right))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    assert is_same(*(torch.load(folder / "optimizers.pt", weights_only=True) for folder in (left, right)))
    for name in ("config.json", "generation_config.json", "progress.json"):
        assert (left / name).read_text() == (right / name).read_text(), name


def assert_same_run(output: Path, whole: Path) -> None:
    """Every step once and in order, with the numbers of the uninterrupted run; and its checkpoints, bit for bit."""
    assert numbers(output) == numbers(whole)
    steps = [line["step"] for line in numbers(output) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in whole.iterdir())
    for checkpoint in whole.glob("step-*"):
        assert_same_checkpoint(output / checkpoint.name, checkpoint)


def step_done(output: Path, step: int):
    """Whether the metrics have `step`."""

    def done() -> bool:
        path = output / "metrics.jsonl"
        return path.exists() and f'"step": {step}, "loss"' in path.read_text()

    return done


def being_written(output: Path, step: int, after: float):
    """`after` seconds into the writing of the checkpoint of `step`."""

    def writing() -> bool:
        if (output / f".writing-step-{step}").exists():
            time.sleep(after)
            return True
        return (output / f"step-{step}").exists()

    return writing


def run_with_kills(commands: Commands, name: str, output: Path, moments: list) -> list[list[str]]:
    """Kills the run of a recipe at each of `moments`, then lets it finish. The folder's names after each kill."""
    arguments = ["--config", f"{name}.yaml", "--output_dir", output, "--resume", "auto"]
    left = []
    for moment in moments:
        status, text = commands.run(*arguments, kill=moment)
        assert status == -signal.SIGKILL, text
        left.append([path.name for path in output.iterdir()])
        for checkpoint in output.glob("step-*"):
            load_file(checkpoint / "model.safetensors")
            torch.load(checkpoint / "optimizers.pt", weights_only=True)
    status, text = commands.run(*arguments)
    assert status == 0 and "Finished" in text, text
    return left


@pytest.mark.slow
def test_a_growing_run_that_is_killed_seven_times_equals_an_uninterrupted_one_bit_for_bit(commands, whole, tmp_path):
    output, chance = tmp_path / "killed", random.Random(0)
    moments = [
        step_done(output, 2),  # before the first growth, and before any checkpoint
        being_written(output, 3, 0.0),
        step_done(output, 6),  # before the second growth
        being_written(output, 6, chance.uniform(0, 0.02)),
        step_done(output, chance.randint(7, 8)),
        being_written(output, 9, chance.uniform(0, 0.01)),
        step_done(output, chance.randint(10, 14)),
    ]
    left = run_with_kills(commands, "growing", output, moments)
    assert any(name.startswith(".writing-step-") for names in left for name in names), "no kill fell into a write"
    assert_same_run(output, whole("growing"))
    assert [line["step"] for line in numbers(output) if "validation_nats_per_token" in line] == [3, 6, 9, 12, 15, 16]


@pytest.mark.slow
def test_a_run_of_drawn_depths_that_is_killed_three_times_equals_an_uninterrupted_one_bit_for_bit(
    commands, whole, tmp_path
):
    output, chance = tmp_path / "killed", random.Random(1)
    moments = [
        step_done(output, chance.randint(1, 2)),
        being_written(output, 3, chance.uniform(0, 0.01)),
        step_done(output, chance.randint(4, 6)),
    ]
    run_with_kills(commands, "looped", output, moments)
    assert_same_run(output, whole("looped"))
    assert len({line["num_recurrences"] for line in numbers(output)}) > 1


@pytest.mark.slow
def test_what_a_killed_run_left_half_deleted_and_half_written_is_gone_at_the_end(commands, whole, tmp_path):
    output = tmp_path / "run"
    arguments = ("--config", "looped.yaml", "--output_dir", output, "--resume", "auto")
    commands.run(*arguments, kill=lambda: (output / "step-3").exists())
    for name in (".deleting-step-1", ".writing-step-2"):
        (output / name).mkdir()
    with (output / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "lo')
    assert commands.run(*arguments)[0] == 0
    assert_same_run(output, whole("looped"))


@pytest.mark.slow
def test_a_terminated_command_saves_says_how_to_go_on_and_ends_with_status_0(commands, whole, library, tmp_path):
    output = tmp_path / "stopped"
    command = [sys.executable, "-m", "modeling_looped.recipes.pretrain", "--config", "growing.yaml"]
    process = subprocess.Popen(
        [*command, "--output_dir", str(output)], cwd=library, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        done = step_done(output, 4)
        while process.poll() is None and not done():
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    checkpoint = newest_checkpoint(output)
    step = int(checkpoint.name.removeprefix("step-"))
    assert 4 <= step < 16
    assert f"Stopped after step {step} of 16, saved as {checkpoint}: go on with --resume auto." in printed
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.num_hidden_layers == (4 if step <= 6 else 6)
    assert_goes_on(commands, output, whole("growing"))


@pytest.mark.slow
def test_a_command_that_ctrl_c_stops_saves_and_goes_on(commands, whole, tmp_path):
    output = tmp_path / "stopped"
    arguments = ("--config", "growing.yaml", "--output_dir", output)
    status, text = commands.run(*arguments, kill=step_done(output, 7), number=signal.SIGINT)
    assert status == 0 and "--resume auto" in text, text
    assert_goes_on(commands, output, whole("growing"))


def assert_goes_on(commands: Commands, output: Path, whole: Path) -> None:
    """A stop adds a checkpoint and no number: who stops a run does not wait for a held-out loss."""
    status, text = commands.run("--config", "growing.yaml", "--output_dir", output, "--resume", "auto")
    assert status == 0, text
    assert numbers(output) == numbers(whole)
    assert_same_checkpoint(output / "step-16", whole / "step-16")


@pytest.mark.slow
def test_a_run_that_may_not_write_a_checkpoint_names_the_last_good_one_which_loads_and_goes_on(
    commands, whole, tmp_path
):
    output = tmp_path / "run"
    arguments = ("--config", "growing.yaml", "--output_dir", output)
    # Enough for the optimizers' state of 4 layers, and not for that of 6.
    largest = (whole("growing") / "step-9" / "optimizers.pt").stat().st_size - 1
    status, text = commands.run(*arguments, largest_file=largest)
    assert status == 1  # the call was right
    assert text.splitlines()[-1] == (
        "pretrain: The checkpoint of step 9 could not be written ([Errno 27] File too large); "
        f"{output}/step-6 is intact, and --resume auto goes on from it."
    )
    assert_intact_after_a_full_disk(commands, output, text, whole("growing"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_run_on_a_full_disk_names_the_last_good_checkpoint_which_loads_and_goes_on(commands, whole, tmp_path, what):
    finished = whole("growing")

    def blocks(*paths: Path) -> int:
        return sum(-(-file.stat().st_size // 4096) * 4096 for path in paths for file in path.rglob("*"))

    needed = blocks(finished / "data", finished / "step-3", finished / "step-6")
    size = needed + blocks(finished / "step-9") // 2
    output = tmp_path / "disk" / "run"
    with mounted(tmp_path / "disk", size):
        fill = {}
        if what == "metrics":

            def ballast():
                with (tmp_path / "disk" / "ballast").open("wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)):
                            pass
                    except OSError:
                        pass

            fill = {"kill": lambda: (output / "step-6").exists(), "then": ballast}
        status, text = commands.run("--config", "growing.yaml", "--output_dir", output, **fill)
        assert status == 1, text
        assert f"{output}/step-6 is intact, and --resume auto goes on from it." in text.splitlines()[-1]
        assert "No space left on device" in text.splitlines()[-1]
        shutil.copytree(output, tmp_path / "larger")
    assert_intact_after_a_full_disk(commands, tmp_path / "larger", text, finished)


@contextmanager
def mounted(folder: Path, size: int):
    """A disk of `size` bytes at `folder`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def assert_intact_after_a_full_disk(commands: Commands, output: Path, text: str, whole: Path) -> None:
    assert "Traceback" not in text and "Exception" not in text, text
    assert not [path.name for path in output.rglob(".*")]
    assert newest_checkpoint(output).name == "step-6"
    assert AutoModelForCausalLM.from_pretrained(output / "step-6").config.num_hidden_layers == 4
    status, text = commands.run("--config", "growing.yaml", "--output_dir", output, "--resume", "auto")
    assert status == 0, text
    assert_same_run(output, whole)


# Checkpoints


@pytest.mark.slow
def test_every_checkpoint_loads_in_a_clean_process_and_says_what_it_is(whole, library):
    growing, looped = whole("growing"), whole("looped")
    checkpoints = [*sorted(growing.glob("step-*")), *looped.glob("step-*")]
    assert [int(path.name.removeprefix("step-")) for path in checkpoints] == [12, 15, 16, 3, 6, 9, 8]
    program = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for folder in sys.argv[1:]:\n"
        "    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n"
        "    ids = tokenizer('oak and elm', return_tensors='pt')['input_ids']\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "    print(json.dumps(model(ids).logits[0, -1].tolist()))\n"
    )
    cache = {"HF_MODULES_CACHE": str(library / "modules")}
    printed = subprocess.run(
        [sys.executable, "-c", program, *map(str, checkpoints)], env={**environment(), **cache}, check=True,
        stdout=subprocess.PIPE, text=True,
    ).stdout.splitlines()  # fmt: skip
    for folder, line in zip(checkpoints, printed, strict=True):
        ids = AutoTokenizer.from_pretrained(folder)("oak and elm", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, -1]
        assert torch.equal(torch.tensor(json.loads(line)), logits), folder
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == 0 and generation["pad_token_id"] == 1
        card = (folder / "README.md").read_text()
        step = int(folder.name.removeprefix("step-"))
        total, tokens = (8, 1024) if folder.parent == looped else (16, 2048)
        assert card.startswith("---\n") and "\n- modeling-looped\n" in card
        assert f"- {step} steps of {total}, {tokens // total * step:,} tokens" in card
        assert "| streamed | 25.0 % | `streamed.jsonl`, SHA-256 " in card and "streamed.jsonl" in card.partition("```yaml")[2]
    assert "nats per token on the held-out text of its training" not in card
    assert "nats per token on the held-out text of its training" in (growing / "step-9" / "README.md").read_text()


@pytest.mark.slow
def test_the_recipe_in_a_checkpoint_is_that_of_the_same_run(commands, whole, tmp_path):
    finished, output = whole("growing"), tmp_path / "again"
    assert commands.run("--config", finished / "step-6" / "recipe.yaml", "--output_dir", output)[0] == 0
    assert_same_run(output, finished)
    assert (output / "recipe.yaml").read_text() == (finished / "step-6" / "recipe.yaml").read_text()


def test_the_newest_the_best_and_the_plateau_s_last_checkpoint_are_kept(library, monkeypatch, tmp_path):
    monkeypatch.chdir(library)
    # Held-out text without a token of the training text is predicted worse and worse.
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "7301942586" * 30}))
    recipe = copy.deepcopy(LOOPED)
    recipe["data"] |= {"validation": {"path": str(tmp_path / "other.jsonl")}, "validation_tokens": 200}
    recipe["training"] |= {
        "total_steps": 5, "decay": "trapezoid", "decay_steps": 2, "optimizer": "adamw", "adamw_lr": 0.05,
        "checkpoint_every": 1,
    }  # fmt: skip
    run("pretrain", recipe, tmp_path / "out")
    losses = {
        line["step"]: line["validation_nats_per_token"]
        for line in numbers(tmp_path / "out")
        if "validation_nats_per_token" in line
    }
    assert sorted(losses) == [1, 2, 3, 4, 5] and min(losses, key=losses.get) == 1
    assert {path.name for path in (tmp_path / "out").glob("step-*")} == {"step-1", "step-3", "step-5"}
    assert json.loads((tmp_path / "out/step-1/progress.json").read_text())["validation_nats"] == losses[1]


def test_only_the_tracker_that_is_asked_for_writes(library, monkeypatch, tmp_path):
    monkeypatch.chdir(library)
    for tracker in ("none", "tensorboard"):
        run("pretrain", LOOPED, tmp_path / tracker, "--total_steps", "1", "--tracker", tracker)
    assert not list((tmp_path / "none").rglob("*tfevents*"))
    events = list((tmp_path / "tensorboard").rglob("*tfevents*"))
    assert events and any(b"learning_rate" in path.read_bytes() for path in events)


# Runs in this process


def run(stage: str, recipe: dict, output: Path, *arguments: str) -> None:
    path = output.parent / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    launch.main(stage, ["--config", str(path), "--output_dir", str(output), *arguments])


def content(folder: Path) -> dict[str, str | None]:
    """Every path under `folder`, hidden ones too, with a hash of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(stage: str, recipe: dict, output: Path, capsys, arguments=()) -> str:
    """The one sentence with which a command ends, having written nothing."""
    path = output.parent / "refused.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe))
    before, capsys_before = content(path.parent), capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        launch.main(stage, ["--config", str(path), "--output_dir", str(output), *arguments])
    captured = capsys.readouterr()
    assert end.value.code == 2, capsys_before
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert content(path.parent) == before
    return lines[0]


@pytest.mark.parametrize("rate", ["1e30", "1e20"])
def test_a_loss_out_of_numbers_ends_with_a_sentence_and_leaves_a_checkpoint_of_numbers(
    library, monkeypatch, tmp_path, capsys, rate
):
    """At 1e30 the loss is the first that is no number. At 1e20 it is finite when the gradients are not any more."""
    monkeypatch.chdir(library)
    # Step 1 has rate 0, and step 2 half of the absurd one; every step writes a checkpoint.
    absurd = ("--optimizer", "adamw", "--adamw_lr", rate, "--decay", "trapezoid", "--warmup_steps", "2")
    with pytest.raises(SystemExit) as end:
        run("pretrain", LOOPED, tmp_path / "out", *absurd, "--checkpoint_every", "1")
    assert end.value.code == 1  # the call was right
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    last = newest_checkpoint(tmp_path / "out")
    assert "learning rate" in sentence and str(last) in sentence and "intact" in sentence
    model = AutoModelForCausalLM.from_pretrained(last)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def changed(recipe: dict, **values) -> dict:
    """`data__sources={...}` sets recipe["data"]["sources"]; None deletes."""
    recipe = copy.deepcopy(recipe)
    for path, value in values.items():
        *outer, last = path.split("__")
        inner = recipe
        for name in outer:
            inner = inner[name]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return recipe


def source(name: str, **fields) -> dict:
    return {"data__sources": {"library": {"path": name, **fields}}}


TOKENIZER = {"data__tokenizer": "tokenizer-300"}
BAD_RECIPES = {
    "missing field": ({"data__sources": None}, (), ["data: sources missing"]),
    "missing path": ({"data__sources": {"a": {"share": 1.0}}}, (), ["data", "sources, a: path missing"]),
    "mixture": (
        {"data__sources": {"a": {"path": "packed.jsonl", "share": 0.6}, "b": {"path": "streamed.jsonl", "share": 0.3}}},
        (),
        ["sources", "a 0.6, b 0.3", "0.9", "add up to 1"],
    ),
    "key": ({"training__totl_steps": 3}, (), ["training", "'totl_steps'", "did you mean 'total_steps'?"]),
    "section": ({"trainings": {}}, (), ["'trainings'", "did you mean 'training'?"]),
    "model field": ({"model__fields__hiden_size": 64}, (), ["'hiden_size'", "did you mean 'hidden_size'?"]),
    "option": ({}, ("--totl_steps", "3"), ["'--totl_steps'", "did you mean 'total_steps'?"]),
    "type": ({"training__batch_size": "many"}, (), ["training", "batch_size='many'", "int"]),
    "two budgets": ({"training__budget_tokens": 1000}, (), ["total_steps and budget_tokens"]),
    "two budget options": ({}, ("--budget_tokens", "9", "--budget_flops", "1e9"), ["budget_tokens and budget_flops"]),
    "small budget": ({}, ("--budget_tokens", "5"), ["128 tokens", "lower batch_size"]),
    "tracker": ({"run__tracker": "mlflow"}, (), ["tracker='mlflow'", "tensorboard, trackio, wandb, none"]),
    "both modes": ({}, ("--resume", "auto", "--overwrite"), ["--resume", "--overwrite", "one of the two"]),
    "empty file": (source("empty.jsonl"), (), ["library", "'empty.jsonl'", "holds no text"]),
    "empty stream": (source("empty.jsonl", streaming=True), (), ["library", "'empty.jsonl'", "holds no text"]),
    "missing file": (source("nowhere.jsonl"), (), ["library", "path 'nowhere.jsonl'", "is not a file"]),
    "line": (source("broken.jsonl"), (), ["broken.jsonl, line 3", "not JSON"]),
    "line of a stream": ({**TOKENIZER, **source("broken.jsonl", streaming=True)}, (), ["broken.jsonl", "JSON"]),
    "late line": ({**TOKENIZER, **source("late.jsonl")}, (), ["late.jsonl, line 1101", "not JSON"]),
    "column": ({**TOKENIZER, **source("packed.jsonl", column="words")}, (), ["packed.jsonl", "'words'"]),
    "skip": ({**TOKENIZER, **source("packed.jsonl", skip=1000)}, (), ["'packed.jsonl'", "skip=1000"]),
    "short": (source("short.jsonl"), (), ["'short.jsonl'", "one row of 33 tokens", "use more text"]),
    "validation": ({"data__validation": {"path": "nowhere.jsonl"}}, (), ["validation", "'nowhere.jsonl'", "a file"]),
    "vocabulary": (
        {"data__tokenizer": "tokenizer-300", "model__fields__vocab_size": 280},
        (),
        ["tokenizer='tokenizer-300'", "300", "vocab_size is 280", "choose"],
    ),
    "tokenizer": ({"data__tokenizer": "nowhere"}, (), ["tokenizer='nowhere'", "cannot be loaded"]),
    "packed length": (
        {**TOKENIZER, **source("packed-16")}, (), ["packed-16", "sequence_length=16", "the run has 32", "pack it anew"],
    ),
    "packed tokenizer": (
        {**source("packed-32"), "data__tokenizer": "tokenizer-280"}, (), ["packed-32", "another tokenizer", "anew"],
    ),
    "tokenizer of rows": (source("packed-32"), (), ["'packed-32'", "token ids", "name its own"]),
    "length": ({"data__sequence_length": 64}, (), ["sequence_length=64", "max_position_embeddings=32", "lower it"]),
    "no length": ({"data__sequence_length": 0}, (), ["sequence_length=0", "at least 1"]),
    "batch": ({"training__batch_size": 3}, (), ["batch_size=3", "2 micro-steps", "make it a multiple"]),
    "growth of another family": (
        {"training__growth_operator": "lidas"}, ("--growth_block_size", "1"), ["LoopedGPT", "grow"],
    ),
    "warm-up": ({"training__warmup_steps": -1}, (), ["warmup_steps=-1", "negative"]),
    "depth": ({"training__depth_scheme": "poisson-lognormal"}, (), ["mean=None", "'poisson-lognormal'"]),
    "checkpoint": (
        {"model": {"checkpoint": "nowhere"}, **TOKENIZER}, (), ["checkpoint='nowhere'", "no configuration"],
    ),
    "family": ({"model": {"checkpoint": "gpt2"}}, (), ["'gpt2' is a gpt2", "looped_gpt", "Llama-shaped"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_library(library, tmp_path_factory) -> Path:
    """`library` with what goes wrong: broken and short texts, packed rows, a checkpoint of another family."""
    folder = tmp_path_factory.mktemp("bad") / "library"
    shutil.copytree(library, folder, ignore=shutil.ignore_patterns("whole-*", "modules"))
    (folder / "empty.jsonl").touch()
    good = (folder / "packed.jsonl").read_text()
    (folder / "broken.jsonl").write_text("".join(good.splitlines(keepends=True)[:2]) + "not json\n")
    (folder / "late.jsonl").write_text("".join((good.splitlines(keepends=True) * 20)[:1100]) + "not json\n")
    (folder / "short.jsonl").write_text('{"text": "oak"}\n')
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer-300")
    for length in (16, 32):
        pack(Source(str(folder / "packed.jsonl")), "best_fit", tokenizer, length, folder / f"packed-{length}")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(folder / "gpt2")
    return folder


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_what_cannot_run_is_refused_in_one_sentence_and_nothing_is_written(bad_library, monkeypatch, capsys, name):
    monkeypatch.chdir(bad_library)
    values, arguments, parts = BAD_RECIPES[name]
    sentence = refused("pretrain", changed(LOOPED, **values), bad_library / "out", capsys, arguments)
    for part in parts:
        assert part in sentence, sentence


def test_a_growth_or_a_retrofit_that_does_not_fit_is_refused_before_anything_is_written(
    bad_library, monkeypatch, capsys
):
    monkeypatch.chdir(bad_library)
    for values, parts in (
        ({"training__growth_block_size": 4}, ["growth_block_size=4", "divide", "6 layers"]),
        ({"model__fields__depth_plan": "Loop(2-2x2-2)"}, ["Loop(2-2x2-2)", "grow"]),
        ({"training__growth_operator": None, "training__retrofit_layers": [5, 9]}, ["6x1", "layers 5 to 8"]),
        ({"training__growth_block_size": 1, "training__total_steps": 5}, ["total_steps", "at least 6"]),
    ):
        recipe = changed(GROWING, **values)
        if recipe["training"]["total_steps"] == 5:
            del recipe["training"]["decay_steps"]
        sentence = refused("pretrain", recipe, bad_library / "out", capsys)
        for part in parts:
            assert part in sentence, sentence


def test_a_cooldown_needs_a_checkpoint_of_these_families(bad_library, monkeypatch, capsys):
    monkeypatch.chdir(bad_library)
    assert "give --checkpoint" in refused("cooldown", LOOPED, bad_library / "out", capsys)
    other = changed(LOOPED, model={"checkpoint": "gpt2"})
    assert "'gpt2' is a gpt2" in refused("cooldown", other, bad_library / "out", capsys)


def test_an_output_that_cannot_be_is_refused(bad_library, monkeypatch, capsys):
    monkeypatch.chdir(bad_library)
    cases = {
        "packed.jsonl": ["'packed.jsonl'", "is a file", "name a folder"],
        "packed.jsonl/run": ["'packed.jsonl/run'", "packed.jsonl is a file"],
        "tokenizer-300": ["tokenizer-300", "no run of these recipes", "choose a new folder"],
    }
    recipe = changed(LOOPED, **TOKENIZER)
    (bad_library / "given.yaml").write_text(yaml.safe_dump(recipe))
    for name, parts in cases.items():
        for arguments in ((), ("--overwrite",), ("--resume", "auto")):
            before = content(bad_library)
            with pytest.raises(SystemExit) as end:
                launch.main("pretrain", ["--config", "given.yaml", "--output_dir", name, *arguments])
            (sentence,) = capsys.readouterr().err.strip().splitlines()
            assert end.value.code == 2 and all(part in sentence for part in parts), sentence
            assert content(bad_library) == before


def test_a_read_only_output_is_refused(bad_library, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(bad_library)
    with mounted(tmp_path / "disk", 10**6):
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(SystemExit) as end:
            launch.main("pretrain", ["--config", "looped.yaml", "--output_dir", str(tmp_path / "disk" / "run")])
        assert end.value.code == 2
        assert f"{tmp_path}/disk is read-only for you" in capsys.readouterr().err


def test_a_run_is_neither_begun_twice_nor_continued_as_another_nor_deleted_for_nothing(
    library, monkeypatch, capsys, tmp_path
):
    """In its own folder, where nothing may change, the packed data included."""
    for name in ("packed.jsonl", "streamed.jsonl", "tokenizer-300"):
        copied = shutil.copytree if (library / name).is_dir() else shutil.copy
        copied(library / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    recipe, output = changed(LOOPED, training__total_steps=1, **TOKENIZER), tmp_path / "out"
    unstreamed = {**recipe["data"]["sources"], "streamed": {"path": "streamed.jsonl", "share": 0.25}}
    run("pretrain", recipe, output)
    capsys.readouterr()

    assert "--resume auto" in (sentence := refused("pretrain", recipe, output, capsys)) and "--overwrite" in sentence
    for values, part in (
        ({"training__matrix_lr": 0.1}, "matrix_lr=0.015"),
        ({"training__total_steps": 2}, "total_steps=1"),
        ({"data__packing": "best_fit"}, "packing='concatenate'"),
        ({"data__data_seed": 1}, "data_seed=0"),
        ({"model__fields__hidden_size": 64}, "model.hidden_size=32"),
        ({"data__sources": unstreamed}, "sources.streamed.streaming=True"),
        ({"data__sources": {"packed": {"path": "packed.jsonl"}}}, "sources."),
    ):
        sentence = refused("pretrain", changed(recipe, **values), output, capsys, ("--resume", "auto"))
        assert part in sentence and "continue with the same" in sentence, sentence
    kept = (tmp_path / "packed.jsonl").read_bytes()
    (tmp_path / "packed.jsonl").write_bytes(kept + b'{"text": "one more"}\n')
    assert "sources.packed" in refused("pretrain", recipe, output, capsys, ("--resume", "auto"))
    (tmp_path / "packed.jsonl").write_bytes(kept)

    wrong = changed(recipe, data__sources={"a": {"path": "nowhere.jsonl"}})
    assert "'nowhere.jsonl'" in refused("pretrain", wrong, output, capsys, ("--overwrite",))
    run("pretrain", recipe, output, "--resume", "auto")
    weights = (output / "step-1" / "model.safetensors").read_bytes()
    run("pretrain", changed(recipe, training__matrix_lr=0.1), output, "--overwrite")
    assert (output / "step-1" / "model.safetensors").read_bytes() != weights


def test_a_tracker_that_is_not_installed_is_refused(library, monkeypatch, capsys, tmp_path):
    import importlib.util

    missing = [name for name in ("trackio", "wandb") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("all trackers are installed")
    monkeypatch.chdir(library)
    sentence = refused("pretrain", changed(LOOPED, run__tracker=missing[0]), tmp_path / "out", capsys)
    assert f"tracker='{missing[0]}'" in sentence and f"pip install {missing[0]}" in sentence


def test_precision_no_needs_no_quotes(library, monkeypatch, tmp_path):
    monkeypatch.chdir(library)
    text = yaml.safe_dump(LOOPED).replace("'no'", "no")
    (tmp_path / "plain.yaml").write_text(text)
    assert "precision: no\n" in text
    launch.main("pretrain", ["--config", str(tmp_path / "plain.yaml"), "--dry-run"])


def test_a_dry_run_writes_nothing(bad_library, monkeypatch, capsys):
    monkeypatch.chdir(bad_library)
    before = content(bad_library)
    launch.main("pretrain", ["--config", "growing.yaml", "--output_dir", "out", "--dry-run"])
    assert "grows           lidas after steps 2, 6" in capsys.readouterr().out
    assert content(bad_library) == before


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--totl_steps", "3"), ("--batch_size", "3"), ("--tokenizer", "nowhere")])
def test_a_command_that_cannot_run_ends_with_status_2_and_one_sentence(commands, bad_library, arguments):
    before = content(bad_library)
    output = bad_library / "out"
    status, text = commands.run("--config", bad_library / "looped.yaml", "--output_dir", output, *arguments)
    assert status == 2 and "Traceback" not in text
    assert len(text.strip().splitlines()) == 1 and text.strip().endswith((".", "?")), text
    assert content(bad_library) == before


# Data


@pytest.fixture(scope="module")
def tokenizer(library):
    return AutoTokenizer.from_pretrained(library / "tokenizer-300")


@pytest.fixture(scope="module")
def many_texts(library) -> list[str]:
    """More than one batch of tokenisation."""
    return write_texts(library / "many.jsonl", 150, 4)


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
@pytest.mark.parametrize(("skip", "take"), [(0, None), (7, 100), (0, 20)])
def test_a_stream_resumed_at_any_row_equals_the_uninterrupted_one(library, tokenizer, many_texts, packing, skip, take):
    stream = Source(str(library / "many.jsonl"), streaming=True, skip=skip, take=take)
    whole = StreamedSource(stream, packing, tokenizer, 31)
    read = many_texts[skip:][:take]
    encoded = tokenizer(read, add_special_tokens=False)["input_ids"]
    mark = [tokenizer.eos_token_id]
    epochs = 3 + (1500 // len(read) if packing == "best_fit" else 0)  # best_fit holds 1,000 documents back
    documents = [mark + ids if packing == "best_fit" else ids + mark for ids in encoded] * epochs
    expected = list((pack_best_fit if packing == "best_fit" else pack_stream)(documents, 32))
    count = min(2 * sum(map(len, documents)) // epochs // 32 + 5, 250)
    rows, states = [], {}
    for number in range(count):
        if take == 20 or number % 11 == 0:
            states[number] = json.dumps(whole.state_dict())
        rows.append(whole.row(number, 0).tolist())
    assert rows == expected[:count]
    for number, state in states.items():
        resumed = StreamedSource(stream, packing, tokenizer, 31)
        resumed.load_state_dict(json.loads(state))
        assert [resumed.row(n, 0).tolist() for n in range(number, min(count, number + 9))] == rows[number : number + 9]


def test_a_stream_skips_rows_of_other_ranks_and_does_not_go_back(library, tokenizer, many_texts):
    stream = Source(str(library / "many.jsonl"), streaming=True)
    whole, other = (StreamedSource(stream, "concatenate", tokenizer, 31) for _ in range(2))
    rows = [whole.row(number, 0) for number in range(10)]
    for number in (2, 3, 7):
        assert np.array_equal(other.row(number, 0), rows[number])
    with pytest.raises(ValueError, match="Row 5 of a stream that has gone on to 8"):
        other.row(5, 0)


class Numbered:
    """A source whose row n is (source, n)."""

    def __init__(self, source: int):
        self.source = source

    def row(self, number: int, seed: int) -> np.ndarray:
        return np.array([self.source, number, 0])


@pytest.mark.parametrize(
    ("shares", "counts"),
    [([1.0], [1]), ([0.75, 0.25], [3, 1]), ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]), ([0.9, 0.06, 0.04], [45, 3, 2])],
)
def test_a_mixture_has_its_shares_exactly_in_each_period_and_names_every_row(shares, counts):
    assert shares_as_counts(shares) == counts
    rows = MixedRows([Numbered(number) for number in range(len(shares))], shares, 2, seed=3)
    period = sum(counts)
    places = [rows.place(number) for number in range(4 * period)]
    for start in range(0, 4 * period, period):
        owners = [source for source, _ in places[start : start + period]]
        assert [owners.count(source) for source in range(len(shares))] == counts
    for source, count in enumerate(counts):
        assert [index for owner, index in places if owner == source] == list(range(4 * count))
    fresh = MixedRows(rows.sources, shares, 2, seed=3)
    for number in random.Random(0).sample(range(4 * period), min(4 * period, 30)):
        assert fresh.place(number) == places[number]
    if len(shares) > 1 and period > 2:
        others = MixedRows(rows.sources, shares, 2, seed=4)
        assert [others.place(number) for number in range(4 * period)] != places


def test_shares_of_no_short_period_are_kept_to_four_digits():
    nine = [0.123456789] * 8 + [0.012345688]
    for shares in ([0.7001234, 0.2998766], [2 / 7, 3 / 11, 1 - 2 / 7 - 3 / 11], [0.99999, 0.00001], nine):
        counts = shares_as_counts(shares)
        assert sum(counts) <= 10_000
        assert all(abs(count / sum(counts) - share) < 1e-4 for count, share in zip(counts, shares, strict=True))


def test_rows_of_packed_sources_are_the_same_whatever_was_asked_before(library, tokenizer, tmp_path):
    sources = []
    for name in ("packed", "streamed"):
        pack(Source(str(library / f"{name}.jsonl")), "best_fit", tokenizer, 16, tmp_path / name)
        sources.append(PackedSource(tmp_path / name, 16, tokenizer))
    shares = [0.75, 0.25]
    inputs = MixedRows(sources, shares, 16, seed=5).inputs(0, 400)
    assert all(400 * share > 2 * len(one) for share, one in zip(shares, sources)), "several epochs of each"
    again = MixedRows([PackedSource(tmp_path / name, 16) for name in ("packed", "streamed")], shares, 16, seed=5)
    for first in random.Random(1).sample(range(398), 40):
        rows = again.inputs(first, 2)
        for name, value in inputs.items():
            assert torch.equal(rows[name], value[first : first + 2]), name
    epoch = [sources[0].row(number, 5).tolist() for number in range(2 * len(sources[0]))]
    kept = sorted(row.tolist() for row in sources[0]._rows["input_ids"][:])
    assert sorted(epoch[: len(kept)]) == sorted(epoch[len(kept) :]) == kept and epoch[: len(kept)] != epoch[len(kept) :]


def test_rows_that_do_not_fit_the_model_are_refused_by_name():
    rows = MixedRows([Numbered(9)], [1.0], 3)
    with pytest.raises(ValueError, match=r"Row 0 of source 1 has 3 tokens instead of sequence_length \+ 1 = 4"):
        rows.inputs(0, 1)
    rows = MixedRows([Numbered(9)], [1.0], 2, vocab_size=9)
    with pytest.raises(ValueError, match="holds token 9, and the model's vocab_size is 9"):
        rows.inputs(0, 1)


@pytest.mark.parametrize(
    ("row", "offset", "places"),
    [
        ([5, 7, 1, 5, 5, 2], 0, [0, 1, 2, 0, 0, 1]),  # 5 begins a document
        ([3, 5, 1, 2, 5, 2], 0, [0, 0, 1, 2, 0, 1]),  # a row that begins within one
        ([7, 1, 5, 3, 5, 5], 1, [0, 1, 2, 0, 1, 0]),  # 5 ends a document
        ([7, 1, 2, 3, 4, 5], 1, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_positions_start_anew_with_each_document(row, offset, places):
    assert document_positions(torch.tensor([row]), 5, offset).tolist() == [places]
    both = document_positions(torch.tensor([row, row[::-1]]), 5, offset)
    assert both[0].tolist() == places and both.shape == (2, 6)


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_with_masked_documents_a_packed_row_predicts_as_its_documents_alone(library, tokenizer, packing):
    model = tiny_model(vocab_size=300)
    (library / "short.jsonl").write_text("".join(json.dumps({"text": " ".join(WORDS[:n])}) + "\n" for n in range(2, 9)))
    sources = {"a": {"path": str(library / "short.jsonl"), "streaming": True}}
    recipe = DataRecipe(sources, str(library / "tokenizer-300"), 96, packing, True)
    inputs = load_data(recipe, 300, 96, library / "unused").rows.inputs(0, 3)
    assert not (library / "unused").exists()
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        other = model(input_ids=inputs["input_ids"], use_cache=False).logits
    assert (logits - other).abs().max() > 1e-2, "documents have to matter to each other without the mask"
    documents = 0
    for row, places, found in zip(inputs["input_ids"], inputs["position_ids"], logits):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(row)]
        for start, stop in zip(starts, starts[1:]):
            with torch.no_grad():
                alone = model(input_ids=row[None, start:stop], use_cache=False).logits[0]
            torch.testing.assert_close(found[start:stop], alone, rtol=0, atol=1e-5)
            documents += 1
    assert documents > 6


def test_the_loss_of_a_row_is_the_mean_over_all_its_tokens_but_the_first(library, tokenizer):
    model = tiny_model(vocab_size=300)
    stream = StreamedSource(Source(str(library / "packed.jsonl"), streaming=True), "concatenate", tokenizer, 31)
    inputs = MixedRows([stream], [1.0], 31).inputs(0, 4)
    rows = torch.cat([inputs["input_ids"], inputs["shift_labels"][:, -1:]], dim=1)
    assert rows.shape == (4, 32) and torch.equal(rows[:, 1:], inputs["shift_labels"])
    with torch.no_grad():
        loss = model(**inputs, use_cache=False).loss
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert abs(loss - nats) < 1e-6


def test_packing_is_done_once_and_a_file_of_another_name_shares_it(library, tokenizer, tmp_path):
    def recipe(path: Path) -> DataRecipe:
        return DataRecipe({"a": {"path": str(path)}}, str(library / "tokenizer-300"), 31, "best_fit")

    first = load_data(recipe(library / "packed.jsonl"), 300, 31, tmp_path / "data").rows
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    shutil.copy(library / "packed.jsonl", tmp_path / "renamed.jsonl")
    second = load_data(recipe(tmp_path / "renamed.jsonl"), 300, 31, tmp_path / "data").rows
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == before
    assert torch.equal(first.inputs(0, 9)["input_ids"], second.inputs(0, 9)["input_ids"])
    source = Source(str(library / "packed.jsonl"))
    names = {
        packed_name("a", source, "best_fit", tokenizer, 31),
        packed_name("a", source, "concatenate", tokenizer, 31),
        packed_name("a", source, "best_fit", tokenizer, 30),
        packed_name("a", source, "best_fit", AutoTokenizer.from_pretrained(library / "tokenizer-280"), 31),
        packed_name("a", Source(str(library / "packed.jsonl"), skip=1), "best_fit", tokenizer, 31),
        packed_name("a", Source(str(library / "streamed.jsonl")), "best_fit", tokenizer, 31),
    }
    assert len(names) == 6


def test_packed_rows_are_a_data_set_on_disk_that_the_packer_s_rows_fill(library, tokenizer, tmp_path):
    import datasets

    texts = [text for _, text in read_texts(str(library / "packed.jsonl"))]
    mark = [tokenizer.bos_token_id]
    documents = [mark + ids for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    pack(Source(str(library / "packed.jsonl")), "best_fit", tokenizer, 31, tmp_path / "rows")
    rows = datasets.load_from_disk(str(tmp_path / "rows" / "rows"))
    assert rows["input_ids"][:] == list(pack_best_fit(documents, 32))
    assert rows.features["input_ids"] == datasets.List(datasets.Value("uint16"), length=32)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith(".")) == []
    facts = json.loads((tmp_path / "rows" / "packed.json").read_text())
    assert facts["rows"] == len(rows) and facts["sequence_length"] == 31


def test_rows_that_are_token_ids_already_are_read_as_they_are(tmp_path):
    rows = np.arange(60).reshape(6, 10).tolist()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    ids = Source(str(tmp_path / "rows.jsonl"), column="input_ids", streaming=True)
    source = StreamedSource(ids, "best_fit", None, 9)
    assert [source.row(number, 0).tolist() for number in range(8)] == [*rows, *rows[:2]]
    other = StreamedSource(ids, "best_fit", None, 8)
    with pytest.raises(ValueError, match=r"a packed row has 10 tokens, and sequence_length \+ 1 = 9 are needed"):
        other.row(0, 0)


@pytest.mark.parametrize("tokens", [10_000, 100, 63])
def test_held_out_windows_cover_every_token_once_and_give_the_loss_of_the_evaluation(
    library, tokenizer, tmp_path, tokens
):
    from accelerate import Accelerator

    text = Source(str(library / "validation.jsonl"))
    held_out = HeldOut.read(text, tokenizer, 31, tokens, tmp_path)
    texts = [text for _, text in read_texts(text.path)]
    stream = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, tokenizer.eos_token_id]][:tokens]
    predicted = [token for window in held_out.windows for token in window[1:].tolist() if token != -100]
    assert predicted == stream[1:] and held_out.tokens == len(stream) - 1
    assert all(torch.equal(b[0], a[-1]) for a, b in zip(held_out.windows, held_out.windows[1:]))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = HeldOut.read(text, tokenizer, 31, tokens, tmp_path)
    assert torch.equal(again.windows, held_out.windows) and again.bytes == held_out.bytes
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == kept

    model = tiny_model(vocab_size=300).train()
    expected = held_out_loss(model, tokenizer, texts, [3], sequence_length=32, max_tokens=tokens)[0]
    assert expected.tokens == held_out.tokens and expected.bytes == held_out.bytes
    for batch in (1, 2, 8):
        nats = evaluate(model, held_out, Accelerator(mixed_precision="no"), batch)
        assert abs(nats - expected.nats_per_token) < 1e-5 and model.training
