"""
Supervised fine-tuning with trl, of all weights or of LoRA adapters:
`accelerate launch -m modeling_looped.recipes.sft --config RECIPE.yaml --output_dir DIR`. Built in is the experiment of
arXiv 2602.16490 (section 5.4 of its specification): variable assignment at depths 1 and 2, tested at 0, 1 and 2.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_torch_bf16_gpu_available
from transformers.utils import logging as transformers_logging

from looped_cli import ends_in_a_sentence, to_json
from modeling_looped.decoder_stack import decoder_stack
from modeling_looped.depth_sampling import DepthSampler, DepthSamplingCallback
from modeling_looped.hub_cards.card import write_card_if_possible
from modeling_looped.looping import apply_loops, load, unroll

from .corpus import open_dataset, read_json_lines
from .optimizers import fastest_dtype
from .pretrain import check_ranks, process_state, rows_per_rank
from .recipe import hint, parse_recipe
from .scoring import Continuation, continuation_begin, score_continuations
from .synthetic import FORMS, ChoiceItem, variable_assignment
from .versions import versions


BUILT_IN = "variable-assignment"
DEFAULT_ITEMS, DEFAULT_EVAL_ITEMS = 512, 200
TEST_SEED = 0  # the test items stay the same, whatever the items to train on
RESULT, CHECKPOINTS, PROGRESS = "sft.json", "checkpoints", "progress.json"
# What trl calls the fields that are given elsewhere.
SET_BY = {
    "output_dir": "--output_dir",
    "seed": "seed",
    "learning_rate": "learning_rate",
    "warmup_steps": "warmup",
    "weight_decay": "weight_decay",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "batch_size",
    "gradient_accumulation_steps": "micro_steps",
    "num_train_epochs": "epochs",
    "activation_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing": "gradient_checkpointing",
    "bf16": "precision",
    "fp16": "precision",
    "save_steps": "checkpoint_every",
}


@dataclass(frozen=True)
class SftModel:
    """What is trained."""

    checkpoint: str = field(metadata={"help": "The model to fine-tune: a folder or a Hub name."})
    lora_rank: int | None = field(default=None, metadata={"help": "Rank of LoRA adapters; unset, all weights train."})
    lora_alpha: int | None = field(
        default=None, metadata={"help": "Adapters are scaled by lora_alpha / lora_rank; unset, it is twice the rank."}
    )
    lora_targets: list | str | None = field(
        default=None,
        metadata={
            "help": "peft's target_modules: names, or a regular expression; unset, every linear map of the blocks."
        },
    )
    untie: bool = field(
        default=False,
        metadata={"help": "Train an unrolled copy, in which passes share no weights, as the paper's extra arm does."},
    )

    def __post_init__(self):
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} needs lora_rank, which is unset.")
        elif self.lora_rank < 1:
            raise ValueError(f"lora_rank={self.lora_rank} must be at least 1; leave it out to train all weights.")
        elif self.untie:
            raise ValueError(
                "untie=True with lora_rank: adapters would belong to a model that is in no folder. Unroll first."
            )

    def load(self, num_recurrences: int | None = None) -> PreTrainedModel:
        """The model in fp32, in which AdamW's small steps are not rounded away."""
        self._config()
        model = load(self.checkpoint, dtype=torch.float32)
        return unroll(model, num_recurrences) if self.untie else model

    def sketch(self, num_recurrences: int | None = None) -> PreTrainedModel:
        """The model without its weights."""
        with torch.device("meta"):
            model = apply_loops(AutoModelForCausalLM.from_config(self._config()))
        return unroll(model, num_recurrences) if self.untie else model

    def _config(self) -> PreTrainedConfig:
        try:
            return AutoConfig.from_pretrained(self.checkpoint)
        except Exception as error:  # of many kinds: a missing file, an unknown model_type, no network
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"checkpoint={self.checkpoint!r} holds no configuration ({reason}).") from None

    def adapters(self, model: PreTrainedModel):
        """peft's configuration of the adapters, if any."""
        if self.lora_rank is None:
            return None
        return lora_config(model, self.lora_rank, self.lora_alpha, self.lora_targets)


@dataclass(frozen=True)
class SftData:
    """What it is trained and tested on."""

    dataset: str = field(
        default=BUILT_IN,
        metadata={
            "help": "variable-assignment, or a .jsonl file or Hub data set (name or name:configuration) with a column "
            "messages, or with prompt and completion."
        },
    )
    form: str = field(default="code", metadata={"help": "Of variable-assignment: basic, math or code."})
    depths: list = field(
        default_factory=lambda: [1, 2],
        metadata={"help": "Of variable-assignment: depths to train on, with equally many items each."},
    )
    eval_depths: list = field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "Of variable-assignment: depths to test, each by itself."}
    )
    shots: list = field(
        default_factory=lambda: [0], metadata={"help": "Of variable-assignment: solved items before the tested one."}
    )
    items: int | None = field(
        default=None,
        metadata={
            "help": "Examples to train on, all depths together; unset, 512 of variable-assignment, all of a data set."
        },
    )
    eval_items: int | None = field(
        default=None,
        metadata={
            "help": "Test items a depth, or held-out examples of a data set; unset, 200 of variable-assignment (the "
            "paper has 1000), none of a data set."
        },
    )
    seed: int = field(default=0, metadata={"help": "Of the examples, their order, and the adapters' initial weights."})

    def __post_init__(self):
        for name, least in (("items", 1), ("eval_items", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")
        if not self.built_in:
            return
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r} must be {' or '.join(map(repr, FORMS))}.")
        for name in ("depths", "eval_depths", "shots"):
            values = getattr(self, name)
            if not values or not all(type(value) is int and value >= 0 for value in values):
                raise ValueError(f"{name}={values!r} must be whole numbers of at least 0, such as [0, 1].")
            if name != "shots":
                for depth in values:
                    variable_assignment(self.form, depth, 1, 0)
        if self.train_items % len(self.depths):
            raise ValueError(
                f"items={self.train_items} must be a multiple of the {len(self.depths)} depths={self.depths}."
            )

    @property
    def built_in(self) -> bool:
        return self.dataset == BUILT_IN

    @property
    def train_items(self) -> int | None:
        return DEFAULT_ITEMS if self.items is None and self.built_in else self.items

    @property
    def test_items(self) -> int:
        if self.eval_items is None:
            return DEFAULT_EVAL_ITEMS if self.built_in else 0
        return self.eval_items

    def examples(self) -> tuple[list[dict], list[dict]]:
        """`(train, held out)`, each with `prompt` and `completion`; the built-in task is tested by its choices."""
        if self.built_in:
            each = self.train_items // len(self.depths)
            items = [item for depth in self.depths for item in variable_assignment(self.form, depth, each, self.seed)]
            return [{"prompt": item.prompt, "completion": f" {item.answer}"} for item in items], []
        records = read_examples(self.dataset, self.seed)
        held_out, train = _first(records, self.test_items), _first(records, self.items)
        if len(held_out) < self.test_items or len(train) < (self.items or 1):
            raise ValueError(
                f"items={self.items} and eval_items={self.eval_items}: {self.dataset!r} gives {len(held_out)} held-out "
                f"examples, which come first, and {len(train)} to train on: ask for fewer."
            )
        return train, held_out


def _first(records: Iterator[list[dict]], count: int | None) -> list[dict]:
    """The first `count` examples, or all. The rest of the last record is left out, as no record has two uses."""
    taken: list[dict] = []
    while count is None or len(taken) < count:
        if (examples := next(records, None)) is None:
            break
        taken += examples
    return taken[:count]


@dataclass(frozen=True)
class SftTraining:
    """How. The defaults are those of section 5.4, for 1.7B parameters; the specification has 3e-5 for 360M."""

    learning_rate: float = field(default=1e-5, metadata={"help": "Of AdamW (0.9, 0.95), constant after the warm-up."})
    warmup: float = field(default=0.1, metadata={"help": "Share of the steps in which the rate rises linearly."})
    weight_decay: float = field(default=0.0, metadata={"help": "Of AdamW."})
    batch_size: int = field(
        default=16, metadata={"help": "Examples of an optimizer step, over all ranks and micro-steps."}
    )
    micro_steps: int = field(default=1, metadata={"help": "Forward and backward passes that one step adds up."})
    epochs: float = field(default=5.0, metadata={"help": "Times that every example is seen."})
    num_recurrences: int | None = field(
        default=None, metadata={"help": "Passes over the core, in training and in the result; unset, as configured."}
    )
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute each layer in the backward pass."})
    precision: str = field(default="auto", metadata={"help": "bf16 autocast, no, or auto: bf16 where it is faster."})
    checkpoint_every: int = field(
        default=100, metadata={"help": "Steps between checkpoints, which --resume continues."}
    )
    arguments: dict = field(default_factory=dict, metadata={"help": "More fields of trl.SFTConfig: {name: value}."})

    def __post_init__(self):
        for name in ("batch_size", "micro_steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("learning_rate", "epochs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} must be a share of the steps, at least 0 and below 1.")
        if self.precision not in ("auto", "bf16", "no"):
            raise ValueError(f"precision={self.precision!r} must be 'auto', 'bf16' or 'no' (fp16 is unusable on CPUs).")
        if self.arguments:
            from trl import SFTConfig

            known = [one.name for one in fields(SFTConfig)]
            for name in self.arguments:
                if name in SET_BY:
                    raise ValueError(f"arguments: leave {name} out, {SET_BY[name]} sets it.")
                if name not in known:
                    raise ValueError(f"arguments: trl.SFTConfig has no {name!r}{hint(name, known)}")

    def trl_arguments(self, output_dir: Path, seed: int, max_length: int | None, progress: bool):
        """trl's configuration. Ranks that do not see each other are refused."""
        from trl import SFTConfig

        bf16 = self.precision == "bf16" or (self.precision == "auto" and fastest_dtype() is torch.bfloat16)
        arguments = {
            "output_dir": str(output_dir),
            "seed": seed,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": self.warmup,
            "optim": "adamw_torch",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "weight_decay": self.weight_decay,
            "gradient_accumulation_steps": self.micro_steps,
            "num_train_epochs": self.epochs,
            "activation_checkpointing": self.gradient_checkpointing,
            "bf16": bf16,
            "use_cpu": bf16 and not torch.cuda.is_available() and not is_torch_bf16_gpu_available(),
            "save_steps": self.checkpoint_every,
            "save_total_limit": 1,
            "completion_only_loss": True,
            "max_length": max_length,
            "logging_first_step": True,
            "report_to": "none",
            "dataloader_pin_memory": torch.cuda.is_available(),
            "disable_tqdm": not progress,
            "log_level": "passive" if progress else "error",
            **self.arguments,
        }
        made = SFTConfig(**arguments)
        each = rows_per_rank(self, check_ranks(made.world_size))
        made.per_device_train_batch_size = made.per_device_eval_batch_size = each
        return made


@dataclass
class SftResult:
    """
    `before` and `after` hold a row for each depth and number of shots of the built-in task (`accuracy`, `margin`,
    `count`), or one with the `loss` on held-out examples. `losses` are trl's (step, mean loss since the last one).
    """

    model: nn.Module
    steps: int
    losses: list[tuple[int, float]]
    before: list[dict]
    after: list[dict]
    seconds: float


def sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: SftData,
    training: SftTraining,
    output_dir: str | Path,
    peft_config=None,
    resume: bool = False,
    progress: bool = True,
    settings: dict | None = None,
) -> SftResult:
    """
    Fine-tunes `model` in place with trl's `SFTTrainer`, and writes it with its tokenizer (or the adapters, as peft
    does) and `sft.json` to `output_dir`. The loss counts the tokens of the answer, and of the end of text after it.

    Args:
        model: Any causal language model, best in fp32.
        tokenizer: Its tokenizer.
        data: What to train and test on.
        training: How.
        output_dir: Must not hold anything, unless `resume`.
        peft_config: Of adapters to train instead of the weights, such as `lora_config(model, rank=8)`.
        resume: Continue from the newest checkpoint in `output_dir`, if there is one.
        progress: Show bars and trl's log.
        settings: What else `sft.json` should say.

    Raises:
        `ValueError`: for a model, tokenizer or data that do not fit, before any work is done.
    """
    from datasets import Dataset

    output_dir = Path(output_dir)
    check_output(output_dir, resume)
    _set_depth(model, training.num_recurrences)
    train, held_out = data.examples()
    _check_tokenizer(model, tokenizer, train)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    folder = output_dir / CHECKPOINTS
    arguments = training.trl_arguments(folder, data.seed, longest, progress)
    _check_lengths(tokenizer, train, arguments.max_length)
    about = {"data": asdict(data), "training": asdict(training), "adapters": _described(peft_config)}
    checkpoint, before = _left_by(folder, about) if resume else (None, None)

    with _forward_as_before(model), _bars(progress):
        trainer = _trainer_class(model)(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(train),
            eval_dataset=Dataset.from_list(held_out) if held_out else None,
            processing_class=tokenizer,
            peft_config=peft_config,
            callbacks=_keyed_noise(model, data.seed),
        )
        if not progress:
            trainer.remove_callback(PrinterCallback)
        if before is None:
            before = _held_out_row(trainer, held_out) or _choice_rows(
                trainer.model, tokenizer, data, training.batch_size
            )
        if trainer.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / PROGRESS).write_text(json.dumps({"settings": about, "before": before}, indent=2) + "\n")
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        seconds = time.perf_counter() - began
        after = _held_out_row(trainer, held_out)
        trainer.save_model(str(output_dir))
    trained = trainer.model.eval()
    if trained is not model:  # peft's wrapper, which Accelerate gave an autocast
        for name in ("forward", "_original_forward"):
            vars(trained).pop(name, None)
    after = after or _choice_rows(trained, tokenizer, data, training.batch_size)
    losses = [(row["step"], float(row["loss"])) for row in trainer.state.log_history if "loss" in row]
    result = SftResult(trained, trainer.state.global_step, losses, before, after, seconds)
    if trainer.is_world_process_zero():
        (output_dir / "training_args.bin").unlink(missing_ok=True)  # a pickle of what sft.json says in the open
        _write_result(output_dir, result, {**about, **(settings or {})})
        if peft_config is None:  # peft writes the card of an adapter
            write_card_if_possible(output_dir)
        shutil.rmtree(folder)
    trainer.accelerator.wait_for_everyone()
    return result


def _write_result(output_dir: Path, result: SftResult, settings: dict) -> None:
    """Last of all files, so that a folder with it holds a whole run."""
    used = [f"{name} {version(name)}" for name in ("trl", "peft") if name == "trl" or settings["adapters"]]
    record = {name: getattr(result, name) for name in ("before", "after", "steps", "losses")}
    record |= {"seconds": round(result.seconds, 1), "settings": settings, "versions": ", ".join([versions(), *used])}
    (output_dir / RESULT).write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def _forward_as_before(model: PreTrainedModel) -> Iterator[None]:
    """trl and Accelerate leave forwards of their own on the model: a fused head, an autocast. Takes them off again."""
    kept = {name: vars(model)[name] for name in ("forward", "_original_forward") if name in vars(model)}
    try:
        yield
    finally:
        for name in ("forward", "_original_forward"):
            vars(model).pop(name, None)
        vars(model).update(kept)


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """The libraries' progress bars, if wanted."""
    import datasets

    shown = datasets.utils.logging, transformers_logging
    hidden = [] if wanted else [library for library in shown if library.is_progress_bar_enabled()]
    for library in hidden:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in hidden:
            library.enable_progress_bar()


def _trainer_class(model: PreTrainedModel) -> type:
    """
    `SFTTrainer`, but for the families of this package one that asks the model for its loss. trl computes it from the
    last hidden states by itself (`add_fused_lm_head`), without the terms of routing and of every exit, and with those
    changes of the logits only that it knows by name.
    """
    from trl import SFTTrainer

    if not _has_recurrences(model):
        return SFTTrainer

    class ModelLossTrainer(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = {**inputs, "use_cache": False}
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    return ModelLossTrainer


def _keyed_noise(model: PreTrainedModel, seed: int) -> list[TrainerCallback]:
    """At the configured depth: the noise of families that have some is then a function of the step and the row."""
    if not _has_recurrences(model) or model.config.num_recurrences < 1:
        return []
    return [DepthSamplingCallback(DepthSampler("fixed", maximum=model.config.num_recurrences), seed)]


def _has_recurrences(model: PreTrainedModel) -> bool:
    """Whether `model` is of a family of this package."""
    return hasattr(model.config, "trained_recurrences")


def _set_depth(model: PreTrainedModel, num_recurrences: int | None) -> None:
    if num_recurrences is None:
        return
    if not _has_recurrences(model):
        raise ValueError(f"num_recurrences={num_recurrences}: {type(model).__name__} has no recurrences, leave it out.")
    config = model.config
    config.check_recurrences(num_recurrences)
    config.num_recurrences = num_recurrences
    config.trained_recurrences = max(config.trained_recurrences, num_recurrences)


def _check_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[dict]) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {rows}: they do not belong together."
        )
    if tokenizer.eos_token is None:
        raise ValueError("eos_token=None: set the tokenizer's end of text, which ends every answer.")
    if not isinstance(examples[0]["prompt"], str) and tokenizer.chat_template is None:
        raise ValueError(
            "chat_template=None: the data are messages, and the tokenizer has no template to write them with. Set one, "
            "or give columns prompt and completion with plain text."
        )


def _check_lengths(tokenizer: PreTrainedTokenizerBase, examples: list[dict], max_length: int | None) -> None:
    """trl would leave out what is too long for an answer without a word."""
    prompts = [example["prompt"] for example in examples]
    if isinstance(prompts[0], str):
        tokens = tokenizer(prompts)["input_ids"]
    else:
        write = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True)
        tokens = [write(prompt)["input_ids"] for prompt in prompts]
    if (count := sum(len(prompt) >= (max_length or math.inf) for prompt in tokens)) > 0:
        raise ValueError(
            f"{count} of {len(prompts)} examples have prompts of max_length={max_length} tokens or more, so that no "
            "answer is left: leave them out."
        )


def _described(peft_config) -> dict | None:
    if peft_config is None:
        return None
    names = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")
    values = {name: getattr(peft_config, name) for name in names if hasattr(peft_config, name)}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def check_output(output_dir: Path, resume: bool = False, overwrite: bool = False) -> None:
    """
    Refuses a folder that holds something, but for a run that is to be continued, or deleted under `overwrite`.

    Raises:
        `ValueError`: with what to do instead.
    """
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return
    is_run = (output_dir / RESULT).is_file() or (output_dir / CHECKPOINTS).is_dir()
    if not is_run:
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds something that is no run of this script: choose another."
        )
    if overwrite:
        return
    if not resume:
        raise ValueError(
            f"output_dir={str(output_dir)!r} holds a run: --resume auto continues it, --overwrite deletes it and "
            "starts again."
        )
    if (output_dir / RESULT).is_file():
        raise ValueError(f"output_dir={str(output_dir)!r} holds a finished run: there is nothing to continue.")


def _left_by(folder: Path, settings: dict) -> tuple[Path | None, list[dict] | None]:
    """The newest whole checkpoint in `folder`, and what the run that wrote it had measured before it."""
    if not (folder / PROGRESS).is_file():
        return None, None
    left = json.loads((folder / PROGRESS).read_text())
    settings = json.loads(json.dumps(settings))
    pairs = [(left["settings"][part], settings[part]) for part in ("data", "training")]
    changed = [f"{name}={was[name]!r}" for was, now in pairs for name in now if was.get(name) != now[name]]
    if left["settings"]["adapters"] != settings["adapters"]:
        changed.append(f"adapters={left['settings']['adapters']!r}")
    if changed:
        raise ValueError(
            f"{folder} was trained with {', '.join(changed)}: continue with the same, or choose another directory."
        )
    whole = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]  # written last
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None), left["before"]


def lora_config(model: PreTrainedModel, rank: int, alpha: float | None = None, targets: list[str] | str | None = None):
    """
    peft's `LoraConfig` of `rank` for `targets`, which are all linear maps of the blocks unless said otherwise. `alpha`
    is 2 * `rank` by default.
    """
    from peft import LoraConfig

    targets = block_linears(model) if targets is None else targets
    return LoraConfig(
        r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=targets, task_type="CAUSAL_LM"
    )


def block_linears(model: PreTrainedModel) -> list[str]:
    """
    peft's `target_modules` for the linear maps of the layers, and of nothing else: the head, an injection and routers
    stay out. peft knows no default for the families of this package, and its "all-linear" takes the injection too.
    """
    layers = {id(module) for layer in decoder_stack(model).unique_layers for module in layer.modules()}
    linears = {name: id(m) in layers for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    ends = {name.rpartition(".")[2] for name, inside in linears.items() if inside}
    if any(name.rpartition(".")[2] in ends for name, inside in linears.items() if not inside):
        return [name for name, inside in linears.items() if inside]
    return sorted(ends)


def read_examples(source: str, seed: int | None = None) -> Iterator[list[dict]]:
    """
    The examples of each record, with `prompt` and `completion`, both plain text or both lists of messages. Of a
    conversation in a column `messages`, each answer of the assistant is one, and what precedes it is the prompt.

    Args:
        source: A .jsonl file or a Hub data set.
        seed: Of the order of the records, which is the source's without.

    Raises:
        `ValueError`: where the source does not exist, or a record has neither form.
    """
    path = Path(source)
    if path.is_file():
        records = [(f"{path}, line {number}", record) for number, record in read_json_lines(path)]
    elif path.exists() or path.suffix in (".jsonl", ".json") or source.startswith((".", os.sep)):
        raise ValueError(f"dataset={source!r} is not a file: name a .jsonl file, a Hub data set, or {BUILT_IN}.")
    else:
        records = _load_dataset(source)
    order = list(range(len(records)))
    if seed is not None:
        Random(f"sft {seed}").shuffle(order)
    kind = None
    for number in order:
        where, record = records[number] if path.is_file() else (f"{source}, record {number + 1}", records[number])
        examples = _examples_of(record, where)
        if type(examples[0]["prompt"]) is not (kind or type(examples[0]["prompt"])):
            raise ValueError(f"{where}: messages and plain text are mixed, write all records alike.")
        kind = type(examples[0]["prompt"])
        yield examples
    if not order:
        raise ValueError(f"dataset={source!r} holds no example.")


def _load_dataset(source: str):
    name, _, config = source.partition(":")
    return open_dataset(f"dataset={source!r}", name, config or None, split="train")


def _examples_of(record, where: str) -> list[dict]:
    if isinstance(record, dict) and _are_messages(record.get("messages")):
        messages = record["messages"]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
        if not answers:
            raise ValueError(f"{where}: messages={messages!r:.80} holds no answer of an assistant.")
        return [{"prompt": messages[:i], "completion": [messages[i]]} for i in answers]
    pair = [record.get(name) for name in ("prompt", "completion")] if isinstance(record, dict) else []
    if pair and (all(isinstance(part, str) for part in pair) or all(_are_messages(part) for part in pair)):
        return [{"prompt": pair[0], "completion": pair[1]}]
    raise ValueError(
        f"{where}: needs messages, a list of {{role, content}}, or prompt and completion, both text or both such lists."
    )


def _are_messages(value) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


@dataclass(frozen=True)
class ChoiceAccuracy:
    """
    `accuracy` is the share of the `count` items whose right choice is the likeliest, `margin` the mean log-likelihood
    by which it leads the likeliest wrong one. The margin moves before the accuracy leaves chance.
    """

    accuracy: float
    margin: float
    count: int


def choice_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[ChoiceItem],
    batch_size: int = 16,
    shots: int = 0,
    pool: Sequence[ChoiceItem] = (),
    num_recurrences: int | None = None,
) -> ChoiceAccuracy:
    """
    Multiple choice as in section 5.2: the choice of the largest summed log-likelihood of " " + choice, not divided by
    its length. With a tokenizer that splits numbers into digits, 1 is then never less likely than 17, so that one in
    nine items of variable assignment (16/25 * 4/24) cannot be answered right.

    Args:
        model: Any causal language model.
        tokenizer: Its tokenizer.
        items: Questions.
        batch_size: Rows of a forward. Choices that differ in their last token only share a row.
        shots: Solved items of `pool` before each question, drawn by the question, with blank lines between.
        pool: Items that none of `items` is among.
        num_recurrences: Passes over the core, the configured number by default.

    Raises:
        `ValueError`: where the pool is too small, or a question too long for the model.
    """
    return _summary(choice_margins(model, tokenizer, items, batch_size, shots, pool, num_recurrences))


def _summary(margins: list[tuple[bool, float]]) -> ChoiceAccuracy:
    if not margins:
        raise ValueError("items=[]: there is nothing to be right about.")
    right, by = zip(*margins)
    return ChoiceAccuracy(sum(right) / len(right), math.fsum(by) / len(by), len(right))


def choice_margins(
    model, tokenizer, items, batch_size=16, shots=0, pool=(), num_recurrences=None
) -> list[tuple[bool, float]]:
    """Of each item, whether the right choice wins and by how much log-likelihood, as `choice_accuracy` sums them up."""
    margins = []
    for item, scores in zip(items, choice_scores(model, tokenizer, items, batch_size, shots, pool, num_recurrences)):
        right = item.choices.index(item.answer)
        best_wrong = max((score for i, score in enumerate(scores) if i != right), default=-math.inf)
        margins.append((max(range(len(scores)), key=scores.__getitem__) == right, scores[right] - best_wrong))
    return margins


def choice_scores(model, tokenizer, items, batch_size=16, shots=0, pool=(), num_recurrences=None) -> list[list[float]]:
    """The summed log-likelihood of each choice of each item, as `choice_accuracy` compares them."""
    if shots > len(pool):
        raise ValueError(f"shots={shots} must be at most the {len(pool)} items of pool.")
    continuations = []
    for item in items:
        solved = [one.text for one in Random(f"shots {item.prompt}").sample(list(pool), shots)]
        prompt = "\n\n".join([*solved, item.prompt])
        alone = tokenizer(prompt)["input_ids"]
        for text in item.choices:
            tokens = tokenizer(f"{prompt} {text}")["input_ids"]
            # Where the two part, which is not always after the prompt; never before the first token, which is given.
            begin = max(1, continuation_begin(tokens, alone))
            continuations.append(Continuation(tuple(tokens), begin))
    longest = max((len(continuation.ids) - 1 for continuation in continuations), default=0)
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and longest > most:
        raise ValueError(
            f"shots={shots} make prompts of {longest} tokens, and the model has {most} positions: ask for fewer."
        )
    depth = {} if num_recurrences is None else {"num_recurrences": num_recurrences}
    was_training = model.training
    model.eval()
    try:
        scores = iter(score_continuations(model, continuations, batch_size, **depth))
    finally:
        model.train(was_training)
    return [[next(scores).log_likelihood for _ in item.choices] for item in items]


def _choice_rows(model, tokenizer, data: SftData, batch_size: int) -> list[dict]:
    """The accuracies at every depth and number of shots; each rank scores its share of the items."""
    if not data.built_in or data.test_items == 0:
        return []
    state = process_state()
    rows = []
    for depth in data.eval_depths:
        items = variable_assignment(data.form, depth, data.test_items, TEST_SEED, split="test")
        for shots in data.shots:
            pool = variable_assignment(data.form, depth, max(64, shots), TEST_SEED, split="shots")
            mine = items[state.process_index :: state.num_processes]
            margins = gather_object(choice_margins(model, tokenizer, mine, batch_size, shots, pool))
            rows.append({"depth": depth, "shots": shots, **asdict(_summary(margins))})
    return rows


def _held_out_row(trainer, held_out: list[dict]) -> list[dict]:
    """The loss on the held-out examples, if there are any."""
    return [{"loss": trainer.evaluate()["eval_loss"], "count": len(held_out)}] if held_out else []


EXAMPLES = (
    "looped sft --config sft_variable_assignment --toy --checkpoint demo-output --dry-run",
    "looped sft --config sft_variable_assignment --toy --checkpoint demo-output --output_dir runs/sft",
    "looped sft --config sft_variable_assignment --toy --checkpoint demo-output --lora_rank 8 --output_dir runs/lora",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    sections = {"model": SftModel, "data": SftData, "training": SftTraining}
    description = "Fine-tune a model with trl, all of it or LoRA adapters."
    parsed = parse_recipe(sections, description, arguments, "sft", EXAMPLES)
    with ends_in_a_sentence("sft"):
        if parsed.dry_run:
            _describe(*(parsed.sections[name] for name in sections), parsed.as_json)
        else:
            _run(parsed)


def _run(parsed) -> None:
    source, data, training = (parsed.sections[name] for name in ("model", "data", "training"))
    output_dir, resume = Path(parsed.output_dir), parsed.resume is not None
    if resume and (output_dir / RESULT).is_file():
        print(f"{output_dir} holds a finished run: there is nothing to continue.")
        return
    check_output(output_dir, resume, parsed.overwrite)
    model = source.load(training.num_recurrences)
    if source.untie:  # no recurrence is left
        training = replace(training, num_recurrences=None)
    tokenizer = AutoTokenizer.from_pretrained(source.checkpoint)
    if parsed.overwrite:  # nothing is deleted before what replaces it is there
        if process_state().is_main_process:
            shutil.rmtree(output_dir, ignore_errors=True)
        process_state().wait_for_everyone()
    progress, settings = sys.stderr.isatty(), {"recipe": parsed.values}
    result = sft(
        model, tokenizer, data, training, output_dir, source.adapters(model), resume, progress, settings
    )
    if process_state().is_main_process:
        print(_table(result))
        print(f"{output_dir}: {result.steps} steps in {result.seconds:.0f} s")


def _table(result: SftResult) -> str:
    lines = []
    for before, after in zip(result.before, result.after):
        if "loss" in after:
            lines.append(f"held-out loss {before['loss']:.4f} -> {after['loss']:.4f} ({after['count']} examples)")
        else:
            lines.append(
                f"depth {after['depth']}, {after['shots']} shots: accuracy {before['accuracy']:.3f} -> "
                f"{after['accuracy']:.3f}, margin {before['margin']:+.3f} -> {after['margin']:+.3f} "
                f"({after['count']} items)"
            )
    return "\n".join(lines)


def _describe(source: SftModel, data: SftData, training: SftTraining, as_json: bool = False) -> None:
    """What a run would do, from the configuration alone."""
    model = source.sketch(training.num_recurrences)
    total = model.num_parameters()
    trained = total
    if (adapters := source.adapters(model)) is not None:
        from peft import get_peft_model

        trained = get_peft_model(model, adapters).get_nb_trainable_parameters()[0]
    train, held_out = data.examples()
    steps = math.ceil(math.ceil(len(train) / training.batch_size) * training.epochs)
    steps = training.arguments.get("max_steps", steps)
    if as_json:
        facts = {"model": type(model).__name__, "parameters": total, "trained_parameters": trained}
        facts |= {"examples": len(train), "held_out": len(held_out), "steps": steps, "batch_size": training.batch_size}
        print(to_json(facts))
        return
    print(f"model: {type(model).__name__} of {total:,} parameters; {trained:,} are trained")
    print(f"data: {len(train):,} examples, {len(held_out):,} held out")
    print(f"training: {steps:,} steps of {training.batch_size} examples")


if __name__ == "__main__":
    main()
