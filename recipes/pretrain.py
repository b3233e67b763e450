"""Pretraining through Accelerate: one loop, from two CPU cores up, that can be stopped and continued at any step."""

import json
import math
import os
import shutil
import signal
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from modeling_looped.depth_sampling import DepthSampler
from modeling_looped.growth import OPERATORS, grow, grow_prepared, growth_schedule, growth_steps, shrink
from modeling_looped.keyed_noise import NoiseKey, set_noise_key
from modeling_looped.looping import add_recurrence

from .optimizers import fastest_dtype, make_adamw, make_optimizers
from .tokens import TokenRows


@dataclass
class PretrainRecipe:
    """What a run consists of, apart from its model and its data. Learning rates are peaks."""

    total_steps: int = field(default=480, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=8, metadata={"help": "Rows of an optimizer step, over all ranks and micro-steps."})
    micro_steps: int = field(default=1, metadata={"help": "Forward and backward passes that one step adds up."})
    optimizer: str = field(default="muon", metadata={"help": "muon or muonh (AdamW beside it), or adamw."})
    adamw_lr: float = field(default=6e-4, metadata={"help": "Of optimizer adamw, on everything."})
    weight_decay: float = field(default=0.1, metadata={"help": "Of optimizer adamw, on matrices and embeddings."})
    matrix_lr: float = field(default=1.5e-2, metadata={"help": "Muon (RMS-matched) or MuonH (relative), on matrices."})
    matrix_decay: float = field(
        default=1.0,
        metadata={
            "help": "Weight decay of the matrices. Without it they grow, the prelude's output with them, and beside "
            "it the normalised state of the loop vanishes: every depth is then the same."
        },
    )
    embedding_lr: float = field(default=0.3, metadata={"help": "AdamW, on the token embedding."})
    other_lr: float = field(default=5e-3, metadata={"help": "AdamW, on the head, the norms and lane weights."})
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
    growth_operator: str | None = field(
        default=None, metadata={"help": "midas or lidas: the stack grows from growth_block_size layers to the model's depth."}
    )
    growth_block_size: int = field(default=4, metadata={"help": "Layers of the initial stack, and of each growth."})
    growth_alpha: float = field(default=1.0, metadata={"help": "PROP-alpha: stage i gets steps in proportion to i^alpha."})
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
            ("optimizer", ("muon", "muonh", "adamw")),
            ("decay", ("linear", "cosine", "trapezoid")),
            ("growth_operator", (None, *OPERATORS)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {' or '.join(map(repr, choices))}.")
        if self.decay_steps is not None and (self.decay != "trapezoid" or not 1 <= self.decay_steps <= self.total_steps):
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
        """Steps of each stage on the way to `num_layers`; growth ends with the plateau, or where there is none, the run."""
        stages, rest = divmod(num_layers, self.growth_block_size)
        if rest or stages < 1:
            raise ValueError(
                f"growth_block_size={self.growth_block_size} must divide the model's {num_layers} layers: they are "
                "reached by growing so many at a time."
            )
        until = self.plateau_end if self.decay == "trapezoid" else self.total_steps
        return growth_schedule(until, stages, self.growth_alpha)

    def growth_steps(self, config: PreTrainedConfig) -> list[int]:
        """After how many finished steps the stack grows, on its way to the depth of `config`."""
        return [] if self.growth_operator is None else growth_steps(self.growth_budgets(config.num_hidden_layers))

    def depth_sampler(self, config: PreTrainedConfig) -> DepthSampler:
        """Draws up to the configuration's `trained_recurrences`; `fixed` is its `num_recurrences`."""
        most = config.num_recurrences if self.depth_scheme == "fixed" else config.trained_recurrences
        curriculum = {"curriculum": self.depth_curriculum, "curriculum_steps": self.depth_curriculum_steps}
        return DepthSampler(self.depth_scheme, maximum=most, mean=self.depth_mean, **curriculum)


@dataclass
class PretrainResult:
    """`finished` is False after an interrupt; `losses` are those of the steps run in this process."""

    finished: bool
    step: int
    losses: list[float]
    tokens_per_second: float


def pretrain(
    model: PreTrainedModel,
    rows: TokenRows,
    recipe: PretrainRecipe,
    output_dir: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    limit_seconds: float | None = None,
) -> PretrainResult:
    """
    Trains `model` in place, from the newest checkpoint under `output_dir` if there is one.

    With `growth_operator`, `model` is a dense GrownLlama of the final depth; training starts from a new one of
    `growth_block_size` layers, and `model` has the trained layers in the end. With `retrofit_layers`, `model` is given
    without that recurrence, in a continued run too.

    Row order, depths and learning rates are functions of the step, so a continued run repeats what an uninterrupted
    one would have done. SIGINT, SIGTERM and the end of `limit_seconds` write a checkpoint after the step at hand and
    return `finished=False`. A checkpoint is a `from_pretrained` directory with the optimizers' state beside it.

    Raises:
        `ValueError`: where the checkpoint belongs to another recipe, or ranks that the launcher started do not see
        each other.
        `FloatingPointError`: at the first loss that is not finite; the last checkpoint stays.
    """
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16" if fastest_dtype() is torch.bfloat16 else "no"
    accelerator = Accelerator(mixed_precision=precision)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != accelerator.num_processes:
        raise ValueError(
            f"The launcher started {world} processes and Accelerate sees {accelerator.num_processes}: on CPUs, set "
            "ACCELERATE_USE_CPU=true before the launcher."
        )
    per_rank, rest = divmod(recipe.batch_size, world * recipe.micro_steps)
    if rest or per_rank < 1:
        raise ValueError(
            f"batch_size={recipe.batch_size} does not split over {world} processes and {recipe.micro_steps} "
            "micro-steps: make it a multiple."
        )
    output_dir = Path(output_dir)
    if recipe.retrofit_layers is not None:
        add_recurrence(model, *recipe.retrofit_layers)
    sampler = recipe.depth_sampler(model.config)
    grows_after = recipe.growth_steps(model.config)
    checkpoint = newest_checkpoint(output_dir)
    start = 0 if checkpoint is None else _steps_done(checkpoint, recipe)
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
        _restore(checkpoint, model, optimizers)
    model.train()
    wrapped, *optimizers = accelerator.prepare(model, *optimizers)

    stop = _StopSignals()
    losses: list[float] = []
    began = time.perf_counter()
    bar = tqdm(
        range(start, recipe.total_steps),
        initial=start,
        total=recipe.total_steps,
        unit="step",
        desc="pretrain",
        disable=not (progress and accelerator.is_main_process),
    )
    step = start
    with stop:
        for step in bar:
            while growths < sum(after <= step for after in grows_after):
                wrapped, optimizers = grow_prepared(
                    accelerator, wrapped, optimizers, recipe.growth_operator, recipe.growth_block_size
                )
                model = accelerator.unwrap_model(wrapped)
                growths += 1
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * recipe.learning_rate(step)
            step_loss = torch.zeros((), device=accelerator.device)
            for micro_step in range(recipe.micro_steps):
                micro_batch = step * recipe.micro_steps + micro_step
                first = (micro_batch * world + accelerator.process_index) * per_rank
                batch = rows.batch(first, per_rank).to(accelerator.device)
                depth = sampler.draw(recipe.seed, step, micro_step)
                set_noise_key(model, NoiseKey(recipe.seed, step, micro_step, accelerator.process_index * per_rank))
                last = micro_step == recipe.micro_steps - 1
                with nullcontext() if last else accelerator.no_sync(wrapped):
                    loss = wrapped(batch, labels=batch, use_cache=False, num_recurrences=depth).loss
                    accelerator.backward(loss / recipe.micro_steps)
                step_loss += loss.detach() / recipe.micro_steps
            set_noise_key(model, None)
            loss = accelerator.reduce(step_loss, "mean").item()
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"The loss of step {step} is {loss}. Lower the learning rates; the last checkpoint is intact."
                )
            if recipe.gradient_clip is not None:
                accelerator.clip_grad_norm_(wrapped.parameters(), recipe.gradient_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss)
            speed = len(losses) * recipe.batch_size * rows.length / (time.perf_counter() - began)
            bar.set_postfix(loss=f"{recent_mean(losses):.3f}", r=depth, tokens_per_s=f"{speed:,.0f}", refresh=False)
            done = step + 1
            late = limit_seconds is not None and time.perf_counter() - began > limit_seconds
            stopping = _any_rank(accelerator, stop.received or late)
            if done == recipe.total_steps or done % recipe.checkpoint_every == 0 or stopping:
                if accelerator.is_main_process:
                    _save(output_dir, done, accelerator.unwrap_model(wrapped), optimizers, recipe, tokenizer)
                accelerator.wait_for_everyone()
            if stopping and done < recipe.total_steps:
                bar.close()
                return PretrainResult(False, done, losses, speed)
    speed = len(losses) * recipe.batch_size * rows.length / max(time.perf_counter() - began, 1e-9)
    return PretrainResult(True, recipe.total_steps, losses, speed)


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The checkpoint directory of the latest step under `output_dir`, if any."""
    found = Path(output_dir).glob("step-*")
    return max((path for path in found if path.name[5:].isdigit()), key=lambda path: int(path.name[5:]), default=None)


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


def recent_mean(losses: list[float]) -> float:
    """Mean of the last 20 losses."""
    return sum(losses[-20:]) / len(losses[-20:])


def _save(output_dir: Path, step: int, model, optimizers, recipe: PretrainRecipe, tokenizer) -> None:
    """Written aside and renamed, so that a checkpoint under its own name is always whole."""
    aside, final = output_dir / f".writing-step-{step}", output_dir / f"step-{step}"
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    if tokenizer is not None:
        tokenizer.save_pretrained(aside)
    torch.save([optimizer.state_dict() for optimizer in optimizers], aside / "optimizers.pt")
    (aside / "progress.json").write_text(json.dumps({"step": step, "recipe": asdict(recipe)}, indent=2) + "\n")
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    for older in output_dir.glob("step-*"):
        if older != final:
            shutil.rmtree(older)


def recipe_optimizers(model: PreTrainedModel, recipe: PretrainRecipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimizers over the parameters of `model`."""
    if recipe.optimizer == "adamw":
        return make_adamw(model, recipe.adamw_lr, recipe.weight_decay)
    rates = recipe.matrix_lr, recipe.embedding_lr, recipe.other_lr, recipe.matrix_decay
    return make_optimizers(model, *rates, on_sphere=recipe.optimizer == "muonh")


def _steps_done(checkpoint: Path, recipe: PretrainRecipe) -> int:
    progress = json.loads((checkpoint / "progress.json").read_text())
    trained = {**asdict(PretrainRecipe()), **progress["recipe"]}  # an older one lacks newer fields
    changed = [name for name, value in asdict(recipe).items() if trained[name] != value]
    if changed:
        was = ", ".join(f"{name}={trained[name]!r}" for name in changed)
        raise ValueError(f"{checkpoint} was trained with {was}: continue with the same, or choose another directory.")
    return progress["step"]


def grow_training_state(source: Path, model: PreTrainedModel, operator: str, block_size: int, output: Path) -> None:
    """
    Grows `model`, which is the checkpoint `source` of `pretrain`, together with the state of its optimizers, which goes
    to `output` with the recipe: where the model is saved too, `pretrain` continues from there.
    """
    progress = json.loads((source / "progress.json").read_text())
    optimizers = recipe_optimizers(model, PretrainRecipe(**progress["recipe"]))
    _load_optimizers(source, optimizers)
    grow(model, operator, block_size, optimizers)
    torch.save([optimizer.state_dict() for optimizer in optimizers], output / "optimizers.pt")
    shutil.copy(source / "progress.json", output)


def _restore(checkpoint: Path, model, optimizers) -> None:
    from safetensors.torch import load_model

    load_model(model, str(checkpoint / "model.safetensors"))
    _load_optimizers(checkpoint, optimizers)


def _load_optimizers(checkpoint: Path, optimizers) -> None:
    states = torch.load(checkpoint / "optimizers.pt", weights_only=True, map_location="cpu")
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
