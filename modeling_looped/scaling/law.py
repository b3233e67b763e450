"""
Scaling laws as values: arXiv 2604.21106, section 3.1 of its spec. Losses in nats per token, D in training tokens.
    Chinchilla   L = E + A N^-alpha + B D^-beta
    joint        the same with N = n_once + r^phi n_rec
"""

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Self

import numpy as np


class _Law:
    """A law to and from JSON."""

    def to_dict(self) -> dict:
        """For JSON."""
        return {**asdict(self), "at_bounds": list(self.at_bounds)}

    @classmethod
    def from_dict(cls, values: dict) -> Self:
        """
        Of `to_dict`.

        Raises:
            `ValueError`: where a parameter is missing or a name is unknown.
        """
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in values]
        unknown = [name for name in values if name not in {field.name for field in fields(cls)}]
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has the unknown {', '.join(map(repr, unknown))}"
            raise ValueError(f"This is no dictionary of {cls.__name__}.to_dict, it {what}.")
        return cls(**{**values, "at_bounds": tuple(values.get("at_bounds", ()))})


@dataclass(frozen=True)
class ChinchillaLaw(_Law):
    """
    The law of one architecture. Where it was fitted: `huber`, the objective at the fit (sum over runs of residuals of
    log L); `r2` on raw nats; `num_runs`; `restarts` random starts, of which `restarts_at_best` reached the fit;
    `at_bounds`, parameters that lie on the edge of the box they were looked for in, which are not to be trusted.
    """

    A: float
    alpha: float
    B: float
    beta: float
    E: float
    huber: float | None = None
    r2: float | None = None
    num_runs: int | None = None
    restarts: int | None = None
    restarts_at_best: int | None = None
    at_bounds: tuple[str, ...] = ()

    def predict(self, n, tokens):
        """Loss of `n` parameters (N_all) after `tokens`, broadcast."""
        return _loss(self, np.asarray(n, dtype=np.float64), tokens)


@dataclass(frozen=True)
class JointLaw(_Law):
    """
    The law of all recurrence counts: a core of n_rec parameters that runs r times counts as r^phi n_rec. phi = 0: more
    passes are worth nothing; phi = 1: a pass is worth as much as new layers. `decomposition` says what n_once and n_rec
    are: `"regression"` or `"paper"` (`Family.split`), or `"own"`, the columns of the runs. `phi_fixed` where phi was
    not fitted. The rest is as in `ChinchillaLaw`.
    """

    A: float
    alpha: float
    B: float
    beta: float
    E: float
    phi: float
    decomposition: str = "regression"
    huber: float | None = None
    r2: float | None = None
    num_runs: int | None = None
    restarts: int | None = None
    restarts_at_best: int | None = None
    phi_fixed: bool = False
    at_bounds: tuple[str, ...] = ()

    def effective(self, n_once, n_rec, r):
        """N_eff = n_once + r^phi n_rec, broadcast."""
        return np.asarray(n_once, dtype=np.float64) + np.asarray(r, dtype=np.float64) ** self.phi * np.asarray(n_rec)

    def predict(self, n_once, n_rec, tokens, r):
        """Loss of models of `n_once` and `n_rec` parameters after `tokens`, broadcast."""
        return _loss(self, self.effective(n_once, n_rec, r), tokens)

    def g(self, n_once, n_rec, r):
        """
        N_eff / N, of N = `n_once` + `n_rec`: by how much the model counts for more than its parameters (section 3.5 of
        the spec).
        """
        return self.effective(n_once, n_rec, r) / (np.asarray(n_once, dtype=np.float64) + np.asarray(n_rec))


# In full precision on the authors' project page (section 3.3 of the spec).
PUBLISHED = JointLaw(
    A=28.027,
    alpha=0.19924,
    B=915.82,
    beta=0.36863,
    E=1.56773,
    phi=0.459,
    decomposition="regression",
    r2=0.9972,
    num_runs=116,
)


def _loss(law, n: np.ndarray, tokens):
    loss = law.E + law.A * n**-law.alpha + law.B * np.asarray(tokens, dtype=np.float64) ** -law.beta
    return float(loss) if np.ndim(loss) == 0 else loss


__all__ = ["PUBLISHED", "ChinchillaLaw", "JointLaw"]
