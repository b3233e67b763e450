"""
The recipe of arXiv 2602.16490 from end to end at toy scale: grow a stack by LIDAS, cool down on word problems with and
without one more pass over its middle block, fine-tune on variable assignment, and repeat the block without training.

    python -m modeling_looped.recipes.grow_cooldown_loop OUTPUT [--quick]

Every step is the command that a user would give; called again, finished steps are not repeated. `--quick` runs the toy
sections of the recipes, which only shows that everything works.
"""

import argparse
import csv
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from modeling_looped.looping import loop

from .checkpoints import newest_checkpoint
from .data import HeldOut, Source, summed_nats
from .sft import choice_accuracy
from .synthetic import variable_assignment


BLOCK = (4, 8)  # the middle of 12 layers, as in toy_cooldown.yaml
REPEATS, DEPTHS = (0, 1, 2), (0, 1, 2)
NAMES = {
    "grow": "grown",
    "cooldown": "+ cooldown",
    "sft": "+ cooldown + SFT",
    "cooldown-loop": "+ looped cooldown",
    "sft-loop": "+ looped cooldown + SFT",
}


@dataclass(frozen=True)
class Size:
    """Where the runs of the recipes stand, and how much is measured."""

    plateau: int  # the step that cooldowns start from
    grown: int
    cooled: int
    items: int  # of variable assignment, at each depth
    tokens: int  # held out


FULL, QUICK = Size(425, 500, 150, 60, 8192), Size(20, 24, 6, 4, 1024)
COLUMNS = ["model", "additional_passes", "executed_layers", "text_nats", "problems_nats"]
COLUMNS += [f"assignment_depth_{depth}" for depth in DEPTHS] + ["items"]


def main(output_dir: str, quick: bool = False) -> None:
    output, size = Path(output_dir), QUICK if quick else FULL
    began = time.perf_counter()
    for name, script, options, result in steps(output, size):
        if not result.exists():
            options = [*options, *(["--toy"] if quick else [])]
            print(f"\n{name}: looped {script} {' '.join(options)}", flush=True)
            command = [sys.executable, "-m", f"modeling_looped.recipes.{script}", *options]
            status = subprocess.run([*command, "--output_dir", str(output / name), "--resume", "auto"]).returncode
            if not result.exists():  # it was stopped, or says above what is wrong
                sys.exit(f"{name} ended with status {status} and is not finished: the same command goes on.")
    rows = measure(output, size)
    with (output / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, output / "results.png")
    print(f"\n{table(rows)}\n\n{output}/results.csv and results.png, after {time.perf_counter() - began:.0f} s")


def steps(output: Path, size: Size) -> list[tuple[str, str, list[str], Path]]:
    """`(folder, script, options, what is there when it is finished)` in the order in which they have to run."""
    cooled = ["--config", "toy_cooldown", "--checkpoint", str(output / "grow" / f"step-{size.plateau}")]
    last = {name: output / name / f"step-{size.cooled}" for name in ("cooldown", "cooldown-loop")}
    tuned = {name: ["--config", "toy_sft", "--checkpoint", str(path)] for name, path in last.items()}
    return [
        ("grow", "pretrain", ["--config", "toy_grow"], output / "grow" / f"step-{size.grown}"),
        ("cooldown", "cooldown", [*cooled, "--retrofit_layers", "null"], last["cooldown"]),
        ("cooldown-loop", "cooldown", cooled, last["cooldown-loop"]),
        ("sft", "sft", tuned["cooldown"], output / "sft" / "sft.json"),
        ("sft-loop", "sft", tuned["cooldown-loop"], output / "sft-loop" / "sft.json"),
    ]


def measure(output: Path, size: Size) -> list[dict]:
    """A row for each model and number of additional passes: loss on held-out text and problems, and accuracies."""
    disable_progress_bar()
    rows = []
    items = {depth: variable_assignment("basic", depth, size.items, 0, split="test") for depth in DEPTHS}
    sources = {
        "text_nats": Source("python-library", split="validation", take=100),
        "problems_nats": Source("arithmetic", split="validation"),
    }
    for name, label in NAMES.items():
        folder = output / name if (output / name / "sft.json").is_file() else newest_checkpoint(output / name)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        length, kept = model.config.max_position_embeddings, output / "grow" / "data"
        held_out = {
            column: HeldOut.read(source, tokenizer, length, size.tokens, kept) for column, source in sources.items()
        }
        for repeats in REPEATS:
            with loop(model, *BLOCK, repeats):
                row = {"model": label, "additional_passes": repeats, "executed_layers": model.config.num_hidden_layers}
                row |= {column: f"{mean_loss(model, windows):.4f}" for column, windows in held_out.items()}
                for depth in DEPTHS:
                    found = choice_accuracy(model, tokenizer, items[depth], batch_size=32)
                    row[f"assignment_depth_{depth}"] = f"{found.accuracy:.3f}"
            rows.append({**row, "items": size.items})
            print(", ".join(f"{value}" for value in rows[-1].values()), flush=True)
    return rows


@torch.no_grad()
def mean_loss(model, held_out: HeldOut) -> float:
    """Nats per token of all windows."""
    return sum(summed_nats(model, rows).item() for rows in held_out.windows.split(8)) / held_out.tokens


def table(rows: list[dict]) -> str:
    """As Markdown."""
    titles = ["model", "additional passes", "executed layers", "text, nats", "problems, nats"]
    titles += [f"assignment, depth {depth}" for depth in DEPTHS]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(str(row[column]) for column in COLUMNS[:-1])} |" for row in rows]
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Over additional passes: what they change in loss, and the accuracy on variable assignment."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    colours = dict(zip(NAMES.values(), ("0.45", "#1f5fa8", "#1f5fa8", "#c4622d", "#c4622d")))
    accuracy = [f"assignment_depth_{depth}" for depth in DEPTHS]
    for axes, columns, title in zip(
        panels,
        (["problems_nats"], ["text_nats"], accuracy),
        ("Word problems", "Text", "Variable assignment, mean of depths 0 to 2"),
    ):
        for label, colour in colours.items():
            mine = [row for row in rows if row["model"] == label]
            values = [sum(float(row[column]) for column in columns) / len(columns) for row in mine]
            if columns is not accuracy:
                values = [value - values[0] for value in values]
            axes.plot(
                [row["additional_passes"] for row in mine],
                values,
                color=colour,
                linestyle="-" if label.endswith("SFT") else "--",
                marker="o",
                markersize=4,
                label=label,
            )
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="additional passes over layers 4 to 7", xticks=REPEATS)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
    for axes in panels[:2]:
        axes.set_ylabel("change in held-out loss (nats per token)")
    panels[2].set(ylabel="accuracy", ylim=(0, 0.62))
    panels[2].axhline(0.2, color="0.6", linewidth=1, linestyle=":", zorder=0)
    panels[2].text(REPEATS[-1], 0.09, "chance is 0.2", color="0.5", fontsize=8, ha="right", va="bottom")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("output", help="Where the runs, results.csv and results.png go.")
    parser.add_argument("--quick", action="store_true", help="The toy sections of the recipes.")
    arguments = parser.parse_args()
    main(arguments.output, arguments.quick)
