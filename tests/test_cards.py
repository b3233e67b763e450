"""Model cards: what they say is what lies beside them, and what does not lie there they say is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from modeling_looped.accounting import (
    effective_parameters,
    forward_flops_per_token,
    kv_cache_bytes,
    parameter_counts,
    training_flops_per_token,
)
from modeling_looped.depth_plan import DepthPlan
from modeling_looped.eval.held_out import held_out_loss, save_held_out
from modeling_looped.growth import grow
from modeling_looped.hub_cards.card import (
    NOTES,
    ForeignCard,
    add_results,
    build_card,
    draw_plan,
    is_foreign,
    write_card,
)
from modeling_looped.hub_cards.facts import read_facts
from modeling_looped.hub_cards.push import plan_upload, push
from modeling_looped.looping import loop
from modeling_looped.recipes.corpus import split_by_name, standard_library
from modeling_looped.recipes.tokens import train_tokenizer

from conftest import TINY_MODELS, tiny_grown_llama, tiny_model, tiny_recurrent_gpt


TEXTS = [f"the {a} saw the {b} and the {b} saw the {a}" for a in ("cat", "dog", "owl") for b in ("fox", "hen", "elk")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 20, 300)


def saved(model, folder: Path, tokenizer=None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def tables(text: str) -> list[list[list[str]]]:
    """Each Markdown table as rows of cells, without the line of dashes."""
    found, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            found.append([rows[0], *rows[2:]])
            rows = []
    return found


def table(text: str, *head: str) -> list[list[str]]:
    """The rows below the head that begins like this."""
    return next(rows[1:] for rows in tables(text) if rows[0][: len(head)] == list(head))


def number(cell: str) -> float:
    return float(re.match(r"[-\d.,e+]+", cell)[0].replace(",", ""))


@pytest.mark.parametrize("family", TINY_MODELS)
def test_what_depth_costs_is_what_the_accounting_says(family, tmp_path):
    model = TINY_MODELS[family]()
    text, config = str(build_card(saved(model, tmp_path))), model.config
    rows = table(text, "recurrences", "executed layers")
    assert [number(row[0]) for row in rows] == [1, 2, 3]
    for row, count in zip(rows, (1, 2, 3)):
        assert number(row[1]) == config.plan(count).effective_depth
        assert number(row[2]) == forward_flops_per_token(config, num_recurrences=count)
        assert number(row[3]) == training_flops_per_token(config, num_recurrences=count)
        assert number(row[4]) == kv_cache_bytes(config, config.max_position_embeddings, num_recurrences=count)
    stored = sum(parameter.numel() for parameter in model.parameters())
    about = {row[0]: row[1] for row in table(text, "", "")}
    assert number(about["stored parameters"]) == stored == parameter_counts(config)["total"]
    assert number(about["effective parameters"]) == effective_parameters(config)
    assert str(config.plan()) in about["depth plan"] and "(code in this folder)" in about["class"]


def test_effective_parameters_are_those_of_the_model_whose_layers_are_not_shared():
    looped, dense = tiny_grown_llama(), tiny_grown_llama(depth_plan="8x1")
    assert effective_parameters(looped.config) == sum(parameter.numel() for parameter in dense.parameters())
    assert effective_parameters(dense.config) == sum(parameter.numel() for parameter in dense.parameters())


def test_a_bare_checkpoint_s_card_says_what_is_missing_and_guesses_nothing(tmp_path):
    card = build_card(saved(tiny_model(), tmp_path))
    text = str(card)
    for missing in (
        "There is no tokenizer", "There is no chat template", "languages of its data are not said",
        "Not measured", "None. `python -m modeling_looped.eval", "The training data is not said", "Not said: ask whoever",
    ):  # fmt: skip
        assert missing in text, missing
    metadata = card.data.to_dict()
    assert not {"license", "language", "datasets", "base_model", "model-index"} & metadata.keys()
    assert "tokenizer(" not in text, "code that needs what is not there"


def test_held_out_losses_stand_in_the_card_as_in_the_file_beside_it(tokenizer, tmp_path):
    model = tiny_model(vocab_size=300)
    folder = saved(model, tmp_path / "model", tokenizer)
    losses = held_out_loss(model, tokenizer, TEXTS, [1, 2, 4], sequence_length=32)
    save_held_out(folder, losses, TEXTS, "tales.jsonl", 32, ["looped", "eval", "CHECKPOINT", "tales.jsonl"])
    text = write_card(folder).read_text()
    record = json.loads((folder / "held_out.json").read_text())
    shown = table(text, "recurrences", "nats per token", "bits per byte")
    assert shown == [
        [str(row["num_recurrences"]), f"{row['nats_per_token']:.4f}", f"{row['bits_per_byte']:.4f}"]
        for row in record["rows"]
    ]
    assert record["text"]["sha256"][:16] in text and "looped eval . tales.jsonl" in text
    assert (folder / "loss_vs_recurrences.png").stat().st_size > 10_000 and "](loss_vs_recurrences.png)" in text
    assert 4.0 in {number(row[0]) for row in table(text, "recurrences", "executed layers")}, (
        "what was measured has a cost"
    )
    values = {one.metric_name: one.metric_value for one in ModelCard(text).data.eval_results}
    assert values["nats per token, 2 recurrences"] == record["rows"][1]["nats_per_token"]
    assert "looped eval me/tale tales.jsonl" in str(build_card(folder, repo_id="me/tale"))


def results_file(folder: Path, recurrences: int, loss: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"results_2026-11-30T00-00-0{recurrences}.json"
    scores = {
        "continuation_loss,none": loss,
        "continuation_loss_stderr,none": 0.125,
        "acc,none": 0.5,
        "acc_stderr,none": "N/A",
    }
    path.write_text(json.dumps({
        "results": {"one": {"alias": "one", **scores}, "two": {"alias": "two", **scores}},
        "groups": {"both": {"alias": "both", **scores}},
        "group_subtasks": {"both": ["one", "two"]},
        "n-shot": {"one": 0, "two": 5},
        "config": {
            "model": "looped", "model_args": {"pretrained": "x"}, "num_recurrences": recurrences, "limit": 50.0,
            "command": ["python", "-m", "modeling_looped.eval", "--model_args", "pretrained=CHECKPOINT", "--tasks", "both"],
        },
    }))  # fmt: skip
    return path


def test_evaluation_stands_in_the_card_as_in_lm_eval_s_files(tmp_path):
    folder = saved(tiny_model(), tmp_path / "model")
    results_file(tmp_path / "results" / "x", 3, 2.0625)
    results_file(tmp_path / "results" / "x", 1, 3.5)
    add_results(folder, tmp_path / "results")
    text = str(build_card(folder))
    assert table(text, "recurrences", "one", "two (5 shots)", "mean") == [
        ["1", "3.500 ± 0.125", "3.500 ± 0.125", "3.500 ± 0.125"],
        ["3", "2.062 ± 0.125", "2.062 ± 0.125", "2.062 ± 0.125"],
    ]
    assert text.count("--model_args pretrained=. --tasks both") == 1, "two depths of one command are one command"
    assert (
        "only the first 50 items" in text and "both: acc (higher is better)" in text and "| 1 | 0.500 | 0.500 |" in text
    )
    found = ModelCard(text).data.eval_results
    assert {
        one.metric_value for one in found if one.dataset_name == "both" and one.metric_type == "continuation_loss"
    } == {3.5, 2.0625}


def test_results_that_are_none_are_refused(tmp_path):
    folder = saved(tiny_model(), tmp_path / "model")
    with pytest.raises(ValueError, match="no results_"):
        add_results(folder, tmp_path)
    assert not (folder / "evaluation").exists()
    results_file(folder / "evaluation", 1, 2.0).write_text('{"results": []}')
    with pytest.raises(ValueError, match="is no result of lm-eval"):
        build_card(folder)


def test_a_grown_model_s_card_tells_its_growths(tmp_path):
    model = tiny_grown_llama(depth_plan="4x1")
    grow(model, "lidas", 2)
    text = str(build_card(saved(model, tmp_path)))
    assert table(text, "growth", "operator") == [["1", "lidas", "4", "2"]]
    assert "`0 1 2 1 2 3`" in text and "Its depth is fixed" in text and "looped unroll ." in text
    assert "depth-grown" in ModelCard(text).data.tags and "looped" not in ModelCard(text).data.tags


def test_a_looped_llama_s_card_says_the_loop_and_that_plain_transformers_leaves_it_out(tmp_path):
    config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                         max_position_embeddings=64)  # fmt: skip
    model = LlamaForCausalLM(config)
    loop(model, 1, 3, 2)
    text = str(build_card(saved(model, tmp_path)))
    assert "layers 1 to 2 run 2 more times" in text and "executed 0 1 2 1 2 1 2 3" in text.replace(" |", "")
    assert "from modeling_looped.looping import load" in text and "runs each layer once: another model" in text
    assert number(table(text, "recurrences", "executed layers")[0][1]) == 8


def test_other_families_say_what_is_theirs(tmp_path):
    text = str(build_card(saved(tiny_recurrent_gpt(), tmp_path / "gated")))
    assert "a learned gate decides" in text and "arXiv 2608.15062" in text
    twin = tiny_recurrent_gpt().config.dense_twin()
    text = str(build_card(saved(AutoModelForCausalLM.from_config(twin), tmp_path / "dense")))
    assert "A dense GPT-2 of 8 layers" in text and "Its depth is fixed" in text
    text = str(build_card(saved(TINY_MODELS["mixture_of_recursions"](), tmp_path / "mixture")))
    assert "shares of the tokens by pass: 1, 0.667, 0.333" in text


def test_a_card_is_written_again_to_the_same_bytes_and_keeps_notes_and_metadata(tmp_path):
    folder = saved(tiny_model(), tmp_path)
    path = write_card(folder, license="apache-2.0", language=["en"], base_model="me/base", datasets=["me/data"])
    first = path.read_text()
    assert ModelCard(first).data.license == "apache-2.0" and "apache-2.0." in first.partition("## Licence")[2]
    assert write_card(folder).read_text() == first
    path.write_text(first.replace(NOTES[0] + "\n", NOTES[0] + "\nMade for my thesis.\n"))
    assert not is_foreign(folder)
    again = write_card(folder, license="mit").read_text()
    assert "Made for my thesis." in again and ModelCard(again).data.license == "mit"
    assert ModelCard(again).data.base_model == "me/base" and ModelCard(again).data.datasets == ["me/data"]
    assert "Made for my thesis." in write_card(folder, overwrite=True).read_text()


@pytest.mark.parametrize("change", ["of somebody else", "by hand"])
def test_a_card_that_somebody_wrote_is_not_overwritten_unasked(change, tmp_path):
    folder = saved(tiny_model(), tmp_path)
    path = write_card(folder)
    text = "# Mine\n" if change == "of somebody else" else path.read_text().replace("## Limits", "## Limits\n\n- Mine.")
    path.write_text(text)
    with pytest.raises(ForeignCard, match="--overwrite"):
        write_card(folder)
    assert path.read_text() == text
    assert dict((name, what) for name, _, what in plan_upload(folder, "me/x").files)["README.md"].endswith("by hand")
    assert plan_upload(folder, "me/x").card == text
    assert "Mine" not in write_card(folder, overwrite=True).read_text()


BROKEN = {
    "no checkpoint": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights in safetensors"),
    "damaged weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "model.safetensors cannot be read"),
    "damaged numbers": (lambda folder: (folder / "metrics.json").write_text("{"), "metrics.json is not JSON"),
    "a configuration of nothing": (lambda folder: (folder / "config.json").write_text('{"model_type": "zzz"}'), "config.json"),
    "an adapter": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "holds an adapter"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_card_cannot_be_made_of_is_said_in_a_sentence_and_nothing_is_written(what, tmp_path):
    folder = saved(tiny_model(), tmp_path)
    spoil, message = BROKEN[what]
    spoil(folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match=re.escape(message)):
        write_card(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_metadata_that_a_card_has_no_field_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="licence='mit' is no field"):
        build_card(saved(tiny_model(), tmp_path), licence="mit")


def test_a_plan_is_drawn_as_it_runs():
    assert draw_plan(DepthPlan.parse("Loop(1-2x3-1)")).splitlines() == [
        "prelude  0",
        "core     1 2   x 3",
        "coda     3",
        "executed 0 | 1 2 | 1 2 | 1 2 | 3",
    ]
    assert draw_plan(DepthPlan.parse("0 1 2 1 2 0")) == "executed 0 1 2 1 2 0"
    assert max(map(len, draw_plan(DepthPlan.parse("Loop(4-16x8-4)")).splitlines())) <= 96


# Uploading. No library ships a server that speaks the Hub's upload API, so what is tested is all that happens before the
# first request, with huggingface_hub's own commit operations, and what is said where no request gets through.


def test_an_upload_has_all_that_a_stranger_needs_and_nothing_private(tokenizer, tmp_path):
    folder = saved(tiny_model(), tmp_path / "model", tokenizer)
    results_file(folder / "evaluation", 1, 2.0)
    for name in (
        "optimizers.pt",
        "training_args.bin",
        "evaluation/samples_one.jsonl",
        ".cache",
        "secret.env",
        "notes/a.txt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    plan = plan_upload(folder, "me/tiny", include=("notes/*",))
    files, stays = {name for name, _, _ in plan.files}, {name for name, _, _ in plan.left_out}
    assert files >= {
        "README.md",
        "config.json",
        "model.safetensors",
        "modeling_looped_gpt.py",
        "tokenizer.json",
        "notes/a.txt",
    }
    assert "evaluation/results_2026-11-30T00-00-01.json" in files
    assert stays == {"optimizers.pt", "training_args.bin", "evaluation/samples_one.jsonl", "secret.env"}
    assert ".cache" not in files and not (folder / "README.md").exists(), "planning writes nothing"
    sent_results = json.loads(plan.rewritten["evaluation/results_2026-11-30T00-00-01.json"])
    kept = json.loads((folder / "evaluation" / "results_2026-11-30T00-00-01.json").read_text())
    assert sent_results["results"] == kept["results"] and sent_results["config"]["model_args"] == {
        "pretrained": "me/tiny"
    }
    assert 'path = "me/tiny"' in plan.card
    sent = {one.path_in_repo: one for one in plan.operations()}
    assert sent.keys() == files
    assert {name: sent[name].upload_info.size for name in files} == {name: size for name, size, _ in plan.files}
    assert all(str(name) in str(plan) for name in files) and "state of the optimizers" in str(plan)
    remote = tmp_path / "received"
    for name, one in sent.items():  # what the Hub would hold
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        with one.as_file() as file:
            (remote / name).write_bytes(file.read())
    ids = torch.arange(6).unsqueeze(0)
    there, here = (AutoModelForCausalLM.from_pretrained(place)(ids).logits for place in (remote, folder))
    assert torch.equal(there, here)


def test_an_upload_that_cannot_be_right_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    folder = saved(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="Repo id"):
        plan_upload(folder, "not a name")
    with pytest.raises(ValueError, match="names no owner"):
        plan_upload(folder, "tiny")
    with pytest.raises(ValueError, match="--include 'lost/\\*' fits no file"):
        plan_upload(folder, "me/x", include=("lost/*",))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("modeling_looped.hub_cards.push.get_token", lambda: None)
    with pytest.raises(ValueError, match="not logged in"):
        push(folder, "me/x")
    assert not (folder / "README.md").exists()
    with pytest.raises(ConnectionError, match="did not get through"):  # the tests are offline
        push(folder, "me/x", token="hf_no")


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.slow
def test_the_commands_that_a_card_prints_give_its_tables_again(tmp_path):
    pytest.importorskip("lm_eval")
    texts = split_by_name(standard_library())[0][:60]
    folder = saved(
        tiny_model(vocab_size=512, max_position_embeddings=256), tmp_path / "model", train_tokenizer(texts, 512)
    )
    run("looped", "eval", str(folder), "--recurrences", "1,3", "--max-tokens", "600", "--save", cwd=tmp_path)
    run(
        sys.executable, "-m", "modeling_looped.eval", "--model_args", f"pretrained={folder}", "--output_path", "results",
        "--tasks", "looped_reasoning_primitives_depth_1", "--recurrences", "1,3", "--limit", "3", cwd=tmp_path,
    )  # fmt: skip
    run("looped", "card", str(folder), "--results", "results", "--license", "apache-2.0", cwd=tmp_path)
    text = (folder / "README.md").read_text()
    assert str(tmp_path) not in text
    commands = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    held, evaluation = commands[1:3]
    losses, record = run("bash", "-ec", held, cwd=folder), json.loads((folder / "held_out.json").read_text())
    for row in record["rows"]:
        assert f"{row['nats_per_token']:.4f}  {row['bits_per_byte']:9.4f}" in losses
    run("bash", "-ec", evaluation, cwd=folder)
    assert (folder / "reproduced" / "report.md").is_file()
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "evaluation")
    add_results(copy, folder / "reproduced")
    here, there = (read_facts(place).evaluations for place in (folder, copy))
    assert [one.scores for one in here] == [one.scores for one in there] and len(here) == 2
    section = r"## Evaluation\n(.*?)\nValues with"
    again = str(build_card(copy))
    assert re.search(section, text, re.DOTALL)[1] == re.search(section, again, re.DOTALL)[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_code_that_a_card_prints_runs_in_its_folder(family, tokenizer, tmp_path):
    folder = saved(TINY_MODELS[family](vocab_size=300), tmp_path, tokenizer)
    text = write_card(folder).read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert run(sys.executable, "-c", code, cwd=folder).startswith("Once upon a time")
    (shell,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert run("bash", "-ec", shell, cwd=folder).startswith("Once upon a time")
