"""What every measurement is: numbers that become a table, a figure, and one sentence for the reader."""

from typing import ClassVar

import numpy as np


PALETTE = ("#1f5fa8", "#d9822b", "#2f9e63", "#b0323a", "#7b5ea7", "#00939c", "#8a7a3b", "#3a3a3a")


class Measurement:
    """
    Base of the dataclasses that measurements return.

    Attributes:
        title: Heading of the figure.
        reading: One sentence on how to read it.
        overlay: Whether several models' curves go on one pair of axes; heatmaps get panels of their own.
    """

    title: ClassVar[str]
    reading: ClassVar[str]
    overlay: ClassVar[bool] = True

    def to_frame(self):
        """A pandas `DataFrame`, a row for each point of the figure."""
        raise NotImplementedError

    def plot(self, ax, label: str | None = None, color: str = PALETTE[0]) -> None:
        """Draws on matplotlib axes `ax`; `label` and `color` are of the model where several share them."""
        raise NotImplementedError

    def headline(self) -> str:
        """The number behind the figure, in a sentence."""
        raise NotImplementedError


def style(ax, xlabel: str, ylabel: str, boundaries=()) -> None:
    """House style: no box, a light grid, a thin line where a block ends (between two executed layers)."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="0.5", alpha=0.18)
    drawn = {line.get_gid() for line in ax.lines}
    for boundary in boundaries:
        if (name := f"boundary-{boundary}") not in drawn:  # several models that end their blocks at the same place
            ax.axvline(boundary - 0.5, color="0.5", alpha=0.35, linewidth=0.8, zorder=0, gid=name)


def show_small_changes(ax, changes: np.ndarray) -> None:
    """A scale that is logarithmic beyond most of the `changes`, where a few are so large that the others would vanish."""
    sizes = np.abs(changes[np.isfinite(changes)])
    if len(sizes) and sizes.max() > 20 * np.median(sizes) > 0:
        ax.set_yscale("symlog", linthresh=3 * float(np.median(sizes)), linscale=2)


def heatmap(ax, values: np.ndarray, xlabel: str, ylabel: str, boundaries=(), low=0.0, high=1.0, colorbar=True) -> None:
    """`values` as an image, entries that are NaN left blank, with lines where blocks end."""
    image = ax.imshow(np.ma.masked_invalid(values), vmin=low, vmax=high, cmap="viridis", aspect="auto")
    for boundary in boundaries:
        ax.axvline(boundary - 0.5, color="white", linewidth=0.6, alpha=0.8)
        if len(values) > boundary:
            ax.axhline(boundary - 0.5, color="white", linewidth=0.6, alpha=0.8)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if colorbar:
        ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
