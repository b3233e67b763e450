"""How many recurrences a training step runs: a pure function of (seed, step, micro-step), so that ranks agree."""

import math
from dataclasses import dataclass

import numpy as np
from transformers import TrainerCallback


SCHEMES = ("fixed", "uniform", "poisson-lognormal", "lognormal-clip")


@dataclass(frozen=True)
class DepthSampler:
    """
    A law for the number of recurrences (section 6 and 13.1 of arXiv 2608.15062's specification).

    Args:
        scheme (`str`):
            `"fixed"` always `maximum`; `"uniform"` over `minimum`..`maximum`; `"poisson-lognormal"` 1 + Poisson(l)
            with l log-normal of mean `mean` (Huginn; the draw's own mean is `mean` + 1 before clipping);
            `"lognormal-clip"` a rounded log-normal with its mode at `mean`. All are clipped to the two bounds.
        maximum (`int`): The most recurrences a draw may give.
        minimum (`int`, defaults to 1): The fewest.
        mean (`float`, *optional*): Needed by the two log-normal schemes.
        sigma (`float`, *optional*): Spread of the log-normal, 0.5 (`poisson-lognormal`) or 0.435 by default.
    """

    scheme: str
    maximum: int
    minimum: int = 1
    mean: float | None = None
    sigma: float | None = None

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} must be one of {', '.join(SCHEMES)}.")
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum={self.minimum} must be at least 1 and at most maximum={self.maximum}.")
        if "lognormal" in self.scheme and (self.mean is None or self.mean <= 0):
            raise ValueError(f"mean={self.mean} must be positive with scheme={self.scheme!r}.")

    def draw(self, seed: int, step: int, micro_step: int = 0) -> int:
        """The number of recurrences of one micro-batch."""
        generator = np.random.default_rng([seed, step, micro_step])
        if self.scheme == "fixed":
            return self.maximum
        if self.scheme == "uniform":
            return int(generator.integers(self.minimum, self.maximum + 1))
        if self.scheme == "poisson-lognormal":
            sigma = 0.5 if self.sigma is None else self.sigma
            drawn = generator.poisson(generator.lognormal(math.log(self.mean) - sigma**2 / 2, sigma)) + 1
        else:
            sigma = 0.435 if self.sigma is None else self.sigma
            drawn = round(generator.lognormal(math.log(self.mean) + sigma**2, sigma))
        return int(min(max(drawn, self.minimum), self.maximum))


class DepthSamplingCallback(TrainerCallback):
    """
    Draws the recurrences of each micro-batch in transformers' Trainer: `Trainer(..., callbacks=[...])`. Between
    steps, for evaluation and saving, the configured number is back in place.
    """

    def __init__(self, sampler: DepthSampler, seed: int | None = None):
        self.sampler = sampler
        self.seed = seed
        self._configured: int | None = None
        self._micro_step = 0

    def _draw(self, args, state, model):
        seed = args.seed if self.seed is None else self.seed
        _looped_config(model).num_recurrences = self.sampler.draw(seed, state.global_step, self._micro_step)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._configured = _looped_config(model).num_recurrences
        self._micro_step = 0
        self._draw(args, state, model)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self._micro_step += 1
        self._draw(args, state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        _looped_config(model).num_recurrences = self._configured


def _looped_config(model):
    """The configuration that the forward reads, through DDP and peft wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model.config
