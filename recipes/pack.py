"""
Packs every source of a recipe once, for runs to read: `looped pack --config RECIPE --output_dir PACKED`, then
`looped pretrain --config RECIPE --packed_dir PACKED ...`. What is streamed otherwise is read to its end and stored.
"""

import shutil
from pathlib import Path

from looped_cli import ends_in_a_sentence, to_json

from .data import DataRecipe, HeldOut, check_fills_a_row, keep_tokenizer, open_tokenizer, pack, packed_name
from .launch import STAGES, model_config
from .pretrain import RunOptions
from .recipe import ModelSource, parse_recipe


EXAMPLES = (
    "looped pack --config iso_depth --toy --dry-run",
    "looped pack --config iso_depth --toy --output_dir packed",
    "looped pretrain --config iso_depth --toy --packed_dir packed --output_dir runs/packed",
)


def main(arguments: list[str] | None = None) -> None:
    sections = {"model": ModelSource, "data": DataRecipe, "training": STAGES["cooldown"][0], "run": RunOptions}
    description = "Pack the data of a recipe once, for runs that get --packed_dir."
    parsed = parse_recipe(sections, description, arguments, "pack", EXAMPLES)
    with ends_in_a_sentence("pack"):
        _pack(parsed)


def _pack(parsed) -> None:
    source, data = parsed.sections["model"], parsed.sections["data"]
    config = model_config(source)
    length = data.sequence_length or config.max_position_embeddings
    if parsed.dry_run and parsed.as_json:
        print(to_json({"sources": list(data.sources), "tokens_per_row": length + 1, "packing": data.packing}))
        return
    if parsed.dry_run:
        print(f"{', '.join(data.sources)}: rows of {length + 1:,} tokens, {data.packing}")
        return
    folder = Path(parsed.output_dir)
    tokenizer = open_tokenizer(data, config.vocab_size, folder, source.checkpoint)
    keep_tokenizer(data, tokenizer, config.vocab_size, folder)
    for name, one in data.sources.items():
        output = folder / packed_name(name, one, data.packing, tokenizer, length)
        if output.is_dir() and parsed.overwrite:
            shutil.rmtree(output)
        if not output.is_dir():
            check_fills_a_row(one, data.packing, tokenizer, length)
            pack(one, data.packing, tokenizer, length, output)
        print(f"{name}: {output}", flush=True)
    if data.validation is not None:
        held_out = HeldOut.read(data.validation, tokenizer, length, data.validation_tokens, folder)
        print(f"validation: {held_out.tokens:,} tokens")


if __name__ == "__main__":
    main()
