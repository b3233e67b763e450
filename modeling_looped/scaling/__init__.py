"""The phi laboratory: what a recurrence is worth, fitted from runs (arXiv 2604.21106). Needs the extra `scaling`."""

from .family import DECOMPOSITIONS, ISO_DEPTH, Family
from .fit import (
    Bootstrap,
    bootstrap,
    fit_chinchilla,
    fit_joint_law,
    half_budgets,
    leave_one_cell_out,
    predicted_losses,
    residual_table,
)
from .law import PUBLISHED, ChinchillaLaw, JointLaw


__all__ = [
    "DECOMPOSITIONS",
    "ISO_DEPTH",
    "PUBLISHED",
    "Bootstrap",
    "ChinchillaLaw",
    "Family",
    "JointLaw",
    "bootstrap",
    "fit_chinchilla",
    "fit_joint_law",
    "half_budgets",
    "leave_one_cell_out",
    "predicted_losses",
    "residual_table",
]
