"""Fine-tuning with trl and peft: what is asked, what counts in the loss, how choices are scored, and what comes out."""

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODELS, next_token_loss, randomise, tiny_grown_llama, tiny_model, tiny_recurrent_gpt
from datasets import Dataset
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

import modeling_looped
from modeling_looped import LoopedGPTConfig, looping
from modeling_looped.recipes.sft import (
    SftData,
    SftModel,
    SftTraining,
    block_linears,
    check_output,
    choice_accuracy,
    choice_scores,
    lora_config,
    main,
    read_examples,
    sft,
)
from modeling_looped.recipes.synthetic import FORMS, REAL_WORDS, arithmetic_texts, copying, variable_assignment
from modeling_looped.recipes.tokens import train_tokenizer


# Eight items of depth 1 in one batch, three steps: the loss is that of all items, and the order does not matter.
DATA = SftData(form="basic", depths=[1], eval_depths=[0, 1], items=8, eval_items=6)
TRAINING = SftTraining(
    learning_rate=3e-3, warmup=0.0, batch_size=8, epochs=3, precision="no", arguments={"logging_steps": 1}
)
every_family = pytest.mark.parametrize("tiny", TINY_MODELS.values(), ids=TINY_MODELS)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [item.text for form in FORMS for depth in range(3) for item in variable_assignment(form, depth, 30, 0)]
    return train_tokenizer(texts, 300)


@pytest.fixture
def build(tokenizer):
    """A tiny model for the tokenizer, of the same weights at every call."""
    return lambda tiny=tiny_model, **fields: tiny(
        **{"vocab_size": len(tokenizer), "max_position_embeddings": 192, "eos_token_id": 0, "pad_token_id": 1, **fields}
    )


@pytest.fixture
def tune(tokenizer, tmp_path):
    def run(model, data=DATA, training=TRAINING, folder="out", **kwargs):
        return sft(model, tokenizer, data, training, tmp_path / folder, progress=False, **kwargs)

    return run


def changed(**fields) -> SftTraining:
    return SftTraining(**{**vars(TRAINING), **fields})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def answer_losses(model, tokenizer, pairs: list[tuple[str, str]], **arguments) -> list[tuple[float, int]]:
    """Of each (prompt, answer), alone and without padding: nats of the answer with its end of text, and tokens."""
    losses = []
    for prompt, answer in pairs:
        tokens = tokenizer(answer + tokenizer.eos_token)["input_ids"]
        row = torch.tensor([tokenizer(prompt)["input_ids"] + tokens])
        labels = row.clone()
        labels[:, : -len(tokens)] = -100
        losses.append((next_token_loss(model(row, **arguments).logits, labels).item() * len(tokens), len(tokens)))
    return losses


def answer_loss(model, tokenizer, data=DATA, **arguments) -> float:
    """Mean over the tokens of all answers of the training data."""
    examples, _ = data.examples()
    pairs = [(example["prompt"], example["completion"]) for example in examples]
    losses, counts = zip(*answer_losses(model, tokenizer, pairs, **arguments))
    return sum(losses) / sum(counts)


# The items


def test_the_three_forms_are_the_templates_of_section_5_2():
    basic, math_form, code = (variable_assignment(form, 1, 1, seed=3, num_variables=2)[0] for form in FORMS)
    assert basic.prompt == "Fill in blank:\n\nt=1\nk=22\no=t\nh=k\no=___. ->"
    assert math_form.prompt == (
        "The following is a set of simple mathematical equations.\n\nt=1\nk=22\no=t\nh=k\n"
        "What is the numerical value of o?\nAnswer:"
    )
    assert code.prompt == (
        "The following is a very short Python program. Use the program to resolve the value of the variable in the "
        "question.\nProgram:\nt = 1\nk = 22\no = t\nh = k\n\nQuestion:\nWhat is the value of o?\nAnswer:"
    )
    for item in (basic, math_form, code):
        assert (item.answer, item.choices, item.depth) == ("1", ("1", "22"), 1)
        assert item.text == item.prompt + " 1"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_chain_ends_after_exactly_its_depth_and_refers_only_to_lines_above(form, depth):
    asked_at = []
    for item in variable_assignment(form, depth, 40, seed=1):
        lines = re.findall(r"^([a-z]) ?= ?(\w+)$", item.prompt, re.MULTILINE)
        asked = re.search(r"([a-z])(?:=___|\?)", item.prompt).group(1)
        values = dict(lines)
        assert len(lines) == len(values) == 5 * (depth + 1)
        assert [value for _, value in lines[:5]] == list(item.choices)
        assert len(set(item.choices)) == 5 and all(1 <= int(choice) <= 25 for choice in item.choices)
        for level in range(1, depth + 1):  # each layer is a bijection onto the one before it
            above = {name for name, _ in lines[5 * (level - 1) : 5 * level]}
            assert {source for _, source in lines[5 * level : 5 * (level + 1)]} == above
        asked_at.append([name for name, _ in lines[-5:]].index(asked))
        for _ in range(depth):
            asked = values[asked]
        assert values[asked] == item.answer
    assert set(asked_at) == set(range(5))


@pytest.mark.parametrize("kind", ["random", "real"])
def test_the_word_to_copy_stood_once_and_after_the_span(kind):
    starts, words = set(), []
    for item in copying(kind, 60, seed=0):
        first, second = item.prompt.split("\n")
        assert first == "Fill in the blank:" and second.endswith(" ___. ->")
        shown = second.removesuffix(" ___. ->").split(" ")
        words, span = shown[:10], shown[10:]
        assert len(shown) == 15 and len(set(words)) == 10 and tuple(words) == item.choices
        start = words.index(span[0])
        assert words[start : start + 5] == span and words[start + 5] == item.answer
        assert all(re.fullmatch("[a-z]{3}", word) for word in words)
        assert kind == "random" or set(words) <= set(REAL_WORDS)
        starts.add(start)
    assert starts == set(range(5))
    assert len(set(REAL_WORDS)) == len(REAL_WORDS)


def test_word_problems_calculate_right():
    texts = arithmetic_texts(400, seed=0)
    for text in texts:
        steps = [
            (int(a), operator, int(b), int(c)) for a, operator, b, c in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", text)
        ]
        assert len(steps) in (1, 2) and int(re.findall(r"\d+", text)[-1]) == steps[-1][3], text
        for a, operator, b, c in steps:
            assert {"+": a + b, "-": a - b, "*": a * b}[operator] == c, text
    assert len({re.sub(r"\d+|[A-Z][a-z]+", "", text) for text in texts}) > 100


MAKERS = {
    "assignment": lambda count, seed, split: variable_assignment("code", 2, count, seed, split=split),
    "copying": lambda count, seed, split: copying("random", count, seed, split),
}


@pytest.mark.parametrize(
    "make", [*MAKERS.values(), lambda count, seed, _: arithmetic_texts(count, seed)], ids=[*MAKERS, "arithmetic"]
)
def test_an_item_is_a_function_of_its_seed_and_number(make):
    assert make(3, 5, "train") == make(20, 5, "train")[:3]
    assert not set(make(50, 5, "train")) & set(make(50, 6, "train"))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_train_test_and_shots_share_no_item(make):
    found = [set(make(200, 0, split)) for split in ("train", "test", "shots")]
    assert len(set.union(*found)) == sum(map(len, found)) == 600


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: variable_assignment("prose", 0, 1, 0), "form='prose' must be 'basic' or 'math' or 'code'"),
        (lambda: variable_assignment("code", 5, 1, 0), "depth=5 and num_variables=5 .* 26 letters"),
        (lambda: variable_assignment("code", -1, 1, 0), "depth=-1"),
        (
            lambda: variable_assignment("code", 0, 1, 0, largest_value=4),
            "largest_value=4 must be at least num_variables=5",
        ),
        (lambda: variable_assignment("code", 0, 1, 0, split="valid"), "split='valid'"),
        (lambda: copying("made-up", 1, 0), "kind='made-up' must be 'random' or 'real'"),
    ],
)
def test_an_item_that_cannot_be_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# Scoring


def reference_scores(model, tokenizer, prompt: str, choices) -> list[float]:
    """One row a choice, no padding: the log-likelihood of what follows the prompt."""
    start = len(tokenizer(prompt)["input_ids"])
    scores = []
    for choice in choices:
        row = torch.tensor([tokenizer(f"{prompt} {choice}")["input_ids"]])
        logs = model(row, use_cache=False).logits[0, :-1].log_softmax(-1)
        scores.append(sum(logs[place, row[0, place + 1]].item() for place in range(start - 1, row.shape[1] - 1)))
    return scores


@every_family
@torch.no_grad()
def test_scores_in_batches_equal_those_of_one_row_at_a_time(build, tokenizer, tiny):
    model = build(tiny)
    items = [*variable_assignment("basic", 0, 3, 0), *variable_assignment("basic", 2, 2, 0), *copying("real", 2, 0)]
    expected = [reference_scores(model, tokenizer, item.prompt, item.choices) for item in items]
    assert len({len(tokenizer(item.prompt)["input_ids"]) for item in items}) > 3, "nothing is padded"
    for batch_size in (1, 5, 64):
        found = choice_scores(model, tokenizer, items, batch_size)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=2e-4)
    accuracy = choice_accuracy(model, tokenizer, items, 5)
    best = [max(range(len(one)), key=one.__getitem__) for one in expected]
    rights = [item.choices.index(item.answer) for item in items]
    assert accuracy.count == 7 and accuracy.accuracy == sum(map(int.__eq__, best, rights)) / 7
    leads = [one[r] - max(one[:r] + one[r + 1 :]) for one, r in zip(expected, rights)]
    assert accuracy.margin == pytest.approx(sum(leads) / 7, abs=2e-4)


@torch.no_grad()
def test_shots_are_solved_items_of_the_pool_before_the_question(build, tokenizer):
    model = build()
    pool = variable_assignment("basic", 0, 2, 0, split="shots")
    items = variable_assignment("basic", 0, 3, 0, split="test")
    found = choice_scores(model, tokenizer, items, shots=2, pool=pool)
    for item, scores in zip(items, found, strict=True):
        prompts = ["\n\n".join([a.text, b.text, item.prompt]) for a, b in (pool, pool[::-1])]
        references = [reference_scores(model, tokenizer, prompt, item.choices) for prompt in prompts]
        assert any(scores == pytest.approx(reference, abs=2e-4) for reference in references)
    deeper = choice_scores(model, tokenizer, items, shots=2, pool=pool, num_recurrences=1)
    assert deeper[0] != pytest.approx(found[0], abs=1e-2)
    assert choice_scores(model, tokenizer, items[2:], shots=2, pool=pool)[0] == pytest.approx(found[2], abs=2e-4)


def test_scoring_says_what_it_cannot_do_and_leaves_the_model_in_its_mode(build, tokenizer):
    model = build().train()
    items = variable_assignment("code", 2, 2, 0)
    choice_accuracy(model, tokenizer, items)
    assert model.training
    with pytest.raises(ValueError, match="shots=1 must be at most the 0 items of pool"):
        choice_accuracy(model, tokenizer, items, shots=1)
    with pytest.raises(ValueError, match="shots=4 make prompts of .* tokens, and the model has 192 positions"):
        choice_accuracy(model, tokenizer, items, shots=4, pool=variable_assignment("code", 2, 4, 1))
    with pytest.raises(ValueError, match="items="):
        choice_accuracy(model, tokenizer, [])


# Training


@pytest.mark.parametrize("tiny", [tiny_model, tiny_grown_llama])
def test_the_loss_is_that_of_the_answers_alone_and_falls(build, tune, tokenizer, tmp_path, tiny):
    model = build(tiny)
    expected = answer_loss(model, tokenizer)
    result = tune(model)
    (first, loss), *_, (last, end) = result.losses
    assert (first, last, result.steps) == (1, 3, 3)
    assert loss == pytest.approx(expected, abs=1e-4) and end < loss - 0.5
    assert answer_loss(model, tokenizer) < end
    assert "forward" not in vars(model), "trl's head was left on the model"

    assert [(row["depth"], row["shots"], row["count"]) for row in result.after] == [(0, 0, 6), (1, 0, 6)]
    test_items = variable_assignment("basic", 1, 6, 0, split="test")
    for scored, row in ((model, result.after[1]), (build(tiny), result.before[1])):
        assert vars(choice_accuracy(scored, tokenizer, test_items, TRAINING.batch_size)).items() <= row.items()

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    record = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert (record["before"], record["after"], record["steps"]) == (result.before, result.after, 3)
    assert record["settings"]["training"]["learning_rate"] == 3e-3 and "trl" in record["versions"]
    assert not (tmp_path / "out" / "checkpoints").exists() and not (tmp_path / "out" / "training_args.bin").exists()


@pytest.mark.parametrize("tiny", [tiny_model, tiny_grown_llama])
def test_lora_trains_nothing_but_adapters_of_the_blocks_and_reloads_equal(build, tune, tokenizer, tmp_path, tiny):
    build(tiny).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    start, ends = weights(model), block_linears(model)
    result = tune(model, peft_config=lora_config(model, rank=4), training=changed(learning_rate=3e-2))
    assert result.losses[-1][1] < result.losses[0][1] - 0.1
    trained = weights(result.model.get_base_model())
    for name, tensor in start.items():
        there = name if name in trained else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(trained[there], tensor), name
    adapted = {name.partition(".lora_")[0] for name, p in result.model.named_parameters() if p.requires_grad}
    layers = [name for name, module in model.named_modules() if module in model.model.unique_layers()]
    assert len(adapted) == len(layers) * len(ends)
    assert all(any(f".{layer}." in name for layer in layers) for name in adapted)

    rows = torch.randint(2, 99, (2, 9))
    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(reloaded(rows).logits, result.model(rows).logits, rtol=0, atol=1e-5)
    with result.model.disable_adapter():
        assert not torch.allclose(result.model(rows).logits, reloaded(rows).logits, atol=1e-2)
    assert (tmp_path / "out" / "adapter_config.json").is_file()


@every_family
def test_adapters_of_the_blocks_take_every_linear_map_in_them_and_none_outside(build, tiny):
    model = build(tiny)
    ends = block_linears(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            inside = any(module in layer.modules() for layer in model.model.unique_layers())
            assert (name.rpartition(".")[2] in ends) == inside, name


def test_a_looped_model_trains_and_is_saved_at_the_depth_asked_for(build, tune, tokenizer, tmp_path):
    model = build(num_recurrences=1)
    expected, shallow = answer_loss(model, tokenizer, num_recurrences=3), answer_loss(model, tokenizer)
    assert abs(expected - shallow) > 1e-2
    result = tune(model, training=changed(num_recurrences=3))
    assert result.losses[0][1] == pytest.approx(expected, abs=1e-4)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert config.num_recurrences == config.trained_recurrences == 3


@pytest.mark.parametrize(("tiny", "gradient_checkpointing"), [(tiny_model, False), (tiny_recurrent_gpt, True)])
def test_an_interrupted_and_continued_run_equals_an_uninterrupted_one(
    build, tune, tmp_path, tiny, gradient_checkpointing
):
    data = SftData(form="basic", depths=[0], eval_depths=[0], items=8, eval_items=2)
    training = changed(batch_size=4, epochs=2, checkpoint_every=2, gradient_checkpointing=gradient_checkpointing)
    whole = tune(build(tiny), data, training, "whole")
    assert whole.steps == 4

    model, calls = build(tiny), []

    def interrupt(module, _):
        calls.extend([1] * module.training)
        if len(calls) == 4:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune(model, data, training, "parts")
    assert "forward" not in vars(model)
    assert (tmp_path / "parts" / "checkpoints" / "checkpoint-2").is_dir()
    with pytest.raises(ValueError, match="epochs=2"):
        tune(build(tiny), data, changed(**{**vars(training), "epochs": 3}), "parts", resume=True)
    rest = tune(build(tiny), data, training, "parts", resume=True)
    assert rest.losses == whole.losses and (rest.before, rest.after) == (whole.before, whole.after)
    for (name, a), b in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("tiny", "fields"),
    [
        (TINY_MODELS["mixture_of_recursions"], {}),
        (tiny_recurrent_gpt, {"loss_per_recurrence": True, "gate_noise": 0.0, "state_noise": 0.0}),
    ],
    ids=["routing", "every exit"],
)
def test_a_loss_that_is_more_than_that_of_the_last_logits_is_the_model_s_own(build, tune, tokenizer, tiny, fields):
    model = build(tiny, **fields)
    examples, _ = DATA.examples()
    rows = [tokenizer(e["prompt"] + e["completion"] + tokenizer.eos_token)["input_ids"] for e in examples]
    inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="right")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    for i, example in enumerate(examples):
        labels[i, : len(tokenizer(example["prompt"])["input_ids"])] = -100
    with torch.no_grad():
        output = model.train()(**inputs, labels=labels)
    assert abs(output.loss - next_token_loss(output.logits, labels)) > 1e-3
    assert tune(model).losses[0][1] == pytest.approx(output.loss.item(), abs=1e-4)


def tiny_llama(**fields) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return randomise(LlamaForCausalLM(LlamaConfig(**{**sizes, "bos_token_id": 0, **fields}))).eval()


@pytest.mark.parametrize("tiny", [tiny_model, tiny_llama])
def test_micro_steps_add_up_to_the_batch(build, tune, tiny):
    data = SftData(form="basic", depths=[1], items=8, eval_items=0)
    sgd = {"learning_rate": 1e-2, "epochs": 1, "arguments": {"logging_steps": 1, "optim": "sgd"}}
    whole, parts = (tune(build(tiny), data, changed(micro_steps=n, **sgd), f"{n}") for n in (1, 4))
    assert parts.losses[0][1] == pytest.approx(whole.losses[0][1], abs=1e-5) and whole.steps == parts.steps == 1
    for (name, a), b in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def test_training_in_bf16_leaves_a_model_that_computes_in_fp32(build, tune, tokenizer):
    model = build(tiny_grown_llama)
    result = tune(model, training=changed(precision="bf16"), peft_config=lora_config(model, rank=2))
    assert "forward" not in {**vars(result.model), **vars(model)}
    assert result.model(torch.tensor([[2, 3]])).logits.dtype == torch.float32
    test_items = variable_assignment("basic", 1, 6, 0, split="test")
    assert vars(choice_accuracy(result.model, tokenizer, test_items, 8)).items() <= result.after[1].items()


def test_a_plain_decoder_with_a_loop_trains_through_it_and_keeps_it(build, tune, tokenizer, tmp_path):
    model = build(tiny_llama)
    plain = answer_loss(model, tokenizer)
    looping.loop(model, 1, 2, repeats=2)
    expected = answer_loss(model, tokenizer)
    assert abs(expected - plain) > 1e-2
    assert tune(model).losses[0][1] == pytest.approx(expected, abs=1e-4)
    rows = torch.randint(2, 99, (2, 9))
    torch.testing.assert_close(looping.load(tmp_path / "out")(rows).logits, model(rows).logits, rtol=0, atol=1e-5)


# Data of one's own


def write_lines(path: Path, *records) -> str:
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return str(path)


def turns(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_each_answer_of_a_conversation_is_an_example_that_ends_with_it(tmp_path):
    conversation = turns("a", "b", "c", "d")
    path = write_lines(tmp_path / "chats.jsonl", {"messages": conversation}, {"messages": turns("e", "f")})
    assert list(read_examples(path)) == [
        [
            {"prompt": conversation[:1], "completion": conversation[1:2]},
            {"prompt": conversation[:3], "completion": conversation[3:]},
        ],
        [{"prompt": turns("e"), "completion": [{"role": "assistant", "content": "f"}]}],
    ]
    pair = {"prompt": "1 + 1 =", "completion": " 2"}
    path = write_lines(tmp_path / "pairs.jsonl", pair, {**pair, "source": "a book"})
    assert list(read_examples(path)) == [[pair], [pair]]


def test_no_conversation_is_both_held_out_and_trained_on(tmp_path):
    chats = [turns(*f"{number}a {number}b {number}c {number}d".split()) for number in range(20)]
    path = write_lines(tmp_path / "chats.jsonl", *({"messages": chat} for chat in chats))
    sets = [SftData(dataset=path, eval_items=5, seed=seed).examples() for seed in (0, 0, 1)]
    assert sets[0] == sets[1] != sets[2]
    for train, held_out in sets:
        named = [{example["prompt"][0]["content"] for example in part} for part in (train, held_out)]
        assert (len(train), len(held_out)) == (34, 5) and not named[0] & named[1]
    with pytest.raises(ValueError, match="items=40 and eval_items=5: .* gives 5 held-out examples, .* and 34 to train"):
        SftData(dataset=path, items=40, eval_items=5).examples()


@pytest.mark.parametrize("chat", [False, True])
def test_data_of_one_s_own_is_held_out_in_part_and_measured_by_its_loss(build, tune, tokenizer, tmp_path, chat):
    questions = [(item.prompt, f" {item.answer}") for item in variable_assignment("basic", 0, 12, 0)]
    records = [{"messages": turns(*pair)} if chat else dict(zip(("prompt", "completion"), pair)) for pair in questions]
    data = SftData(dataset=write_lines(tmp_path / "own.jsonl", *records), items=8, eval_items=4)
    if chat:
        with pytest.raises(ValueError, match="chat_template=None"):
            tune(build(), data)
        tokenizer = copy.deepcopy(tokenizer)
        turn = "{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
        tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    train, held_out = data.examples()
    assert len(train) == 8 and len(held_out) == 4 and not any(example in train for example in held_out)
    model = build()
    result = sft(model, tokenizer, data, TRAINING, tmp_path / "own", progress=False)
    if not chat:
        assert result.losses[0][1] == pytest.approx(answer_loss(build(), tokenizer, data), abs=1e-4)
    (before,), (after,) = result.before, result.after
    assert before["count"] == after["count"] == 4 and after["loss"] < before["loss"] - 0.5


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (["{"], r"line 1: not JSON"),
        ([{"text": "a"}], r"line 1: needs messages"),
        ([{"messages": turns("a")}], "line 1: messages=.* no answer of an assistant"),
        ([{"messages": [{"content": "a"}]}], "line 1: needs messages"),
        (
            [{"prompt": "a", "completion": "b"}, {"messages": turns("a", "b")}],
            "line 2: messages and plain text are mixed",
        ),
        ([{"prompt": "a", "completion": turns("a")}], "line 1: needs"),
        ([], "holds no example"),
    ],
)
def test_records_that_are_no_examples_are_named_by_their_line(tmp_path, records, said):
    with pytest.raises(ValueError, match=said):
        list(read_examples(write_lines(tmp_path / "data.jsonl", *records)))


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SftData(items=5), "items=5 must be a multiple of the 2 depths"),
        (lambda: SftData(form="prose"), "form='prose'"),
        (lambda: SftData(depths=[]), r"depths=\[\]"),
        (lambda: SftData(depths=[9]), "depth=9"),
        (lambda: SftData(shots=[-1]), r"shots=\[-1\]"),
        (lambda: SftData(eval_items=-1), "eval_items=-1 must be at least 0"),
        (lambda: SftData(dataset="nowhere.jsonl").examples(), "dataset='nowhere.jsonl' is not a file"),
        (lambda: SftModel("a", lora_rank=0), "lora_rank=0 must be at least 1"),
        (lambda: SftModel("a", lora_alpha=4), "lora_alpha=4 needs lora_rank"),
        (lambda: SftModel("a", lora_rank=4, untie=True), "untie=True with lora_rank"),
        (lambda: SftTraining(batch_size=0), "batch_size=0"),
        (lambda: SftTraining(learning_rate=0.0), "learning_rate=0.0 must be positive"),
        (lambda: SftTraining(warmup=1.0), "warmup=1.0"),
        (lambda: SftTraining(precision="fp16"), "precision='fp16'"),
        (lambda: SftTraining(arguments={"max_lenght": 1}), "no 'max_lenght': did you mean 'max_length'"),
        (lambda: SftTraining(arguments={"bf16": True}), "leave bf16 out, precision sets it"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_work(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_a_model_tokenizer_or_batch_that_does_not_fit_is_refused_before_any_work(build, tune, tokenizer, tmp_path):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    cases = [
        ({}, {"vocab_size": 97}, tokenizer, "300 tokens and the model 97"),
        ({}, {}, endless, "eos_token=None"),
        ({"micro_steps": 3}, {}, tokenizer, "batch_size=8 does not split over 1 processes and 3 micro-steps"),
        ({"num_recurrences": -1}, {}, tokenizer, "num_recurrences=-1"),
        (
            {},
            {"max_position_embeddings": 16},
            tokenizer,
            "8 of 8 examples have prompts of max_length=16 tokens or more",
        ),
    ]
    for fields, of_model, used, said in cases:
        with pytest.raises(ValueError, match=said):
            sft(build(**of_model), used, DATA, changed(**fields), tmp_path / "out", progress=False)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="num_recurrences=2: LlamaForCausalLM has no recurrences"):
        tune(plain, training=changed(num_recurrences=2))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    check_output(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match="no run of this script"):
            check_output(tmp_path, **options)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="--resume auto continues it"):
        check_output(run)
    check_output(run, resume=True)
    (run / "sft.json").write_text("{}")
    with pytest.raises(ValueError, match="finished"):
        check_output(run, resume=True)
    check_output(run, overwrite=True)  # deleted later, when the model that replaces it is there
    assert run.exists() and (tmp_path / "notes.txt").exists()


# The command


@pytest.fixture
def recipe(build, tokenizer, tmp_path):
    """A recipe file for a tiny checkpoint, as a function of more settings of the model."""
    model = build(tiny_grown_llama)
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")

    def write(**of_model) -> str:
        sections = {
            "model": {"checkpoint": str(tmp_path / "checkpoint"), **of_model},
            "data": {"form": "basic", "depths": [0], "eval_depths": [0], "items": 8, "eval_items": 4},
            "training": {"learning_rate": 3e-3, "batch_size": 4, "epochs": 1, "precision": "no"},
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
        return str(tmp_path / "recipe.yaml")

    return write


def test_the_command_trains_once_and_does_not_overwrite_unasked(recipe, tmp_path, capsys):
    out = str(tmp_path / "out")
    main(["--config", recipe(), "--output_dir", out, "--learning_rate", "1e-3"])
    assert "depth 0, 0 shots: accuracy" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert record["steps"] == 2 and record["settings"]["training"]["learning_rate"] == 1e-3
    assert record["settings"]["recipe"]["data"]["items"] == 8
    AutoModelForCausalLM.from_pretrained(out)

    nowhere = ["--checkpoint", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path / "other")]
    for options, said in ((["--output_dir", out], "--overwrite"), (nowhere, "holds no configuration")):
        with pytest.raises(SystemExit) as ended:
            main(["--config", recipe(), *options])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    main(["--config", recipe(), "--output_dir", out, "--resume", "auto"])
    assert "finished run" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--config", recipe(), "--output_dir", out, "--overwrite", "--checkpoint", str(tmp_path / "nowhere")])
    assert (tmp_path / "out" / "sft.json").is_file()
    main(["--config", recipe(), "--output_dir", out, "--overwrite", "--epochs", "2"])
    assert json.loads((tmp_path / "out" / "sft.json").read_text())["steps"] == 4


def test_a_dry_run_writes_nothing_and_counts_what_trains(recipe, tmp_path, capsys, build):
    main(["--config", recipe(), "--dry-run"])
    total = build(tiny_grown_llama).num_parameters()
    said = capsys.readouterr().out
    assert f"{total:,} parameters; {total:,} are trained" in said and "2 steps of 4 examples" in said
    main(["--config", recipe(lora_rank=2), "--dry-run", "--output_dir", str(tmp_path / "out")])
    trained = int(re.search(r"; ([\d,]+) are trained", capsys.readouterr().out).group(1).replace(",", ""))
    assert 0 < trained < total / 10
    assert not (tmp_path / "out").exists()


def test_untied_passes_become_layers_that_train_apart(recipe, tmp_path):
    tied = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    main(["--config", recipe(untie=True), "--output_dir", str(tmp_path / "out"), "--num_recurrences", "2"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is LlamaForCausalLM
    first, second = (model.model.layers[i].mlp.up_proj.weight for i in (1, 3))
    assert len(model.model.layers) == 1 + 2 * 2 + 1
    shared = tied.model.layers[1].mlp.up_proj.weight
    assert (first - shared).abs().max() > 1e-4 and (first - second).abs().max() > 1e-4
    assert (first - shared).abs().max() < 0.02 and (second - shared).abs().max() < 0.02


# trl's other trainers


def preferences() -> Dataset:
    items = variable_assignment("basic", 0, 4, 0)
    wrong = [next(choice for choice in item.choices if choice != item.answer) for item in items]
    return Dataset.from_list(
        [
            {"prompt": item.prompt, "chosen": f" {item.answer}", "rejected": f" {other}"}
            for item, other in zip(items, wrong, strict=True)
        ]
    )


def one_step(folder: Path) -> dict:
    return {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "bf16": False, "activation_checkpointing": True, "report_to": "none", "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def step_changes_every_parameter(trainer, model) -> dict:
    """Trains, and returns what trl logged of the step."""
    start = weights(model)
    trainer.train()
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())
    return trainer.state.log_history[0]


@pytest.mark.parametrize("tiny", [tiny_model, tiny_grown_llama])
def test_trl_s_preference_trainer_starts_from_indifference_and_moves(build, tokenizer, tmp_path, tiny):
    model, pairs = build(tiny), preferences()
    losses = answer_losses(model, tokenizer, list(zip(pairs["prompt"], pairs["chosen"])))
    expected = -sum(loss for loss, _ in losses) / len(losses)
    trainer = DPOTrainer(
        model, build(tiny), DPOConfig(**one_step(tmp_path)), train_dataset=pairs, processing_class=tokenizer
    )
    log = step_changes_every_parameter(trainer, model)
    assert log["loss"] == pytest.approx(math.log(2), abs=1e-6)
    if tiny is tiny_grown_llama or hasattr(LoopedGPTConfig, "final_logit_softcapping"):
        assert log["logps/chosen"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ["LoopedGPT", "GrownLlama"])
def test_trl_s_reward_trainer_moves_every_parameter(build, tokenizer, tmp_path, name):
    config = build(tiny_model if name == "LoopedGPT" else tiny_grown_llama).config
    config.num_labels = 1
    model = randomise(getattr(modeling_looped, f"{name}ForSequenceClassification")(config))
    trainer = RewardTrainer(
        model, args=RewardConfig(**one_step(tmp_path)), train_dataset=preferences(), processing_class=tokenizer
    )
    assert math.isfinite(step_changes_every_parameter(trainer, model)["loss"])


# Two ranks

# One that trl computes the loss of by no means, and one with noise, which is that of the whole batch.
TWO_RANK_MODELS = ("mixture_of_recursions", "recurrent_gpt")


def trained_for_ranks(name: str, folder: Path, tokenizer) -> tuple[dict, list, list]:
    """With SGD, whose steps are the gradients: AdamW makes whole steps of rounding where a gradient is almost zero."""
    model = TINY_MODELS[name](vocab_size=len(tokenizer), max_position_embeddings=192, eos_token_id=0, pad_token_id=1)
    training = changed(learning_rate=1e-2, batch_size=4, epochs=1, arguments={"logging_steps": 1, "optim": "sgd"})
    result = sft(model, tokenizer, DATA, training, folder / name, progress=False)
    return weights(model), [loss for _, loss in result.losses], [*result.before, *result.after]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_and_score_as_one_process(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        __file__,
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for name in TWO_RANK_MODELS:
        expected, losses, rows = trained_for_ranks(name, tmp_path / "one", tokenizer)
        for rank in range(2):
            found, losses_of_rank, rows_of_rank = torch.load(tmp_path / f"{name}-{rank}.pt")
            for tensor in expected:
                torch.testing.assert_close(found[tensor], expected[tensor], rtol=0, atol=1e-6, msg=f"{name}: {tensor}")
            assert losses_of_rank == pytest.approx(losses, abs=1e-5)
            for one, other in zip(rows_of_rank, rows, strict=True):
                assert one == pytest.approx(other, abs=1e-4)


if __name__ == "__main__":
    here = Path(sys.argv[1])
    used = AutoTokenizer.from_pretrained(here / "tokenizer")
    for family in TWO_RANK_MODELS:
        torch.save(trained_for_ranks(family, here / "two", used), here / f"{family}-{os.environ['RANK']}.pt")
