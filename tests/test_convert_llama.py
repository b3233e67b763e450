"""Llama checkpoints as GrownLlama with a plan: the same function at one pass, every tensor explained, or a refusal."""

import json
from pathlib import Path

import pytest
import torch
from conftest import randomise, tiny_grown_llama
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import GrownLlamaForCausalLM
from modeling_looped.accounting import parameter_counts
from modeling_looped.conversion import ConversionError
from modeling_looped.conversion.llama import convert_llama
from modeling_looped.recipes.tokens import train_tokenizer


SIZE = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.randint(280, (2, 20), generator=torch.Generator().manual_seed(1))
LLAMAS = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "every head": {"num_key_value_heads": 4, "head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-5},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "scaling by frequency": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def llama(folder: Path, seed: int = 0, **fields) -> LlamaForCausalLM:
    model = randomise(LlamaForCausalLM(LlamaConfig(**{**SIZE, **fields})), std=0.15, seed=seed).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model, **options) -> torch.Tensor:
    return model.eval()(IDS, **options).logits


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ---- Equality ----


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("plan", [None, "Loop(1-2x3-1)"])
def test_one_pass_is_the_source_to_the_last_bit(tmp_path, name, plan):
    source = llama(tmp_path / "source", **LLAMAS[name])
    ledger = convert_llama(tmp_path / "source", tmp_path / "out", plan)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is GrownLlamaForCausalLM and str(model.config.plan()) == (plan or "4x1")
    assert torch.equal(logits(model, num_recurrences=1), logits(source))
    assert all(comparison.max_difference == 0 for comparison in ledger.comparisons)
    assert len(ledger.comparisons) == (1 if plan is None else 2)
    if plan:
        assert (logits(model) - logits(source)).abs().max() > 0.1 and model.config.trained_recurrences == 1


@pytest.mark.parametrize("plan", ["0 1 2 1 2 3", "0 1 1 2 3 0", "Loop(4x2)", "Loop(3-1x4)"])
def test_any_order_of_the_layers_is_what_unrolling_it_gives(tmp_path, plan):
    llama(tmp_path / "source")
    convert_llama(tmp_path / "source", tmp_path / "out", plan)
    result = CliRunner().invoke(app, ["unroll", str(tmp_path / "out"), str(tmp_path / "plain")])
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), logits(LlamaForCausalLM.from_pretrained(tmp_path / "plain")))


def test_a_mistral_without_a_window_is_a_llama(tmp_path):
    model = randomise(MistralForCausalLM(MistralConfig(**SIZE, sliding_window=None)), std=0.15).eval().bfloat16()
    model.save_pretrained(tmp_path / "source")
    ledger = convert_llama(tmp_path / "source", tmp_path / "out", "Loop(1-2x2-1)")
    assert "MistralForCausalLM" in str(ledger) and ledger.comparisons[0].dtype == "bfloat16"
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert converted.dtype == torch.bfloat16
    original = MistralForCausalLM.from_pretrained(tmp_path / "source", dtype="auto")
    assert torch.equal(logits(converted, num_recurrences=1), logits(original))


@pytest.mark.parametrize("form", ["shards", "pickle", "half"])
def test_weights_in_shards_in_a_pickle_and_in_half_precision_are_read(tmp_path, form):
    model = llama(tmp_path / "whole")
    source = tmp_path / "source"
    if form == "half":
        model.half().save_pretrained(source)
    else:
        model.save_pretrained(source, max_shard_size="40KB" if form == "shards" else "1GB")
    if form == "shards":
        assert len(list(source.glob("*.safetensors"))) > 2
    if form == "pickle":
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    convert_llama(source, tmp_path / "out", "Loop(1-2x2-1)")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert converted.dtype == (torch.float16 if form == "half" else torch.float32)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.state_dict().items())


def test_tokenizer_and_generation_configuration_come_along(tmp_path):
    model = llama(tmp_path / "source")
    tokenizer = train_tokenizer(["a few words to cut into pieces " * 9], 280)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "source")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[0, 5])
    model.save_pretrained(tmp_path / "source")
    ledger = convert_llama(tmp_path / "source", tmp_path / "out")
    assert "with tokenizer and generation_config.json of the source" in str(ledger)
    arrived = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert arrived("some words <|pad|>")["input_ids"] == tokenizer("some words <|pad|>")["input_ids"]
    assert arrived.chat_template == tokenizer.chat_template
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (generation.temperature, generation.eos_token_id) == (0.7, [0, 5])


def test_ledger_explains_every_tensor_of_the_source_and_of_the_result(tmp_path):
    llama(tmp_path / "source", tie_word_embeddings=True)
    file = tmp_path / "source" / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    save_file(state, file, {"format": "pt"})
    ledger = convert_llama(tmp_path / "source", tmp_path / "out", "Loop(1-2x3-1)")
    assert {use.source for use in ledger.used} | set(ledger.unused) == set(state)
    assert set(ledger.unused) == {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {use.targets[0]: use.shape for use in ledger.used} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    assert [use.source for use in ledger.used if use.notes == ("from bfloat16",)] == ["model.norm.weight"]
    assert ledger.parameters == parameter_counts(model.config)
    assert all(f"{use.source} " in str(ledger) for use in ledger.used)


# ---- Refusals ----


def edit_state(edit):
    def change(source: Path):
        file = source / "model.safetensors"
        state = load_file(file)
        edit(state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file, {"format": "pt"})

    return change


def edit_config(**fields):
    def change(source: Path):
        file = source / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def swap(one: str, other: str):
    return lambda state: state.update({one: state[other], other: state[one]})


def cut(source: Path):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def another_family(model):
    return lambda source: (
        [file.unlink() for file in source.iterdir()],
        model.save_pretrained(source),
    )


def lost_shard(source: Path):
    LlamaForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="40KB")
    (source / "model.safetensors").unlink()
    sorted(source.glob("model-*.safetensors"))[1].unlink()


def confused_shards(source: Path):
    LlamaForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="40KB")
    (source / "model.safetensors").unlink()
    first, second = sorted(source.glob("model-*.safetensors"))[:2]
    first.write_bytes(second.read_bytes())


Q, K, UP = (f"model.layers.1.{part}.weight" for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))
GPT2 = GPT2LMHeadModel(GPT2Config(vocab_size=280, n_positions=32, n_embd=32, n_layer=2, n_head=2))
REFUSALS = {
    "missing tensor": (edit_state(lambda s: s.pop(UP)), f"missing: {UP}"),
    "unknown tensor": (edit_state(lambda s: s.update(strange=torch.ones(2))), "unexplained: strange"),
    "shuffled": (edit_state(swap(Q, UP)), rf"wrong shape: {Q} \(48, 32\) instead of \(32, 32\), {UP} \(32, 32\)"),
    "fewer layers": (edit_config(num_hidden_layers=3), "3 layers, hidden_size=32.*unexplained: model.layers.3."),
    "more layers": (edit_config(num_hidden_layers=5), "missing: model.layers.4."),
    "other heads": (
        edit_config(num_key_value_heads=1),
        r"wrong shape: .*k_proj.weight \(16, 32\) instead of \(8, 32\)",
    ),
    "tied by mistake": (edit_config(tie_word_embeddings=True), "lm_head.weight that differs from the embedding"),
    "biases": (edit_config(attention_bias=True), "missing: model.layers.0.self_attn.q_proj.bias"),
    "integers": (edit_state(lambda s: s.update({UP: torch.ones(48, 32, dtype=torch.int8)})), "stored as int8"),
    "truncated": (cut, "model.safetensors is damaged or truncated"),
    "not JSON": (lambda source: (source / "config.json").write_text("{"), "config.json is damaged"),
    "quantized": (edit_config(quantization_config={"quant_method": "awq"}), "weights are quantized"),
    "sliding window": (edit_config(model_type="mistral", sliding_window=16), "sliding_window=16"),
    "another architecture": (another_family(GPT2), "model of type 'gpt2', whose layers are not Llama's"),
    "ours already": (another_family(tiny_grown_llama()), "is a GrownLlama already"),
    "confused shards": (confused_shards, "do not hold what model.safetensors.index.json says"),
    "lost shard": (lost_shard, "lacks model-00002-of-.*which model.safetensors.index.json names"),
    "no weights": (lambda source: (source / "model.safetensors").unlink(), "holds no weights"),
    "no configuration": (lambda source: (source / "config.json").unlink(), "holds no config.json"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_sentence_and_nothing_is_written(tmp_path, name):
    break_it, message = REFUSALS[name]
    llama(tmp_path / "source")
    break_it(tmp_path / "source")
    before = files_in(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        convert_llama(tmp_path / "source", tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert isinstance(refusal.value, FileNotFoundError) == name.startswith(("no weights", "no config", "lost"))
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("Loop(1-2x2-2)", "there is no layer 4"),
        ("Loop(1-1x3-1)", "it does not visit 3"),
        ("0 1 3", "it does not visit 2"),
        ("a few", "'a few' does not fit"),
    ],
)
def test_a_plan_that_leaves_out_layers_or_needs_more_is_refused(tmp_path, plan, message):
    llama(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        convert_llama(tmp_path / "source", tmp_path / "out", plan)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_changes_while_it_is_written_is_found_and_nothing_is_left(tmp_path, monkeypatch):
    llama(tmp_path / "source")
    before = files_in(tmp_path)
    save_pretrained = GrownLlamaForCausalLM.save_pretrained

    def save_shuffled(self, folder, **kwargs):
        with torch.no_grad():
            weight = self.model.layers[2].self_attn.k_proj.weight
            weight[[0, 1]] = weight[[1, 0]]
        save_pretrained(self, folder, **kwargs)

    monkeypatch.setattr(GrownLlamaForCausalLM, "save_pretrained", save_shuffled)
    with pytest.raises(ConversionError, match="differs from its source, so nothing was written"):
        convert_llama(tmp_path / "source", tmp_path / "new" / "out")
    result = CliRunner().invoke(app, ["convert", "llama", str(tmp_path / "source"), str(tmp_path / "out")])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert files_in(tmp_path) == before


def test_command_prints_the_ledger_as_a_table_or_as_json(tmp_path):
    llama(tmp_path / "source")
    arguments = ["convert", "llama", str(tmp_path / "source"), str(tmp_path / "out"), "--plan", "Loop(1-2x2-1)"]
    told = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert told.exit_code == 0 and "Nothing was written" in told.stdout and not (tmp_path / "out").exists()
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0 and "used (39)" in told.stdout and told.stdout.count("bit-equal") == 2
    told = CliRunner().invoke(app, [*arguments, "--overwrite", "--json"])
    ledger = json.loads(told.stdout)
    assert len(ledger["used"]) == 39 and ledger["comparisons"][1]["max_difference"] == 0
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2 and "is not empty: pass --overwrite" in " ".join(told.output.split())
