"""Checkpoints of other code, turned into checkpoints of these models with a ledger of every tensor."""

from .iso_depth import Ledger, convert_iso_depth


__all__ = ["Ledger", "convert_iso_depth"]
