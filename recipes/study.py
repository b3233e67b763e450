"""What studies share: their recipes, texts, and a CSV with one row for each finished run."""

import csv
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np


from .corpus import read_texts, split_by_name, standard_library
from .pretrain import PretrainRecipe
from .recipe import checked, read_yaml


def read_study(name: str, kind: type, model: type, table: tuple[str, type], set_by_the_study: set[str]):
    """
    The checked recipe of a file or bundled name: a `kind` with a `model`, a `training`, and a table of rows by name.
    The training may not say what the study sets for each run.
    """
    values = read_yaml(name)
    if isinstance(values, dict):
        values, (rows, row) = dict(values), table
        if "model" in values:
            values["model"] = checked(model, values["model"], f"{name}, model")
        if "training" in values:
            for key in set_by_the_study.intersection(values["training"] or ()):
                raise ValueError(f"{name}, training: leave {key} out, the seeds and systems set it.")
            values["training"] = checked(PretrainRecipe, values["training"], f"{name}, training")
        if isinstance(values.get(rows), dict):
            values[rows] = {key: checked(row, one, f"{name}, {rows}, {key}") for key, one in values[rows].items()}
    return checked(kind, values, name)


def study_texts(recipe, train_data: str | None, validation_data: str | None) -> tuple[list[str], list[str]]:
    """`(train, validation)`: what the caller names, else what the recipe names, else Python's library."""
    named = train_data or recipe.train_data, validation_data or recipe.validation_data
    if train_data is None and validation_data is None and not all(Path(path).is_file() for path in named):
        print(f"{' and '.join(named)} are not both here: training on the Python standard library instead.")
        return split_by_name(standard_library())
    return tuple([text for _, text in read_texts(path)] for path in named)


def changed_fields(recipe) -> dict:
    """The fields of a dataclass that are not at their defaults, so that fields yet to come change nothing."""
    defaults = asdict(type(recipe)())
    return {name: value for name, value in asdict(recipe).items() if value != defaults[name]}


def fingerprint(settings: dict, *streams: np.ndarray) -> str:
    """Of everything that a row depends on and that its own columns do not say."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for stream in streams:
        digest.update(stream.tobytes())
    return digest.hexdigest()[:12]


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, columns: Iterable[str], row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow({**row, "nats_per_token": f"{row['nats_per_token']:.4f}"})
        file.flush()
        os.fsync(file.fileno())
