"""Whether a curve over layers repeats from block to block (section 6.6 of the specification for arXiv 2602.16490)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .measurement import Measurement, style


@dataclass(frozen=True)
class Periodicity(Measurement):
    """
    How much of a curve over the middle layers, less its linear trend, is one pattern of `block` layers. A layer's phase
    is its position modulo `block`.

    Args:
        detrended: (last - first + 1), the curve less its trend.
        block: Layers of a period, b.
        first, last: The executed layers that were looked at, both included.
        autocorrelation: At lag b: the sum of products of values b layers apart, over that of all squares.
        eta_squared: Share of the variance that lies between phases, from 0 to 1.
        power: Share of the Fourier power at frequency 1 / b and its multiples.
        p_value: How often layers in a random order have so large an `eta_squared`.
        permutations: Random orders that were tried.
        curve: What the curve is of.
    """

    title = "A pattern that repeats"
    reading = (
        "The curve without its trend, and the mean of each place within a block (dashed): where the two lie on each "
        "other, every block does the same."
    )

    detrended: np.ndarray
    block: int
    first: int
    last: int
    autocorrelation: float
    eta_squared: float
    power: float
    p_value: float
    permutations: int
    curve: str

    @property
    def positions(self) -> np.ndarray:
        """(last - first + 1), the executed layers."""
        return np.arange(self.first, self.last + 1)

    @property
    def phase_means(self) -> np.ndarray:
        """(block), the mean of the layers of each phase."""
        return np.array([self.detrended[self.positions % self.block == phase].mean() for phase in range(self.block)])

    def to_frame(self):
        import pandas as pd

        phases = self.positions % self.block
        columns = {"phase": phases, "detrended": self.detrended, "phase_mean": self.phase_means[phases]}
        return pd.DataFrame({"position": self.positions, **columns})

    def plot(self, ax, label=None, color="#1f5fa8"):
        places = self.positions
        ax.plot(places, self.detrended, marker="o", markersize=3, color=color, label=label)
        ax.plot(places, self.phase_means[places % self.block], linestyle="--", linewidth=1, color=color)
        style(ax, "executed layer", f"{self.curve}, detrended", range(self.first + self.block, self.last, self.block))

    def headline(self):
        chance = f"p = {self.p_value:.2g}" if self.p_value >= 0.001 else "p < 0.001"
        return (
            f"{self.eta_squared:.0%} of the variance of the {self.curve} over layers {self.first} to {self.last} is a "
            f"pattern of {self.block} layers ({chance})."
        )


def periodicity(
    values: Sequence[float],
    block: int,
    first: int | None = None,
    last: int | None = None,
    permutations: int = 10_000,
    seed: int = 0,
    curve: str = "attention contribution",
) -> Periodicity:
    """
    Args:
        values: (executed layers), a value for each; the paper's claim is on `ResidualStatistics.attention`. Not a
            number is allowed outside the layers that are looked at.
        block: Layers of a period, b: a grown model's block, or a loop's core.
        first, last: The layers to look at, both included: without the first and the last block by default. They are a
            multiple of `block`, at least twice.
        permutations: Random orders of the layers for the p-value, drawn with `seed`.
        curve: What `values` are of.

    Raises:
        `ValueError`: for a block or a range that does not fit, or a curve of one value, or of a straight line.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim != 1:
        raise ValueError(f"values has the shape {values.shape}: one number a layer is needed.")
    if isinstance(block, bool) or not isinstance(block, int) or block < 2:
        raise ValueError(f"block={block!r} must be a whole number of at least 2 layers.")
    first = block if first is None else first
    last = len(values) - block - 1 if last is None else last
    count = last - first + 1
    if first < 0 or last >= len(values) or count < 2 * block:
        raise ValueError(
            f"The layers {first} to {last} of {len(values)} are not two blocks of block={block} or more: use a smaller "
            "block, or other values of first and last."
        )
    if count % block:
        raise ValueError(
            f"The layers {first} to {last} are {count}, no multiple of block={block}: choose first and last such that "
            "they are whole blocks."
        )
    middle, places = values[first : last + 1], np.arange(first, last + 1)
    if not np.isfinite(middle).all():
        raise ValueError(
            f"values[{places[~np.isfinite(middle)][0]}] is not a number: leave it out with first and last."
        )
    middle = middle - np.polyval(np.polyfit(places, middle, 1), places)
    total = np.square(middle).sum()
    if total <= (1e-9 * np.abs(values[first : last + 1]).max()) ** 2 * count:
        raise ValueError(f"values is a straight line over the layers {first} to {last}: nothing in it can repeat.")

    of_phase = places % block == np.arange(block)[:, None]  # (block, count)

    def between(curves: np.ndarray) -> np.ndarray:
        return np.square(curves @ of_phase.T).sum(-1) / (count // block * total)

    eta_squared = float(between(middle))
    drawn = between(np.random.default_rng(seed).permuted(np.tile(middle, (permutations, 1)), axis=1))
    # The order that was measured is one of those that chance could have given.
    p_value = (1 + np.count_nonzero(drawn >= eta_squared * (1 - 1e-12))) / (1 + permutations)
    spectrum = np.square(np.abs(np.fft.rfft(middle)))[1:]
    return Periodicity(
        detrended=middle,
        block=block,
        first=first,
        last=last,
        autocorrelation=float((middle[:-block] * middle[block:]).sum() / total),
        eta_squared=eta_squared,
        power=float(spectrum[count // block - 1 :: count // block].sum() / spectrum.sum()),
        p_value=p_value,
        permutations=permutations,
        curve=curve,
    )
