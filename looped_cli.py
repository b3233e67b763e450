"""
The command `looped`. A module of its own beside the package: importing anything under `modeling_looped` registers
the models and thereby imports torch, and `looped --help` should not wait for that. Commands import what they need.
"""

import functools
import json
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer
import typer.core


app = typer.Typer(
    help="Looped, recurrent-depth and depth-grown language models.", no_args_is_help=True, add_completion=False
)
convert_app = typer.Typer(help="Bring checkpoints of other code into this package.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")


class _FitByDefault(typer.core.TyperGroup):
    """`looped phi RUNS.csv` is `looped phi fit RUNS.csv`. A file called as a command is to be named ./compare."""

    def parse_args(self, context, args):
        named = not args or args[0] in self.commands or args[0] in context.help_option_names
        return super().parse_args(context, args if named else ["fit", *args])


phi_app = typer.Typer(
    cls=_FitByDefault,
    help="What a recurrence is worth: phi, fitted from runs. Needs the extra scaling.",
    no_args_is_help=True,
)
app.add_typer(phi_app, name="phi")
sweep_app = typer.Typer(
    help="The runs behind a measured phi: a queue that continues where it stopped.", no_args_is_help=True
)
app.add_typer(sweep_app, name="sweep")

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint directory or a Hub name.")]


def sentence_errors(command):
    """What a user can correct ends in its sentence and exit status 2, without a stack trace."""

    @functools.wraps(command)
    def wrapper(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # whoever read has had enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except (ValueError, OSError, FloatingPointError) as error:
            typer.secho(f"looped: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            extras = {"scipy": "scaling", "threadpoolctl": "scaling", "pandas": "scaling,diagnostics"}.get(
                error.name, "train,eval"
            )
            typer.secho(f"looped: {error.name} is missing: pip install 'modeling-looped[{extras}]'", fg="red", err=True)
            raise typer.Exit(2) from None

    return wrapper


def _print_version(wanted: bool):
    if wanted:
        print(version("modeling-looped"))
        raise typer.Exit()


def _quiet():
    import modeling_looped  # noqa: F401  registers the models
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


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
        str | None,
        typer.Option(help="A .jsonl (field text) or text file, or a data set name. Default: Python's library."),
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


@app.command()
@sentence_errors
def compare(
    recipe: Annotated[
        str, typer.Argument(help="A recipe .yaml, or the name of a bundled one.")
    ] = "compare_depth_reuse",
    output_dir: Annotated[str, typer.Argument(help="Where checkpoints go.")] = "compare-output",
    train_data: Annotated[str | None, typer.Option(help="As for demo, instead of the recipe's.")] = None,
    validation_data: Annotated[str | None, typer.Option(help="As for demo, instead of the recipe's.")] = None,
    limit_minutes: Annotated[float | None, typer.Option(min=0, help="Stop then; the same call continues.")] = None,
    plot_only: Annotated[
        bool, typer.Option("--plot-only", help="Figure and table of the rows that are there.")
    ] = False,
    systems: Annotated[str | None, typer.Option(help="Of a study of growing: only these, such as midas,lidas.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Of a study of growing: instead of the recipe's, such as 0,1.")
    ] = None,
):
    """
    Train models on the same tokens, a CSV row for each run, and a figure: those that reuse layers against the dense one
    (compare_depth_reuse), or grown and looped stacks (grow_toy).
    """
    from modeling_looped.recipes.recipe import read_yaml

    _quiet()
    shared = recipe, output_dir, train_data, validation_data, limit_minutes, plot_only, sys.stderr.isatty()
    values = read_yaml(recipe)
    if isinstance(values, dict) and values.get("study") == "growing":
        from modeling_looped.eval.held_out import parse_recurrences
        from modeling_looped.recipes.growing import growing

        names = None if systems is None else [name.strip() for name in systems.split(",")]
        growing(*shared, names, None if seeds is None else parse_recurrences(seeds))
        return
    if systems is not None or seeds is not None:
        raise ValueError(f"--systems and --seeds are for studies of growing, and {recipe} is none.")
    from modeling_looped.recipes.compare import compare as run_compare

    run_compare(*shared)


# Scripts with a parser of their own, which a launcher starts as modeling_looped.recipes.NAME on several processes.
_SCRIPT = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}, "add_help_option": False}


@app.command(**_SCRIPT)
def pretrain(context: typer.Context):
    """Pretrain from a recipe: --config RECIPE --output_dir DIR, and an option for every field (--help lists them)."""
    from modeling_looped.recipes.launch import main as run

    run("pretrain", context.args)


@app.command(**_SCRIPT)
def cooldown(context: typer.Context):
    """Train a checkpoint on with another mixture, and with a loop where asked for: as pretrain, with --checkpoint."""
    from modeling_looped.recipes.launch import main as run

    run("cooldown", context.args)


@app.command(**_SCRIPT)
def sft(context: typer.Context):
    """Fine-tune a checkpoint with trl, all weights or LoRA: --config RECIPE --checkpoint DIR --output_dir DIR."""
    from modeling_looped.recipes.sft import main as run

    run(context.args)


@app.command(**_SCRIPT)
def pack(context: typer.Context):
    """Pack the data of a recipe once, for runs that get --packed_dir: --config RECIPE --output_dir DIR."""
    from modeling_looped.recipes.pack import main as run

    run(context.args)


def _load(checkpoint: str, **overrides):
    from transformers import AutoTokenizer

    from modeling_looped.looping import load

    _quiet()
    return load(checkpoint, **overrides).eval(), AutoTokenizer.from_pretrained(checkpoint)


@app.command()
@sentence_errors
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    recurrences: Annotated[
        int | None, typer.Option(help="Passes over the core; the checkpoint's own by default.")
    ] = None,
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
    recurrences: Annotated[
        str | None, typer.Option(help="4, or 1,2,4, or 1..8; the checkpoint's own by default.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens; the training length by default.")
    ] = None,
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


@app.command(name="eval-report")
@sentence_errors
def eval_report(
    results: Annotated[list[str], typer.Argument(help="Results of lm-eval: files, or folders with results_*.json.")],
    output: Annotated[str, typer.Option(help="The folder for report.md and the figures.")] = "eval-report",
    reference: Annotated[
        str | None, typer.Option(help="Label of the run to compare with; the first by default.")
    ] = None,
    card: Annotated[str | None, typer.Option(help="A checkpoint: its card gets the groups' tables too.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a report.md that is no report.")] = False,
):
    """Tables with error bars, significance and baselines, and figures, of models or recurrence counts in lm-eval."""
    from modeling_looped.eval.report import read_runs, write_report

    print(write_report(read_runs(results), output, reference, overwrite, card))


@app.command()
@sentence_errors
def contamination(
    file: Annotated[str, typer.Argument(help="Training text, as for eval.")],
    tasks: Annotated[str, typer.Option(help="Names and patterns of this package's tasks, such as 'looped_nine_*'.")],
    data_dir: Annotated[
        list[str] | None, typer.Option(help="As for python -m modeling_looped.eval; repeatable.")
    ] = None,
    ngram: Annotated[int, typer.Option(min=1, help="Words that an item and the text have to share.")] = 13,
):
    """How many items of TASKS have words in a row that FILE has too."""
    import os

    from modeling_looped.eval.contamination import contamination_table, overlap, task_texts
    from modeling_looped.eval.run import TASKS, find_tasks
    from modeling_looped.recipes.corpus import read_texts

    names, manager = find_tasks(tasks, [TASKS], {"data_dir": os.pathsep.join(data_dir or [])})
    loaded = manager.load(names)["tasks"]
    texts = [text for _, text in read_texts(file)]
    print(contamination_table((name, overlap(texts, task_texts(task), ngram)) for name, task in loaded.items()))


@app.command()
@sentence_errors
def exits(
    checkpoint: Checkpoint,
    file: Annotated[str, typer.Argument(help="As for eval.")],
    max_recurrences: Annotated[
        int | None, typer.Option(help="The deepest exit; the checkpoint's own depth by default.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens; the training length by default.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Stop after so many tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
):
    """What CHECKPOINT predicts on FILE when it stops after each recurrence, against its full depth."""
    from dataclasses import asdict

    from modeling_looped.eval.exit_curve import exit_curve, exit_table
    from modeling_looped.eval.held_out import held_out_batches
    from modeling_looped.recipes.corpus import read_texts

    texts = [text for _, text in read_texts(file)]
    model, tokenizer = _load(checkpoint)
    length = sequence_length or model.config.max_position_embeddings
    points = exit_curve(model, held_out_batches(tokenizer, texts, length, batch_size, max_tokens)[0], max_recurrences)
    print(json.dumps([asdict(point) for point in points]) if as_json else exit_table(points))


@app.command(name="loop-sweep")
@sentence_errors
def loop_sweep(
    checkpoint: Checkpoint,
    file: Annotated[str, typer.Argument(help="As for eval.")],
    task: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH of a .jsonl with continuations or multiple choice; repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Layers of the block.")] = 4,
    repeats: Annotated[str, typer.Option(help="Additional passes, such as 1,2 or 1..4.")] = "1,2",
    starts: Annotated[str | None, typer.Option(help="First layers, such as 0,4,8; all by default.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens; the training length by default.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Stop after so many tokens of FILE.")] = None,
    max_items: Annotated[int | None, typer.Option(min=1, help="Of each task, only so many.")] = None,
    results: Annotated[str, typer.Option(help="A CSV; the same call adds the rows that it lacks.")] = "sweep.csv",
    figure: Annotated[str | None, typer.Option(help="A PNG; beside the CSV by default.")] = None,
):
    """Run each block of CHECKPOINT's layers again, untrained: loss on FILE and scores on tasks, a CSV row each."""
    from pathlib import Path

    from modeling_looped.eval.held_out import parse_recurrences
    from modeling_looped.eval.loop_sweep import parse_tasks, plot_sweep, sweep_table, sweep_to_csv
    from modeling_looped.recipes.corpus import read_texts

    counts, firsts = (None if text is None else parse_recurrences(text) for text in (repeats, starts))
    texts, tasks = [text for _, text in read_texts(file)], parse_tasks(task or [])
    cuts = {"sequence_length": sequence_length, "max_tokens": max_tokens, "max_items": max_items}
    model, tokenizer = _load(checkpoint)
    options = {**cuts, "repeats": counts, "starts": firsts, "progress": sys.stderr.isatty()}
    rows = sweep_to_csv(model, tokenizer, texts, tasks, results, length, **options)
    plot_sweep(rows, figure or Path(results).with_suffix(".png"))
    print(sweep_table(rows))


@app.command()
@sentence_errors
def flops(
    config_or_checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, a folder with a config.json, or a Hub name.")
    ],
    recurrences: Annotated[
        str | None, typer.Option(help="4, or 1,2,4, or 1..8; the configured one by default.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="In tokens; the training length by default.")
    ] = None,
):
    """Parameters by part, FLOPs per token and key-value cache bytes."""
    from transformers import AutoConfig

    import modeling_looped  # noqa: F401  registers the models
    from modeling_looped.accounting import accounting_table
    from modeling_looped.eval.held_out import parse_recurrences

    config = AutoConfig.from_pretrained(config_or_checkpoint)
    print(accounting_table(config, None if recurrences is None else parse_recurrences(recurrences), sequence_length))


@app.command(name="kv-cost")
@sentence_errors
def kv_cost(
    checkpoint: Checkpoint,
    file: Annotated[
        str | None, typer.Argument(help="As for eval. Default: the held-out part of Python's library, as in the demo.")
    ] = None,
    strategies: Annotated[str, typer.Option(help="Values of kv_sharing; whole numbers too.")] = "first,average,last",
    recurrences: Annotated[int | None, typer.Option(help="Passes over the core; the checkpoint's by default.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="Tokens read in one forward.")] = 128,
    continuation: Annotated[int, typer.Option(min=1, help="Tokens that follow one by one, and are measured.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Windows of text.")] = 16,
):
    """What each kv_sharing costs CHECKPOINT in loss on FILE, and saves in cache, against keeping "all"."""
    from modeling_looped.eval.kv_cost import kv_cost as measure
    from modeling_looped.eval.kv_cost import kv_cost_table
    from modeling_looped.recipes.corpus import read_texts, split_by_name, standard_library

    names = [name.strip() for name in strategies.split(",")]
    kept = [int(name) if name.isdigit() else name for name in names]
    texts = split_by_name(standard_library())[1] if file is None else [text for _, text in read_texts(file)]
    model, tokenizer = _load(checkpoint)
    print(kv_cost_table(measure(model, tokenizer, texts, kept, recurrences, prompt_length, continuation, rows)))


DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would come out, and write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that OUTPUT holds.")]
Output = Annotated[str, typer.Argument(help="Where the new checkpoint goes.")]


@app.command(name="loop")
@sentence_errors
def loop_layers(
    checkpoint: Checkpoint,
    output: Output,
    start: Annotated[int, typer.Option(min=0, help="The first layer of the block, from 0.")],
    stop: Annotated[int, typer.Option(min=1, help="The layer after its last one.")],
    repeats: Annotated[int, typer.Option(min=1, help="Additional passes over the block.")] = 1,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
):
    """Run a block of CHECKPOINT's layers more than once, without training: any decoder of transformers."""
    from modeling_looped.conversion.depth import loop_checkpoint

    _quiet()
    print(loop_checkpoint(checkpoint, output, start, stop, repeats, dry_run, overwrite))


@app.command(name="unroll")
@sentence_errors
def unroll_layers(
    checkpoint: Checkpoint,
    output: Output,
    recurrences: Annotated[
        int | None, typer.Option(help="Passes of a GrownLlama; the checkpoint's by default.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
):
    """Turn CHECKPOINT's loops into copies of layers: a plain checkpoint that any software can serve."""
    from modeling_looped.conversion.depth import unroll_checkpoint

    _quiet()
    print(unroll_checkpoint(checkpoint, output, recurrences, dry_run, overwrite))


@app.command(name="grow")
@sentence_errors
def grow_layers(
    checkpoint: Checkpoint,
    output: Output,
    operator: Annotated[str, typer.Option(help="midas or lidas.")] = "lidas",
    block_size: Annotated[int, typer.Option(min=1, help="Layers that one growth adds.")] = 4,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Grow until there are so many; one growth by default.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
):
    """Copy CHECKPOINT's middle layers, and the state of their optimizers where it has one: a deeper stack."""
    from modeling_looped.conversion.depth import grow_checkpoint

    _quiet()
    print(grow_checkpoint(checkpoint, output, operator, block_size, layers, dry_run, overwrite))


SweepOutput = Annotated[str, typer.Argument(help="The sweep's folder.")]


@sweep_app.command(name="run")
@sentence_errors
def sweep_run(
    recipe: Annotated[str, typer.Argument(help="A sweep's .yaml, or the name of a bundled one: phi_sweep.")],
    output: SweepOutput,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time on this machine.")] = 1,
    limit_minutes: Annotated[float | None, typer.Option(min=0, help="Stop then; the same call continues.")] = None,
    only: Annotated[list[int] | None, typer.Option(help="Numbers of runs, as status has them; repeatable.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Failed runs too.")] = False,
    launcher: Annotated[
        str, typer.Option(help="In front of each run, such as 'accelerate launch --num_processes 2'.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of each run; the cores divided by the workers by default.")
    ] = None,
    train_data: Annotated[str | None, typer.Option(help="As for demo, instead of the recipe's.")] = None,
    validation_data: Annotated[str | None, typer.Option(help="As for demo, instead of the recipe's.")] = None,
    have: Annotated[str | None, typer.Option(help="A CSV of collect: its runs are not run again.")] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Print a SLURM array script for these runs, and run none.")
    ] = False,
):
    """Train what is left of a sweep over budgets, recurrences, widths and variants."""
    from modeling_looped.recipes.sweep import run_sweep, slurm_array

    if slurm:
        print(slurm_array(recipe, output, train_data, validation_data), end="")
        return
    texts = {"train_data": train_data, "validation_data": validation_data}
    finished = run_sweep(
        recipe, output, workers, limit_minutes, only or (), retry, launcher, threads, have=have, **texts
    )
    print(
        "All runs are finished." if finished else f"Not all runs are finished: looped sweep status {output} has them."
    )


@sweep_app.command(name="status")
@sentence_errors
def sweep_status_command(output: SweepOutput):
    """What each run of a sweep has come to, and what is left."""
    from modeling_looped.recipes.sweep import sweep_status

    print(sweep_status(output))


@sweep_app.command(name="collect")
@sentence_errors
def sweep_collect(
    output: SweepOutput,
    destination: Annotated[
        str, typer.Option("--output", help="A CSV for looped phi; rows that it has stay.")
    ] = "runs.csv",
):
    """Finished runs as a CSV."""
    from modeling_looped.recipes.sweep import collect_sweep

    print(f"{destination}: {collect_sweep(output, destination)} runs")


Runs = Annotated[str, typer.Argument(help="A CSV with budget_flops, r, d_model, tokens, val_loss, a row a run.")]
Decomposition = Annotated[
    str | None,
    typer.Option(
        help="regression or paper, which differ in what runs once; own: n_once, n_rec. Default: own if there."
    ),
]
Restarts = Annotated[int, typer.Option(min=1, help="Random starts of every fit; one in seven reaches the best one.")]
Resamples = Annotated[int, typer.Option(min=2, help="Of the block bootstrap.")]
Seed = Annotated[int, typer.Option(help="Of starts and resamples.")]
Processes = Annotated[int, typer.Option(min=1, help="Over which the fits are spread.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@phi_app.command(name="fit")
@sentence_errors
def phi_fit(
    runs: Runs,
    output: Annotated[str, typer.Option(help="The folder for phi.json and three figures.")] = "phi-report",
    variant: Annotated[str | None, typer.Option(help="Of the CSV's column variant, where it has several.")] = None,
    decomposition: Decomposition = None,
    restarts: Restarts = 500,
    resamples: Resamples = 200,
    seed: Seed = 0,
    processes: Processes = 1,
    as_json: AsJson = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in OUTPUT that are no phi report's.")
    ] = False,
):
    """Fit the joint law to RUNS: phi with its interval, tables, phi.json and figures. The same as looped phi RUNS."""
    from modeling_looped.scaling.report import read_runs, write_phi

    fits = {"decomposition": decomposition, "restarts": restarts, "resamples": resamples, "seed": seed}
    fits |= {"processes": processes, "progress": sys.stderr.isatty()}
    report = write_phi(read_runs(runs, variant), output, overwrite, **fits)
    print(report.to_json() if as_json else report.text(), end="")


@phi_app.command(name="compare")
@sentence_errors
def phi_compare(
    runs: Runs,
    others: Annotated[str, typer.Argument(help="Runs of a changed recipe over the same baseline at r = 1.")],
    variant: Annotated[str | None, typer.Option(help="Of RUNS, where it has several.")] = None,
    other_variant: Annotated[str | None, typer.Option(help="Of OTHERS, where it has several.")] = None,
    decomposition: Decomposition = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Nats that losses at r = 1 may differ by.")] = 0.005,
    shared_budgets: Annotated[
        bool, typer.Option("--shared-budgets", help="Leave out budgets that one of them lacks.")
    ] = False,
    restarts: Restarts = 500,
    resamples: Resamples = 200,
    seed: Seed = 0,
    processes: Processes = 1,
    as_json: AsJson = False,
):
    """Delta phi of OTHERS less RUNS with its interval, or, with exit code 1, why the two baselines do not allow one."""
    from modeling_looped.scaling.comparison import compare_phi, run_names
    from modeling_looped.scaling.report import read_runs

    names = run_names((runs, variant), (others, other_variant))
    frames = read_runs(runs, variant), read_runs(others, other_variant)
    fits = {"restarts": restarts, "resamples": resamples, "seed": seed, "processes": processes}
    comparison = compare_phi(*frames, decomposition, tolerance, shared_budgets, names=names, **fits)
    print(comparison.to_json() if as_json else comparison.text(), end="")
    if comparison.delta is None:
        raise typer.Exit(1)


@app.command()
@sentence_errors
def diagnose(
    checkpoints: Annotated[list[str], typer.Argument(help="Folders or names on the Hub.")],
    out: Annotated[str, typer.Option(help="The folder for index.html and the CSVs.")] = "diagnosis",
    compare: Annotated[bool, typer.Option("--compare", help="Several on one page, side by side.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few and short texts.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="As much as the papers: hours on a small machine. Trains a tuned lens.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="Texts, as for demo; the demo's by default.")] = None,
    num_recurrences: Annotated[int | None, typer.Option("--recurrences", min=1, help="Passes over the core.")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Layers of a block, where no loop and no growth says it.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Measurements, by name; repeatable. All by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that holds other files.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Of models from the Hub.")] = False,
):
    """
    What each executed layer does: residual stream, skip effects, depth score, lens, order, gates, fixed points. One page
    that opens without a network, and CSVs.
    """
    from modeling_looped.diagnostics.report import diagnose as run_diagnose

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other.")
    if len(checkpoints) > 1 and not compare:
        raise typer.BadParameter("several checkpoints share a page with --compare; without it, name one.")
    effort = "quick" if quick else "full" if full else "default"
    page = run_diagnose(
        checkpoints, out, effort, data, num_recurrences, block, only, overwrite, trust_remote_code=trust_remote_code
    )
    print(f"{page} shows what was measured; the numbers are in {page.parent / 'csv'}.")


@app.command()
@sentence_errors
def advise(
    budget: Annotated[float, typer.Option(help="FLOPs of training and serving together, such as 1e21.")],
    memory: Annotated[float | None, typer.Option(help="GB (1e9 bytes) for weights and key-value cache.")] = None,
    inference_tokens: Annotated[float, typer.Option(min=0, help="Tokens to be served, at a full context each.")] = 0,
    recurrences: Annotated[str, typer.Option(help="1,2,4,8 or 1..2: counts that split the looped layers.")] = "1,2,4,8",
    runs: Annotated[
        str | None, typer.Option(help="A CSV of your runs, for a law of their own; the paper's by default.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Of the CSV's column variant, where it has several.")] = None,
    max_tokens: Annotated[float | None, typer.Option(help="Data there is to train on.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache of each sequence.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in the cache.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
):
    """Recurrences, width and tokens of least predicted loss for a budget and a memory, in the iso-depth family."""
    from modeling_looped.eval.held_out import parse_recurrences
    from modeling_looped.scaling import PUBLISHED, bootstrap, fit_joint_law, read_runs
    from modeling_looped.scaling.plan import PUBLISHED_RANGES, fitted_ranges
    from modeling_looped.scaling.plan import advise as find

    law, draws, fitted = PUBLISHED, None, PUBLISHED_RANGES
    if runs is not None:
        frame = read_runs(runs, variant)
        law = fit_joint_law(frame)
        draws, fitted = bootstrap(frame, law), fitted_ranges(frame)
    memory_bytes = None if memory is None else memory * 1e9
    options = {"max_tokens": max_tokens, "context": context, "batch": batch_size, "fitted": fitted}
    advice = find(law, draws, budget, memory_bytes, inference_tokens, parse_recurrences(recurrences), **options)
    print(json.dumps({"notes": advice.notes, "options": advice.table.to_dict("records")}) if as_json else advice)


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
