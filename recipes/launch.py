"""What `pretrain` and `cooldown` do around the training loop: read the recipe, look before leaping, start or continue."""

import copy
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed
from transformers.utils.logging import disable_progress_bar

from looped_cli import ends_in_a_sentence, to_json
from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
from modeling_looped.accounting import grown_training_flops, parameter_counts
from modeling_looped.growth import shrink
from modeling_looped.looping import add_recurrence, retrofit

from . import checkpoints
from .data import DataRecipe, Source, content_digest, load_data, tokenizer_digest
from .pretrain import (
    PretrainRecipe,
    RunOptions,
    check_launcher,
    mean_training_flops,
    newest_checkpoint,
    pretrain,
    process_state,
    rows_per_rank,
    steps_done,
)
from .recipe import FAMILIES, ModelSource, ParsedRecipe, as_yaml, parse_recipe


RECIPE = "recipe.yaml"
# All that a run leaves in its folder, which --overwrite may delete. Packed data stays: it says itself what it is of.
LEFT_BY_RUNS = ("step-*", ".writing-*", ".deleting-*", "metrics.jsonl", RECIPE, "modeling-looped", "trackio", "wandb")


@dataclass
class CooldownRecipe(PretrainRecipe):
    """The end of a run on another mixture (arXiv 2602.16490, section 4.2): 1-sqrt decay from the first step to zero."""

    decay: str = field(default="trapezoid", metadata={"help": "As in pretraining; decay_steps is the whole cooldown if unset."})
    keep_optimizers: bool = field(
        default=True, metadata={"help": "Go on with the state of the checkpoint's optimizers, where it has some."}
    )

    @property
    def plateau_end(self) -> int:
        return self.total_steps - (self.decay_steps or self.total_steps)


STAGES = {
    "pretrain": (PretrainRecipe, "Pretrain a looped, recurrent or growing model."),
    "cooldown": (CooldownRecipe, "Train a checkpoint on with another mixture, and with a loop where asked for."),
}


EXAMPLES = {
    "pretrain": (
        "looped pretrain --config iso_depth --size 10 --budget_flops 1e18 --dry-run",
        "looped pretrain --config smollm_360m_lidas --toy --output_dir runs/lidas",
        "looped pretrain --config smollm_360m_lidas --toy --output_dir runs/lidas --resume auto",
    ),
    "cooldown": (
        "looped cooldown --config cooldown_retrofit --toy --checkpoint runs/lidas/step-85 --dry-run",
        "looped cooldown --config cooldown_retrofit --toy --checkpoint runs/lidas/step-85 --output_dir runs/cooldown",
    ),
}


def main(stage: str, arguments: list[str] | None = None) -> None:
    """The command of a stage. Ends with status 0 where the run is finished or was stopped and saved."""
    kind, description = STAGES[stage]
    sections = {"model": ModelSource, "data": DataRecipe, "training": kind, "run": RunOptions}
    parsed = parse_recipe(sections, description, arguments, stage, EXAMPLES[stage])
    with ends_in_a_sentence(stage):
        launch(parsed, stage)


def launch(parsed: ParsedRecipe, stage: str):
    """Runs what was parsed. Nothing is written before everything that can be wrong without it has been looked at."""
    source, data, recipe, options = (parsed.sections[name] for name in ("model", "data", "training", "run"))
    if stage == "cooldown" and source.checkpoint is None:
        raise ValueError("a cooldown starts from a checkpoint: give --checkpoint.")
    config = model_config(source)
    length = data.sequence_length or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise ValueError(
            f"sequence_length={length} is more than the model's max_position_embeddings={config.max_position_embeddings}: "
            "lower it, or raise that in fields."
        )
    unresolved, recipe = recipe, recipe.resolved(config, length)
    check_depth(config, recipe)
    figures = run_figures(config, recipe, length)
    if parsed.dry_run:
        if parsed.as_json:
            print(to_json(run_facts(config, recipe, data, figures)))
        else:
            print(describe(config, recipe, data, figures))
        return None
    options.check_installed()
    rows_per_rank(recipe, check_launcher())
    output = Path(parsed.output_dir)
    check_output(output, parsed.resume, parsed.overwrite)
    optimizers_from = _optimizers_of(source, recipe) if stage == "cooldown" else None
    disable_progress_bar()  # of loading and saving; training has its own
    continued = None if parsed.overwrite else newest_checkpoint(output)
    facts = {
        "sources": {name: _plain(one) for name, one in data.sources.items()},
        "data_seed": data.data_seed,
        "packing": data.packing,
        "mask_documents": data.mask_documents,
        "sequence_length": length,
    }
    if continued is not None:
        steps_done(continued, recipe, facts)
    loaded = _loaded_in_turn(data, config, length, output, source)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # A default that stands for no tokenizer would end generation at a token that ends nothing.
        unset = getattr(config, name, None) is None or (source.checkpoint is None and name not in source.fields)
        if unset and getattr(loaded.tokenizer, name) is not None:
            setattr(config, name, getattr(loaded.tokenizer, name))
    facts["model"] = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    facts["tokenizer"] = tokenizer_digest(loaded.tokenizer)
    facts = json.loads(json.dumps(facts))
    if continued is not None:
        steps_done(continued, recipe, facts)
    set_seed(recipe.seed)
    model = make_model(source, config)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(model.generation_config, name) is None:  # a checkpoint's own, which may know none
            setattr(model.generation_config, name, getattr(config, name))
    main_process = process_state().is_main_process
    text = f"# python -m modeling_looped.recipes.{stage} --config {RECIPE} --output_dir DIR\n" + as_yaml(parsed.values)
    if main_process:
        print(describe(config, recipe, data, figures))
        print(f"{'processes':<15} {process_state().num_processes}", flush=True)
        if parsed.overwrite:
            delete_run(output)
        output.mkdir(parents=True, exist_ok=True)
        (output / RECIPE).write_text(text)

    def decorate(folder: Path, model: PreTrainedModel, state: dict) -> None:
        (folder / RECIPE).write_text(text)
        training = {"steps": state["step"], "tokens": state["step"] * figures["tokens_per_step"]}
        if state["step"] == figures["steps"] or not figures["growth_steps"]:  # else what a step costs changes on the way
            training["flops"] = figures["flops"] * state["step"] / figures["steps"]
        (folder / "metrics.json").write_text(json.dumps({"training": training, "stage": stage}, indent=2) + "\n")

    process_state().wait_for_everyone()
    seconds = None if options.limit_minutes is None else options.limit_minutes * 60
    try:
        result = pretrain(
            model, loaded.rows, unresolved, output, loaded.tokenizer, sys.stderr.isatty(), seconds, loaded.held_out,
            options, facts, optimizers_from, decorate,
        )  # fmt: skip
    except OSError as error:  # a disk can be full at any write
        comfort = checkpoints.intact(output)
        if comfort in str(error):
            raise
        raise OSError(f"{error}; {comfort}.") from error
    if main_process:
        last = newest_checkpoint(output)
        if result.finished:
            held = "" if result.validation_nats is None else f", held-out {result.validation_nats:.4f} nats/token"
            print(f"Finished {result.step:,} steps{held}: {last}")
        else:
            print(f"Stopped after step {result.step:,} of {recipe.total_steps:,}, saved as {last}: go on with --resume auto.")
    return result


def model_config(source: ModelSource) -> PreTrainedConfig:
    """Of one of the package's families; a Llama-shaped checkpoint is a GrownLlama without growth."""
    config = source.config()
    if config.model_type == "llama":
        config = GrownLlamaConfig.from_pretrained(source.checkpoint or source.architecture, **source.fields)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{source.checkpoint or source.architecture!r} is a {config.model_type}: these recipes train {', '.join(FAMILIES)} "
            "and Llama-shaped checkpoints."
        )
    return config


def make_model(source: ModelSource, config: PreTrainedConfig) -> PreTrainedModel:
    if source.checkpoint is None:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model_class = GrownLlamaForCausalLM if config.model_type == "grown_llama" else AutoModelForCausalLM
    return model_class.from_pretrained(source.checkpoint, config=config, dtype=torch.float32)


def check_depth(config: PreTrainedConfig, recipe: PretrainRecipe) -> None:
    """Growth and retrofit, tried on a model without weights."""
    if recipe.growth_operator is None and recipe.retrofit_layers is None:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    if recipe.retrofit_layers is not None:
        add_recurrence(model, *recipe.retrofit_layers)
    else:
        shrink(model, recipe.growth_block_size)


def trained_config(config: PreTrainedConfig, recipe: PretrainRecipe) -> PreTrainedConfig:
    """The configuration that `recipe` trains, with its retrofitted recurrence where it has one."""
    if recipe.retrofit_layers is None or not hasattr(config, "depth_plan"):
        return config
    config = copy.deepcopy(config)
    retrofit(config, *recipe.retrofit_layers)
    return config


def _of_depth(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The same with a dense stack of `num_layers`."""
    config = copy.deepcopy(config)
    config.depth_plan = f"{num_layers}x1"
    return config


def _plain(source: Source) -> dict:
    """Where a file lies is not what it says."""
    values, path = asdict(source), Path(source.path)
    if path.exists():
        values["path"] = path.name
    if path.is_file():
        values["content"] = content_digest(path)
    return values


def _loaded_in_turn(data: DataRecipe, config: PreTrainedConfig, length: int, output: Path, source: ModelSource):
    """The first process packs, and the others find it done."""
    with process_state().main_process_first():
        return load_data(data, config.vocab_size, length, output / "data", source.checkpoint)


def _optimizers_of(source: ModelSource, recipe: CooldownRecipe) -> Path | None:
    checkpoint = Path(source.checkpoint)
    if not recipe.keep_optimizers or not (checkpoint / checkpoints.STATE).is_file():
        return None
    trained = checkpoints.read_progress(checkpoint)["recipe"]["optimizer"]
    if trained != recipe.optimizer:
        raise ValueError(
            f"optimizer={recipe.optimizer!r}: {checkpoint} was trained with {trained!r}. Use it here too, or set "
            "keep_optimizers: false."
        )
    return checkpoint


def check_output(output: Path, resume: str | None, overwrite: bool) -> None:
    """
    Refuses a folder that holds something else than a run, or a run that the user did not say what to do with.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir={str(output)!r} is a file: name a folder.")
    nearest = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"output_dir={str(output)!r} cannot be made: {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"output_dir={str(output)!r} cannot be written: {nearest} is read-only for you.")
    if not output.exists():
        return
    others = [path.name for path in output.iterdir() if path.name != "data"]
    if others and not (output / RECIPE).is_file():
        raise ValueError(f"{output} holds {sorted(others)[0]!r} and no run of these recipes: choose a new folder.")
    if (output / RECIPE).is_file() and resume is None and not overwrite:
        raise ValueError(f"{output} holds a run: pass --resume auto to go on with it, or --overwrite to delete it.")


def delete_run(output: Path) -> None:
    for pattern in LEFT_BY_RUNS:
        for path in output.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_figures(config: PreTrainedConfig, recipe: PretrainRecipe, length: int) -> dict:
    """Parameters, tokens and FLOPs of a run with resolved budget, from the configuration alone."""
    config = trained_config(config, recipe)
    counts, per_step = parameter_counts(config), recipe.batch_size * length
    tokens = recipe.total_steps * per_step
    block = recipe.growth_block_size
    budgets = recipe.growth_budgets(config.num_hidden_layers)
    stages = [(steps, _of_depth(config, stage * block)) for stage, steps in enumerate(budgets, 1)]
    stages.append((recipe.total_steps - sum(budgets), config))
    flops = per_step * sum(steps * mean_training_flops(recipe, one, length) for steps, one in stages)
    figures = {
        "parameters": counts["total"],
        "parameters_without_embeddings": counts["unique"],
        "tokens_per_step": per_step,
        "steps": recipe.total_steps,
        "tokens": tokens,
        "flops_per_token": flops / tokens,
        "flops": flops,
        "growth_steps": recipe.growth_steps(config),
    }
    if config.model_type == "grown_llama":
        figures["paper_flops"] = grown_training_flops(config, budgets, block, recipe.total_steps, per_step, length)
    return figures


def peak_rates(recipe: PretrainRecipe) -> dict[str, float]:
    """The largest learning rate of each group of parameters."""
    if recipe.optimizer == "adamw":
        return {"all": recipe.adamw_lr}
    head = recipe.head_lr or recipe.other_lr
    return {"matrices": recipe.matrix_lr, "embedding": recipe.embedding_lr, "head": head, "norms": recipe.other_lr}


def run_facts(config: PreTrainedConfig, recipe: PretrainRecipe, data: DataRecipe, figures: dict) -> dict:
    """What a run will be, as numbers and names: what `describe` says."""
    plan = trained_config(config, recipe).plan()
    shape = {"unique_layers": plan.unique_layers, "executed_layers": plan.effective_depth}
    return {
        "model_type": config.model_type,
        "plan": str(plan),
        **shape,
        **figures,
        "batch_size": recipe.batch_size,
        "growth_operator": recipe.growth_operator,
        "retrofit_layers": recipe.retrofit_layers,
        "optimizer": recipe.optimizer,
        "peak_learning_rates": peak_rates(recipe),
        "data": {name: source.share for name, source in data.sources.items()},
    }


def describe(config: PreTrainedConfig, recipe: PretrainRecipe, data: DataRecipe, figures: dict) -> str:
    """What a run will be, as text."""
    plan, rates = trained_config(config, recipe).plan(), peak_rates(recipe)
    lines = [
        ("model", f"{config.model_type} {plan}: {plan.unique_layers} unique layers, {plan.effective_depth} executed"),
        (
            "parameters",
            f"{figures['parameters']:,} stored, {figures['parameters_without_embeddings']:,} without embeddings and head",
        ),
        ("step", f"{recipe.batch_size:,} rows, {figures['tokens_per_step']:,} tokens"),
        ("steps", f"{figures['steps']:,}"),
        ("tokens", f"{figures['tokens']:,}"),
        (
            "training FLOPs",
            f"{figures['flops']:.6g}, {figures['flops_per_token']:,.0f} a token (counted as in arXiv 2604.21106)",
        ),
    ]
    if "paper_flops" in figures:
        peta = figures["paper_flops"] / 1e15
        lines.append(("", f"{peta:{',.3f' if peta >= 1 else '.6g'}} petaFLOP (counted as in arXiv 2602.16490)"))
    if recipe.growth_operator is not None:
        lines.append(("grows", f"{recipe.growth_operator} after steps {', '.join(map(str, figures['growth_steps']))}"))
    if recipe.retrofit_layers is not None:
        lines.append(("retrofit", "layers {} to {} run once more".format(recipe.retrofit_layers[0], recipe.retrofit_layers[1] - 1)))
    lines += [
        ("optimizer", f"{recipe.optimizer}; peaks " + ", ".join(f"{name} {rate:.5g}" for name, rate in rates.items())),
        ("data", ", ".join(f"{name} {source.share:.2%}" for name, source in data.sources.items())),
    ]
    return "\n".join(f"{name:<15} {text}" for name, text in lines)
