"""
The command `looped`. A module of its own beside the package: importing anything under `modeling_looped` registers
the models and thereby imports torch, and `looped --help` should not wait for that. Commands import what they need.
"""

import ast
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import textwrap
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
import typer.core


START, DEPTH, CONVERT, TRAIN = "Start", "Turn depth", "Loop, grow, convert", "Train"
EVALUATE, MEASURE, LOOK, PUBLISH = "Evaluate", "Measure phi", "Look inside", "Publish"
# What `looped --help` shows, in this order. A line has 60 characters at most, which 80 columns have room for.
CONTENTS = {
    START: {
        "demo": "Train a small looped model on text and plot its loss.",
        "generate": "Continue a prompt, at any number of recurrences.",
    },
    DEPTH: {
        "flops": "Parameters, FLOPs per token and cache bytes at each depth.",
        "kv-cost": "What a smaller key-value cache costs in loss.",
        "exits": "What a model predicts when it stops after each recurrence.",
    },
    CONVERT: {
        "loop": "Run a block of any decoder's layers again, untrained.",
        "unroll": "Turn loops into copies of layers, for other software.",
        "grow": "Copy middle layers into a deeper stack.",
        "loop-sweep": "Try each block: which layers can run again?",
        "convert": "Bring checkpoints of other code into this package.",
    },
    TRAIN: {
        "pretrain": "Pretrain from a recipe.",
        "cooldown": "Train a checkpoint on with another mixture or a loop.",
        "sft": "Fine-tune a checkpoint, all weights or LoRA.",
        "pack": "Pack a recipe's data once, for many runs.",
        "compare": "Train systems on the same tokens, and compare them.",
    },
    EVALUATE: {
        "eval": "Held-out loss at each number of recurrences.",
        "eval-report": "Tables and figures of lm-eval's results, with errors.",
        "contamination": "Test items whose words the training text has too.",
    },
    MEASURE: {
        "phi": "What a recurrence is worth: phi, fitted from runs.",
        "sweep": "Train the runs behind a phi, as a queue.",
        "advise": "Recurrences, width and tokens for a budget and a memory.",
    },
    LOOK: {"diagnose": "What each executed layer does, as one page."},
    PUBLISH: {
        "card": "Write a checkpoint's card from what its folder says.",
        "push": "Upload a checkpoint to the Hub, or list what would go.",
    },
}


# Help


class _WithMenu:
    """What completes has one line of help: a menu of fish would take a second one for another choice."""

    def shell_complete(self, context, incomplete):
        return [_Completion(one.value, _in_short(one.help)) for one in super().shell_complete(context, incomplete)]


class _WithExamples(_WithMenu):
    """
    The `epilog` of a command is its examples, one a line. They stand below its help as they are: no wrapping, no markup.
    """

    def format_help(self, context, formatter):
        examples, self.epilog = self.epilog, None
        try:
            super().format_help(context, formatter)
        finally:
            self.epilog = examples
        if examples:
            formatter.write(example_block(examples.splitlines()))


class _Command(_WithExamples, typer.core.TyperCommand):
    pass


class _Group(_WithExamples, typer.core.TyperGroup):
    pass


class _Contents(_WithMenu, typer.core.TyperGroup):
    """Commands in the order of `CONTENTS`, and those that it lacks after them."""

    def list_commands(self, context):
        order = [name for lines in CONTENTS.values() for name in lines]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))


class _FitByDefault(_Group):
    """`looped phi RUNS.csv` is `looped phi fit RUNS.csv`. A file called as a command is to be named ./compare."""

    def parse_args(self, context, args):
        named = not args or args[0] in self.commands or args[0] in context.help_option_names
        return super().parse_args(context, args if named else ["fit", *args])


class _Script(_Command):
    """
    A command with a parser of its own. What completes is read from the sources of its recipe's sections: importing them
    would import torch.
    """

    def shell_complete(self, context, incomplete):
        before = context.args[-1] if context.args else ""
        if before == "--config":
            return [_Completion(name) for name in bundled_recipes(self.name) if name.startswith(incomplete)]
        if before == "--resume":
            return [_Completion("auto")]
        options = script_options(self.name) if incomplete.startswith("-") else {}
        return [_Completion(name, _in_short(text)) for name, text in options.items() if name.startswith(incomplete)]


def _in_short(text: str | None) -> str:
    """One line of a menu, which fish breaks otherwise."""
    return textwrap.shorten(text or "", 70, placeholder=" ...")


class _Completion(NamedTuple):
    """What typer's completion asks of one."""

    value: str
    help: str | None = None
    type: str = "plain"


def example_block(lines) -> str:
    """As it stands at the end of a command's help."""
    return "\nExamples:\n\n" + "".join(f"  {line}\n" for line in lines) + "\n"


def _entry(name: str, *examples: str, cls: type = _Command) -> dict:
    """Of a command of `CONTENTS`: its name, panel and line there, and its examples."""
    panel = next(panel for panel, lines in CONTENTS.items() if name in lines)
    shown = {"rich_help_panel": panel, "short_help": CONTENTS[panel][name]}
    return {"name": name, **_examples(*examples), **shown, "cls": cls}


def _examples(*examples: str) -> dict:
    return {"cls": _Command, "epilog": "\n".join(examples)}


# Completion, without torch


def _room(name: str) -> Path:
    """The folder `name` of the package: inside it where it is installed, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    inside = here / "modeling_looped" / name
    return inside if inside.is_dir() else here / name


def bundled_recipes(command: str) -> list[str]:
    """Names of the recipes that come with the package and that are for `command`."""
    found = []
    for path in sorted(_room("recipes").glob("*.yaml")):
        keys = re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
        kind = "compare" if "results" in keys else "sweep" if "variants" in keys else "training"
        if kind == "training":  # of one form; their names say the stage
            kind = next((stage for stage in ("sft", "cooldown") if stage in path.stem), "pretrain")
        if kind == command or (command == "pack" and kind in ("pretrain", "cooldown")):
            found.append(path.stem)
    return found


# The sections of the scripts' recipes: modules and the dataclasses in them.
_SECTIONS = {
    "pretrain": {"recipe": ["ModelSource"], "data": ["DataRecipe"], "pretrain": ["PretrainRecipe", "RunOptions"]},
    "sft": {"sft": ["SftModel", "SftData", "SftTraining"]},
}
_SECTIONS["cooldown"] = _SECTIONS["pack"] = {**_SECTIONS["pretrain"], "launch": ["CooldownRecipe"]}


def script_options(command: str) -> dict[str, str]:
    """Options of a command with a parser of its own, and what they are, as far as it is written out as one string."""
    options = {
        "--config": "A recipe .yaml, or the name of a bundled one.",
        "--output_dir": "Where checkpoints, metrics and packed data go.",
        "--toy": "The recipe's small twin.",
        "--dry-run": "Print model, tokens and FLOPs; write nothing.",
        "--json": "With --dry-run: print JSON.",
        "--resume": "auto continues from the newest checkpoint.",
        "--overwrite": "Delete the run that the folder holds.",
        "--help": "All options with their defaults.",
    }
    for module, names in _SECTIONS[command].items():
        tree = ast.parse((_room("recipes") / f"{module}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                for one in node.body:
                    if isinstance(one, ast.AnnAssign):
                        options.setdefault(f"--{one.target.id}", _help_in(one.value))
    return options


def _help_in(value) -> str | None:
    """The string behind "help" in a field's metadata."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            for key, text in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == "help" and isinstance(text, ast.Constant):
                    return text.value
    return None


def _one_of(*values: str):
    """Completes an option's value."""
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def _a_recipe_of(command: str):
    return lambda incomplete: [name for name in bundled_recipes(command) if name.startswith(incomplete)]


def _a_task(incomplete: str) -> list[str]:
    texts = (path.read_text(encoding="utf-8") for path in _room("eval").glob("tasks/*/[!_]*.yaml"))
    found = (re.search(r"^(?:task|group): (\w+)$", text, re.MULTILINE) for text in texts)
    return sorted(one[1] for one in found if one is not None and one[1].startswith(incomplete))


app = typer.Typer(
    cls=_Contents,
    help="Looped, recurrent-depth and depth-grown language models.",
    epilog="looped COMMAND --help has examples; --json prints figures as JSON. Exit status: 0 done, 1 the work failed, "
    "2 the call has to change, 130 interrupted. LOOPED_TRACEBACK=1 shows where an error comes from.",
    no_args_is_help=True,
)
convert_app = typer.Typer(
    help="Bring checkpoints of other code into this package, and models out as GGUF. looped unroll writes plain Llama. Each "
    "prints a ledger of every tensor and compares logits; what does not fit is refused, and nothing is written then.",
    no_args_is_help=True,
)
app.add_typer(
    convert_app,
    **_entry(
        "convert",
        "looped convert llama SmolLM2-135M grown --plan 'Loop(10-10x2-10)'",
        "looped convert to-gguf looped-output looped.gguf --recurrences 4",
        cls=_Group,
    ),
)
phi_app = typer.Typer(
    help="What a recurrence is worth: phi, fitted from runs. Needs the extra scaling.", no_args_is_help=True
)
app.add_typer(
    phi_app,
    **_entry(
        "phi",
        "looped phi runs.csv --variant baseline",
        "looped phi compare runs.csv runs.csv --variant baseline --other-variant hyperconnections",
        cls=_FitByDefault,
    ),
)
sweep_app = typer.Typer(
    help="The runs behind a measured phi: a queue that continues where it stopped.", no_args_is_help=True
)
app.add_typer(
    sweep_app,
    **_entry(
        "sweep",
        "looped sweep run phi_sweep phi-runs --workers 2 --limit-minutes 60",
        "looped sweep status phi-runs",
        "looped sweep collect phi-runs --output runs.csv",
        cls=_Group,
    ),
)

Checkpoint = Annotated[str, typer.Argument(help="A checkpoint directory or a Hub name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text; all else goes to stderr.")]


# Errors


def exit_status(error: BaseException) -> int:
    """
    Of a command that ends with `error`: 2 where the call has to change (its options and values, files and folders that
    it names, an extra that is not installed), 1 where the call was right and the work failed (a loss that is no number,
    a full disk, a network that is not there), 130 where the user interrupted it.
    """
    if isinstance(error, KeyboardInterrupt):
        return 130
    if _network_failed(error):
        return 1
    of_the_call = (ValueError, ImportError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, (*of_the_call, PermissionError, typer.BadParameter)) or _kinds(error) & _REFUSALS:
        return 2
    if isinstance(error, OSError) and error.errno is None:  # transformers' own, of unknown names, or one with a remark
        return 2 if error.__cause__ in (None, error) else exit_status(error.__cause__)
    return 1


_REFUSALS = {"HTTPError", "HTTPStatusError"}  # of huggingface_hub and httpx, which need not be there


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _network_failed(error: BaseException) -> bool:
    """Whether a connection, or the other side of one, is behind `error`. What httpx raises is no OSError."""
    seen = set()
    while error is not None and id(error) not in seen:  # `raise error from error` makes a ring
        seen.add(id(error))
        kinds = _kinds(error)
        if "OfflineModeIsEnabled" in kinds:  # the user's own wish
            return False
        if kinds & {"TransportError", "ConnectionError", "TimeoutError"}:
            return True
        if kinds & _REFUSALS:
            answer = getattr(getattr(error, "response", None), "status_code", None)
            return answer is None or answer == 429 or answer >= 500
        error = error.__cause__
    return False


@contextlib.contextmanager
def ends_in_a_sentence(name: str):
    """
    What a user can understand ends in one line on stderr and its `exit_status`, without a stack trace, which
    LOOPED_TRACEBACK=1 shows. What only who wrote this can understand keeps its trace, and ends with 1.
    """
    try:
        yield
    except BrokenPipeError:  # whoever read has had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt) as error:
        if not _has_a_sentence(error):
            raise
        if os.environ.get("LOOPED_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
        typer.secho(f"{name}: {_sentence(error)}", fg="red", err=True)
        raise SystemExit(exit_status(error)) from None


sentence_errors = ends_in_a_sentence("looped")  # of a command, as a decorator


def _has_a_sentence(error: BaseException) -> bool:
    if isinstance(error, ImportError) and (error.name or "").startswith("modeling_looped"):
        return False
    kinds = (ValueError, OSError, ArithmeticError, RuntimeError, ImportError, MemoryError, KeyboardInterrupt)
    return isinstance(error, (*kinds, typer.BadParameter)) or _network_failed(error)


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."
    if isinstance(error, ModuleNotFoundError) and error.name:
        module = error.name.partition(".")[0]
        extras = {"scipy": "scaling", "threadpoolctl": "scaling", "pandas": "scaling,diagnostics", "lm_eval": "eval"}
        return f"{module} is missing: pip install 'modeling-looped[{extras.get(module, 'train,eval')}]'"
    return " ".join(str(error).split()) or type(error).__name__


# JSON


def to_json(value) -> str:
    """One line. Dataclasses are objects, and what is no number (NaN, infinity) is null."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # numpy's
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _for_reading(as_json: bool):
    """Within, what is printed is for a reader: not on stdout where that is to have JSON alone."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


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


@app.command(
    **_entry(
        "demo",
        "looped demo demo-output",
        "looped demo quick-output --quick",
        "looped demo wiki-output --data Salesforce/wikitext:wikitext-2-raw-v1 --size small",
    )
)
@sentence_errors
def demo(
    output_dir: Annotated[str, typer.Argument(help="Where the checkpoint, its card and its figure go.")],
    data: Annotated[
        str | None,
        typer.Option(help="A .jsonl (field text) or text file, or a data set; Python's library by default."),
    ] = None,
    size: Annotated[
        str,
        typer.Option(help="tiny, small, medium or large.", autocompletion=_one_of("tiny", "small", "medium", "large")),
    ] = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of the size's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the data and the depths.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A short run that only shows that everything works.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in OUTPUT_DIR.")] = False,
    as_json: AsJson = False,
):
    """Train a looped model on text, load it back, let it write, and plot its loss against recurrences."""
    from modeling_looped.recipes.demo import demo as run_demo

    with _for_reading(as_json):
        finished = run_demo(output_dir, data, size, steps, quick, overwrite, seed)
    if as_json:
        metrics = json.loads((Path(output_dir) / "metrics.json").read_text(encoding="utf-8")) if finished else None
        print(to_json({"output_dir": output_dir, "finished": finished, "metrics": metrics}))


@app.command(
    **_entry(
        "compare",
        "looped compare grow_toy growing-output --limit-minutes 30",
        "looped compare grow_toy growing-output --systems midas,lidas --seeds 0",
        "looped compare compare_depth_reuse reuse-output --limit-minutes 60",
    )
)
@sentence_errors
def compare(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe .yaml, or the name of a bundled one.", autocompletion=_a_recipe_of("compare")),
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
    as_json: AsJson = False,
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
        from modeling_looped.recipes.growing import growing, summary

        names = None if systems is None else [name.strip() for name in systems.split(",")]
        with _for_reading(as_json):
            finished = growing(*shared, names, None if seeds is None else parse_recurrences(seeds))
    elif systems is not None or seeds is not None:
        raise ValueError(f"--systems and --seeds are for studies of growing, and {recipe} is none.")
    else:
        from modeling_looped.recipes.compare import compare as run_compare
        from modeling_looped.recipes.compare import summary

        with _for_reading(as_json):
            finished = run_compare(*shared)
    if as_json:
        print(to_json({"finished": finished, **summary(recipe)}))


# Scripts with a parser of their own, which a launcher starts as modeling_looped.recipes.NAME on several processes. Their
# help, with examples, is that parser's.
_SCRIPT = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}, "add_help_option": False}


@app.command(**_entry("pretrain", cls=_Script), **_SCRIPT)
@sentence_errors
def pretrain(context: typer.Context):
    """Pretrain from a recipe: --config RECIPE --output_dir DIR, and an option for every field (--help lists them)."""
    from modeling_looped.recipes.launch import main as run

    run("pretrain", context.args)


@app.command(**_entry("cooldown", cls=_Script), **_SCRIPT)
@sentence_errors
def cooldown(context: typer.Context):
    """Train a checkpoint on with another mixture, and with a loop where asked for: as pretrain, with --checkpoint."""
    from modeling_looped.recipes.launch import main as run

    run("cooldown", context.args)


@app.command(**_entry("sft", cls=_Script), **_SCRIPT)
@sentence_errors
def sft(context: typer.Context):
    """Fine-tune a checkpoint with trl, all weights or LoRA: --config RECIPE --checkpoint DIR --output_dir DIR."""
    from modeling_looped.recipes.sft import main as run

    run(context.args)


@app.command(**_entry("pack", cls=_Script), **_SCRIPT)
@sentence_errors
def pack(context: typer.Context):
    """Pack the data of a recipe once, for runs that get --packed_dir: --config RECIPE --output_dir DIR."""
    from modeling_looped.recipes.pack import main as run

    run(context.args)


def _load(checkpoint: str, **overrides):
    from transformers import AutoTokenizer

    from modeling_looped.looping import load

    _quiet()
    return load(checkpoint, **overrides).eval(), AutoTokenizer.from_pretrained(checkpoint)


@app.command(
    **_entry(
        "generate",
        "looped generate demo-output 'import '",
        "looped generate demo-output 'def read_lines(path):' --recurrences 8",
        "looped generate demo-output 'import ' --temperature 0.7 --json",
    )
)
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
    as_json: AsJson = False,
):
    """Continue PROMPT."""
    import torch

    model, tokenizer = _load(checkpoint)
    torch.manual_seed(seed)
    depth = {} if recurrences is None else {"num_recurrences": recurrences}
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling, **depth)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    if as_json:
        passes = getattr(model.config, "num_recurrences", None) if recurrences is None else recurrences
        asked = {"prompt": prompt, "num_recurrences": passes, "max_new_tokens": max_new_tokens}
        asked |= {"temperature": temperature, "seed": seed}
        print(to_json({"text": text, "new_tokens": output.shape[1] - inputs["input_ids"].shape[1], **asked}))
    else:
        print(text)


def _held_out_texts(file: str | None) -> tuple[list[str], str]:
    """The texts of FILE with its name; the held-out part of Python's library where none is given."""
    import platform

    from modeling_looped.recipes.corpus import read_texts, split_by_name, standard_library

    if file is None:
        return split_by_name(standard_library())[
            1
        ], f"the held-out part of Python {platform.python_version()}'s library"
    return [text for _, text in read_texts(file)], os.path.basename(file) if os.path.exists(file) else file


def _seen_from(checkpoint: str, file: str) -> str:
    """A file as it is called in the checkpoint's folder, or by its name where it lies elsewhere."""
    if not os.path.exists(file):
        return file  # a data set of the Hub
    inside = os.path.relpath(os.path.realpath(file), os.path.realpath(checkpoint))
    return os.path.basename(file) if inside.startswith(os.pardir) else inside


@app.command(
    **_entry(
        "eval",
        "looped eval demo-output --recurrences 1..8 --max-tokens 4096",
        "looped eval demo-output demo-output/training/validation.jsonl --max-tokens 4096 --json",
    )
)
@sentence_errors
def evaluate(
    checkpoint: Checkpoint,
    file: Annotated[
        str | None,
        typer.Argument(
            help="A .jsonl (field text) or text file, or a data set name. Default: the held-out part of Python's library, "
            "as in the demo."
        ),
    ] = None,
    recurrences: Annotated[
        str | None, typer.Option(help="4, or 1,2,4, or 1..8; the checkpoint's own by default.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens; the training length by default.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Stop after so many tokens.")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the losses as held_out.json in CHECKPOINT, for its card.")
    ] = False,
    as_json: AsJson = False,
):
    """Held-out loss of CHECKPOINT on FILE: nats per token and bits per byte at each number of recurrences."""
    from modeling_looped.eval.held_out import held_out_loss, parse_recurrences, save_held_out

    counts = None if recurrences is None else parse_recurrences(recurrences)
    if save and not os.path.isdir(checkpoint):
        raise ValueError(f"--save keeps the losses in the folder of a checkpoint, and {checkpoint!r} is none.")
    texts, name = _held_out_texts(file)
    model, tokenizer = _load(checkpoint)
    losses = held_out_loss(
        model, tokenizer, texts, counts, sequence_length, batch_size, max_tokens, progress=sys.stderr.isatty()
    )
    if save:
        options = {"--recurrences": recurrences, "--sequence-length": sequence_length, "--max-tokens": max_tokens}
        given = [part for option, value in options.items() if value is not None for part in (option, str(value))]
        where = [] if file is None else [_seen_from(checkpoint, file)]
        window = sequence_length or model.config.max_position_embeddings
        save_held_out(checkpoint, losses, texts, name, window, ["looped", "eval", "CHECKPOINT", *where, *given])
    if as_json:
        print(to_json(losses))
        return
    print(f"{losses[0].tokens:,} tokens, {losses[0].bytes:,} bytes")
    print("recurrences  nats/token  bits/byte")
    for row in losses:
        print(f"{row.num_recurrences:11d}  {row.nats_per_token:10.4f}  {row.bits_per_byte:9.4f}")


@app.command(
    **_entry(
        "eval-report",
        "looped eval-report demo-output/evaluation",
        "looped eval-report demo-output/evaluation --reference 'demo-output r=4' --output report --json",
    )
)
@sentence_errors
def eval_report(
    results: Annotated[list[str], typer.Argument(help="Results of lm-eval: files, or folders with results_*.json.")],
    output: Annotated[str, typer.Option(help="The folder for report.md and the figures.")] = "eval-report",
    reference: Annotated[
        str | None, typer.Option(help="Label of the run to compare with; the first by default.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a report.md that is no report.")] = False,
    as_json: AsJson = False,
):
    """Tables with error bars, significance and baselines, and figures, of models or recurrence counts in lm-eval."""
    from modeling_looped.eval.report import Comparison, comparison_rows, read_runs, write_report

    runs = read_runs(results)
    path = write_report(runs, output, reference, overwrite)
    if as_json:
        comparison = Comparison(runs, reference)
        rows = comparison_rows(comparison)
        print(to_json({"report": path, "reference": comparison.reference.label, "rows": rows}))
    else:
        print(path)


@app.command(
    **_entry(
        "contamination",
        "looped contamination demo-output/training/validation.jsonl --tasks looped_axis_reasoning_primitives",
        "looped contamination demo-output/training/validation.jsonl --tasks 'looped_reasoning_*' --ngram 8 --json",
    )
)
@sentence_errors
def contamination(
    file: Annotated[str, typer.Argument(help="Training text, as for eval.")],
    tasks: Annotated[
        str,
        typer.Option(help="Names and patterns of this package's tasks, as 'looped_nine_*'.", autocompletion=_a_task),
    ],
    data_dir: Annotated[
        list[str] | None, typer.Option(help="As for python -m modeling_looped.eval; repeatable.")
    ] = None,
    ngram: Annotated[int, typer.Option(min=1, help="Words that an item and the text have to share.")] = 13,
    as_json: AsJson = False,
):
    """How many items of TASKS have words in a row that FILE has too."""
    from modeling_looped.eval.contamination import contamination_rows, contamination_table, overlap, task_texts
    from modeling_looped.eval.run import TASKS, find_tasks
    from modeling_looped.recipes.corpus import read_texts

    names, manager = find_tasks(tasks, [TASKS], {"data_dir": os.pathsep.join(data_dir or [])})
    loaded = manager.load(names)["tasks"]
    texts = [text for _, text in read_texts(file)]
    found = [(name, overlap(texts, task_texts(task), ngram)) for name, task in loaded.items()]
    print(to_json(contamination_rows(found)) if as_json else contamination_table(found))


@app.command(
    **_entry(
        "exits",
        "looped exits demo-output demo-output/training/validation.jsonl --max-tokens 4096",
        "looped exits demo-output demo-output/training/validation.jsonl --max-tokens 4096 --max-recurrences 8 --json",
    )
)
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
    as_json: AsJson = False,
):
    """What CHECKPOINT predicts on FILE when it stops after each recurrence, against its full depth."""
    from modeling_looped.eval.exit_curve import exit_curve, exit_table
    from modeling_looped.eval.held_out import held_out_batches
    from modeling_looped.recipes.corpus import read_texts

    texts = [text for _, text in read_texts(file)]
    model, tokenizer = _load(checkpoint)
    length = sequence_length or model.config.max_position_embeddings
    points = exit_curve(model, held_out_batches(tokenizer, texts, length, batch_size, max_tokens)[0], max_recurrences)
    print(to_json(points) if as_json else exit_table(points))


@app.command(
    **_entry(
        "loop-sweep",
        "looped loop-sweep HuggingFaceTB/SmolLM2-135M demo-output/training/validation.jsonl --max-tokens 4096",
        "looped loop-sweep HuggingFaceTB/SmolLM2-135M demo-output/training/validation.jsonl --starts 8,12 --repeats 1 --max-tokens 4096 --json",
    )
)
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
    as_json: AsJson = False,
):
    """Run each block of CHECKPOINT's layers again, untrained: loss on FILE and scores on tasks, a CSV row each."""
    from modeling_looped.eval.held_out import parse_recurrences
    from modeling_looped.eval.loop_sweep import parse_tasks, plot_sweep, sweep_figures, sweep_table, sweep_to_csv
    from modeling_looped.recipes.corpus import read_texts

    counts, firsts = (None if text is None else parse_recurrences(text) for text in (repeats, starts))
    texts, tasks = [text for _, text in read_texts(file)], parse_tasks(task or [])
    cuts = {"sequence_length": sequence_length, "max_tokens": max_tokens, "max_items": max_items}
    model, tokenizer = _load(checkpoint)
    options = {**cuts, "repeats": counts, "starts": firsts, "progress": sys.stderr.isatty()}
    with _for_reading(as_json):
        rows = sweep_to_csv(model, tokenizer, texts, tasks, results, length, **options)
    picture = figure or Path(results).with_suffix(".png")
    plot_sweep(rows, picture)
    if as_json:
        print(to_json({"results": results, "figure": picture, "rows": sweep_figures(rows)}))
    else:
        print(sweep_table(rows))


@app.command(
    **_entry(
        "flops",
        "looped flops demo-output",
        "looped flops demo-output --recurrences 1..8 --sequence-length 2048",
        "looped flops demo-output --recurrences 4 --json",
    )
)
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
    as_json: AsJson = False,
):
    """Parameters by part, FLOPs per token and key-value cache bytes."""
    from transformers import AutoConfig

    import modeling_looped  # noqa: F401  registers the models
    from modeling_looped.accounting import accounting_figures, accounting_table
    from modeling_looped.eval.held_out import parse_recurrences

    counts = None if recurrences is None else parse_recurrences(recurrences)
    asked = AutoConfig.from_pretrained(config_or_checkpoint), counts, sequence_length
    print(to_json(accounting_figures(*asked)) if as_json else accounting_table(*asked))


@app.command(
    **_entry(
        "kv-cost",
        "looped kv-cost demo-output",
        "looped kv-cost demo-output demo-output/training/validation.jsonl --strategies last,average --rows 4",
        "looped kv-cost demo-output --recurrences 8 --json",
    )
)
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
    as_json: AsJson = False,
):
    """What each kv_sharing costs CHECKPOINT in loss on FILE, and saves in cache, against keeping "all"."""
    from modeling_looped.eval.kv_cost import kv_cost as measure
    from modeling_looped.eval.kv_cost import kv_cost_table

    names = [name.strip() for name in strategies.split(",")]
    kept = [int(name) if name.isdigit() else name for name in names]
    texts, _ = _held_out_texts(file)
    model, tokenizer = _load(checkpoint)
    costs = measure(model, tokenizer, texts, kept, recurrences, prompt_length, continuation, rows)
    print(to_json(costs) if as_json else kv_cost_table(costs))


DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would come out, and write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint that OUTPUT holds.")]
Output = Annotated[str, typer.Argument(help="Where the new checkpoint goes.")]


@app.command(
    **_entry(
        "loop",
        "looped loop HuggingFaceTB/SmolLM2-135M looped-output --start 8 --stop 12 --dry-run",
        "looped loop HuggingFaceTB/SmolLM2-135M looped-output --start 8 --stop 12 --repeats 2",
    )
)
@sentence_errors
def loop_layers(
    checkpoint: Checkpoint,
    output: Output,
    start: Annotated[int, typer.Option(min=0, help="The first layer of the block, from 0.")],
    stop: Annotated[int, typer.Option(min=1, help="The layer after its last one.")],
    repeats: Annotated[int, typer.Option(min=1, help="Additional passes over the block.")] = 1,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
):
    """Run a block of CHECKPOINT's layers more than once, without training: any decoder of transformers."""
    from modeling_looped.conversion.depth import loop_checkpoint

    _quiet()
    change = loop_checkpoint(checkpoint, output, start, stop, repeats, dry_run, overwrite)
    print(to_json(change) if as_json else change)


@app.command(
    **_entry(
        "unroll",
        "looped unroll looped-output plain-output",
        "looped unroll looped-output plain-output --recurrences 8 --dry-run --json",
    )
)
@sentence_errors
def unroll_layers(
    checkpoint: Checkpoint,
    output: Output,
    recurrences: Annotated[
        int | None, typer.Option(help="Passes of a GrownLlama; the checkpoint's by default.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
):
    """
    Turn CHECKPOINT's loops into copies of layers: a plain checkpoint that any software can serve. Prints a ledger of every
    tensor, and compares the logits of what was written with CHECKPOINT's.
    """
    from modeling_looped.conversion.depth import unroll_checkpoint

    _convert(unroll_checkpoint, as_json, checkpoint, output, recurrences, dry_run, overwrite)


@app.command(
    **_entry(
        "grow",
        "looped grow HuggingFaceTB/SmolLM2-135M grown-output --operator lidas --block-size 6 --dry-run --json",
        "looped grow HuggingFaceTB/SmolLM2-135M grown-output --operator midas --block-size 6 --layers 42",
    )
)
@sentence_errors
def grow_layers(
    checkpoint: Checkpoint,
    output: Output,
    operator: Annotated[str, typer.Option(help="midas or lidas.", autocompletion=_one_of("midas", "lidas"))] = "lidas",
    block_size: Annotated[int, typer.Option(min=1, help="Layers that one growth adds.")] = 4,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Grow until there are so many; one growth by default.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
):
    """Copy CHECKPOINT's middle layers, and the state of their optimizers where it has one: a deeper stack."""
    from modeling_looped.conversion.depth import grow_checkpoint

    _quiet()
    change = grow_checkpoint(checkpoint, output, operator, block_size, layers, dry_run, overwrite)
    print(to_json(change) if as_json else change)


SweepOutput = Annotated[str, typer.Argument(help="The sweep's folder.")]


@sweep_app.command(
    name="run",
    **_examples(
        "looped sweep run phi_sweep phi-runs --workers 2 --limit-minutes 60",
        "looped sweep run phi_sweep phi-runs --only 0 --retry",
        "looped sweep run phi_sweep phi-runs --slurm",
    ),
)
@sentence_errors
def sweep_run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A sweep's .yaml, or the name of a bundled one: phi_sweep.", autocompletion=_a_recipe_of("sweep")
        ),
    ],
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
    from modeling_looped.recipes.sweep import failed_runs, run_sweep, slurm_array

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
    if failed := failed_runs(output, only or (), have):
        raise RuntimeError(f"{len(failed)} failed, first {failed[0]}: --retry runs them again.")


@sweep_app.command(name="status", **_examples("looped sweep status phi-runs", "looped sweep status phi-runs --json"))
@sentence_errors
def sweep_status_command(output: SweepOutput, as_json: AsJson = False):
    """What each run of a sweep has come to, and what is left."""
    from modeling_looped.recipes.sweep import sweep_figures, sweep_status

    print(to_json(sweep_figures(output)) if as_json else sweep_status(output))


@sweep_app.command(
    name="collect",
    **_examples(
        "looped sweep collect phi-runs --output runs.csv", "looped sweep collect phi-runs --output runs.csv --json"
    ),
)
@sentence_errors
def sweep_collect(
    output: SweepOutput,
    destination: Annotated[
        str, typer.Option("--output", help="A CSV for looped phi; rows that it has stay.")
    ] = "runs.csv",
    as_json: AsJson = False,
):
    """Finished runs as a CSV."""
    from modeling_looped.recipes.sweep import collect_sweep

    count = collect_sweep(output, destination)
    print(to_json({"output": destination, "runs": count}) if as_json else f"{destination}: {count} runs")


Runs = Annotated[str, typer.Argument(help="A CSV with budget_flops, r, d_model, tokens, val_loss, a row a run.")]
Decomposition = Annotated[
    str | None,
    typer.Option(
        help="What runs once: by regression, paper or own (n_once, n_rec; default if there).",
        autocompletion=_one_of("regression", "paper", "own"),
    ),
]
Restarts = Annotated[int, typer.Option(min=1, help="Random starts of every fit; one in seven reaches the best one.")]
Resamples = Annotated[int, typer.Option(min=2, help="Of the block bootstrap.")]
Seed = Annotated[int, typer.Option(help="Of starts and resamples.")]
Processes = Annotated[int, typer.Option(min=1, help="Over which the fits are spread.")]


@phi_app.command(
    name="fit",
    **_examples(
        "looped phi fit runs.csv --variant baseline",
        "looped phi fit runs.csv --variant baseline --output phi-report --processes 2",
        "looped phi fit runs.csv --variant baseline --json",
    ),
)
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


@phi_app.command(
    name="compare",
    **_examples(
        "looped phi compare runs.csv runs.csv --variant baseline --other-variant hyperconnections",
        "looped phi compare runs.csv runs.csv --variant baseline --other-variant hyperconnections --json",
    ),
)
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


@app.command(
    **_entry(
        "diagnose",
        "looped diagnose demo-output --quick",
        "looped diagnose demo-output --only exits --only lens --out exits-page --json",
        "looped diagnose --compare HuggingFaceTB/SmolLM2-135M demo-output --out side-by-side",
    )
)
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
    as_json: AsJson = False,
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
    if as_json:
        made = json.loads((page.parent / "made_by.json").read_text(encoding="utf-8"))
        print(to_json({"page": page, "csv": page.parent / "csv", "measurements": made["measurements"]}))
    else:
        print(f"{page} shows what was measured; the numbers are in {page.parent / 'csv'}.")


@app.command(
    **_entry(
        "advise",
        "looped advise --budget 1e21 --memory 2",
        "looped advise --budget 1e20 --inference-tokens 1e12 --recurrences 1,2,4",
        "looped advise --budget 1e18 --runs runs.csv --variant baseline --json",
    )
)
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
    as_json: AsJson = False,
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
    print(to_json({"notes": advice.notes, "options": advice.table.to_dict("records")}) if as_json else advice)


Licence = Annotated[str | None, typer.Option("--license", help="For the card, such as apache-2.0.")]
BaseModel = Annotated[str | None, typer.Option(help="For the card: the Hub name of the model it was made from.")]
Datasets = Annotated[list[str] | None, typer.Option("--dataset", help="For the card: a Hub name; repeatable.")]
Languages = Annotated[list[str] | None, typer.Option("--language", help="For the card, such as en; repeatable.")]


@app.command(
    **_entry(
        "card",
        "looped eval demo-output --recurrences 1..8 --max-tokens 4096 --save",
        "looped card demo-output --license apache-2.0 --language en",
        "looped card demo-output --json",
    )
)
@sentence_errors
def card(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a checkpoint.")],
    results: Annotated[
        str | None, typer.Option(help="A folder with lm-eval's results, which go to CHECKPOINT/evaluation first.")
    ] = None,
    license: Licence = None,
    base_model: BaseModel = None,
    datasets: Datasets = None,
    languages: Languages = None,
    show: Annotated[bool, typer.Option("--show", help="Print the card, and write nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a README.md that was written or changed by hand.")
    ] = False,
    as_json: AsJson = False,
):
    """
    Write CHECKPOINT's README.md and figure from what lies in its folder: configuration, recipe, logs, held-out losses,
    lm-eval's results. What is not there is said to be missing. Your own text between the marks of the notes stays.
    """
    from modeling_looped.hub_cards.card import add_results, build_card, write_card

    _quiet()
    given = {"license": license, "base_model": base_model, "datasets": datasets, "language": languages}
    if show or as_json:
        if results is not None:
            raise ValueError("--results puts files into CHECKPOINT: leave it out with --show and --json.")
        built = build_card(checkpoint, **given)
        print(to_json(built.data.to_dict()) if as_json else built)
        return
    if results is not None:
        add_results(checkpoint, results)
    print(write_card(checkpoint, overwrite, **given))


@app.command(
    **_entry(
        "push",
        "looped push demo-output me/looped-demo --dry-run",
        "looped push demo-output me/looped-demo --dry-run --json",
    )
)
@sentence_errors
def push(
    checkpoint: Annotated[str, typer.Argument(help="The folder of a checkpoint.")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; it is made if there is none.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; your account's setting by default.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Further files of the folder, such as 'notes/*'; repeatable.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    license: Licence = None,
    base_model: BaseModel = None,
    datasets: Datasets = None,
    languages: Languages = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List each file and what stays here; send nothing.")
    ] = False,
    as_json: AsJson = False,
):
    """
    Upload CHECKPOINT in one commit: weights, code, tokenizer, card, plots and the numbers that the card quotes. Training
    state, pickles and items of evaluation sets stay here. Log in with `hf auth login` first.
    """
    from modeling_looped.hub_cards.push import plan_upload
    from modeling_looped.hub_cards.push import push as upload

    _quiet()
    given = {"license": license, "base_model": base_model, "datasets": datasets, "language": languages}
    if dry_run:
        plan = plan_upload(checkpoint, repo, tuple(include or ()), **given)
        print(to_json(plan.to_dict()) if as_json else f"{plan}\nNothing was sent (dry run).")
        return
    commit = upload(checkpoint, repo, private, tuple(include or ()), message, **given)
    print(to_json({"url": commit.commit_url, "commit": commit.oid}) if as_json else commit.commit_url)


ConvertOverwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the checkpoint (of to-gguf: the file) that OUTPUT holds.")
]
Plan = Annotated[
    str | None, typer.Option(help="A depth plan over all layers, such as 'Loop(10-10x2-10)' or '0 1 2 1 2 3'.")
]


def _convert(convert, as_json: bool, *args, **options):
    """The ledger of a conversion, printed."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # of transformers' own bars; read when tqdm is imported
    _quiet()
    with _for_reading(as_json):
        ledger = convert(*args, **options)
    print(to_json(ledger.to_dict()) if as_json else ledger)


@convert_app.command(
    name="iso-depth",
    short_help="Of the official iso-depth code, as LoopedGPT.",
    **_examples(
        "looped convert iso-depth runs/loop_s10 loop-s10", "looped convert iso-depth runs/loop_s10 x --dry-run"
    ),
)
@sentence_errors
def convert_iso_depth(
    source: Annotated[str, typer.Argument(help="A folder with model_*.pt and meta_*.json of the paper's code.")],
    output: Output,
    dry_run: DryRun = False,
    overwrite: ConvertOverwrite = False,
    as_json: AsJson = False,
):
    """
    Turn a checkpoint of the official iso-depth code into one of LoopedGPT. What was written is read back and compared with
    the model in memory: the code of the source is not here.
    """
    from modeling_looped.conversion.iso_depth import convert_iso_depth as convert

    _convert(convert, as_json, source, output, overwrite, dry_run)


@convert_app.command(
    name="grt",
    short_help="Of RecurrentGPT's authors, as RecurrentGPT.",
    **_examples(
        "looped convert grt model.safetensors grt-medium --cell medium-isoflops --draft map.json",
        "looped convert grt model.safetensors grt-medium --cell medium-isoflops --map map.json",
    ),
)
@sentence_errors
def convert_grt(
    source: Annotated[str, typer.Argument(help="A .safetensors, .pt or .bin file, or a folder with one.")],
    output: Output,
    cell: Annotated[
        str | None,
        typer.Option(
            help="medium-isoflops, medium-isoparams, large-isoflops or large-isoparams, where no config.json has the "
            "numbers. The names of the two medium repositories on the Hub are swapped.",
            autocompletion=_one_of("medium-isoflops", "medium-isoparams", "large-isoflops", "large-isoparams"),
        ),
    ] = None,
    map_file: Annotated[
        str | None, typer.Option("--map", help="A JSON of {their name: our name}, for every tensor.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Where such a map goes as far as it is known, if names stay ambiguous.")
    ] = None,
    dry_run: DryRun = False,
    overwrite: ConvertOverwrite = False,
    as_json: AsJson = False,
):
    """
    Turn a checkpoint of Amr-Hegazy/grt-* (arXiv 2608.15062, weights CC-BY-4.0) into one of RecurrentGPT. Tensors are
    matched by shape and order; what stays ambiguous is refused with its candidates, and --map settles it. Equal logits
    were shown on a synthetic checkpoint only.
    """
    from modeling_looped.conversion.grt import convert_grt as convert

    _convert(convert, as_json, source, output, cell, map_file, draft, overwrite, dry_run)


@convert_app.command(
    name="llama",
    short_help="Of transformers' Llama, as GrownLlama with a plan.",
    **_examples(
        "looped convert llama SmolLM2-135M grown --plan 'Loop(10-10x2-10)'",
        "looped convert llama SmolLM2-135M grown --dry-run --json",
    ),
)
@sentence_errors
def convert_llama(
    source: Annotated[str, typer.Argument(help="A folder of save_pretrained: Llama, or Mistral without a window.")],
    output: Output,
    plan: Plan = None,
    dry_run: DryRun = False,
    overwrite: ConvertOverwrite = False,
    as_json: AsJson = False,
):
    """
    Turn a Llama into a GrownLlama with a depth plan, each layer once by default. At one pass its logits are the source's
    to the last bit, which is checked on what was written.
    """
    from modeling_looped.conversion.llama import convert_llama as convert

    _convert(convert, as_json, source, output, plan, overwrite, dry_run)


@convert_app.command(
    name="gguf",
    short_help="A GGUF file of Llama, as Llama or GrownLlama.",
    **_examples(
        "looped convert gguf SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M",
        "looped convert gguf SmolLM2-135M-Instruct.Q4_1.gguf grown --plan 'Loop(10-10x2-10)'",
    ),
)
@sentence_errors
def convert_gguf(
    source: Annotated[str, typer.Argument(help="A .gguf file of the architecture llama.")],
    output: Output,
    plan: Plan = None,
    dry_run: DryRun = False,
    overwrite: ConvertOverwrite = False,
    as_json: AsJson = False,
):
    """
    Turn a GGUF file of Llama into transformers' Llama in float32, or with a plan into a GrownLlama; the tokenizer comes
    along. The logits are those of transformers reading the same file. Needs the extra gguf.
    """
    from modeling_looped.conversion.gguf_llama import convert_gguf as convert

    _convert(convert, as_json, source, output, plan, overwrite, dry_run)


@convert_app.command(
    name="to-gguf",
    short_help="Out: Llama or GrownLlama as a GGUF file, unrolled.",
    **_examples(
        "looped convert to-gguf looped-output looped.gguf --recurrences 4",
        "looped convert to-gguf looped-output looped.gguf --dtype f16 --json",
    ),
)
@sentence_errors
def convert_to_gguf(
    checkpoint: Annotated[str, typer.Argument(help="A folder: GrownLlama, or Llama with or without loops.")],
    output: Annotated[str, typer.Argument(help="The .gguf file to write.")],
    recurrences: Annotated[
        int | None, typer.Option(help="Passes of a GrownLlama; the checkpoint's by default.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="f32, f16 or bf16, of matrices.", autocompletion=_one_of("f32", "f16", "bf16"))
    ] = "f32",
    tokenizer: Annotated[bool, typer.Option(help="Write the tokenizer, its special tokens and its template.")] = True,
    dry_run: DryRun = False,
    overwrite: ConvertOverwrite = False,
    as_json: AsJson = False,
):
    """
    Write CHECKPOINT as a GGUF file, its loops as copies of layers. It is read back by transformers: in f32 with equal
    logits, in f16 and bf16 with those of the rounded source. Needs the extra gguf.
    """
    from modeling_looped.conversion.gguf_llama import to_gguf as convert

    _convert(convert, as_json, checkpoint, output, recurrences, dtype, tokenizer, overwrite, dry_run)


def main():
    app(prog_name="looped")


if __name__ == "__main__":
    main()
