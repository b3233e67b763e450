"""
What the tasks' YAML files cannot say: where items are read, which of them stand in a prompt, and what is measured.

The tasks are lm-evaluation-harness tasks like any other and run with every model of it. Continuation loss is counted in
tokens, so a task asks the tokenizer that the model's arguments name (`pretrained`, or `tokenizer`); where they name
none, that metric is left out, and those in bytes are there.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import datasets
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import ConfigurableTask

from modeling_looped.recipes.corpus import open_dataset, read_json_lines

from .answers import exact_match, f1, numeric_match
from .statistics import aggregate, bootstrap_stderr


DATA_VARIABLE = "LOOPED_EVAL_DATA"  # folders with local JSONL files, as in PATH
PAPER_SHUFFLE, PAPER_SHOTS = 1337, 1234  # seeds of arXiv 2604.21106's code (specification, section 6.3)

# Each metric, and whether more of it is better. Scores of an item are a number, or (nats, tokens) and (nats, bytes).
METRICS = {
    "acc": True,
    "acc_norm": True,
    "f1": True,
    "exact_match": True,
    "continuation_loss": False,
    "nats_per_byte": False,
}

logger = logging.getLogger(__name__)


class IndexedShots(ContextSampler):
    """
    Shots that depend on the item's number alone: on `--limit`, on ranks and on the order of tasks they do not. They are
    drawn from all other items, or from a split of their own, and are fewer where there are not enough.
    """

    index: int = 0

    def sample(self, n: int, eval_doc=None, df=None, **kwargs) -> list[dict]:
        pool, random = self.df if df is None else df, Random(PAPER_SHOTS + self.index)
        if eval_doc is None:
            return random.sample(pool, min(n, len(pool)))
        # As drawing from a list without the item: those behind it move up by one.
        chosen = random.sample(range(len(pool) - 1), min(n, len(pool) - 1))
        return [pool[i + (i >= self.index)] for i in chosen]


class LoopedTask(ConfigurableTask):
    """
    A task whose `process_docs` gives items in one of these forms, whatever the format of their source:

    - `context` and `continuation` (`output_type: loglikelihood`);
    - `context`, `choices` and `gold`, the number of the right one, or `contexts` in place of `choices` with one
      `continuation` (`multiple_choice`);
    - `context` and `answers`, each of which is right (`generate_until`);
    - `text` (`loglikelihood_rolling`).

    Items come from `custom_dataset`, which makes them; from the first of `metadata.files` that one of the folders in
    `data_dir` (of lm-eval's `--metadata`, or else the environment's `LOOPED_EVAL_DATA`) has; or from
    `dataset_path` on the Hub, where neither is set.
    """

    shuffle: int | None = None  # a seed
    most: int | None = None  # items, where `metadata.most` does not say
    answer_scores = {"f1": f1, "exact_match": exact_match}  # of what is generated, over the right answers

    def __init__(self, config: dict):
        config = {**config, "fewshot_split": config.get("fewshot_split") or "test", "test_split": "test"}
        config.pop("class", None)
        config["fewshot_config"] = {"sampler": IndexedShots}
        super().__init__(config=config)
        known = {name: better for name, better in METRICS.items() if name in self.metric_names()}
        self._higher_is_better = known
        self._metric_fn_list = dict.fromkeys(known)
        # lm-eval knows errors of means only: ours stand beside as metrics of the name that it gives to errors.
        self._aggregation_list = {name: aggregate for name in known}
        self._aggregation_list |= {f"{name}_stderr": bootstrap_stderr for name in known}
        self._by_index: dict[int, list] | None = None

    def metric_names(self) -> tuple[str, ...]:
        """What is measured, by the type of output."""
        return {
            "loglikelihood": ("acc", "continuation_loss", "nats_per_byte"),
            "multiple_choice": ("acc", "acc_norm", "continuation_loss", "nats_per_byte"),
            "loglikelihood_rolling": ("continuation_loss", "nats_per_byte"),
            "generate_until": tuple(self.answer_scores),
        }[self.OUTPUT_TYPE]

    # Items

    def download(self, dataset_kwargs: dict | None = None, **kwargs) -> None:
        options = dict(dataset_kwargs or {})
        read = self.config.process_docs or (lambda rows: rows)
        if self.config.custom_dataset is not None:
            splits = self.config.custom_dataset(**options)
        else:
            splits = {"test": self._rows(options)}
        try:
            self.dataset = {name: self._items(read(rows), name) for name, rows in splits.items()}
        except ValueError as error:
            raise ValueError(f"{self.config.task}: {error}") from None

    def _rows(self, options: dict) -> list[dict]:
        metadata, (path, name) = self.config.metadata, (self.config.dataset_path, self.config.dataset_name)
        folders = str(metadata.get("data_dir") or os.environ.get(DATA_VARIABLE) or "")
        names = " or ".join(metadata["files"])
        for folder in filter(None, folders.split(os.pathsep)):
            for file in (Path(folder) / name for name in metadata["files"]):
                if file.is_file():
                    return _read_rows(file)
        if path is None:
            where = f"{folders} lacks it" if folders else "name its folder with --data-dir"
            raise ValueError(f"{self.config.task} is read from {names}, which is no data set of the Hub: {where}.")
        if folders:
            raise ValueError(
                f"{self.config.task}: {folders} has no {names}. Put it there, name another folder beside it, or leave "
                f"--data-dir and {DATA_VARIABLE} out to read {path} from the Hub."
            )
        rows = open_dataset(f"{self.config.task}: {path!r}", path, name, **options)
        return list(rows if self.shuffle is not None else islice(rows, self._most))

    @property
    def _most(self) -> int | None:
        return self.config.metadata.get("most", self.most)

    def _items(self, items: Sequence[dict], split: str) -> datasets.Dataset:
        items = list(items)
        if self.shuffle is not None and split == "test":
            Random(self.shuffle).shuffle(items)
        items = items[: self._most]
        if not items:
            raise ValueError("there is no item in its data.")
        return datasets.Dataset.from_list([self._item(index, item) for index, item in enumerate(items)])

    def _item(self, index: int, item: Mapping) -> dict:
        item = dict(item)
        if "context" in item:
            item["context"] = item["context"].strip()
        answers = item.get("choices") or item.get("answers") or [item.get("continuation", item.get("text"))]
        for answer in answers:
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError(f"item {index}: {answer!r} is no answer to score. Repair or remove {item!r}.")
        return {"index": index, **item}

    def test_docs(self) -> datasets.Dataset:
        return self.dataset["test"]

    def fewshot_docs(self) -> datasets.Dataset:
        return self.dataset[self.config.fewshot_split]

    # Requests

    def build_all_requests(self, **options) -> None:
        """As ever, but once for all runs over the same items, such as those at several recurrence counts."""
        key = (self.config.num_fewshot, {name: value for name, value in options.items() if not callable(value)})
        if getattr(self, "_built", None) == key:
            self._instances = [replace(instance, resps=[], filtered_resps={}) for instance in self._instances]
        else:
            super().build_all_requests(**options)
            self._built = key
        self._by_index = None

    def fewshot_context(self, doc: dict, *args, **kwargs):
        self.sampler.index = doc["index"]
        return super().fewshot_context(doc, *args, **kwargs)

    def construct_requests(self, doc: dict, ctx, **kwargs):
        requests = super().construct_requests(doc, ctx, **kwargs)
        if self.OUTPUT_TYPE == "loglikelihood":
            context, continuation = requests.arguments
            requests.arguments = context, self.config.target_delimiter + continuation
        return requests

    # Scores

    def process_results(self, doc: dict, results: list) -> dict:
        scores = self._scores(doc, results)
        scores = {name: score for name, score in scores.items() if name in self._metric_fn_list}  # none to predict only
        return scores | {f"{name}_stderr": score for name, score in scores.items()}

    def _scores(self, doc: dict, results: list) -> dict:
        if self.OUTPUT_TYPE == "generate_until":
            return {name: score(results[0], doc["answers"]) for name, score in self.answer_scores.items()}
        arguments = [request.arguments for request in self._requests(doc)]
        if self.OUTPUT_TYPE == "loglikelihood_rolling":
            return self._losses(-results[0], *arguments[0])
        likelihoods = [likelihood for likelihood, _ in results]
        gold, scores = 0, {}
        if self.OUTPUT_TYPE == "loglikelihood":
            scores["acc"] = float(results[0][1])
        else:
            gold = doc["gold"]
            delimiter = len(self.config.target_delimiter)  # which lm-eval does not count either
            sizes = [len(continuation) - delimiter for _, continuation in arguments]
            per_size = [likelihood / size for likelihood, size in zip(likelihoods, sizes)]
            scores["acc"] = float(_first_best(self._ranked(likelihoods, arguments)) == gold)
            scores["acc_norm"] = float(_first_best(per_size) == gold)
        return scores | self._losses(-likelihoods[gold], *arguments[gold])

    def _ranked(self, likelihoods: list[float], arguments: list[tuple[str, str]]) -> list[float]:
        """What the predicted choice has most of: the log-likelihood."""
        return likelihoods

    def _losses(self, nats: float, *arguments: str) -> dict:
        losses = {"nats_per_byte": (nats, float(len(arguments[-1].encode())))}
        if (count := self._counter()) is not None:
            losses["continuation_loss"] = (nats, float(count(*arguments)))
        return losses

    def _requests(self, doc: dict) -> list:
        if self._by_index is None:
            self._by_index = {}
            for instance in self._instances:
                self._by_index.setdefault(instance.doc["index"], []).append(instance)
            for instances in self._by_index.values():
                instances.sort(key=lambda instance: instance.idx)
        return self._by_index[doc["index"]]

    def _counter(self) -> Callable[..., int] | None:
        metadata = self.config.metadata or {}
        names = ("tokenizer", "pretrained", "revision", "subfolder", "trust_remote_code", "add_bos_token")
        return _token_counter(**{name: metadata[name] for name in names if isinstance(metadata.get(name), (str, bool))})


class FiveAxesTask(LoopedTask):
    """
    A task of arXiv 2604.21106 (specification, section 6.3): items are shuffled and cut, shots are the set's other
    items, and the predicted choice has the lowest mean loss of a token.
    """

    shuffle = PAPER_SHUFFLE
    most = 10_000

    def construct_requests(self, doc: dict, ctx, **kwargs):
        requests = super().construct_requests(doc, ctx, **kwargs)
        if self.OUTPUT_TYPE == "multiple_choice":
            # The words that all choices begin with tell none from another: they are read, not scored (section 6.2,
            # which does so with tokens: here two tokenizers are asked the same).
            shared = os.path.commonprefix([request.arguments[1] for request in requests])
            shared = shared[: max(shared.rfind(" "), 0)]
            for request in requests:
                context, continuation = request.arguments
                request.arguments = context + shared, continuation[len(shared) :]
        return requests

    def _ranked(self, likelihoods: list[float], arguments: list[tuple[str, str]]) -> list[float]:
        # Without a tokenizer the mean is that of bytes.
        count = self._counter() or (lambda context, continuation: len(continuation.encode()))
        return [likelihood / count(*pair) for likelihood, pair in zip(likelihoods, arguments)]


class NumericTask(LoopedTask):
    """A task whose generated answers are right where their last number is."""

    answer_scores = {"acc": numeric_match}


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _read_rows(path: Path) -> list[dict]:
    rows = []
    for number, row in read_json_lines(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object but {row!r}.")
        rows.append(row)
    return rows


@functools.lru_cache(maxsize=8)
def _token_counter(tokenizer: str | None = None, pretrained: str | None = None, **options) -> Callable[..., int] | None:
    """
    How many tokens a model scores: `count(context, continuation)` or `count(text)`. Without a name of a tokenizer there
    is none.
    """
    if tokenizer is None and pretrained is None:
        logger.warning(
            "Neither pretrained nor tokenizer is among the model's arguments: continuation_loss, which counts tokens, "
            "is left out. Name one with --metadata tokenizer=NAME."
        )
        return None
    from transformers import AutoTokenizer

    import modeling_looped  # noqa: F401  registers the configurations

    from .harness import token_pair

    loaded = AutoTokenizer.from_pretrained(tokenizer or pretrained, **options)

    def encode(text: str) -> list[int]:
        return loaded.encode(text)

    @functools.lru_cache(maxsize=None)
    def count(*arguments: str) -> int:
        return len(encode(*arguments)) if len(arguments) == 1 else len(token_pair(encode, *arguments)[1])

    return count
