"""
Metrics of `evaluate` that need no network: `evaluate.load(metric_path("continuation_loss"))`, or `load_metric`, which
makes the same without a copy in the cache of modules.
"""

from functools import cache
from importlib import import_module
from importlib.resources import files


METRICS = ("bits_per_byte", "continuation_loss")


def metric_path(name: str) -> str:
    """Where `evaluate.load` finds the metric `name`; raises `ValueError` for one that is not here."""
    if name not in METRICS:
        raise ValueError(f"metric {name!r} must be {' or '.join(map(repr, METRICS))}.")
    return str(files(__name__) / name)


@cache
def load_metric(name: str):
    """The `evaluate.Metric` of that name, which keeps what it is given in memory."""
    metric_path(name)
    module = import_module(f"{__name__}.{name}.{name}")
    return module.METRIC(keep_in_memory=True)
