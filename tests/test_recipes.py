"""
The bundled recipes: each builds what it says, its dry run prints the papers' figures, its toy runs to its end. Recipes
are found, not listed: a new YAML is tested as it is.
"""

import json
import math
import shutil
from argparse import Namespace
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from modeling_looped import RecurrentGPTConfig
from modeling_looped.accounting import parameter_counts
from modeling_looped.recipes import launch, recipe, sft
from modeling_looped.recipes.checkpoints import newest_checkpoint
from modeling_looped.recipes.data import BUILT_IN, DataRecipe, Source, _documents, shares_as_counts
from modeling_looped.recipes.pretrain import RunOptions
from modeling_looped.recipes.sharding import wants_sharding


BUNDLED = Path(recipe.__file__).parent
CONFIGURATIONS = Path(str(files("modeling_looped.configuration")))
SMOLLM = str(CONFIGURATIONS / "grown-llama-1.7b-baseline")  # enough of a checkpoint for a dry run
SECTIONS = {
    stage: {"model": recipe.ModelSource, "data": DataRecipe, "training": kind, "run": RunOptions}
    for stage, (kind, _) in launch.STAGES.items()
} | {"sft": {"model": sft.SftModel, "data": sft.SftData, "training": sft.SftTraining}}


def stage_of(name: str) -> str | None:
    """The script that a recipe is for; None for the studies of `looped compare` and the sweeps of `looped sweep`."""
    values = recipe.read_yaml(name)
    if {"study", "systems", "cells"} & values.keys():
        return None
    if "extends" in values:
        return stage_of(values["extends"])
    if "sources" not in values["data"]:
        return "sft"
    return "cooldown" if "checkpoint" in values["model"] else "pretrain"


STAGES = {path.stem: stage_of(path.stem) for path in sorted(BUNDLED.glob("*.yaml"))}
STAGES = {name: stage for name, stage in STAGES.items() if stage is not None}


def of_stage(*stages: str) -> list[str]:
    return [name for name, stage in STAGES.items() if stage in stages]


def parsed(name: str, *options: str) -> recipe.ParsedRecipe:
    """A recipe as its script reads it, for a dry run."""
    stage = STAGES.get(name, "pretrain")
    start = [] if stage == "pretrain" or "--checkpoint" in options else ["--checkpoint", SMOLLM]
    return recipe.parse_recipe(SECTIONS[stage], "", ["--config", name, "--dry-run", *start, *options])


def planned(name: str, *options: str) -> Namespace:
    """What a run would be: its `config`, its `training` with budget and rates resolved, and its `figures`."""
    sections = parsed(name, *options).sections
    config, data = launch.model_config(sections["model"]), sections["data"]
    length = data.sequence_length or config.max_position_embeddings
    training = sections["training"].resolved(config, length)
    figures = launch.run_figures(config, training, length)
    return Namespace(config=config, data=data, training=training, figures=figures, length=length)


def printed(capsys, stage: str, *options: str) -> list[str]:
    """The lines of a dry run, with single spaces."""
    launch.main(stage, [*options, "--dry-run"])
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def refusal(capsys, *options: str) -> str:
    """The one sentence with which pretrain refuses, before any work is done."""
    with pytest.raises(SystemExit) as ended:
        launch.main("pretrain", [*options, "--dry-run"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1, said.err
    return said.err


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# What every recipe is


@pytest.mark.parametrize("toy", [False, True], ids=["whole", "toy"])
@pytest.mark.parametrize("name", STAGES)
def test_a_recipe_and_its_toy_build_the_model_that_they_describe(name, toy):
    options = ["--toy"] if toy else []
    sections = parsed(name, *options).sections
    if STAGES[name] == "sft":
        assert sections["model"].sketch(sections["training"].num_recurrences).num_parameters() > 0
        return
    plan = planned(name, *options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plan.config)
    assert sum(one.numel() for one in model.parameters()) == plan.figures["parameters"]
    assert plan.length <= plan.config.max_position_embeddings
    assert plan.figures["tokens"] == plan.training.total_steps * plan.training.batch_size * plan.length
    if toy and STAGES[name] == "pretrain":
        assert plan.figures["parameters"] < 3_000_000 and plan.figures["tokens"] < 100_000


@pytest.mark.parametrize("name", STAGES)
def test_a_recipe_begins_with_what_it_is(name):
    assert (BUNDLED / f"{name}.yaml").read_text().startswith("# ")


@pytest.mark.parametrize("name", of_stage("pretrain", "cooldown"))
def test_a_toy_reads_built_in_text_and_nothing_else(name):
    data = parsed(name, "--toy").sections["data"]
    assert {source.path for source in (*data.sources.values(), data.validation)} <= set(BUILT_IN)
    assert data.tokenizer in ("train", None) and (data.tokenizer is None) == (STAGES[name] == "cooldown")


@pytest.mark.parametrize("name", of_stage("pretrain", "cooldown"))
def test_held_out_documents_are_not_trained_on(name):
    data = parsed(name).sections["data"]
    held_out = data.validation
    for source in data.sources.values():
        if (source.path, source.name, source.split) == (held_out.path, held_out.name, held_out.split):
            assert held_out.take is not None and source.skip >= held_out.skip + held_out.take


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_source_says_the_same_twice_and_holds_other_documents_out(name):
    train, again = (list(_documents(Source(name))) for _ in range(2))
    held_out = list(_documents(Source(name, split="validation")))
    assert train == again and len(train) > len(held_out) > 10
    assert not set(train) & set(held_out)


def test_documents_are_skipped_and_taken_in_their_order():
    whole = list(_documents(Source("arithmetic", take=20)))
    assert list(_documents(Source("arithmetic", skip=3, take=4))) == whole[3:7]


# arXiv 2604.21106: numbers of its specification, sections 2.1, 2.2 and 5.3

ISO_DEPTH = """
 6 1   35389440   35405952   60031104  475047936
 6 2   21528576   21538944   46164096  478586880
 6 4   14450688   14457984   39083136  482125824
 6 8   10911744   10917504   35542656  489203712
10 1   98304000   98331520  139373440 1027676160
10 2   59801600   59818880  100860800 1037506560
10 4   40140800   40152960   81194880 1047336960
10 8   30310400   30320000   71361920 1066997760
20 1  393216000  393271040  475354880 3235000320
20 4  160563200  160587520  242671360 3313643520
34 1 1136394240 1136487808 1276030336 8307062784
34 4  464027648  464068992  603611520 8534341632
"""


@pytest.mark.parametrize("row", ISO_DEPTH.strip().splitlines())
def test_iso_depth_has_the_parameters_and_flops_of_the_paper(row):
    size, recurrences, matrices, with_norms, total, flops = map(int, row.split())
    plan = planned("iso_depth", "--size", str(size), "--recurrences", str(recurrences))
    counts = parameter_counts(plan.config)
    assert counts["unique"] - counts["norms"] == matrices
    assert plan.figures["parameters_without_embeddings"] == with_norms
    assert plan.figures["parameters"] == total
    assert plan.figures["flops_per_token"] == flops


@pytest.mark.parametrize(
    ("recurrences", "steps", "tokens"),
    [(1, 3712, 973078528), (2, 3677, 963903488), (4, 3642, 954728448), (8, 3575, 937164800)],
)
def test_iso_depth_spends_its_budget_in_the_steps_of_the_paper(recurrences, steps, tokens, capsys):
    lines = printed(capsys, "pretrain", "--config", "iso_depth", "--recurrences", str(recurrences))
    assert {"step 128 rows, 262,144 tokens", f"steps {steps:,}", f"tokens {tokens:,}"} <= set(lines)


@pytest.mark.parametrize(("recurrences", "flops"), [(2, 793016320), (4, 799569920), (8, 812677120)])
def test_iso_depth_truncated_costs_a_quarter_less_a_token(recurrences, flops):
    fields = f"{{backprop_recurrences: {math.ceil(recurrences / 2)}}}"
    plan = planned("iso_depth_truncated", "--recurrences", str(recurrences), "--fields", fields)
    whole = planned("iso_depth", "--recurrences", str(recurrences))
    assert plan.figures["flops_per_token"] == flops
    assert plan.figures["parameters"] == whole.figures["parameters"]
    assert 1.3 < plan.figures["tokens"] / whole.figures["tokens"] < 1.33


@pytest.mark.parametrize("options", [(), ("--toy",)], ids=["whole", "toy"])
def test_iso_depth_truncated_cuts_half_of_the_passes_as_it_stands(options):
    config = planned("iso_depth_truncated", *options).config
    assert config.backprop_recurrences == math.ceil(config.num_recurrences / 2) == 2


@pytest.mark.parametrize(("recurrences", "flops"), [(2, 1027737600), (4, 1027799040), (8, 1027921920)])
def test_iso_depth_hyperconnection_costs_what_the_paper_counts(recurrences, flops):
    plan = planned("iso_depth_hyperconnection", "--recurrences", str(recurrences))
    assert plan.figures["flops_per_token"] == flops
    lanes = parameter_counts(plan.config)["injection"]
    assert lanes == recurrences * 8 and plan.training.lane_lr == pytest.approx(0.01)
    assert planned("iso_depth_hyperconnection", "--toy").config.injection == "hyperconnection"


@pytest.mark.parametrize(
    ("size", "recurrences", "options", "matrix", "width"),
    [
        (6, 1, ("--budget_flops", "4.64e17"), 0.014030, 1.2910),
        (34, 1, ("--budget_flops", "2.15e19"), 0.010271, 0.5423),
        (34, 4, ("--budget_flops", "2.15e19"), 0.010470, 0.5423),
        (34, 1, ("--total_steps", "89645", "--batch_size", "256"), 0.005980, 0.5423),
        (34, 4, ("--total_steps", "89645", "--batch_size", "256"), 0.006043, 0.5423),
    ],
)
def test_the_rates_of_iso_depth_follow_width_batch_and_tokens(size, recurrences, options, matrix, width):
    training = planned("iso_depth", "--size", str(size), "--recurrences", str(recurrences), *options).training
    batch = (training.batch_size / 128) ** 0.558
    assert training.matrix_lr == pytest.approx(matrix, abs=6e-7)
    assert training.embedding_lr == pytest.approx(0.3 * batch * width, rel=1e-4)
    assert training.head_lr == pytest.approx(0.004 * batch * width, rel=1e-4)
    assert training.other_lr == pytest.approx(0.005 * width, rel=1e-4)
    assert [training.learning_rate(step) for step in (0, training.total_steps)] == pytest.approx([1, 0.1])


# arXiv 2608.15062: sections 3, 5, 6 and 13.1

RECURRENT_GPT = {
    "small": (124373760, 63611904, 127326720),
    "medium": (354599936, 171073536, 359847936),
    "large": (773582080, 290196480, 781780480),
}


@pytest.mark.parametrize("size", RECURRENT_GPT)
def test_recurrent_gpt_has_the_parameters_of_the_paper(size):
    dense, isoflops, isoparams = RECURRENT_GPT[size]
    for name, kind, parameters in (
        ("recurrent_gpt_dense", "dense", dense),
        ("recurrent_gpt", "isoflops", isoflops),
        ("recurrent_gpt", "isoparams", isoparams),
    ):
        plan = planned(name, "--architecture", f"recurrent-gpt-{size}-{kind}")
        assert plan.figures["parameters"] == parameters
    depths = planned("recurrent_gpt", "--architecture", f"recurrent-gpt-{size}-isoflops").training
    law = depths.depth_sampler(plan.config).law
    assert law == dict.fromkeys(range(1, plan.config.num_recurrences + 1), 1 / plan.config.num_recurrences)


@pytest.mark.parametrize(
    ("steps", "tokens"), [(10_000, 4_915_200_000), (20_000, 9_830_400_000), (40_000, 19_660_800_000)]
)
def test_recurrent_gpt_trains_as_the_paper_does(steps, tokens):
    plan = planned("recurrent_gpt", "--total-steps", str(steps))
    training, rate = plan.training, plan.training.learning_rate
    assert plan.figures["tokens"] == tokens and plan.length == 1024
    assert (training.optimizer, training.weight_decay, training.gradient_clip) == ("adamw", 0.1, 1.0)
    assert training.adamw_lr * rate(1999) == pytest.approx(6e-4)
    assert training.adamw_lr * rate((2000 + steps) // 2) == pytest.approx((6e-4 + 6e-5) / 2)
    assert training.adamw_lr * rate(steps) == pytest.approx(6e-5)
    assert all(rate(step) > rate(step + 1) for step in range(2000, steps, 1000))


@pytest.mark.parametrize(("size", "recurrences"), [("small", 10), ("medium", 4), ("large", 6)])
def test_recurrent_gpt_heavy_tail_is_the_twin_of_the_paper(size, recurrences):
    architecture = f"recurrent-gpt-{size}-isoflops"
    fields = f"{{trained_recurrences: {2 * recurrences}}}"
    options = () if size == "small" else ("--fields", fields, "--depth_mean", str(recurrences))
    plan = planned("recurrent_gpt_heavy_tail", "--architecture", architecture, *options)
    twin = RecurrentGPTConfig.from_pretrained(CONFIGURATIONS / architecture).heavy_tail_twin()
    assert plan.config.to_diff_dict() == {**twin.to_diff_dict(), "architectures": ["RecurrentGPTForCausalLM"]}
    sampler = plan.training.depth_sampler(plan.config)
    assert (sampler.scheme, sampler.mean, sampler.maximum) == ("poisson-lognormal", recurrences, 2 * recurrences)


# arXiv 2602.16490: sections 1.1, 3.5, 4.1, 4.2 and 4.3

SMOLLM_RECIPES = {
    "smollm_360m": (361_821_120, 613527.488),
    "smollm_360m_midas": (361_821_120, 476147.897),
    "smollm_360m_lidas": (361_821_120, 476147.897),
    "smollm_360m_loop_4x8": (86_516_160, 613527.488),
    "smollm_360m_loop_8x4": (125_845_440, 613527.488),
    "smollm_360m_loop_16x2": (204_504_000, 613527.488),
    "smollm_360m_standard_4": (86_516_160, 1.286e5),
    "smollm_360m_standard_8": (125_845_440, 1.979e5),
    "smollm_360m_standard_16": (204_504_000, 3.365e5),
    "smollm_1.7b": (1_711_376_384, 4813222.102),
    "smollm_1.7b_midas": (1_711_376_384, 3736608.182),
    "smollm_1.7b_lidas": (1_711_376_384, 3736608.182),
    "smollm_1.7b_loop_4x6": (369_117_184, 4813222.102),
    "smollm_1.7b_loop_12x2": (906_020_864, 4813222.102),
    "smollm_1.7b_loop_4-4x4-4": (906_020_864, 4813222.102),
    "smollm_1.7b_standard_4": (369_117_184, 1.013e6),
    "smollm_1.7b_standard_12": (906_020_864, 2.533e6),
}


def size_of(name: str) -> str:
    return "360m" if "360m" in name else "1.7b"


def test_every_ready_configuration_of_smollm_has_its_recipe():
    assert set(SMOLLM_RECIPES) == {name for name in STAGES if name.startswith("smollm")}
    ready = {path.parent.name for path in CONFIGURATIONS.glob("grown-llama-*/config.json")}
    assert {parsed(name).sections["model"].architecture for name in SMOLLM_RECIPES} == ready


@pytest.mark.parametrize("name", SMOLLM_RECIPES)
def test_smollm_has_the_parameters_tokens_and_flops_of_the_paper(name):
    parameters, petaflops = SMOLLM_RECIPES[name]
    figures = planned(name).figures
    tokens = {"360m": 209_715_200_000, "1.7b": 419_430_400_000}[size_of(name)]
    assert (figures["parameters"], figures["tokens"], figures["steps"]) == (parameters, tokens, 200_000)
    exact = petaflops != round(petaflops)
    assert figures["paper_flops"] / 1e15 == pytest.approx(petaflops, **({"abs": 5e-4} if exact else {"rel": 4e-4}))


def test_the_dry_run_of_a_growing_stack_says_when_it_grows_and_what_that_saves(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, "pretrain", "--config", "smollm_1.7b_lidas")
    assert "3,736,608.182 petaFLOP (counted as in arXiv 2602.16490)" in lines
    assert "grows lidas after steps 8095, 24285, 48570, 80950, 121426" in lines
    lines = printed(capsys, "pretrain", "--config", "smollm_360m_midas")
    assert "476,147.897 petaFLOP (counted as in arXiv 2602.16490)" in lines
    assert "grows midas after steps 4722, 14166, 28332, 47220, 70831, 99164, 132219" in lines
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [name for name in SMOLLM_RECIPES if name.endswith("lidas")])
def test_the_flops_of_a_growing_stack_are_those_of_its_stages_in_both_conventions(name):
    grown, dense = planned(name).figures, planned(name.removesuffix("_lidas")).figures
    saved = grown["paper_flops"] / dense["paper_flops"]
    assert grown["flops"] / dense["flops"] == pytest.approx(saved, abs=1e-3)
    assert grown["flops"] == pytest.approx(grown["flops_per_token"] * grown["tokens"])


@pytest.mark.parametrize("size", ["360m", "1.7b"])
def test_all_smollm_models_of_a_size_train_alike(size):
    def settings(name):
        one = planned(name)
        training = {key: value for key, value in asdict(one.training).items() if not key.startswith("growth_")}
        return training, asdict(one.data)

    baseline = settings(f"smollm_{size}")
    assert all(settings(name) == baseline for name in SMOLLM_RECIPES if size_of(name) == size)
    training, data = baseline
    peak = {"360m": 3e-3, "1.7b": 5e-4}[size]
    assert (training["adamw_lr"], training["weight_decay"], training["gradient_clip"]) == (peak, 0.01, 1.0)
    assert [source["share"] for source in data["sources"].values()] == [0.7, 0.15, 0.09, 0.06]


def test_the_rates_of_smollm_are_those_that_the_specification_checks():
    training = planned("smollm_1.7b").training
    wanted = {0: 0, 1000: 2.5e-4, 2000: 5e-4, 170_000: 5e-4}
    wanted |= {177_500: 2.5e-4, 185_000: 1.4645e-4, 192_500: 6.699e-5, 200_000: 0}
    rates = {step: training.adamw_lr * training.learning_rate(step) for step in wanted}
    assert rates == pytest.approx(wanted, rel=1e-4)


COOLDOWNS = {
    "cooldown_standard": ("open-web-math/open-web-math", None, [70, 15, 9, 6]),
    "cooldown_finemath": ("HuggingFaceTB/finemath", "finemath-4plus", [5957, 1277, 766, 2000]),
    "cooldown_nemotron": ("nvidia/Nemotron-CC-Math-v1", "4plus", [5957, 1277, 766, 2000]),
    "cooldown_retrofit": ("nvidia/Nemotron-CC-Math-v1", "4plus", [5957, 1277, 766, 2000]),
}


@pytest.mark.parametrize("name", COOLDOWNS)
def test_a_cooldown_is_the_last_thirty_thousand_steps_on_its_mixture(name):
    path, configuration, counts = COOLDOWNS[name]
    plan = planned(name)
    *others, mathematics = plan.data.sources.values()
    assert (mathematics.path, mathematics.name) == (path, configuration)
    assert shares_as_counts([source.share for source in plan.data.sources.values()]) == counts
    pretrained = planned("smollm_1.7b")
    assert others == [
        Source(**{**asdict(was), "share": one.share}) for was, one in zip(pretrained.data.sources.values(), others)
    ]
    assert plan.figures["tokens"] == 62_914_560_000
    for step in (0, 7_500, 15_000, 22_500, 30_000):
        assert plan.training.learning_rate(step) == pytest.approx(pretrained.training.learning_rate(170_000 + step))
    same = ("optimizer", "adamw_lr", "weight_decay", "batch_size", "gradient_clip")
    assert all(getattr(plan.training, one) == getattr(pretrained.training, one) for one in same)


def test_the_retrofit_costs_what_the_paper_says(capsys):
    def figures(name):
        return planned(name).figures["paper_flops"]

    extra = figures("cooldown_retrofit") - figures("cooldown_nemotron")
    baseline, lidas = figures("smollm_1.7b"), figures("smollm_1.7b_lidas")
    assert (baseline + extra) / baseline == pytest.approx(1.024, abs=5e-4)
    assert (lidas + extra) / baseline == pytest.approx(0.800, abs=5e-4)
    lines = printed(capsys, "cooldown", "--config", "cooldown_retrofit", "--checkpoint", SMOLLM)
    assert "retrofit layers 8 to 11 run once more" in lines
    assert any(line.startswith("model grown_llama Loop(8-4x2-12): 24 unique layers, 28 executed") for line in lines)
    retrofitted, plain = (planned(name).figures for name in ("cooldown_retrofit", "cooldown_nemotron"))
    more = retrofitted["paper_flops"] / plain["paper_flops"]
    assert retrofitted["flops"] / plain["flops"] == pytest.approx(more, abs=1e-3)


def test_fine_tuning_on_variable_assignment_is_that_of_the_specification():
    sections = parsed("sft_variable_assignment").sections
    data, training = sections["data"], sections["training"]
    assert (data.form, data.depths, data.eval_depths, data.train_items) == ("code", [1, 2], [0, 1, 2], 512)
    assert (training.learning_rate, training.warmup, training.weight_decay) == (1e-5, 0.1, 0.0)
    assert (training.batch_size, training.epochs) == (16, 5)
    assert set(data.shots) == {0, 5}


# How recipes, options and each other's settings combine


def test_options_override_the_recipe_and_a_budget_replaces_whichever_it_has():
    training = parsed("iso_depth", "--batch-size", "64", "--final_lr=0.2").sections["training"]
    assert (training.batch_size, training.final_lr, training.budget_flops) == (64, 0.2, 1e18)
    training = parsed("iso_depth", "--total_steps", "7").sections["training"]
    assert (training.total_steps, training.budget_flops) == (7, None)
    plan = planned("smollm_1.7b_standard_4", "--budget_tokens", "209715200000")
    assert (plan.training.total_steps, plan.figures["tokens"]) == (100_000, 209_715_200_000)
    assert parsed("iso_depth", "--toy").sections["training"].budget_flops is None


def test_hyphens_and_underscores_are_the_same():
    for spelling in (("--micro-steps", "2"), ("--micro_steps", "2"), ("--micro-steps=2",), ("--micro_steps=2",)):
        assert parsed("iso_depth", *spelling).sections["training"].micro_steps == 2


def test_fields_add_up_and_sources_are_replaced():
    source = parsed("iso_depth_truncated", "--toy", "--fields", "{logit_softcap: 30.0, vocab_size: 512}").sections[
        "model"
    ]
    assert source.fields == {
        "backprop_recurrences": 2, "vocab_size": 512, "max_position_embeddings": 128, "logit_softcap": 30.0,
    }  # fmt: skip
    data = parsed("smollm_360m", "--sources", "{only: {path: arithmetic}}").sections["data"]
    assert list(data.sources) == ["only"]


def test_a_recipe_of_ones_own_extends_a_bundled_one_or_a_file_beside_it(tmp_path):
    write(tmp_path / "base.yaml", "extends: iso_depth\ntraining: {batch_size: 32}\n")
    for parent in ("base.yaml", "base"):
        name = write(tmp_path / "child.yaml", f"extends: {parent}\nmodel: {{size: 6}}\n")
        sections = parsed(name).sections
        assert (sections["model"].size, sections["model"].recurrences) == (6, 4)
        assert sections["training"].batch_size == 32
        assert parsed(name, "--toy").sections["model"].size == 2
    own = write(tmp_path / "iso_depth.yaml", "extends: iso_depth\nmodel: {size: 8}\n")
    assert parsed(own).sections["model"].size == 8


def test_the_nearest_toy_is_laid_over_everything(tmp_path):
    write(tmp_path / "base.yaml", "extends: iso_depth\ntoy: {training: {total_steps: 5}}\n")
    name = write(tmp_path / "child.yaml", "extends: base.yaml\ntraining: {batch_size: 2, total_steps: 9}\n")
    training = parsed(name, "--toy").sections["training"]
    assert (training.total_steps, training.batch_size) == (5, 2)


SMALL = "model: {architecture: looped-gpt-s10-r4}\ndata: {sources: {a: {path: arithmetic}}, tokenizer: train}\n"


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({"a": "extends: b.yaml\n", "b": "extends: a.yaml\n"}, (), "circle"),
        ({"a": "extends: a.yaml\n"}, (), "circle"),
        ({"a": "extends: nowhere\n"}, (), "neither a file nor a bundled recipe"),
        ({"a": "extends: iso_depht\n"}, (), "did you mean 'iso_depth'"),
        ({"a": "extends: [iso_depth]\n"}, (), "extends=['iso_depth']"),
        ({"a": SMALL}, ("--toy",), "has no toy section"),
        ({"a": "extends: b.yaml\n", "b": SMALL}, ("--toy",), "a.yaml has no toy section"),
        ({"a": SMALL + "toy: 5\n"}, (), "toy: 5 must be a mapping"),
        ({"a": SMALL + "toy: {modle: {size: 2}}\n"}, (), "toy: there is no section 'modle': did you mean 'model'"),
        ({"a": SMALL + "trainig: {total_steps: 2}\n"}, (), "there is no section 'trainig': did you mean 'training'"),
        ({"a": SMALL + "training: {total_stps: 2}\n"}, (), "there is no key 'total_stps': did you mean 'total_steps'"),
        ({"a": SMALL + "training:\n"}, (), "training: None must be a mapping"),
        ({"a": SMALL}, ("--totl-steps", "2"), "there is no option '--totl_steps': did you mean 'total_steps'"),
        ({"a": SMALL}, ("stray",), "'stray'"),
        ({"a": SMALL}, ("--total_steps", "many"), "total_steps='many' must be of type int"),
        ({"a": SMALL}, ("--fields", "{hiden_size: 64}"), "did you mean 'hidden_size'"),
        ({"a": SMALL}, ("--fields", "[1, 2]"), "fields=[1, 2] must be of type dict"),
        ({"a": SMALL}, ("--fields", "{a: ["), "is not a value"),
        ({"a": SMALL}, ("--architecture", "looped-gpt-s10-r5"), "did you mean 'looped-gpt-s10-r"),
        ({"a": SMALL}, ("--total_steps", "2", "--budget_tokens", "1e6"), "give one of total_steps and budget_tokens"),
        ({"a": SMALL}, ("--sources", "{a: {path: arithmetic, shares: 1}}"), "did you mean 'share'"),
        ({"a": SMALL}, ("--growth_operator", "midas"), "cannot grow"),
        ({"a": "- model\n"}, (), "must be a mapping"),
        ({"a": ""}, (), "must be a mapping"),
        ({"a": "model: ["}, (), "is not YAML"),
    ],
)  # fmt: skip
def test_what_a_user_gets_wrong_is_one_sentence_that_helps(files, options, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        write(tmp_path / f"{name}.yaml", text)
    assert said in refusal(capsys, "--config", "a.yaml", *options)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.yaml" for name in files}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("smollm_360m_loop_4x8", ("--growth_operator", "midas"), "Loop(4x8)"),
        ("smollm_360m_lidas", ("--growth_block_size", "5"), "growth_block_size=5"),
        ("smollm_360m_lidas", ("--budget_flops", "1e20", "--decay_steps", "1000"), "budget_flops"),
        ("smollm_360m", ("--retrofit_layers", "[30, 36]"), "layers 30 to 35"),
        ("smollm_360m_lidas", ("--retrofit_layers", "[8, 12]"), "retrofit_layers=[8, 12]"),
        ("smollm_360m", ("--size", "6"), "size=6"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_any_work(name, options, said, capsys):
    assert said in refusal(capsys, "--config", name, *options)


# Accelerate's configurations


def launched(name: str, *options: str) -> tuple[Namespace, dict]:
    """What `accelerate launch --config_file` makes of a file: its arguments, and the environment of the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    file = str(BUNDLED / "accelerate" / name)
    words = ["--config_file", file, "--main_process_port", "0", *options, "-m", "modeling_looped.recipes.pretrain"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.multi_gpu or arguments.use_fsdp:
        return arguments, prepare_multi_gpu_env(arguments)
    return arguments, prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.mark.parametrize("path", sorted((BUNDLED / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configurations(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    kinds = {"cpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed_zero2": "DEEPSPEED"}
    assert config.distributed_type == kinds[path.stem]
    assert config.num_processes == (1 if path.stem == "cpu" else 8)
    assert path.read_text().startswith("# ")


def test_the_environment_of_fsdp2_is_one_that_the_recipes_shard_in(monkeypatch):
    arguments, environment = launched("fsdp2.yaml")
    assert arguments.use_fsdp and arguments.num_processes == 8
    for name, value in environment.items():
        if "FSDP" in name:
            monkeypatch.setenv(name, value)
    assert wants_sharding()
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        wants_sharding()


@pytest.mark.parametrize(("name", "options"), [("ddp.yaml", ()), ("cpu.yaml", ("--multi_gpu", "--num_processes", "2"))])
def test_the_environment_of_data_parallelism_asks_for_no_sharding(name, options, monkeypatch):
    arguments, environment = launched(name, *options)
    assert arguments.multi_gpu and arguments.num_processes == (2 if options else 8)
    monkeypatch.setattr("os.environ", environment)
    assert not wants_sharding()


def test_the_environment_of_the_cpu_is_one_process_that_keeps_off_gpus():
    arguments, environment = launched("cpu.yaml")
    assert not arguments.multi_gpu and arguments.num_processes == 1
    assert environment["ACCELERATE_USE_CPU"] == "True"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_FSDP"} & (set(environment) - {*launch.os.environ})


def test_pretraining_refuses_the_environment_of_deepspeed(tmp_path, monkeypatch, capsys):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(BUNDLED / "accelerate" / "deepspeed_zero2.yaml"))
    assert config.deepspeed_config["zero_stage"] == 2
    data = write(tmp_path / "data.jsonl", "".join(json.dumps({"text": f"line {i}\n" * 40}) + "\n" for i in range(40)))
    fields = "{vocab_size: 300, hidden_size: 32, num_attention_heads: 2, max_position_embeddings: 32}"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    model = ["--architecture", "looped_gpt", "--fields", fields]
    texts = ["--sources", f"{{a: {{path: {data}}}}}", "--validation", "null"]
    output = ["--output_dir", str(tmp_path / "run"), "--tracker", "none"]
    with pytest.raises(SystemExit):
        launch.main("pretrain", ["--config", "iso_depth", "--toy", *model, *texts, *output])
    assert "DeepSpeed" in capsys.readouterr().err


# Each toy from its beginning to its end, in fewer steps where fewer do


def shorter(name: str, *options: str) -> tuple[int, list[str]]:
    """
    As few steps as show what a recipe is about, one for each block of each stage of growth, then four of decay; and as
    few documents, since most of a toy's time goes into its tokenizer and its rows.
    """
    plan = planned(name, "--toy", *options)
    training, plateau = plan.training, 4
    if training.growth_operator is not None:
        stages = plan.config.num_hidden_layers // training.growth_block_size
        plateau = stages * (stages + 1) // 2
    steps = plateau + 4
    sources = {key: {**asdict(source), "take": 30} for key, source in plan.data.sources.items()}
    given = {"total_steps": steps, "checkpoint_every": steps, "warmup_steps": 2, "batch_size": 2}
    given["sources"] = json.dumps(sources)
    if training.decay == "trapezoid" and training.decay_steps is not None:
        given["decay_steps"] = 4
    return steps, [word for key, value in given.items() for word in (f"--{key}", str(value))]


def run_toy(name: str, output: Path, packed: Path, *options: str) -> Path:
    """The last checkpoint of a recipe's toy."""
    steps, fewer = shorter(name, *options)
    where = ["--packed_dir", str(packed), "--output_dir", str(output), "--tracker", "none"]
    launch.main(STAGES[name], ["--config", name, "--toy", *fewer, *where, *options])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == steps and all(map(math.isfinite, losses))
    assert any("validation_nats_per_token" in line for line in lines)
    checkpoint = newest_checkpoint(output)
    assert checkpoint.name == f"step-{steps}"
    written = yaml.safe_load((checkpoint / "recipe.yaml").read_text())
    assert written["training"]["total_steps"] == steps
    return checkpoint


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Rows and tokenizers that toys with the same sources share."""
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def grown(tmp_path_factory, packed):
    """The checkpoint before the decay of a grown stack's toy, by the optimizer that it was trained with."""
    made = {}

    def of(optimizer: str) -> Path:
        name = {"adamw": "smollm_360m_lidas", "muon": "toy_grow"}[optimizer]
        if name not in made:
            output = tmp_path_factory.mktemp(name)
            end = run_toy(name, output, packed)
            before = [path for path in output.glob("step-*") if path != end]
            made[name] = before[0]
        return made[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", of_stage("pretrain"))
def test_a_toy_runs_to_its_end(name, tmp_path, packed):
    checkpoint = run_toy(name, tmp_path / "run", packed)
    config, plan = AutoConfig.from_pretrained(checkpoint), planned(name, "--toy")
    assert str(config.plan()) == str(plan.config.plan())
    if plan.training.growth_operator is not None:
        operators = [growth["operator"] for growth in config.history]
        growths = plan.config.num_hidden_layers // plan.training.growth_block_size - 1
        assert operators == [plan.training.growth_operator] * growths and growths >= 2
    else:
        assert not getattr(config, "history", None)
    if plan.training.depth_scheme != "fixed":
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len({json.loads(line).get("num_recurrences") for line in lines} - {None}) > 1
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.generate(**tokenizer("import", return_tensors="pt"), max_new_tokens=2, do_sample=False).shape[1] > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", of_stage("cooldown"))
def test_a_toy_cooldown_goes_on_from_a_toy_run(name, tmp_path, packed, grown):
    optimizer = parsed(name, "--toy").sections["training"].optimizer
    start = grown(optimizer)
    checkpoint = run_toy(name, tmp_path / "run", packed, "--checkpoint", str(start))
    before, after = AutoConfig.from_pretrained(start), AutoConfig.from_pretrained(checkpoint)
    block = parsed(name, "--toy").sections["training"].retrofit_layers
    extra = 0 if block is None else block[1] - block[0]
    assert after.num_hidden_layers == before.num_hidden_layers + extra
    assert after.num_unique_layers == before.num_unique_layers
    assert len(after.history) == len(before.history) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", of_stage("sft"))
def test_a_toy_fine_tuning_answers_before_and_after(name, tmp_path, grown):
    sft.main(["--config", name, "--toy", "--checkpoint", str(grown("adamw")), "--output_dir", str(tmp_path / "run")])
    result = json.loads((tmp_path / "run" / "sft.json").read_text())
    assert [row["depth"] for row in result["after"]] == [row["depth"] for row in result["before"]] == [0, 1, 2]
    adapters = (tmp_path / "run" / "adapter_config.json").is_file()
    assert adapters == (parsed(name).sections["model"].lora_rank is not None)


@pytest.mark.slow
def test_fine_tuning_on_conversations_of_ones_own_learns_every_answer(tmp_path, grown):
    shutil.copytree(grown("adamw"), tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "start")
    turns = [{"role": role, "content": f"number {i}"} for i, role in enumerate(("user", "assistant") * 2)]
    file = write(tmp_path / "chat.jsonl", (json.dumps({"messages": turns}) + "\n") * 8)
    sft.main([
        "--config", "sft_chat", "--toy", "--checkpoint", str(tmp_path / "start"), "--dataset", file, "--items", "12",
        "--eval_items", "4", "--output_dir", str(tmp_path / "run"),
    ])  # fmt: skip
    result = json.loads((tmp_path / "run" / "sft.json").read_text())
    assert result["after"][0]["count"] == 4 and result["after"][0]["loss"] < result["before"][0]["loss"]
