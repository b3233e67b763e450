"""Continuation loss: what a model loses on the text that follows, in nats per token."""

import datasets
import evaluate

from modeling_looped.eval.statistics import aggregate, bootstrap_stderr


class ContinuationLoss(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The summed negative log-likelihood of all items over their summed tokens.",
            citation="arXiv 2604.21106, section 6.3 of its specification",
            inputs_description=(
                "nats: negative log-likelihood of each item; tokens: how many tokens of it were predicted; "
                "stderr: with True, a bootstrap standard error over items too."
            ),
            features=datasets.Features({"nats": datasets.Value("float64"), "tokens": datasets.Value("float64")}),
        )

    def _compute(self, nats: list[float], tokens: list[float], stderr: bool = False) -> dict[str, float]:
        items = list(zip(nats, tokens))
        loss = {"continuation_loss": aggregate(items)}
        return loss | ({"continuation_loss_stderr": bootstrap_stderr(items)} if stderr else {})


METRIC = ContinuationLoss
