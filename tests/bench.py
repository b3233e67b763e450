"""
`make bench`: what depth costs. LoopedGPT against a transformers Llama that executes as many layers of as many weights,
RecurrentGPT at isoFLOPS against its dense twin, the training loop of the recipes against a bare one, and the phi
laboratory's fit.

Pairs run in turn, A B A B ..., and ratios are of medians, so that a machine whose speed drifts says the same. No test
asserts a timing.
"""

import argparse
import json
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM
from modeling_looped.accounting import forward_flops_per_token
from modeling_looped.recipes.optimizers import fastest_dtype, make_adamw
from modeling_looped.recipes.pretrain import PretrainRecipe, RunOptions, pretrain


VOCAB = 8192
CONFIGURATION = Path(__file__).resolve().parents[1] / "configuration"
RUNS = Path(__file__).resolve().parent / "fixtures" / "iso_depth_runs.csv"


def looped(width: int) -> PreTrainedModel:
    config = LoopedGPTConfig(vocab_size=VOCAB, hidden_size=width, num_attention_heads=width // 64)
    return LoopedGPTForCausalLM(config).eval()


def llama(width: int) -> PreTrainedModel:
    """20 layers of the same size: three matrices of 8/3 d instead of two of 4 d in each MLP."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=20,
        num_attention_heads=width // 64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def now() -> float:
    """Seconds, after whatever the GPU still has to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def decode(model: PreTrainedModel, prompt: int = 32, tokens: int = 32) -> float:
    """Seconds per token of greedy eager decoding at batch 1, after the prompt."""
    input_ids = torch.arange(prompt, device=model.device)[None] % VOCAB
    cache = model(input_ids, use_cache=True).cache
    token = input_ids[:, -1:]
    began = now()
    for _ in range(tokens):
        token = model(token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return (now() - began) / tokens


@torch.no_grad()
def generate(model: PreTrainedModel, prompt: int = 32, tokens: int = 32) -> float:
    """The same through `generate`."""
    input_ids = torch.arange(prompt, device=model.device)[None] % VOCAB
    began = now()
    model.generate(input_ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return (now() - began) / tokens


@torch.no_grad()
def prefill(model: PreTrainedModel, tokens: int = 256) -> float:
    """Seconds of one forward over a prompt."""
    input_ids = torch.arange(tokens, device=model.device)[None] % VOCAB
    began = now()
    model(input_ids, use_cache=True, logits_to_keep=1)
    return now() - began


def train_step(model: PreTrainedModel, batch: int = 2, tokens: int = 128) -> float:
    """Seconds of forward and backward in bf16 autocast."""
    input_ids = torch.arange(batch * tokens, device=model.device).view(batch, tokens) % VOCAB
    began = now()
    with torch.autocast(model.device.type, torch.bfloat16):
        loss = model(input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    seconds = now() - began
    model.zero_grad()
    return seconds


def compare(measure: Callable[[PreTrainedModel], float], a: PreTrainedModel, b: PreTrainedModel, rounds: int):
    """Median seconds of both, and the median of the ratios a / b pair by pair."""
    measure(a), measure(b)
    pairs = [(measure(a), measure(b)) for _ in range(rounds)]
    return (*(statistics.median(side) for side in zip(*pairs)), statistics.median(x / y for x, y in pairs))


# RecurrentGPT against its dense twin (arXiv 2608.15062, section 10.4 of its specification)


def static_decode(
    model: PreTrainedModel, compiled: bool, prompt: int, tokens: int
) -> Callable[[PreTrainedModel], float]:
    """A measure like `decode`, on a static cache, with one compiled graph for the whole model."""
    input_ids = torch.arange(prompt, device=model.device)[None]
    cache = StaticCache(config=model.config.cache_config(), max_cache_len=prompt + tokens)
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    step = torch.compile(model.forward, mode=mode, fullgraph=True, dynamic=False) if compiled else model.forward

    @torch.no_grad()
    def measure(_) -> float:
        cache.reset()
        model(input_ids, cache=cache, use_cache=True, logits_to_keep=1)
        token, place = input_ids[:, -1:], torch.full((1, 1), prompt, device=model.device)
        began = now()
        for _ in range(tokens):
            token = step(token, cache=cache, use_cache=True, position_ids=place).logits[:, -1:].argmax(-1)
            place = place + 1
        return (now() - began) / tokens

    return measure


def build(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(CONFIGURATION / f"recurrent-gpt-{name}")
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def peak_memory(name: str, device: str, dtype: torch.dtype, prompt: int, tokens: int) -> int:
    """Bytes that a model and its eager decoding add at their peak; on a CPU, of a process that does nothing else."""
    input_ids = torch.arange(prompt, device=device)[None]
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    if device == "cuda":
        model = build(name, device, dtype)
        model.generate(input_ids, **settings)
        torch.cuda.reset_peak_memory_stats()
        model.generate(input_ids, **settings)
        return torch.cuda.max_memory_allocated()
    tiny = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=1, num_hidden_layers=1)
    generate_once = LlamaForCausalLM(tiny)
    generate_once.generate(input_ids, **settings)  # what the libraries themselves allocate on first use
    before = psutil.Process().memory_info().rss
    model = build(name, device, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: building takes more than running
    model.generate(input_ids, **settings)
    # Not getrusage, which starts from what the parent held when it forked.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 - before


def where_time_goes(model: PreTrainedModel, measure: Callable[[PreTrainedModel], float], rows: int = 6) -> str:
    """The operations that eager decoding spends most of its time in, and their shares."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        measure(model)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return ", ".join(f"{event.key[6:]} {event.self_cpu_time_total / total:.0%}" for event in events[:rows])


def recurrent_against_dense(arguments: argparse.Namespace) -> None:
    prompt, tokens = arguments.prompt, arguments.tokens
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    print(
        f"\nRecurrentGPT isoFLOPS against its dense twin; batch 1, {prompt} + {tokens} tokens, vocabulary 50,304, "
        f"{dtype}, {arguments.device}, {torch.get_num_threads()} threads"
    )
    print("size    what                            recurrent       dense   ratio   FLOP ratio")
    for size in arguments.sizes:
        pair = [build(f"{size}-{cell}", arguments.device, dtype) for cell in ("isoflops", "dense")]
        flops = [forward_flops_per_token(model.config, prompt + tokens // 2) for model in pair]
        for kind in ("eager", *(["compiled"] if arguments.compile else [])):
            torch._dynamo.reset()
            measures = [static_decode(model, kind == "compiled", prompt, tokens) for model in pair]
            for measure in measures:
                measure(None)
            pairs = [(measures[0](None), measures[1](None)) for _ in range(arguments.rounds)]
            ours, theirs = (statistics.median(side) for side in zip(*pairs))
            ratio = statistics.median(x / y for x, y in pairs)
            what = f"{kind} decode, ms/token"
            print(
                f"{size:6}  {what:<30}  {ours * 1e3:9.2f}   {theirs * 1e3:9.2f}   {ratio:5.3f}   {flops[0] / flops[1]:10.3f}"
            )
            if kind == "eager":
                profiles = [where_time_goes(model, measure) for model, measure in zip(pair, measures)]
        print(f"        eager time, recurrent: {profiles[0]}\n        eager time, dense: {profiles[1]}")
        del pair, measures
        peaks = []
        for cell in ("isoflops", "dense"):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                job = process.submit(peak_memory, f"{size}-{cell}", arguments.device, dtype, prompt, tokens)
                peaks.append(job.result())
        print(
            f"{size:6}  {'peak memory, MiB':<30}  {peaks[0] / 2**20:9.0f}   {peaks[1] / 2**20:9.0f}   "
            f"{peaks[0] / peaks[1]:5.3f}"
        )


# Training: the recipes' loop against the shortest one that trains the same model on the same rows with the same AdamW


class RandomRows:
    """Rows that cost nothing to read."""

    def __init__(self, length: int):
        self.length = length

    def inputs(self, first: int, count: int) -> dict[str, torch.Tensor]:
        rows = torch.randint(VOCAB, (count, self.length), generator=torch.Generator().manual_seed(first))
        return {"input_ids": rows, "labels": rows}


def bare_loop(model: PreTrainedModel, rows: RandomRows, batch: int, steps: int, dtype: torch.dtype) -> list[float]:
    """Seconds of each step."""
    (optimizer,) = make_adamw(model, 1e-4, 0.1)
    model.train()
    seconds = []
    for step in range(steps):
        began = now()
        inputs = {name: value.to(model.device) for name, value in rows.inputs(step * batch, batch).items()}
        with torch.autocast(model.device.type, dtype, enabled=dtype is not torch.float32):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(now() - began)
    return seconds


def recipe_loop(model: PreTrainedModel, rows: RandomRows, batch: int, steps: int, compiled: bool, checkpointing: bool):
    """Seconds of each step, as `metrics.jsonl` has them."""
    recipe = PretrainRecipe(
        total_steps=steps, batch_size=batch, optimizer="adamw", adamw_lr=1e-4, activation_checkpointing=checkpointing,
        checkpoint_every=10**9,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(tracker="none", regional_compile=compiled)
        pretrain(model, rows, recipe, folder, progress=False, options=options)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    ends = [0.0, *(line["seconds"] for line in lines)]
    return [end - start for start, end in zip(ends, ends[1:])]


def training(arguments: argparse.Namespace) -> None:
    """Of the median step of each round; the first two steps of a run warm up."""
    dtype, steps, batch = fastest_dtype(), 6, arguments.batch
    config = LoopedGPTConfig.iso_depth(4, 4, vocab_size=VOCAB, max_position_embeddings=512)
    rows = RandomRows(512)

    def model() -> PreTrainedModel:
        torch.manual_seed(0)
        torch._dynamo.reset()
        return LoopedGPTForCausalLM(config).to(arguments.device)

    kinds = {
        "bare loop": lambda: bare_loop(model(), rows, batch, steps, dtype),
        "recipes.pretrain": lambda: recipe_loop(model(), rows, batch, steps, False, False),
        "recipes.pretrain, activation checkpointing": lambda: recipe_loop(model(), rows, batch, steps, False, True),
    }
    if arguments.compile:
        kinds["recipes.pretrain, regional compile"] = lambda: recipe_loop(model(), rows, batch, steps, True, False)
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append({kind: statistics.median(measure()[2:]) for kind, measure in kinds.items()})
    print(f"Training LoopedGPT {config.plan()}, width 256, rows of 512 tokens, {batch} a step, {dtype}, AdamW")
    for kind in kinds:
        median = statistics.median(one[kind] for one in rounds)
        speeds = [one["bare loop"] / one[kind] for one in rounds]
        print(
            f"{kind:<44}  {batch * 512 / median:8.0f} tokens/s   {statistics.median(speeds):5.3f} of the bare loop "
            f"({min(speeds):.3f} to {max(speeds):.3f})"
        )


def evaluation(arguments: argparse.Namespace) -> None:
    """Four recurrence counts in one process of lm-eval, loading left out, against the forwards that they need."""
    from lm_eval._cli import HarnessCLI  # noqa: F401  its import is no part of what is timed

    from modeling_looped.eval import run
    from modeling_looped.eval.harness import LoopedLM
    from modeling_looped.recipes import scoring

    counts, forwards, loading = [1, 2, 4, 8], [], []
    score, create = scoring.score_continuations, LoopedLM.create_from_arg_obj.__func__

    def timed(into: list, call, *args, **kwargs):
        began = now()
        result = call(*args, **kwargs)
        into.append(now() - began)
        return result

    run.harness.score_continuations = lambda *args, **kwargs: timed(forwards, score, *args, **kwargs)
    LoopedLM.create_from_arg_obj = classmethod(lambda cls, *args: timed(loading, create, cls, *args))
    asked = ["--model_args", f"pretrained={arguments.checkpoint}", "--tasks", "looped_axis_reasoning_primitives"]
    asked += ["--device", arguments.device, "--batch_size", "16", "--limit", str(arguments.limit)]
    parsed = run._lm_eval_arguments(asked)
    run.run(parsed, (), [1])  # warms up
    forwards.clear()
    loading.clear()
    began = now()
    run.run(parsed, (), counts)
    whole = now() - began - sum(loading)
    print(f"lm-eval at r in {counts}, {arguments.limit} items of each of 5 tasks, {arguments.checkpoint}")
    print(
        f"loads {len(loading)}   all {whole:.2f} s   forwards {sum(forwards):.2f} s   ratio {whole / sum(forwards):.3f}"
    )


def phi_laboratory(restarts: int = 500, resamples: int = 200, processes: int = 2) -> None:
    """The joint law of the published runs and its block bootstrap."""
    from modeling_looped.scaling import bootstrap, fit_joint_law, read_runs

    frame = read_runs(RUNS)
    began = now()
    law = fit_joint_law(frame, restarts=restarts, processes=processes)
    fitted = now()
    low, high = bootstrap(frame, law, resamples=resamples, processes=processes).interval()
    print(
        f"phi of {RUNS.name}, {processes} processes: {restarts} restarts {fitted - began:.1f} s   {resamples} refits "
        f"{now() - fitted:.1f} s   phi {law.phi:.3f} [{low:.3f}, {high:.3f}]"
    )


def skip_effects_over_depth(prompts: int = 10, tokens: int = 160, width: int = 256) -> None:
    """Seconds of the skip effects of stacks of two depths: four times as long for twice the layers is E^2."""
    from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
    from modeling_looped.diagnostics import Probe, skip_effects

    rows = [[(7 * place + number) % 2000 for place in range(tokens)] for number in range(prompts)]
    shape = {"vocab_size": 2048, "hidden_size": width, "intermediate_size": 688, "num_attention_heads": width // 64}
    for layers in (12, 24):
        model = GrownLlamaForCausalLM(GrownLlamaConfig(**shape, depth_plan=f"{layers}x1"))
        probe = Probe(model)
        for reach in ("local", "future"):
            began = now()
            skip_effects(probe, rows, reach=reach)
            print(f"{reach} skip effects, {layers} layers, width {width}, {prompts} prompts: {now() - began:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 640], help="of LoopedGPT against Llama")
    parser.add_argument(
        "--sizes", nargs="*", default=["small", "medium"], help="of RecurrentGPT against its dense twin"
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens, for RecurrentGPT")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens, for RecurrentGPT")
    parser.add_argument("--batch", type=int, default=2, help="rows of a training step; 0 leaves training out")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", help="of a looped model, such as demo-output: times lm-eval at several counts")
    parser.add_argument("--limit", type=int, default=200, help="items of each of lm-eval's tasks")
    parser.add_argument("--no-phi", dest="phi", action="store_false")
    parser.add_argument("--skip-effects", action="store_true", help="of diagnostics, at two depths: minutes")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.widths:
        looped_against_llama(arguments)
    if arguments.sizes:
        recurrent_against_dense(arguments)
    if arguments.batch:
        training(arguments)
    if arguments.checkpoint:
        evaluation(arguments)
    if arguments.phi:
        phi_laboratory()
    if arguments.skip_effects:
        skip_effects_over_depth()


def looped_against_llama(arguments: argparse.Namespace) -> None:
    print(
        f"LoopedGPT Loop(2-4x4-2) against Llama 20 layers; vocabulary {VOCAB:,}, {arguments.device}, "
        f"{torch.get_num_threads()} threads"
    )
    print("width  what                            LoopedGPT       Llama   ratio")
    for width in arguments.widths:
        a, b = looped(width).to(arguments.device), llama(width).to(arguments.device)
        for name, measure, unit in (
            ("eager decode, batch 1", decode, "ms/token"),
            ("eager generate, batch 1", generate, "ms/token"),
            ("prefill, 256 tokens", prefill, "ms"),
            ("forward + backward, bf16", train_step, "ms"),
        ):
            ours, theirs, ratio = compare(measure, a, b, arguments.rounds)
            print(f"{width:5d}  {name + ', ' + unit:<30}  {ours * 1e3:9.2f}   {theirs * 1e3:9.2f}   {ratio:5.3f}")


if __name__ == "__main__":
    main()
