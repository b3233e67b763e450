"""On weights that somebody trained, SmolLM2-135M: converted, looped and unrolled models are equal, not nearly so."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from modeling_looped import GrownLlamaForCausalLM
from modeling_looped.eval.held_out import held_out_loss
from modeling_looped.eval.loop_sweep import loop_sweep
from modeling_looped.eval.smollm2 import smollm2_checkpoint
from modeling_looped.interventions import executed_plan
from modeling_looped.looping import add_recurrence, loop, unroll


pytestmark = pytest.mark.smollm2
BLOCK = 12, 16
TEXTS = [
    "The capital of France is Paris, a city on the river Seine with about two million inhabitants.",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
]


@pytest.fixture(scope="session")
def folder():
    pytest.importorskip("gguf", reason="needs gguf to read the weights: pip install 'modeling-looped[test]'")
    try:
        return smollm2_checkpoint()
    except (OSError, ValueError) as error:
        pytest.skip(f"needs the SmolLM2-135M weights: {error}")


@pytest.fixture(scope="session")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def llama(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def grown(folder):
    return GrownLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def ids(tokenizer):
    return [tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"] for text in TEXTS]


@torch.no_grad()
def logits(model, ids) -> torch.Tensor:
    """Of all positions of all texts: (positions, vocabulary), fp32."""
    return torch.cat([model(text, use_cache=False).logits[0] for text in ids])


def written(model, text: torch.Tensor, **options) -> list[int]:
    return model.generate(text[:, :8], do_sample=False, max_new_tokens=12, min_new_tokens=12, **options)[0].tolist()


def test_the_weights_know_what_they_were_trained_on(llama, tokenizer, ids):
    assert tokenizer.decode(written(llama, ids[0][:, :5])[5:]).startswith(" Paris")
    loss = held_out_loss(llama, tokenizer, TEXTS)[0].nats_per_token
    assert 1 < loss < 4


def test_grown_llama_is_llama_to_the_last_bit(llama, grown, ids):
    assert torch.equal(logits(grown, ids), logits(llama, ids))
    for text in ids:
        assert written(grown, text) == written(llama, text)


def test_a_loop_changes_the_logits_and_undo_restores_them_to_the_last_bit(llama, ids):
    before = logits(llama, ids)
    edit = loop(llama, *BLOCK, 2)
    assert executed_plan(llama).effective_depth == 38
    assert (logits(llama, ids) - before).abs().max() > 0.1
    edit.undo()
    assert torch.equal(logits(llama, ids), before)


def test_a_looped_llama_writes_the_same_with_a_cache_as_without(llama, ids):
    plain = [written(llama, text) for text in ids]
    with loop(llama, *BLOCK, 1):
        cached = [written(llama, text, use_cache=True) for text in ids]
        assert cached == [written(llama, text, use_cache=False) for text in ids]
    assert cached != plain


def test_unrolled_it_is_a_plain_llama_of_more_layers(llama, ids):
    with loop(llama, *BLOCK, 1):
        looped, unrolled = logits(llama, ids), unroll(llama)
    assert type(unrolled) is LlamaForCausalLM and unrolled.config.num_hidden_layers == 34
    assert torch.equal(logits(unrolled, ids), looped)


def test_a_retrofitted_recurrence_of_grown_llama_is_the_loop_of_llama(llama, grown, ids):
    add_recurrence(grown, *BLOCK)
    assert grown.config.depth_plan == "Loop(12-4x2-14)"
    with loop(llama, *BLOCK, 1):
        assert torch.equal(logits(grown, ids), logits(llama, ids))
        assert written(grown, ids[0]) == written(llama, ids[0])


def test_a_sweep_of_it_shares_the_layers_below_the_block_and_measures_the_looped_model(llama, tokenizer):
    runs = []
    handle = llama.model.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    rows = loop_sweep(llama, tokenizer, TEXTS, {}, 4, [1], [24], sequence_length=32)
    next(rows)
    del runs[:]
    row = next(rows)
    handle.remove()
    assert not runs
    with loop(llama, 24, 28, 1):
        expected = held_out_loss(llama, tokenizer, TEXTS, sequence_length=32)[0].nats_per_token
    assert abs(row.nats_per_token - expected) < 1e-5


def test_log_likelihoods_in_lm_eval_are_those_of_its_own_model(folder, shared):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from modeling_looped.eval.harness import LoopedLM
    from modeling_looped.eval.run import TASKS

    metadata = {"data_dir": str(shared / "data" / "eval"), "pretrained": str(folder)}
    manager = TaskManager(include_path=TASKS, include_defaults=False, metadata=metadata)
    tasks = manager.load(["looped_nine_lambada_openai", "looped_nine_arc_easy"])["tasks"].values()
    requests = []
    for task in tasks:
        task.build_all_requests(limit=100)
        requests += task.instances
    assert len(requests) >= 100 + 100 * 3
    ours, theirs = (
        kind(str(folder), device="cpu", dtype="float32", batch_size=8).loglikelihood(requests, disable_tqdm=True)
        for kind in (LoopedLM, HFLM)
    )
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=1e-3)
    assert sum(greedy for _, greedy in ours[:100]) > 20  # these weights know some last words
