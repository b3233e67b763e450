"""Texts: the Python standard library for the demo, and a user's own files or data sets."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path


# Tables, tests and generated files: long, repetitive, and nothing that a reader would call code.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}


def standard_library() -> Iterator[tuple[str, str]]:
    """`(name, text)` of the sources of the running Python's standard library, then of its language help topics."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            yield str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]


def read_texts(source: str, named: str = "--data", column: str = "text") -> Iterator[tuple[str, str]]:
    """
    `(name, text)` of each document of `source`: a `.jsonl` file with a field `text` (or `column`), any other file as
    one plain text (documents are its parts between blank-line pairs), or the name of a data set for
    `datasets.load_dataset`, with `name:config` and a column `text`. Errors call `source` what the user does, `named`.

    Raises:
        `ValueError`: where the source does not exist, has no text, or a line does not fit.
    """
    path = Path(source)
    count = 0
    if path.is_file():
        for name, text in _read_jsonl(path, column) if path.suffix in (".jsonl", ".json") else _read_plain(path):
            count += 1
            yield name, text
    elif path.exists() or path.suffix in (".jsonl", ".json", ".txt") or source.startswith((".", os.sep)):
        raise ValueError(f"{named} {source!r} is not a file: name a .jsonl or text file, or a data set of the Hub.")
    else:
        for name, text in _read_dataset(source):
            count += 1
            yield name, text
    if count == 0:
        raise ValueError(f"{named} {source!r} holds no text: use another one, or more of it.")


def read_json_lines(path: Path) -> Iterator[tuple[int, object]]:
    """`(line number, record)` of each line that is not blank."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg}).") from None


def open_dataset(named: str, *arguments, **options):
    """`datasets.load_dataset(*arguments, **options)`; what fails is said in a sentence that calls the data `named`."""
    from datasets import load_dataset

    try:
        return load_dataset(*arguments, **options)
    except Exception as error:  # every loader fails in its own way
        raise ValueError(
            f"{named} is neither a file nor a data set that can be loaded: {first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    """What it was, of errors that go on for pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _read_jsonl(path: Path, column: str) -> Iterator[tuple[str, str]]:
    for number, record in read_json_lines(path):
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            raise ValueError(f"{path}, line {number}: no field {column!r} with a string.")
        yield str(record.get("id", number)), record[column]


def _read_plain(path: Path) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None
    for number, part in enumerate(text.replace("\r\n", "\n").split("\n\n\n"), 1):
        if part.strip():
            yield str(number), part.strip("\n") + "\n"


def _read_dataset(source: str) -> Iterator[tuple[str, str]]:
    name, _, config = source.partition(":")
    rows = open_dataset(f"--data {source!r}", name, config or None, split="train")
    if "text" not in rows.column_names:
        raise ValueError(f"--data {source!r} has no column 'text' (it has {', '.join(rows.column_names)}).")
    for number, text in enumerate(rows["text"]):
        yield str(number), text


def split_by_name(documents: Iterator[tuple[str, str]], share: int = 20) -> tuple[list[str], list[str]]:
    """
    `(train, validation)` texts of `documents`, `(name, text)` each: one in `share` is held out, chosen by a hash of its
    name and content.
    """
    train, validation = [], []
    for name, text in documents:
        digest = hashlib.sha256(f"{name}\0{text}".encode("utf-8", "replace")).digest()
        (validation if int.from_bytes(digest[:4], "big") % share == 0 else train).append(text)
    if train and not validation:
        validation.append(train.pop()) if len(train) > 1 else None
    if not train or not validation:
        raise ValueError("The data needs at least two documents, one to train on and one to hold out.")
    return train, validation
