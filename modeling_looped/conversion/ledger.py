"""What every conversion has: a ledger of every tensor, a comparison of logits, and an output that is whole or absent."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class ConversionError(RuntimeError):
    """A conversion whose result does not do what its source did. Nothing of it is left at the output."""


@dataclass(frozen=True)
class Use:
    """
    Where a tensor of the source went. A tensor that was cut has several, and so has one here made of several.

    Args:
        source (`str`): Its name there.
        targets (`tuple[str, ...]`): The names of what it became, more than one where it was copied.
        shape (`tuple[int, ...]`): The shape of each of them.
        notes (`tuple[str, ...]`): What was done to it.
    """

    source: str
    targets: tuple[str, ...]
    shape: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def row(self) -> tuple[str, str, str, str]:
        notes = list(self.notes)
        if len(self.targets) > 1:
            numbers = [re.search(r"\.(\d+)\.", name) for name in self.targets[1:]]
            copies = [number[1] for number in numbers] if all(numbers) else self.targets[1:]
            notes.append(f"copied to {'layer' if len(copies) == 1 else 'layers'} {', '.join(copies)}")
        return self.source, self.targets[0], " x ".join(map(str, self.shape)) or "one number", ", ".join(notes)


@dataclass(frozen=True)
class Comparison:
    """
    Two models on the same tokens.

    Args:
        what (`str`): Which two, in words.
        tokens (`int`): Positions compared.
        dtype (`str`): In which both computed.
        max_difference (`float`): The largest absolute difference between two logits.
        agreement (`float`): The share of positions whose most likely token is the same.
        tolerance (`float`, *optional*): What `max_difference` may be; `None` where it is only told.
    """

    what: str
    tokens: int
    dtype: str
    max_difference: float
    agreement: float
    tolerance: float | None = 0.0

    @property
    def is_within(self) -> bool:
        return self.tolerance is None or self.max_difference <= self.tolerance  # false for nan too

    def __str__(self) -> str:
        equal = ", bit-equal" if self.max_difference == 0 else ""
        return (
            f"{self.what}: largest difference {self.max_difference:.3g}{equal}, same most likely token at "
            f"{100 * self.agreement:.4g} % of {self.tokens} positions ({self.dtype})"
        )


@dataclass(frozen=True)
class Ledger:
    """
    What became of a checkpoint. `print(ledger)` shows it as a table, `to_dict()` is for JSON.

    Args:
        source (`Path`): The file or folder that was read.
        output (`Path`): What was written.
        model (`str`): The result in a line: class, depth plan, dtype.
        used (`tuple[Use, ...]`): Where every tensor of the source went, in the order of the forward pass.
        unused (`dict[str, str]`): What the source holds and the result has no place for -> the reason.
        new (`tuple[str, ...]`): Tensors of the result that the source lacks. Always empty: such a source is refused.
        parameters (`dict[str, int]`): Written parameters by part.
        remarks (`tuple[str, ...]`): What else there is to know.
        comparisons (`tuple[Comparison, ...]`): Logits of the result, read back. None in a dry run.
        dry_run (`bool`): Whether nothing was written.
    """

    source: Path
    output: Path
    model: str
    used: tuple[Use, ...]
    unused: dict[str, str]
    new: tuple[str, ...] = ()
    parameters: dict[str, int] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    dry_run: bool = False

    def __str__(self) -> str:
        rows = [use.row() for use in self.used]
        titles = (f"used ({len({use.source for use in self.used})})", "here", "shape", "")
        widths = [max(map(len, column)) for column in zip(titles, *rows)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (titles, *rows)]
        unused = [f"  {name}: {reason}" for name, reason in self.unused.items()] or ["  none"]
        compared = [f"  {comparison}" for comparison in self.comparisons] or ["  none"]
        if self.dry_run:
            compared.append("Nothing was written (dry run).")
        return "\n".join(
            [
                f"{self.source} -> {self.output}",
                self.model,
                *self.remarks,
                "",
                *table,
                "",
                f"unused ({len(self.unused)})",
                *unused,
                f"new ({len(self.new)})",
                *(f"  {name}" for name in self.new or ["none"]),
                "",
                "parameters",
                *(f"  {part:<9}  {count:>13,}" for part, count in self.parameters.items()),
                "",
                "logits",
                *compared,
            ]
        )

    def to_dict(self) -> dict:
        """Plain values, with the paths as text."""
        return json.loads(json.dumps(asdict(self), default=str))


def parameters_by_part(model: PreTrainedModel) -> dict[str, int]:
    """Of a model that `accounting.parameter_counts` does not count: `embedding`, `layers`, `norm`, `head`, `total`."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    counts = {"embedding": embedding.numel(), "layers": 0, "norm": 0, "head": 0}
    for name, parameter in model.named_parameters():  # a tied head comes as the embedding, once
        if parameter is embedding:
            continue
        part = "layers" if ".layers." in name else "head" if head is not None and parameter is head.weight else "norm"
        counts[part] += parameter.numel()
    return {**counts, "total": sum(counts.values())}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def build(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """A model of `weights`, which are its state dict to the last name, able to run."""
    model = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
    model.config._name_or_path = model.name_or_path = ""  # transformers would say "None"
    return model


# ---- Logits ----


def probe_tokens(vocab_size: int, length: int, seed: int = 0) -> torch.Tensor:
    """The tokens that models are compared on, two random rows: (2, at most 48)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (2, max(1, min(48, length))), generator=generator)


@torch.no_grad()
def logits_of(model: nn.Module, tokens: torch.Tensor, **options) -> torch.Tensor:
    """(batch, length, vocabulary), in evaluation."""
    was_training = model.training
    logits = model.eval()(input_ids=tokens, use_cache=False, **options).logits
    model.train(was_training)
    return logits


def compare_logits(
    one: nn.Module | torch.Tensor,
    other: nn.Module | torch.Tensor,
    what: str,
    tokens: torch.Tensor,
    tolerance: float | None = 0.0,
    **options,
) -> Comparison:
    """
    `one` and `other`, models or what `logits_of` returned, on `tokens`; the keyword arguments go to models of this
    package.

    Raises:
        `ConversionError`: where they differ by more than `tolerance`.
    """
    ours = {"num_recurrences"} & options.keys()
    logits = [
        x if isinstance(x, torch.Tensor) else logits_of(x, tokens, **(options if _knows(x, ours) else {}))
        for x in (one, other)
    ]
    if logits[0].shape != logits[1].shape:
        raise ConversionError(f"{what}: logits of the shapes {tuple(logits[0].shape)} and {tuple(logits[1].shape)}.")
    if not all(torch.isfinite(x).all() for x in logits):
        raise ConversionError(f"{what}: logits are not finite, as those of damaged weights; nothing was written.")
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean().item()
    dtype = dtype_name(torch.promote_types(logits[0].dtype, logits[1].dtype))
    difference = (logits[0].double() - logits[1].double()).abs().max().item()
    comparison = Comparison(what, tokens.numel(), dtype, difference, same, tolerance)
    if not comparison.is_within:
        raise ConversionError(f"The converted model differs from its source, so nothing was written. {comparison}.")
    return comparison


def _knows(model: nn.Module, options: set[str]) -> bool:
    return not options or hasattr(model.config, "check_recurrences")


# ---- The output ----


def check_output(output: Path, sources: Iterable[Path], overwrite: bool, is_file: bool = False) -> None:
    """
    That `output` may be written. A folder that has something in it needs `overwrite`, and has to be a checkpoint.

    Raises:
        `ValueError`: saying what is in the way.
    """
    if any(source.resolve().is_relative_to(output.resolve()) for source in sources):
        raise ValueError(f"The output {output} is the checkpoint that is read, or holds it: name another one.")
    if not output.exists():
        return
    if is_file:
        if output.is_dir():
            raise ValueError(f"The output {output} is a folder: name a file.")
        if not overwrite:
            raise ValueError(f"The output {output} exists: pass --overwrite (overwrite=True) to replace it.")
        with output.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"The output {output} is something else than a GGUF file: it is not overwritten.")
        return
    if not output.is_dir():
        raise ValueError(f"The output {output} is a file: name a folder.")
    entries = list(output.iterdir())
    if entries and not overwrite:
        raise ValueError(
            f"The output {output} is not empty: pass --overwrite (overwrite=True) to replace what it holds, or name "
            "another folder."
        )
    # No checkpoint of ours has sub-folders, but the results of a whole run have.
    if folders := sorted(entry.name for entry in entries if entry.is_dir()):
        raise ValueError(
            f"The output {output} holds folders ({listed(folders)}), which overwriting would delete: name another "
            "folder, or remove them first."
        )
    if entries and not (output / "config.json").is_file():
        raise ValueError(f"The output {output} holds something else than a checkpoint: it is not overwritten.")


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """
    A path beside `output` to write to, a folder or a file, which is put in its place by renaming when the block ends.
    Where the block or the renaming raises, everything is as it was.
    """
    made = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
            written, replaced = Path(aside, "written"), Path(aside, "replaced")
            yield written
            if output.exists():
                output.rename(replaced)
            try:
                written.rename(output)
            except BaseException:
                if replaced.exists():
                    replaced.rename(output)
                raise
    except BaseException:
        with suppress(OSError):
            for folder in made:  # the innermost first
                folder.rmdir()
        raise


def write_checkpoint(
    model: PreTrainedModel,
    output: Path,
    compare: Callable[[Path], tuple[Comparison, ...]],
    beside: Callable[[Path], None] = lambda folder: None,
) -> tuple[Comparison, ...]:
    """Saves `model`, and what `beside` adds, and puts it at `output` if `compare` of the written folder is content."""
    with written_aside(output) as folder:
        model.save_pretrained(folder)
        beside(folder)
        return compare(folder)


def compare_read_back(model: PreTrainedModel, folder: Path) -> tuple[Comparison]:
    """`model`, which is in memory, against what was written, where the code of the source cannot run here."""
    read = type(model).from_pretrained(folder, dtype=model.dtype)
    tokens = probe_tokens(model.config.vocab_size, model.config.max_position_embeddings)
    what = "the model in memory against the one read back (the code of the source is not here to compare with)"
    return (compare_logits(model, read, what, tokens),)
