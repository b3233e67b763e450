"""Learning rates carried from the reference size to others: HyperP and muP (arXiv 2604.21106, section 5.3 of its spec)."""

from dataclasses import dataclass

from modeling_looped.configuration_looped import require_int


REFERENCE_WIDTH = 640
REFERENCE_BATCH = 2**18  # tokens of an optimizer step
# Training tokens of the reference run: 10 for each effective parameter of size 10, dense and (for every r > 1) at r = 4.
REFERENCE_TOKENS = {False: 983_315_200, True: 1_016_083_200}
REFERENCE_RATES = {"matrix": 0.014, "embedding": 0.3, "head": 0.004, "norm": 0.005, "lanes": 0.01}


@dataclass(frozen=True)
class LearningRates:
    """Peaks: of MuonH on the matrices, and of AdamW on embedding, head, norms and the lanes of hyperconnections."""

    matrix: float
    embedding: float
    head: float
    norm: float
    lanes: float


def learning_rates(hidden_size: int, batch_tokens: int, training_tokens: int, num_recurrences: int) -> LearningRates:
    """
    The reference rates at another width, batch and length of training. The matrices' rate follows batch and tokens, and
    no width (a step on the sphere is invariant to it); embedding and head follow batch and width, norms and lanes width
    alone, as in the official code.

    Args:
        hidden_size: Width d.
        batch_tokens: Tokens of an optimizer step.
        training_tokens: Tokens of the whole run.
        num_recurrences: Passes over the core; 1 has the dense reference.
    """
    for name, value in (("hidden_size", hidden_size), ("batch_tokens", batch_tokens)):
        require_int(name, value, 1)
    require_int("training_tokens", training_tokens, 1)
    require_int("num_recurrences", num_recurrences, 1)
    batch = (batch_tokens / REFERENCE_BATCH) ** 0.558
    width = (hidden_size / REFERENCE_WIDTH) ** -0.5
    data = (training_tokens / REFERENCE_TOKENS[num_recurrences > 1]) ** -0.32
    rates = REFERENCE_RATES
    return LearningRates(
        matrix=rates["matrix"] * batch * data,
        embedding=rates["embedding"] * batch * width,
        head=rates["head"] * batch * width,
        norm=rates["norm"] * width,
        lanes=rates["lanes"] * width,
    )
