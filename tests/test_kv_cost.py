"""What compressed caches cost is measured against the exact function, and leaves the model as it was."""

import pytest
import torch
from conftest import randomise, tiny_model
from looped_cli import app
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from modeling_looped import (
    MixtureOfRecursionsConfig,
    MixtureOfRecursionsForCausalLM,
    RecurrentGPTConfig,
    RecurrentGPTForCausalLM,
)
from modeling_looped.accounting import kv_cache_bytes
from modeling_looped.eval.kv_cost import kv_cost, kv_cost_table
from modeling_looped.recipes.tokens import token_stream, train_tokenizer


TEXTS = [f"line {number} of a text that is held out, {number * number} times\n" * 3 for number in range(12)]
WINDOW = {"prompt_length": 20, "continuation": 9, "rows": 5}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def test_all_is_the_uncached_loss_and_others_keep_less(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), kv_sharing=2).train()
    costs = {row.strategy: row for row in kv_cost(model, tokenizer, TEXTS, ["all", 1, 2, 3], **WINDOW)}
    assert model.config.kv_sharing == 2 and model.training
    windows = torch.from_numpy(token_stream(tokenizer, TEXTS)[: 5 * 29]).long().view(5, 29)
    with torch.no_grad():
        logits = model.eval()(windows, use_cache=False).logits[:, 19:-1]
    exact = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 20:].flatten()).item()
    assert abs(costs["all"].nats_per_token - exact) < 1e-4
    assert costs["all"].perplexity_ratio == costs["all"].cache_ratio == 1
    assert costs[3].nats_per_token == costs["all"].nats_per_token  # three passes, all of them kept
    assert costs[1].nats_per_token != costs["all"].nats_per_token
    for kept in (1, 2):
        model.config.kv_sharing = kept
        assert costs[kept].cache_bytes_per_1000_tokens == kv_cache_bytes(model.config, 1000, bytes_per_value=4)


@pytest.mark.parametrize("family", ["looped", "recurrent"])
def test_named_strategies_keep_one_pass_and_compute_another_function(tokenizer, family):
    if family == "looped":
        model = tiny_model(vocab_size=len(tokenizer))
    else:
        fields = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 4, "num_core_layers": 2}
        model = randomise(RecurrentGPTForCausalLM(RecurrentGPTConfig(**fields, num_recurrences=3)))
    costs = kv_cost(model, tokenizer, TEXTS, **WINDOW)
    assert [row.strategy for row in costs] == ["all", "first", "average", "last"]
    for row in costs[1:]:
        assert row.cache_ratio == 4 / 8
        assert abs(row.nats_per_token - costs[0].nats_per_token) > 1e-4, row


def test_depth_is_the_call_s(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), trained_recurrences=5)
    deep, shallow = (kv_cost(model, tokenizer, TEXTS, ["all"], depth, **WINDOW)[0] for depth in (5, 1))
    assert deep.cache_bytes_per_1000_tokens == shallow.cache_bytes_per_1000_tokens * (2 + 2 * 5) / (2 + 2 * 1)
    assert deep.nats_per_token != shallow.nats_per_token


def test_a_strategy_that_the_family_refuses_is_a_row(tokenizer):
    fields = {"vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 4, "num_recurrences": 3}
    model = randomise(MixtureOfRecursionsForCausalLM(MixtureOfRecursionsConfig(**fields)))
    costs = kv_cost(model, tokenizer, TEXTS, **WINDOW)
    assert [row.strategy for row in costs if row.refused is None] == ["all", "first"]
    assert "kv_sharing='average'" in costs[2].refused and costs[2].nats_per_token is None
    assert model.config.kv_sharing == "all"
    assert len(kv_cost_table(costs).splitlines()) == 5


def test_windows_that_do_not_fit_are_refused(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="prompt_length=120.*max_position_embeddings=128"):
        kv_cost(model, tokenizer, TEXTS, prompt_length=120, continuation=9)
    with pytest.raises(ValueError, match="one window takes 100"):
        kv_cost(model, tokenizer, ["short\n"], prompt_length=90, continuation=10)
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no kv_sharing"):
        kv_cost(dense, tokenizer, TEXTS)


def test_the_command_prints_a_row_for_each_strategy(tmp_path, tokenizer):
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n\n".join(TEXTS))
    arguments = ["--strategies", "2, widest", "--prompt-length", "20", "--continuation", "9"]
    result = CliRunner().invoke(app, ["kv-cost", str(tmp_path), str(tmp_path / "text.txt"), *arguments])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["strategy", "all", "2", "widest"]
