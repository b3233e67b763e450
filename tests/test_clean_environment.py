"""
What a newcomer's machine does: a new virtual environment with the wheel and what pip fetches for it, and another that has
never heard of this package. Minutes each, most of them pip's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_package import ROOT, wheel  # noqa: F401  the fixture


pytestmark = pytest.mark.slow
FAMILIES = ("looped_gpt", "recurrent_gpt", "mixture_of_recursions", "grown_llama")

FIRST_HOUR = """
import json, sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import modeling_looped
from modeling_looped.eval.run import main as evaluate
from modeling_looped.hub_cards.card import add_results, write_card
from modeling_looped.recipes.corpus import split_by_name, standard_library
from modeling_looped.recipes.tokens import train_tokenizer

assert ".venv" in modeling_looped.__file__, modeling_looped.__file__
torch.manual_seed(0)
train, held_out = split_by_name(standard_library())
tokenizer = train_tokenizer(train[:40], 512)
shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256,
         "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
own = {"num_prelude_layers": 1, "num_core_layers": 1, "num_coda_layers": 1, "num_recurrences": 3}
found = {}
for family in sys.argv[1:]:
    depth = {"depth_plan": "Loop(1-1x3-1)", "intermediate_size": 128} if family == "grown_llama" else own
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **depth)).eval()
    made.save_pretrained(family)
    tokenizer.save_pretrained(family)

    model = AutoModelForCausalLM.from_pretrained(family)
    inputs = AutoTokenizer.from_pretrained(family)(["def main():", "import"], return_tensors="pt", padding=True)
    texts = {}
    for count in (1, 3):
        texts[count] = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_recurrences=count).tolist()

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=r".*(q_proj|v_proj)"))
    optimizer = torch.optim.AdamW((one for one in adapted.parameters() if one.requires_grad), lr=1e-2)
    ids = tokenizer(held_out[:4], return_tensors="pt", padding=True, truncation=True, max_length=64)["input_ids"]
    losses = []
    for step in range(2):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    evaluate(["--model_args", f"pretrained={family}", "--tasks", "looped_induction_head", "--limit", "20",
              "--batch_size", "10", "--recurrences", "1,3", "--output_path", f"results-{family}"])
    add_results(family, f"results-{family}")
    found[family] = {"texts": texts, "losses": losses, "card": write_card(family, license="apache-2.0").read_text()}
print(json.dumps(found))
"""

STRANGER = """
import importlib.util, json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

assert importlib.util.find_spec("modeling_looped") is None
found = {}
for family in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(family, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(family, trust_remote_code=True)
    inputs = tokenizer(["def main():", "import"], return_tensors="pt", padding=True)
    found[family] = {
        count: model.generate(**inputs, max_new_tokens=12, do_sample=False, num_recurrences=count).tolist() for count in (1, 3)
    }
print(json.dumps(found))
"""


def environment_with(folder: Path, *packages: str) -> Path:
    """The Python of a new virtual environment with `packages` at the tested versions."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=1200)
    if done.returncode and "No matching distribution" in done.stderr and "NewConnectionError" in done.stderr:
        pytest.skip("the package index is out of reach")
    assert done.returncode == 0, done.stderr[-2000:]
    return python


def run(python: Path, code: str, cwd: Path) -> dict:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HOME")}
    clean = {**kept, "HF_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-I", "-c", code, *FAMILIES]
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, env=clean
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first_hour(wheel, tmp_path_factory) -> tuple[Path, dict]:  # noqa: F811
    folder = tmp_path_factory.mktemp("newcomer")
    python = environment_with(folder / ".venv", f"{wheel}[train,eval,peft]")
    return folder, run(python, FIRST_HOUR, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_wheel_alone_loads_writes_adapts_evaluates_and_describes_a_model(family, first_hour):
    folder, found = first_hour
    here = found[family]
    assert here["losses"][1] < here["losses"][0], "a step of LoRA"
    assert {len(row) for row in here["texts"]["1"]} == {len(here["texts"]["1"][0])}
    results = [json.loads(path.read_text()) for path in sorted((folder / family / "evaluation").glob("results_*.json"))]
    assert [one["n-samples"]["looped_induction_head"]["effective"] for one in results] == [20, 20]
    for one in results:
        loss = one["results"]["looped_induction_head"]["continuation_loss,none"]
        assert f"| {one['config']['num_recurrences']} | {loss:.3f} ± " in here["card"]


def test_a_machine_without_the_package_loads_and_writes_the_same(first_hour, tmp_path_factory):
    folder, found = first_hour
    python = environment_with(tmp_path_factory.mktemp("stranger") / "venv", "torch", "transformers")
    assert run(python, STRANGER, folder) == {family: found[family]["texts"] for family in FAMILIES}
