"""
The data of a run: sources mixed in fixed proportions, packed into rows, read so that a row is a function of its number.
A run that continues, and another number of ranks, therefore see the same rows in the same order.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .corpus import first_line, open_dataset, read_texts, split_by_name, standard_library
from .packing import PACKERS, StreamPacker
from .recipe import checked
from .synthetic import arithmetic_texts, variable_assignment
from .tokens import text_stream, train_tokenizer


PERIOD = 10_000  # shares are kept exactly in every so many rows, or fewer where they allow it
TOKENIZER_CHARACTERS = 20_000_000  # that a new tokenizer is trained on


@dataclass(frozen=True)
class Source:
    """One source of documents."""

    path: str = field(
        metadata={
            "help": "A .jsonl or text file, a Hub data set, a set that `pack` wrote, or built in: python-library, "
            "arithmetic, variable-assignment."
        }
    )
    share: float = field(default=1.0, metadata={"help": "Of the rows; all shares add up to 1."})
    name: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    split: str = field(default="train", metadata={"help": "Split of a Hub data set, or of a built-in one."})
    column: str = field(default="text", metadata={"help": "Texts, or lists of token ids that are packed rows."})
    streaming: bool = field(default=False, metadata={"help": "Read in order while training; nothing is stored."})
    skip: int = field(default=0, metadata={"help": "Documents left out at the beginning, such as held-out ones."})
    take: int | None = field(default=None, metadata={"help": "Documents at most, after those left out."})

    def __post_init__(self):
        if self.skip < 0 or (self.take is not None and self.take < 1):
            raise ValueError(f"skip={self.skip} must not be negative, and take={self.take} must be at least 1.")


@dataclass(frozen=True)
class DataRecipe:
    """What a run reads."""

    sources: dict = field(metadata={"help": "{name: {path, share, name, split, column, streaming, skip, take}}."})
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "A folder or Hub name; train makes one of the model's vocabulary from the sources. "
                          "A checkpoint's own by default."},
    )  # fmt: skip
    sequence_length: int | None = field(default=None, metadata={"help": "Tokens of a row; the model's by default."})
    packing: str = field(
        default="concatenate",
        metadata={"help": "concatenate, one plain stream; or best_fit, which cuts what does not fit and drops the rest: for "
                          "documents that are mostly shorter than a row."},
    )  # fmt: skip
    mask_documents: bool = field(default=False, metadata={"help": "No attention from a document to those before it."})
    validation: dict | None = field(default=None, metadata={"help": "A source without share, for the held-out loss."})
    validation_tokens: int = field(default=10_000_000, metadata={"help": "Held-out tokens, the first of that source."})
    packed_dir: str | None = field(
        default=None, metadata={"help": "Where packed rows are kept or were put by `pack`; in output_dir by default."}
    )
    data_seed: int = field(default=0, metadata={"help": "Of the order of rows."})

    def __post_init__(self):
        if self.sequence_length is not None and self.sequence_length < 1:
            raise ValueError(f"sequence_length={self.sequence_length} must be at least 1.")
        if not self.sources:
            raise ValueError("sources is empty: name at least one {name: {path: ...}}.")
        made = {name: checked(Source, one, f"sources, {name}") for name, one in self.sources.items()}
        object.__setattr__(self, "sources", made)
        if self.validation is not None:
            object.__setattr__(self, "validation", checked(Source, self.validation, "validation"))
        total = sum(source.share for source in made.values())
        if any(source.share <= 0 for source in made.values()) or abs(total - 1) > 1e-6:
            shares = ", ".join(f"{name} {source.share:g}" for name, source in made.items())
            raise ValueError(f"sources: the shares ({shares}) add up to {total:g}: make them positive and add up to 1.")
        if self.packing not in PACKERS:
            raise ValueError(f"packing={self.packing!r} must be {' or '.join(PACKERS)}.")
        if self.validation_tokens < 2:
            raise ValueError(f"validation_tokens={self.validation_tokens} must be at least 2.")


@dataclass
class RunData:
    """What a training loop reads: training rows, and held-out windows with the bytes of their text (None without)."""

    tokenizer: PreTrainedTokenizerBase
    rows: "MixedRows"
    held_out: "HeldOut | None"


def load_data(recipe: DataRecipe, vocab_size: int, sequence_length: int, folder: Path, tokenizer_from: str | None = None):
    """
    Opens, and where needed packs into `folder` (or the recipe's `packed_dir`), everything that `recipe` names.

    Raises:
        `ValueError`: for sources that are not there or empty, a tokenizer with more tokens than the model has, and
        packed rows of another length or tokenizer.
    """
    length = recipe.sequence_length or sequence_length
    folder = Path(recipe.packed_dir or folder)
    check_texts(recipe)
    tokenizer = open_tokenizer(recipe, vocab_size, folder, tokenizer_from)
    marks = _marks(recipe, tokenizer)
    sources = {name: _open(name, source, recipe, tokenizer, length, folder) for name, source in recipe.sources.items()}
    keep_tokenizer(recipe, tokenizer, vocab_size, folder)  # nothing is written before this line
    for name, source in recipe.sources.items():
        if sources[name] is None:
            packed = folder / packed_name(name, source, recipe.packing, tokenizer, length)
            pack(source, recipe.packing, tokenizer, length, packed)
            sources[name] = PackedSource(packed, length, tokenizer)
    shares = [source.share for source in recipe.sources.values()]
    rows = MixedRows(list(sources.values()), shares, length, recipe.data_seed, vocab_size, marks)
    held_out = None
    if recipe.validation is not None:
        held_out = HeldOut.read(recipe.validation, tokenizer, length, recipe.validation_tokens, folder)
    return RunData(tokenizer, rows, held_out)


def check_texts(recipe: DataRecipe) -> None:
    """Every source and the held-out text begin."""
    for where, source in (*recipe.sources.items(), ("validation", recipe.validation)):
        if source is not None and not (Path(source.path) / "packed.json").is_file():
            try:
                first = next(_documents(source), None)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if first is None:
                raise ValueError(f"{where}: path {source.path!r} holds no text after skip={source.skip}: lower it.")


def open_tokenizer(recipe: DataRecipe, vocab_size: int, folder: Path, tokenizer_from: str | None = None):
    """The recipe's tokenizer, or a new one, which is not in `folder` before `keep_tokenizer` puts it there."""
    name = recipe.tokenizer or tokenizer_from
    if name is None:
        raise ValueError("tokenizer is missing: name a folder or Hub name, or 'train' for a new one.")
    if name == "train":
        kept = _tokenizer_folder(recipe, vocab_size, folder)
        if kept.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(kept)
        else:
            texts = [text for source in recipe.sources.values() for text in _first_texts(source)]
            with TemporaryDirectory() as aside:
                train_tokenizer(texts, vocab_size).save_pretrained(aside)
                tokenizer = AutoTokenizer.from_pretrained(aside)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # a missing file, no network, another kind of folder
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise ValueError(
                f"tokenizer={name!r} cannot be loaded ({reason}): name a folder that save_pretrained wrote, or one of the "
                "Hub."
            ) from None
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"tokenizer={name!r} has {len(tokenizer):,} tokens and the model's vocab_size is {vocab_size:,}: choose the "
            "model's own tokenizer, or set fields: {vocab_size: ...}."
        )
    return tokenizer


def keep_tokenizer(recipe: DataRecipe, tokenizer, vocab_size: int, folder: Path) -> None:
    """Puts a new tokenizer where runs to come find it."""
    kept = _tokenizer_folder(recipe, vocab_size, folder)
    if recipe.tokenizer == "train" and not kept.is_dir():
        aside = kept.with_name(f".writing-{os.getpid()}-{kept.name}")
        tokenizer.save_pretrained(aside)
        _rename(aside, kept)


def _tokenizer_folder(recipe: DataRecipe, vocab_size: int, folder: Path) -> Path:
    return folder / f"tokenizer-{_digest([_identity(source) for source in recipe.sources.values()], vocab_size)}"


def _first_texts(source: Source) -> Iterator[str]:
    """Up to `TOKENIZER_CHARACTERS` times the source's share, as much as tokenizer training needs to see."""
    left = TOKENIZER_CHARACTERS * source.share
    packed = (Path(source.path) / "packed.json").is_file()
    for text in (None,) if packed else _documents(source):
        if not isinstance(text, str):
            raise ValueError(f"{source.path!r} holds token ids: a tokenizer cannot be trained on them, name its own.")
        yield text
        left -= len(text)
        if left <= 0:
            return


def _documents(source: Source) -> Iterator:
    """Texts, or lists of token ids."""
    if source.path in BUILT_IN:
        documents = BUILT_IN[source.path](source.split)
    elif Path(source.path).suffix in (".jsonl", ".json", ".txt") or (
        Path(source.path).is_file() and Path(source.path).suffix != ".parquet"
    ):
        documents = (text for _, text in read_texts(source.path, "path", source.column))
    else:
        documents = (record[source.column] for record in _stream(source))
    for number, document in enumerate(documents):
        if number < source.skip:
            continue
        if source.take is not None and number >= source.skip + source.take:
            return
        yield document


@cache  # as below: a run looks at its sources several times
def _python_library(split: str) -> list[str]:
    train, validation = split_by_name(standard_library())
    return _split(split, train, _apart(train, validation))


@cache
def _arithmetic(split: str) -> list[str]:
    train = arithmetic_texts(20_000, 0)
    return _split(split, train, _apart(train, arithmetic_texts(500, 1)))


def _apart(train: list[str], validation: list[str]) -> list[str]:
    """The held-out documents that are not among the training documents too."""
    known = set(train)
    return [text for text in validation if text not in known]


def _split(split: str, train, validation):
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r} of a built-in source must be 'train' or 'validation'.")
    return train if split == "train" else validation


# Endless ones would never be packed: so many documents, of seeds that no other split has.
BUILT_IN = {
    "python-library": _python_library,
    "arithmetic": _arithmetic,
    "variable-assignment": lambda split: (
        f"{item.prompt} {item.answer}"
        for item in variable_assignment("basic", 0, _split(split, 10_000, 500), _split(split, 0, 1))
    ),
}


def _stream(source: Source):
    path = Path(source.path)
    files = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
    if path.suffix in files:
        what, options = (files[path.suffix],), {"data_files": str(path), "split": "train"}
    else:
        what, options = (source.path, source.name), {"split": source.split}
    rows = open_dataset(repr(source.path), *what, **options, streaming=True)
    columns = rows.column_names
    if columns is not None and source.column not in columns:
        raise ValueError(f"{source.path!r} has no column {source.column!r} (it has {', '.join(columns)}).")
    return rows


def _tokens(tokenizer, documents: Sequence[str], packing: str) -> list[list[int]]:
    """Token ids: after a beginning mark for best fit (section 5.4), before an end mark in a stream."""
    encoded = tokenizer(list(documents), add_special_tokens=False)["input_ids"]
    mark = _mark(tokenizer, packing)
    marks = [] if mark is None else [mark]
    return [marks + ids if packing == "best_fit" else ids + marks for ids in encoded]


def _mark(tokenizer, packing: str) -> int | None:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    first, second = (begin, end) if packing == "best_fit" else (end, begin)
    return second if first is None else first


def _marks(recipe: DataRecipe, tokenizer) -> tuple[int, int] | None:
    """The token that parts documents and how far after it the next one begins, where documents are masked."""
    if not recipe.mask_documents:
        return None
    mark = _mark(tokenizer, recipe.packing)
    if mark is None:
        raise ValueError("mask_documents=True needs a tokenizer with a token for the beginning or end of a text.")
    return mark, 0 if recipe.packing == "best_fit" else 1


def _open(name: str, source: Source, recipe: DataRecipe, tokenizer, length: int, folder: Path):
    """None where `source` has yet to be packed."""
    if (Path(source.path) / "packed.json").is_file():
        return PackedSource(Path(source.path), length, tokenizer)
    packed = folder / packed_name(name, source, recipe.packing, tokenizer, length)
    if packed.is_dir():
        return PackedSource(packed, length, tokenizer)
    if source.streaming:
        return StreamedSource(source, recipe.packing, tokenizer, length)
    check_fills_a_row(source, recipe.packing, tokenizer, length)
    return None


def packed_name(name: str, source: Source, packing: str, tokenizer, length: int) -> str:
    """Of a folder of packed rows, which says everything that they depend on."""
    return f"{name}-{_digest(_identity(source), packing, tokenizer_digest(tokenizer), length)}"


def _identity(source: Source) -> dict:
    """What the documents depend on; of a file, its size, beginning and end stand for its content."""
    values = asdict(source)
    del values["share"], values["streaming"]
    if Path(source.path).is_file():
        values["file"] = content_digest(Path(values.pop("path")))
    return values


def content_digest(path: Path) -> list:
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(2**20)
        file.seek(max(0, size - 2**20))
        ends += file.read()
    return [size, hashlib.sha256(ends).hexdigest()]


def tokenizer_digest(tokenizer) -> str:
    """The same for tokenizers that encode alike, wherever they were loaded from."""
    return _digest(tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items()))


def _digest(*values) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def pack(source: Source, packing: str, tokenizer, length: int, output: Path) -> None:
    """
    Writes the rows of `source`, `length` + 1 tokens each (every one but the first is predicted), as a data set of
    `datasets` in `output`. Written aside and renamed: a folder under its own name is whole. Whether the documents fill
    a row is for `check_fills_a_row` to say, before.
    """
    import datasets

    aside = output.with_name(f".writing-{os.getpid()}-{output.name}")
    shutil.rmtree(aside, ignore_errors=True)
    new = [folder for folder in aside.parents if not folder.exists()]
    kind = "uint16" if len(tokenizer) <= 2**16 else "int32"
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(kind), length=length + 1)})

    read = 0

    def documents():
        nonlocal read
        read = 0
        for tokens in _tokenized(_documents(source), tokenizer, packing, source.path):
            read += len(tokens)
            yield tokens

    def rows():
        for row in PACKERS[packing](length + 1).rows(documents()):
            yield {"input_ids": np.asarray(row, dtype=kind)}

    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        packed = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(aside / "cache"))
        packed.save_to_disk(aside / "rows")
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        for folder in new:
            with suppress(OSError):  # another process may have put something there
                folder.rmdir()
        if isinstance(error.__cause__, ValueError):  # of a document; datasets wraps it
            raise error.__cause__ from None
        raise
    finally:
        if bars:
            datasets.enable_progress_bars()
    shutil.rmtree(aside / "cache")
    facts = {
        "source": asdict(source),
        "packing": packing,
        "sequence_length": length,
        "rows": len(packed),
        "tokens_read": read,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    (aside / "packed.json").write_text(json.dumps(facts, indent=2) + "\n")
    _rename(aside, output)
    kept = len(packed) * (length + 1) / read
    if kept < 0.5:
        print(
            f"{source.path}: packing={packing!r} keeps {kept:.0%} of its {read:,} tokens, since its documents are longer than "
            f"a row of {length:,}: concatenate keeps all.",
            file=sys.stderr,
        )


def check_fills_a_row(source: Source, packing: str, tokenizer, length: int) -> None:
    documents = _tokenized(_documents(source), tokenizer, packing, source.path)
    if next(PACKERS[packing](length + 1).rows(documents), None) is None:
        raise ValueError(f"{source.path!r} does not fill one row of {length + 1:,} tokens: use more text.")


def _rename(aside: Path, final: Path) -> None:
    """Another process may have been first, with the same content."""
    try:
        os.rename(aside, final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(aside)


def _tokenized(documents: Iterator, tokenizer, packing: str, where: str, batch: int = 64) -> Iterator[list[int]]:
    held: list[str] = []
    for document in documents:
        if not isinstance(document, str):
            raise ValueError(f"{where!r} holds token ids, which are packed already: read it with streaming: true.")
        held.append(document)
        if len(held) == batch:
            yield from _tokens(tokenizer, held, packing)
            held = []
    if held:
        yield from _tokens(tokenizer, held, packing)


class PackedSource:
    """Rows on disk, in an order that is a function of seed and epoch."""

    def __init__(self, folder: Path, length: int, tokenizer=None):
        import datasets

        facts = json.loads((folder / "packed.json").read_text())
        if facts["sequence_length"] != length:
            raise ValueError(
                f"{folder} holds rows for sequence_length={facts['sequence_length']}, and the run has {length}: pack it anew."
            )
        if tokenizer is not None and facts["tokenizer"] != tokenizer_digest(tokenizer):
            raise ValueError(f"{folder} was packed with another tokenizer than the run's: pack it anew.")
        self.folder, self.facts = folder, facts
        self._rows = datasets.load_from_disk(folder / "rows").with_format("numpy", columns=["input_ids"])
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, seed: int) -> np.ndarray:
        epoch, position = divmod(number, len(self))
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), np.random.default_rng([seed, epoch]).permutation(len(self))
        return self._rows[int(self._order[1][position])]["input_ids"]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class StreamedSource:
    """Rows that are made while training, in the order of the source, from its start again at its end."""

    def __init__(self, source: Source, packing: str, tokenizer, length: int):
        self.source, self.packing, self.tokenizer, self.width = source, packing, tokenizer, length + 1
        self.next_row = 0
        self._pending: list = []  # tokenised, and not yet taken by the packer
        self._dataset = self._opened()
        first = next(self._records(), None)
        if first is None:
            raise ValueError(f"{source.path!r} holds no text after skip={source.skip}: lower it.")
        self._dataset = self._opened()
        self._holds_rows = isinstance(first[source.column], list)
        self._packer = self._make_packer()
        self._rows = self._packer.rows(self._read())

    def _make_packer(self, held=()):
        return (StreamPacker if self._holds_rows else PACKERS[self.packing])(self.width, held=held)

    def _encoded(self, documents: list) -> list[list[int]]:
        if not self._holds_rows:
            for document in documents:
                if not isinstance(document, str):
                    raise ValueError(
                        f"{self.source.path!r}, column {self.source.column!r}: {document!r} is no text: leave such "
                        "documents out of the data."
                    )
            return _tokens(self.tokenizer, documents, self.packing)
        for row in documents:
            if len(row) != self.width:
                raise ValueError(
                    f"{self.source.path!r}, column {self.source.column!r}: a packed row has {len(row)} tokens, and "
                    f"sequence_length + 1 = {self.width} are needed."
                )
        return documents

    def _opened(self):
        dataset = _stream(self.source)
        dataset = dataset.skip(self.source.skip) if self.source.skip else dataset
        return dataset if self.source.take is None else dataset.take(self.source.take)

    def _read(self) -> Iterator[list[int]]:
        """Documents without end, once through the pending ones."""
        while True:
            while self._pending:
                yield self._pending.pop(0)
            texts = []
            for record in self._records():
                texts.append(record[self.source.column])
                if len(texts) == 64:
                    # All of them leave with `_pending` before the data set moves on: its state is that of its last one.
                    self._pending, texts = self._encoded(texts), []
                    while self._pending:
                        yield self._pending.pop(0)
            self._pending = self._encoded(texts)
            self._dataset = self._opened()

    def _records(self) -> Iterator[dict]:
        """Of the data set, whose readers fail in their own ways, and late."""
        records = iter(self._dataset)
        while True:
            try:
                record = next(records, None)
            except Exception as error:
                reason = first_line(error)
                raise ValueError(f"{self.source.path!r} cannot be read on while it is streamed: {reason}") from None
            if record is None:
                return
            yield record

    def row(self, number: int, seed: int) -> np.ndarray:
        if number < self.next_row:
            raise ValueError(f"Row {number} of a stream that has gone on to {self.next_row}: streams are read in order.")
        while True:
            row = next(self._rows)
            self.next_row += 1
            if self.next_row > number:
                return np.asarray(row)

    def state_dict(self) -> dict:
        return {
            "next_row": self.next_row,
            "pending": [list(document) for document in self._pending],
            "held": self._packer.held,
            "dataset": self._dataset.state_dict() if self._dataset._state_dict is not None else None,
        }

    def load_state_dict(self, state: dict) -> None:
        self.next_row, self._pending = state["next_row"], list(state["pending"])
        self._packer = self._make_packer(state["held"])
        self._dataset = self._opened()
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
        self._rows = self._packer.rows(self._read())


class MixedRows:
    """
    An endless sequence of rows from several sources. Of every `period` rows each source has its share exactly, in an
    order drawn by (seed, period); which row of a source comes next is counted, so that any row can be named by number.
    """

    def __init__(
        self,
        sources: Sequence,
        shares: Sequence[float],
        length: int,
        seed: int = 0,
        vocab_size: int | None = None,
        marks: tuple[int, int] | None = None,
    ):
        self.sources, self.length, self.seed, self.vocab_size, self.marks = sources, length, seed, vocab_size, marks
        self.counts = shares_as_counts(shares)
        self.period = sum(self.counts)
        self._plan: tuple[int, np.ndarray, np.ndarray] | None = None

    def place(self, number: int) -> tuple[int, int]:
        """The source of row `number`, and the row's number among those of its source."""
        period, position = divmod(number, self.period)
        if self._plan is None or self._plan[0] != period:
            owners = np.repeat(np.arange(len(self.counts)), self.counts)
            owners = np.random.default_rng([self.seed, period]).permutation(owners)
            before = np.empty_like(owners)
            for source in range(len(self.counts)):
                before[owners == source] = np.arange(self.counts[source])
            self._plan = period, owners, before
        source = int(self._plan[1][position])
        return source, period * self.counts[source] + int(self._plan[2][position])

    def inputs(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """
        The arguments of a model's forward for the rows `first` to `first + count - 1`: (count, length) `input_ids`,
        `labels` and `shift_labels` (every token of a row but its first is predicted), and `position_ids` that start
        anew with each document where documents are masked.
        """
        rows = []
        for number in range(first, first + count):
            source, index = self.place(number)
            row = self.sources[source].row(index, self.seed)
            if len(row) != self.length + 1:
                raise ValueError(
                    f"Row {index} of source {source + 1} has {len(row)} tokens instead of sequence_length + 1 = "
                    f"{self.length + 1}."
                )
            if self.vocab_size is not None and row.max() >= self.vocab_size:
                raise ValueError(
                    f"Row {index} of source {source + 1} holds token {row.max()}, and the model's vocab_size is "
                    f"{self.vocab_size}: it was packed with another tokenizer."
                )
            rows.append(row)
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))
        inputs = {"input_ids": rows[:, :-1], "labels": rows[:, :-1], "shift_labels": rows[:, 1:].contiguous()}
        if self.marks is not None:
            inputs["position_ids"] = document_positions(rows[:, :-1], *self.marks)
        return inputs

    def state_dict(self) -> list[dict]:
        return [source.state_dict() for source in self.sources]

    def load_state_dict(self, states: list[dict]) -> None:
        for source, state in zip(self.sources, states, strict=True):
            source.load_state_dict(state)


def shares_as_counts(shares: Sequence[float]) -> list[int]:
    """Rows of each source in the shortest period, at most `PERIOD`, that has the shares to four digits."""
    exact = [Fraction(share).limit_denominator(PERIOD) for share in shares]
    period = math.lcm(*(share.denominator for share in exact))
    if period > PERIOD or sum(exact) != 1:
        period = PERIOD
        exact = [Fraction(share) for share in shares]
    counts = [math.floor(share * period) for share in exact]
    rest = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i] * period)
    for i in rest[: period - sum(counts)]:
        counts[i] += 1
    return counts


def document_positions(rows: torch.Tensor, mark: int, offset: int) -> torch.Tensor:
    """(rows, length): each token's place in its document, which begins `offset` tokens after a `mark`."""
    places = torch.arange(rows.shape[1]).expand_as(rows)
    begins = torch.zeros_like(rows, dtype=torch.bool)
    begins[:, offset:] = rows[:, : rows.shape[1] - offset] == mark
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def summed_nats(model, windows: torch.Tensor) -> torch.Tensor:
    """Of all tokens but the first of each window; (windows, length + 1), filled up with -100."""
    logits = model(windows[:, :-1].clamp(min=0), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), windows[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


@dataclass(frozen=True)
class HeldOut:
    """
    Windows of `length` + 1 tokens over a held-out text that overlap by one, so that every token but the first is
    predicted once. (windows, length + 1), the last one filled up with -100. `bytes` of UTF-8 text are covered.
    """

    windows: torch.Tensor
    tokens: int
    bytes: int

    @classmethod
    def read(cls, source: Source, tokenizer, length: int, tokens: int, folder: Path) -> "HeldOut":
        """The first `tokens` tokens of `source`, kept in `folder` for runs to come."""
        name = f"validation-{_digest(_identity(source), tokenizer_digest(tokenizer), tokens)}.npz"
        kept = folder / name
        if not kept.is_file():
            stream, size = text_stream(tokenizer, _documents(source), tokens)
            if len(stream) < 2:
                raise ValueError(f"validation: {source.path!r} holds fewer than two tokens.")
            kept.parent.mkdir(parents=True, exist_ok=True)
            aside = kept.with_name(f".writing-{os.getpid()}-{kept.name}")
            np.savez(aside, stream=np.asarray(stream, dtype=np.int32), size=size)
            os.replace(aside, kept)
        with np.load(kept) as held:
            stream, size = torch.from_numpy(held["stream"].astype(np.int64)), int(held["size"])
        starts = range(0, len(stream) - 1, length)
        windows = [stream[start : start + length + 1] for start in starts]
        padded = torch.nn.utils.rnn.pad_sequence(windows, batch_first=True, padding_value=-100)
        if padded.shape[1] < length + 1:
            padded = torch.nn.functional.pad(padded, (0, length + 1 - padded.shape[1]), value=-100)
        return cls(padded, len(stream) - 1, size)
