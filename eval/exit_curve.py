"""Early exit: what a looped model predicts after each recurrence (section 7 of arXiv 2608.15062's specification)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExitPoint:
    """
    The exit after `num_recurrences` = k passes; R is the configured number, 0 the fewest that the model can run.

    Args:
        loss (`float`): L(k), nats per token.
        gain (`float`, *optional*): L(k-1) - L(k); `None` at the first exit.
        frac_cum (`float`): (L(0) - L(k)) / (L(0) - L(R)).
        accuracy (`float`): Share of tokens that are predicted as the most likely next one.
        retention (`float`): `accuracy` over that at R.
        kl_to_final (`float`): Mean KL(p_R || p_k) over tokens, nats.
        kl_from_final (`float`): Mean KL(p_k || p_R).
    """

    num_recurrences: int
    loss: float
    gain: float | None
    frac_cum: float
    accuracy: float
    retention: float
    kl_to_final: float
    kl_from_final: float


@torch.no_grad()
def exit_curve(
    model: PreTrainedModel,
    batches: Iterable[torch.Tensor | Mapping[str, torch.Tensor]],
    max_recurrences: int | None = None,
) -> list[ExitPoint]:
    """
    One point for each number of passes that `model` can run, up to `max_recurrences`, R by default.

    Args:
        batches: `input_ids` of shape (batch, length), or a mapping with them and optionally `attention_mask` and
            `labels`; without labels every attended token is predicted from those before it.

    Raises:
        `ValueError`: for a model without recurrences, a `max_recurrences` below R or that the model cannot run, or
        batches without two tokens in a row.
    """
    config = model.config
    final_count = getattr(config, "num_recurrences", None)
    if final_count is None:
        raise ValueError(f"{type(model).__name__} has no recurrences to leave early: use a looped model.")
    most = final_count if max_recurrences is None else max_recurrences
    if most < final_count:
        raise ValueError(
            f"max_recurrences={most} must be at least num_recurrences={final_count}, which every exit is compared with."
        )
    config.check_recurrences(most)
    counts = [count for count in range(config.min_recurrences, most + 1) if can_run(config, count)]
    sums = {count: torch.zeros(4, dtype=torch.float64) for count in counts}
    predicted, training = 0, model.training
    model.eval()
    for batch in batches:
        batch = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch.pop("labels", None)
        if labels is None:
            labels = batch["input_ids"]
            if "attention_mask" in batch:
                labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        chosen = labels[:, 1:] != -100
        targets = labels[:, 1:][chosen]
        predicted += len(targets)

        def log_probabilities(count):
            logits = model(**batch, use_cache=False, num_recurrences=count).logits
            return logits[:, :-1][chosen].float().log_softmax(-1)

        final = log_probabilities(final_count)
        for count in counts:
            here = final if count == final_count else log_probabilities(count)
            sums[count] += torch.tensor([
                F.nll_loss(here, targets, reduction="sum"),
                (here.argmax(-1) == targets).sum(),
                F.kl_div(here, final, log_target=True, reduction="sum"),
                F.kl_div(final, here, log_target=True, reduction="sum"),
            ])  # fmt: skip
    model.train(training)
    if predicted == 0:
        raise ValueError("The batches hold no token to predict: give rows of at least two tokens with labels.")

    means = {count: (total / predicted).tolist() for count, total in sums.items()}
    first_loss, (final_loss, final_accuracy, *_) = means[counts[0]][0], means[final_count]
    points = []
    for count, (loss, accuracy, to_final, from_final) in means.items():
        gain = points[-1].loss - loss if points else None
        frac_cum = _ratio(first_loss - loss, first_loss - final_loss)
        retention = _ratio(accuracy, final_accuracy)
        points.append(ExitPoint(count, loss, gain, frac_cum, accuracy, retention, to_final, from_final))
    return points


def exit_table(points: list[ExitPoint]) -> str:
    """The `points` of a curve as a text table."""
    rows = ["recurrences  nats/token     gain  frac_cum   top-1  retention  KL(final||k)  KL(k||final)"]
    for point in points:
        gain = "" if point.gain is None else f"{point.gain:.4f}"
        rows.append(
            f"{point.num_recurrences:11d}  {point.loss:10.4f}  {gain:>7}  {point.frac_cum:8.3f}  "
            f"{point.accuracy:6.3f}  {point.retention:9.3f}  {point.kl_to_final:12.4f}  {point.kl_from_final:12.4f}"
        )
    return "\n".join(rows)


def can_run(config, count: int) -> bool:
    """Whether a model of this configuration can make `count` passes."""
    try:
        config.check_recurrences(count)
    except ValueError:
        return False
    return True


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
