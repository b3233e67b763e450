"""Reading the tensors of a checkpoint: safetensors or pickles of plain tensors, in one file or in shards."""

import json
import zipfile
from pathlib import Path

import torch

from .ledger import dtype_name, listed


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FILES = ("model.safetensors", "pytorch_model.bin")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """
    The tensors of a folder of `save_pretrained`, by name.

    Raises:
        `FileNotFoundError`: where it holds no weights, or lacks a shard that its index names.
        `ValueError`: where a file is damaged, or is not what the index says.
    """
    for name in FILES:
        if (folder / name).is_file():
            return read_file(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _read_shards(folder, folder / f"{name}.index.json")
    raise FileNotFoundError(
        f"{folder} holds no weights: {' or '.join(FILES)} (or an index of shards) is expected in it."
    )


def _read_shards(folder: Path, index: Path) -> dict[str, torch.Tensor]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is damaged: a weight_map of tensors and files is expected in it.") from None
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise FileNotFoundError(f"{folder} lacks {listed(missing)}, which {index.name} names: copy it there too.")
    tensors, found = {}, {}
    for shard in shards:
        read = read_file(folder / shard)
        tensors |= read
        found |= dict.fromkeys(read, shard)
    if wrong := sorted(name for name in found.keys() | places.keys() if found.get(name) != places.get(name)):
        raise ValueError(f"The shards in {folder} do not hold what {index.name} says of {listed(wrong)}.")
    return tensors


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """
    The tensors of one `.safetensors` file or one pickle, which may hold nothing that is more than plain values.

    Raises:
        `ValueError`: where it is damaged or truncated, or holds something else.
    """
    state = _read_safetensors(file) if file.suffix == ".safetensors" else read_pickle(file)
    if not isinstance(state, dict) or not state:
        kind = "an empty one" if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"{file} should hold a state dict of named tensors, and holds {kind}.")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file} holds {name!r}, of type {type(tensor).__name__}: only named tensors fit.")
        if tensor.dtype not in FLOATS:
            raise ValueError(
                f"{name} in {file} is stored as {dtype_name(tensor.dtype)}: weights in float32, bfloat16 or float16 are "
                "expected."
            )
    return state


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or truncated: it is no whole safetensors file ({error}).") from None


def read_pickle(file: Path):
    """What is in a pickle of plain values."""
    try:
        # Mapped where the format allows it, so that a large checkpoint is not held in memory twice.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # whatever a damaged or hostile pickle runs into
        raise ValueError(
            f"{file} cannot be read as plain tensors (torch.load with weights_only=True): it is damaged, or "
            "holds more than a state dict."
        ) from error
