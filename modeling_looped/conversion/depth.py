"""Checkpoints in, checkpoints of another depth out: `looped loop`, `looped unroll`, `looped grow`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..decoder_stack import decoder_stack
from ..growth import grow
from ..interventions import executed_plan
from ..looping import add_recurrence, apply_loops, load, loop, unroll


def loop_checkpoint(
    source: str, output: str, start: int, stop: int, repeats: int, dry_run: bool = False, overwrite: bool = False
) -> str:
    """
    `source` with the layers [start, stop) run `repeats` more times. A GrownLlama says so in its `depth_plan`, any other
    decoder in `looped_layers`, which `looping.load` reads. Returns what was done, in words.
    """

    def change(model: PreTrainedModel) -> PreTrainedModel:
        if not hasattr(model.config, "depth_plan"):
            loop(model, start, stop, repeats)
            return model
        trained = model.config.trained_recurrences
        for _ in range(repeats):
            add_recurrence(model, start, stop)
        model.config.trained_recurrences = trained  # nothing was trained at the new depth
        return model

    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1.")
    return _change(source, output, change, dry_run, overwrite)


def unroll_checkpoint(
    source: str, output: str, num_recurrences: int | None = None, dry_run: bool = False, overwrite: bool = False
) -> str:
    """`source` without loops, as a plain transformers checkpoint. Returns what was done, in words."""
    return _change(source, output, lambda model: unroll(model, num_recurrences), dry_run, overwrite)


def grow_checkpoint(
    source: str,
    output: str,
    operator: str,
    block_size: int,
    num_layers: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
) -> str:
    """
    `source` grown by `block_size` layers, or as often as `num_layers` takes. Of a checkpoint of `recipes.pretrain`, the
    state of the optimizers grows too (one growth at a time). Returns what was done, in words.
    """
    has_state = (Path(source) / "optimizers.pt").is_file()

    def change(model: PreTrainedModel) -> PreTrainedModel:
        depth = len(decoder_stack(model).unique_layers)
        growths, rest = divmod((num_layers or depth + block_size) - depth, block_size)
        if rest or growths < 1:
            raise ValueError(f"num_layers={num_layers} must be {depth} and a multiple of block_size={block_size} more.")
        if has_state and not dry_run:
            from ..recipes.pretrain import grow_training_state

            if growths > 1:
                raise ValueError("A training checkpoint grows by one block at a time, between which it trains.")
            Path(output).mkdir(parents=True, exist_ok=True)
            grow_training_state(Path(source), model, operator, block_size, Path(output))
            return model
        for _ in range(growths):
            grow(model, operator, block_size)
        return model

    return _change(source, output, change, dry_run, overwrite)


def _change(
    source: str, output: str, change: Callable[[PreTrainedModel], PreTrainedModel], dry_run: bool, overwrite: bool
) -> str:
    if not dry_run:
        _check_output(source, output, overwrite)
    if dry_run:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        apply_loops(model)
    else:
        model = load(source, dtype="auto")
    before = _describe(model)
    changed = change(model)
    lines = [f"before: {before}", f"after:  {_describe(changed)}"]
    if dry_run:
        return "\n".join([*lines, "Nothing was written (dry run)."])
    changed.save_pretrained(output)
    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(output)
    except (OSError, ValueError):  # a checkpoint without a tokenizer
        pass
    return "\n".join([*lines, f"written to {output}"])


def _check_output(source: str, output: str, overwrite: bool) -> None:
    path = Path(output)
    if path.exists() and path.resolve() == Path(source).resolve():
        raise ValueError(f"{output} is the checkpoint that is read: name another folder.")
    if path.is_file():
        raise ValueError(f"{output} is a file: name a folder.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"{output} is not empty: pass --overwrite to replace what it holds.")
        if not (path / "config.json").is_file():
            raise ValueError(f"{output} holds something else than a checkpoint: it is not overwritten.")
        shutil.rmtree(path)


def _describe(model: PreTrainedModel) -> str:
    plan, stack = executed_plan(model), decoder_stack(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{type(model).__name__} {plan}, {len(stack.unique_layers)} stored layers, {plan.effective_depth} executed, "
        f"{size:,} parameters"
    )
