"""Bits per byte: what a model loses on a text, over the size of the text, so that tokenizers can be compared."""

import math

import datasets
import evaluate

from modeling_looped.eval.statistics import aggregate, bootstrap_stderr


class BitsPerByte(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The summed negative log-likelihood of all items in bits over their summed UTF-8 bytes.",
            citation="arXiv 2604.21106, section 6.3 of its specification, per byte in place of per token",
            inputs_description=(
                "nats: negative log-likelihood of each item; bytes: its size in UTF-8; "
                "stderr: with True, a bootstrap standard error over items too."
            ),
            features=datasets.Features({"nats": datasets.Value("float64"), "bytes": datasets.Value("float64")}),
        )

    def _compute(self, nats: list[float], bytes: list[float], stderr: bool = False) -> dict[str, float]:
        items = [(one / math.log(2), size) for one, size in zip(nats, bytes)]
        bits = {"bits_per_byte": aggregate(items)}
        return bits | ({"bits_per_byte_stderr": bootstrap_stderr(items)} if stderr else {})


METRIC = BitsPerByte
