"""
lm-evaluation-harness's model `looped`: any causal language model as its `hf` has it, at a number of recurrences that
can be turned between evaluations, with the head run at the scored positions only.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import modeling_looped  # noqa: F401  registers the models
from modeling_looped.looping import apply_loops
from modeling_looped.recipes.scoring import Continuation, continuation_begin, score_continuations


logger = logging.getLogger(__name__)


def token_pair(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """
    Both as the model reads them, which is in one piece: the tokens that `context` has by itself, as far as the whole
    text begins with them, and the others, which are scored. As in lm-eval, white space at the end of `context` belongs
    to `continuation`. Where a tokenizer merges across the boundary, the merged token is scored.
    """
    whole, _, begin = _boundary(encode, context, continuation)
    return whole[:begin], whole[begin:]


def _boundary(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], list[int], int]:
    """The tokens of both together, those of the context by itself, and where the continuation begins in the first."""
    whole, alone = encode(context + continuation), encode(context.rstrip())
    return whole, alone, continuation_begin(whole, alone)


@register_model("looped")
class LoopedLM(HFLM):
    """
    Args:
        pretrained: A checkpoint, or a model; looped ones of any family with their loops, and any other one.
        num_recurrences (`int`, *optional*): Passes over the core in log-likelihoods and in generation; the configured
            number by default. Can be assigned later.
        exit (`int`, *optional*): Leave after so many of the passes: they are the only ones that run.
        padding_side (`str`): `"right"` or `"left"`, of rows whose log-likelihood is wanted. Texts to continue are padded
            on the left, as everywhere.
        kwargs: As for lm-eval's `hf`.

    Prompts longer than the model's `max_length` lose their beginning, as in `hf`; how many did is in the results'
    `config`, as is how many continuations begin inside a token.

    Raises:
        `ValueError`: for passes that the model cannot run, an empty continuation, or one longer than `max_length`.
    """

    def __init__(
        self,
        pretrained,
        num_recurrences: int | None = None,
        exit: int | None = None,
        padding_side: str = "right",
        **kwargs,
    ):
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side={padding_side!r} must be 'left' or 'right'.")
        super().__init__(pretrained, **kwargs)
        apply_loops(self.model)
        self.padding_side = padding_side
        self.truncated, self.merged = set(), set()
        self._pairs: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self.exit = None if exit is None else self._checked_exit(exit, num_recurrences)
        self.num_recurrences = num_recurrences if exit is None else exit

    @property
    def num_recurrences(self) -> int | None:
        """Passes over the core; `None` in a model that has none to turn."""
        return self._num_recurrences

    @num_recurrences.setter
    def num_recurrences(self, value: int | None):
        configured = getattr(self.model.config, "num_recurrences", None)
        if value is not None:
            if configured is None:
                raise ValueError(
                    f"num_recurrences={value}: {type(self.model).__name__} has no recurrences to turn; leave it out."
                )
            self.model.config.check_recurrences(value)
        self._num_recurrences = configured if value is None else value

    def _checked_exit(self, exit: int, num_recurrences: int | None) -> int:
        most = getattr(self.model.config, "num_recurrences", None) if num_recurrences is None else num_recurrences
        if most is None:
            raise ValueError(
                f"exit={exit}: {type(self.model).__name__} has no recurrences to leave early; leave it out."
            )
        if isinstance(exit, bool) or not isinstance(exit, int) or exit > most:
            raise ValueError(
                f"exit={exit!r} must be a whole number of passes, at most the {most} that num_recurrences asks for."
            )
        return exit

    @property
    def _depth(self) -> dict:
        return {} if self._num_recurrences is None else {"num_recurrences": self._num_recurrences}

    def _model_call(self, inps, attn_mask=None, labels=None):
        # Only the search for a batch size comes here.
        with torch.no_grad(), self._autocast():
            return self.model(inps, use_cache=False, **self._depth).logits

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        return super()._model_generate(context, max_length, stop, **{**self._depth, **generation_kwargs})

    def _autocast(self):
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = self._pairs.get((context, continuation))
        if pair is None:
            whole, alone, begin = _boundary(self.tok_encode, context, continuation)
            pair = whole[:begin], whole[begin:]
            if begin < len(alone):
                self.merged.add((context, continuation))
                if begin == 0:  # nothing before: as with an empty context
                    pair = [self.prefix_token_id], whole
            self._pairs[context, continuation] = pair
        return pair

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for context, continuation in (request.args for request in requests):
            if continuation == "":
                raise ValueError(f"The continuation '' of {context[-80:]!r} has no token to score: leave the item out.")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest, continuations, known = self.max_length, [], len(self.truncated)
        for name, context, continuation in requests:
            if len(continuation) > longest:
                raise ValueError(
                    f"The continuation {(name or ('', ''))[1][:80]!r} has {len(continuation)} tokens, and the model "
                    f"max_length={longest}: raise max_length, or leave the item out."
                )
            ids = (*context, *continuation)
            cut = max(0, len(ids) - longest - 1)  # the last token is not read, only predicted
            if cut:
                self.truncated.add(name)
            continuations.append(Continuation(ids[cut:], len(ids) - cut - len(continuation)))
        if len(self.truncated) > known:
            logger.warning(
                "%d prompts are longer than max_length=%d tokens and lose their beginning.",
                len(self.truncated),
                longest,
            )
        batch_size = override_bs or self.batch_size
        if batch_size == "auto":
            batch_size = self._detect_batch_size()
        with self._autocast():
            scores = score_continuations(
                self.model,
                continuations,
                int(batch_size),
                self.padding_side,
                progress=not disable_tqdm and self.rank == 0,
                **self._depth,
            )
        answers = [(score.log_likelihood, score.greedy) for score in scores]
        for (name, *_), answer in zip(requests, answers):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """As in `hf`, but at least half of `max_length` is left to the prompt, where `hf` would refuse."""
        most, shorter = self.max_length // 2, []
        for request in requests:
            context, options = request.args
            if options.get("max_gen_toks", self.max_gen_toks) > most:
                options = {**options, "max_gen_toks": most}
            shorter.append(replace(request, arguments=(context, options)))
        return super().generate_until(shorter, disable_tqdm=disable_tqdm)

    def get_model_info(self) -> dict:
        """What lm-eval writes down of the model, with the depth, and with what its checkpoint says of its training."""
        info = super().get_model_info() | {
            "num_recurrences": self.num_recurrences,
            "exit": self.exit,
            "vocab_size": self.model.config.get_text_config(decoder=True).vocab_size,
            "truncated_requests": len(self.truncated),
            "merged_requests": len(self.merged),
        }
        return info | training_cost(self.pretrained)


def training_cost(checkpoint) -> dict:
    """`training_flops` and `training_tokens`, where the `metrics.json` of a checkpoint of this package says them."""
    path = Path(checkpoint) / "metrics.json" if isinstance(checkpoint, str) else None
    if path is None or not path.is_file():
        return {}
    training = json.loads(path.read_text()).get("training", {})
    return {f"training_{name}": training[name] for name in ("flops", "tokens") if name in training}
