"""transformers' own `ModelTesterMixin`, from the sdist of the installed version, on the families and native Llama."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers


pytestmark = pytest.mark.upstream

SUITE = Path(__file__).parent / "upstream" / "model_suite.py"
# By the start of their class names, as in the suite.
FAMILIES = ("LoopedGPT", "RecurrentGPT", "MixtureOfRecursions", "GrownLlama")

# What the tests import and the sdist leaves out. Without its mixin, generation is tested here in test_generation.py.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = {\n"
        '    "return_dict": False, "output_hidden_states": True, "dtype": "float16",\n'
        '    "chunk_size_feed_forward": 5, "architectures": ["BertModel"], "id2label": {0: "label"},\n'
        '    "label2id": {"label": "0"}, "problem_type": "regression",\n'
        "}\n"
    ),
}

# Failures that say nothing about a family here. Any other must also be a failure of native Llama.
ALLOWED_FAILURES = {
    "test_num_layers_is_small": "policy on test sizes: at most 2 layers, and prelude, core, core, coda are 4",
    "test_generation_tester_mixin_inheritance": "wants GenerationTesterMixin, which the sdist lacks; Llama fails too",
}

# Reasons for which a test may be skipped. Whatever Llama runs, the families run too.
ALLOWED_SKIPS = {
    r"test requires ((multiple )?accelerators?|MPS|deepspeed|Flash Attention( \d)?|the kernels library)": (
        "hardware or a library that this machine lacks; tests/gpu/check.sh is for one with a GPU"
    ),
    r"test is slow": "the suite's own slow tests, off by default",
    r"Not a prioritized model for now": "the suite runs it on a list of its own model types",
    r"not (a )?composite|No subconfigs|does not support (SDPA|grouped_mm)|sparse experts|output_router_logits": (
        "for models of several sub-models, and for mixtures of experts (these two say SDPA and grouped_mm)"
    ),
    r"No sequence-to-sequence language modeling head|does not have position embeddings|partial rope|axial RoPE": (
        "a part that neither Llama nor a family here has"
    ),
    r"does not support sliding window mask|Model does not support output_attentions": (
        "the attention kinds compared here are eager and sdpa over the whole context"
    ),
    r"Not returning cache or non standard Cache": "token classification and question answering return no cache",
    r"No conversion found": "the checkpoint has the model's own names, so there is no key mapping to test",
    r"_keep_in_fp32_modules_strict": "the injection is kept in fp32 in fp16 models only, which the plain list does",
}

# And in one family.
NO_ROPE = r"This model does not (support RoPE scaling|have RoPE)"
OWN_SKIPS = {"RecurrentGPT": NO_ROPE, "MixtureOfRecursions": NO_ROPE}  # their positions are learned


@pytest.fixture(scope="module")
def sdist(pytestconfig: pytest.Config) -> Path:
    """The sdist of the installed transformers, kept in pytest's cache directory."""
    folder = Path(pytestconfig.cache.mkdir("transformers-sdist"))
    archive = folder / f"transformers-{transformers.__version__}.tar.gz"
    if not archive.is_file():
        requirement = f"transformers=={transformers.__version__}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-binary", "transformers", "--no-deps"]
        download = subprocess.run([*command, requirement, "-d", folder], capture_output=True, text=True)
        if download.returncode or not archive.is_file():
            reason = (download.stderr.strip().splitlines() or ["no file"])[-1]
            pytest.skip(f"the sdist of {requirement} cannot be downloaded: {reason}")
    return archive


@pytest.fixture(scope="module")
def harness(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist's `tests` package, the stubs, and our suite among them."""
    pytest.importorskip("parameterized", reason="transformers' tests need it: pip install 'modeling-looped[test]'")
    root = tmp_path_factory.mktemp("upstream")
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if re.fullmatch(r"[^/]+/tests/test_\w+\.py", m.name)]
        archive.extractall(root, members=members, filter="data")
    shutil.move(root / f"transformers-{transformers.__version__}" / "tests", root / "tests")
    for name, text in STUBS.items():
        stub = root / "tests" / name
        stub.parent.mkdir(exist_ok=True)
        (stub.parent / "__init__.py").touch()
        stub.write_text(text)
    (root / "tests" / "__init__.py").touch()
    (root / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(SUITE, root / "tests")
    return root


def run_suite(root: Path, family: str) -> dict[str, dict[str, list[str]]]:
    """The outcomes of one class in a process of its own, on one thread: the models are tiny."""
    test_class = f"{family}Test"
    command = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={test_class}.xml"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.run(
        [sys.executable, *command, f"tests/{SUITE.name}::{test_class}"],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    report = root / f"{test_class}.xml"
    assert process.returncode in (0, 1) and report.is_file(), process.stdout[-3000:]  # 1: some test failed
    return outcomes(report, family)


@pytest.fixture(scope="module")
def results(harness: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """The outcomes of Llama and of every family, two of them at a time."""
    with ThreadPoolExecutor(2) as pool:
        runs = {family: pool.submit(run_suite, harness, family) for family in ("Llama", *FAMILIES)}
    return {family: run.result() for family, run in runs.items()}


def outcomes(report: Path, family: str) -> dict[str, dict[str, list[str]]]:
    """Of each test, the messages of its failures and skips, subtests included; both are empty where all passed."""
    result = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = {"failed": [], "skipped": []}
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                message = re.sub(rf"<class '[\w.]*\.{family}|{family}", "Family", child.get("message") or "")
                found["skipped" if child.tag == "skipped" else "failed"].append(message)
        result[case.get("name")] = found
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_tests_pass_on_every_family_as_on_llama(results, family: str, capsys: pytest.CaptureFixture):
    llama, looped = results["Llama"], results[family]
    for name in ("Llama", family):
        failed = sorted(test for test, found in results[name].items() if found["failed"])
        skipped = sum(bool(found["skipped"]) for found in results[name].values())
        with capsys.disabled():
            print(
                f"\ntransformers {transformers.__version__} on {name}: {len(results[name])} tests, {skipped} of them "
                f"skipped for all or some heads, failed: {', '.join(failed) or 'none'}",
                end="",
            )
    # 161 at 5.24.0. Far fewer would mean that the suite did not run.
    assert llama.keys() == looped.keys() and len(looped) > 150
    failures = {
        name: found["failed"]
        for name, found in looped.items()
        if found["failed"] and not llama[name]["failed"] and name not in ALLOWED_FAILURES
    }
    assert not failures, failures
    skips = {
        name: reason
        for name, found in looped.items()
        for reason in found["skipped"]
        if reason not in llama[name]["skipped"] or not any(re.search(known, reason) for known in ALLOWED_SKIPS)
        if not re.fullmatch(OWN_SKIPS.get(family, ""), reason)
    }
    assert not skips, f"skipped for a reason that Llama does not have, or that is not in ALLOWED_SKIPS: {skips}"
