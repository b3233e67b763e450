"""Adapters as peft's users put them on a checkpoint in a folder: trained, saved, loaded, merged, swapped."""

import copy
from pathlib import Path

import pytest
import torch
from checkpoint_folders import CHAT, CHAT_TEMPLATE, LONGER_CHAT, PROMPTS, SENTENCES, write_checkpoints
from conftest import HEAVY_TAIL, TINY_MODELS, tiny_recurrent_gpt
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, IA3Config, LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from trl import SFTConfig, SFTTrainer


pytestmark = pytest.mark.slow  # the whole of it takes a minute
SHORT = {"max_new_tokens": 12, "do_sample": False}
every_family = pytest.mark.parametrize("family", TINY_MODELS)

# What "all-linear" adapts besides the maps of every layer. In each family it leaves the head out.
BLOCK = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
SECTIONS = ["prelude.0", "core.0", "core.1", "coda.0"]
ALL_LINEAR = {
    "looped_gpt": (SECTIONS, BLOCK, ["injection.proj"]),
    "recurrent_gpt": (SECTIONS, BLOCK, ["injection.proj", "injection.gate_hidden", "injection.gate_logit"]),
    "mixture_of_recursions": (SECTIONS, BLOCK, ["router.0.proj", "router.1.proj", "router.2.proj"]),
    "grown_llama": ([f"layers.{i}" for i in range(4)], [*BLOCK, "mlp.gate_proj"], []),
}
CONFIGS = {
    "lora": lambda: LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.CAUSAL_LM),
    "dora": lambda: LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type=TaskType.CAUSAL_LM),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type=TaskType.CAUSAL_LM,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def load(folder: Path):
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def logits(model, tokenizer, num_recurrences: int = 3) -> torch.Tensor:
    """Of the real tokens of all sentences in one batch."""
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return model.eval()(**inputs, num_recurrences=num_recurrences).logits[inputs["attention_mask"].bool()]


def train(model, tokenizer, steps: int = 3, learning_rate: float = 3e-2) -> None:
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    model.train()
    for _ in range(steps):
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def assert_close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    """In parts of the largest value: merging rounds each weight once."""
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=atol)


@pytest.mark.parametrize("method", CONFIGS)
@every_family
def test_an_adapter_trains_alone_comes_back_by_its_folder_and_merges(family, method, folders, tmp_path):
    tokenizer, base = load(folders[family])
    plain = {depth: logits(base, tokenizer, depth) for depth in (1, 3)}
    start = {name: tensor.clone() for name, tensor in base.named_parameters()}
    model = get_peft_model(base, CONFIGS[method]())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name in before if ".lora_" in name or ".ia3_" in name}
    train(model, tokenizer)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == trainable

    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors")), "the base model stays where it is"
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.peft_config["default"].base_model_name_or_path == str(folders[family])
    adapted = {depth: logits(model, tokenizer, depth) for depth in (1, 3)}
    for depth, expected in adapted.items():
        assert torch.equal(logits(loaded, tokenizer, depth), expected)
        assert (expected - plain[depth]).abs().max() > 0.05

    prompt = tokenizer(PROMPTS[0], return_tensors="pt")
    written = model.generate(**prompt, **SHORT, num_recurrences=2)
    assert torch.equal(loaded.generate(**prompt, **SHORT, num_recurrences=2), written)
    merged = loaded.merge_and_unload()
    assert type(merged) is type(base)
    for depth, expected in adapted.items():
        assert_close(logits(merged, tokenizer, depth), expected)
    with model.disable_adapter():
        assert all(torch.equal(logits(model, tokenizer, depth), expected) for depth, expected in plain.items())
    assert {name: tensor.shape for name, tensor in merged.named_parameters()} == {n: t.shape for n, t in start.items()}


@every_family
def test_all_linear_is_the_maps_of_every_layer_with_injection_gate_and_routers_and_without_the_head(family, folders):
    layers, maps, beside = ALL_LINEAR[family]
    expected = [f"model.{layer}.{name}" for layer in layers for name in maps] + [f"model.{name}" for name in beside]
    _, base = load(folders[family])
    model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    assert sorted(model.targeted_module_names) == sorted(expected)
    adapted = {name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert adapted == {f"base_model.model.{name}" for name in expected}


@pytest.mark.parametrize(
    ("family", "fields", "beside"),
    [
        ("looped_gpt", {"injection": "additive"}, []),
        ("looped_gpt", {"injection": "hyperconnection"}, []),
        ("recurrent_gpt", {"lora_rank": 4}, ["injection.proj", "injection.gate_hidden", "injection.gate_logit"]),
        ("recurrent_gpt", HEAVY_TAIL, ["injection.proj"]),
        ("mixture_of_recursions", {"routing": "token_choice", "router": "linear"}, ["router.0.proj"]),
        ("mixture_of_recursions", {"router": "mlp"}, [f"router.{i}.proj.{j}" for i in range(3) for j in (0, 2)]),
    ],
)
def test_all_linear_in_other_forms_of_the_families(family, fields, beside):
    layers, maps, _ = ALL_LINEAR[family]
    expected = [f"model.{layer}.{name}" for layer in layers for name in maps] + [f"model.{name}" for name in beside]
    model = get_peft_model(TINY_MODELS[family](**fields), LoraConfig(target_modules="all-linear"))
    assert sorted(model.targeted_module_names) == sorted(expected)


@every_family
def test_peft_asks_for_target_modules_where_none_are_named(family, folders):
    _, base = load(folders[family])
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM))


@pytest.mark.slow
@every_family
def test_two_adapters_on_one_model_and_one_hot_swapped_are_what_each_is_alone(family, folders, tmp_path):
    tokenizer, _ = load(folders[family])
    alone, texts = {}, {}
    prompt = tokenizer(PROMPTS[0], return_tensors="pt")
    for seed, name in enumerate(("first", "second")):
        _, base = load(folders[family])
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type=TaskType.CAUSAL_LM)
        model = get_peft_model(base, config).eval()
        model.save_pretrained(tmp_path / name)
        alone[name] = {depth: logits(model, tokenizer, depth) for depth in (1, 3)}
        texts[name] = model.generate(**prompt, **SHORT)
    assert (alone["first"][3] - alone["second"][3]).abs().max() > 0.5

    def is_alone(model, name: str) -> bool:
        same = all(torch.equal(logits(model, tokenizer, depth), found) for depth, found in alone[name].items())
        return same and torch.equal(model.generate(**prompt, **SHORT), texts[name])

    _, base = load(folders[family])
    both = PeftModel.from_pretrained(base, tmp_path / "first", adapter_name="first")
    both.load_adapter(tmp_path / "second", adapter_name="second")
    for name in ("first", "second", "first"):
        both.set_adapter(name)
        assert is_alone(both, name), name
    both.delete_adapter("second")
    assert is_alone(both, "first")

    _, base = load(folders[family])
    swapped = PeftModel.from_pretrained(base, tmp_path / "first")
    for name in ("second", "first"):
        hotswap_adapter(swapped, tmp_path / name, adapter_name="default")
        assert is_alone(swapped, name), name


SCALED = "DoRA and IA3 scale what a map gives, with its own low-rank part, and merge the scale into its weight alone"


@pytest.mark.parametrize(
    "method",
    [
        "lora",
        pytest.param("dora", marks=pytest.mark.xfail(reason=SCALED, strict=True)),
        pytest.param("ia3", marks=pytest.mark.xfail(reason=SCALED, strict=True)),
    ],
)
def test_adapters_beside_recurrent_gpt_s_own_low_rank_weights_of_each_pass_merge(method, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["recurrent_gpt"])
    base = tiny_recurrent_gpt(vocab_size=len(tokenizer), lora_rank=4, max_position_embeddings=256)
    model = get_peft_model(base, CONFIGS[method]())
    own = [name for name, _ in base.named_parameters() if ".lora.up" in name or ".lora.down" in name]
    assert own and not any(base.get_parameter(name).requires_grad for name in own)
    train(model, tokenizer)
    expected = {depth: logits(model, tokenizer, depth) for depth in (1, 3)}
    merged = copy.deepcopy(model).merge_and_unload()
    for depth, found in expected.items():
        assert_close(logits(merged, tokenizer, depth), found)


# trl


@pytest.mark.slow
@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@every_family
def test_sft_on_chats_measures_the_loss_of_the_template_s_text_lowers_it_and_leaves_what_a_chat_needs(
    family, peft, folders, tmp_path
):
    tokenizer, base = load(folders[family])
    chats = [
        [*chat, {"role": "assistant", "content": answer}]
        for chat, answer in ((CHAT, "A tern."), (LONGER_CHAT, "Behind the tower."), (CHAT[1:], "Boats."))
    ]
    nats = count = 0
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logs = base(ids).logits[0, :-1].double().log_softmax(-1)
        nats -= logs.gather(-1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    data = Dataset.from_dict({"messages": chats})
    trainer = SFTTrainer(
        model=str(folders[family]),
        args=SFTConfig(
            tmp_path / "run",
            max_steps=6,
            learning_rate=1e-2 if peft else 3e-3,
            per_device_train_batch_size=3,
            per_device_eval_batch_size=3,
            max_length=None,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.CAUSAL_LM) if peft else None,
    )
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(nats / count, abs=1e-3)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    trainer.save_model(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").is_file() == peft
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.chat_template == CHAT_TEMPLATE and saved.get_vocab() == tokenizer.get_vocab()

    loaded = (AutoPeftModelForCausalLM if peft else AutoModelForCausalLM).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, saved), logits(trainer.model, saved))
    generator = pipeline("text-generation", str(tmp_path / "out"))
    inputs = saved.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        output = trainer.model.generate(**inputs, **SHORT)
    answer = saved.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert generator(CHAT, **SHORT)[0]["generated_text"][-1] == {"role": "assistant", "content": answer}
