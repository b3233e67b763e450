"""
`looped compare`: systems that reuse layers against the dense model that they are sized after, trained alike on the
same tokens (sections 8 and 13 of arXiv 2608.15062's specification), one CSV row a run, and one figure.
"""

import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, set_seed

from modeling_looped import MixtureOfRecursionsConfig, RecurrentGPTConfig
from modeling_looped.accounting import training_flops_per_token
from modeling_looped.eval.exit_curve import exit_curve

from .demo import prepare_data, training_figures
from .pretrain import PretrainRecipe, pretrain
from .recipe import hint
from .study import append_row, changed_fields, fingerprint, read_rows, read_study, study_texts
from .versions import versions
from .tokens import TokenRows, token_stream


SYSTEMS = {
    "dense": "dense",
    "recurrent_gpt": "RecurrentGPT",
    "heavy_tail": "heavy-tail\n(Huginn-style)",
    "mixture_of_recursions": "Mixture-of-\nRecursions",
}
MATCHINGS = {"steps": ("equal optimizer steps", "#1f5fa8"), "flops": ("equal training FLOPs", "#c4622d")}
COLUMNS = (
    "system", "cell", "matching", "seed", "steps", "tokens", "parameters", "unique_layers", "effective_layers",
    "training_flops", "realised_training_flops", "recurrences", "validation_tokens", "nats_per_token",
    "losses_by_recurrence", "seconds", "settings", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """The layers of a cell's looped systems."""

    num_prelude_layers: int
    num_core_layers: int
    num_coda_layers: int
    num_recurrences: int


@dataclass(frozen=True)
class ModelSize:
    """What all systems share; `vocab_size` is that of the tokenizer that is trained, at most."""

    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_dense_layers: int


@dataclass(frozen=True)
class CompareRecipe:
    """A comparison; `training` is that of the dense model, and of all systems at matching `steps`."""

    train_data: str
    validation_data: str
    validation_tokens: int
    results: str
    figure: str
    model: ModelSize
    cells: dict
    training: PretrainRecipe
    systems: list = field(default_factory=lambda: list(SYSTEMS))
    matchings: list = field(default_factory=lambda: list(MATCHINGS))
    seeds: list = field(default_factory=lambda: [0, 1, 2])

    def __post_init__(self):
        for name, choices in (("systems", SYSTEMS), ("matchings", MATCHINGS)):
            for value in getattr(self, name):
                if value not in choices:
                    raise ValueError(f"{name}: there is no {value!r}{hint(value, choices)}")
        for seed in self.seeds:
            if not isinstance(seed, int):
                raise ValueError(f"seeds: {seed!r} must be a whole number.")
        if self.validation_tokens <= self.model.max_position_embeddings:
            raise ValueError(
                f"validation_tokens={self.validation_tokens} must be more than max_position_embeddings="
                f"{self.model.max_position_embeddings}: give the validation a row at least."
            )


@dataclass(frozen=True)
class Run:
    """One training of the comparison. The dense one belongs to every cell and matching."""

    system: str
    cell: str
    matching: str
    seed: int
    config: PreTrainedConfig
    recipe: PretrainRecipe

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.system, self.cell, self.matching, str(self.seed)

    def flops_of_depth(self) -> dict[int, int]:
        """Training FLOPs per token at each depth that the law may draw."""
        law = self.recipe.depth_sampler(self.config).law
        return {depth: training_flops_per_token(self.config, num_recurrences=depth) for depth in law}

    def expected_flops_per_token(self) -> float:
        """Mean over the law of depths."""
        law, flops = self.recipe.depth_sampler(self.config).law, self.flops_of_depth()
        return sum(share * flops[depth] for depth, share in law.items())

    def realised_flops(self) -> int:
        """Training FLOPs of the depths that this run draws."""
        sampler, flops, recipe = self.recipe.depth_sampler(self.config), self.flops_of_depth(), self.recipe
        steps = range(recipe.total_steps)
        drawn = (sampler.draw(recipe.seed, step, micro) for step in steps for micro in range(recipe.micro_steps))
        return sum(flops[depth] for depth in drawn) * self.tokens // (recipe.total_steps * recipe.micro_steps)

    @property
    def tokens(self) -> int:
        return self.recipe.total_steps * self.recipe.batch_size * self.config.max_position_embeddings


def compare(
    recipe: str,
    output_dir: str,
    train_data: str | None = None,
    validation_data: str | None = None,
    limit_minutes: float | None = None,
    plot_only: bool = False,
    progress: bool = True,
) -> bool:
    """
    Trains what `recipe`, a YAML file or the name of one in this folder, asks for and its CSV does not hold yet, with
    checkpoints in `output_dir`, then draws the figure. Ends between two steps after `limit_minutes`; the same call
    continues. Returns whether every run has its row.

    Raises:
        `ValueError`: for a recipe that does not fit, or a CSV with rows of other settings.
    """
    began = time.monotonic()
    recipe = read_recipe(recipe)
    results, output = Path(recipe.results), Path(output_dir)
    if plot_only:
        plot(recipe, read_rows(results))
        print(table(read_rows(results)))
        return True
    train_texts, validation_texts = study_texts(recipe, train_data, validation_data)
    size = recipe.model.vocab_size
    tokenizer, train = prepare_data(output / f"vocabulary-{size}", train_texts, size)
    validation = token_stream(tokenizer, validation_texts)[: recipe.validation_tokens]
    settings = _fingerprint(recipe, train, validation)
    finished = True
    for run in planned_runs(recipe, tokenizer):
        rows = read_rows(results)
        other = {row["settings"] for row in rows} - {settings}
        if other:
            raise ValueError(f"{results} holds rows of other settings or data: name another file as results.")
        if run.key in {(row["system"], row["cell"], row["matching"], row["seed"]) for row in rows}:
            continue
        left = None if limit_minutes is None else limit_minutes * 60 - (time.monotonic() - began)
        if left is not None and left <= 0:
            finished = False
            break
        print(f"{', '.join(run.key)}: {run.recipe.total_steps:,} steps", flush=True)
        row = _train(run, train, validation, tokenizer, output / settings / "-".join(run.key), progress, left)
        if row is None:
            finished = False
            break
        append_row(results, COLUMNS, {**row, "settings": settings})
        print(f"  {row['nats_per_token']:.4f} nats/token in {row['seconds']} s", flush=True)
    if rows := read_rows(results):
        plot(recipe, rows)
        print(table(rows))
    print(f"{results} {'is complete' if finished else 'is not complete: run the same command to continue'}.")
    return finished


def read_recipe(name: str) -> CompareRecipe:
    """The checked recipe of a file, or of a name without suffix in `modeling_looped.recipes`."""
    return read_study(name, CompareRecipe, ModelSize, ("cells", Loop), {"seed", "depth_scheme", "depth_mean"})


def planned_runs(recipe: CompareRecipe, tokenizer) -> list[Run]:
    """All runs, seed after seed, so that a comparison that is stopped has whole seeds. The dense model comes first."""
    dense = _run(recipe, tokenizer, "dense", next(iter(recipe.cells)), 0)
    budget = dense.expected_flops_per_token() * recipe.training.total_steps
    runs = []
    for seed in recipe.seeds:
        if "dense" in recipe.systems:
            seeded = replace(dense.recipe, seed=seed)
            runs.append(replace(dense, cell="all", matching="all", seed=seed, recipe=seeded))
        for cell in recipe.cells:
            for system in recipe.systems:
                if system == "dense":
                    continue
                run = _run(recipe, tokenizer, system, cell, seed)
                for matching in recipe.matchings:
                    steps = recipe.training.total_steps
                    if matching == "flops":
                        steps = max(1, round(budget / run.expected_flops_per_token()))
                    # The schedule keeps its shape: the warm-up is scaled with the length.
                    warmup = round(recipe.training.warmup_steps * steps / recipe.training.total_steps)
                    scaled = replace(run.recipe, total_steps=steps, warmup_steps=warmup)
                    runs.append(replace(run, matching=matching, recipe=scaled))
    return runs


def _run(recipe: CompareRecipe, tokenizer, system: str, cell: str, seed: int) -> Run:
    """The run of `system` at matching `steps`."""
    loop = recipe.cells[cell]
    looped = RecurrentGPTConfig(
        **{**asdict(recipe.model), "vocab_size": len(tokenizer)},
        **asdict(loop),
        trained_recurrences=loop.num_recurrences,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config, scheme, mean = {
        "dense": lambda: (looped.dense_twin(), "fixed", None),
        "recurrent_gpt": lambda: (looped, "uniform", None),
        "heavy_tail": lambda: (looped.heavy_tail_twin(), "poisson-lognormal", float(loop.num_recurrences)),
        "mixture_of_recursions": lambda: (MixtureOfRecursionsConfig.twin_of(looped), "fixed", None),
    }[system]()
    training = replace(recipe.training, seed=seed, depth_scheme=scheme, depth_mean=mean)
    return Run(system, cell, "steps", seed, config, training)


def _train(
    run: Run, train, validation, tokenizer, folder: Path, progress: bool, limit_seconds: float | None
) -> dict | None:
    """The run's row of the CSV, or `None` where it was stopped before its last step."""
    set_seed(run.seed)
    model = AutoModelForCausalLM.from_config(run.config)
    rows = TokenRows(train, run.config.max_position_embeddings, run.seed)
    began = time.perf_counter()
    result = pretrain(model, rows, run.recipe, folder, tokenizer, progress, limit_seconds)
    figures = training_figures(folder, result, time.perf_counter() - began)
    if not result.finished:
        return None
    length = run.config.max_position_embeddings
    windows = torch.from_numpy(validation[: len(validation) // length * length].astype("int64")).view(-1, length)
    most = None if run.system == "dense" else run.config.trained_recurrences
    points = exit_curve(model, windows.split(8), most)
    plan, depth = run.config.plan(), run.config.num_recurrences
    return {
        **dict(zip(COLUMNS, run.key)),
        "steps": run.recipe.total_steps,
        "tokens": run.tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "unique_layers": plan.unique_layers,
        "effective_layers": plan.effective_depth,
        "training_flops": round(run.expected_flops_per_token() * run.tokens),
        "realised_training_flops": run.realised_flops(),
        "recurrences": depth,
        "validation_tokens": windows[:, 1:].numel(),
        "nats_per_token": next(point.loss for point in points if point.num_recurrences == depth),
        "losses_by_recurrence": " ".join(f"{point.num_recurrences}:{point.loss:.4f}" for point in points),
        "seconds": figures["seconds"],
        "versions": versions(),
    }


def _fingerprint(recipe: CompareRecipe, train, validation) -> str:
    """Of everything that a row depends on and that its own columns do not say."""
    shared = {"model": asdict(recipe.model), "cells": {c: asdict(loop) for c, loop in recipe.cells.items()}}
    return fingerprint({**shared, "training": changed_fields(recipe.training)}, train, validation)


def summary(recipe: str) -> dict:
    """The files of a comparison, and what `table` says of its rows so far."""
    checked = read_recipe(recipe)
    rows = figures(read_rows(Path(checked.results)))
    return {"results": checked.results, "figure": checked.figure if rows else None, "rows": rows}


def figures(rows: list[dict[str, str]]) -> list[dict]:
    """Mean and standard deviation over seeds of each system, cell and matching."""
    groups: dict[tuple, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["matching"], row["system"]), []).append(row)
    found = []
    for (cell, matching, system), runs in groups.items():
        losses = [float(run["nats_per_token"]) for run in runs]
        found.append(
            {
                "cell": cell,
                "matching": matching,
                "system": system,
                **{name: int(runs[0][name]) for name in ("parameters", "steps", "training_flops")},
                "nats_per_token": statistics.mean(losses),
                "sd": statistics.stdev(losses) if len(losses) > 1 else None,
                "seeds": len(losses),
            }
        )
    return found


def table(rows: list[dict[str, str]]) -> str:
    """`figures` as Markdown."""
    lines = ["| cell | matched by | system | parameters | steps | TFLOP | nats/token | sd | seeds |", "|---" * 9 + "|"]
    for row in figures(rows):
        deviation = "" if row["sd"] is None else f"{row['sd']:.3f}"
        lines.append(
            f"| {row['cell']} | {row['matching']} | {row['system']} | {row['parameters']:,} | {row['steps']} "
            f"| {row['training_flops'] / 1e12:.2f} | {row['nats_per_token']:.3f} | {deviation} | {row['seeds']} |"
        )
    return "\n".join(lines)


def plot(recipe: CompareRecipe, rows: list[dict[str, str]]) -> None:
    """A panel for each cell: seeds as dots, their mean as a bar, the dense mean as a line through both panels."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not rows:
        raise ValueError(f"{recipe.results} has no rows to plot: run the comparison first.")
    figure, panels = plt.subplots(
        1, len(recipe.cells), figsize=(5.2 * len(recipe.cells), 4.6), sharey=True, layout="constrained", squeeze=False
    )
    dense = [float(row["nats_per_token"]) for row in rows if row["system"] == "dense"]
    for axes, (cell, loop) in zip(panels[0], recipe.cells.items()):
        labels = []
        for position, system in enumerate(recipe.systems):
            here = [row for row in rows if row["system"] == system and row["cell"] in (cell, "all")]
            labels.append(SYSTEMS[system] + (f"\n{int(here[0]['parameters']) / 1e3:,.0f} k weights" if here else ""))
            for side, matching in ((0, "all"), (-0.2, "steps"), (0.2, "flops")):
                losses = [float(row["nats_per_token"]) for row in here if row["matching"] == matching]
                if not losses:
                    continue
                colour = MATCHINGS[matching][1] if matching in MATCHINGS else "0.25"
                x, mean = position + side, sum(losses) / len(losses)
                spots = [x + 0.06 * (i - (len(losses) - 1) / 2) for i in range(len(losses))]
                axes.hlines(mean, x - 0.16, x + 0.16, color=colour, linewidth=2.5)
                axes.plot(spots, losses, "o", color=colour, markersize=4, alpha=0.6, markeredgewidth=0)
                axes.annotate(f"{mean:.3f}", (x, max(losses)), (0, 6), textcoords="offset points", ha="center",
                              fontsize=8, color=colour)  # fmt: skip
        if dense:
            axes.axhline(sum(dense) / len(dense), color="0.75", linewidth=1, linestyle="--", zorder=0)
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.margins(y=0.15)
        shape = f"{loop.num_prelude_layers}-{loop.num_core_layers}x{loop.num_recurrences}-{loop.num_coda_layers}"
        axes.set_title(f"{cell}: Loop({shape}) against {recipe.model.num_dense_layers} dense layers", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    panels[0][0].set_ylabel("validation loss (nats per token), lower is better")
    handles = [plt.Line2D([], [], color=colour, linewidth=2.5, label=label) for label, colour in MATCHINGS.values()]
    seeds = plt.Line2D([], [], color="0.4", marker="o", linestyle="", markersize=4, label="one seed (bar: mean)")
    figure.legend(handles=[*handles, seeds], loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    path = Path(recipe.figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
