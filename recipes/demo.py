"""`looped demo`: text to tokenizer to looped model to checkpoint, card and picture, in one resumable command."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM
from modeling_looped.accounting import forward_flops_per_token, parameter_counts, training_flops_per_token
from modeling_looped.hub_cards.card import ForeignCard, write_card
from modeling_looped.hub_cards.facts import EVALUATION

from .corpus import read_texts, split_by_name, standard_library
from .pretrain import PretrainRecipe, PretrainResult, newest_checkpoint, pretrain, recent_mean
from .tokens import TokenRows, token_stream, train_tokenizer, unigram_loss


@dataclass(frozen=True)
class DemoSize:
    """A model and a run that fit together; `vocab_size` and `length` in tokens."""

    width: int
    heads: int
    layers: tuple[int, int, int]
    vocab_size: int
    length: int
    recipe: PretrainRecipe


_DEPTHS = {"depth_scheme": "poisson-lognormal", "depth_mean": 3.0}
SIZES = {
    "tiny": DemoSize(128, 2, (1, 1, 1), 2048, 256, PretrainRecipe(total_steps=700, batch_size=4, **_DEPTHS)),
    "small": DemoSize(384, 6, (2, 4, 2), 8192, 512, PretrainRecipe(total_steps=10_000, batch_size=32, **_DEPTHS)),
    "medium": DemoSize(640, 5, (2, 4, 2), 16384, 1024, PretrainRecipe(total_steps=20_000, batch_size=128, **_DEPTHS)),
    "large": DemoSize(1280, 10, (2, 4, 2), 32064, 2048, PretrainRecipe(total_steps=40_000, batch_size=256, **_DEPTHS)),
}
RECURRENCES, MOST_RECURRENCES = 4, 8
TASKS = "looped_axis_reasoning_primitives"
PROMPT = "def read_lines(path):\n"


def demo(
    output_dir: str,
    data: str | None = None,
    size: str = "tiny",
    steps: int | None = None,
    quick: bool = False,
    overwrite: bool = False,
    seed: int = 0,
) -> bool:
    """
    Trains LoopedGPT on `data` (the Python standard library by default) and writes a `from_pretrained` directory with
    `metrics.json`, `loss_vs_recurrences.png` and a model card to `output_dir`. The same call continues a run that was
    interrupted. `steps` are the size's own by default; `quick` takes fifty, and a quarter of the library. Returns
    whether the run is finished.

    Raises:
        `ValueError`: for an unknown size, unusable data, or an `output_dir` that holds something else.
    """
    if size not in SIZES:
        raise ValueError(f"--size {size!r} must be one of {', '.join(SIZES)}.")
    plan = SIZES[size]
    recipe = replace(plan.recipe, seed=seed, total_steps=steps or (50 if quick else plan.recipe.total_steps))
    output = Path(output_dir)
    settings = {"data": data or "python standard library", "size": size, **asdict(recipe)}
    work = _check_output(output, settings, overwrite)
    began = time.perf_counter()
    train_texts, validation_texts = split_by_name(read_texts(data) if data else standard_library())
    if quick and data is None:
        train_texts = train_texts[::4]  # fifty steps see a fraction of it
    if overwrite and work.exists():  # nothing is removed before everything that can be wrong has been looked at
        shutil.rmtree(output)
    work.mkdir(parents=True, exist_ok=True)
    _write_json(work / "settings.json", settings)
    tokenizer, train = prepare_data(work, train_texts, plan.vocab_size)
    rows = TokenRows(train, plan.length, seed)
    prelude, core, coda = plan.layers
    config = LoopedGPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=plan.width,
        num_attention_heads=plan.heads,
        num_prelude_layers=prelude,
        num_core_layers=core,
        num_coda_layers=coda,
        num_recurrences=RECURRENCES,
        trained_recurrences=MOST_RECURRENCES,
        max_position_embeddings=plan.length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LoopedGPTForCausalLM(config)
    total = parameter_counts(config)["total"]
    tokens = recipe.total_steps * recipe.batch_size * rows.length
    print(
        f"{config.plan()}: {total:,} parameters, {len(train):,} training tokens, {recipe.total_steps:,} steps "
        f"over {tokens:,} tokens ({tokens / (len(rows) * rows.length):.2f} epochs)"
    )
    result = pretrain(model, rows, recipe, work, tokenizer)
    if not result.finished:
        training_figures(work, result, time.perf_counter() - began)
        print(f"Stopped after step {result.step} of {recipe.total_steps}. Run the same command to continue.")
        return False
    trained = training_figures(work, result, time.perf_counter() - began)

    shutil.copytree(newest_checkpoint(work), output, dirs_exist_ok=True, ignore=_training_state)
    # From here on everything is measured on what was written, in fresh processes, as a user would load it.
    held_out = work / "validation.jsonl"
    _write_jsonl(held_out, validation_texts)
    prompt = PROMPT if data is None else " ".join(validation_texts[0].split()[:8])
    # What goes to the Hub says no folders.
    named = Path(data).name if data is not None and Path(data).exists() else settings["data"]
    facts = {
        "parameters": parameter_counts(config),
        "training": {
            "steps": recipe.total_steps,
            "tokens": tokens,
            **trained,
            "flops": tokens * training_flops_per_token(config),
        },
        "settings": {**settings, "data": named},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "prompt": prompt,
        "limits": ["A demonstration trained for minutes. It writes the look of its data, not its sense."],
    }
    _write_json(output / "metrics.json", facts)  # which lm-eval's results quote
    sampling = ["--max-new-tokens", "96", "--temperature", "0.7", "--seed", str(seed)]
    depths = ["--recurrences", f"1..{MOST_RECURRENCES}", "--max-tokens", str(2048 if quick else 32768)]
    text = [] if data is None else [str(held_out)]
    with ThreadPoolExecutor() as together:  # most of each is Python's start
        measured = together.submit(_looped, "eval", str(output), *text, *depths, "--save", "--json")
        generated = together.submit(_looped, "generate", str(output), prompt, *sampling)
        evaluated = together.submit(_evaluate, output, 4 if quick else 50)
    losses, sample, evaluation = json.loads(measured.result()), generated.result(), evaluated.result()
    for row in losses:
        row["gflops"] = forward_flops_per_token(config, num_recurrences=row["num_recurrences"]) / 1e9
    held_out_tokens = token_stream(tokenizer, validation_texts)
    metrics = {
        "validation": losses,
        "unigram_nats_per_token": unigram_loss(train, held_out_tokens[: losses[0]["tokens"] + 1], len(tokenizer)),
        **facts,
    }
    _write_json(output / "metrics.json", metrics)
    try:
        write_card(output, overwrite)
    except ForeignCard as error:  # of somebody who wrote into the card, and called the demo again
        print(error, file=sys.stderr)
    print(f"\n{sample}\n")
    print("recurrences  nats/token  bits/byte  GFLOPs/token")
    for row in losses:
        print(
            f"{row['num_recurrences']:11d}  {row['nats_per_token']:10.4f}  {row['bits_per_byte']:9.4f}  "
            f"{row['gflops']:12.4f}"
        )
    print(f"    unigram  {metrics['unigram_nats_per_token']:10.4f}")
    print(f"\n{evaluation}")
    print(
        f"\n{output}/ holds the checkpoint, metrics.json, loss_vs_recurrences.png and README.md. Try:\n"
        f"  looped generate {output} {json.dumps(prompt)} --recurrences 8"
    )
    return True


def _check_output(output: Path, settings: dict, overwrite: bool) -> Path:
    """The working folder inside `output`, which is new, that of an earlier call with the same settings, or replaced."""
    work = output / "training"
    record = work / "settings.json"
    if record.exists():
        changed = {name: was for name, was in json.loads(record.read_text()).items() if settings.get(name) != was}
        if changed and not overwrite:
            was = ", ".join(f"{name}={value!r}" for name, value in changed.items())
            raise ValueError(f"{output} holds a run with {was}: call it with the same, or pass --overwrite.")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not a demo's: choose a new directory.")
    return work


def prepare_data(work: Path, train_texts: list[str], vocab_size: int):
    """Tokenizer and training stream, kept in `work` for a continued run."""
    from transformers import AutoTokenizer

    digest = hashlib.sha256("\0".join(train_texts).encode("utf-8", "replace")).hexdigest()
    folder, stream = work / f"data-{digest[:12]}", work / f"data-{digest[:12]}" / "train.npy"
    if not stream.exists():
        size = sum(map(len, train_texts)) / 1e6
        print(f"Training a tokenizer of {vocab_size:,} tokens on {len(train_texts):,} texts ({size:.1f} MB) ...")
        tokenizer = train_tokenizer(train_texts, vocab_size)
        tokenizer.save_pretrained(folder)
        np.save(folder / "writing.npy", token_stream(tokenizer, train_texts))
        os.replace(folder / "writing.npy", stream)
    return AutoTokenizer.from_pretrained(folder), np.load(stream, mmap_mode="r")


def training_figures(work: Path, result: PretrainResult, seconds: float) -> dict:
    """Kept beside the run: seconds add up over interruptions, and a finished run that is called again keeps its own."""
    path = work / "training.json"
    figures = json.loads(path.read_text()) if path.exists() else {"seconds": 0}
    if result.losses:
        figures = {
            "seconds": figures["seconds"] + round(seconds),
            "tokens_per_second": round(result.tokens_per_second),
            "final_loss": recent_mean(result.losses),
        }
        path.write_text(json.dumps(figures) + "\n")
    return figures


def _training_state(folder: str, names: list[str]) -> set[str]:
    return {"optimizers.pt", "progress.json"}.intersection(names)


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _evaluate(output: Path, limit: int) -> str:
    """The reasoning primitives, which need no data, at one and all recurrences. Returns a line for the reader."""
    if find_spec("lm_eval") is None:
        return "lm-eval is not installed, so the card has no evaluation: pip install 'modeling-looped[eval]'."
    from modeling_looped.eval.report import Comparison, read_runs

    results = output / EVALUATION
    if results.exists():
        shutil.rmtree(results)
    command = [
        "--model_args", f"pretrained={output}", "--tasks", TASKS, "--recurrences", f"1,{RECURRENCES}",
        "--limit", str(limit), "--batch_size", "16", "--output_path", str(results),
    ]  # fmt: skip
    run = subprocess.run([sys.executable, "-m", "modeling_looped.eval", *command], capture_output=True, text=True)
    if run.returncode:
        print(run.stderr[-2000:], file=sys.stderr)
        raise RuntimeError(f"python -m modeling_looped.eval ended with {run.returncode}; its message stands above.")
    runs = read_runs([results])
    found = Comparison(runs)
    losses = ", ".join(f"{found.value(run, TASKS, 'continuation_loss'):.3f}" for run in runs)
    return (
        f"{TASKS}: continuation loss {losses} nats per token at r = 1, {RECURRENCES} ({limit} items a task; README.md)"
    )


def _looped(*arguments: str) -> str:
    """The command `looped` in a process of its own. Returns what it prints."""
    run = subprocess.run([sys.executable, "-m", "looped_cli", *arguments], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise RuntimeError(f"looped {arguments[0]} ended with {run.returncode}; its message stands above.")
    return run.stdout.rstrip("\n")
