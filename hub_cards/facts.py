"""What a checkpoint's folder says about itself, and what it does not say."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from modeling_looped import GrownLlamaConfig
from modeling_looped.accounting import (
    effective_parameters,
    forward_flops_per_token,
    kv_cache_bytes,
    parameter_counts,
    training_flops_per_token,
)
from modeling_looped.depth_plan import DepthPlan
from modeling_looped.growth import ancestry
from modeling_looped.interventions import executed_plan
from modeling_looped.looping import apply_loops


FAMILIES = ("looped_gpt", "recurrent_gpt", "mixture_of_recursions", "grown_llama")
EVALUATION = "evaluation"  # the folder of a checkpoint for lm-eval's results
HELD_OUT = "held_out.json"


@dataclass(frozen=True)
class Score:
    """One value of lm-eval with its standard error, where it has one."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Evaluation:
    """One results file of lm-eval: scores by (group or task, metric), in their order there."""

    file: str
    num_recurrences: int | None
    limit: float | None
    groups: dict[str, tuple[str, ...]]
    scores: dict[tuple[str, str], Score]
    shots: dict[str, int]
    command: list[str] | None


@dataclass
class Facts:
    """
    Of one checkpoint. What is `None` or empty was not found, and the card says so.

    Attributes:
        depths: A row for each number of recurrences: executed layers, FLOPs per token forward and in training, bytes
            of a full key-value cache in bf16 at `max_position_embeddings` tokens.
        stored: Numbers in the safetensors files, by dtype.
        training: `training` of `metrics.json`, the totals of a run.
        progress: `progress.json` of a checkpoint of the recipes, without its optimizers' settings.
        trainer: The last state of transformers' Trainer.
    """

    folder: Path
    config: PreTrainedConfig
    plan: DepthPlan
    loops: list[list[int]]
    stored: dict[str, int]
    counts: dict[str, int] | None = None
    depths: list[dict] = field(default_factory=list)
    held_out: dict | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    recipe: str | None = None
    training: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)
    progress: dict | None = None
    sft: dict | None = None
    trainer: dict | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False

    @property
    def family(self) -> str:
        return self.config.model_type if self.config.model_type in FAMILIES else "decoder"

    @property
    def sources(self) -> dict[str, dict]:
        """Training data by name, as a recipe of this package says them."""
        return (self.progress or {}).get("facts", {}).get("sources", {})

    @property
    def ancestry(self):
        return ancestry(self.config) if getattr(self.config, "history", None) else None


def read_facts(folder: str | Path) -> Facts:
    """
    Reads a `from_pretrained` folder. No weights are loaded.

    Raises:
        `ValueError`: where the folder is no checkpoint of a causal language model with safetensors, or one of the
            JSON files that a card quotes is damaged.
    """
    folder = Path(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter, whose card peft writes: name a model's checkpoint, or merge it first."
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no checkpoint: there is no config.json in it.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    loops = getattr(config.get_text_config(decoder=True), "looped_layers", None) or []
    with torch.device("meta"):
        plan = executed_plan(apply_loops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))))
    facts = Facts(folder, config, plan, loops, _stored(folder))
    facts.metrics = _json(folder / "metrics.json") or {}
    facts.training = facts.metrics.get("training", {})
    facts.progress = _json(folder / "progress.json")
    facts.sft = _json(folder / "sft.json")
    facts.trainer = _json(folder / "trainer_state.json")
    facts.held_out = _json(folder / HELD_OUT)
    facts.evaluations = [_evaluation(path) for path in sorted(folder.joinpath(EVALUATION).rglob("results_*.json"))]
    facts.evaluations.sort(key=lambda one: -1 if one.num_recurrences is None else one.num_recurrences)
    if (folder / "recipe.yaml").is_file():
        facts.recipe = (folder / "recipe.yaml").read_text(encoding="utf-8").strip()
    facts.has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    facts.has_chat_template = (folder / "chat_template.jinja").is_file() or "chat_template" in (
        _json(folder / "tokenizer_config.json") or {}
    )
    if (counted := _countable(config, plan)) is not None:
        facts.counts = parameter_counts(counted)
        measured = [row["num_recurrences"] for row in (facts.held_out or {}).get("rows", [])]
        turns = config.model_type in FAMILIES
        counts = _counts(counted, measured) if turns else [counted.num_recurrences]
        facts.depths = [_depth(counted, count) for count in counts]
    return facts


def _json(path: Path) -> dict | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): mend or remove it.") from None


def _stored(folder: Path) -> dict[str, int]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights in safetensors: save_pretrained writes them.")
    sizes: dict[str, int] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():
                    part = tensors.get_slice(name)
                    sizes[part.get_dtype()] = sizes.get(part.get_dtype(), 0) + math.prod(part.get_shape())
        except Exception as error:  # safetensors has an exception of its own for damaged headers
            raise ValueError(f"{path} cannot be read: {error}") from None
    return sizes


def _countable(config: PreTrainedConfig, plan: DepthPlan) -> PreTrainedConfig | None:
    """A configuration that `accounting` counts: a family's own, or a Llama's as one of GrownLlama."""
    if config.model_type in FAMILIES:
        return config
    if config.model_type != "llama":
        return None
    left_out = ("model_type", "num_hidden_layers", "looped_layers", "architectures", "transformers_version", "auto_map")
    values = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return GrownLlamaConfig(**values, depth_plan=str(plan))


def _counts(config: PreTrainedConfig, measured: list[int]) -> list[int]:
    """Recurrences worth a row: measured ones, the usual powers of two, the configured and the trained number."""
    usual = (2**power for power in range(12) if 2**power <= config.trained_recurrences)
    wanted = sorted({*measured, *usual, config.num_recurrences, config.trained_recurrences})

    def runs(count: int) -> bool:
        try:
            config.check_recurrences(count)
        except ValueError:
            return False
        return True

    return [count for count in wanted if runs(count)]


def _depth(config: PreTrainedConfig, count: int) -> dict:
    return {
        "num_recurrences": count,
        "executed_layers": config.plan(count).effective_depth,
        "effective_parameters": effective_parameters(config, count),
        "forward_flops_per_token": forward_flops_per_token(config, num_recurrences=count),
        "training_flops_per_token": training_flops_per_token(config, num_recurrences=count),
        "kv_cache_bytes": kv_cache_bytes(config, config.max_position_embeddings, num_recurrences=count),
    }


def _evaluation(path: Path) -> Evaluation:
    results = _json(path)
    if not isinstance(results.get("results"), dict) or not isinstance(results.get("config"), dict):
        raise ValueError(f"{path} is no result of lm-eval, which has results and config: remove it.")
    scores = {}
    for name, values in {**(results.get("groups") or {}), **results["results"]}.items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            scores[name, metric] = Score(float(value), float(error) if isinstance(error, (int, float)) else None)
    said = results["config"]
    arguments = said.get("model_args")
    if not isinstance(arguments, dict):
        arguments = dict(re.findall(r"(\w+)=([^,]*)", str(arguments or "")))
    recurrences = said.get("num_recurrences") or arguments.get("num_recurrences")
    return Evaluation(
        file=str(path.name),
        num_recurrences=None if recurrences is None else int(recurrences),
        limit=said.get("limit"),
        groups={name: tuple(members) for name, members in (results.get("group_subtasks") or {}).items() if members},
        scores=scores,
        shots={name: shots for name, shots in (results.get("n-shot") or {}).items() if isinstance(shots, int)},
        command=said.get("command"),
    )
