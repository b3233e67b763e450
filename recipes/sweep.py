"""
A sweep for `looped phi`: one pretraining run for each (variant, budget, recurrences, width), as a queue that can be
stopped and continued, shared by several workers or a SLURM array, with a JSON for each finished run and a CSV of all.

    looped sweep run phi_sweep OUT [--workers 2] [--limit-minutes 75]
    looped sweep status OUT
    looped sweep collect OUT --output runs.csv

Runs are ordinary ones of `recipes.pretrain`, each in a folder with its recipe, and continue where they were stopped.
"""

import csv
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from modeling_looped import LoopedGPTConfig
from modeling_looped.accounting import parameter_counts, training_flops_per_token
from modeling_looped.scaling.family import Family

from .checkpoints import newest_checkpoint, read_progress
from .data import DataRecipe
from .pretrain import PretrainRecipe, RunOptions
from .recipe import as_yaml, checked, read_yaml
from .study import changed_fields
from .versions import versions


SWEEP, RESULT, FAILURE, LOCK, RECIPE = "sweep.yaml", "result.json", "failure.txt", "lock", "recipe.yaml"
RATES = ("matrix_lr", "embedding_lr", "head_lr", "other_lr", "lane_lr")
COLUMNS = (
    "variant", "budget_flops", "r", "s", "d_model", "n_unique", "n_once_paper", "n_rec_paper", "n_once_ls", "n_rec_ls",
    "flops_per_token", "iterations", "tokens", "val_loss", "provenance", "seed", "matrix_lr", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A budget in training FLOPs, and the widths that are trained at it for every number of recurrences."""

    budget: float
    widths: list


@dataclass(frozen=True)
class SweepRecipe:
    """
    Args:
        cells: `{budget, widths}` each.
        recurrences: Numbers that divide `looped`. 1 is trained in the first variant only: without a loop there is no
            injection, and all variants share it.
        prelude, looped, coda: Executed layers of each part, alike at every r above 1 (iso-depth).
        head_dim: Width of a head; widths are multiples of it.
        fields: Of every model's configuration, such as `vocab_size` and `max_position_embeddings`.
        variants: `{name: fields}` of the configuration, the baseline first.
        data, training, run: As in recipes of `pretrain`; budgets and learning rates are set for each run.
        matrix_scale, other_scale: Of the matrices' and of the other learning rates, as factors of what HyperP gives
            (section 5.3), whose reference is far from toy sizes.
        seed: Of every run: weights and order of the data.
    """

    cells: list
    recurrences: list
    prelude: int
    looped: int
    coda: int
    head_dim: int
    fields: dict
    variants: dict
    data: dict
    training: dict
    run: dict = field(default_factory=dict)
    matrix_scale: float = 1.0
    other_scale: float = 1.0
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "cells", [checked(Cell, cell, "cells") for cell in self.cells])
        for r in self.recurrences:
            if not isinstance(r, int) or r < 1 or self.looped % r:
                raise ValueError(f"recurrences: {r!r} must divide the {self.looped} layers of looped.")
        for cell in self.cells:
            if cell.budget <= 0:
                raise ValueError(f"cells: budget={cell.budget!r} must be positive.")
            for width in cell.widths:
                if not isinstance(width, int) or width < 1 or width % self.head_dim:
                    raise ValueError(f"cells: width {width!r} must be a multiple of head_dim={self.head_dim}.")
        if not self.variants:
            raise ValueError("variants is empty: name the baseline at least, such as {baseline: {injection: linear}}.")
        for name in ("budget_flops", "budget_tokens", "total_steps", *RATES, "seed"):
            if name in self.training:
                raise ValueError(f"training: leave {name} out, the sweep sets it for each run.")
        checked(DataRecipe, self.data, "data")
        checked(PretrainRecipe, self.training, "training")
        checked(RunOptions, self.run, "run")

    @property
    def family(self) -> Family:
        """Of the first variant; its split is what the authors used for the others too (section 3.3)."""
        own = {**self.fields, **(next(iter(self.variants.values())) or {})}
        return Family(
            prelude=self.prelude,
            looped=self.looped,
            coda=self.coda,
            injection=own.get("injection", "linear"),
            vocab_size=own["vocab_size"],
            sequence_length=own["max_position_embeddings"],
            head_dim=self.head_dim,
        )

    def model(self, variant: str, r: int, width: int) -> dict:
        """Fields of the configuration of a run of `variant` and `width` at r passes."""
        own = {**self.fields, **(self.variants[variant] or {})}
        shared = self.family.fields(width, r) | {"trained_recurrences": r}
        return {**shared, **own, **({"injection": "none"} if r == 1 else {})}

    def config(self, variant: str, r: int, width: int) -> LoopedGPTConfig:
        return LoopedGPTConfig(**self.model(variant, r, width))

    def runs(self) -> list["SweepRun"]:
        """The cheapest first, and those of the baseline before those of the other variants."""
        first, found = next(iter(self.variants)), []
        for variant in self.variants:
            for cell in sorted(self.cells, key=lambda cell: cell.budget):
                for r in self.recurrences if variant == first else [r for r in self.recurrences if r > 1]:
                    found += [SweepRun(variant, cell.budget, r, width) for width in cell.widths]
        return found


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    variant: str
    budget: float
    r: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.budget:.3g}-r{self.r}-d{self.width}"

    def key(self, recipe: SweepRecipe) -> tuple:
        """What `_key` finds in the run's row."""
        return self.variant, self.budget, self.r, self.width, recipe.seed

    def training(self, recipe: SweepRecipe) -> PretrainRecipe:
        """With steps and rates written out."""
        config = recipe.config(self.variant, self.r, self.width)
        asked = {"optimizer": "muonh", "transfer": "hyperp", **recipe.training, "seed": recipe.seed}
        plain = PretrainRecipe(**asked, budget_flops=self.budget).resolved(config, config.max_position_embeddings)
        scales = {name: recipe.matrix_scale if name == "matrix_lr" else recipe.other_scale for name in RATES}
        return replace(plain, **{name: getattr(plain, name) * scales[name] for name in RATES if getattr(plain, name)})

    def values(self, recipe: SweepRecipe, packed: Path) -> dict:
        """The run's recipe file."""
        training = self.training(recipe)
        return {
            "model": {"architecture": "looped_gpt", "fields": recipe.model(self.variant, self.r, self.width)},
            "data": {**recipe.data, "packed_dir": str(packed)},
            "training": {**changed_fields(training), "total_steps": training.total_steps},
            "run": {"tracker": "none", "keep_last": 1, **recipe.run},
        }

    def row(self, recipe: SweepRecipe, loss: float, seconds: float) -> dict:
        """The columns of a finished run (those of the reference CSV of arXiv 2604.21106's figure, and a few more)."""
        config, training = recipe.config(self.variant, self.r, self.width), self.training(recipe)
        length, of_family = config.max_position_embeddings, recipe.family.columns(self.width, self.r)
        return {
            "variant": self.variant,
            "budget_flops": self.budget,
            **{name: round(value) if name.startswith("n_") else value for name, value in of_family.items()},
            # The variant's own, where its injection is another.
            "n_unique": parameter_counts(config)["unique"],
            "flops_per_token": training_flops_per_token(config, length),
            "iterations": training.total_steps,
            "tokens": training.total_steps * training.batch_size * length,
            "val_loss": loss,
            "provenance": "measured",
            "seed": recipe.seed,
            "matrix_lr": training.matrix_lr,
            "seconds": round(seconds),
        }


def read_sweep(name: str, train_data: str | None = None, validation_data: str | None = None) -> SweepRecipe:
    """A sweep's recipe from a file or a bundled name, with other texts than its own where they are named."""
    values = read_yaml(name)
    if isinstance(values, dict) and isinstance(values.get("data"), dict):
        data = dict(values["data"])
        if train_data is not None:
            data["sources"] = {"texts": {"path": train_data}}
        if validation_data is not None:
            data["validation"] = {"path": validation_data}
        values = {**values, "data": data}
    return checked(SweepRecipe, values, name)


def run_sweep(
    recipe_name: str,
    output: str | Path,
    workers: int = 1,
    limit_minutes: float | None = None,
    only: Sequence[int] = (),
    retry: bool = False,
    launcher: str = "",
    threads: int | None = None,
    train_data: str | None = None,
    validation_data: str | None = None,
    have: str | None = None,
) -> bool:
    """
    Works through the queue with `workers` runs at a time, until it is empty or `limit_minutes` are over; the same call
    continues. Several calls, also on several machines that share the folder, take different runs. Returns whether all
    runs are finished.

    Args:
        recipe_name: A YAML file, or the name of a bundled sweep.
        only: Numbers of runs as `status` has them, such as a SLURM array gives; all by default.
        retry: Failed runs too.
        launcher: A command in front of each run's `-m modeling_looped.recipes.pretrain`, such as `accelerate launch
            --num_processes 2`; this Python by default.
        threads: Of each run on a CPU; the cores divided by `workers` by default.
        train_data, validation_data: Texts in place of the recipe's.
        have: A CSV of `collect_sweep`, such as a committed one: what is in it is not run again.

    Raises:
        `ValueError`: for a recipe that cannot be run, and for an `output` that holds another sweep.
    """
    output = Path(output)
    recipe = _claim(read_sweep(recipe_name, train_data, validation_data), output)
    runs = recipe.runs()
    for number in only:
        if number not in range(len(runs)):
            raise ValueError(f"--only {number}: the sweep has the runs 0 to {len(runs) - 1}.")
    chosen = [runs[number] for number in only] or runs
    packed = _pack(recipe, output)
    deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
    threads = threads or max(1, (os.cpu_count() or 1) // workers)
    known = set() if have is None else set(_read_rows(Path(have)))
    runs = [run for run in runs if run.key(recipe) not in known]
    queue = iter([run for run in runs if run in chosen])
    taking = threading.Lock()

    def work() -> None:
        while deadline is None or time.monotonic() < deadline:
            with taking:
                run = next(queue, None)
            if run is None:
                return
            _one(recipe, run, output, packed, deadline, retry, launcher, threads)

    crew = [threading.Thread(target=work) for _ in range(workers)]
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    return all((output / "runs" / run.name / RESULT).is_file() for run in runs)


def _claim(recipe: SweepRecipe, output: Path) -> SweepRecipe:
    """Keeps the recipe in `output`: a sweep is one recipe."""
    kept, text = output / SWEEP, as_yaml(_plain(recipe))
    if kept.is_file() and kept.read_text() != text:
        raise ValueError(
            f"{output} holds a sweep of another recipe, {kept}: choose another folder, or go on with that file."
        )
    if not kept.is_file() and output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty and holds no sweep: choose a new folder.")
    output.mkdir(parents=True, exist_ok=True)
    kept.write_text(text)
    return recipe


def _plain(recipe: SweepRecipe) -> dict:
    return json.loads(json.dumps(asdict(recipe)))


def _pack(recipe: SweepRecipe, output: Path) -> Path:
    """Tokenizer and rows, made once for all runs."""
    packed = output / "data"
    with FileLock(output / "data.lock"):
        if not (packed / "done").is_file():
            packed.mkdir(exist_ok=True)
            first = recipe.runs()[0]
            values = {**first.values(recipe, packed), "data": dict(recipe.data)}
            (packed / RECIPE).write_text(as_yaml(values))
            arguments = ["--config", str(packed / RECIPE), "--output_dir", str(packed)]
            _call([sys.executable, "-m", "modeling_looped.recipes.pack", *arguments])
            (packed / "done").touch()
    return packed.absolute()


def _call(command: Sequence[str], log: Path | None = None, **environment: str) -> str:
    """
    Runs a command to its end. Returns what it printed. Where it fails, its last words are a `ValueError` if it ended with
    2, as for recipes that cannot be run, and a `RuntimeError` otherwise.
    """
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}"
        raise (ValueError if done.returncode == 2 else RuntimeError)(said.splitlines()[-1])
    return done.stdout


def _one(recipe, run: SweepRun, output: Path, packed: Path, deadline, retry: bool, launcher: str, threads: int) -> None:
    """Trains one run, unless it is finished, has failed, or another worker has it."""
    folder = output / "runs" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            if (folder / RESULT).is_file() or ((folder / FAILURE).is_file() and not retry):
                return
            (folder / FAILURE).unlink(missing_ok=True)
            (folder / RECIPE).write_text(as_yaml(run.values(recipe, packed)))
            command = [*(shlex.split(launcher) or [sys.executable]), "-m", "modeling_looped.recipes.pretrain"]
            command += ["--config", str(folder / RECIPE), "--output_dir", str(folder / "run"), "--resume", "auto"]
            if deadline is not None:
                command += ["--limit_minutes", f"{max(0.05, (deadline - time.monotonic()) / 60):.2f}"]
            began = time.monotonic()
            try:
                _call(command, folder / "log.txt", OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false")
            except (ValueError, RuntimeError) as error:
                (folder / FAILURE).write_text(f"{error}\n")
                print(f"{run.name}: failed ({error})", flush=True)
                return
            _finish(recipe, run, folder, time.monotonic() - began)
    except Timeout:
        return


def _finish(recipe: SweepRecipe, run: SweepRun, folder: Path, seconds: float) -> None:
    """Writes the result, if the run came to its end."""
    spent = folder / "seconds.json"
    seconds += json.loads(spent.read_text()) if spent.is_file() else 0.0
    spent.write_text(json.dumps(seconds))
    checkpoint = newest_checkpoint(folder / "run")
    progress = None if checkpoint is None else read_progress(checkpoint)
    if progress is None or progress["step"] < run.training(recipe).total_steps:
        print(f"{run.name}: stopped, to be continued", flush=True)
        return
    row = run.row(recipe, progress["validation_nats"], seconds)
    aside = folder / f"{RESULT}.writing"
    aside.write_text(json.dumps({**row, "versions": versions()}, indent=2) + "\n")
    os.replace(aside, folder / RESULT)
    print(f"{run.name}: {row['val_loss']:.4f} nats after {row['iterations']:,} steps, {row['seconds']} s", flush=True)


def _kept(output: str | Path) -> tuple[SweepRecipe, Path]:
    output = Path(output)
    if not (output / SWEEP).is_file():
        raise ValueError(f"{output} holds no sweep: looped sweep run RECIPE {output} begins one.")
    return read_sweep(str(output / SWEEP)), output


def sweep_figures(output: str | Path) -> dict:
    """
    `runs`, what each has come to: a `state` of finished, running, failed, stopped or waiting, and its row, reason or
    step; and what is left, `left_flops` and `left_worker_hours`, the latter None before the first run is finished.
    """
    recipe, output = _kept(output)
    runs, left, done, seconds = [], 0.0, 0.0, 0.0
    for number, run in enumerate(recipe.runs()):
        folder = output / "runs" / run.name
        row = {"number": number, "name": run.name, "state": "waiting", "budget_flops": run.budget}
        if (folder / RESULT).is_file():
            result = json.loads((folder / RESULT).read_text())
            done, seconds = done + run.budget, seconds + result["seconds"]
            row |= {"state": "finished", "val_loss": result["val_loss"], "seconds": result["seconds"]}
        else:
            left += run.budget
            checkpoint = newest_checkpoint(folder / "run")
            if (folder / FAILURE).is_file():
                row |= {"state": "failed", "reason": (folder / FAILURE).read_text().strip()}
            elif _locked(folder / LOCK):
                row["state"] = "running"
            elif checkpoint is not None:
                row |= {"state": "stopped", "step": read_progress(checkpoint)["step"]}
        runs.append(row)
    hours = left * seconds / done / 3600 if done and seconds else None
    return {"runs": runs, "left_flops": left, "left_worker_hours": hours}


def sweep_status(output: str | Path) -> str:
    """`sweep_figures` as text: a line for each run, and what is left to do."""
    figures = sweep_figures(output)
    words = {
        "finished": "{val_loss:.4f} nats, {seconds} s",
        "failed": "failed: {reason}",
        "stopped": "stopped at step {step}",
    }
    lines = [
        f"{run['number']:4d}  {run['name']:<40} {words.get(run['state'], run['state']).format(**run)}"
        for run in figures["runs"]
    ]
    left, hours = figures["left_flops"], figures["left_worker_hours"]
    rest = f"{left:.3g} FLOPs are left" + (f", {hours:.1f} h of one worker" if hours and left else "")
    return "\n".join([*lines, rest])


def failed_runs(output: str | Path, only: Sequence[int] = (), have: str | None = None) -> list[str]:
    """Names of the runs that failed and were not run again since, of those that `run_sweep` was asked for."""
    recipe, output = _kept(output)
    known = set() if have is None else set(_read_rows(Path(have)))
    asked = [run for number, run in enumerate(recipe.runs()) if not only or number in only]
    folders = {run.name: output / "runs" / run.name for run in asked if run.key(recipe) not in known}
    return [name for name, at in folders.items() if (at / FAILURE).is_file() and not (at / RESULT).is_file()]


def _locked(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def sweep_rows(output: str | Path) -> Iterator[dict]:
    """The finished runs, in the order of the queue."""
    recipe, output = _kept(output)
    for run in recipe.runs():
        path = output / "runs" / run.name / RESULT
        if path.is_file():
            yield json.loads(path.read_text())


def collect_sweep(output: str | Path, destination: str | Path) -> int:
    """
    Writes the finished runs to `destination`, a CSV that `looped phi` reads. Rows of a file that is there stay, unless
    the sweep has the same run (variant, budget, r, width, seed) anew. Returns how many rows the file has.

    Raises:
        `ValueError`: where no run is finished, or the file has other columns.
    """
    rows = [{name: row[name] for name in COLUMNS} for row in sweep_rows(output)]
    if not rows:
        raise ValueError(f"{output}: no run is finished yet; looped sweep status {output} says how far they are.")
    destination = Path(destination)

    known = _read_rows(destination) if destination.is_file() else {}
    known |= {_key(row): row for row in rows}
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = destination.with_name(f".{destination.name}.writing")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(known.values())
    os.replace(aside, destination)
    return len(known)


def _read_rows(path: Path) -> dict[tuple, dict]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file: name a CSV of looped sweep collect.")
    with path.open(newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than a sweep's: choose another file.")
        return {_key(row): row for row in reader}


def _key(row: dict) -> tuple:
    return row["variant"], float(row["budget_flops"]), int(row["r"]), int(row["d_model"]), int(row["seed"])


def slurm_array(
    recipe_name: str, output: str | Path, train_data: str | None = None, validation_data: str | None = None
) -> str:
    """A batch script with a task for each run; sbatch's own options (partition, time, devices) go before its name."""
    count = len(read_sweep(recipe_name, train_data, validation_data).runs())
    named = {"--train-data": train_data, "--validation-data": validation_data}
    texts = [part for option, value in named.items() if value is not None for part in (option, value)]
    command = shlex.join(["looped", "sweep", "run", recipe_name, str(output), *texts])
    return (
        f"#!/bin/bash\n#SBATCH --job-name=looped-sweep\n#SBATCH --array=0-{count - 1}\nset -euo pipefail\n"
        f'{command} --only "$SLURM_ARRAY_TASK_ID"\n'
    )
