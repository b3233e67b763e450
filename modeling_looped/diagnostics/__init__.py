"""
Diagnostics: see the iteration. Measurements of what executed layers do, on this package's models and on any decoder of
transformers that `ANATOMIES` names (arXiv 2602.16490, section 6 of its specification; 2608.15062, section 11). Each is a
function of a model and texts as lists of token ids, and returns a dataclass with `to_frame()`, `plot(ax)` and
`headline()`. Needs the extra `diagnostics`.
"""

from .gates import (
    gate_attribution,
    gate_interventions,
    gate_statistics,
    projection_contrast,
    token_difficulty,
    token_losses,
)
from .lens import TunedLens, early_exit_accuracy, lens_statistics, task_items, train_tuned_lens
from .measurement import Measurement
from .order import Score, held_out_loss, order_curves, repeat_curves, task_accuracy
from .periodicity import periodicity
from .probe import ANATOMIES, Anatomy, Probe
from .residual import residual_statistics
from .skipping import depth_score, skip_effects
from .states import exit_curve, fixed_point, state_similarity
from .texts import encode, gsm8k_prompts, math_problems, multi_hop_questions, plain_texts, random_rows
from .weights import block_similarity, growth_ancestry


__all__ = [
    "ANATOMIES",
    "Anatomy",
    "Measurement",
    "Probe",
    "Score",
    "TunedLens",
    "block_similarity",
    "depth_score",
    "early_exit_accuracy",
    "encode",
    "exit_curve",
    "fixed_point",
    "gate_attribution",
    "gate_interventions",
    "gate_statistics",
    "growth_ancestry",
    "gsm8k_prompts",
    "held_out_loss",
    "lens_statistics",
    "math_problems",
    "multi_hop_questions",
    "order_curves",
    "periodicity",
    "plain_texts",
    "projection_contrast",
    "random_rows",
    "repeat_curves",
    "residual_statistics",
    "skip_effects",
    "state_similarity",
    "task_accuracy",
    "task_items",
    "token_difficulty",
    "token_losses",
    "train_tuned_lens",
]
