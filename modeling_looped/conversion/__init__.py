"""Checkpoints of other code, turned into checkpoints of these models and back, with a ledger of every tensor."""

from .iso_depth import convert_iso_depth
from .ledger import Comparison, ConversionError, Ledger, Use


__all__ = ["Comparison", "ConversionError", "Ledger", "Use", "convert_iso_depth"]
