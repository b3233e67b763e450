"""Lenses: what a model would say after each executed layer, how they are trained, and what is read off with them."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODELS, is_bit_equal, tiny_grown_llama, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from modeling_looped.diagnostics import lens as lens_module
from modeling_looped.diagnostics.lens import (
    EarlyExitAccuracy,
    TunedLens,
    early_exit_accuracy,
    lens_statistics,
    task_items,
    train_tuned_lens,
)
from modeling_looped.diagnostics.probe import Probe, batches
from modeling_looped.recipes.checkpoints import newest_checkpoint
from modeling_looped.recipes.scoring import Continuation, score_continuations


def random_rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 97) for _ in range(length)] for length in lengths]


ROWS = random_rows(14, 9, 20, 5)
TRAINING = {"steps": 8, "tokens_per_step": 48, "batch_size": 2, "save_every": 2, "progress": False}


def family(name: str):
    if name == "mixture_of_recursions":
        # A token that sits a pass out has no stream between the layers of that pass.
        return TINY_MODELS[name](num_core_layers=1)
    if name in TINY_MODELS:
        return TINY_MODELS[name]()
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    if name != "gpt2":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=97, **sizes)).eval()


FAMILIES = [*TINY_MODELS, "llama", "gemma2", "gpt2"]


def disturbed(model) -> TunedLens:
    """A lens with translators of random numbers."""
    lens = TunedLens(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lens.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return lens


def periodic_rows(count: int, seed: int) -> list[list[int]]:
    """Four tokens again and again: what comes next can be known from the fifth on."""
    draw = random.Random(seed)
    return [(draw.sample(range(3, 40), 4) * 6)[: draw.randint(18, 24)] for _ in range(count)]


@pytest.fixture(scope="module")
def trained():
    """Loop(1-2x2-1), which has learned to go on with periodic texts."""
    model = tiny_model(hidden_size=32, num_recurrences=2, num_key_value_heads=2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        for batch in batches(periodic_rows(16, step), 16):
            labels = batch.input_ids.masked_fill(~batch.mask, -100)
            model(input_ids=batch.input_ids, attention_mask=batch.mask.long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


# The lens


@pytest.mark.parametrize("name", FAMILIES)
def test_an_untrained_tuned_lens_is_the_logit_lens(name):
    probe = Probe(family(name))
    lens = TunedLens(probe)
    seen = []
    probe.run(next(batches(ROWS, 4)), on_input=lambda position, h: seen.append(h))
    with torch.no_grad():
        assert all(torch.equal(lens(i, h), probe.lens(h)) for i, h in enumerate(seen))
    tuned, logit = lens_statistics(probe, ROWS, lens), lens_statistics(probe, ROWS)
    assert np.array_equal(tuned.to_frame(), logit.to_frame()) and tuned.tuned and not logit.tuned


def test_an_untrained_tuned_lens_is_the_logit_lens_in_16_bits():
    probe = Probe(tiny_model().bfloat16())
    h = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(TunedLens(probe)(1, h), probe.lens(h))


def test_a_saved_lens_comes_back_bit_equal_with_what_it_is_for(tmp_path):
    model = tiny_model()
    lens = disturbed(model)
    lens.tokens = 1234
    lens.save_pretrained(tmp_path)
    again = TunedLens.from_pretrained(tmp_path, model)
    assert is_bit_equal(dict(lens.named_parameters()), dict(again.named_parameters())) and again.tokens == 1234
    facts = json.loads((tmp_path / "lens.json").read_text())
    assert facts == {"depth": 8, "width": 64, "order": [0, 1, 2, 1, 2, 1, 2, 3], "tokens": 1234}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lens.json", "lens.safetensors"]


def test_a_lens_of_another_depth_or_width_is_refused(tmp_path):
    model = tiny_model()
    lens = TunedLens(model)
    lens.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="depth 8, and this model has 6"):
        TunedLens.from_pretrained(tmp_path, model, num_recurrences=2)
    with pytest.raises(ValueError, match="width 64, and this model has 32"):
        TunedLens.from_pretrained(tmp_path, tiny_model(hidden_size=32))
    with pytest.raises(ValueError, match="holds no tuned lens"):
        TunedLens.from_pretrained(tmp_path / "elsewhere", model)
    with pytest.raises(ValueError, match="8 translators, and the model executes 6 layers"):
        lens_statistics(Probe(model, 2), ROWS, lens)
    with pytest.raises(ValueError, match="another model's"):
        lens_statistics(tiny_model(seed=1), ROWS, lens)


# What it shows


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_index_is_the_model_s_own_output(name):
    model = family(name)
    found = lens_statistics(model, ROWS, disturbed(model))
    assert len(found.overlap) == Probe(model).depth + 1
    assert ((found.overlap >= 0) & (found.overlap <= 1)).all() and (
        (found.agreement >= 0) & (found.agreement <= 1)
    ).all()
    assert found.overlap[-1] == found.agreement[-1] == 1 and found.forward[-1] == found.backward[-1] == 0
    assert (found.forward[:-1] > 0).all() and (found.backward[:-1] > 0).all()
    nats = tokens = 0.0
    for row in ROWS:
        with torch.no_grad():
            logits = Probe(model).logits(next(batches([row], 1)))[0]
        nats, tokens = (
            nats + F.cross_entropy(logits[:-1], torch.tensor(row[1:])).item() * (len(row) - 1),
            tokens + len(row),
        )
    assert found.cross_entropy[-1] == pytest.approx(nats / (tokens - len(ROWS)), rel=1e-5) and found.tokens == tokens


@pytest.mark.parametrize("lens", ["logit", "tuned"])
def test_statistics_are_those_of_an_obvious_computation(lens):
    model = tiny_grown_llama()
    lens = disturbed(model) if lens == "tuned" else None
    row = ROWS[0]
    inputs = []
    layers = model.base_model.unique_layers()
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, kwargs: inputs.append(args[0][0]), with_kwargs=True)
        for layer in layers
    ]
    with torch.no_grad():
        output = model(torch.tensor([row]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        logits = []
        for i, h in enumerate(inputs):
            if lens is not None:
                h = h + h @ lens.translators[i].weight.T + lens.translators[i].bias
            logits.append(model.lm_head(model.base_model.norm(h)))
        logits.append(output)
    p_final = output.double().softmax(-1)
    found = lens_statistics(model, [row], lens, k=5)
    for i, here in enumerate(logits):
        p = here.double().softmax(-1)
        forward = backward = overlap = agreement = loss = 0.0
        for t in range(len(row)):
            forward += sum(a * np.log(a / b) for a, b in zip(p_final[t].tolist(), p[t].tolist()))
            backward += sum(b * np.log(b / a) for a, b in zip(p_final[t].tolist(), p[t].tolist()))
            best, here_best = (set(sorted(range(97), key=lambda v: -q[t, v])[:5]) for q in (p_final, p))
            overlap += len(best & here_best) / 5
            agreement += p[t].argmax() == p_final[t].argmax()
            if t + 1 < len(row):
                loss -= np.log(p[t, row[t + 1]].item())
        n = len(row)
        expected = [forward / n, backward / n, overlap / n, float(agreement) / n, loss / (n - 1)]
        assert found.to_frame().iloc[i, 1:].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_left_padded_batch_has_the_statistics_of_its_single_rows(name, monkeypatch):
    model = family(name)
    together = lens_statistics(model, ROWS, disturbed(model), batch_size=4).to_frame()
    # A few tokens at a time are the same tokens.
    monkeypatch.setattr(lens_module, "LOGITS", 3 * 97)
    alone = lens_statistics(model, ROWS, disturbed(model), batch_size=1).to_frame()
    assert np.allclose(together, alone, rtol=1e-4, atol=1e-5)


def test_more_tokens_than_the_vocabulary_has_are_refused():
    for k in (0, 98):
        with pytest.raises(ValueError, match=f"k={k} must be at least 1 and at most the 97 tokens"):
            lens_statistics(tiny_model(), ROWS, k=k)


def test_statistics_have_a_figure_a_table_and_a_sentence():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    model = tiny_model()
    found = lens_statistics(model, ROWS)
    exits = EarlyExitAccuracy(np.array([0.2, 0.5, 0.3, 0.46, 0.5]), 0.2, 50)
    for measurement in (found, exits):
        figure, axes = pyplot.subplots()
        measurement.plot(axes, "tiny")
        assert len(axes.lines[0].get_xdata()) == len(measurement.to_frame())
        pyplot.close(figure)
    assert "of 8 on" in found.headline() and "logit lens, 48 tokens" in found.headline()
    assert exits.exit == 3 and "accuracy of 0.500 (chance 0.200) is there from layer 3 of 4 on" in exits.headline()
    silent = EarlyExitAccuracy(np.array([0.1, 0.0]), 0.2, 50)
    assert silent.exit is None and np.isnan(silent.relative).all() and "none of 50 items" in silent.headline()


# Training


@pytest.mark.slow
def test_training_brings_every_index_nearer_to_the_output_of_held_out_texts(trained):
    held_out = periodic_rows(40, 10_000)
    logit = lens_statistics(trained, held_out)
    assert logit.cross_entropy[-1] < 0.6 * np.log(37)  # the model has something to say
    for optimizer in ("adam", "sgd"):
        lens = train_tuned_lens(trained, periodic_rows(200, 20_000), 60, 512, optimizer, batch_size=32, progress=False)
        tuned = lens_statistics(trained, held_out, lens)
        assert (tuned.forward[:-1] < logit.forward[:-1]).all()
        assert tuned.forward.mean() < 0.8 * logit.forward.mean()


@pytest.mark.parametrize("name", ["looped_gpt", "mixture_of_recursions", "gpt2"])
def test_the_model_is_left_as_found(name):
    model = family(name).train()
    parameters = dict(model.named_parameters())
    frozen = next(iter(parameters.values())).requires_grad_(False)
    given = list(parameters.values())[-1]
    given.grad = torch.ones_like(given)
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    config, state = model.config.to_dict(), torch.get_rng_state()
    lens = train_tuned_lens(model, ROWS, 2, 30, progress=False)
    lens_statistics(model, ROWS, lens)
    assert all(p.abs().sum() > 0 and p.grad is None for p in lens.parameters())
    assert is_bit_equal(weights, dict(model.named_parameters()))
    assert model.config.to_dict() == config and torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for parameter in parameters.values():
        assert parameter.requires_grad == (parameter is not frozen)
        assert parameter is given or parameter.grad is None
    assert torch.equal(given.grad, torch.ones_like(given))


def test_gradients_are_those_of_the_mean_over_all_tokens_of_a_step_whatever_the_batches(monkeypatch):
    model = tiny_model()
    found = []
    for batch_size, size in ((4, 2**26), (1, 5 * 97)):
        monkeypatch.setattr(lens_module, "LOGITS", size)
        lens = TunedLens(model)
        loss = lens_module._accumulate_gradients(lens, ROWS, batch_size)
        assert loss == pytest.approx(lens_statistics(model, ROWS).forward[:-1].mean(), rel=1e-4)
        found.append({name: parameter.grad for name, parameter in lens.named_parameters()})
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-3, atol=1e-5) for name in found[0])
    # Of one translator, with one graph for all of it.
    lens, probe = TunedLens(model), Probe(model)
    losses = []
    for row in ROWS:
        seen, rows = [], next(batches([row], 1))
        final = probe.logits(rows)[0].softmax(-1)
        probe.run(rows, on_input=lambda position, h: seen.append(h[0]))
        losses.append((final * (final.log() - lens(3, seen[3]).log_softmax(-1))).sum(-1))
    weight = lens.translators[3].weight
    expected = torch.autograd.grad(torch.cat(losses).mean(), weight)[0]
    assert torch.allclose(found[0]["translators.3.weight"], expected, rtol=1e-3, atol=1e-5)


def test_every_row_is_read_once_a_pass_in_an_order_of_the_seed():
    places = [number for step in range(10) for number in lens_module._numbers(6, 3, 0, step)]
    assert [sorted(places[start : start + 6]) for start in range(0, 30, 6)] == [list(range(6))] * 5
    assert places[:6] != places[6:12]
    assert places != [number for step in range(10) for number in lens_module._numbers(6, 3, 1, step)]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from conftest import tiny_model
from modeling_looped.diagnostics import lens

real = lens.write_checkpoint
def until_killed(output_dir, step, write, **options):
    def half_way(folder):
        write(folder)
        if step == 6:
            (folder / lens.PROGRESS).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return real(output_dir, step, half_way, **options)
lens.write_checkpoint = until_killed
lens.train_tuned_lens(tiny_model(), {rows!r}, output_dir={output!r}, **{training!r})
"""


@pytest.mark.slow
def test_training_that_was_killed_while_it_saved_ends_where_it_would_have(tmp_path, monkeypatch):
    folder, model = tmp_path / "lens", tiny_model()
    script = KILLED.format(tests=str(Path(__file__).parent), rows=ROWS, output=str(folder), training=TRAINING)
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == [".writing-step-6", "step-4"]
    whole = train_tuned_lens(model, ROWS, **TRAINING)
    steps, real = [], lens_module._accumulate_gradients
    monkeypatch.setattr(lens_module, "_accumulate_gradients", lambda *args: steps.append(1) or real(*args))
    again = train_tuned_lens(model, ROWS, output_dir=folder, **TRAINING)
    assert len(steps) == 4
    final = train_tuned_lens(model, ROWS, output_dir=folder, **TRAINING)
    assert len(steps) == 4  # there was nothing left to do
    for lens in (again, final, TunedLens.from_pretrained(folder, model)):
        assert is_bit_equal(dict(whole.named_parameters()), dict(lens.named_parameters()))
        assert lens.tokens == whole.tokens == 8 * 48
    assert sorted(path.name for path in folder.iterdir()) == ["lens.json", "lens.safetensors", "step-8"]


def test_sgd_goes_on_with_its_momentum(tmp_path, monkeypatch):
    model, training = tiny_model(), {**TRAINING, "optimizer": "sgd"}
    whole = train_tuned_lens(model, ROWS, **training)
    with monkeypatch.context() as patch:
        left, real = iter(range(5)), lens_module._accumulate_gradients
        patch.setattr(lens_module, "_accumulate_gradients", lambda *args: (next(left), real(*args))[1])
        with pytest.raises(StopIteration):
            train_tuned_lens(model, ROWS, output_dir=tmp_path, **training)
    assert newest_checkpoint(tmp_path).name == "step-4"
    again = train_tuned_lens(model, ROWS, output_dir=tmp_path, **training)
    assert is_bit_equal(dict(whole.named_parameters()), dict(again.named_parameters()))


def test_a_directory_with_other_settings_is_refused_before_any_work(tmp_path, monkeypatch):
    model = tiny_model()
    train_tuned_lens(model, ROWS, output_dir=tmp_path, **TRAINING)
    monkeypatch.setattr(lens_module, "_accumulate_gradients", None)
    for field, other in (
        ("steps", 9),
        ("tokens_per_step", 50),
        ("optimizer", "sgd"),
        ("learning_rate", 0.1),
        ("seed", 1),
    ):
        with pytest.raises(ValueError, match=f"with {field}=.*name another directory"):
            train_tuned_lens(model, ROWS, output_dir=tmp_path, **{**TRAINING, field: other})
    with pytest.raises(ValueError, match="with rows="):
        train_tuned_lens(model, ROWS[::-1], output_dir=tmp_path, **TRAINING)
    with pytest.raises(ValueError, match="with model="):
        train_tuned_lens(tiny_model(seed=1), ROWS, output_dir=tmp_path, **TRAINING)
    with pytest.raises(ValueError, match="with order="):
        train_tuned_lens(model, ROWS, output_dir=tmp_path, num_recurrences=2, **TRAINING)
    assert newest_checkpoint(tmp_path).name == "step-8"


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"optimizer": "lion"}, "optimizer='lion' must be 'adam' or 'sgd'"),
        ({"steps": 0}, "steps=0 must be above 0"),
        ({"tokens_per_step": 0}, "tokens_per_step=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"rows": []}, "no texts"),
        ({"rows": [[1, 2], [3]]}, "Text 1 has 1 tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        train_tuned_lens(tiny_model(), **{"rows": ROWS, "progress": False, **settings})


def test_a_loss_that_is_not_finite_is_said():
    model = tiny_model()
    with torch.no_grad():
        model.base_model.norm.weight.fill_(float("inf"))
    with pytest.raises(ValueError, match="The loss of step 0 is nan: take a learning_rate below 0.001"):
        train_tuned_lens(model, ROWS, 2, 30, progress=False)


# Leaving early


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<s>": 0, "<unk>": 1, **{f"w{number}": number for number in range(2, 97)}}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def random_items(count: int, choices: int, seed: int = 0) -> list:
    draw = random.Random(seed)

    def tokens(count):
        return words(*(draw.randrange(2, 97) for _ in range(count)))

    return [
        (
            tokens(draw.randint(1, 9)),
            [f" {tokens(draw.randint(1, 3))}" for _ in range(choices)],
            draw.randrange(choices),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("choices", [1, 4])
def test_the_last_index_answers_as_the_model_is_scored_elsewhere(tokenizer, choices):
    model = tiny_model()
    items = random_items(40, choices)
    if choices == 1:  # half of them with what the model says
        for number in range(20):
            context = items[number][0]
            with torch.no_grad():
                best = model(torch.tensor([tokenizer(context)["input_ids"]])).logits[0, -1].argmax().item()
            items[number] = context, [f" {words(best)}"] if best > 1 else [" <s>"], 0
    found = early_exit_accuracy(model, tokenizer, items)
    right = 0
    for context, texts, gold in items:
        begin = len(tokenizer(context)["input_ids"])
        scores = score_continuations(
            model, [Continuation(tuple(tokenizer(context + text)["input_ids"]), begin) for text in texts], 1
        )
        best = max(range(choices), key=lambda i: scores[i].log_likelihood)
        right += scores[0].greedy if choices == 1 else best == gold
    assert found.accuracy[-1] == right / 40 > 0 and found.items == 40
    assert found.chance == (0 if choices == 1 else 0.25)


@pytest.mark.parametrize("tuned", [False, True])
def test_each_index_answers_with_the_likelihoods_of_its_lens(tokenizer, tuned, monkeypatch):
    model = tiny_model()
    lens = disturbed(model) if tuned else None
    probe, items = Probe(model), random_items(12, 3, seed=1)
    right = np.zeros(probe.depth + 1)
    for context, choices, gold in items:
        likelihoods = np.zeros((3, probe.depth + 1))
        for number, choice in enumerate(choices):
            ids, begin, seen = tokenizer(context + choice)["input_ids"], len(tokenizer(context)["input_ids"]), []
            rows = next(batches([ids], 1))
            probe.run(rows, on_input=lambda position, h: seen.append(h[0]))
            with torch.no_grad():
                logits = [probe.lens(h) if lens is None else lens(i, h) for i, h in enumerate(seen)]
                logits.append(probe.logits(rows)[0])
            for index, here in enumerate(logits):
                logs = here.log_softmax(-1)
                likelihoods[number, index] = sum(logs[t - 1, ids[t]].item() for t in range(begin, len(ids)))
        right += likelihoods.argmax(0) == gold
    for batch_size in (1, 7):
        found = early_exit_accuracy(probe, tokenizer, items, lens, batch_size)
        assert np.array_equal(found.accuracy, right / 12)
        monkeypatch.setattr(lens_module, "LOGITS", 2 * 97)
    assert found.relative[-1] == 1


def test_choices_of_one_token_share_a_forward(tokenizer, monkeypatch):
    model, forwards = tiny_model(), []
    items = [(words(5, 6, 7), [" w8", " w9", " w10"], 1), (words(5, 6), [" w7", " w8"], 0)]
    real = Probe.run
    probe = Probe(model)
    monkeypatch.setattr(
        Probe, "run", lambda self, rows, **kw: forwards.append(len(rows.input_ids)) or real(self, rows, **kw)
    )
    early_exit_accuracy(probe, tokenizer, items)
    assert forwards == [2]


def test_prompts_that_do_not_fit_lose_their_beginning(tokenizer):
    model = tiny_model(max_position_embeddings=8)
    long = words(*range(30, 50))
    items = [(long, [" w5 w6", " w7 w8"], 0), (words(*range(44, 50)), [" w5 w6", " w7 w8"], 0)]
    first, second = (early_exit_accuracy(model, tokenizer, [item]).accuracy for item in items)
    assert np.array_equal(first, second)
    with pytest.raises(ValueError, match=r"items\[0\], choice .* no token is left to score"):
        early_exit_accuracy(model, tokenizer, [("w2", [words(*range(30, 50))], 0)])


def test_items_that_cannot_be_scored_are_refused(tokenizer):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"items\[0\] has gold=2, and 2 choices"):
        early_exit_accuracy(model, tokenizer, [("w5", [" w6", " w7"], 2)])
    with pytest.raises(ValueError, match=r"items\[1\], choice '': no token is left"):
        early_exit_accuracy(model, tokenizer, [("w5", [" w6"], 0), ("w5", [""], 0)])
    with pytest.raises(ValueError, match=r"none to predict it from"):
        early_exit_accuracy(model, tokenizer, [("", [" w6"], 0)])
    with pytest.raises(ValueError, match="items is empty"):
        early_exit_accuracy(model, tokenizer, [])


# Items of lm-eval's tasks


def test_a_task_s_items_are_its_requests():
    pytest.importorskip("lm_eval")
    items = task_items("looped_var_assign_math_depth_0", limit=4)
    assert len(items) == 4
    for context, choices, gold in items:
        assert len(context.split("\n\nThe following is")) == 6 and context.endswith("Answer:")
        asked = context.rsplit("\n", 1)[0].rsplit(" ", 1)[1].rstrip("?")
        last = context.rsplit("equations.", 1)[1]
        assert f"{asked}={choices[gold].strip()}\n" in last and len(choices) == 5
        assert all(choice.startswith(" ") for choice in choices)
    shorter = task_items("looped_var_assign_math_depth_0", limit=4, num_fewshot=0)
    assert [context.endswith(short) for (context, *_), (short, *_) in zip(items, shorter)] == [True] * 4
    sums = task_items("looped_addition_2", limit=2)
    assert all(len(choices) == 1 and gold == 0 for _, choices, gold in sums)


def test_a_task_of_local_files_is_read_from_its_folder():
    pytest.importorskip("lm_eval")
    folder = Path(__file__).parent / "fixtures" / "eval"
    items = task_items("looped_growing_hellaswag", limit=2, num_fewshot=0, data_dir=folder)
    assert len(items) == 2 and all(len(choices) == 4 for _, choices, _ in items)


def test_tasks_without_likelihoods_and_names_that_are_none_are_refused():
    pytest.importorskip("lm_eval")
    folder = Path(__file__).parent / "fixtures" / "eval"
    with pytest.raises(ValueError, match="is no task of this package. Did you mean .*looped_copy_real"):
        task_items("looped_copy_reel")
    with pytest.raises(ValueError, match="asks for generate_until"):
        task_items("looped_growing_nq", data_dir=folder)


@pytest.mark.slow
def test_lm_eval_is_imported_only_where_a_task_is_asked_for():
    script = "import sys, modeling_looped.diagnostics.lens; assert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
