"""A sweep that shares what its rows have in common measures what plain forwards of each looped model measure."""

import csv
import json

import pytest
import torch
from conftest import randomise, tiny_grown_llama
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, GraniteConfig, LlamaConfig
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped.eval.held_out import held_out_loss
from modeling_looped.eval.loop_sweep import loop_sweep, parse_tasks, plot_sweep, read_items, sweep_table, sweep_to_csv
from modeling_looped.interventions import executed_plan
from modeling_looped.looping import loop
from modeling_looped.recipes.study import read_rows
from modeling_looped.recipes.tokens import END_OF_TEXT, train_tokenizer


pytestmark = pytest.mark.slow  # studies, which train models


TEXTS = [f"line {number} of a text that is held out, {number * number} times\n" * 3 for number in range(12)]
WINDOWS = {"sequence_length": 24, "max_tokens": 120}
LENGTH = 2
CONTINUATION = {"context": "a", "continuation": "b"}
CHOICE = {"query": "a", "choices": ["b", "c"], "gold": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


def tiny(family: str, vocab_size: int, **fields):
    """Five layers that nobody trained, 64 positions."""
    if family == "grown_llama":
        return tiny_grown_llama(vocab_size=vocab_size, max_position_embeddings=64, trained_recurrences=9)
    if family == "gpt2":
        shape = {"n_layer": 5, "n_embd": 32, "n_head": 2, "n_positions": 64, "tie_word_embeddings": False}
        config = GPT2Config(vocab_size=vocab_size, **shape)
    else:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
        shape |= {"vocab_size": vocab_size, "max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 16}
        if family == "granite":
            shape["embedding_multiplier"] = 3.0
        config = {"llama": LlamaConfig, "gemma": GemmaConfig, "granite": GraniteConfig}[family](**{**shape, **fields})
    return randomise(AutoModelForCausalLM.from_config(config)).eval()


def log_likelihood(model, tokenizer, prompt: str, answer: str) -> tuple[float, bool]:
    """Of the answer's tokens, one sequence at a time, from the logits of all positions."""
    prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    targets = torch.tensor(answer)
    chosen = logits.log_softmax(-1)[range(len(answer)), targets]
    return chosen.sum().item(), bool((logits.argmax(-1) == targets).all())


def answers(model, tokenizer, items: list[dict]) -> list[tuple[bool, float, float | None]]:
    """Of each item: right or not, log-likelihood of the right answer, margin."""
    found = []
    for item in items:
        if "context" in item:
            answer = " " + item["continuation"].lstrip(" ")
            likelihood, is_right = log_likelihood(model, tokenizer, item["context"], answer)
            found.append((is_right, likelihood, None))
            continue
        prompt = f"{item['query']}\nAnswer:"
        likelihoods = [log_likelihood(model, tokenizer, prompt, f" {choice}")[0] for choice in item["choices"]]
        gold = likelihoods.pop(item["gold"])
        found.append((gold > max(likelihoods), gold, gold - max(likelihoods)))
    return found


def tasks_for(model, tokenizer) -> dict[str, list[dict]]:
    """Both kinds; some of their answers are right for a model that guesses, most are not."""
    right, wrong = [], []
    for number in range(60):
        context = f"line {number} of a text that is" + " held" * (number % 7)
        ids = tokenizer(context, return_tensors="pt", return_token_type_ids=False)["input_ids"]
        with torch.no_grad():
            word = tokenizer.decode(model(ids).logits[0, -1].argmax())
        if word[:1] == " " and word.strip() and len(tokenizer(word)["input_ids"]) == 1:
            right.append({"context": context, "continuation": word})
        wrong.append({"context": context, "continuation": "held out"})
    choices = ["held out", "a text", "times of a line", "out"]
    queries = [{"query": f"Question: line {n}{' of' * n}?", "choices": choices, "gold": n % 4} for n in range(7)]
    return {"continued": [*right[:3], *wrong[: 7 - len(right[:3])]], "chosen": queries}


@pytest.mark.parametrize("family", ["llama", "grown_llama", "gemma", "granite", "gpt2"])
def test_rows_are_those_of_plain_forwards_one_by_one(tokenizer, family):
    model = tiny(family, len(tokenizer))
    starts = [1] if family == "grown_llama" else None  # in a plan with a loop not every block runs in one piece
    tasks = tasks_for(model, tokenizer)
    plan, first_layer = executed_plan(model), []
    (model.transformer.h if family == "gpt2" else model.model.layers)[0].register_forward_pre_hook(
        lambda *_: first_layer.append(1)
    )
    before = {name: answers(model, tokenizer, items) for name, items in tasks.items()}
    for found in before.values():
        assert 0 < sum(right for right, *_ in found) < len(found) == 7
    seen, calls = [], {}
    del first_layer[:]
    for row in loop_sweep(model.train(), tokenizer, TEXTS, tasks, LENGTH, (1, 2), starts, **WINDOWS, batch_tokens=200):
        calls[row.start, row.repeats] = len(first_layer)
        assert executed_plan(model) == plan and model.training
        seen.append((row.start, row.repeats))
        model.eval()
        edit = loop(model, row.start, row.start + LENGTH, row.repeats) if row.repeats else None
        held_out = held_out_loss(model, tokenizer, TEXTS, batch_size=1, **WINDOWS)[0]
        assert row.tokens == held_out.tokens == 119
        assert abs(row.nats_per_token - held_out.nats_per_token) < 1e-5
        for name, items in tasks.items():
            right, gold, margin = zip(*answers(model, tokenizer, items))
            score = row.tasks[name]
            assert score.items == len(items)
            assert score.accuracy == sum(right) / len(items)
            assert score.log_likelihood == pytest.approx(sum(gold) / len(items), abs=1e-4)
            if name == "continued":
                assert score.margin is None
            else:
                assert score.margin == pytest.approx(sum(margin) / len(items), abs=1e-4)
            changed = [(now, then) for now, (then, *_) in zip(right, before[name])]
            assert (score.gained, score.lost) == (changed.count((True, False)), changed.count((False, True)))
        if edit:
            edit.undo()
        model.train()
        del first_layer[:]
    expected = [1] if starts else [0, 2, 1, 3]
    assert seen == [(None, 0), *((start, count) for start in expected for count in (1, 2))]
    # Granite scales its inputs_embeds and GPT-2 adds positions to them, so every row runs from the beginning.
    shares = family not in ("granite", "gpt2")
    for (start, _), count in calls.items():
        assert (count == 0) == (shares and start is not None and start > 0), (calls, start)


def test_a_block_of_all_layers_and_one_of_the_last_are_right_too(tokenizer):
    model = tiny("llama", len(tokenizer))
    for length, start in ((5, 0), (1, 4), (1, 0)):
        row = next(loop_sweep(model, tokenizer, TEXTS, {}, length, [3], [start], [(None, 0)], **WINDOWS))
        with loop(model, start, start + length, 3):
            expected = held_out_loss(model, tokenizer, TEXTS, **WINDOWS)[0].nats_per_token
        assert abs(row.nats_per_token - expected) < 1e-5, (length, start)


def test_the_prompt_begins_as_the_tokenizer_begins_texts_and_loses_its_beginning_where_it_is_too_long(tokenizer):
    model = tiny("llama", len(tokenizer))
    long = "a line of text that is held out, " * 40
    items = [{"context": "line 4 of a", "continuation": " text"}, {"context": long, "continuation": "times"}]
    begun = train_tokenizer(TEXTS, 300)
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, begun.bos_token_id)]
    )
    for tokens, prefix in ((tokenizer, []), (begun, [begun.bos_token_id])):
        expected = []
        for item, answer in zip(items, (" text", " times")):
            prompt, answer = (tokens(text, add_special_tokens=False)["input_ids"] for text in (item["context"], answer))
            ids = [*prefix, *prompt, *answer][-64:]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
            expected.append(logits[range(len(answer)), answer].sum().item())
        row = next(loop_sweep(model, tokens, TEXTS, {"task": items}, **WINDOWS))
        assert row.tasks["task"].log_likelihood == pytest.approx(sum(expected) / 2, abs=1e-4)


def test_the_csv_holds_the_rows_and_the_same_call_adds_only_what_is_missing(tokenizer, tmp_path, monkeypatch):
    model = tiny("llama", len(tokenizer))
    tasks = tasks_for(model, tokenizer)
    results = tmp_path / "folder" / "rows.csv"
    options = {"length": LENGTH, "repeats": (1, 2), **WINDOWS, "max_items": 6}
    sweep_to_csv(model, tokenizer, TEXTS, tasks, results, **options, starts=[3])
    first = results.read_text()
    rows = sweep_to_csv(model, tokenizer, TEXTS, tasks, results, **options)
    assert results.read_text().startswith(first)
    assert rows == read_rows(results)
    assert [(row["start"], row["repeats"]) for row in rows] == [
        ("", "0"), ("3", "1"), ("3", "2"), ("0", "1"), ("0", "2"), ("2", "1"), ("2", "2"), ("1", "1"), ("1", "2"),
    ]  # fmt: skip
    measured = {(row.start, row.repeats): row for row in loop_sweep(model, tokenizer, TEXTS, tasks, **options)}
    for row in rows:
        here = measured[int(row["start"]) if row["start"] else None, int(row["repeats"])]
        assert float(row["nats_per_token"]) == pytest.approx(here.nats_per_token, abs=1e-4)
        for name, score in here.tasks.items():
            assert float(row[f"{name}_accuracy"]) == pytest.approx(score.accuracy, rel=1e-5)
            assert float(row[f"{name}_log_likelihood"]) == pytest.approx(score.log_likelihood, rel=1e-4)
            assert int(row[f"{name}_gained"]) == score.gained and int(row[f"{name}_items"]) == score.items == 6
        assert float(row["chosen_margin"]) == pytest.approx(here.tasks["chosen"].margin, rel=1e-4)
        assert "continued_margin" not in row

    whole = results.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("a sweep that is complete computes nothing"))
        sweep_to_csv(model, tokenizer, TEXTS, tasks, results, **options)
    assert results.read_text() == whole

    others = [
        (model, tasks, {**options, "max_items": 5}),
        (model, tasks, {**options, "length": 1}),
        (model, tasks, {**options, "max_tokens": 119}),
        (model, {"chosen": tasks["chosen"]}, options),
        (tiny("llama", len(tokenizer), rms_norm_eps=1e-5).float(), tasks, options),
    ]
    with torch.no_grad():
        others[-1][0].lm_head.weight[0, 3] += 1e-3
    for other, items, settings in others:
        with pytest.raises(ValueError, match="rows of other settings, data or weights: name another file"):
            sweep_to_csv(other, tokenizer, TEXTS, items, results, **settings)
    assert results.read_text() == whole


def test_the_table_and_the_figure_show_changes_against_no_loop(tokenizer, tmp_path):
    model = tiny("llama", len(tokenizer))
    tasks = tasks_for(model, tokenizer)
    options = {"length": LENGTH, "repeats": [2], "starts": [3, 0], **WINDOWS}
    rows = sweep_to_csv(model, tokenizer, TEXTS, tasks, tmp_path / "rows.csv", **options)
    lines = sweep_table(rows).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["layers", "no loop", "0-1 +2", "3-4 +2"]
    nats = {row["start"]: float(row["nats_per_token"]) for row in rows}
    assert f"{nats['']:.4f}" in lines[1] and f"{nats['0'] - nats['']:+.4f}" in lines[2]
    plot_sweep(rows, tmp_path / "figures" / "sweep.png")
    assert (tmp_path / "figures" / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="lack the model without a loop"):
        sweep_table(rows[1:])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"length": 6}, "length=6 must be at least 1 and at most the 5 layers of LlamaForCausalLM"),
        ({"length": 0}, "length=0 must be"),
        ({"repeats": [1, 0]}, r"repeats=\[1, 0\] must be additional passes"),
        ({"repeats": []}, r"repeats=\[\] must be additional passes"),
        ({"starts": [0, 4]}, "starts: 4 must be at least 0 and at most 3"),
        ({"tasks": {"empty": []}}, "Task 'empty' holds no items"),
        ({"tasks": {"odd": [CONTINUATION, {"context": "a"}]}}, "Task 'odd', item 2: it needs"),
        ({"tasks": {"odd": ["text"]}}, "Task 'odd', item 1: it needs"),
        ({"tasks": {"odd": [{**CHOICE, "gold": 2}]}}, "Task 'odd', item 1: it needs"),
        ({"tasks": {"odd": [{**CHOICE, "choices": ["b"], "gold": 0}]}}, "Task 'odd', item 1: it needs"),
        ({"tasks": {"odd": [{**CONTINUATION, "context": ""}]}}, "Task 'odd': .* nothing to predict it from"),
        ({"tasks": {"two": [CONTINUATION, CHOICE]}}, "Task 'two' mixes continuations and multiple choice"),
    ],
)
def test_what_cannot_be_swept_is_one_sentence_before_any_work(tokenizer, monkeypatch, arguments, sentence):
    model = tiny("llama", len(tokenizer))
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("no work before the error"))
    with pytest.raises(ValueError, match=sentence) as error:
        loop_sweep(model, tokenizer, TEXTS, **{"tasks": {}, "length": LENGTH, **WINDOWS, **arguments})
    assert "\n" not in str(error.value)


def test_task_arguments_and_files_that_do_not_fit_are_one_sentence(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text('{"context": "a\\u2028", "continuation": "b"}\n\n')
    items = [{"context": "a\u2028", "continuation": "b"}]
    assert parse_tasks([f"a={path}", f"b={path}"]) == {"a": items, "b": items}
    for wrong in (["items.jsonl"], ["=items.jsonl"], ["a="], [f"a={path}", f"a={path}"]):
        with pytest.raises(ValueError, match="does not fit: write NAME=PATH, each name once"):
            parse_tasks(wrong)
    with pytest.raises(ValueError, match="'missing.jsonl' is not a file"):
        parse_tasks(["a=missing.jsonl"])
    path.write_text('{"context": "a"}\n{oops\n')
    with pytest.raises(ValueError, match="items.jsonl, line 2: not JSON"):
        read_items(str(path))


def test_the_command_sweeps_prints_and_draws(tokenizer, tmp_path):
    model = tiny("llama", len(tokenizer))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, items in tasks_for(model, tokenizer).items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    call = ["loop-sweep", str(tmp_path / "checkpoint"), str(tmp_path / "text.jsonl")]
    tasks = [f"--task={name}={tmp_path / name}.jsonl" for name in ("continued", "chosen")]
    options = ["--length", "2", "--repeats", "1,3", "--max-tokens", "60", "--max-items", "4", "--sequence-length", "24"]
    run = CliRunner().invoke(app, [*call, *tasks, *options, "--results", str(tmp_path / "rows.csv")])
    assert run.exit_code == 0, run.output
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 and {row["continued_items"] for row in rows} == {"4"} and rows[0]["tokens"] == "59"
    assert run.stdout.endswith(sweep_table(rows) + "\n")
    assert (tmp_path / "rows.png").is_file()
    for wrong, sentence in (
        (["--task", "nameless"], "--task 'nameless' does not fit: write NAME=PATH"),
        (["--task", "a=missing.jsonl"], "'missing.jsonl' is not a file"),
        (["--length", "6"], "length=6 must be at least 1 and at most the 5 layers"),
        (["--repeats", "one"], "'one' does not fit"),
    ):
        run = CliRunner().invoke(app, [*call, "--results", str(tmp_path / "none.csv"), *wrong])
        assert run.exit_code == 2 and sentence in run.stderr
        assert len(run.stderr.splitlines()) == 1
