"""An unrolled checkpoint behind `transformers serve`, and every family under plain lm_eval: other people's programs."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from checkpoint_folders import CHAT, LONGER_CHAT, PROMPTS, write_checkpoints
from conftest import TINY_MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from modeling_looped.conversion.depth import unroll_checkpoint


pytestmark = pytest.mark.slow  # servers and commands


every_family = pytest.mark.parametrize("family", TINY_MODELS)
needs_serving = pytest.mark.skipif(not is_serve_available(), reason="needs pip install 'transformers[serving]'")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = write_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    unrolled = tmp_path_factory.mktemp("unrolled") / "llama"
    unroll_checkpoint(str(made["grown_llama"]), str(unrolled))
    return {**made, "unrolled": unrolled}


def greedy(folder: Path, prompt: str | list[dict], tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# transformers serve


def fresh_environment(folder: Path) -> dict[str, str]:
    """Of a process that knows this package only from the code in a checkpoint: no network, and nothing cached."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1", "NO_PROXY": "*"}


def call(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as response:
        return response.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> tuple[str, Path]:
    """The address of a running `transformers serve`, and what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    arguments = ["serve", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--trust-remote-code"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "transformers.cli.transformers", *arguments],
            stdout=log, stderr=log, cwd=folder, env=fresh_environment(folder),
        )  # fmt: skip
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            try:
                assert json.loads(call(f"{address}/health")) == {"status": "ok"}
                break
            except urllib.error.URLError:
                time.sleep(0.3)
        yield address, folder / "log"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@needs_serving
def test_transformers_serve_answers_chats_with_an_unrolled_checkpoint_as_the_looped_one_does(server, folders):
    address, _ = server
    for chat in (CHAT, LONGER_CHAT):
        body = {"model": str(folders["unrolled"]), "messages": chat, "temperature": 0, "max_tokens": 16}
        answer = json.loads(call(f"{address}/v1/chat/completions", body))
        expected = greedy(folders["grown_llama"], chat, 16)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected}
        assert (
            answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        )

        parts = []
        for line in call(f"{address}/v1/chat/completions", {**body, "stream": True}).splitlines():
            if line.startswith("data: {"):
                parts += [c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"]]
        assert "".join(parts) == expected and len([part for part in parts if part]) > 1


@pytest.mark.slow
@needs_serving
def test_transformers_serve_continues_texts_with_an_unrolled_checkpoint_as_the_looped_one_does(server, folders):
    address, _ = server
    for prompt in PROMPTS:
        body = {"model": str(folders["unrolled"]), "prompt": prompt, "temperature": 0, "max_tokens": 12}
        (choice,) = json.loads(call(f"{address}/v1/completions", body))["choices"]
        assert choice["text"] == greedy(folders["grown_llama"], prompt, 12)


@pytest.mark.slow
@needs_serving
@every_family
def test_transformers_serve_knows_no_class_that_is_not_its_own_and_serves_on_after_it_says_so(family, server, folders):
    address, log = server
    body = {"model": str(folders[family]), "messages": CHAT, "temperature": 0, "max_tokens": 4}
    with pytest.raises(urllib.error.HTTPError) as answer:
        call(f"{address}/v1/chat/completions", body)
    assert answer.value.code == 500
    name = type(AutoModelForCausalLM.from_pretrained(folders[family])).__name__
    assert f"module transformers has no attribute {name}" in log.read_text()
    assert call(f"{address}/v1/chat/completions", {**body, "model": str(folders["unrolled"])})


# lm_eval

CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
"""
CONTINUE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{question}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
ITEMS = [
    {"question": "What stands on the tower?", "choices": ["a tern", "the lake, which is grey", "rain"], "gold": 0},
    {"question": "The mayor of the town counts", "choices": ["the boats", "the river of the north"], "gold": 0},
    {"question": "Rain", "choices": ["in the morning", "and the sea", "four", "boats"], "gold": 2},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for name, template in (("choices", CHOICES), ("continue", CONTINUE)):
        (folder / f"{name}.yaml").write_text(template.format(name=f"own_{name}", data=folder / "items.jsonl"))
    return folder


@torch.no_grad()
def direct(folder: Path, num_recurrences: int) -> tuple[list[list[float]], list[str]]:
    """Of each item: the log-likelihood of every choice after " ", and what greedy decoding writes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, num_recurrences=num_recurrences).eval()
    scores, texts = [], []
    for item in ITEMS:
        begin = tokenizer(item["question"], return_tensors="pt")["input_ids"]
        scores.append([])
        for choice in item["choices"]:
            ids = tokenizer(f"{item['question']} {choice}", return_tensors="pt")["input_ids"]
            assert torch.equal(ids[:, : begin.shape[1]], begin)
            logs = model(ids).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            scores[-1].append(logs[begin.shape[1] - 1 :].sum().item())
        output = model.generate(begin, attention_mask=torch.ones_like(begin), do_sample=False, max_new_tokens=8)
        texts.append(tokenizer.decode(output[0, begin.shape[1] :], skip_special_tokens=True))
    return scores, texts


def check(samples: dict[str, list[dict]], accuracy: float, folder: Path, num_recurrences: int) -> None:
    scores, texts = direct(folder, num_recurrences)
    chosen = {sample["doc_id"]: sample for sample in samples["own_choices"]}
    written = {sample["doc_id"]: sample for sample in samples["own_continue"]}
    assert chosen.keys() == written.keys() == set(range(len(ITEMS)))
    for number, (expected, text) in enumerate(zip(scores, texts)):
        found = [float(answer[0]) for answer in chosen[number]["filtered_resps"]]
        assert found == pytest.approx(expected, abs=1e-3)
        assert written[number]["filtered_resps"] == [text]
    right = [max(range(len(one)), key=one.__getitem__) == item["gold"] for one, item in zip(scores, ITEMS)]
    assert math.isclose(accuracy, sum(right) / len(right), abs_tol=1e-6)


@every_family
def test_lm_eval_s_own_model_scores_and_continues_a_local_task_at_the_depth_of_its_arguments(family, folders, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folders[family]},num_recurrences=1,dtype=float32",
        tasks=["own_choices", "own_continue"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        batch_size=3,
        bootstrap_iters=0,
    )
    accuracy = results["results"]["own_choices"]["acc,none"]
    check(results["samples"], accuracy, folders[family], num_recurrences=1)


@pytest.mark.slow
def test_the_lm_eval_command_does_so_with_the_code_of_the_checkpoint(folders, tasks, tmp_path):
    folder = folders["mixture_of_recursions"]
    done = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "--model", "hf",
            "--model_args", f"pretrained={folder},num_recurrences=2,dtype=float32,trust_remote_code=True",
            "--tasks", "own_choices,own_continue", "--include_path", str(tasks), "--device", "cpu",
            "--batch_size", "2", "--log_samples", "--output_path", str(tmp_path / "out"),
        ],
        capture_output=True, text=True, cwd=tmp_path,
        env={**fresh_environment(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = tmp_path.rglob("results_*.json")
    samples = {}
    for name in ("own_choices", "own_continue"):
        (path,) = tmp_path.rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in path.read_text().splitlines()]
    accuracy = json.loads(written.read_text())["results"]["own_choices"]["acc,none"]
    check(samples, accuracy, folder, num_recurrences=2)
