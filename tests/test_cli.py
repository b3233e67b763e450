"""The command `looped` as a user meets it: contents, examples, JSON, exit status and completion."""

import errno
import http.server
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from conftest import tiny_model
from looped_cli import CONTENTS, app, bundled_recipes, ends_in_a_sentence, exit_status, script_options, to_json
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from modeling_looped.recipes import launch, pack, sft
from modeling_looped.recipes.tokens import train_tokenizer


ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("pretrain", "cooldown", "sft", "pack")
TEXTS = [f"line {number} of a text that is held out, {number * number} times\n" * 3 for number in range(12)]


def looped(*arguments) -> subprocess.CompletedProcess:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def process(*arguments, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, without a terminal."""
    command = [sys.executable, "-m", "looped_cli", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LOOPED_TRACEBACK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=600)


def json_of(run):
    """What stdout holds, which is JSON and nothing else."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    assert run.exit_code == 0, (run.output, run.exception)
    assert run.stdout.count("\n") == 1, run.stdout
    return json.loads(run.stdout, parse_constant=refuse)


def leaves(command=None, path=()) -> dict[tuple[str, ...], object]:
    """All commands by their words, those of groups with two."""
    command = typer.main.get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        return {path: command}
    return {words: leaf for name, one in command.commands.items() for words, leaf in leaves(one, (*path, name)).items()}


LEAVES = leaves()
GROUPS = [(name,) for name, command in typer.main.get_command(app).commands.items() if hasattr(command, "commands")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A folder with `looped` and `llama`, tiny checkpoints with a tokenizer, and `text.jsonl`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer(TEXTS, 300)
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder / "looped")
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    for name in ("looped", "llama"):
        tokenizer.save_pretrained(folder / name)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


# Help


def test_every_command_has_one_line_in_the_contents_and_every_line_a_command():
    listed = [name for lines in CONTENTS.values() for name in lines]
    assert sorted(listed) == sorted({words[0] for words in LEAVES})
    assert all(len(line) <= 60 and line.endswith((".", "?")) for lines in CONTENTS.values() for line in lines.values())


def test_help_is_a_table_of_contents_that_80_columns_hold_without_a_terminal():
    shown = process("--help").stdout
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown and "…" not in shown
    rows = [re.sub(r"[│╭╮╰╯─]", "", line).strip() for line in shown.splitlines()]
    panels = [panel for panel in CONTENTS if CONTENTS[panel]]
    assert [row for row in rows if row in CONTENTS or row == "Commands"] == panels
    at = 0
    for panel in panels:
        for name, line in CONTENTS[panel].items():
            at = next(i for i, row in enumerate(rows) if i > at and row.split() == [name, *line.split()])
    assert "Exit status: 0 done, 1 the work failed, 2 the call has to change, 130 interrupted." in " ".join(rows)


def test_the_page_on_the_command_line_has_the_same_contents():
    page = (ROOT / "docs" / "how_to" / "command_line.md").read_text()
    found = re.findall(r"^\| (.*) \| `looped ([\w-]+)` \| (.*) \|$", page, re.MULTILINE)
    rows = [(panel, list(lines.items())) for panel, lines in CONTENTS.items()]
    expected = [(panel if i == 0 else "", *row) for panel, lines in rows for i, row in enumerate(lines)]
    assert [(panel.strip(), *row) for panel, *row in found] == expected


def examples(words) -> list[str]:
    """The calls at the end of a command's help."""
    shown = looped(*words, "--help")
    assert shown.exit_code == 0, (words, shown.output)
    text = shown.output.partition("Examples:\n")[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("words", [*LEAVES, *GROUPS], ids=" ".join)
def test_help_ends_with_examples_of_calls_that_parse(words, monkeypatch):
    calls = examples(words)
    assert 2 <= len(calls) <= 3, calls
    own = [call for call in calls if shlex.split(call)[1 : 1 + len(words)] == list(words)]
    assert len(own) >= min(2, len(calls)) - (words in (("card",), ("phi",))), calls
    for call in calls:
        parses(call, monkeypatch)


def parses(call: str, monkeypatch) -> None:
    """Ends with an error where the command, an option or a value is not there. Nothing is run."""
    program, *arguments = shlex.split(call)
    assert program == "looped"
    if arguments[0] in SCRIPTS:
        ran = []
        monkeypatch.setattr(launch, "launch", lambda parsed, stage: ran.append(parsed))
        monkeypatch.setattr(sft, "_run", ran.append)
        monkeypatch.setattr(sft, "_describe", lambda *given: ran.append(given))
        monkeypatch.setattr(pack, "_pack", ran.append)
        done = looped(*arguments)
        assert done.exit_code == 0 and len(ran) == 1, (call, done.output)
        return
    command = typer.main.get_command(app)
    ran = []

    def replace(one):
        for name in getattr(one, "commands", {}):
            replace(one.commands[name])
        if not hasattr(one, "commands"):
            one.callback = lambda **given: ran.append(given)

    replace(command)
    command.main(arguments, prog_name="looped", standalone_mode=False)
    assert len(ran) == 1, call


def test_a_call_that_does_not_parse_is_found(monkeypatch):
    for call in (
        "looped flops a --recurences 4",
        "looped flop a",
        "looped pretrain --config iso_depth --sise 10 --dry-run",
    ):
        with pytest.raises((Exception, AssertionError)):
            parses(call, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in LEAVES if words[0] not in SCRIPTS], ids=" ".join)
def test_help_of_a_subcommand_imports_no_torch(words):
    code = (
        f"import sys, looped_cli; sys.argv = ['looped', *{list(words)!r}, '--help']\n"
        "try:\n    looped_cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert shown.returncode == 0 and "Examples:" in shown.stdout, shown.stderr


QUICK = ("flops", "kv-cost", "exits", "generate", "eval", "contamination", "advise", "diagnose", "eval-report")


@pytest.mark.slow
def test_quick_examples_run_where_the_demo_has_been(tmp_path):
    made = process("demo", "demo-output", "--quick", "--steps", "4", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    for name in QUICK:
        for call in examples([name]):
            if "SmolLM2" in call or "--runs" in call or "kv-cost demo-output --rec" in call:
                continue  # needs the Hub, a table of runs, a minute
            done = process(*shlex.split(call)[1:], cwd=tmp_path)
            assert done.returncode == 0, (call, done.stderr)


# Exit status


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("size=-1 must be positive"), 2),
        (typer.BadParameter("--quick and --full exclude each other."), 2),
        (FileNotFoundError(errno.ENOENT, "missing"), 2),
        (NotADirectoryError(errno.ENOTDIR, "a file"), 2),
        (IsADirectoryError(errno.EISDIR, "a folder"), 2),
        (FileExistsError(errno.EEXIST, "is there"), 2),
        (PermissionError(errno.EACCES, "not yours"), 2),
        (OSError("nobody/none is not a local folder and is not a valid model identifier"), 2),
        (ModuleNotFoundError("No module named 'scipy'", name="scipy"), 2),
        (ImportError("transformers>=5.24,<6 is required"), 2),
        (FloatingPointError("The loss of step 7 is nan."), 1),
        (FULL, 1),
        (raised(OSError("The checkpoint of step 9 could not be written"), FULL), 1),
        (RuntimeError("looped eval ended with 1"), 1),
        (MemoryError(), 1),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 1),
        (raised(OSError("We couldn't connect"), ConnectionError("refused")), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_two_is_for_calls_that_have_to_change_and_one_for_work_that_failed(error, status, capsys):
    assert exit_status(error) == status
    with pytest.raises(SystemExit) as end, ends_in_a_sentence("looped"):
        raise error
    said = capsys.readouterr()
    assert end.value.code == status and said.out == "" and said.err.startswith("looped: ") and said.err.count("\n") == 1


@pytest.mark.parametrize(("number", "status"), [(None, 2), (errno.ENOSPC, 1)])
def test_an_error_that_is_its_own_cause_has_a_status_too(number, status):
    error = OSError("words") if number is None else OSError(number, "words")
    error.__cause__ = error
    assert exit_status(error) == status


def test_a_mistake_of_ours_keeps_its_trace():
    for error in (TypeError("unexpected"), KeyError("missing"), ImportError("no", name="modeling_looped.gone")):
        with pytest.raises(type(error)), ends_in_a_sentence("looped"):
            raise error


def test_what_is_missing_is_said_with_its_pip_line(capsys):
    for module, extra in (("scipy", "scaling"), ("lm_eval.api", "eval"), ("trl", "train,eval")):
        with pytest.raises(SystemExit), ends_in_a_sentence("looped"):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        top = module.partition(".")[0]
        assert capsys.readouterr().err == f"looped: {top} is missing: pip install 'modeling-looped[{extra}]'\n"


def test_a_sentence_is_one_line_and_its_trace_comes_when_asked_for(checkpoints):
    for variables, lines in (({}, 1), ({"LOOPED_TRACEBACK": "0"}, 1), ({"LOOPED_TRACEBACK": "1"}, None)):
        run = CliRunner(env=variables).invoke(app, ["flops", str(checkpoints / "looped"), "--recurrences", "4..1"])
        assert run.exit_code == 2 and run.stdout == ""
        assert run.stderr.splitlines()[-1].startswith("looped: In recurrences '4..1'")
        assert ("Traceback" in run.stderr) == (lines is None) and len(run.stderr.splitlines()) == (
            lines or len(run.stderr.splitlines())
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flops", "{empty}"], "config.json"),
        (["generate", "{folder}/looped", "x", "--recurrences", "-1"], "-1"),
        (["eval", "{folder}/looped", "{folder}/missing.jsonl"], "missing.jsonl"),
        (["eval", "{folder}/looped", "{folder}"], "is not a file"),
        (["demo", "{folder}/looped"], "is not a demo's"),
        (["grow", "{folder}/llama", "{folder}/looped"], "--overwrite"),
        (["grow", "{folder}/llama", "{folder}/new", "--operator", "midass"], "midass"),
        (["pretrain", "--config", "iso_dept", "--dry-run"], "did you mean 'iso_depth'?"),
        (["pretrain", "--config", "iso_depth"], "--output_dir is missing"),
        (["pretrain", "--config", "iso_depth", "--output_dir", "x", "--json"], "--json prints the figures of a --dry-run"),
        (["cooldown", "--config", "toy_cooldown", "--checkpoint", "{empty}", "--dry-run"], "holds no configuration"),
        (["sft", "--config", "toy_sft", "--checkpoint", "{folder}/missing", "--dry-run"], "missing"),
        (["sweep", "status", "{empty}"], "holds no sweep"),
        (["phi", "{folder}/text.jsonl"], "text.jsonl"),
        (["diagnose", "{folder}/llama", "{folder}/looped"], "--compare"),
        (["diagnose", "{folder}/llama", "--quick", "--full"], "exclude each other"),
        (["compare", "nothing"], "'nothing' is neither a file nor a bundled recipe"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_call_that_has_to_change_ends_with_two_and_one_line_on_stderr(checkpoints, tmp_path, arguments, words):
    run = looped(*(one.format(folder=checkpoints, empty=tmp_path) for one in arguments))
    assert run.exit_code == 2 and run.stdout == "", (run.output, run.exception)
    assert words in run.stderr and len(run.stderr.splitlines()) == 1, run.stderr
    assert not list(tmp_path.iterdir())


def test_options_that_are_not_there_end_with_two():
    for arguments in (
        ["flops"],
        ["flops", "a", "--frobnicate"],
        ["frobnicate"],
        ["eval", "a", "--batch-size", "0"],
        [],
    ):
        assert looped(*arguments).exit_code == 2


@pytest.mark.slow
def test_a_reader_who_has_had_enough_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m looped_cli advise --budget 1e21 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == ""


class _Hub(http.server.BaseHTTPRequestHandler):
    """A Hub that answers everything with one status."""

    def do_GET(self):
        self.send_response(self.server.status)
        if self.server.status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "status"), [(404, 2), (401, 2), (503, 1), (None, 1), ("offline", 2)])
def test_a_name_that_the_hub_does_not_know_is_the_call_s_fault_and_a_hub_that_fails_is_not(answer, status, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.status = answer
    where = f"http://127.0.0.1:{server.server_address[1]}"
    if isinstance(answer, int):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()  # nobody listens
    offline = "1" if answer == "offline" else "0"
    variables = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": where, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    run = process("flops", "nobody/none", **variables)
    if isinstance(answer, int):
        server.shutdown()
    assert run.returncode == status and "Traceback" not in run.stderr, (run.returncode, run.stderr)
    assert run.stderr.splitlines()[-1].startswith("looped: ") and run.stdout == ""


@pytest.mark.slow
def test_an_extra_that_is_missing_is_named_before_any_work():
    code = "import sys; sys.modules['scipy'] = None; import looped_cli; looped_cli.app(['phi', 'runs.csv'])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert (run.returncode, run.stderr) == (2, "looped: scipy is missing: pip install 'modeling-looped[scaling]'\n")


@pytest.mark.slow
def test_an_interrupted_command_ends_with_130(tmp_path):
    runs = ROOT / "tests" / "fixtures" / "iso_depth_runs.csv"
    command = [
        sys.executable,
        "-m",
        "looped_cli",
        "phi",
        str(runs),
        "--output",
        str(tmp_path / "out"),
        "--restarts",
        "100000",
    ]
    started = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(15)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    out, said = started.communicate(timeout=60)
    assert (started.returncode, out, said.splitlines()[-1]) == (130, "", "looped: interrupted.")


@pytest.mark.slow
def test_a_sweep_whose_runs_failed_ends_with_one_and_one_that_ran_out_of_time_with_zero(tmp_path):
    from test_runs import write_library
    from test_sweep import VALUES

    write_library(tmp_path)
    values = {**VALUES, "recurrences": [1], "cells": [{"budget": 1.2e9, "widths": [16]}]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(values))
    call = ("sweep", "run", "grid.yaml", "out", "--threads", "1")
    stopped = process(*call, "--limit-minutes", "0", cwd=tmp_path)
    assert stopped.returncode == 0 and "Not all runs are finished" in stopped.stdout, stopped.stderr
    failed = process(*call, "--launcher", "false", cwd=tmp_path)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
    assert failed.stderr == "looped: 1 failed, first baseline-1.2e+09-r1-d16: --retry runs them again.\n"
    (run,) = json.loads(process("sweep", "status", "out", "--json", cwd=tmp_path).stdout)["runs"]
    assert run["state"] == "failed" and run["number"] == 0
    done = process(*call, "--retry", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    status = json.loads(process("sweep", "status", "out", "--json", cwd=tmp_path).stdout)
    assert status["runs"][0]["state"] == "finished" and status["left_flops"] == 0
    table = process("sweep", "status", "out", cwd=tmp_path).stdout
    assert f"{status['runs'][0]['val_loss']:.4f} nats, {status['runs'][0]['seconds']} s" in table
    collected = process("sweep", "collect", "out", "--output", "runs.csv", "--json", cwd=tmp_path)
    assert json.loads(collected.stdout) == {"output": "runs.csv", "runs": 1}


# JSON


def test_json_has_no_nan_and_takes_what_measurements_are_made_of():
    @dataclass
    class Row:
        loss: float
        path: Path

    value = [Row(math.nan, Path("a")), {"x": np.float32(0.5), 2: (np.int64(3), math.inf, True, None)}]
    assert json.loads(to_json(value)) == [{"loss": None, "path": "a"}, {"x": 0.5, "2": [3, None, True, None]}]


WITH_JSON = {
    ("demo",), ("generate",), ("flops",), ("kv-cost",), ("exits",), ("loop",), ("grow",), ("loop-sweep",), ("compare",),
    ("eval",), ("eval-report",), ("contamination",), ("phi", "fit"), ("phi", "compare"), ("sweep", "status"),
    ("sweep", "collect"), ("advise",), ("diagnose",),
}  # fmt: skip


def test_every_command_that_prints_figures_takes_json():
    offering = {words for words, leaf in LEAVES.items() if any("--json" in one.opts for one in leaf.params)}
    assert WITH_JSON <= offering
    assert all("--json" in looped(name, "--help").output for name in SCRIPTS)


@pytest.mark.parametrize("name", ["looped-gpt-s10-r4", "recurrent-gpt-small-isoflops", "grown-llama-360m-loop-4x8"])
def test_flops_as_json_are_those_of_the_table(name):
    folder = ROOT / "configuration" / name
    figures, table = (
        json_of(looped("flops", folder, "--recurrences", "2,4", "--json")),
        looped("flops", folder, "--recurrences", "2,4").stdout,
    )
    for part, count in figures["parameters"].items():
        assert re.search(rf"{part} +{count:,}\n", table)
    lines = table.splitlines()
    for row in figures["rows"]:
        flops = row["iso_depth"]
        numbers = [row["num_recurrences"], row["executed_layers"], flops["forward_flops_per_token"],
                   flops["training_flops_per_token"], row["kv_cache_bytes"]]  # fmt: skip
        assert [f"{number:,}" for number in numbers] in [line.split() for line in lines]
        if growing := row.get("growing"):
            numbers = [row["num_recurrences"], row["executed_layers"], *growing.values()]
            assert [f"{number:,}" for number in numbers] in [line.split() for line in lines]
        if against := row.get("recurrent_gpt"):
            dense, blocks, injection, ratio, training = against.values()
            numbers = [f"{one / 1e9:.4f}" for one in (dense, blocks, injection)] + [
                f"{one:.3f}" for one in (ratio, training)
            ]
            assert [str(row["num_recurrences"]), *numbers] in [line.split() for line in lines]
    assert ("recurrent_gpt" in figures["rows"][0]) == (name.startswith("recurrent"))
    assert ("growing" in figures["rows"][0]) == (name.startswith("grown"))


def test_kv_cost_as_json_is_the_table_with_what_was_refused(checkpoints):
    call = [
        "kv-cost",
        checkpoints / "looped",
        checkpoints / "text.jsonl",
        "--strategies",
        "last,1",
        "--prompt-length",
        "20",
    ]
    call += ["--continuation", "5", "--rows", "2"]
    costs, table = json_of(looped(*call, "--json")), looped(*call).stdout
    assert [row["strategy"] for row in costs] == ["all", "last", 1]
    for row, line in zip(costs, table.splitlines()[1:], strict=True):
        assert line.split()[:2] == [str(row["strategy"]), f"{row['nats_per_token']:.4f}"]


def test_eval_and_exits_as_json_are_their_tables(checkpoints):
    at = [checkpoints / "looped", checkpoints / "text.jsonl", "--sequence-length", "16", "--max-tokens", "100"]
    rows, table = (
        json_of(looped("eval", *at, "--recurrences", "1..3", "--json")),
        looped("eval", *at, "--recurrences", "1..3").stdout,
    )
    for row, line in zip(rows, table.splitlines()[2:], strict=True):
        assert line.split() == [
            str(row["num_recurrences"]),
            f"{row['nats_per_token']:.4f}",
            f"{row['bits_per_byte']:.4f}",
        ]
    points, table = json_of(looped("exits", *at, "--json")), looped("exits", *at).stdout
    assert points[0]["gain"] is None and all(f"{point['loss']:.4f}" in table for point in points)


def test_generated_text_as_json_has_its_settings(checkpoints):
    call = ["generate", checkpoints / "looped", "line 1", "--max-new-tokens", "5", "--recurrences", "2"]
    found = json_of(looped(*call, "--json"))
    assert found["text"] + "\n" == looped(*call).stdout
    assert found["num_recurrences"] == 2 and found["new_tokens"] == 5 and found["prompt"] == "line 1"
    assert json_of(looped(*call[:-2], "--json"))["num_recurrences"] == 3  # the checkpoint's


def test_loop_and_grow_as_json_say_before_and_after(checkpoints, tmp_path):
    call = ["loop", checkpoints / "llama", tmp_path / "out", "--start", "1", "--stop", "3"]
    planned, words = json_of(looped(*call, "--dry-run", "--json")), looped(*call, "--dry-run").stdout
    assert planned["written"] is None and not (tmp_path / "out").exists()
    assert (planned["before"]["executed_layers"], planned["after"]["executed_layers"]) == (4, 6)
    assert planned["before"]["parameters"] == planned["after"]["parameters"]
    for of in (planned["before"], planned["after"]):
        assert f"{of['plan']}, {of['stored_layers']} stored layers, {of['executed_layers']} executed" in words
    assert json_of(looped(*call, "--json")) == {**planned, "written": str(tmp_path / "out")}
    grown = json_of(looped("grow", checkpoints / "llama", tmp_path / "x", "--block-size", "2", "--dry-run", "--json"))
    assert grown["after"]["stored_layers"] == 6 and grown["after"]["parameters"] > grown["before"]["parameters"]


def test_a_loop_sweep_as_json_is_its_table_and_progress_goes_elsewhere(checkpoints, tmp_path):
    call = ["loop-sweep", checkpoints / "llama", checkpoints / "text.jsonl", "--length", "2", "--repeats", "1"]
    call += ["--sequence-length", "16", "--max-tokens", "60", "--results", tmp_path / "rows.csv"]
    run = looped(*call, "--json")
    found = json_of(run)
    assert (
        "no loop: " in run.stderr and Path(found["figure"]).is_file() and found["results"] == str(tmp_path / "rows.csv")
    )
    assert [(row["start"], row["stop"], row["repeats"]) for row in found["rows"]] == [
        (None, None, 0), (0, 2, 1), (1, 3, 1), (2, 4, 1),
    ]  # fmt: skip
    table = looped(*call).stdout.splitlines()[1:]
    assert table[0].split()[-1] == f"{found['rows'][0]['values']['nats_per_token']:.4f}"
    for row, line in zip(found["rows"][1:], table[1:], strict=True):
        assert line.split()[-1] == f"{row['changes']['nats_per_token']:+.4f}"


def test_an_eval_report_as_json_has_the_cells_of_its_tables(tmp_path):
    from test_eval_report import losses, write_run

    for number, shift in ((1, 0), (2, 0.5)):
        write_run(tmp_path / "results", {"one": losses(1, 20, shift=shift)}, number=number, num_recurrences=number)
    found = json_of(looped("eval-report", tmp_path / "results", "--output", tmp_path / "out", "--json"))
    text = Path(found["report"]).read_text()
    measured = [row for row in found["rows"] if row["value"] is not None]
    assert {row["run"] for row in measured} == {"tiny r=1", "tiny r=2"} and found["reference"] == "tiny r=1"
    for row in measured:
        assert f"{row['value']:.3f} ± {row['error']:.3f}" in text
        assert (row["p"] is None) == (row["run"] == "tiny r=1")


def test_a_dry_run_as_json_has_the_figures_of_its_text():
    call = ["pretrain", "--config", "iso_depth", "--size", "10", "--budget_flops", "1e18", "--dry-run"]
    facts, text = json_of(looped(*call, "--json")), looped(*call).stdout
    assert facts["plan"] == "Loop(2-4x4-2)" and facts["steps"] == 3642 and facts["parameters"] == 81_194_880
    for part in (
        f"{facts['steps']:,}",
        f"{facts['tokens']:,}",
        f"{facts['flops']:.6g}",
        f"{facts['parameters']:,} stored",
    ):
        assert part in text
    assert facts["data"] == {"fineweb-edu": 1.0}
    assert json_of(looped("pack", "--config", "iso_depth", "--toy", "--dry-run", "--json"))["sources"] == ["library"]


@pytest.mark.slow
def test_contamination_as_json_is_its_table(tmp_path):
    from test_eval_cli import ITEMS

    (tmp_path / "bigbench_qa_wikidata.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (tmp_path / "text.txt").write_text(f"Before. {ITEMS[2]['context'].upper()}, rain fell, and after.")
    call = ["contamination", tmp_path / "text.txt", "--tasks", "looped_bigbench_qa_wikidata", "--data-dir", tmp_path]
    (row,) = json_of(looped(*call, "--json"))
    assert row["items"] == 4 and len(row["touched"]) == row["items_touched"] == 1 and row["share_of_items"] == 0.25
    assert "| looped_bigbench_qa_wikidata | 4 | 0 | 13 | 1 | 25.0% |" in looped(*call).stdout


@pytest.mark.slow
def test_a_study_as_json_is_its_tables_and_progress_goes_elsewhere(tmp_path):
    from test_growing_study import write

    recipe = write(tmp_path)
    run = looped("compare", recipe, tmp_path / "output", "--systems", "dense,looped", "--json")
    found, table = json_of(run), looped("compare", recipe, "--plot-only").stdout
    assert found["finished"] and "nats/token in" in run.stderr
    assert [row["system"] for row in found["rows"]] == ["dense", "looped"]
    for row in found["rows"]:
        assert (
            f"| {row['system']} | {row['unique_layers']} / {row['executed_layers']} | {row['parameters']:,} |" in table
        )
        assert f"| {row['nats_per_token']:.3f} |" in table
    for row in found["repeats"]:
        assert f"| {row['system']} | +{row['repeats']} | {row['best']:+.4f} ({row['best_start']}) |" in table


@pytest.mark.slow
def test_a_demo_as_json_is_its_metrics_and_progress_goes_elsewhere(tmp_path):
    run = process("demo", "out", "--quick", "--steps", "4", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["finished"] and found["metrics"] == json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(found["metrics"]["validation"]) == 8 and "recurrences  nats/token" in run.stderr


@pytest.mark.slow
def test_a_diagnosis_as_json_names_page_headlines_and_what_does_not_apply(checkpoints, tmp_path):
    only = ["--only", "exits", "--only", "gates", "--only", "lens"]
    found = json_of(looped("diagnose", checkpoints / "looped", "--quick", *only, "--out", tmp_path / "page", "--json"))
    page = Path(found["page"]).read_text()
    rows = {row["measurement"]: row for row in found["measurements"]}
    assert list(rows) == ["lens", "exits", "gates"] and rows["gates"]["not_measured"] == "no gate"
    for name in ("lens", "exits"):
        assert (
            rows[name]["headline"] in page.replace("&#39;", "'") and (tmp_path / "page" / rows[name]["csv"]).is_file()
        )


# Completion


# Commands start by a fork of a process that has imported what the command imports, and no more.
SERVER = """
import json, os, sys, tempfile
import looped_cli
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            os.environ.update(json.loads(line))
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            try:
                looped_cli.main()
            except SystemExit as end:
                status = end.code or 0
            for library in ("torch", "transformers", "yaml"):
                if library in sys.modules:
                    print(f"imported {library}")
            sys.stdout.flush()
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        out.seek(0)
        print(json.dumps([status, out.read()]), flush=True)
"""


@pytest.fixture(scope="module")
def completed():
    """`completed(line, shell)` is what the command offers at the end of `line`, in the protocol of a shell."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(line: str, shell: str = "bash") -> list[str]:
        variables = {"_LOOPED_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
        variables |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        variables |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        server.stdin.write(json.dumps(variables) + "\n")
        server.stdin.flush()
        status, text = json.loads(server.stdout.readline())
        assert status == 0, text
        return text.split("\n")[:-1]

    yield ask
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("looped ge", ["generate"]),
        ("looped sweep ", ["run", "status", "collect"]),
        ("looped exits model text.txt --max", ["--max-recurrences", "--max-tokens"]),
        ("looped phi runs.csv --res", ["--restarts", "--resamples"]),
        ("looped demo out --size ", ["tiny", "small", "medium", "large"]),
        ("looped grow in out --operator ", ["midas", "lidas"]),
        ("looped compare ", ["compare_depth_reuse", "grow_toy"]),
        ("looped sweep run ", ["phi_sweep"]),
        ("looped pretrain --config iso", ["iso_depth", "iso_depth_hyperconnection", "iso_depth_truncated"]),
        ("looped pretrain --toy --resume ", ["auto"]),
        ("looped cooldown --config iso_depth --keep_", ["--keep_last", "--keep_optimizers"]),
    ],
)
def test_bash_is_offered_commands_options_and_known_values_without_torch(line, offered, completed):
    assert completed(line) == offered


def test_contents_complete_in_their_order(completed):
    assert completed("looped ") == [name for lines in CONTENTS.values() for name in lines]


def test_zsh_and_fish_are_offered_a_line_of_help_too(completed):
    (line,) = completed("looped ge", "zsh")
    assert line == f"""_arguments '*: :(("generate":"{CONTENTS["Start"]["generate"]}"))'"""
    for at in ("looped ge", "looped pretrain --g", "looped convert grt a b --", "looped convert "):
        lines = completed(at, "fish")
        assert lines and all(re.fullmatch(r"[\w-]+(\t.+)?", line) for line in lines), lines


def test_the_script_that_is_installed_completes_in_bash():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, "-c", "import looped_cli; looped_cli.main()"]
    environment = {**os.environ, "_LOOPED_COMPLETE": "source_bash"}
    script = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=True).stdout
    ask = f"{script}\nCOMP_WORDS=(looped flops x --re); COMP_CWORD=3; _looped_completion looped; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], env={**os.environ, "PATH": path}, text=True, capture_output=True)
    assert done.stdout.split() == ["--recurrences"], done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_read_from_the_source_are_those_of_the_parser(name):
    shown = looped(name, "--help").output
    assert set(script_options(name)) == set(re.findall(r"^  (--\w[\w-]*)", shown, re.MULTILINE)) | {"--help"}


def test_every_bundled_recipe_completes_where_it_can_be_used():
    everything = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    of = {name: set(bundled_recipes(name)) for name in (*SCRIPTS, "compare", "sweep")}
    assert set().union(*of.values()) == everything and of["pack"] == of["pretrain"] | of["cooldown"]
    assert not of["pretrain"] & of["cooldown"] and not of["sft"] & of["pack"]


def test_known_values_are_those_that_commands_take(completed):
    from modeling_looped.growth import OPERATORS
    from modeling_looped.recipes.demo import SIZES
    from modeling_looped.scaling.fit import COUNTS

    assert completed("looped demo out --size ") == list(SIZES)
    assert completed("looped grow in out --operator ") == list(OPERATORS)
    assert completed("looped phi fit runs.csv --decomposition ") == list(COUNTS)
    tasks = completed("looped contamination text.txt --tasks ")
    assert len(tasks) == len(set(tasks)) == len(list((ROOT / "eval" / "tasks").glob("*/[!_]*.yaml")))
    assert {"looped_addition_2", "looped_axis_reasoning_primitives", "looped_five_axes", "looped_arc_easy"} <= {*tasks}
