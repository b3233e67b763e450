"""The model card of a checkpoint, from what lies in its folder: `looped card`."""

import hashlib
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import EvalResult

import modeling_looped
from modeling_looped.depth_plan import DepthPlan
from modeling_looped.eval.report import LOSSES, METRICS

from .facts import EVALUATION, Evaluation, Facts, read_facts


FIGURE = "loss_vs_recurrences.png"
PROMPT = "Once upon a time"
NOTES = ("<!-- notes: what you write here stays -->", "<!-- end of notes -->")
SEAL = re.compile(r"\n<!-- looped card ([0-9a-f]{16}) -->\n?$")
# Metadata that no folder says, and that stays as the last card has it where nothing new is given.
GIVEN = ("license", "license_name", "license_link", "base_model", "datasets", "language")


class ForeignCard(ValueError):
    """The README.md of a folder is not what `write_card` wrote there."""


def build_card(folder: str | Path, repo_id: str | None = None, **given) -> ModelCard:
    """
    The card of the checkpoint in `folder`, filled from its files alone (`facts.read_facts`). What is not there is said to
    be missing.

    Args:
        folder: A `from_pretrained` folder.
        repo_id: The name on the Hub that loading and commands in the card shall use; the folder itself by default.
        **given: `license`, `license_name`, `license_link`, `base_model`, `datasets` and `language` of the metadata. The
            folder's present card is asked for what is not given.

    Returns:
        `huggingface_hub.ModelCard`: `str(card)` is the README.md.

    Raises:
        `ValueError`: as `read_facts`, and for metadata that is none of these.
    """
    if unknown := sorted(set(given) - set(GIVEN)):
        raise ValueError(
            f"{unknown[0]}={given[unknown[0]]!r} is no field that a card is given: choose of {', '.join(GIVEN)}."
        )
    facts = read_facts(folder)
    metadata = _metadata(facts, repo_id, given)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(files("modeling_looped.hub_cards"))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template(f"{facts.family}.md.jinja").render(_values(facts, repo_id, metadata))
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    notes = _notes(facts.folder)
    body = f"{text}\n\n{NOTES[0]}\n{notes}{NOTES[1]}\n"
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n<!-- looped card {_digest(body)} -->\n")


def write_card(folder: str | Path, overwrite: bool = False, repo_id: str | None = None, **given) -> Path:
    """
    Writes `build_card(folder, repo_id, **given)` and its figure into `folder`. A card that was changed by hand is only replaced on `overwrite`;
    metadata and what stands between the marks of the notes stay in any case.

    Returns:
        The path of the README.md.

    Raises:
        `ForeignCard`: a `ValueError`, where the README.md there is not one of these as it was written.
        `ValueError`: as `build_card`.
    """
    path = Path(folder) / "README.md"
    if not overwrite and is_foreign(folder):
        raise ForeignCard(
            f"{path} was not written by looped card, or was changed since: pass --overwrite to replace it, and write "
            "your own text between the marks of the notes at its end, where it stays."
        )
    card = build_card(folder, repo_id, **given)
    _draw(Path(folder))
    path.write_text(str(card), encoding="utf-8")
    return path


def write_card_if_possible(folder: str | Path) -> None:
    """`write_card` for a run, which does not end for the want of a card: says on standard error why there is none."""
    try:
        write_card(folder)
    except ValueError as error:
        print(f"No card was written: {error}", file=sys.stderr)


def is_foreign(folder: str | Path) -> bool:
    """Whether the folder has a README.md that is not as `write_card` left it, metadata and notes aside."""
    path = Path(folder) / "README.md"
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    seal = SEAL.search(text)
    body = text[: seal.start() + 1] if seal else ""
    return seal is None or seal[1] != _digest(re.sub(r"^---\n.*?\n---\n\n", "", body, count=1, flags=re.DOTALL)[:-1])


def add_results(folder: str | Path, results: str | Path) -> list[Path]:
    """
    Copies lm-eval's results and samples from the folder `results` to where `folder`'s card looks for them. Results of
    the same name are replaced, others stay.

    Raises:
        `ValueError`: where there are none.
    """
    source, target = Path(results), Path(folder) / EVALUATION
    found = sorted(source.rglob("results_*.json"))
    if not found:
        raise ValueError(f"{source} has no results_*.json: name the folder that was lm-eval's --output_path.")
    target.mkdir(exist_ok=True)
    copied = [*found, *sorted(source.rglob("samples_*.jsonl"))]
    for path in copied:
        if path.resolve().parent != target.resolve():
            shutil.copyfile(path, target / path.name)
    return found


def draw_plan(plan: DepthPlan, width: int = 96) -> str:
    """The plan as text of `width` columns: sections with their layers, and the order in which depth visits them."""
    lines = []
    if plan.sections is not None and plan.sections[2] > 1:
        prelude, core, recurrences, coda = plan.sections
        layers = list(range(prelude + core + coda))
        parts = (("prelude", layers[:prelude], ""), ("core", layers[prelude : prelude + core], f"   x {recurrences}"))
        for name, numbers, times in (*parts, ("coda", layers[prelude + core :], "")):
            if numbers:
                lines.append(f"{name:<9}{' '.join(map(str, numbers))}{times}")
    starts = (0, *plan.ends)
    runs = [plan.order[start:end] for start, end in zip(starts, plan.ends) if end > start]
    order = " | ".join(" ".join(map(str, run)) for run in runs)
    lines += textwrap.wrap(order, width, initial_indent="executed ", subsequent_indent=" " * 9)
    return "\n".join(lines)


def plot_held_out(path: Path, rows: Sequence[dict], default: int | None = None, title: str = "") -> None:
    """A PNG of held-out loss against recurrences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = [row["num_recurrences"] for row in rows]
    nats = [row["nats_per_token"] for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(counts, nats, marker="o", color="#1f5fa8")
    for count, value in zip(counts, nats):
        axes.annotate(
            f"{value:.3f}", (count, value), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8
        )
    if default is not None:
        axes.axvline(default, color="0.7", linewidth=1, linestyle="--", zorder=0)
        axes.text(default + 0.06, max(nats), "default", color="0.45", fontsize=8, va="top")
    spread = max(nats) - min(nats)
    axes.set_ylim(min(nats) - 0.15 * spread - 0.01, max(nats) + 0.25 * spread + 0.01)
    axes.set(xlabel="recurrences (passes over the core)", ylabel="held-out loss (nats per token)", xticks=counts)
    axes.set_title(title or "One model, its depth turned at run time", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    # Neither time nor version: the same numbers are the same file.
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def has_figure(folder: str | Path) -> bool:
    """Whether the folder's held-out losses are enough of a curve to draw."""
    return _has_figure(read_facts(folder))


def _draw(folder: Path) -> None:
    facts = read_facts(folder)
    if _has_figure(facts):
        unigram = facts.metrics.get("unigram_nats_per_token")
        about = "" if unigram is None else f" (unigram model: {unigram:.2f})"
        title = f"One model, its depth turned at run time{about}"
        plot_held_out(folder / FIGURE, facts.held_out["rows"], getattr(facts.config, "num_recurrences", None), title)


def _has_figure(facts: Facts) -> bool:
    return len((facts.held_out or {}).get("rows", [])) > 1


def _digest(body: str) -> str:
    """Of a card's text without metadata, notes and seal."""
    before, _, rest = body.partition(NOTES[0])
    return hashlib.sha256((before + rest.partition(NOTES[1])[2]).strip().encode()).hexdigest()[:16]


def _notes(folder: Path) -> str:
    """What somebody wrote between the marks of the present card."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return text.partition(NOTES[0] + "\n")[2].partition(NOTES[1])[0] if all(mark in text for mark in NOTES) else ""


def _metadata(facts: Facts, repo_id: str | None, given: dict) -> ModelCardData:
    path, kept = facts.folder / "README.md", {}
    if path.is_file():
        try:
            kept = ModelCard(
                path.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True
            ).data.to_dict()
        except ValueError:  # metadata that is no YAML: nothing can be kept of it
            kept = {}
    said = {name: kept.get(name) for name in GIVEN} | {
        name: value for name, value in given.items() if value is not None
    }
    # Of a recipe's sources, those that are no file and none of this package's: names on the Hub.
    hub = [
        one["path"]
        for one in facts.sources.values()
        if re.fullmatch(r"[\w.-]+/[\w.-]+", one["path"]) and not one.get("content")
    ]
    said["datasets"] = said["datasets"] or sorted(set(hub)) or None
    tags = ["looped", "recurrent-depth", "modeling-looped", facts.config.model_type]
    if facts.plan.effective_depth == facts.plan.unique_layers:
        tags = ["modeling-looped", facts.config.model_type]
    if getattr(facts.config, "history", None):
        tags.append("depth-grown")
    results = _eval_results(facts)
    name = (repo_id or facts.folder.resolve().name).rpartition("/")[2]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=name if results else None,
        eval_results=results or None,
        **said,
    )


def _eval_results(facts: Facts) -> list[EvalResult]:
    """What the Hub shows beside a model: at each depth the loss and, of lm-eval, accuracies and losses of tasks."""
    found = [
        EvalResult(
            task_type="text-generation",
            dataset_type=_slug(facts.held_out["text"]["name"]),
            dataset_name=facts.held_out["text"]["name"],
            metric_type=metric,
            metric_name=f"{metric.replace('_', ' ')}, {many(row['num_recurrences'], 'recurrence')}",
            metric_value=row[metric],
        )
        for row in (facts.held_out or {}).get("rows", [])
        for metric in ("nats_per_token", "bits_per_byte")
    ]
    for one in facts.evaluations:
        depth = "" if one.num_recurrences is None else f", {many(one.num_recurrences, 'recurrence')}"
        for (name, metric), score in one.scores.items():
            if metric in METRICS:
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=_slug(name),
                        dataset_name=name,
                        metric_type=metric,
                        metric_name=f"{metric.replace('_', ' ')}{depth}",
                        metric_value=score.value,
                    )
                )
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-").lower()


def _values(facts: Facts, repo_id: str | None, metadata: ModelCardData) -> dict:
    config, path, default = facts.config, repo_id or ".", _default(facts)
    rows = (facts.held_out or {}).get("rows", [])
    turns = hasattr(config, "num_recurrences") and len({row["executed_layers"] for row in facts.depths}) > 1
    counts = facts.counts or {}
    architecture = (config.architectures or ["an unnamed class"])[0]
    commands = [
        _with_path(command, path)
        for command in dict.fromkeys(map(_frozen, (e.command for e in facts.evaluations)))
        if command
    ]
    limits = {one.limit for one in facts.evaluations} - {None}
    return {
        "facts": facts,
        "many": many,
        "config": config,
        "text": config.get_text_config(decoder=True),
        "path": path,
        "path_comment": "" if repo_id else "  # this folder; or wherever it is, or its name on the Hub",
        "where": "" if repo_id else ", in this folder",
        "title": f"{repo_id.rpartition('/')[2] + ': ' if repo_id else ''}{architecture} {facts.plan}",
        "architecture": architecture,
        "has_code": "auto_map" in (config.to_dict()) and any(facts.folder.glob("modeling_*.py")),
        "drawing": draw_plan(facts.plan),
        "stored": " and ".join(f"{count:,} in {dtype}" for dtype, count in facts.stored.items()),
        "parts": ", ".join(
            f"{part} {count:,}" for part, count in counts.items() if count and part not in ("total", "unique")
        ),
        "default": default,
        "effective": default["effective_parameters"] if default else None,
        "shares": ", ".join(f"{share:.3g}" for share in config.pass_shares()) if hasattr(config, "pass_shares") else "",
        "turns": turns,
        "other_depth": next((row["num_recurrences"] for row in facts.depths if row is not default), None),
        "prompt": facts.metrics.get("prompt", PROMPT),
        "prompt_shell": shlex.quote(facts.metrics.get("prompt", PROMPT).strip()),
        "held_rows": rows,
        "held_command": _with_path(facts.held_out["command"], path) if rows else None,
        "validation_nats": (facts.progress or {}).get("validation_nats"),
        "has_figure": _has_figure(facts),
        "figure": FIGURE,
        "evaluations": _tables(facts.evaluations),
        "evaluation_commands": commands,
        "limits": "; only the first " + " or ".join(f"{limit:g}" for limit in sorted(limits)) + " items of each task"
        if limits
        else "",
        "training_lines": _training_lines(facts),
        "settings": facts.recipe or _as_yaml(facts.metrics.get("settings", {})),
        "data_said": "data" in facts.metrics.get("settings", {}) or (facts.sft or {}).get("settings", {}).get("data"),
        "missing": _missing(facts, metadata),
        "licence": _licence(metadata),
        "version": modeling_looped.__version__,
    }


def _default(facts: Facts) -> dict | None:
    """The row of the configured depth; a Llama has no other."""
    configured = getattr(facts.config, "num_recurrences", None)
    return next((row for row in facts.depths if row["num_recurrences"] == configured), next(iter(facts.depths), None))


def _frozen(command: list[str] | None) -> tuple[str, ...]:
    return tuple(command or ())


def _with_path(command: Sequence[str], path: str) -> str:
    """A recorded command, in which CHECKPOINT stands for the model, for the shell."""
    return shlex.join(part.replace("CHECKPOINT", path) for part in command)


def _tables(evaluations: Sequence[Evaluation]) -> list[dict]:
    """A table for each group and metric: a row for each results file, columns of its tasks and their mean."""
    groups: dict[str, tuple[str, ...]] = {}
    for one in evaluations:
        groups |= one.groups
    tasks = dict.fromkeys(name for one in evaluations for name, _ in one.scores)
    grouped = {member for members in groups.values() for member in members}
    if alone := tuple(name for name in tasks if name not in groups and name not in grouped):
        groups["other tasks"] = alone
    tables = []
    for group, members in groups.items():
        columns = [*members, *([group] if group in tasks else [])]
        for metric in METRICS:
            here = [name for name in columns if any((name, metric) in one.scores for one in evaluations)]
            if not here:
                continue
            rows = [
                [str(one.num_recurrences or "—"), *(_cell(one.scores.get((name, metric))) for name in here)]
                for one in evaluations
                if any((name, metric) in one.scores for name in here)
            ]
            shots = {name: max((one.shots.get(name, 0) for one in evaluations), default=0) for name in here}
            head = [f"{name.rpartition('::')[2]}{f' ({shots[name]} shots)' if shots[name] else ''}" for name in here]
            head = [*head[:-1], "mean"] if here[-1] == group else head
            tables.append(
                {
                    "group": group.rpartition("::")[2],
                    "metric": metric,
                    "direction": "lower" if metric in LOSSES else "higher",
                    "head": ["recurrences", *head],
                    "rows": rows,
                }
            )
    return tables


def _cell(score) -> str:
    if score is None:
        return "—"
    return f"{score.value:.3f}" + ("" if score.error is None else f" ± {score.error:.3f}")


def _training_lines(facts: Facts) -> list[str]:
    """Sentences of what the folder says about training, in the order in which it happened."""
    lines, training = [], facts.training
    if facts.progress and not training:
        training = {"steps": facts.progress.get("step")}
    if training.get("steps"):
        line = f"{training['steps']:,} steps"
        if total := (facts.progress or {}).get("recipe", {}).get("total_steps"):
            line += f" of {total:,}"
        line += f", {training['tokens']:,} tokens" if training.get("tokens") else ""
        line += f", {training['flops']:.4g} FLOPs (counted as in arXiv 2604.21106)" if training.get("flops") else ""
        lines.append(line)
    if training.get("seconds"):
        lines.append(f"{training['seconds']:,} seconds at {training['tokens_per_second']:,} tokens per second")
    if training.get("final_loss"):
        lines.append(f"training loss at the end {training['final_loss']:.4f} nats per token")
    if data := facts.metrics.get("settings", {}).get("data"):
        lines.append(f"on {data}")
    if facts.sft:
        record = facts.sft
        data = record.get("settings", {}).get("data", {})
        named = ", ".join(f"{name} {value}" for name, value in data.items() if value is not None)
        lines.append(f"fine-tuned with {record.get('versions', 'trl')}: {record.get('steps', 0):,} steps on {named}")
        if record.get("losses"):
            lines.append(f"loss of the answers at the last logged step {record['losses'][-1][1]:.4f}")
    if facts.trainer:
        logged = [row for row in facts.trainer.get("log_history", []) if "loss" in row]
        end = f", last logged loss {logged[-1]['loss']}" if logged else ""
        lines.append(f"transformers' Trainer: {facts.trainer.get('global_step')} steps{end}")
    if versions := facts.metrics.get("versions"):
        lines.append("made with " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    return lines


def _as_yaml(settings: dict) -> str:
    return (
        yaml.safe_dump(
            {k: v for k, v in settings.items() if v is not None}, sort_keys=False, allow_unicode=True
        ).strip()
        if settings
        else ""
    )


def many(count: int, thing: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _missing(facts: Facts, metadata: ModelCardData) -> list[str]:
    lines = []
    if not facts.has_tokenizer:
        lines.append("There is no tokenizer in this folder.")
    if not facts.has_chat_template:
        lines.append("There is no chat template: it was not made for conversations, or nobody said how.")
    if metadata.language is None:
        lines.append("The languages of its data are not said.")
    return lines


def _licence(metadata: ModelCardData) -> str:
    if metadata.license is None:
        return "Not said: ask whoever gave you this checkpoint before you use it."
    link = f" ({metadata.license_link})" if metadata.license_link else ""
    return f"{metadata.license_name or metadata.license}{link}."
