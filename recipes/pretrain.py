"""
Pretraining through Accelerate: one loop, from two CPU cores up, that can be stopped and continued at any step.

    accelerate launch -m modeling_looped.recipes.pretrain --config iso_depth --size 10 --output_dir runs/s10
"""

import json
import math
import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import parse_flag_from_env
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from modeling_looped.accounting import training_flops_per_token
from modeling_looped.depth_sampling import DepthSampler
from modeling_looped.growth import OPERATORS, grow, grow_prepared, grow_sharded, growth_schedule, growth_steps, shrink
from modeling_looped.hub_cards.card import write_card_if_possible
from modeling_looped.keyed_noise import NoiseKey, set_noise_key
from modeling_looped.looping import add_recurrence

from . import checkpoints
from .checkpoints import all_checkpoints, newest_checkpoint, read_progress, write_checkpoint
from .data import summed_nats
from .metrics import Metrics, Speed
from .optimizers import fastest_dtype, make_adamw, make_optimizers
from .sharding import as_unsharded, shard, wants_sharding, whole_state
from .transfer import learning_rates


@dataclass
class PretrainRecipe:
    """What a run's numbers depend on, apart from its model and its data. Learning rates are peaks."""

    total_steps: int = field(default=480, metadata={"help": "Optimizer steps."})
    budget_tokens: int | float | None = field(default=None, metadata={"help": "Tokens instead of steps."})
    budget_flops: float | None = field(
        default=None, metadata={"help": "FLOPs instead of steps, counted as in arXiv 2604.21106 (attention and head too)."}
    )
    batch_size: int = field(default=8, metadata={"help": "Rows of an optimizer step, over all ranks and micro-steps."})
    micro_steps: int = field(default=1, metadata={"help": "Forward and backward passes that one step adds up."})
    optimizer: str = field(
        default="muon",
        metadata={"help": "On matrices muon, muonh or adamw_groups, with AdamW at rates of its own on the rest; or adamw, one "
                          "rate for all."},
    )  # fmt: skip
    transfer: str = field(
        default="none", metadata={"help": "hyperp: of muonh, rates follow width, batch and tokens (section 5.3); or none."}
    )
    adamw_lr: float = field(default=6e-4, metadata={"help": "Of optimizer adamw, on everything."})
    weight_decay: float = field(default=0.1, metadata={"help": "Of optimizer adamw, on matrices and embeddings."})
    matrix_lr: float = field(default=1.5e-2, metadata={"help": "Muon (RMS-matched), MuonH (relative) or AdamW, on matrices."})
    matrix_decay: float = field(
        default=1.0,
        metadata={
            "help": "Weight decay of the matrices, but for muonh. Without it they grow, the prelude's output with them, and "
            "beside it the normalised state of the loop vanishes: every depth is then the same."
        },
    )
    embedding_lr: float = field(default=0.3, metadata={"help": "Of AdamW on the token embedding."})
    other_lr: float = field(default=5e-3, metadata={"help": "Of AdamW on the norms, and what has no rate of its own."})
    head_lr: float | None = field(default=None, metadata={"help": "Of AdamW on an untied head; other_lr if unset."})
    lane_lr: float | None = field(
        default=None, metadata={"help": "Of AdamW on the lanes of hyperconnections; other_lr if unset."}
    )
    warmup_steps: int = field(default=0, metadata={"help": "Steps of linear warm-up."})
    decay: str = field(
        default="linear",
        metadata={
            "help": "linear or cosine, from the peak to its last share; or trapezoid: the peak, then over decay_steps "
            "peak * (1 - sqrt(share of them)), to zero."
        },
    )
    decay_steps: int | None = field(default=None, metadata={"help": "Of decay trapezoid: steps at the end, 15 % if unset."})
    final_lr: float = field(default=0.1, metadata={"help": "Share of the peak that the decay ends at."})
    gradient_clip: float | None = field(default=None, metadata={"help": "Largest global gradient norm, if any."})
    depth_scheme: str = field(default="fixed", metadata={"help": "How recurrences are drawn: see DepthSampler."})
    depth_mean: float | None = field(default=None, metadata={"help": "Mean of the log-normal schemes."})
    depth_curriculum: str | None = field(default=None, metadata={"help": "linear or 1-sqrt growth of the mean, if any."})
    depth_curriculum_steps: int | None = field(default=None, metadata={"help": "Steps of that growth."})
    backprop_curriculum_steps: int | None = field(
        default=None,
        metadata={
            "help": "Truncated backpropagation that lengthens: through the last pass at first, through the model's "
            "backprop_recurrences (all passes where it has none) after so many steps, linearly."
        },
    )
    growth_operator: str | None = field(
        default=None, metadata={"help": "midas or lidas: the stack grows from growth_block_size layers to the model's depth."}
    )
    growth_block_size: int = field(default=4, metadata={"help": "Layers of the initial stack, and of each growth."})
    growth_alpha: float = field(default=1.0, metadata={"help": "PROP-alpha: stage i gets steps in proportion to i^alpha."})
    growth_rounding: str = field(
        default="largest_remainder", metadata={"help": "Of stages to whole steps; floor is what the paper's FLOPs show."}
    )
    retrofit_layers: list | None = field(
        default=None,
        metadata={"help": "[start, stop): these layers run once more than in the model given, as in the paper's cooldown."},
    )
    precision: str = field(default="auto", metadata={"help": "bf16 autocast, no, or auto: bf16 where it is faster."})
    activation_checkpointing: bool = field(default=False, metadata={"help": "Recompute each layer in the backward."})
    checkpoint_every: int = field(default=100, metadata={"help": "Steps between checkpoints."})
    seed: int = field(default=0, metadata={"help": "Of the weights, the order of the rows and the depths."})

    def __post_init__(self):
        for name in ("total_steps", "batch_size", "micro_steps", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name, choices in (
            ("optimizer", ("muon", "muonh", "adamw_groups", "adamw")),
            ("transfer", ("none", "hyperp")),
            ("decay", ("linear", "cosine", "trapezoid")),
            ("growth_operator", (None, *OPERATORS)),
            ("growth_rounding", ("largest_remainder", "floor")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {' or '.join(map(repr, choices))}.")
        for name in ("warmup_steps", "adamw_lr", "matrix_lr", "embedding_lr", "other_lr", "head_lr", "lane_lr", "final_lr"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        for name in ("budget_tokens", "budget_flops", "backprop_curriculum_steps"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        if self.budget_flops is not None and self.growth_operator is not None:
            raise ValueError(
                f"budget_flops={self.budget_flops:g} with growth_operator={self.growth_operator!r}: what a step costs "
                "grows with the stack, so give total_steps."
            )
        if self.transfer == "hyperp" and self.optimizer != "muonh":
            raise ValueError(f"transfer='hyperp' needs optimizer='muonh' (it is {self.optimizer!r}).")
        if self.decay_steps is not None and (
            self.decay != "trapezoid" or self.decay_steps < 1 or (not self.budgeted and self.decay_steps > self.total_steps)
        ):
            raise ValueError(
                f"decay_steps={self.decay_steps} must be between 1 and total_steps={self.total_steps}, with "
                f"decay='trapezoid' (it is {self.decay!r})."
            )
        if self.retrofit_layers is not None:
            if len(self.retrofit_layers) != 2 or not all(isinstance(layer, int) for layer in self.retrofit_layers):
                raise ValueError(f"retrofit_layers={self.retrofit_layers!r} must be two whole numbers, such as [8, 12].")
            if self.growth_operator is not None:
                raise ValueError(f"retrofit_layers={self.retrofit_layers!r} loops a stack that growth_operator grows: in turn.")
        if self.precision not in ("auto", "bf16", "no"):
            raise ValueError(f"precision={self.precision!r} must be 'auto', 'bf16' or 'no' (fp16 is unusable on CPUs).")

    @property
    def budgeted(self) -> bool:
        """Whether the number of steps still has to follow from a budget."""
        return self.budget_tokens is not None or self.budget_flops is not None

    def resolved(self, config: PreTrainedConfig, sequence_length: int) -> "PretrainRecipe":
        """
        The same recipe with its budget turned into steps, round(budget / what a step costs), and with the learning
        rates that `transfer` gives for `config` (arXiv 2604.21106, sections 2.2 and 5.3 of its specification).
        """
        per_step = self.batch_size * sequence_length
        steps, tokens = self.total_steps, self.total_steps * per_step
        if self.budget_tokens is not None:
            steps, tokens = round(self.budget_tokens / per_step), int(self.budget_tokens)
        elif self.budget_flops is not None:
            per_token = mean_training_flops(self, config, sequence_length)
            steps, tokens = round(self.budget_flops / (per_token * per_step)), int(self.budget_flops / per_token)
        if steps < 1:
            raise ValueError(f"The budget is less than one step of {per_step:,} tokens: raise it or lower batch_size.")
        recipe = replace(self, total_steps=steps, budget_tokens=None, budget_flops=None)
        if self.transfer == "hyperp":
            rates = learning_rates(config.hidden_size, per_step, tokens, config.num_recurrences)
            recipe = replace(
                recipe,
                transfer="none",
                matrix_lr=rates.matrix,
                embedding_lr=rates.embedding,
                head_lr=rates.head,
                other_lr=rates.norm,
                lane_lr=rates.lanes,
            )
        return recipe

    def learning_rate(self, step: int) -> float:
        """Multiplier of the peak at `step`: linear warm-up, then `decay` to `final_lr`."""
        if self.decay == "trapezoid":  # arXiv 2602.16490, section 4.1; a step's rate is that of the steps done before it
            if step < self.warmup_steps:
                return step / self.warmup_steps
            return 1 - math.sqrt(max(0, step - self.plateau_end) / (self.total_steps - self.plateau_end))
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps)
        if self.decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return self.final_lr + (1 - self.final_lr) * left

    @property
    def plateau_end(self) -> int:
        """The steps before the final decay of a trapezoid."""
        return self.total_steps - (self.decay_steps or max(1, round(0.15 * self.total_steps)))

    def growth_budgets(self, num_layers: int) -> list[int]:
        """
        Steps of each stage on the way to `num_layers`, none without growth. It ends with the plateau, or where there is
        none, the run.
        """
        if self.growth_operator is None:
            return []
        stages, rest = divmod(num_layers, self.growth_block_size)
        if rest or stages < 1:
            raise ValueError(
                f"growth_block_size={self.growth_block_size} must divide the model's {num_layers} layers: they are "
                "reached by growing so many at a time."
            )
        until = self.plateau_end if self.decay == "trapezoid" else self.total_steps
        return growth_schedule(until, stages, self.growth_alpha, self.growth_rounding)

    def growth_steps(self, config: PreTrainedConfig) -> list[int]:
        """After how many finished steps the stack grows, on its way to the depth of `config`."""
        return growth_steps(self.growth_budgets(config.num_hidden_layers))

    def depth_sampler(self, config: PreTrainedConfig) -> DepthSampler:
        """Draws up to the configuration's `trained_recurrences`; `fixed` is its `num_recurrences`."""
        most = config.num_recurrences if self.depth_scheme == "fixed" else config.trained_recurrences
        curriculum = {"curriculum": self.depth_curriculum, "curriculum_steps": self.depth_curriculum_steps}
        return DepthSampler(self.depth_scheme, maximum=most, mean=self.depth_mean, **curriculum)

    def backprop_recurrences(self, config: PreTrainedConfig, step: int) -> int | None:
        """Passes that gradients flow through at `step`, as `backprop_curriculum_steps` has it; None is all."""
        most = config.backprop_recurrences
        if self.backprop_curriculum_steps is None or step >= self.backprop_curriculum_steps:
            return most
        full = config.trained_recurrences if most is None else most
        return 1 + math.floor((full - 1) * step / self.backprop_curriculum_steps)


@dataclass
class RunOptions:
    """How a run is watched and kept: nothing here changes its numbers, and a continued run may change it."""

    tracker: str = field(default="tensorboard", metadata={"help": "tensorboard, trackio, wandb, or none."})
    keep_last: int = field(default=2, metadata={"help": "Newest checkpoints kept; the best one and a plateau's end are too."})
    evaluate_every_tokens: int | float | None = field(
        default=None, metadata={"help": "Training tokens between held-out losses; they are also taken before checkpoints that are due."}
    )
    regional_compile: bool = field(default=False, metadata={"help": "torch.compile of each layer by itself."})
    limit_minutes: float | None = field(default=None, metadata={"help": "Save and stop then; --resume auto continues."})

    def __post_init__(self):
        trackers = ("tensorboard", "trackio", "wandb", "none")
        if self.tracker not in trackers:
            raise ValueError(f"tracker={self.tracker!r} must be one of {', '.join(trackers)}.")
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last} must be at least 1.")
        for name in ("evaluate_every_tokens", "limit_minutes"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")

    def check_installed(self) -> None:
        """Accelerate leaves out a tracker that is not installed without a word."""
        if self.tracker != "none" and self.tracker not in {one.value for one in get_available_trackers()}:
            raise ValueError(f"tracker={self.tracker!r} is not installed: pip install {self.tracker}, or choose none.")


@dataclass
class PretrainResult:
    """`finished` is False after an interrupt; `losses` are those of the steps run in this process."""

    finished: bool
    step: int
    losses: list[float]
    tokens_per_second: float
    validation_nats: float | None = None


def pretrain(
    model: PreTrainedModel,
    rows,
    recipe: PretrainRecipe,
    output_dir: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    limit_seconds: float | None = None,
    held_out=None,
    options: RunOptions | None = None,
    facts: dict | None = None,
    optimizers_from: str | Path | None = None,
    decorate=None,
) -> PretrainResult:
    """
    Trains `model` in place, from the newest checkpoint under `output_dir` if there is one.

    With `growth_operator`, `model` is a dense GrownLlama of the final depth; training starts from a new one of
    `growth_block_size` layers, and `model` has the trained layers in the end. With `retrofit_layers`, `model` is given
    without that recurrence, in a continued run too.

    Row order, depths and learning rates are functions of the step, so a continued run repeats what an uninterrupted
    one would have done. SIGINT, SIGTERM and the end of `limit_seconds` write a checkpoint after the step at hand and
    return `finished=False`. A checkpoint is a `from_pretrained` directory with the optimizers' state beside it;
    `metrics.jsonl` has a line for each step.

    Args:
        rows: `tokens.TokenRows` or `data.MixedRows`.
        held_out: `data.HeldOut`, whose loss is taken before checkpoints that are due, not those of a stop, and as `options`
            say.
        options: By default no tracker, and only the newest checkpoint is kept.
        facts: What a checkpoint has to share with the run that continues it, besides the recipe.
        optimizers_from: A checkpoint of another run, with the same parameters, whose optimizers this run goes on with.
        decorate: Called with a checkpoint's folder before it gets its name, to add files.

    Raises:
        `ValueError`: where the checkpoint belongs to another recipe, or ranks that the launcher started do not see
        each other.
        `FloatingPointError`: at the first loss that is not finite; the last checkpoint stays.
        `OSError`: where a checkpoint cannot be written; the last one stays.
    """
    options = options or RunOptions(tracker="none", keep_last=1)
    output_dir = Path(output_dir)
    recipe = recipe.resolved(model.config, rows.length)
    accelerator, sharded = _accelerator(recipe, options, output_dir, model.config)
    world = accelerator.num_processes
    per_rank = rows_per_rank(recipe, world)
    if recipe.retrofit_layers is not None:
        add_recurrence(model, *recipe.retrofit_layers)
    sampler = recipe.depth_sampler(model.config)
    grows_after = recipe.growth_steps(model.config)
    checkpoint = newest_checkpoint(output_dir)
    start = 0 if checkpoint is None else steps_done(checkpoint, recipe, facts or {})
    best = (math.inf, None) if checkpoint is None else _best(output_dir)
    growths = 0
    if recipe.growth_operator is not None:
        shrink(model, recipe.growth_block_size)
        if checkpoint is not None:
            growths = len(AutoConfig.from_pretrained(checkpoint).history or [])
        for _ in range(growths):
            grow(model, recipe.growth_operator, recipe.growth_block_size)
    if recipe.activation_checkpointing:
        model.activation_checkpointing_enable()
    optimizers = recipe_optimizers(model, recipe)
    if checkpoint is not None:
        _restore(checkpoint, model, optimizers, rows)
    elif optimizers_from is not None:
        _load_optimizers(Path(optimizers_from), optimizers)
        for optimizer, fresh in zip(optimizers, recipe_optimizers(model, recipe), strict=True):
            for group, new in zip(optimizer.param_groups, fresh.param_groups, strict=True):
                group["peak_lr"] = new["peak_lr"]  # this run's own
    model.train()
    backprop = model.config.backprop_recurrences
    if sharded:
        wrapped, optimizers = shard(model.to(accelerator.device), optimizers)
    else:
        wrapped, *optimizers = accelerator.prepare(model, *optimizers)
    if options.regional_compile:
        _compile_layers(model)
    settings = {name: value for name, value in asdict(recipe).items() if isinstance(value, (int, float, str))}
    metrics = Metrics(output_dir, start, accelerator, options.tracker, settings)
    speed = Speed(accelerator, rows.length)

    losses: list[float] = []
    validation = None
    next_evaluation = _next_multiple(start * recipe.batch_size * rows.length, options.evaluate_every_tokens)
    began = time.perf_counter()
    bar = tqdm(
        range(start, recipe.total_steps),
        initial=start,
        total=recipe.total_steps,
        unit="step",
        desc="pretrain",
        disable=not (progress and accelerator.is_main_process),
    )
    with _StopSignals() as stop:
        for step in bar:
            while growths < sum(after <= step for after in grows_after):
                wrapped, optimizers = _grow(accelerator, sharded, wrapped, optimizers, recipe)
                model = accelerator.unwrap_model(wrapped)
                if options.regional_compile:
                    _compile_layers(model)
                growths += 1
                speed.grown()
            multiplier = recipe.learning_rate(step)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * multiplier
            if recipe.backprop_curriculum_steps is not None:
                model.config.backprop_recurrences = backprop
                model.config.backprop_recurrences = recipe.backprop_recurrences(model.config, step)
            step_loss = torch.zeros((), device=accelerator.device)
            for micro_step in range(recipe.micro_steps):
                micro_batch = step * recipe.micro_steps + micro_step
                first = (micro_batch * world + accelerator.process_index) * per_rank
                inputs = {name: value.to(accelerator.device) for name, value in rows.inputs(first, per_rank).items()}
                depth = sampler.draw(recipe.seed, step, micro_step)
                set_noise_key(model, NoiseKey(recipe.seed, step, micro_step, accelerator.process_index * per_rank))
                last = micro_step == recipe.micro_steps - 1
                if sharded:
                    wrapped.set_requires_gradient_sync(last)
                with nullcontext() if last or sharded else accelerator.no_sync(wrapped):
                    with accelerator.autocast():
                        loss = wrapped(**inputs, use_cache=False, num_recurrences=depth).loss
                    accelerator.backward(loss / recipe.micro_steps)
                step_loss += loss.detach() / recipe.micro_steps
                speed.count(model.config, depth, per_rank)
            set_noise_key(model, None)
            loss = accelerator.reduce(step_loss, "mean").item()
            if not math.isfinite(loss):
                raise FloatingPointError(f"The loss of step {step} is {loss}. {_advice(output_dir)}")
            if recipe.gradient_clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
            done = step + 1
            tokens = done * recipe.batch_size * rows.length
            numbers = speed.numbers()
            metrics.add(done, loss=loss, learning_rate=multiplier, num_recurrences=depth, tokens=tokens, **numbers)
            shown = {"tokens_per_s": f"{numbers['tokens_per_second']:,.0f}", "mfu": f"{numbers['mfu']:.0%}"}
            bar.set_postfix(loss=f"{recent_mean(losses):.3f}", r=depth, **shown, refresh=False)
            late = limit_seconds is not None and time.perf_counter() - began > limit_seconds
            stopping = _any_rank(accelerator, stop.received or late)
            plateau = recipe.decay == "trapezoid" and done == recipe.plateau_end
            due = done == recipe.total_steps or done % recipe.checkpoint_every == 0 or plateau
            saving = due or stopping
            if saving and _any_rank(accelerator, not _all_finite(model)):  # of gradients without a number
                raise FloatingPointError(f"The weights after step {step} are not finite. {_advice(output_dir)}")
            validation = None  # of a checkpoint that a stop asks for: who stops a run may not be able to wait for one
            if held_out is not None and (due or tokens >= next_evaluation):
                next_evaluation = _next_multiple(tokens, options.evaluate_every_tokens)
                validation = evaluate(wrapped, held_out, accelerator, per_rank)
                speed.pause()
                bits = validation * held_out.tokens / held_out.bytes / math.log(2)
                metrics.add(done, validation_nats_per_token=validation, validation_bits_per_byte=bits)
                if accelerator.is_main_process and progress:
                    bar.write(f"step {done:,}: held-out {validation:.4f} nats/token, {bits:.4f} bits/byte")
            if saving:
                if recipe.backprop_curriculum_steps is not None:
                    model.config.backprop_recurrences = backprop
                if validation is not None and validation < best[0]:
                    best = validation, done
                kept = {best[1], recipe.plateau_end if recipe.decay == "trapezoid" else None} - {None}
                state = {"step": done, "validation_nats": validation, "recipe": asdict(recipe), "facts": facts or {}}
                _save(accelerator, output_dir, wrapped, optimizers, rows, state, tokenizer, options.keep_last, kept, decorate)
                speed.pause()
            if stopping and done < recipe.total_steps:
                bar.close()
                metrics.close()
                return PretrainResult(False, done, losses, speed.tokens_per_second, validation)
    metrics.close()
    return PretrainResult(True, recipe.total_steps, losses, speed.tokens_per_second, validation)


def rows_per_rank(recipe, world: int) -> int:
    """Rows of one forward, of any recipe with a batch size and micro-steps."""
    per_rank, rest = divmod(recipe.batch_size, world * recipe.micro_steps)
    if rest or per_rank < 1:
        raise ValueError(
            f"batch_size={recipe.batch_size} does not split over {world} processes and {recipe.micro_steps} "
            "micro-steps: make it a multiple."
        )
    return per_rank


def process_state() -> PartialState:
    """Accelerate's view of the ranks, which the first to ask settles: it heeds this variable in its Accelerator alone."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def check_ranks(seen: int) -> int:
    """The number of processes, which the launcher and Accelerate have to agree on."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != seen:
        raise ValueError(
            f"The launcher started {started} processes and Accelerate sees {seen}: on CPUs, set ACCELERATE_USE_CPU=true "
            "before the launcher."
        )
    return seen


def check_launcher() -> int:
    """
    How many processes train together.

    Raises:
        `ValueError`: under DeepSpeed, where ranks do not see each other, and for FSDP with one process.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError(
            "Pretraining and cooldowns do not run under DeepSpeed, whose engine takes one optimizer and keeps it to "
            "itself: launch with recipes/accelerate/fsdp2.yaml. SFT does run with deepspeed_zero2.yaml."
        )
    sharded, world = wants_sharding(), check_ranks(process_state().num_processes)
    if sharded and world == 1:
        raise ValueError("FSDP needs more than one process: launch with --num_processes, or another configuration.")
    return world


def mean_training_flops(recipe: PretrainRecipe, config: PreTrainedConfig, sequence_length: int) -> float:
    """FLOPs per token of the full depth, in the mean over the law of depths (`accounting.training_flops_per_token`)."""
    law = recipe.depth_sampler(config).law
    return sum(share * training_flops_per_token(config, sequence_length, depth) for depth, share in law.items())


def _accelerator(recipe: PretrainRecipe, options: RunOptions, output_dir: Path, config) -> tuple[Accelerator, bool]:
    """Accelerate's view of the ranks, and whether the model is to be sharded over them."""
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if fastest_dtype() is torch.bfloat16 else "no"
    check_launcher()
    handlers = []
    truncated = config.backprop_recurrences is not None or recipe.backprop_curriculum_steps is not None
    # Without injection, truncation cuts the prelude off in the steps that run more passes. Routers see no gradient of
    # passes that a step does not run.
    if (getattr(config, "injection", None) == "none" and truncated) or config.model_type == "mixture_of_recursions":
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    asked = os.environ.pop("ACCELERATE_USE_FSDP", None)  # sharding.py does what Accelerate's plugin would
    tracker = None if options.tracker == "none" else options.tracker
    try:
        accelerator = Accelerator(
            mixed_precision=precision, log_with=tracker, project_dir=output_dir, kwargs_handlers=handlers
        )
    finally:
        if asked is not None:
            os.environ["ACCELERATE_USE_FSDP"] = asked
    return accelerator, wants_sharding()


def _grow(accelerator: Accelerator, sharded: bool, wrapped, optimizers, recipe: PretrainRecipe):
    if sharded:
        return grow_sharded(wrapped, optimizers, recipe.growth_operator, recipe.growth_block_size, shard)
    return grow_prepared(accelerator, wrapped, optimizers, recipe.growth_operator, recipe.growth_block_size)


def _compile_layers(model: PreTrainedModel) -> None:
    """Each layer by itself: a graph that all passes share, whatever their number (the whole model has one for each)."""
    from modeling_looped.decoder_stack import decoder_stack

    for layer in decoder_stack(model).unique_layers:
        layer.compile()


@torch.no_grad()
def evaluate(model, held_out, accelerator: Accelerator, batch_size: int) -> float:
    """Nats per token over all held-out windows, which the ranks share; at the configured number of recurrences."""
    from modeling_looped.eval.metrics import load_metric  # here, since runs without held-out text do without `evaluate`

    training = model.training
    model.eval()
    nats = torch.zeros((), device=accelerator.device)
    world, rank = accelerator.num_processes, accelerator.process_index
    windows = held_out.windows
    # Ranks take batches in turn. Under FSDP all must run as many: those without a batch repeat the last one for nothing.
    batches = -(-len(windows) // batch_size)
    for number in range(-(-batches // world)):
        mine = number * world + rank
        rows = windows[min(mine, batches - 1) * batch_size :][:batch_size].to(accelerator.device)
        with accelerator.autocast():
            loss = summed_nats(model, rows)
        nats += loss if mine < batches else 0
    model.train(training)
    nats = accelerator.reduce(nats, "sum").item()
    return load_metric("continuation_loss").compute(nats=[nats], tokens=[held_out.tokens])["continuation_loss"]


class _StopSignals:
    """Remembers SIGINT and SIGTERM while a step runs; a second SIGINT interrupts at once."""

    def __enter__(self):
        self.received = False
        self._previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread, which alone may set handlers
                break
        return self

    def _receive(self, number, frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = True

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _any_rank(accelerator: Accelerator, flag: bool) -> bool:
    if accelerator.num_processes == 1:
        return flag
    return accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum").item() > 0


def _all_finite(model: PreTrainedModel) -> bool:
    parts = (getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters())
    return all(part.isfinite().all() for part in parts)


def _advice(output_dir: Path) -> str:
    last = newest_checkpoint(output_dir)
    return "Lower the learning rates; " + (
        "there is no checkpoint yet." if last is None else f"the last checkpoint, {last}, is intact."
    )


def _next_multiple(tokens: int, every: float | None) -> float:
    """The first multiple of `every` above `tokens`."""
    return math.inf if every is None else (tokens // every + 1) * every


def recent_mean(losses: list[float]) -> float:
    """Mean of the last 20 losses."""
    return sum(losses[-20:]) / len(losses[-20:])


def recipe_optimizers(model: PreTrainedModel, recipe: PretrainRecipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimizers over the parameters of `model`."""
    if recipe.optimizer == "adamw":
        return make_adamw(model, recipe.adamw_lr, recipe.weight_decay)
    rates = recipe.matrix_lr, recipe.embedding_lr, recipe.other_lr, recipe.matrix_decay
    matrices_by = recipe.optimizer.removesuffix("_groups")
    return make_optimizers(model, *rates, matrices_by, head_lr=recipe.head_lr, lane_lr=recipe.lane_lr)


def _save(accelerator, output_dir, wrapped, optimizers, rows, state, tokenizer, keep_last, keep, decorate) -> None:
    weights, states = whole_state(wrapped, optimizers)
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(wrapped)

        def write(folder: Path) -> None:
            with as_unsharded(model):
                model.save_pretrained(folder, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            data = rows.state_dict() if hasattr(rows, "state_dict") else None
            with (folder / checkpoints.STATE).open("wb") as file:  # a path's errors would hide the operating system's
                torch.save({"optimizers": states, "rows": data}, file)
            (folder / checkpoints.PROGRESS).write_text(json.dumps(state, indent=2) + "\n")
            if decorate is not None:
                with as_unsharded(model):
                    decorate(folder, model, state)
            write_card_if_possible(folder)

        output_dir.mkdir(parents=True, exist_ok=True)
        write_checkpoint(output_dir, state["step"], write, keep_last, keep)
    accelerator.wait_for_everyone()


def _best(output_dir: Path) -> tuple[float, int | None]:
    """The lowest held-out loss among the checkpoints, and its step."""
    found = map(read_progress, all_checkpoints(output_dir))
    measured = [(one["validation_nats"], one["step"]) for one in found if one.get("validation_nats") is not None]
    return min(measured, default=(math.inf, None))


FREE_TO_CHANGE = ("checkpoint_every", "activation_checkpointing")  # without another number coming out


def steps_done(checkpoint: Path, recipe: PretrainRecipe, facts: dict) -> int:
    """Of a checkpoint that a run with `recipe` and `facts` may continue; raises `ValueError` for another one."""
    progress = read_progress(checkpoint)
    trained = {**asdict(PretrainRecipe()), **progress["recipe"]}  # an older one lacks newer fields
    asked = {name: value for name, value in asdict(recipe).items() if name not in FREE_TO_CHANGE}
    changed = {name: trained[name] for name, value in asked.items() if trained[name] != value}
    earlier = progress.get("facts", {})
    for name in set(earlier) & set(facts):
        changed |= _differing(earlier[name], facts[name], name)
    if changed:
        was = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise ValueError(f"{checkpoint} was trained with {was}: continue with the same, or choose another directory.")
    return progress["step"]


def _differing(earlier, now, name: str) -> dict:
    """{dotted name: earlier value} of what differs."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        found = [_differing(earlier.get(key), now.get(key), f"{name}.{key}") for key in {**earlier, **now}]
        return {key: value for one in found for key, value in one.items()}
    return {} if earlier == now else {name: earlier}


def grow_training_state(source: Path, model: PreTrainedModel, operator: str, block_size: int, output: Path) -> None:
    """
    Grows `model`, which is the checkpoint `source` of `pretrain`, together with the state of its optimizers, which goes
    to `output` with the recipe: where the model is saved too, `pretrain` continues from there.
    """
    known = {one.name for one in fields(PretrainRecipe)}  # a cooldown has more
    recipe = {name: value for name, value in read_progress(source)["recipe"].items() if name in known}
    optimizers = recipe_optimizers(model, PretrainRecipe(**recipe))
    state = _load_optimizers(source, optimizers)
    grow(model, operator, block_size, optimizers)
    state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
    torch.save(state, output / checkpoints.STATE)
    shutil.copy(source / checkpoints.PROGRESS, output)


def _restore(checkpoint: Path, model, optimizers, rows) -> None:
    from safetensors.torch import load_model

    load_model(model, str(checkpoint / "model.safetensors"))
    state = _load_optimizers(checkpoint, optimizers)
    if state["rows"] is not None:
        rows.load_state_dict(state["rows"])


def _load_optimizers(checkpoint: Path, optimizers) -> dict:
    state = torch.load(checkpoint / checkpoints.STATE, weights_only=True, map_location="cpu")
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state


if __name__ == "__main__":
    from .launch import main

    main("pretrain")
