"""The model `looped` of lm-evaluation-harness, against its `hf` and a scorer of nothing but transformers."""

import json
import logging
import random
import subprocess
import sys

import pytest
import torch
from conftest import TINY_MODELS, randomise, tiny_model
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modeling_looped.eval import run as evaluation
from modeling_looped.eval.harness import LoopedLM, token_pair, training_cost
from modeling_looped.eval.task import LoopedTask
from modeling_looped.looping import loop
from modeling_looped.recipes.corpus import standard_library
from modeling_looped.recipes.tokens import train_tokenizer


TASK = "looped_bigbench_qa_wikidata"
ITEMS = [
    {"context": f"The {thing} of {place} is", "continuation": answer}
    for thing, place, answer in (
        ("river", "Norrland", "the Long Stream"),
        ("colour", "the old tower", "grey"),
        ("language", "Upper Ambria", "Ambrian"),
        ("sport", "the twin towns", "rowing"),
        ("capital", "Norrland", "Stenby"),
        ("author", "the red almanac", "nobody that we know of"),
        ("mayor", "Stenby", "Ada Holm"),
        ("shape", "the lake", "round"),
        ("bird", "the north shore", "a tern"),
        ("founder", "the twin towns", "Ole and Una"),
        ("price", "a stamp", "four"),
        ("height", "the old tower", "90 m"),
    )
]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for _, text in zip(range(20), (text for _, text in standard_library()))]
    return train_tokenizer(texts, 300)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = "".join(json.dumps(item) + "\n" for item in ITEMS)
    (folder / "bigbench_qa_wikidata.jsonl").write_text(lines)
    (folder / "arc_easy.jsonl").write_text(
        "".join(
            json.dumps(
                {"query": f"Question: Which is {item['context']}?", "choices": [f"a {i}", "a b", "c"], "gold": i % 3}
            )
            + "\n"
            for i, item in enumerate(ITEMS)
        )
    )
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer):
    """A checkpoint of each family with a tokenizer of 300 tokens, and one of Llama."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for name, make in TINY_MODELS.items():
        made[name] = make(vocab_size=300, max_position_embeddings=512)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    made["llama"] = randomise(LlamaForCausalLM(config))
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def paper_prompts(items: list[dict], shots: int) -> list[tuple[str, str]]:
    """Section 6.2 and 6.3 once more: (prompt, " " + answer) of each item in the order of evaluation."""
    items = list(items)
    random.Random(1337).shuffle(items)
    pairs = []
    for index, item in enumerate(items):
        others = [i for i in range(len(items)) if i != index]
        chosen = random.Random(1234 + index).sample(others, shots)
        solved = [f"{items[i]['context'].strip()} {items[i]['continuation']}" for i in chosen]
        pairs.append(("\n\n".join([*solved, item["context"].strip()]), f" {item['continuation']}"))
    return pairs


@torch.no_grad()
def plain_loss(path, pairs: list[tuple[str, str]], **forward) -> float:
    """Summed nats over summed tokens, one row at a time, with transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    longest, nats, tokens = model.config.max_position_embeddings, 0.0, 0
    for prompt, answer in pairs:
        begin, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + answer)["input_ids"]
        cut = max(0, len(ids) - longest - 1)
        rows = torch.tensor([ids[cut:]])
        logs = model(rows[:, :-1], **forward).logits[0].double().log_softmax(-1)
        for place in range(begin - cut, rows.shape[1]):
            nats, tokens = nats - logs[place - 1, rows[0, place]].item(), tokens + 1
    return nats / tokens


def evaluate(tmp_path, data, checkpoint, *arguments, tasks=TASK, model_args="") -> list[dict]:
    rest = ["--model_args", f"pretrained={checkpoint}{model_args}", "--tasks", tasks, "--device", "cpu", *arguments]
    parsed = evaluation._lm_eval_arguments(rest)
    counts = None
    return evaluation.run(parsed, [str(data)] if data else [], counts)


def losses(results: dict, task: str = TASK) -> float:
    return results["results"][task]["continuation_loss,none"]


@pytest.mark.parametrize("name", [*TINY_MODELS, "llama"])
def test_all_ways_to_score_a_checkpoint_give_one_continuation_loss(name, tmp_path, data, checkpoints):
    path, forward, args = checkpoints / name, {}, ""
    if name != "llama":
        forward, args = {"num_recurrences": 2}, ",num_recurrences=2"
    expected = plain_loss(path, paper_prompts(ITEMS, 10), **forward)
    found = {
        (model, batch, side): losses(
            evaluate(
                tmp_path, data, path, "--model", model, "--batch_size", str(batch), model_args=args + (f",padding_side={side}" if side else "")
            )[0]
        )
        for model, batch, side in (
            ("looped", 1, ""), ("looped", 8, ""), ("looped", 8, "left"), ("hf", 1, ""), ("hf", 8, ""),
        )
    }  # fmt: skip
    assert found == pytest.approx(dict.fromkeys(found, expected), abs=1e-4)
    if name not in ("llama", "mixture_of_recursions"):  # depth must have been turned for this to mean something
        assert abs(plain_loss(path, paper_prompts(ITEMS, 10), num_recurrences=3) - expected) > 1e-3


def requests_of(*pairs: tuple[str, str], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(kind, {}, pair, i, metadata=("made here", i, 1)) for i, pair in enumerate(pairs)]


PAIRS = [("One two three", " four"), ("A", " much longer continuation than that"), ("def f(x):\n    return", " x")]


def modules_of(model) -> list[torch.nn.Module]:
    """The layers, each once, wherever a family keeps them."""
    stack = model.model
    parts = (getattr(stack, name, []) for name in ("prelude", "core", "coda", "layers"))
    return [layer for part in parts for layer in part]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_an_exit_acts_on_log_likelihoods_and_runs_no_pass_that_it_leaves_out(name, checkpoints):
    path = str(checkpoints / name)
    left = LoopedLM(path, exit=1, device="cpu", batch_size=2)
    calls = []
    for layer in modules_of(left.model):
        layer.register_forward_hook(lambda *_: calls.append(1))
    found = left.loglikelihood(requests_of(*PAIRS))
    batches = 2  # three rows, two at a time
    assert len(calls) == batches * left.model.config.plan(1).effective_depth
    assert found == LoopedLM(path, num_recurrences=1, device="cpu", batch_size=2).loglikelihood(requests_of(*PAIRS))
    if name != "mixture_of_recursions":
        whole = LoopedLM(path, device="cpu", batch_size=2).loglikelihood(requests_of(*PAIRS))
        assert max(abs(a - b) for (a, _), (b, _) in zip(found, whole)) > 1e-3


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("looped_gpt", {"exit": 4}, "exit=4 must be a whole number of passes, at most the 3"),
        ("looped_gpt", {"exit": 3, "num_recurrences": 2}, "at most the 2"),
        ("looped_gpt", {"exit": 1.5}, "exit=1.5"),
        ("looped_gpt", {"num_recurrences": 0}, "num_recurrences=0"),
        ("looped_gpt", {"padding_side": "both"}, "padding_side='both' must be"),
        ("llama", {"num_recurrences": 2}, "LlamaForCausalLM has no recurrences to turn"),
        ("llama", {"exit": 2}, "LlamaForCausalLM has no recurrences to leave"),
    ],
)
def test_a_depth_that_the_model_does_not_have_is_refused(name, options, words, checkpoints):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        LoopedLM(str(checkpoints / name), device="cpu", **options)


def test_several_counts_in_one_process_are_those_of_separate_ones_and_share_weights_and_requests(
    tmp_path, data, checkpoints, monkeypatch
):
    path, loads, built = checkpoints / "looped_gpt", [], []
    original = AutoModelForCausalLM.from_pretrained.__func__
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        classmethod(lambda cls, *a, **k: loads.append(a) or original(cls, *a, **k)),
    )
    construct = LoopedTask.construct_requests
    monkeypatch.setattr(LoopedTask, "construct_requests", lambda *a, **k: built.append(1) or construct(*a, **k))
    rest = ["--model_args", f"pretrained={path}", "--tasks", TASK, "--device", "cpu", "--output_path", str(tmp_path)]
    found = evaluation.run(evaluation._lm_eval_arguments(rest), [str(data)], [1, 2, 4])
    assert (len(loads), len(built)) == (1, len(ITEMS))
    for count, results in zip((1, 2, 4), found):
        assert results["config"]["num_recurrences"] == results["config"]["model_args"]["num_recurrences"] == count
        alone = evaluate(tmp_path, data, path, model_args=f",num_recurrences={count}")[0]
        assert results["results"] == alone["results"]
    assert len({losses(results) for results in found}) == 3
    written = sorted(tmp_path.rglob("results_*.json"))
    assert [json.loads(path.read_text())["config"]["num_recurrences"] for path in written] == [1, 2, 4]
    samples = [len(path.read_text().splitlines()) for path in tmp_path.rglob("samples_*.jsonl")]
    assert samples == [len(ITEMS)] * 3


def test_a_prompt_longer_than_the_context_loses_its_beginning_and_is_counted(tmp_path, data, checkpoints, caplog):
    expected = plain_loss(checkpoints / "looped_gpt", paper_prompts(ITEMS, 10))
    whole = evaluate(tmp_path, data, checkpoints / "looped_gpt")[0]
    assert whole["config"]["truncated_requests"] == 0 and losses(whole) == pytest.approx(expected, abs=1e-4)
    model = tiny_model(vocab_size=300, max_position_embeddings=64)
    path = tmp_path / "short"
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(checkpoints / "llama").save_pretrained(path)
    with caplog.at_level(logging.WARNING):
        cut = evaluate(tmp_path, data, path)[0]
    assert cut["config"]["truncated_requests"] == len(ITEMS)
    assert f"{len(ITEMS)} prompts are longer than max_length=64 tokens" in caplog.text
    assert losses(cut) == pytest.approx(plain_loss(path, paper_prompts(ITEMS, 10)), abs=1e-4)
    raised = evaluate(tmp_path, data, path, model_args=",max_length=512")[0]  # rotary positions go on
    assert raised["config"]["truncated_requests"] == 0 and losses(raised) != losses(cut)


def test_what_cannot_be_scored_is_named(data, checkpoints, tmp_path):
    model = LoopedLM(str(checkpoints / "looped_gpt"), device="cpu", max_length=16)
    with pytest.raises(ValueError, match="'' of 'Some context' has no token to score"):
        model.loglikelihood(requests_of(("Some context", "")))
    with pytest.raises(ValueError, match="has no token to score"):
        model.loglikelihood(requests_of(("", "")))
    with pytest.raises(ValueError, match="has [0-9]+ tokens, and the model max_length=16"):
        model.loglikelihood(requests_of(("Some context", " and a continuation" * 9)))
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "bigbench_qa_wikidata.jsonl").write_text(
        json.dumps({"context": "The moon is", "continuation": " "}) + "\n"
    )
    with pytest.raises(ValueError, match="looped_bigbench_qa_wikidata: item 0: ' ' is no answer to score"):
        evaluate(tmp_path, folder, checkpoints / "looped_gpt")


def test_an_empty_context_is_the_beginning_of_a_text(checkpoints):
    model = LoopedLM(str(checkpoints / "looped_gpt"), device="cpu")
    (found,) = model.loglikelihood(requests_of(("", "Hello there")))
    (expected,) = HFLM(str(checkpoints / "looped_gpt"), device="cpu").loglikelihood(requests_of(("", "Hello there")))
    assert found == (pytest.approx(expected[0], abs=1e-5), expected[1])


def test_a_token_across_the_boundary_is_scored_whole_and_counted(tmp_path, checkpoints):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate("abcd")}
    merging = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({**letters, "cd": 4, "<e>": 5}, [("c", "d")])),
        eos_token="<e>",
        pad_token="<e>",
    )
    assert token_pair(merging.encode, "abc", "d") == ([0, 1], [4])
    assert token_pair(merging.encode, "ab", "cd") == ([0, 1], [4])
    model = LoopedLM(str(checkpoints / "llama"), tokenizer=merging, device="cpu")
    (whole,), (split,) = (model.loglikelihood(requests_of(pair)) for pair in (("abc", "d"), ("ab", "cd")))
    assert whole == split and model.get_model_info()["merged_requests"] == 1
    (first,) = model.loglikelihood(requests_of(("c", "d")))  # nothing is left before: as after an empty context
    (alone,) = model.loglikelihood(requests_of(("", "cd")))
    assert first == alone


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation(tokenizer):
    assert token_pair(tokenizer.encode, "one two ", "three") == token_pair(tokenizer.encode, "one two", " three")


def test_texts_are_continued_and_summed_at_the_count_that_is_asked_for(checkpoints):
    path = str(checkpoints / "looped_gpt")
    lm, model, tokenizer = LoopedLM(path, device="cpu", batch_size=2), *loaded(path)
    prompts = ["def main():", "The quick brown fox jumps"]
    texts = {}
    for count in (1, 3):
        lm.num_recurrences = count
        options = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
        texts[count] = lm.generate_until(requests_of(*((p, dict(options)) for p in prompts), kind="generate_until"))
        for prompt, text in zip(prompts, texts[count]):
            ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
            output = model.generate(**ids, max_new_tokens=8, do_sample=False, num_recurrences=count)
            assert text == tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        text = "A text that is longer than one window of the model, said twice. " * 2
        (sum_of_windows,) = lm.loglikelihood_rolling(requests_of((text,), kind="loglikelihood_rolling"))
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            logs = model(ids[:, :-1], num_recurrences=count).logits[0].log_softmax(-1)
        assert sum_of_windows == pytest.approx(logs.gather(1, ids[0, 1:, None]).sum().item(), abs=1e-3)
    assert texts[1] != texts[3]


def loaded(path: str):
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


def test_a_decoder_with_loops_is_loaded_with_them(tmp_path, checkpoints):
    model, tokenizer = loaded(str(checkpoints / "llama"))
    plain = LoopedLM(model, tokenizer=tokenizer).loglikelihood(requests_of(*PAIRS))
    loop(model, 1, 3, 2)
    looped = LoopedLM(model, tokenizer=tokenizer).loglikelihood(requests_of(*PAIRS))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert LoopedLM(str(tmp_path), device="cpu").loglikelihood(requests_of(*PAIRS)) == looped
    assert max(abs(a - b) for (a, _), (b, _) in zip(plain, looped)) > 1e-3


def test_training_cost_is_what_the_checkpoint_says(tmp_path):
    assert training_cost(str(tmp_path)) == training_cost(None) == {}
    (tmp_path / "metrics.json").write_text(json.dumps({"training": {"steps": 3, "tokens": 12, "flops": 5.0}}))
    assert training_cost(str(tmp_path)) == {"training_flops": 5.0, "training_tokens": 12}


@pytest.mark.parametrize(
    "arguments, words",
    [
        pytest.param(  # the index of lm-eval's own tasks takes twenty seconds
            ["--tasks", "looped_triviaqaa"],
            "'looped_triviaqaa' is no task. Did you mean looped_triviaqa",
            marks=pytest.mark.slow,
        ),
        (["--tasks", "looped_nq", "--data-dir", "DATA"], "has no nq.jsonl. Put it there"),
        (["--tasks", TASK, "--data-dir", "nowhere"], "--data-dir 'nowhere' is not a folder"),
        (["--tasks", TASK, "--data-dir", "DATA", "--recurrences", "1,x"], "In recurrences '1,x'"),
        (["--tasks", TASK, "--data-dir", "DATA", "--recurrences", "0,1"], "num_recurrences=0"),
        (
            ["--tasks", TASK, "--data-dir", "DATA", "--model", "hf", "--recurrences", "1"],
            "--recurrences is for --model looped",
        ),
        (
            ["--tasks", TASK, "--data-dir", "DATA", "--use_cache", "c", "--recurrences", "1"],
            "does not tell recurrence counts",
        ),
    ],
)
def test_the_command_says_what_is_wrong_in_one_sentence(arguments, words, data, checkpoints, capsys, tmp_path):
    arguments = [str(data) if one == "DATA" else one for one in arguments]
    rest = [
        "--model_args",
        f"pretrained={checkpoints / 'looped_gpt'}",
        "--device",
        "cpu",
        "--output_path",
        str(tmp_path / "out"),
    ]
    with pytest.raises(SystemExit) as end:
        evaluation.main([*rest, *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own_and_so_does_lm_eval_on_the_tasks(data, checkpoints, tmp_path):
    path = checkpoints / "grown_llama"
    shared = ["--tasks", TASK, "--device", "cpu", "--limit", "4", "--output_path"]
    ours = [
        "modeling_looped.eval", "--model_args", f"pretrained={path},num_recurrences=2", "--data-dir", str(data), *shared,
        str(tmp_path / "ours"),
    ]  # fmt: skip
    theirs = [
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={path},num_recurrences=2,trust_remote_code=True",
        "--include_path", evaluation.TASKS, "--metadata", f"data_dir={data}", *shared, str(tmp_path / "theirs"),
    ]  # fmt: skip
    found = []
    for arguments in (ours, theirs):
        done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "continuation_loss" in done.stdout and "±" in done.stdout
        (written,) = (tmp_path / arguments[-1].rsplit("/", 1)[-1]).rglob("results_*.json")
        found.append(losses(json.loads(written.read_text())))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
