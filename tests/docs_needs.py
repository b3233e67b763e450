"""
What a page of the documentation finds in its folder when it says `<!-- needs: NAME, NAME -->` at its top. Each function
here makes one of them, once in a session, under the name in `NEEDS`. A need may also be a path of the repository, such as
`configuration` or `tests/fixtures/iso_depth_runs.csv`: it is copied.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def demo_output(target: Path) -> None:
    """What `looped demo demo-output --quick` leaves."""
    subprocess.run([sys.executable, "-m", "looped_cli", "demo", str(target), "--quick"], check=True, timeout=600)


def my_jsonl(target: Path) -> None:
    """Twenty short texts of Python's own library."""
    _write_texts(target, [text[:1000] for text in _library()[0][:20]])


def validation_jsonl(target: Path) -> None:
    """Ten texts that the demo holds out."""
    _write_texts(target, [text[:1000] for text in _library()[1][:10]])


def llama(target: Path) -> None:
    """A Llama of sixteen layers of width 64, random weights, with a tokenizer: any checkpoint of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from modeling_looped.recipes.tokens import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer(_library()[0][:60], 512)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        **ends,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)


def stacks(target: Path) -> None:
    """Folders as `looped compare grow_toy` and `looped compare` leave them, of untrained models of their plans."""
    from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM, RecurrentGPTConfig, RecurrentGPTForCausalLM
    from modeling_looped.recipes.tokens import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer(_library()[0][:60], 512)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128}
    shape |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    plans = {
        "baseline-24": "24x1",
        "midas": "24x1",
        "lidas": "24x1",
        "loop-4x6": "Loop(4x6)",
        "loop-4-4x4-4": "Loop(4-4x4-4)",
    }
    models = {
        f"{name}-0/step-400": GrownLlamaForCausalLM(GrownLlamaConfig(**shape, intermediate_size=86, depth_plan=plan))
        for name, plan in plans.items()
    }
    recurrent = RecurrentGPTForCausalLM(RecurrentGPTConfig(**shape, num_recurrences=4))
    models["recurrent_gpt-isoFLOPS-steps-0/step-800"] = recurrent
    for name, model in models.items():
        model.save_pretrained(target / name)
        tokenizer.save_pretrained(target / name)


def arc_easy(target: Path) -> None:
    """Two questions of our own in ARC's form."""
    questions = [
        ("Which of these is a liquid at room temperature?", ["iron", "water", "salt", "oxygen"], 1),
        ("Which animal lays eggs?", ["hen", "cow", "dog", "horse"], 0),
    ]
    rows = ({"query": f"Question: {text}", "choices": choices, "gold": gold} for text, choices, gold in questions)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def official_iso_depth(target: Path) -> None:
    """`model_*.pt` and `meta_*.json` as the iso-depth paper's code writes them, of a small model."""
    import test_conversion

    target.mkdir()
    torch.manual_seed(0)
    test_conversion.save(target, test_conversion.paper_model())


def smollm2(target: Path) -> None:
    """The weights of SmolLM2-135M-Instruct, linked."""
    from modeling_looped.eval.smollm2 import smollm2_checkpoint

    target.symlink_to(smollm2_checkpoint())


NEEDS: dict[str, Callable[[Path], None]] = {
    "demo-output": demo_output,
    "my.jsonl": my_jsonl,
    "validation.jsonl": validation_jsonl,
    "llama": llama,
    "stacks": stacks,
    "arc_easy.jsonl": arc_easy,
    "official": official_iso_depth,
    "SmolLM2-135M-Instruct": smollm2,
}


def _library() -> tuple[list[str], list[str]]:
    from modeling_looped.recipes.corpus import split_by_name, standard_library

    return split_by_name((name, text) for name, text in standard_library() if 500 < len(text) < 3000)


def _write_texts(target: Path, texts: list[str]) -> None:
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
