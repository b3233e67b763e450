"""What studies share: checked recipes in YAML, texts, and a CSV with one row for each finished run."""

import csv
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import get_type_hints

import numpy as np
import torch
import transformers

from modeling_looped import __version__

from .corpus import read_texts, split_by_name, standard_library
from .pretrain import PretrainRecipe


def read_yaml(name: str):
    """The values of a recipe file, or of a bundled one by its name."""
    import yaml

    path = Path(name)
    if not path.is_file():
        path = Path(__file__).parent / f"{name.removesuffix('.yaml')}.yaml"
        if not path.is_file():
            bundled = ", ".join(sorted(p.stem for p in Path(__file__).parent.glob("*.yaml")))
            raise ValueError(f"{name!r} is neither a file nor a bundled recipe ({bundled}).")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


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


def versions() -> str:
    return (
        f"modeling-looped {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}"
    )


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


def checked(kind: type, values, where: str):
    """The dataclass `kind` from a mapping whose keys and types fit."""
    types = get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values!r} must be a mapping with {', '.join(types)}.")
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"{where}: there is no key {name!r}{hint(name, types)}")
        expected = types[name] | int if isinstance(0.5, types[name]) else types[name]
        if not isinstance(value, expected):
            remedy = ": YAML reads 1e-3 as text, write 1.0e-3" if isinstance(0.5, types[name]) else ""
            kind_name = getattr(types[name], "__name__", types[name])
            raise ValueError(f"{where}: {name}={value!r} must be of type {kind_name}{remedy}.")
    missing = [f.name for f in fields(kind) if f.name not in values and f.default is f.default_factory is MISSING]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing.")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def hint(name, choices: Iterable[str]) -> str:
    near = get_close_matches(str(name), choices, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(choices)}."
