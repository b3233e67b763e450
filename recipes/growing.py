"""
`looped compare grow_toy`: grown, looped and plain stacks of equal width, trained alike on the same tokens (arXiv
2602.16490 at toy scale), one CSV row a run; then each stack with a block that runs again, without training.
"""

import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from modeling_looped import DepthPlan, GrownLlamaConfig
from modeling_looped.accounting import grown_training_flops
from modeling_looped.looping import loop

from .demo import prepare_data, training_figures
from .metrics import read_losses
from .pretrain import PretrainRecipe, newest_checkpoint, pretrain
from .study import append_row, changed_fields, fingerprint, read_rows, read_study, study_texts
from .versions import versions
from .tokens import TokenRows, token_stream


COLUMNS = (
    "system", "seed", "steps", "tokens", "parameters", "unique_layers", "executed_layers", "training_flops",
    "grows_after", "validation_tokens", "nats_per_token", "training_curve", "seconds", "settings", "versions",
)  # fmt: skip
REPEAT_COLUMNS = ("system", "seed", "start", "stop", "repeats", "tokens", "nats_per_token", "settings")
CURVE_STEPS = 10  # training losses are recorded as means of so many steps


@dataclass(frozen=True)
class StackSize:
    """What all stacks share; `vocab_size` is that of the tokenizer that is trained, at most."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class Stack:
    """One system: the plan that it ends with, and how it gets there."""

    depth_plan: str
    growth_operator: str | None = None


@dataclass(frozen=True)
class GrowingRecipe:
    """The study; `training` is that of every system."""

    study: str
    train_data: str
    validation_data: str
    validation_tokens: int
    repeat_tokens: int
    repeat_block: int
    repeats: list
    results: str
    repeat_results: str
    figure: str
    repeat_figure: str
    model: StackSize
    systems: dict
    training: PretrainRecipe
    seeds: list = field(default_factory=lambda: [0, 1])


@dataclass(frozen=True)
class Run:
    """One training of the study."""

    system: str
    seed: int
    config: GrownLlamaConfig
    recipe: PretrainRecipe

    @property
    def key(self) -> tuple[str, str]:
        return self.system, str(self.seed)

    @property
    def tokens(self) -> int:
        return self.recipe.total_steps * self.recipe.batch_size * self.config.max_position_embeddings

    @property
    def training_flops(self) -> int:
        """In the paper's convention (section 4.3 of its specification), stage by stage where the stack grows."""
        budgets = self.recipe.growth_budgets(self.config.num_hidden_layers)
        per_step = self.recipe.batch_size * self.config.max_position_embeddings
        return grown_training_flops(
            self.config, budgets, self.recipe.growth_block_size, self.recipe.total_steps, per_step
        )


def growing(
    name: str,
    output_dir: str,
    train_data: str | None = None,
    validation_data: str | None = None,
    limit_minutes: float | None = None,
    plot_only: bool = False,
    progress: bool = True,
    systems: list[str] | None = None,
    seeds: list[int] | None = None,
) -> bool:
    """
    Trains what the recipe `name` asks for and its CSV does not hold yet, then draws the figures. Ends between two
    steps after `limit_minutes`; the same call continues. Returns whether every run has its row and its checkpoint.

    Args:
        systems: Names of the recipe's systems, all by default.
        seeds: Instead of the recipe's.
    """
    began = time.monotonic()
    recipe = read_recipe(name)
    results, output = Path(recipe.results), Path(output_dir)
    if plot_only:
        _report(recipe)
        return True
    unknown = sorted(set(systems or ()) - set(recipe.systems))
    if unknown:
        raise ValueError(f"systems: there is no {unknown[0]!r}; there are {', '.join(recipe.systems)}.")
    texts, validation_texts = study_texts(recipe, train_data, validation_data)
    tokenizer, train = prepare_data(output / f"vocabulary-{recipe.model.vocab_size}", texts, recipe.model.vocab_size)
    validation = token_stream(tokenizer, validation_texts)[: recipe.validation_tokens]
    shared = {"model": asdict(recipe.model), "training": changed_fields(recipe.training)}
    settings = fingerprint({**shared, "repeat": [recipe.repeat_block, recipe.repeats]}, train, validation)
    finished = True
    for run in planned_runs(recipe, tokenizer, systems, seeds):
        rows = read_rows(results)
        if {row["settings"] for row in rows} - {settings}:
            raise ValueError(f"{results} holds rows of other settings or data: name another file as results.")
        folder = output / settings / "-".join(run.key)
        checkpoint = newest_checkpoint(folder)
        is_trained = checkpoint is not None and checkpoint.name == f"step-{run.recipe.total_steps}"
        has_row = run.key in {(row["system"], row["seed"]) for row in rows}
        if is_trained and has_row:
            continue
        left = None if limit_minutes is None else limit_minutes * 60 - (time.monotonic() - began)
        if left is not None and left <= 0:
            finished = False
            break
        print(f"{', '.join(run.key)}: {run.recipe.total_steps:,} steps", flush=True)
        set_seed(run.seed)
        model = AutoModelForCausalLM.from_config(run.config)
        data = TokenRows(train, run.config.max_position_embeddings, run.seed)
        started = time.perf_counter()
        result = pretrain(model, data, run.recipe, folder, tokenizer, progress, left)
        figures = training_figures(folder, result, time.perf_counter() - started)
        curve = read_losses(folder)
        if not result.finished:
            finished = False
            break
        if has_row:  # only the checkpoint was missing
            continue
        model.eval()
        windows = _windows(validation, run.config.max_position_embeddings)
        row = {
            "system": run.system,
            "seed": run.seed,
            "steps": run.recipe.total_steps,
            "tokens": run.tokens,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "unique_layers": run.config.plan().unique_layers,
            "executed_layers": run.config.num_hidden_layers,
            "training_flops": run.training_flops,
            "grows_after": " ".join(map(str, run.recipe.growth_steps(run.config))),
            "validation_tokens": windows[:, 1:].numel(),
            "nats_per_token": mean_loss(model, windows),
            "training_curve": " ".join(f"{loss:.4f}" for loss in _means(curve)),
            "seconds": figures["seconds"],
            "settings": settings,
            "versions": versions(),
        }
        for repeated in _repeat_rows(recipe, model, validation):
            repeated = {**row, **repeated}
            append_row(Path(recipe.repeat_results), REPEAT_COLUMNS, {name: repeated[name] for name in REPEAT_COLUMNS})
        append_row(results, COLUMNS, row)  # last: a run with a row is a run that is complete
        print(f"  {row['nats_per_token']:.4f} nats/token in {row['seconds']} s", flush=True)
    if read_rows(results):
        _report(recipe)
    print(f"{results} {'is complete' if finished else 'is not complete: run the same command to continue'}.")
    return finished


def read_recipe(name: str) -> GrowingRecipe:
    """The checked recipe of a file, or of a name without suffix in `modeling_looped.recipes`."""
    return read_study(name, GrowingRecipe, StackSize, ("systems", Stack), {"seed", "growth_operator"})


def planned_runs(
    recipe: GrowingRecipe, tokenizer, systems: list[str] | None = None, seeds: list[int] | None = None
) -> list[Run]:
    """All runs, seed after seed, so that a study that is stopped has whole seeds."""
    runs = []
    for seed in recipe.seeds if seeds is None else seeds:
        for system, stack in recipe.systems.items():
            if systems and system not in systems:
                continue
            config = GrownLlamaConfig(
                **{**asdict(recipe.model), "vocab_size": len(tokenizer)},
                depth_plan=stack.depth_plan,
                tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            runs.append(
                Run(system, seed, config, replace(recipe.training, seed=seed, growth_operator=stack.growth_operator))
            )
    return runs


@torch.no_grad()
def mean_loss(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Nats per token of (rows, length) tokens, each predicted from those before it in its row."""
    total = sum(model(rows, labels=rows, use_cache=False).loss.item() * len(rows) for rows in windows.split(8))
    return total / len(windows)


def _repeat_rows(recipe: GrowingRecipe, model: PreTrainedModel, validation) -> list[dict]:
    """A block that runs again: at every start in a stack without loops, the looped block in one with."""
    windows = _windows(validation[: recipe.repeat_tokens], model.config.max_position_embeddings)
    prelude, core, recurrences, _ = model.config.plan().sections
    depth, block = model.config.num_unique_layers, recipe.repeat_block
    blocks = [(s, s + block) for s in range(depth - block + 1)] if recurrences == 1 else [(prelude, prelude + core)]
    rows = [{"start": "", "stop": "", "repeats": 0, "nats_per_token": mean_loss(model, windows)}]
    for start, stop in blocks:
        for repeats in recipe.repeats:
            with loop(model, start, stop, repeats):
                loss = mean_loss(model, windows)
            rows.append({"start": start, "stop": stop, "repeats": repeats, "nats_per_token": loss})
    return [{**row, "tokens": windows[:, 1:].numel()} for row in rows]


def _windows(stream, length: int) -> torch.Tensor:
    return torch.from_numpy(stream[: len(stream) // length * length].astype("int64")).view(-1, length)


def _means(losses: list[float]) -> list[float]:
    return [statistics.mean(losses[i : i + CURVE_STEPS]) for i in range(0, len(losses), CURVE_STEPS)]


def summary(name: str) -> dict:
    """The files of a study, and what `table` and `repeat_table` say of its rows so far."""
    recipe = read_recipe(name)
    rows, repeated = (read_rows(Path(path)) for path in (recipe.results, recipe.repeat_results))
    drawn = [recipe.figure, recipe.repeat_figure] if rows else []
    files = {"results": recipe.results, "repeat_results": recipe.repeat_results, "figures": drawn}
    return {**files, "rows": figures(rows), "repeats": repeat_figures(repeated)}


def figures(rows: list[dict[str, str]]) -> list[dict]:
    """Each system's size, cost and loss, over seeds."""
    found = []
    for system, runs in _by_system(rows).items():
        losses = [float(run["nats_per_token"]) for run in runs]
        sizes = {
            name: int(runs[0][name]) for name in ("unique_layers", "executed_layers", "parameters", "training_flops")
        }
        found.append(
            {
                "system": system,
                **sizes,
                "nats_per_token": statistics.mean(losses),
                "by_seed": {run["seed"]: loss for run, loss in zip(runs, losses)},
            }
        )
    return found


def table(rows: list[dict[str, str]]) -> str:
    """`figures` as Markdown."""
    lines = [
        "| system | unique / executed layers | parameters | training TFLOP | nats/token | by seed |",
        "|---" * 6 + "|",
    ]
    for row in figures(rows):
        lines.append(
            f"| {row['system']} | {row['unique_layers']} / {row['executed_layers']} | {row['parameters']:,} "
            f"| {row['training_flops'] / 1e12:.2f} | {row['nats_per_token']:.3f} "
            f"| {', '.join(f'{loss:.3f}' for loss in row['by_seed'].values())} |"
        )
    return "\n".join(lines)


def repeat_figures(rows: list[dict[str, str]]) -> list[dict]:
    """What a repeated block changes, against the same model without: best, mean and worst over starts and seeds."""
    found = []
    for (system, repeats), changes in _changes(rows).items():
        means = {start: statistics.mean(values) for start, values in changes.items()}
        best, worst = min(means, key=means.get), max(means, key=means.get)
        found.append(
            {
                "system": system,
                "repeats": repeats,
                "best": means[best],
                "best_start": best,
                "mean": statistics.mean(means.values()),
                "worst": means[worst],
                "worst_start": worst,
            }
        )
    return found


def repeat_table(rows: list[dict[str, str]]) -> str:
    """`repeat_figures` as Markdown."""
    lines = ["| system | repeats | best (start) | mean | worst (start) |", "|---" * 5 + "|"]
    for row in repeat_figures(rows):
        lines.append(
            f"| {row['system']} | +{row['repeats']} | {row['best']:+.4f} ({row['best_start']}) | {row['mean']:+.4f} "
            f"| {row['worst']:+.4f} ({row['worst_start']}) |"
        )
    return "\n".join(lines)


def _by_system(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    systems: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        systems.setdefault(row["system"], []).append(row)
    return systems


def _changes(rows: list[dict[str, str]]) -> dict[tuple[str, int], dict[int, list[float]]]:
    """By system and repeats, then by start: the change in loss in each seed."""
    plain = {(row["system"], row["seed"]): float(row["nats_per_token"]) for row in rows if row["repeats"] == "0"}
    changes: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows:
        if row["repeats"] != "0":
            change = float(row["nats_per_token"]) - plain[row["system"], row["seed"]]
            by_start = changes.setdefault((row["system"], int(row["repeats"])), {})
            by_start.setdefault(int(row["start"]), []).append(change)
    return changes


def _report(recipe: GrowingRecipe) -> None:
    rows, repeated = read_rows(Path(recipe.results)), read_rows(Path(recipe.repeat_results))
    if not rows:
        raise ValueError(f"{recipe.results} has no rows to plot: run the study first.")
    _plot(recipe, rows)
    _plot_repeats(recipe, repeated)
    print(f"{table(rows)}\n\n{repeat_table(repeated)}")


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _colours(recipe: GrowingRecipe) -> dict:
    return dict(zip(recipe.systems, ("0.15", "#c4622d", "#1f5fa8", "#3a8f5c", "#8a5bb5", "#b0a030", "#b3627f")))


def _plot(recipe: GrowingRecipe, rows: list[dict[str, str]]) -> None:
    """Training loss over steps with the growths marked, and held-out loss over training FLOPs."""
    plt, colours = _pyplot(), _colours(recipe)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=(3, 2))
    for system, runs in _by_system(rows).items():
        curves = [list(map(float, run["training_curve"].split())) for run in runs]
        mean = [statistics.mean(points) for points in zip(*curves)]
        left.plot(
            [CURVE_STEPS * (i + 0.5) for i in range(len(mean))],
            mean,
            color=colours[system],
            label=system,
            linewidth=1.4,
        )
        for run in runs:
            x, y = int(run["training_flops"]) / 1e12, float(run["nats_per_token"])
            right.plot(x, y, "o", color=colours[system], markersize=5, alpha=0.8, markeredgewidth=0)
        last = runs[-1]
        right.annotate(system, (int(last["training_flops"]) / 1e12, float(last["nats_per_token"])), (6, 3),
                       textcoords="offset points", fontsize=8, color=colours[system])  # fmt: skip
    growths = next((row["grows_after"] for row in rows if row["grows_after"]), "")
    for step in map(int, growths.split()):
        left.axvline(step, color="0.75", linewidth=0.8, linestyle=":", zorder=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.set(
        xlabel="optimizer step (dotted: MIDAS and LIDAS grow by 4 layers)", ylabel="training loss (nats per token)"
    )
    right.set(xlabel="training TFLOP", ylabel="held-out loss (nats per token)")
    right.margins(x=0.25, y=0.12)
    left.legend(frameon=False, fontsize=8)
    _save(figure, recipe.figure)


def _plot_repeats(recipe: GrowingRecipe, rows: list[dict[str, str]]) -> None:
    """The change in held-out loss by where the repeated block starts; a panel for each number of repeats."""
    plt, colours, changes = _pyplot(), _colours(recipe), _changes(rows)
    depths = {system: DepthPlan.parse(stack.depth_plan).effective_depth for system, stack in recipe.systems.items()}
    figure, panels = plt.subplots(1, len(recipe.repeats), figsize=(5.4 * len(recipe.repeats), 4.2), sharey=True,
                                  layout="constrained", squeeze=False)  # fmt: skip
    for axes, repeats in zip(panels[0], recipe.repeats):
        for (system, number), by_start in changes.items():
            if number != repeats or depths[system] < max(depths.values()):
                continue
            starts = sorted(by_start)
            means = [statistics.mean(by_start[start]) for start in starts]
            axes.plot(starts, means, marker="D" if len(starts) == 1 else "o", markersize=4, linewidth=1.2,
                      color=colours[system], label=system)  # fmt: skip
        axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        axes.set_title(
            f"{repeats} additional pass{'es' if repeats > 1 else ''} over {recipe.repeat_block} layers", fontsize=10
        )
        axes.set_xlabel("first layer of the block (diamonds: the looped block)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("change in held-out loss (nats per token)")
    panels[0][0].set_yscale("symlog", linthresh=0.01)
    panels[0][0].margins(y=0.05)
    lowest, highest = (
        bound(values for by in changes.values() for seeds in by.values() for values in seeds) for bound in (min, max)
    )
    panels[0][0].set_ylim(min(-0.005, 1.3 * lowest), 1.3 * highest)
    panels[0][0].legend(frameon=False, fontsize=8)
    _save(figure, recipe.repeat_figure)


def _save(figure, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(name, dpi=150)
    _pyplot().close(figure)
