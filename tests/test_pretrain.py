"""The training loop: what an interruption, a wrong recipe or a broken run may and may not do."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY_MODELS, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_looped import LoopedGPTForCausalLM
from modeling_looped.eval.held_out import held_out_loss, parse_recurrences
from modeling_looped.keyed_noise import NoiseKey
from modeling_looped.recipes.corpus import read_texts, split_by_name, standard_library
from modeling_looped.recipes.optimizers import Muon, fastest_dtype, make_adamw, make_optimizers
from modeling_looped.recipes.pretrain import PretrainRecipe, RunOptions, newest_checkpoint, pretrain
from modeling_looped.recipes.tokens import TokenRows, token_stream, train_tokenizer, unigram_loss


ROWS = TokenRows(np.random.default_rng(0).integers(1, 97, 2000).astype(np.int32), length=16)
RECIPE = PretrainRecipe(
    total_steps=6, batch_size=4, micro_steps=2, depth_scheme="poisson-lognormal", depth_mean=2.0, precision="no",
    checkpoint_every=2,
)  # fmt: skip


def fresh_model(**fields) -> LoopedGPTForCausalLM:
    torch.manual_seed(0)
    return LoopedGPTForCausalLM(tiny_config(trained_recurrences=5, **fields))


def train(directory, recipe=RECIPE, model=None, **kwargs):
    model = fresh_model() if model is None else model
    return model, pretrain(model, ROWS, recipe, directory, progress=False, **kwargs)


def signal_in_step(model, step: int, number: signal.Signals) -> None:
    """Sends `number` to this process in the forward of the first micro-step of `step`."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == step * RECIPE.micro_steps + 1:
            os.kill(os.getpid(), number)

    model.register_forward_pre_hook(hook)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_an_interrupted_and_continued_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path, number, activation_checkpointing
):
    recipe = PretrainRecipe(**{**RECIPE.__dict__, "activation_checkpointing": activation_checkpointing})
    whole, result = train(tmp_path / "whole", recipe)
    assert result.finished and len(result.losses) == 6
    handler = signal.getsignal(number)

    first = fresh_model()
    signal_in_step(first, 2, number)
    _, stopped = train(tmp_path / "parts", recipe, first)
    assert not stopped.finished and stopped.step == 3
    assert signal.getsignal(number) is handler
    resumed, rest = train(tmp_path / "parts", recipe)
    assert stopped.losses + rest.losses == result.losses
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters()):
        assert torch.equal(a, b), name


def test_a_finished_run_is_not_run_again(tmp_path):
    train(tmp_path)
    model, again = train(tmp_path)
    assert again.finished and again.losses == []
    reloaded = AutoModelForCausalLM.from_pretrained(newest_checkpoint(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reloaded.parameters()))


def test_a_checkpoint_half_written_is_not_taken_for_one(tmp_path):
    train(tmp_path)
    (tmp_path / ".writing-step-99").mkdir()
    (tmp_path / "step-abc").mkdir()
    assert newest_checkpoint(tmp_path).name == "step-6"
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_another_recipe_on_the_same_directory_is_refused(tmp_path):
    train(tmp_path)
    with pytest.raises(ValueError, match="total_steps=6"):
        train(tmp_path, PretrainRecipe(**{**RECIPE.__dict__, "total_steps": 8}))


def test_a_checkpoint_from_before_a_field_existed_counts_as_having_its_default(tmp_path):
    train(tmp_path)
    record = newest_checkpoint(tmp_path) / "progress.json"
    progress = json.loads(record.read_text())
    for name in ("optimizer", "decay"):
        del progress["recipe"][name]
    record.write_text(json.dumps(progress))
    assert train(tmp_path)[1].losses == []
    with pytest.raises(ValueError, match="decay='linear'"):
        train(tmp_path, PretrainRecipe(**{**RECIPE.__dict__, "decay": "cosine"}))


def test_a_run_out_of_time_stops_between_steps_and_continues(tmp_path):
    whole = train(tmp_path / "whole")[1].losses
    _, stopped = train(tmp_path / "parts", limit_seconds=0)
    assert not stopped.finished and stopped.step == 1
    assert stopped.losses + train(tmp_path / "parts")[1].losses == whole


def test_noise_is_keyed_by_seed_step_and_micro_step_and_free_afterwards(tmp_path):
    model, keys = fresh_model(), []
    model.model.noise_key = None  # as on models that have noise
    model.model.register_forward_pre_hook(lambda module, _: keys.append(module.noise_key))
    train(tmp_path, PretrainRecipe(**{**RECIPE.__dict__, "seed": 4}), model)
    assert keys == [NoiseKey(4, step, micro_step, 0) for step in range(6) for micro_step in range(2)]
    assert model.model.noise_key is None


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    model = fresh_model()
    calls = []

    def poison(module, inputs):
        calls.append(1)
        if len(calls) == 4 * RECIPE.micro_steps:
            with torch.no_grad():
                module.lm_head.weight.fill_(float("nan"))

    model.register_forward_pre_hook(poison)
    with pytest.raises(FloatingPointError, match="step 3"):
        train(tmp_path, model=model)
    kept = AutoModelForCausalLM.from_pretrained(newest_checkpoint(tmp_path))
    assert all(parameter.isfinite().all() for parameter in kept.parameters())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"total_steps": 0}, "total_steps"),
        ({"precision": "fp16"}, "precision"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"decay": "sqrt"}, "decay='sqrt'"),
        ({"batch_size": 3}, "batch_size=3"),
        ({"depth_scheme": "gamma"}, "gamma"),
        ({"depth_mean": None}, "mean"),
    ],
)
def test_a_wrong_recipe_is_refused_before_any_work(tmp_path, fields, named):
    with pytest.raises(ValueError, match=named):
        train(tmp_path / "out", PretrainRecipe(**{**RECIPE.__dict__, **fields}))
    assert not (tmp_path / "out").exists()


def test_ranks_that_do_not_see_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU"):
        train(tmp_path)


@pytest.mark.parametrize("injection", ["linear", "hyperconnection"])
def test_every_parameter_is_in_one_optimizer_once(injection):
    model = fresh_model(injection=injection)
    muon, adamw = make_optimizers(model, 1e-2, 0.3, 5e-3)
    held = [id(p) for optimizer in (muon, adamw) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    assert id(model.lm_head.weight) not in matrices and id(model.model.embed_tokens.weight) not in matrices
    assert id(model.model.core[0].mlp.up_proj.weight) in matrices
    if injection == "linear":
        assert id(model.model.injection.proj.weight) in matrices


def test_adamw_alone_holds_every_parameter_once_and_decays_only_matrices(tmp_path):
    model = fresh_model()
    (adamw,) = make_adamw(model, 1e-3, weight_decay=0.1)
    decayed, rest = adamw.param_groups
    held = [id(p) for group in (decayed, rest) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert decayed["weight_decay"] == 0.1 and all(p.dim() >= 2 for p in decayed["params"])
    assert rest["weight_decay"] == 0 and all(p.dim() < 2 for p in rest["params"])
    assert {(group["betas"], group["peak_lr"]) for group in adamw.param_groups} == {((0.9, 0.95), 1e-3)}

    recipe = PretrainRecipe(**{**RECIPE.__dict__, "optimizer": "adamw", "adamw_lr": 1e-2, "decay": "cosine"})
    whole = train(tmp_path / "whole", recipe)[1].losses
    _, stopped = train(tmp_path / "parts", recipe, limit_seconds=0)
    assert stopped.losses + train(tmp_path / "parts", recipe)[1].losses == whole


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_muon_is_torch_s_but_for_the_dtype_of_its_iteration(shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(weight.clone()) for weight in torch.randn(1, *shape).expand(2, -1, -1))
    optimizers = Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs - ours).abs().max()
    assert moved < 0.02 if fastest_dtype() is torch.float32 else moved == 0  # torch iterates in bf16: 3 digits


def test_the_learning_rate_warms_up_and_decays_to_its_last_share():
    recipe = PretrainRecipe(total_steps=110, warmup_steps=10, final_lr=0.1)
    rates = [recipe.learning_rate(step) for step in range(110)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert abs(rates[60] - 0.55) < 1e-9 and abs(recipe.learning_rate(110) - 0.1) < 1e-9
    assert PretrainRecipe().learning_rate(0) == 1.0
    cosine = PretrainRecipe(total_steps=110, warmup_steps=10, final_lr=0.1, decay="cosine")
    assert [cosine.learning_rate(step) for step in range(11)] == rates[:11]
    for step, share in [(35, (2 + 2**0.5) / 4), (60, 0.5), (110, 0.0)]:
        assert abs(cosine.learning_rate(step) - (0.1 + 0.9 * share)) < 1e-9


def test_rows_are_a_shuffled_partition_of_the_stream_in_every_epoch():
    rows = TokenRows(np.arange(100, dtype=np.int32), length=8, seed=3)
    epochs = [rows.batch(epoch * len(rows), len(rows)) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(96))
    assert not torch.equal(*epochs)
    assert torch.equal(rows.batch(10, 4), torch.cat([rows.batch(10, 2), rows.batch(12, 2)]))
    with pytest.raises(ValueError, match="one row"):
        TokenRows(np.arange(5), length=8)


def test_held_out_loss_predicts_every_token_once_whatever_the_windows(tmp_path):
    texts = [f"line {number} of a text that is held out\n" * 3 for number in range(6)]
    tokenizer = train_tokenizer(texts, 300)
    model = fresh_model(vocab_size=len(tokenizer)).eval()
    stream = torch.from_numpy(token_stream(tokenizer, texts)).long()
    losses = held_out_loss(model, tokenizer, texts, [1, 3], sequence_length=len(stream) + 5)
    with torch.no_grad():
        logits = model(stream[None], num_recurrences=3).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, stream[1:])
    assert abs(losses[1].nats_per_token - nats.item()) < 1e-5
    size = sum(len(text.encode()) for text in texts)
    assert abs(losses[1].bits_per_byte - nats.item() * (len(stream) - 1) / np.log(2) / size) < 1e-5
    windowed = held_out_loss(model, tokenizer, texts, [3], sequence_length=16, batch_size=3)[0]
    assert windowed.tokens == losses[1].tokens == len(stream) - 1
    short = held_out_loss(model, tokenizer, texts, [3], max_tokens=20)[0]
    assert short.tokens == 19 and short.bytes < size


@pytest.mark.parametrize(
    ("text", "counts"), [("1..8", list(range(1, 9))), ("4", [4]), ("1, 2,4..6", [1, 2, 4, 5, 6])]
)
def test_recurrences_are_read(text, counts):
    assert parse_recurrences(text) == counts


@pytest.mark.parametrize("text", ["", "-1", "4..2", "a", "1..", "1;2"])
def test_wrong_recurrences_are_refused(text):
    with pytest.raises(ValueError, match="recurrences"):
        parse_recurrences(text)


def test_a_tokenizer_gives_back_any_text():
    texts = ["def f(x):\n    return x ** 2\n", "Größe: 3 µm, naïve café ☕\n"]
    tokenizer = train_tokenizer(texts, 300)
    for text in [*texts, "unseen\ttext\n\n  with spaces", "🙂"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    stream = token_stream(tokenizer, texts)
    assert (stream == tokenizer.eos_token_id).sum() == 2
    assert unigram_loss(stream, stream, len(tokenizer)) < np.log(len(tokenizer))


def test_texts_are_read_from_jsonl_and_plain_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "one"}\n\n{"text": "two"}\n')
    assert [text for _, text in read_texts(str(tmp_path / "a.jsonl"))] == ["one", "two"]
    (tmp_path / "b.txt").write_text("first\n\npart\n\n\nsecond part\n")
    assert [text for _, text in read_texts(str(tmp_path / "b.txt"))] == ["first\n\npart\n", "second part\n"]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', "line 2"),
        ("a.jsonl", b"\n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        (None, b"", "not a file"),
    ],
)
def test_unusable_data_is_refused_with_its_place(tmp_path, name, content, named):
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        list(read_texts(str(path)))


def test_the_split_is_by_document_and_stable():
    documents = [(str(number), f"text {number}") for number in range(400)]
    train_texts, validation = split_by_name(iter(documents))
    assert not set(train_texts) & set(validation) and len(train_texts) + len(validation) == 400
    assert 8 <= len(validation) <= 35
    assert split_by_name(reversed(documents))[1] == validation[::-1]
    with pytest.raises(ValueError, match="two documents"):
        split_by_name([("a", "b")])


def test_the_demo_s_corpus_is_python_s_own_library_without_its_tests():
    names = [name for name, _ in standard_library()]
    assert "argparse.py" in names and any(name.startswith("topics/") for name in names)
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))


@pytest.mark.slow
def test_the_demo_on_one_s_own_text_can_be_continued_and_loads(tmp_path):
    from modeling_looped.recipes.demo import demo

    data = tmp_path / "data.jsonl"
    lines = [f"{number} and {number} make {2 * number}.\n" * 20 for number in range(60)]
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    output = tmp_path / "demo"
    assert demo(str(output), data=str(data), steps=4, quick=True)
    metrics = json.loads((output / "metrics.json").read_text())
    assert [row["num_recurrences"] for row in metrics["validation"]] == list(range(1, 9))
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "loss_vs_recurrences.png"} <= {
        path.name for path in output.iterdir()
    }
    assert AutoTokenizer.from_pretrained(output)("3 and 3")["input_ids"]
    assert metrics["training"]["final_loss"] > 0 and metrics["training"]["tokens_per_second"] > 0
    card = (output / "README.md").read_text()
    assert f"{metrics['training']['flops']:.4g} FLOPs" in card and "on data.jsonl" in card
    for row in metrics["validation"]:
        assert f"| {row['num_recurrences']} | {row['nats_per_token']:.4f} | {row['bits_per_byte']:.4f} |" in card
    results = [json.loads(path.read_text()) for path in output.glob("evaluation/**/results_*.json")]
    assert {one["config"]["training_flops"] for one in results} == {metrics["training"]["flops"]}, "it quotes metrics.json"
    assert "looped eval . training/validation.jsonl --recurrences 1..8" in card and "--model_args pretrained=. " in card
    assert demo(str(output), data=str(data), steps=4, quick=True)
    again = json.loads((output / "metrics.json").read_text())
    assert again["training"] == metrics["training"], "calling a finished run again keeps what was measured"
    with pytest.raises(ValueError, match="steps"):
        demo(str(output), data=str(data), steps=5, quick=True)
    with pytest.raises(ValueError, match="not a demo"):
        demo(str(tmp_path), data=str(data))


def test_truncated_backpropagation_lengthens_over_its_curriculum(tmp_path):
    model, seen = fresh_model(backprop_recurrences=3), []
    model.model.register_forward_pre_hook(lambda module, _: seen.append(module.config.backprop_recurrences))
    train(tmp_path / "run", replace(RECIPE, micro_steps=1, backprop_curriculum_steps=4), model)
    assert seen == [1, 1, 2, 2, 3, 3]
    assert AutoModelForCausalLM.from_pretrained(newest_checkpoint(tmp_path / "run")).config.backprop_recurrences == 3
    stopped = train(tmp_path / "parts", replace(RECIPE, backprop_curriculum_steps=4), limit_seconds=0)[1]
    assert stopped.step == 1
    rest = train(tmp_path / "parts", replace(RECIPE, backprop_curriculum_steps=4))[1]
    whole = train(tmp_path / "whole", replace(RECIPE, backprop_curriculum_steps=4))[1]
    assert stopped.losses + rest.losses == whole.losses != train(tmp_path / "full")[1].losses


@pytest.mark.slow
def test_regional_compile_trains_as_eager_at_every_depth_and_after_growing(tmp_path):
    torch._dynamo.reset()
    eager = train(tmp_path / "eager")[1].losses
    compiled = train(tmp_path / "compiled", options=RunOptions("none", 1, regional_compile=True))[1].losses
    np.testing.assert_allclose(compiled, eager, rtol=1e-5)
    torch._dynamo.reset()
    growing = replace(RECIPE, growth_operator="lidas", growth_block_size=2, depth_scheme="fixed", depth_mean=None)
    losses = []
    for compiled in (False, True):
        model = TINY_MODELS["grown_llama"](depth_plan="4x1")
        options = RunOptions("none", 1, regional_compile=compiled)
        losses.append(train(tmp_path / f"grown-{compiled}", growing, model, options=options)[1].losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
