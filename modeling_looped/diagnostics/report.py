"""`looped diagnose`: all measurements that apply to some checkpoints, as one page that opens without a network, and CSVs."""

import hashlib
import html
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import islice
from pathlib import Path

from .gates import gate_attribution, gate_interventions, gate_statistics, projection_contrast, token_difficulty
from .lens import lens_statistics, train_tuned_lens
from .measurement import PALETTE, Measurement
from .order import held_out_loss, order_curves, repeat_curves
from .periodicity import periodicity
from .probe import Probe
from .residual import Contributions, residual_statistics
from .skipping import DepthScore, skip_effects
from .states import exit_curve, fixed_point, state_similarity
from .texts import encode, random_rows
from .weights import block_similarity, growth_ancestry


MADE_BY = "looped diagnose"
LENS_TOKENS = 8192  # of a step of training a tuned lens
CORPUS = "the demo's held-out texts, of the Python standard library"


@dataclass(frozen=True)
class Effort:
    """
    How much is run.

    Args:
        texts, tokens: Number of texts, and the most tokens of each.
        flops: Of one measurement that runs the model many times (skip effects, lens, order, repeats), which sets how
            many texts it gets, and skip effects how many boundaries.
        lens_steps: Of training a tuned lens; with none, the logit lens is shown.
    """

    texts: int
    tokens: int
    flops: float
    lens_steps: int = 0


EFFORTS = {
    "quick": Effort(texts=4, tokens=64, flops=2e11),
    "default": Effort(texts=10, tokens=128, flops=1e12),
    "full": Effort(texts=20, tokens=512, flops=float("inf"), lens_steps=250),
}


@dataclass
class Subject:
    """One checkpoint under measurement."""

    name: str
    probe: Probe
    rows: list[list[int]]
    lens_rows: list[list[int]]
    effort: Effort
    texts: str
    block: int | None

    @property
    def is_looped(self) -> bool:
        """Whether there are passes to compare: not of a family that could loop and does not."""
        config = self.probe.model.config
        passes = config.plan(self.probe.num_recurrences).passes if self.probe.is_looped else 0
        return passes > 0 and max(passes, config.trained_recurrences) > 1

    @cached_property
    def residual(self):
        return residual_statistics(self.probe, self.rows)

    @cached_property
    def skips(self):
        """What flows through all layers, of which the depth score is made too: with its seed."""
        return skip_effects(self.probe, seed=42, **self.skip_options())

    @property
    def head_flops(self) -> float:
        """Of the longest text's logits."""
        return 2 * self.probe.model.get_output_embeddings().weight.numel() * max(map(len, self.rows))

    @property
    def forward_flops(self) -> float:
        """Of the longest text through all executed layers and the head."""
        layers = sum(parameter.numel() for i in self.probe.order for parameter in self.probe.layers[i].parameters())
        return 2 * layers * max(map(len, self.rows)) + self.head_flops

    def rows_for(self, flops: float) -> list[list[int]]:
        """As many texts as the effort pays for at `flops` each, one at least."""
        return self.rows[: max(1, int(min(self.effort.flops / flops, len(self.rows))))]

    def skip_options(self) -> dict:
        """Texts and boundaries that the effort's FLOPs pay for."""
        rows = self.rows[:10]
        affordable = max(1, int(min(self.effort.flops / (self.forward_flops * self.probe.depth), 4 * len(rows))))
        boundaries = min(4, max(1, affordable // len(rows)))
        return {"rows": rows[: max(1, affordable // boundaries)], "boundaries": boundaries}


def _lens(subject: Subject):
    rows = subject.rows_for(subject.head_flops * subject.probe.depth)
    if not subject.effort.lens_steps:
        return lens_statistics(subject.probe, rows)
    if not subject.lens_rows:
        raise ValueError("no texts are left to train a tuned lens on: give more with --data.")
    settings = {"steps": subject.effort.lens_steps, "tokens_per_step": LENS_TOKENS}
    lens = train_tuned_lens(subject.probe, subject.lens_rows, progress=False, **settings)
    return lens_statistics(subject.probe, rows, lens)


def _period(subject: Subject):
    return periodicity(subject.residual.attention, subject.block)


def _orders(subject: Subject):
    edits, lengths = ("swap", "skip"), (1, 2)
    forwards = len(edits) * len(lengths) * subject.probe.depth
    score = held_out_loss(subject.rows_for(subject.forward_flops * forwards))
    return order_curves(subject.probe, score, edits, lengths)


def _repeats(subject: Subject):
    # A dense stack gets blocks of a sixth of its depth, as the paper's 24 layers have blocks of four.
    block, times = subject.block or max(1, subject.probe.depth // 6), (1, 2)
    forwards = len(times) * len(subject.probe.layers)
    score = held_out_loss(subject.rows_for(subject.forward_flops * forwards))
    return repeat_curves(subject.probe, score, block, times)


@dataclass(frozen=True)
class Entry:
    """A measurement of the page: what it is called in files, how it is made, and which subjects it is of."""

    name: str
    make: Callable[[Subject], Measurement]
    applies: Callable[[Subject], bool] = lambda subject: True
    why_not: str = ""


def _gated(subject: Subject) -> bool:
    return subject.probe.is_gated


def _looped(subject: Subject) -> bool:
    return subject.is_looped


def _grown(subject: Subject) -> bool:
    return bool(getattr(subject.probe.model.config, "history", None))


ENTRIES = (
    Entry("residual", lambda s: s.residual),
    Entry("contributions", lambda s: Contributions(s.residual)),
    Entry("periodicity", _period, lambda s: s.block is not None, "no block: neither looped nor grown; give --block"),
    Entry("depth_score", lambda s: DepthScore(s.skips.output_mean, boundaries=s.skips.boundaries)),
    Entry("skip_local", lambda s: skip_effects(s.probe, reach="local", **s.skip_options())),
    Entry("skip_future", lambda s: s.skips),
    Entry("lens", _lens),
    Entry("order", _orders),
    Entry("repeats", _repeats),
    Entry(
        "block_similarity",
        lambda s: block_similarity(s.probe, s.block),
        lambda s: s.block is not None and len(s.probe.layers) >= 2 * s.block,
        "fewer than two blocks of unique layers, or no block length",
    ),
    Entry("ancestry", lambda s: growth_ancestry(s.probe.model), _grown, "no history of growth"),
    Entry("exits", lambda s: exit_curve(s.probe, s.rows), _looped, "no loop"),
    Entry("fixed_point", lambda s: fixed_point(s.probe, s.rows), _looped, "no loop"),
    Entry("similarity", lambda s: state_similarity(s.probe, s.rows), _looped, "no loop"),
    Entry("gates", lambda s: gate_statistics(s.probe, s.rows), _gated, "no gate"),
    Entry("attribution", lambda s: gate_attribution(s.probe, s.rows), _gated, "no gate"),
    Entry("interventions", lambda s: gate_interventions(s.probe, s.rows), _gated, "no gate"),
    Entry("difficulty", lambda s: token_difficulty(s.probe, s.rows), _gated, "no gate"),
    Entry("contrast", lambda s: projection_contrast(s.probe), _gated, "no gate"),
)


def diagnose(
    checkpoints: Sequence[str],
    out: str,
    effort: str = "default",
    data: str | None = None,
    num_recurrences: int | None = None,
    block: int | None = None,
    only: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    trust_remote_code: bool = False,
) -> Path:
    """
    Writes `index.html`, `csv/CHECKPOINT/MEASUREMENT.csv` and `figures/` to the folder `out`. Returns the page's path.

    Args:
        checkpoints: Folders or names on the Hub; several stand side by side, each figure with all of them.
        effort: One of `EFFORTS`.
        data: Texts as `looped demo --data` takes them; the demo's corpus by default. A checkpoint without a tokenizer
            is measured on random ids. The page says which.
        num_recurrences: Passes over the core of looped models.
        block: Layers of a block, for periodicity and repeats, where neither a loop nor growth says it.
        only: Names of measurements, all by default.
        trust_remote_code: Of models from the Hub.

    Raises:
        `ValueError`: before anything is measured, for unknown names, a folder that holds something else, or a model
            whose architecture is not known (`probe.ANATOMIES`).
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort={effort!r} must be one of {', '.join(EFFORTS)}.")
    names = [entry.name for entry in ENTRIES]
    if unknown := [name for name in only or () if name not in names]:
        raise ValueError(f"only={unknown[0]!r} is no measurement: choose from {', '.join(names)}.")
    if not checkpoints:
        raise ValueError("There is no checkpoint to diagnose: name one.")
    folder = _checked_folder(Path(out), overwrite)
    subjects = [
        _subject(path, name, EFFORTS[effort], data, num_recurrences, block, trust_remote_code)
        for path, name in zip(checkpoints, _short_names(checkpoints))
    ]
    entries = [entry for entry in ENTRIES if not only or entry.name in only]
    found = _measure(subjects, entries, progress)
    folder.mkdir(parents=True, exist_ok=True)
    measurements = []
    for (entry_name, subject_name), measurement in found.items():
        row = {"checkpoint": subject_name, "measurement": entry_name}
        if isinstance(measurement, Measurement):
            path = folder / "csv" / subject_name / f"{entry_name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            measurement.to_frame().to_csv(path, index=False)
            row |= {"headline": measurement.headline(), "csv": str(path.relative_to(folder))}
        else:
            row["not_measured"] = measurement
        measurements.append(row)
    made = {"made_by": MADE_BY, "checkpoints": list(checkpoints), "measurements": measurements}
    (folder / "made_by.json").write_text(json.dumps(made) + "\n")
    page = folder / "index.html"
    (folder / "figures").mkdir(exist_ok=True)
    page.write_text(_page(subjects, entries, found, effort, folder / "figures"), encoding="utf-8")
    return page


def _checked_folder(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: name a folder.")
    ours = (folder / "made_by.json").exists()
    if folder.exists() and any(folder.iterdir()) and not ours and not overwrite:
        raise ValueError(f"--out {folder} holds files not made by {MADE_BY}: choose another, or pass --overwrite.")
    return folder


def _short_names(checkpoints: Sequence[str]) -> list[str]:
    """As few of the paths' parts as tell them apart, without the step where that does not."""
    parts = [Path(checkpoint).parts or (checkpoint,) for checkpoint in checkpoints]
    while all(len(path) > 1 for path in parts) and (
        all(re.fullmatch(r"(step|checkpoint)-\d+", path[-1]) for path in parts)
        or (len(parts) > 1 and len({path[-1] for path in parts}) == 1)
    ):
        parts = [path[:-1] for path in parts]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(names):
            return [re.sub(r"[^\w.+-]+", "-", name).strip("-") or "checkpoint" for name in names]
    raise ValueError(f"These checkpoints cannot be told apart by their paths: {', '.join(checkpoints)}.")


def _subject(
    path: str,
    name: str,
    effort: Effort,
    data: str | None,
    num_recurrences: int | None,
    block: int | None,
    trust_remote_code: bool,
) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import modeling_looped  # noqa: F401  registers the models
    from modeling_looped.recipes.corpus import read_texts, split_by_name, standard_library

    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust_remote_code)
    looped = hasattr(model.config, "plan")
    probe = Probe(model, num_recurrences if looped else None)
    length = min(
        effort.tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None) or effort.tokens
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    if tokenizer is None:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        rows = random_rows(vocabulary, 4 * effort.texts, length, seed=0)
        texts = "random token ids: there is no tokenizer"
    else:
        documents = (text for _, text in read_texts(data)) if data else iter(split_by_name(standard_library())[1])
        rows, texts = encode(tokenizer, islice(documents, 8 * effort.texts), length), data or CORPUS
    rows, lens_rows = rows[: effort.texts], rows[effort.texts :]
    return Subject(name, probe, rows, lens_rows, effort, texts, block or probe.block)


def _measure(subjects: Sequence[Subject], entries: Sequence[Entry], progress: bool) -> dict:
    """By (measurement, checkpoint): what was found, or why not."""
    from tqdm import tqdm

    found = {}
    with tqdm(total=len(subjects) * len(entries), disable=not progress, file=sys.stderr, unit="figure") as bar:
        for subject in subjects:
            for entry in entries:
                bar.set_description(f"{subject.name}: {entry.name}")
                if not entry.applies(subject):
                    found[entry.name, subject.name] = entry.why_not
                else:
                    try:
                        found[entry.name, subject.name] = entry.make(subject)
                    except ValueError as error:  # of this measurement; the page says why, and has the others
                        found[entry.name, subject.name] = str(error)
                bar.update()
    return found


# The page

_INK = "#123456"  # stands for the page's text colour until the figure is inside the page
_WIDTH = 4.7


def _page(subjects: Sequence[Subject], entries: Sequence[Entry], found: dict, effort: str, folder: Path) -> str:
    import jinja2
    import torch
    import transformers

    from modeling_looped import __version__

    sections, missing = [], []
    for entry in entries:
        here = {s.name: found[entry.name, s.name] for s in subjects}
        made = {name: of for name, of in here.items() if isinstance(of, Measurement)}
        missing += [(entry.name, name, of) for name, of in here.items() if name not in made]
        if made:
            first = next(iter(made.values()))
            sections.append(
                {
                    "id": entry.name,
                    "title": first.title,
                    "reading": first.reading,
                    "figures": _figures(made, [s.name for s in subjects], folder, entry.name),
                    "numbers": [(name if len(subjects) > 1 else "", of.headline()) for name, of in made.items()],
                    "files": [(f"{name}/{entry.name}.csv", f"csv/{name}/{entry.name}.csv") for name in made],
                }
            )
    template = files("modeling_looped.diagnostics").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template).render(
        title=", ".join(subject.name for subject in subjects),
        subjects=[_facts(subject) for subject in subjects],
        sections=sections,
        missing=missing,
        effort=effort,
        versions=f"modeling-looped {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
    )


def _facts(subject: Subject) -> dict:
    probe = subject.probe
    plan = str(probe.model.config.plan(probe.num_recurrences)) if probe.is_looped else f"{probe.depth}x1"
    tokens = sum(map(len, subject.rows))
    return {
        "name": subject.name,
        "kind": type(probe.model).__name__,
        "plan": plan,
        "depth": f"{probe.depth} executed, {len(set(probe.order))} unique",
        "parameters": f"{sum(parameter.numel() for parameter in probe.model.parameters()):,}",
        "texts": f"{len(subject.rows)} texts, {tokens:,} tokens: {subject.texts}",
    }


def _figures(made: dict[str, Measurement], names: Sequence[str], folder: Path, entry: str) -> list[str]:
    """SVG, one for all models or one for each; the same as files in `folder`."""
    colors = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(names)}
    alone = len(names) == 1
    if next(iter(made.values())).overlay and not alone:
        with _figure() as (figure, ax):
            for name, measurement in made.items():
                measurement.plot(ax, label=name, color=colors[name])
            ax.legend(frameon=False, fontsize="small")
            figure.savefig(folder / f"{entry}.png", dpi=150, facecolor="white")
            return [_svg(figure, ", ".join(made))]
    drawn = []
    for name, measurement in made.items():
        with _figure() as (figure, ax):
            measurement.plot(ax, label=None if alone else name, color=colors[name])
            figure.savefig(folder / (f"{entry}.png" if alone else f"{entry}-{name}.png"), dpi=150, facecolor="white")
            drawn.append(_svg(figure, f"{measurement.title}: {name}"))
    return drawn


@contextmanager
def _figure():
    """A figure that no window or global state knows of, its text in the page's colour, on nothing."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    ink = {
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
    }
    with matplotlib.rc_context({**ink, "svg.fonttype": "none", "svg.hashsalt": MADE_BY, "font.size": 12}):
        figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        ax = figure.subplots()
        ax.patch.set_alpha(0)
        yield figure, ax


def _svg(figure, label: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Names of clip paths and markers are of one figure; a page has many.
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{html.escape(label)}">',
        svg,
        count=1,
    )
    unique = hashlib.sha1(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="\1-{unique}"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#\1-{unique})", svg)
    return re.sub(r'xlink:href="#([^"]+)"', rf'href="#\1-{unique}"', svg).replace("xlink:href", "href")
