"""Checkpoints in, checkpoints of another depth out: `looped loop`, `looped unroll`, `looped grow`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..decoder_stack import decoder_stack
from ..growth import grow
from ..interventions import executed_plan
from ..looping import add_recurrence, apply_loops, load, loop, unroll
from .ledger import (
    Comparison,
    Ledger,
    Use,
    check_output,
    compare_logits,
    parameters_by_part,
    probe_tokens,
    write_checkpoint,
    written_aside,
)
from .tokenizers import copy_tokenizer, read_tokenizer


@dataclass(frozen=True)
class Change:
    """
    What became of a checkpoint; `str` puts it into words.

    Attributes:
        before, after: The model's class, plan, stored and executed layers, and parameters.
        written: The new checkpoint's folder; None of a dry run.
    """

    before: dict
    after: dict
    written: str | None

    def __str__(self) -> str:
        lines = [f"before: {_words(self.before)}", f"after:  {_words(self.after)}"]
        lines.append("Nothing was written (dry run)." if self.written is None else f"written to {self.written}")
        return "\n".join(lines)


def loop_checkpoint(
    source: str, output: str, start: int, stop: int, repeats: int, dry_run: bool = False, overwrite: bool = False
) -> Change:
    """
    `source` with the layers [start, stop) run `repeats` more times. A GrownLlama says so in its `depth_plan`, any other
    decoder in `looped_layers`, which `looping.load` reads.
    """

    def change(model: PreTrainedModel, written: Path) -> PreTrainedModel:
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
) -> Ledger:
    """
    `source` without loops, as a plain transformers checkpoint, whose logits are checked to be the source's to the last
    bit. `str(ledger)` says what was done.
    """
    folder = Path(output).expanduser().resolve()
    model = _read(source, folder, dry_run, overwrite)
    order = executed_order(model, num_recurrences)
    plain = unroll(model, num_recurrences)
    copies = unrolled_names(model, order)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ledger = Ledger(
        Path(source),
        folder,
        _words(_describe(plain)),
        tuple(Use(name, tuple(copies[name]), shape) for name, shape in shapes.items() if copies[name]),
        {name: "the plan does not visit this layer" for name in shapes if not copies[name]},
        parameters=parameters_by_part(plain),
        remarks=(f"before: {_words(_describe(model))}",),
        dry_run=dry_run,
    )
    if dry_run:
        return ledger

    def compare(written: Path) -> tuple[Comparison]:
        read = type(plain).from_pretrained(written, dtype=model.dtype)
        config = model.config.get_text_config(decoder=True)
        tokens = probe_tokens(config.vocab_size, config.max_position_embeddings)
        passes = {} if num_recurrences is None else {"num_recurrences": num_recurrences}
        what = f"{type(model).__name__} against the {type(read).__name__} read back"
        return (compare_logits(model, read, what, tokens, **passes),)

    comparisons = write_checkpoint(plain, folder, compare, lambda written: copy_tokenizer(_tokenizer(source), written))
    return replace(ledger, comparisons=comparisons)


def executed_order(model: PreTrainedModel, num_recurrences: int | None = None) -> tuple[int, ...]:
    """The stored layer that runs at each position, with `num_recurrences` passes of a model that has a loop to turn."""
    if num_recurrences is not None and hasattr(model.config, "depth_plan"):
        model.config.check_recurrences(num_recurrences)
        return model.config.plan(num_recurrences).order
    return executed_plan(model).order


def unrolled_names(model: PreTrainedModel, order: tuple[int, ...]) -> dict[str, list[str]]:
    """For each tensor that `model` stores, its names once the layers are written out in `order`."""
    stack = decoder_stack(model)
    prefix = next(name for name, module in model.named_modules() if module is stack.owner)
    layers = f"{prefix}.{stack.name}." if prefix else f"{stack.name}."
    names = {}
    for name, _ in model.named_parameters():
        number, _, rest = name.removeprefix(layers).partition(".")
        inside = name.startswith(layers)
        names[name] = (
            [f"{layers}{i}.{rest}" for i, layer in enumerate(order) if layer == int(number)] if inside else [name]
        )
    return names


def grow_checkpoint(
    source: str,
    output: str,
    operator: str,
    block_size: int,
    num_layers: int | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Change:
    """
    `source` grown by `block_size` layers, or as often as `num_layers` takes. Of a checkpoint of `recipes.pretrain`, the
    state of the optimizers grows too (one growth at a time).
    """
    has_state = (Path(source) / "optimizers.pt").is_file()

    def change(model: PreTrainedModel, written: Path) -> PreTrainedModel:
        depth = len(decoder_stack(model).unique_layers)
        growths, rest = divmod((num_layers or depth + block_size) - depth, block_size)
        if rest or growths < 1:
            raise ValueError(f"num_layers={num_layers} must be {depth} and a multiple of block_size={block_size} more.")
        if has_state and not dry_run:
            from ..recipes.pretrain import grow_training_state

            if growths > 1:
                raise ValueError("A training checkpoint grows by one block at a time, between which it trains.")
            grow_training_state(Path(source), model, operator, block_size, written)
            return model
        for _ in range(growths):
            grow(model, operator, block_size)
        return model

    return _change(source, output, change, dry_run, overwrite)


def _change(
    source: str, output: str, change: Callable[[PreTrainedModel, Path], PreTrainedModel], dry_run: bool, overwrite: bool
) -> Change:
    """`change` gets the model, and the folder that is written (none, in a dry run)."""
    folder = Path(output).expanduser().resolve()
    model = _read(source, folder, dry_run, overwrite)
    before = _describe(model)
    if dry_run:
        changed = change(model, folder)
        return Change(before, _describe(changed), None)
    with written_aside(folder) as written:
        written.mkdir()
        changed = change(model, written)
        changed.save_pretrained(written)
        copy_tokenizer(_tokenizer(source), written)
    return Change(before, _describe(changed), output)


def _read(source: str, output: Path, dry_run: bool, overwrite: bool) -> PreTrainedModel:
    """The model in `source`, its loops included, once `output` is known to be free; without weights in a dry run."""
    if not dry_run:
        check_output(output, {Path(source)}, overwrite)
        return load(source, dtype="auto")
    config = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return apply_loops(model)


def _tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    if Path(source).is_dir():
        return read_tokenizer(Path(source))
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):  # a checkpoint on the Hub without a tokenizer
        return None


def _describe(model: PreTrainedModel) -> dict:
    plan, stack = executed_plan(model), decoder_stack(model)
    return {
        "model": type(model).__name__,
        "plan": str(plan),
        "stored_layers": len(stack.unique_layers),
        "executed_layers": plan.effective_depth,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _words(of: dict) -> str:
    return (
        f"{of['model']} {of['plan']}, {of['stored_layers']} stored layers, {of['executed_layers']} executed, "
        f"{of['parameters']:,} parameters"
    )
