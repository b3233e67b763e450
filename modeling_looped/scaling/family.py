"""
Iso-depth families as formulas in the width: arXiv 2604.21106, sections 2.1, 2.2 and 3.3 of its spec. The same counts as
`modeling_looped.accounting` finds by building the model, here for real-valued widths and whole arrays of them.
"""

from dataclasses import dataclass

import numpy as np

from ..configuration_looped import require_int
from ..configuration_looped_gpt import INJECTIONS


DECOMPOSITIONS = ("regression", "paper")
REGRESSION_RECURRENCES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Family:
    """
    Models of one effective depth, `prelude + looped + coda`: a core of `looped / r` layers runs r times between a
    prelude and a coda. The default is the paper's family of 20 layers. r = 1 is one stack without an injection. Layers
    are those of `LoopedGPTConfig` with as many key-value heads as query heads and an MLP of 4d.

    Methods take widths d and recurrence counts r as numbers or arrays that broadcast, real-valued too, and return
    floats or float64 arrays of the broadcast shape.

    Args:
        prelude: Layers that run once, first.
        looped: Executed layers between prelude and coda, `num_core_layers * num_recurrences`.
        coda: Layers that run once, last.
        injection: `"linear"`, `"additive"`, `"none"` or `"hyperconnection"`, where r > 1.
        vocab_size: Rows of the embedding and of the head, which are not tied.
        sequence_length: Tokens of context that attention is counted over.
        head_dim: Size of a head, of which real models have a whole number (see `round_width`).
        num_lanes: Lanes of the hyperconnection.

    Raises:
        `ValueError`: for counts that no model has.
    """

    prelude: int = 2
    looped: int = 16
    coda: int = 2
    injection: str = "linear"
    vocab_size: int = 32064
    sequence_length: int = 2048
    head_dim: int = 128
    num_lanes: int = 2

    def __post_init__(self):
        least = {"prelude": 0, "looped": 1, "coda": 0, "vocab_size": 1, "sequence_length": 1, "head_dim": 1}
        for name, bound in {**least, "num_lanes": 2}.items():
            require_int(name, getattr(self, name), bound)
        if self.injection not in INJECTIONS:
            raise ValueError(f"injection={self.injection!r} must be one of {', '.join(map(repr, INJECTIONS))}.")

    @property
    def effective_depth(self) -> int:
        """Executed layers, the same for every r."""
        return self.prelude + self.looped + self.coda

    def recurrences(self) -> list[int]:
        """Every r that splits the looped layers into whole layers."""
        return [r for r in range(1, self.looped + 1) if self.looped % r == 0]

    def fields(self, width: int, r: int) -> dict:
        """
        Of the `LoopedGPTConfig` of a real model; r = 1 is one stack without injection.

        Raises:
            `ValueError`: where `width` is no multiple of the heads' size, or r does not divide the looped layers.
        """
        if width != int(width) or width < 1 or int(width) % self.head_dim:
            raise ValueError(f"width={width} must be a multiple of head_dim={self.head_dim}.")
        if r not in self.recurrences():
            raise ValueError(
                f"num_recurrences={r} does not split the family's {self.looped} looped layers: choose one of "
                f"{self.recurrences()}."
            )
        width, r = int(width), int(r)  # a row of a table has numpy's
        layers = (self.prelude, self.looped // r, self.coda) if r > 1 else (0, self.effective_depth, 0)
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": width,
            "num_attention_heads": width // self.head_dim,
            **dict(zip(("num_prelude_layers", "num_core_layers", "num_coda_layers"), layers)),
            "num_recurrences": r,
            "injection": self.injection if r > 1 else "none",
            "num_lanes": self.num_lanes,
            "max_position_embeddings": self.sequence_length,
        }

    def columns(self, width: int, r: int) -> dict:
        """What a table of runs says of a model of `width`, besides its run: the columns that `fit` reads."""
        counts = {"n_unique": self.n_all(width, r)}
        for suffix, decomposition in (("paper", "paper"), ("ls", "regression")):
            counts[f"n_once_{suffix}"], counts[f"n_rec_{suffix}"] = self.split(width, r, decomposition)
        return {"r": r, "s": width / 64, "d_model": width, **counts, "flops_per_token": self.flops_per_token(width, r)}

    def n_all(self, d, r):
        """Parameters without embedding and head: matrices and norm scales, the paper's N with norms (section 2.1)."""
        d, r = _positive("width", d), _positive("r", r)
        layers = self.prelude + self.looped / r + self.coda
        lanes = np.where((r > 1) & (self.injection == "hyperconnection"), r * self._lane_weights, 0)
        return _plain(layers * (12 * d**2 + 2 * d) + self._injection_matrix(d, r) + lanes + 3 * d)

    def total_parameters(self, d, r):
        """`n_all` with the embedding and the head, which is what is stored."""
        return self.n_all(d, r) + 2 * self.vocab_size * _positive("width", d)

    def split(self, d, r, decomposition: str = "regression"):
        """
        `(n_once, n_rec)`, parameters that run once and those that run r times.

        `"paper"` is the definition in the paper's text (section 3.2): matrices only, prelude and coda against core and
        injection. `"regression"` is what its published numbers were fitted with (section 3.3 of the spec): at each
        width, the line of N_all(r) against `looped / r` over r in {1, 2, 4, 8}, whose intercept is n_once and whose
        slope times `looped / r` is n_rec.

        Raises:
            `ValueError`: for another decomposition.
        """
        if decomposition not in DECOMPOSITIONS:
            raise ValueError(f"decomposition={decomposition!r} must be one of {', '.join(map(repr, DECOMPOSITIONS))}.")
        d, r = np.broadcast_arrays(_positive("width", d), _positive("r", r))
        core = self.looped / r
        if decomposition == "paper":
            once = (self.prelude + self.coda) * 12 * d**2
            return _plain(once), _plain(core * 12 * d**2 + self._injection_matrix(d, r))
        layers = self.looped / np.array(REGRESSION_RECURRENCES)
        counts = self.n_all(d[..., None], np.array(REGRESSION_RECURRENCES))
        centred = layers - layers.mean()
        layer = (centred * counts).sum(-1) / (centred**2).sum()
        return _plain(counts.mean(-1) - layer * layers.mean()), _plain(layer * core)

    def forward_flops_per_token(self, d, r):
        """FLOPs of the forward pass per token, counted as in `flops_per_token`."""
        once, core_pass = self._forward_flops(d, r)
        return _plain(once + _positive("r", r) * core_pass)

    def flops_per_token(self, d, r, backprop_recurrences: int | None = None):
        """
        FLOPs of training per token (section 2.2): weights of layers with their norms, injection and head, and attention
        over the whole `sequence_length`. With `backprop_recurrences`, the passes before the last so many are not
        counted backward.
        """
        r = _positive("r", r)
        once, core_pass = self._forward_flops(d, r)
        backprop = r
        if backprop_recurrences is not None:
            backprop = np.minimum(r, _positive("backprop_recurrences", backprop_recurrences))
        return _plain(3 * once + (r + 2 * backprop) * core_pass)

    def round_width(self, d):
        """The nearest width of a whole number of heads, at least one."""
        return _plain(self.head_dim * np.maximum(1, np.round(_positive("width", d) / self.head_dim)))

    @property
    def _lane_weights(self) -> int:
        return self.num_lanes**2 + 2 * self.num_lanes

    def _injection_matrix(self, d, r):
        return np.where((r > 1) & (self.injection == "linear"), 2 * d**2, 0)

    def _forward_flops(self, d, r):
        """`(once, core_pass)`: prelude, coda and head, and one of the r passes over the core."""
        d, r = _positive("width", d), _positive("r", r)
        layer = 2 * (12 * d**2 + 2 * d) + 4 * d * self.sequence_length
        lanes = np.where((r > 1) & (self.injection == "hyperconnection"), self._lane_weights * d, 0)
        injection = 2 * (self._injection_matrix(d, r) + lanes)
        return (self.prelude + self.coda) * layer + 2 * self.vocab_size * d, self.looped / r * layer + injection


ISO_DEPTH = Family()


def _positive(name: str, values) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if not (values > 0).all():
        raise ValueError(f"{name}={values[~(values > 0)].flat[0]:g} must be positive.")
    return values


def _plain(values):
    """A float for one number, an array for many."""
    return float(values) if np.ndim(values) == 0 else np.asarray(values, dtype=np.float64)


__all__ = ["DECOMPOSITIONS", "ISO_DEPTH", "REGRESSION_RECURRENCES", "Family"]
