"""Early exit: the curve over recurrences is the model's own losses and distributions."""

import dataclasses
import json

import pytest
import torch
from conftest import tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from typer.testing import CliRunner

import modeling_looped
from looped_cli import app
from modeling_looped.eval.exit_curve import exit_curve
from modeling_looped.eval.held_out import held_out_loss
from modeling_looped.recipes.tokens import train_tokenizer


IDS = torch.arange(48).view(2, 24) * 7 % 96 + 1


def recurrent_gpt():
    set_seed(0)
    config = modeling_looped.RecurrentGPTConfig(
        vocab_size=97, hidden_size=32, num_attention_heads=2, max_position_embeddings=64, num_recurrences=4
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["looped_gpt", "recurrent_gpt"])
def model(request):
    return tiny_model() if request.param == "looped_gpt" else recurrent_gpt()


def test_the_last_exit_is_the_model_itself(model):
    labels = IDS.clone()
    labels[:, 1:] = model(IDS).logits[:, :-1].argmax(-1)
    last = exit_curve(model, [{"input_ids": IDS, "labels": labels}])[-1]
    assert last.accuracy == 1
    assert last.num_recurrences == model.config.num_recurrences
    assert (last.frac_cum, last.retention, last.kl_to_final, last.kl_from_final) == (1, 1, 0, 0)


def test_an_exit_s_loss_is_the_model_s_own_at_that_depth(model):
    points = exit_curve(model, [IDS], max_recurrences=6)
    assert [point.num_recurrences for point in points] == list(range(model.config.min_recurrences, 7))
    for point in points:
        with torch.no_grad():
            expected = model(IDS, labels=IDS, num_recurrences=point.num_recurrences).loss.item()
        assert abs(point.loss - expected) < 1e-5


def test_gain_and_divergence_follow_their_definitions(model):
    points = exit_curve(model, [IDS])
    with torch.no_grad():
        final, first = (
            torch.distributions.Categorical(logits=model(IDS, num_recurrences=count).logits[:, :-1])
            for count in (points[-1].num_recurrences, points[0].num_recurrences)
        )
    kl = torch.distributions.kl_divergence
    assert abs(points[0].kl_to_final - kl(final, first).mean()) < 1e-4
    assert abs(points[0].kl_from_final - kl(first, final).mean()) < 1e-4
    assert points[0].gain is None and points[0].frac_cum == 0
    total = points[0].loss - points[-1].loss
    for before, point in zip(points, points[1:]):
        assert point.gain == before.loss - point.loss
        assert abs(point.frac_cum - (before.frac_cum + point.gain / total)) < 1e-9
    hits = (final.logits.argmax(-1) == IDS[:, 1:]).float().mean()
    assert abs(points[-1].accuracy - hits) < 1e-6


def test_tokens_count_alike_in_any_split_and_padding_counts_for_nothing():
    model = tiny_model()
    whole = exit_curve(model, [IDS])
    split = exit_curve(model, iter([IDS[:1], {"input_ids": IDS[1:]}]))
    mask = torch.cat([torch.ones_like(IDS), torch.zeros_like(IDS)], dim=1)
    padded = exit_curve(model, [{"input_ids": torch.cat([IDS, IDS], dim=1), "attention_mask": mask}])
    for a, b, c in zip(whole, split, padded, strict=True):
        for other in map(dataclasses.astuple, (b, c)):
            assert dataclasses.astuple(a)[3:] == pytest.approx(other[3:], rel=1e-3, abs=1e-4, nan_ok=True)
    assert not model.training
    exit_curve(model.train(), [IDS])
    assert model.training


def test_what_has_no_curve_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="max_recurrences=2 .*num_recurrences=3"):
        exit_curve(model, [IDS], max_recurrences=2)
    with pytest.raises(ValueError, match="no token to predict"):
        exit_curve(model, [{"input_ids": IDS, "labels": torch.full_like(IDS, -100)}])
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=97))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no recurrences"):
        exit_curve(gpt2, [IDS])


def test_the_command_prints_the_losses_of_eval(tmp_path):
    texts = [f"line {number} of a text that is held out\n" for number in range(20)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(texts, 280)
    model = tiny_model(vocab_size=len(tokenizer))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "checkpoint")
    arguments = ["exits", str(tmp_path / "checkpoint"), str(tmp_path / "held_out.jsonl"), "--sequence-length", "16"]
    run = CliRunner().invoke(app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output
    points = json.loads(run.stdout)
    losses = held_out_loss(model, tokenizer, texts, [1, 2, 3], sequence_length=16)
    for point, loss in zip(points, losses, strict=True):
        assert abs(point["loss"] - loss.nats_per_token) < 1e-5
    table = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert table[0].split()[:2] == ["recurrences", "nats/token"] and len(table) == 4
