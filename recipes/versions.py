"""Of what made a result, for the files that keep it."""

import platform

import torch
import transformers

from modeling_looped import __version__


def versions() -> str:
    return (
        f"modeling-looped {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}"
    )
