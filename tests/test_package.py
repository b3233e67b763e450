"""What a pip user gets: every room in the wheel, one import name, quick imports, and one clear error on old libraries."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("configuration", "eval", "hub_cards", "recipes")  # the package in the repository, and inside when installed
ROOMS = (*BESIDE, "conversion", "scaling")


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, text=True, capture_output=True, timeout=600, **kwargs)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    source, target = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", "demo-output")
    shutil.copytree(ROOT, source, ignore=ignore)
    built = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(target), str(source))
    if built.returncode and "No matching distribution" in built.stderr + built.stdout:
        pytest.skip("building a wheel needs setuptools from the package index, which is out of reach")
    assert built.returncode == 0, built.stderr
    return next(target.glob("*.whl"))


def test_the_wheel_holds_every_room_under_the_one_import_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"modeling_looped", "looped_cli.py"}
    for room in ROOMS:
        assert f"modeling_looped/{room}/__init__.py" in names
    tracked = run("git", "-C", str(ROOT), "ls-files", *BESIDE, "modeling_looped").stdout.split()
    for path in tracked:
        inside = path if path.startswith("modeling_looped/") else f"modeling_looped/{path}"
        assert inside in names, f"{path} is not in the wheel"


def test_a_clean_environment_imports_all_of_the_wheel(wheel, tmp_path):
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel), check=True)
    # Its dependencies come from this environment by PYTHONPATH, which processes no .pth files: the editable install
    # of the checkout is not importable through it, the wheel alone is.
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    modules = ["modeling_looped", "looped_cli", *(f"modeling_looped.{room}" for room in ROOMS)]
    modules += ["modeling_looped.conversion.iso_depth", "modeling_looped.eval.held_out", "modeling_looped.recipes.demo"]
    code = f"import {', '.join(modules)}; print(modeling_looped.__file__)"
    imported = run(python, "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": libraries})
    assert imported.returncode == 0, imported.stderr
    assert str(tmp_path) in imported.stdout
    helped = run(str(tmp_path / "venv" / "bin" / "looped"), "--help", env={**os.environ, "PYTHONPATH": libraries})
    assert helped.returncode == 0 and "generate" in helped.stdout


def test_importing_the_package_adds_less_than_a_third_of_a_second_to_transformers():
    code = (
        "import time; from transformers import AutoModelForCausalLM, PreTrainedModel\n"
        "began = time.process_time(); import modeling_looped; print(time.process_time() - began)"
    )
    seconds = min(float(run(sys.executable, "-c", code, check=True).stdout) for _ in range(3))
    assert seconds < 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["convert", "iso-depth", "--help"], ["--version"]])
def test_help_imports_no_torch(arguments):
    code = (
        f"import sys, looped_cli; sys.argv = ['looped', *{arguments!r}]\n"
        "try:\n    looped_cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    shown = run(sys.executable, "-c", code)
    assert shown.returncode == 0, shown.stderr


def test_an_older_transformers_is_refused_in_one_sentence():
    code = (
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '5.23.0' if name == 'transformers' else real(name)\n"
        "import modeling_looped"
    )
    refused = run(sys.executable, "-c", code)
    assert refused.returncode != 0
    last = refused.stderr.strip().splitlines()[-2:]
    assert "transformers>=5.24,<6" in last[0] and "5.23.0" in last[0] and "pip install" in last[1]


@pytest.mark.slow
@pytest.mark.parametrize("release", ["5.23.0"])  # 4.x, fetched alone, already refuses this tokenizers release itself
def test_a_really_older_transformers_is_refused_in_one_sentence(release, tmp_path):
    fetched = run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", str(tmp_path), f"transformers=={release}")
    if fetched.returncode:
        pytest.skip(f"transformers {release} cannot be fetched here")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    refused = run(sys.executable, "-c", "import modeling_looped", env=environment, cwd=tmp_path)
    assert "transformers>=5.24,<6 is required" in refused.stderr and release in refused.stderr, refused.stderr


def test_the_command_ends_in_a_sentence_and_status_two():
    for arguments in (
        ["demo", str(ROOT)],
        ["demo", "somewhere", "--size", "huge"],
        ["demo", "somewhere", "--data", "missing.jsonl"],
        ["flops", "configuration/looped-gpt-s10-r4", "--recurrences", "4..1"],
    ):
        refused = run(sys.executable, "-m", "looped_cli", *arguments, cwd=ROOT)
        assert refused.returncode == 2, (arguments, refused.stderr)
        assert refused.stderr.splitlines()[-1].startswith("looped: "), refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (ROOT / "somewhere").exists()


def test_flops_prints_the_paper_s_integers():
    shown = run(sys.executable, "-m", "looped_cli", "flops", "configuration/looped-gpt-s10-r4", cwd=ROOT)
    for number in ("81,194,880", "40,152,960", "1,047,336,960"):
        assert number in shown.stdout, shown.stderr
