"""`looped loop`, `unroll` and `grow`: a checkpoint in, a checkpoint of another depth out, and nothing lost on the way."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import randomise, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
from modeling_looped.looping import load
from modeling_looped.recipes.tokens import train_tokenizer


SIZE = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
IDS = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def llama(tmp_path):
    model = randomise(LlamaForCausalLM(LlamaConfig(**SIZE, num_hidden_layers=6)), std=0.15).eval()
    model.save_pretrained(tmp_path / "llama")
    train_tokenizer(["a few words to cut into pieces " * 9], 280).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.fixture
def grown(tmp_path):
    config = GrownLlamaConfig(**SIZE, depth_plan="Loop(1-2x3-1)")
    randomise(GrownLlamaForCausalLM(config), std=0.15).eval().save_pretrained(tmp_path / "grown_llama")
    return str(tmp_path / "grown_llama")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2 and "Traceback" not in result.output
    return " ".join(result.output.split())


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_a_looped_llama_says_its_loop_in_its_configuration_and_generates_with_it(llama, tmp_path):
    output = str(tmp_path / "looped")
    told = run("loop", llama, output, "--start", "1", "--stop", "3", "--repeats", "2")
    assert "6x1" in told and "Loop(1-2x3-3)" in told and "10 executed" in told
    config = json.loads((tmp_path / "looped" / "config.json").read_text())
    assert config["looped_layers"] == [[1, 3, 2]] and config["num_hidden_layers"] == 6
    weights = load_file(tmp_path / "looped" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_file(f"{llama}/model.safetensors").items())
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(output)), logits(LlamaForCausalLM.from_pretrained(llama))
    )
    assert not torch.equal(logits(load(output)), logits(load(llama)))
    assert run("generate", output, "a few", "--max-new-tokens", "8") != run(
        "generate", llama, "a few", "--max-new-tokens", "8"
    )


def test_a_looped_grown_llama_says_its_loop_in_its_plan(grown, tmp_path):
    output = str(tmp_path / "looped")
    run("loop", grown, output, "--start", "1", "--stop", "3", "--repeats", "2")
    config = json.loads((tmp_path / "looped" / "config.json").read_text())
    assert config["depth_plan"] == "Loop(1-2x5-1)" and config["trained_recurrences"] == 3
    deeper = GrownLlamaForCausalLM.from_pretrained(grown, num_recurrences=5)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(output)), logits(deeper))


UNROLLED = """
import sys, torch
sys.modules["modeling_looped"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert type(model).__module__ == "transformers.models.llama.modeling_llama"
torch.save(model(torch.load(sys.argv[2])).logits.detach(), sys.argv[3])
"""


@pytest.mark.parametrize("recurrences", [None, 5])
def test_an_unrolled_checkpoint_is_a_llama_with_the_same_logits_without_this_package(grown, tmp_path, recurrences):
    output, more = str(tmp_path / "plain"), [] if recurrences is None else ["--recurrences", str(recurrences)]
    told = run("unroll", grown, output, *more)
    executed = 2 + 2 * (recurrences or 3)
    assert f"LlamaForCausalLM {executed}x1" in told
    torch.save(IDS, tmp_path / "ids.pt")
    files = [output, str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    subprocess.run([sys.executable, "-c", UNROLLED, *files], check=True, cwd=tmp_path)
    expected = logits(
        GrownLlamaForCausalLM.from_pretrained(grown, **({} if recurrences is None else {"num_recurrences": 5}))
    )
    assert torch.equal(torch.load(files[2]), expected)


def test_a_looped_checkpoint_unrolls_to_its_own_class_with_its_tokenizer(llama, tmp_path):
    looped, plain = str(tmp_path / "looped"), str(tmp_path / "plain")
    run("loop", llama, looped, "--start", "2", "--stop", "5")
    run("unroll", looped, plain)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(plain)), logits(load(looped)))
    assert "looped_layers" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert run("generate", plain, "a few") == run("generate", looped, "a few")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["loop", "--start", "1", "--stop", "3"], "Loop(1-2x2-3), 6 stored layers, 8 executed"),
        (["unroll"], "6x1, 6 stored layers, 6 executed"),
        (["grow", "--block-size", "3", "--layers", "12"], "12x1, 12 stored layers, 12 executed"),
    ],
)
def test_a_dry_run_says_what_would_come_out_and_writes_nothing(llama, tmp_path, command, told):
    before = sorted(tmp_path.rglob("*"))
    output = run(command[0], llama, str(tmp_path / "output"), *command[1:], "--dry-run")
    assert told in output and "Nothing was written" in output
    assert sorted(tmp_path.rglob("*")) == before
    if command[0] == "grow":
        run(command[0], llama, str(tmp_path / "output"), *command[1:])
        written = sum(tensor.numel() for tensor in load_file(tmp_path / "output" / "model.safetensors").values())
        assert f"{written:,} parameters" in output


def test_bad_requests_end_in_one_sentence(llama, tmp_path):
    output = str(tmp_path / "output")
    assert "6x1 does not run the layers 1 to 8" in refused("loop", llama, output, "--start", "1", "--stop", "9")
    assert "num_recurrences=3: LlamaForCausalLM has no looped block" in refused(
        "unroll", llama, output, "--recurrences", "3"
    )
    assert "num_layers=6 must be a multiple of block_size=4" in refused("grow", llama, output)
    assert "operator='both' must be one of midas, lidas" in refused(
        "grow", llama, output, "--operator", "both", "--block-size", "3"
    )
    tiny_model().save_pretrained(tmp_path / "looped_gpt")
    assert "does more between its passes" in refused("unroll", str(tmp_path / "looped_gpt"), output)
    assert not (tmp_path / "output").exists()


def test_unrolling_explains_every_tensor_and_compares_what_it_wrote(grown, tmp_path):
    told = run("unroll", grown, str(tmp_path / "plain"), "--json")
    ledger = json.loads(told)
    stored = {name: tuple(p.shape) for name, p in GrownLlamaForCausalLM.from_pretrained(grown).named_parameters()}
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert {use["source"]: tuple(use["shape"]) for use in ledger["used"]} == stored
    assert sorted(target for use in ledger["used"] for target in use["targets"]) == sorted(written)
    copied = next(use for use in ledger["used"] if use["source"] == "model.layers.1.mlp.up_proj.weight")
    assert copied["targets"] == [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (1, 3, 5)]
    (comparison,) = ledger["comparisons"]
    assert comparison["max_difference"] == 0 and comparison["what"].startswith(
        "GrownLlamaForCausalLM against the Llama"
    )
    assert ledger["parameters"]["total"] == sum(tensor.numel() for tensor in written.values())
    assert "copied to layers 3, 5" in run("unroll", grown, str(tmp_path / "other"))


def test_an_unrolled_checkpoint_that_differs_is_taken_away_again(grown, tmp_path, monkeypatch):
    save_pretrained = LlamaForCausalLM.save_pretrained

    def save_without_a_copy(self, folder, **kwargs):
        torch.nn.init.zeros_(self.model.layers[3].mlp.up_proj.weight)
        save_pretrained(self, folder, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_without_a_copy)
    # The model in memory is not the one that is written: its loop still has the weights.
    result = CliRunner().invoke(app, ["unroll", grown, str(tmp_path / "plain")])
    assert result.exit_code == 1 and "differs from its source" in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["grown_llama"]


def test_a_failure_while_growing_leaves_the_old_checkpoint(llama, tmp_path, monkeypatch):
    output = tmp_path / "output"
    run("grow", llama, str(output), "--block-size", "3")
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def full_disk(self, folder, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full_disk)
    result = CliRunner().invoke(app, ["grow", llama, str(output), "--block-size", "2", "--overwrite"])
    assert result.exit_code != 0 and {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "output"]
