"""LoRA on a looped block, the same in every pass or one for each."""

import copy

import pytest
import torch
from conftest import TINY_MODELS, randomise, tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
from modeling_looped.adapters import adapters_by_recurrence
from modeling_looped.looping import loop, unroll


IDS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "pad_token_id": 0}
PASSES = ["first", "second", "third"]


def grown() -> GrownLlamaForCausalLM:
    return randomise(GrownLlamaForCausalLM(GrownLlamaConfig(**SIZE, depth_plan="Loop(1-2x3-1)")), std=0.15)


def looped_llama() -> LlamaForCausalLM:
    model = randomise(LlamaForCausalLM(LlamaConfig(**SIZE, num_hidden_layers=4)), std=0.15)
    loop(model, 1, 3, 2)
    return model


def looped_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_head=2, n_layer=4, pad_token_id=0, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    )
    model = randomise(GPT2LMHeadModel(config), std=0.15)
    loop(model, 1, 3, 2)
    return model


MODELS = {"grown_llama": grown, "looped llama": looped_llama, "looped gpt2": looped_gpt2, "looped_gpt": tiny_model}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def lora(model, names=("default",), only: str | None = None) -> PeftModel:
    """Random weights in A and B: at peft's own start B = 0 no adapter would change anything."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=only or "all-linear", init_lora_weights=False)
    peft_model = get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, config)
    return peft_model


@pytest.mark.parametrize("family", ["grown_llama", "looped_gpt", "recurrent_gpt"])
def test_lora_on_the_looped_block_trains_merges_and_unmerges_at_every_depth(family):
    model = TINY_MODELS[family]()
    block = r".*\.layers\.[12]\..*_proj" if family == "grown_llama" else r".*\.core\.\d+\..*_proj"
    peft_model = lora(model, only=block)
    trained = {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    assert trained and all(".layers.1." in name or ".layers.2." in name or ".core." in name for name in trained)
    start = {name: parameter.detach().clone() for name, parameter in peft_model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        peft_model(input_ids=IDS, labels=IDS, num_recurrences=3).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in peft_model.named_parameters():
        assert torch.equal(parameter, start[name]) == (name not in trained), name
    peft_model.eval()

    def by_depth():
        with torch.no_grad():
            return [peft_model(input_ids=IDS, num_recurrences=r).logits for r in (1, 2, 3, 5)]

    before = by_depth()
    with peft_model.disable_adapter():
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(by_depth(), before))
    peft_model.merge_adapter()
    merged = by_depth()
    peft_model.unmerge_adapter()
    for unmerged, alone, together in zip(by_depth(), before, merged):
        scale = alone.abs().max()
        torch.testing.assert_close(together / scale, alone / scale, rtol=0, atol=1e-5)
        torch.testing.assert_close(unmerged / scale, alone / scale, rtol=0, atol=1e-5)


@every_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_of_each_pass_have_the_same_gradients_under_activation_checkpointing(build, reentrant):
    model = build().train()
    peft_model = lora(model, PASSES)

    def gradients():
        peft_model.zero_grad()
        peft_model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in peft_model.named_parameters() if p.grad is not None}

    with adapters_by_recurrence(peft_model, PASSES):
        plain = gradients()
        model.enable_input_require_grads()  # as peft users do for reentrant checkpointing
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        checkpointed = gradients()
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    for name in PASSES:
        assert max(g.abs().max() for key, g in plain.items() if f".{name}." in key) > 1e-4, name


def test_the_adapter_of_a_pass_acts_in_that_pass_alone():
    """Against the unrolled Llama with each pass's adapter merged into its copies."""
    model = grown().eval()
    plain = unroll(model)
    peft_model = lora(model, PASSES)
    assert model.config.plan().order == (0, 1, 2, 1, 2, 1, 2, 3)
    occurrence = [0, 0, 0, 1, 1, 2, 2, 0]
    with torch.no_grad():
        for position, (layer, count) in enumerate(zip(model.config.plan().order, occurrence)):
            for name, module in model.model.layers[layer].named_modules():
                if hasattr(module, "lora_A"):
                    target = plain.model.layers[position].get_submodule(name)
                    target.weight += module.get_delta_weight(PASSES[count])
        single = peft_model(input_ids=IDS).logits
        with adapters_by_recurrence(peft_model, PASSES):
            torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-4)
            text = model.generate(IDS, max_new_tokens=5, do_sample=False)
            assert torch.equal(text, plain.generate(IDS, max_new_tokens=5, do_sample=False))
            assert (model(IDS).logits - single).abs().max() > 1e-2


@every_model
def test_undoing_leaves_one_adapter_for_all_passes_as_before(build):
    model = build().eval()
    peft_model = lora(model, PASSES)
    # LoopedGPT's injection is no layer, and keeps the one adapter.
    trainable = [name for name, p in peft_model.named_parameters() if p.requires_grad and "injection" not in name]
    with torch.no_grad():
        before = peft_model(input_ids=IDS).logits
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        handle = adapters_by_recurrence(peft_model, PASSES)
        trains = [n for n, p in peft_model.named_parameters() if p.requires_grad and "injection" not in n]
        assert len(trains) == 3 * len(trainable)
        peft_model(input_ids=IDS)
        handle.undo()
        handle.undo()
        assert torch.equal(peft_model(input_ids=IDS).logits, before)
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    after = [name for name, p in peft_model.named_parameters() if p.requires_grad and "injection" not in name]
    assert after == trainable
    assert peft_model.active_adapter == "first"


def test_passes_beyond_the_last_adapter_use_the_last():
    model = grown().eval()
    peft_model = lora(model, PASSES)
    with torch.no_grad(), adapters_by_recurrence(peft_model, ["first", "second"]):
        two = model(IDS).logits
    with torch.no_grad(), adapters_by_recurrence(peft_model, ["first", "second", "second"]):
        assert torch.equal(model(IDS).logits, two)


def test_adapters_that_are_not_there_are_refused_and_nothing_is_left_behind():
    model = copy.deepcopy(grown())
    with pytest.raises(ValueError, match="has no LoRA in its layers"):
        adapters_by_recurrence(model, ["first"])
    peft_model = lora(model, PASSES[:2])
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(ValueError, match="no adapter 'third', only first, second"):
        adapters_by_recurrence(peft_model, PASSES)
    with pytest.raises(ValueError, match="adapters='first' must be a list"):
        adapters_by_recurrence(peft_model, "first")
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
