"""
The command `looped`. A module of its own beside the package: importing anything under `modeling_looped` registers
the models and thereby imports torch, and `looped --help` should not wait for that. Commands import what they need.
"""

import functools
import json
import sys
from importlib.metadata import version
from typing import Annotated

import typer


app = typer.Typer(
    help="Looped, recurrent-depth and depth-grown language models.", no_args_is_help=True, add_completion=False
)
convert_app = typer.Typer(help="Bring checkpoints of other code into this package.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint directory or a Hub name.")]


def sentence_errors(command):
    """What a user can correct ends in its sentence and exit status 2, without a stack trace."""

    @functools.wraps(command)
    def wrapper(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, FloatingPointError) as error:
            typer.secho(f"looped: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            typer.secho(f"looped: {error.name} is missing: pip install 'modeling-looped[train]'", fg="red", err=True)
            raise typer.Exit(2) from None

    return wrapper


def _print_version(wanted: bool):
    if wanted:
        print(version("modeling-looped"))
        raise typer.Exit()


@app.callback()
def _main(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
):
    pass


@app.command()
@sentence_errors
def demo(
    output_dir: Annotated[str, typer.Argument(help="Where the checkpoint, its card and its figure go.")],
    data: Annotated[
        str | None, typer.Option(help="A .jsonl (field text) or text file, or a data set name. Default: Python's library.")
    ] = None,
    size: Annotated[str, typer.Option(help="tiny, small, medium or large.")] = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of the size's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the data and the depths.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A short run that only shows that everything works.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in OUTPUT_DIR.")] = False,
):
    """Train a looped model on text, load it back, let it write, and plot its loss against recurrences."""
    from modeling_looped.recipes.demo import demo as run_demo

    run_demo(output_dir, data, size, steps, quick, overwrite, seed)


def _load(checkpoint: str, **overrides):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    import modeling_looped  # noqa: F401  registers the models

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AutoModelForCausalLM.from_pretrained(checkpoint, **overrides).eval(), tokenizer


@app.command()
@sentence_errors
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    recurrences: Annotated[int | None, typer.Option(help="Passes over the core; the checkpoint's own by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 writes the most likely text.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
):
    """Continue PROMPT."""
    import torch

    model, tokenizer = _load(checkpoint)
    torch.manual_seed(seed)
    depth = {} if recurrences is None else {"num_recurrences": recurrences}
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling, **depth)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


@app.command(name="eval")
@sentence_errors
def evaluate(
    checkpoint: Checkpoint,
    file: Annotated[str, typer.Argument(help="A .jsonl (field text) or text file, or a data set name.")],
    recurrences: Annotated[str | None, typer.Option(help="4, or 1,2,4, or 1..8; the checkpoint's own by default.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Window in tokens; the training length by default.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Stop after so many tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
):
    """Held-out loss of CHECKPOINT on FILE: nats per token and bits per byte at each number of recurrences."""
    from dataclasses import asdict

    from modeling_looped.eval.held_out import held_out_loss, parse_recurrences
    from modeling_looped.recipes.corpus import read_texts

    counts = None if recurrences is None else parse_recurrences(recurrences)
    texts = [text for _, text in read_texts(file)]
    model, tokenizer = _load(checkpoint)
    losses = held_out_loss(
        model, tokenizer, texts, counts, sequence_length, batch_size, max_tokens, progress=sys.stderr.isatty()
    )
    if as_json:
        print(json.dumps([asdict(row) for row in losses]))
        return
    print(f"{losses[0].tokens:,} tokens, {losses[0].bytes:,} bytes")
    print("recurrences  nats/token  bits/byte")
    for row in losses:
        print(f"{row.num_recurrences:11d}  {row.nats_per_token:10.4f}  {row.bits_per_byte:9.4f}")


@app.command()
@sentence_errors
def flops(
    config_or_checkpoint: Annotated[str, typer.Argument(help="A checkpoint, a folder with a config.json, or a Hub name.")],
    recurrences: Annotated[str | None, typer.Option(help="4, or 1,2,4, or 1..8; the configured one by default.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="In tokens; the training length by default.")] = None,
):
    """Parameters by part, FLOPs per token and key-value cache bytes."""
    from transformers import AutoConfig

    import modeling_looped  # noqa: F401  registers the models
    from modeling_looped.accounting import accounting_table
    from modeling_looped.eval.held_out import parse_recurrences

    config = AutoConfig.from_pretrained(config_or_checkpoint)
    print(accounting_table(config, None if recurrences is None else parse_recurrences(recurrences), sequence_length))


@convert_app.command(name="iso-depth")
@sentence_errors
def convert_iso_depth(
    source: Annotated[str, typer.Argument(help="A folder with model_*.pt and meta_*.json of the paper's code.")],
    output: Annotated[str, typer.Argument(help="Where the converted checkpoint goes.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what OUTPUT holds.")] = False,
):
    """Turn a checkpoint of the official iso-depth code into one of LoopedGPT."""
    from modeling_looped.conversion.iso_depth import convert_iso_depth as convert

    print(convert(source, output, overwrite=overwrite))


def main():
    app()


if __name__ == "__main__":
    main()
