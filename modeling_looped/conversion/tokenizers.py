"""A tokenizer travels with its model, and gives the same tokens where it arrives."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .ledger import ConversionError


FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Words, numbers, code, white space, accents, other scripts and bytes that are no whole letter.
TEXTS = (
    "The capital of France is Paris, a city of 2,102,650 people; isn't it?",
    "def add(a, b):\n\treturn a + b  # 3.14\n\n\n    x = [1, 22, 333, 4444]\n",
    "  two  spaces, naïve café, Ελληνικά, русский, 日本語, العربية 🙂👩‍🚀 \u200b end ",
)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """
    The tokenizer in `folder`, `None` where it holds none.

    Raises:
        `ValueError`: where it holds one that cannot be read.
    """
    if not any((folder / name).is_file() for name in FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of several libraries
        raise ValueError(f"The tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}") from error


def check_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, what: str) -> None:
    """
    That `other` reads as `one` does: texts with and without special tokens, their decoding, special tokens, template.

    Raises:
        `ConversionError`: naming the first difference.
    """
    special = " ".join(sorted(one.get_added_vocab(), key=one.get_added_vocab().get)[:20])
    for text in (*TEXTS, f"before {special} after"):
        for add in (True, False):
            ids = [list(t(text, add_special_tokens=add)["input_ids"]) for t in (one, other)]
            if ids[0] != ids[1]:
                raise ConversionError(f"{what}: {text[:40]!r} gives the tokens {ids[0][:12]} and {ids[1][:12]}.")
            if one.decode(ids[0]) != other.decode(ids[1]):
                raise ConversionError(f"{what}: the tokens of {text[:40]!r} decode differently.")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"):
        said = [getattr(t, name) for t in (one, other)]
        if said[0] != said[1]:
            raise ConversionError(f"{what}: {name} is {said[0]!r} and {said[1]!r}.")


def copy_tokenizer(tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Into a checkpoint that is being written, and back out of it for `check_tokenizer`."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        check_tokenizer(tokenizer, AutoTokenizer.from_pretrained(folder), "The tokenizer changed on its way")
