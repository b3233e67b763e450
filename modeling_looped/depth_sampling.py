"""How many recurrences a training step runs: a pure function of (seed, step, micro-step), so that ranks agree."""

import functools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from transformers import TrainerCallback

from .keyed_noise import NoiseKey, set_noise_key


SCHEMES = ("fixed", "uniform", "poisson-lognormal", "lognormal-clip")
CURRICULA = {"linear": lambda progress: progress, "1-sqrt": lambda progress: 1 - math.sqrt(1 - progress)}


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
        curriculum (`str`, *optional*):
            Lets the depth grow from `minimum` over the first `curriculum_steps` steps: `"linear"`, or `"1-sqrt"`, slow
            at first. What grows is the upper end of `fixed` and `uniform`, and `mean` of the log-normal schemes.
        curriculum_steps (`int`, *optional*): Needed by `curriculum`.
    """

    scheme: str
    maximum: int
    minimum: int = 1
    mean: float | None = None
    sigma: float | None = None
    curriculum: str | None = None
    curriculum_steps: int | None = None

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} must be one of {', '.join(SCHEMES)}.")
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(f"minimum={self.minimum} must be at least 1 and at most maximum={self.maximum}.")
        if "lognormal" in self.scheme and (self.mean is None or self.mean <= 0):
            raise ValueError(f"mean={self.mean} must be positive with scheme={self.scheme!r}.")
        if self.curriculum is not None and self.curriculum not in CURRICULA:
            raise ValueError(f"curriculum={self.curriculum!r} must be one of {', '.join(CURRICULA)}, or None.")
        if self.curriculum is None and self.curriculum_steps is not None:
            raise ValueError(f"curriculum_steps={self.curriculum_steps} needs a curriculum: {', '.join(CURRICULA)}.")
        if self.curriculum is not None and (self.curriculum_steps is None or self.curriculum_steps < 1):
            raise ValueError(
                f"curriculum_steps={self.curriculum_steps} must be at least 1 with curriculum={self.curriculum!r}."
            )

    def draw(self, seed: int, step: int, micro_step: int = 0) -> int:
        """The number of recurrences of one micro-batch, number `micro_step` of optimizer step `step`."""
        generator = np.random.default_rng([seed, step, micro_step])
        if self.scheme == "fixed":
            return round(self._grown(self.maximum, step))
        if self.scheme == "uniform":
            return int(generator.integers(self.minimum, round(self._grown(self.maximum, step)) + 1))
        mean = self._grown(self.mean, step)
        if self.scheme == "poisson-lognormal":
            sigma = 0.5 if self.sigma is None else self.sigma
            drawn = generator.poisson(generator.lognormal(math.log(mean) - sigma**2 / 2, sigma)) + 1
        else:
            sigma = 0.435 if self.sigma is None else self.sigma
            drawn = round(generator.lognormal(math.log(mean) + sigma**2, sigma))
        return int(min(max(drawn, self.minimum), self.maximum))

    @property
    def law(self) -> dict[int, float]:
        """The probability of each depth, any curriculum done; of the log-normal laws over 20,000 draws."""
        return _law(self)

    def _grown(self, target: float, step: int) -> float:
        """What the curriculum has made of `target` at `step`."""
        if self.curriculum is None or step >= self.curriculum_steps:
            return target
        return self.minimum + CURRICULA[self.curriculum](step / self.curriculum_steps) * (target - self.minimum)


@functools.cache
def _law(sampler: DepthSampler) -> dict[int, float]:
    if sampler.scheme == "fixed":
        return {sampler.maximum: 1.0}
    depths = range(sampler.minimum, sampler.maximum + 1)
    if sampler.scheme == "uniform":
        return dict.fromkeys(depths, 1 / len(depths))
    first = sampler.curriculum_steps or 0
    drawn = Counter(sampler.draw(0, first + step) for step in range(20_000))
    return {depth: drawn[depth] / drawn.total() for depth in depths}


class DepthSamplingCallback(TrainerCallback):
    """
    Draws the recurrences of each micro-batch in transformers' Trainer, and keys the noise of models that have some:
    `Trainer(..., callbacks=[...])`. Between steps, for evaluation and saving, the configured number is back in place.
    """

    def __init__(self, sampler: DepthSampler, seed: int | None = None):
        self.sampler = sampler
        self.seed = seed
        self._configured: int | None = None
        self._micro_step = 0

    def _draw(self, args, state, model):
        seed = args.seed if self.seed is None else self.seed
        model = _unwrapped(model)
        model.config.num_recurrences = self.sampler.draw(seed, state.global_step, self._micro_step)
        first_row = args.process_index * args.per_device_train_batch_size
        set_noise_key(model, NoiseKey(seed, state.global_step, self._micro_step, first_row))

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self._configured = _unwrapped(model).config.num_recurrences
        self._micro_step = 0
        self._draw(args, state, model)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self._micro_step += 1
        self._draw(args, state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model = _unwrapped(model)
        model.config.num_recurrences = self._configured
        set_noise_key(model, None)


def _unwrapped(model):
    """The model whose configuration the forward reads, through DDP and peft wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
