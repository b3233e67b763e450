"""
Figures of a `PhiReport`: iso-FLOP curves, the frontier of loss against budget, and predicted against measured losses
(figures 2, 3 and 6 of arXiv 2604.21106). Each returns a matplotlib `Figure` that no window or global state knows of. A
recurrence count has the same colour in all of them.
"""

import math
from collections.abc import Iterable

import numpy as np

from .allocation import compute_optimal
from .fit import predicted_losses
from .report import PhiReport, write_flops


COLORS = {1: "#3a3a3a", 2: "#1f5fa8", 4: "#2f9e63", 8: "#d9822b", 16: "#b0323a"}
OTHERS = ("#7b5ea7", "#00939c", "#c2557f", "#8a7a3b", "#5c7fbf", "#a35a2a")


def colors(recurrences: Iterable[int]) -> dict[int, str]:
    """Of powers of two always the same; others by their order."""
    others = [r for r in sorted(recurrences) if r not in COLORS]
    return {r: COLORS[r] if r in COLORS else OTHERS[others.index(r) % len(OTHERS)] for r in sorted(recurrences)}


def iso_flop_figure(report: PhiReport):
    """
    Loss against unique parameters, a panel for each budget: the runs, each cell's parabola in ln N and its vertex as a
    star, hollow where it lies outside the widths that were run.
    """
    budgets, palette = report.budgets, colors(report.recurrences)
    columns = min(3, len(budgets))
    lines = math.ceil(len(budgets) / columns)
    figure = _figure(3.5 * columns + 0.4, 2.7 * lines + 0.6)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, budget in zip(panels, budgets):
        for r, color in palette.items():
            cell = report.runs[(report.runs["budget_flops"] == budget) & (report.runs["r"] == r)]
            if cell.empty:
                continue
            axes.plot(cell["n_unique"], cell["val_loss"], "o", **_point(color), zorder=5, label=f"r = {r}")
            optima = report.optima
            at = optima[(optima["budget_flops"] == budget) & (optima["r"] == r)]
            if len(at):
                _parabola(axes, cell, at.iloc[0], color)
        _style(axes)
        axes.set_xscale("log")
        _count_ticks(axes)
        axes.set_title(f"C = {write_flops(budget)} FLOPs", fontsize=9)
    for axes in panels[len(budgets) :]:
        axes.set_visible(False)
    for axes in panels[::columns]:
        axes.set_ylabel("loss (nats per token)")
    for axes in panels[max(0, len(budgets) - columns) : len(budgets)]:
        axes.set_xlabel("unique parameters without embeddings")
    handles = [*_marks(palette), _line(marker="*", linestyle="none", color="0.4", markersize=10)]
    names = [*_names(palette), "minimum of the parabola"]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    return figure


def _parabola(axes, cell, at, color: str) -> None:
    """Through the cell, as far as its vertex."""
    x, middle = np.log(cell["n_unique"].to_numpy(float)), math.log(at.n_unique)
    curve = np.polyfit(x - middle, cell["val_loss"].to_numpy(float), 2)
    far = 2 * (x.max() - x.min())  # a vertex beyond says nothing, and would leave the runs no room
    ends = min(x.min(), max(middle, x.min() - far)), max(x.max(), min(middle, x.max() + far))
    across = np.linspace(*ends, 100)
    axes.plot(np.exp(across), np.polyval(curve, across - middle), "-", color=color, linewidth=1.1)
    if ends[0] <= middle <= ends[1]:
        face = color if at.is_inside else "white"
        axes.plot([at.n_unique], [at.loss], "*", color=color, markerfacecolor=face, markersize=13, zorder=4)


def frontier_figure(report: PhiReport):
    """
    The least loss against the budget for each r: empirical optima as points, that of the fitted law as a line and that
    of the law with phi = 1 as a dashed one. No lines without `report.has_family`.
    """
    palette, budgets = colors(report.recurrences), report.budgets
    figure = _figure(6.4, 4.6)
    axes = figure.subplots()
    across = np.geomspace(budgets[0] / 1.25, budgets[-1] * 1.25, 15)
    handles, names = list(_marks(palette)), list(_names(palette))
    for place, (r, color) in enumerate(palette.items()):
        here = report.optima[report.optima["r"] == r]
        axes.plot(here["budget_flops"], here["loss"], "o", **_point(color), zorder=3, label=f"r = {r}")
        if report.has_family:
            # phi = 1 makes all r nearly equal: dashes of one are drawn in the gaps of the others.
            dashes = (5 * place, (5, 5 * max(1, len(palette) - 1)))
            for law, style in ((report.law, "-"), (report.full, dashes)):
                losses = [compute_optimal(law, budget, r, family=report.family).loss for budget in across]
                axes.plot(across, losses, color=color, linewidth=1.3, linestyle=style)
    if report.has_family:
        fitted = f"phi = {report.law.phi:.2f}" if report.identified else "fitted, phi not identified"
        handles += [_line(color="0.4", linewidth=1.4), _line(color="0.4", linewidth=1.3, linestyle="--")]
        names += [f"optimum of the law, {fitted}", "optimum of the law with phi = 1"]
    _style(axes)
    axes.set_xscale("log")
    axes.set_xticks(budgets, [write_flops(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set(xlabel="training FLOPs", ylabel="loss (nats per token)")
    axes.set_title("Least loss of a budget; points: minima of the parabolas", fontsize=10)
    axes.legend(handles, names, frameon=False, fontsize=8)
    return figure


def prediction_figure(report: PhiReport):
    """Losses that the joint law predicts against those measured, the diagonal, and the residuals' RMSE."""
    runs, palette = report.runs, colors(report.recurrences)
    predicted = predicted_losses(runs, report.law, report.family)
    figure = _figure(5, 4.8)
    axes = figure.subplots()
    ends = np.array([min(predicted.min(), runs["val_loss"].min()), max(predicted.max(), runs["val_loss"].max())])
    margin = 0.04 * (ends[1] - ends[0])
    ends += np.array([-margin, margin])
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
    for r, color in palette.items():
        here = runs["r"] == r
        axes.plot(runs["val_loss"][here], predicted[here], "o", **_point(color), label=f"r = {r}")
    _style(axes)
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel="measured loss (nats per token)", ylabel="predicted loss")
    pooled = report.residuals.loc["pooled"]
    said = f"RMSE {pooled['rmse']:.4f} nats\nlargest {pooled['max']:.4f}\n{pooled['runs']:.0f} runs"
    axes.text(0.97, 0.04, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color="0.3")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


FIGURES = {
    "phi_iso_flops.png": iso_flop_figure,
    "phi_frontier.png": frontier_figure,
    "phi_predicted.png": prediction_figure,
}


def _figure(width: float, height: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _point(color: str) -> dict:
    """Edged, so that runs near each other and on top of a star stay apart."""
    return {"color": color, "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.6}


def _line(**style):
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _marks(palette):
    return [_line(marker="o", linestyle="none", color=color, markersize=5) for color in palette.values()]


def _names(palette):
    return [f"r = {r}" for r in palette]


def _style(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.93")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _count_ticks(axes) -> None:
    """Parameter counts as 20M: decades are too few where widths span one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_short_count))


def _short_count(value: float, _position=None) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


__all__ = ["COLORS", "FIGURES", "colors", "frontier_figure", "iso_flop_figure", "prediction_figure"]
