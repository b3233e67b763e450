"""
`make bench`: what depth costs against a transformers Llama that executes as many layers of as many weights.

Pairs run in turn, A B A B ..., and ratios are of medians, so that a machine whose speed drifts says the same. No test
asserts a timing.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from modeling_looped import LoopedGPTConfig, LoopedGPTForCausalLM


VOCAB = 8192


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 640])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
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
