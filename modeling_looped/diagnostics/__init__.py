"""Diagnostics: see the iteration. Needs the extra `diagnostics`."""
