"""
The pages of docs/api, from the docstrings: `python docs/make_api.py`. The code is read, not imported.

A test (tests/test_api_docs.py) fails where the pages and the docstrings differ, so run it after changing either.
"""

import ast
import re
import sys
import textwrap
from pathlib import Path

import griffe


ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api"
MADE = "<!-- Made by docs/make_api.py from the docstrings: change those, and run it. -->"
ROOMS = {"modeling_looped.eval": "eval", "modeling_looped.recipes": "recipes", "modeling_looped.hub_cards": "hub_cards"}

# (file, title, what it is, [(module, names; all of __all__ where there are none)])
PAGES = [
    (
        "models",
        "Models and configurations",
        "Four families, each a configuration and the classes `...Model`, `...ForCausalLM`, "
        "`...ForSequenceClassification`, `...ForTokenClassification` and `...ForQuestionAnswering`, all of them in the "
        "Auto classes once `modeling_looped` is imported. What the families share stands last.",
        [
            ("modeling_looped.configuration_looped_gpt", None),
            ("modeling_looped.configuration_recurrent_gpt", None),
            ("modeling_looped.configuration_mixture_of_recursions", None),
            ("modeling_looped.configuration_grown_llama", None),
            ("modeling_looped.configuration_looped", ["LoopedConfigMixin", "ConfigurationError"]),
            ("modeling_looped.looped_model", ["LoopedModelMixin", "LoopedForCausalLMMixin"]),
            ("modeling_looped.looped_outputs", ["LoopedModelOutput", "LoopedCausalLMOutput"]),
            ("modeling_looped.generation_looped", ["LoopedGenerationMixin"]),
        ],
    ),
    (
        "depth_plan",
        "Depth plan",
        "Unique layers, and the order in which depth visits them.",
        [("modeling_looped.depth_plan", ["DepthPlan", "loop_text"])],
    ),
    (
        "looping",
        "Looping",
        "Loops over any block of a model that exists, and back to plain layers.",
        [("modeling_looped.looping", ["loop", "load", "apply_loops", "add_recurrence", "retrofit", "unroll"])],
    ),
    (
        "growth",
        "Growth",
        "MIDAS and LIDAS: a stack that grows by copying its middle, with its optimizer.",
        [
            (
                "modeling_looped.growth",
                [
                    "grow",
                    "grow_prepared",
                    "grow_sharded",
                    "shrink",
                    "growth_schedule",
                    "growth_steps",
                    "midas_sources",
                    "lidas_sources",
                    "ancestry",
                    "Ancestry",
                ],
            )
        ],
    ),
    (
        "interventions",
        "Interventions",
        "Executed layers exchanged, left out, reversed or run again, for a while.",
        [
            (
                "modeling_looped.interventions",
                ["swap", "skip", "reverse", "repeat", "PlanEdit", "executed_plan", "plan_edits"],
            )
        ],
    ),
    (
        "adapters",
        "Adapters of each pass",
        "peft's LoRA on a looped block, one adapter for each time that it runs.",
        [("modeling_looped.adapters", ["adapters_by_recurrence", "AdaptersByRecurrence"])],
    ),
    (
        "depth_sampling",
        "Depth sampling",
        "Depths drawn in training, and noise that is keyed to where it falls.",
        [
            ("modeling_looped.depth_sampling", ["DepthSampler", "DepthSamplingCallback"]),
            ("modeling_looped.keyed_noise", ["NoiseKey", "set_noise_key", "Noise"]),
        ],
    ),
    (
        "accounting",
        "Accounting",
        "Parameters, FLOPs and bytes from a configuration alone.",
        [
            (
                "modeling_looped.accounting",
                [
                    "parameter_counts",
                    "training_flops_per_token",
                    "forward_flops_per_token",
                    "paper_flops_per_token",
                    "dense_comparison",
                    "DenseComparison",
                    "grown_flops_per_token",
                    "grown_training_flops",
                    "kv_cache_bytes",
                    "inference_bytes",
                    "accounting_table",
                ],
            )
        ],
    ),
    (
        "caches",
        "Caches",
        "Which slot of a cache each executed layer uses under `kv_sharing`, and what sharing costs. A cache of your own "
        "is `DynamicCache(config=model.config.cache_config(8))` ([`cache_config`](models.md#loopedconfigmixincache_config)).",
        [
            ("modeling_looped.looped_cache", ["slot_schedule", "check_cache"]),
            ("modeling_looped.eval.kv_cost", ["kv_cost", "KVCost", "kv_cost_table"]),
        ],
    ),
    (
        "conversion",
        "Conversion",
        "Checkpoints of other code into these models and back, and checkpoints on disk looped, unrolled and grown.",
        [
            ("modeling_looped.conversion", None),
            ("modeling_looped.conversion.depth", ["loop_checkpoint", "unroll_checkpoint", "grow_checkpoint"]),
        ],
    ),
    (
        "scaling",
        "Scaling",
        "The joint law of arXiv 2604.21106: what a recurrence is worth. Needs the extra `scaling`.",
        [("modeling_looped.scaling", None)],
    ),
    (
        "diagnostics",
        "Diagnostics",
        "What each executed layer does. Needs the extra `diagnostics`.",
        [("modeling_looped.diagnostics", None), ("modeling_looped.diagnostics.report", ["diagnose"])],
    ),
    (
        "evaluation",
        "Evaluation",
        "Held-out loss, exits, loops on a finished model, lm-evaluation-harness and its reports. Needs the extra `eval`.",
        [
            (
                "modeling_looped.eval.held_out",
                ["held_out_loss", "HeldOutLoss", "held_out_batches", "parse_recurrences"],
            ),
            ("modeling_looped.eval.exit_curve", ["exit_curve", "ExitPoint", "exit_table"]),
            ("modeling_looped.eval.loop_sweep", ["loop_sweep", "SweepRow", "TaskScore", "sweep_to_csv"]),
            ("modeling_looped.eval.harness", ["LoopedLM", "training_cost"]),
            ("modeling_looped.eval.run", ["run", "find_tasks"]),
            ("modeling_looped.eval.report", ["read_runs", "write_report", "Run"]),
            ("modeling_looped.eval.statistics", ["bootstrap_stderr", "paired_bootstrap", "aggregate"]),
            ("modeling_looped.eval.contamination", ["overlap", "Overlap", "task_texts"]),
            ("modeling_looped.eval.generators", ["copying", "variable_assignment", "p_hop", "addition"]),
            ("modeling_looped.eval.metrics", ["metric_path", "load_metric"]),
            ("modeling_looped.eval.smollm2", ["smollm2_checkpoint"]),
        ],
    ),
    (
        "hub_cards",
        "Cards and uploads",
        "The model card of a checkpoint, from its own files, and the upload to the Hub.",
        [
            (
                "modeling_looped.hub_cards.card",
                ["write_card", "build_card", "add_results", "is_foreign", "draw_plan", "ForeignCard"],
            ),
            ("modeling_looped.hub_cards.push", ["push", "plan_upload", "Upload"]),
        ],
    ),
    (
        "recipes",
        "Recipes",
        "What the training commands are made of. Needs the extra `train`.",
        [
            ("modeling_looped.recipes.demo", ["demo"]),
            ("modeling_looped.recipes.pretrain", ["pretrain", "PretrainRecipe", "RunOptions", "PretrainResult"]),
            ("modeling_looped.recipes.launch", ["CooldownRecipe"]),
            ("modeling_looped.recipes.recipe", ["ModelSource"]),
            ("modeling_looped.recipes.data", ["DataRecipe", "Source"]),
            ("modeling_looped.recipes.sft", ["sft", "choice_accuracy", "lora_config"]),
            ("modeling_looped.recipes.optimizers", ["MuonH", "Muon", "make_optimizers", "polar_express"]),
            ("modeling_looped.recipes.transfer", ["learning_rates", "LearningRates"]),
            ("modeling_looped.recipes.sweep", ["run_sweep", "SweepRecipe", "collect_sweep"]),
            (
                "modeling_looped.recipes.synthetic",
                ["variable_assignment", "copying", "arithmetic_texts", "ChoiceItem"],
            ),
            ("modeling_looped.recipes.corpus", ["read_texts", "standard_library", "split_by_name"]),
            ("modeling_looped.recipes.tokens", ["train_tokenizer", "token_stream", "TokenRows"]),
        ],
    ),
]

# Arguments that mean the same wherever they stand, and are explained once, on the index.
COMMON = {
    "attention_mask": "As in transformers: (batch, length), 1 where there is a token.",
    "batch_size": "Rows at a time; of a cache, sequences in it.",
    "bytes_per_value": "2 for bf16 and fp16, 4 for fp32.",
    "cache": "A cache of transformers, which the call fills.",
    "block_size": "Layers of a block, which one growth adds.",
    "config": "A model's configuration.",
    "d": "Width.",
    "decomposition": "How the parameters that run once are told from those of the loop: `regression`, `paper` or `own`.",
    "dry_run": "Say what would come out, and write nothing.",
    "family": "The models' parameters and FLOPs as functions of their width; the iso-depth paper's by default.",
    "frame": "A table of runs as `scaling.read_runs` returns it, one row a run.",
    "hidden_states": "(batch, length, width).",
    "input_ids": "As in transformers: token ids, (batch, length).",
    "inputs_embeds": "As in transformers: (batch, length, width), instead of `input_ids`.",
    "labels": "As in transformers: (batch, length), -100 where no loss is wanted.",
    "level": "Of the interval: 0.95 for 95 %.",
    "law": "A fitted law: `JointLaw`, or `ChinchillaLaw`.",
    "logits_to_keep": "As in transformers: logits of the last so many positions only; 0 for all.",
    "max_tokens": "Stop after so many tokens; all by default.",
    "model": "A causal language model: of this package or, where not said otherwise, any decoder of transformers.",
    "num_recurrences": "Passes over the core; the configured number by default.",
    "operator": "`midas` or `lidas`.",
    "output": "The folder that is written.",
    "overwrite": "Replace what the output holds.",
    "position_ids": "As in transformers: (1 or batch, length).",
    "processes": "Over which the work is spread.",
    "progress": "Show a progress bar.",
    "r": "Passes over the core.",
    "recurrence": "Which pass over the core, from 0; `None` outside it.",
    "resamples": "Of the bootstrap.",
    "restarts": "Random starts of each fit.",
    "rows": "Texts as lists of token ids.",
    "seed": "Of every random draw: the same seed gives the same result.",
    "sequence_length": "Tokens of context; `max_position_embeddings` by default.",
    "texts": "Texts, as strings.",
    "tokenizer": "The model's.",
    "use_cache": "As in transformers: return a cache.",
}

# Of classes with more methods than users call, those that are shown.
METHODS = {"LoopedModelMixin": ["forward"], "LoopedLM": [], "DepthSamplingCallback": []}

_loaded: dict[str, griffe.Object] = {}


def module(name: str) -> griffe.Object:
    """A module as griffe reads it, under the name by which it is imported once installed."""
    room = next((room for room in ROOMS if name == room or name.startswith(f"{room}.")), "modeling_looped")
    top = ROOMS.get(room, room)
    if top not in _loaded:
        _loaded[top] = griffe.load(top, search_paths=[ROOT], docstring_parser="google", allow_inspection=False)
    found = _loaded[top]
    for part in filter(None, name.removeprefix(room).split(".")):
        found = found.members[part]
    return found


def public_objects(name: str, names: list[str] | None) -> list[tuple[str, griffe.Object]]:
    """`(name, object)` of what a page shows of a module; re-exports are followed to where they are written."""
    source = module(name)
    found = []
    for one in names or [str(each).strip("'\"") for each in source.exports]:
        if one not in source.members:
            raise SystemExit(f"docs/make_api.py: {name} has no {one}: correct PAGES.")
        member = source.members[one]
        found.append((one, member.final_target if member.is_alias else member))
    return found


def members(cls: griffe.Class) -> tuple[list[griffe.Attribute], list[griffe.Function]]:
    """The properties and methods of a class that have a docstring: what transformers calls needs none."""
    own = [member for name, member in cls.members.items() if not name.startswith("_") and not member.is_alias]
    properties = [one for one in own if one.is_attribute and "property" in one.labels and one.docstring]
    shown = METHODS.get(cls.name)
    return properties, [
        one for one in own if one.is_function and one.docstring and (shown is None or one.name in shown)
    ]


def text(expression) -> str:
    """Of an annotation or a default value, on one line."""
    return re.sub(r"\s+", " ", str(expression))


def annotation(expression) -> str:
    """Without quotes around a forward reference."""
    return re.sub(r"^(['\"])(\w+)\1$", r"\2", text(expression))


def signature(name: str, function: griffe.Function | griffe.Class) -> str:
    """`name(parameters) -> type` as the call is written, a line for each parameter where it is long."""
    parts, starred = [], False
    for parameter in function.parameters:
        kind = str(parameter.kind.value)
        if parameter.name in ("self", "cls") or parameter.name.startswith("_"):
            continue
        if kind == "keyword-only" and not starred:
            parts.append("*")
            starred = True
        starred = starred or kind == "variadic positional"
        prefix = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        part = f"{prefix}{parameter.name}"
        if parameter.annotation is not None:
            part += f": {annotation(parameter.annotation)}"
        if parameter.default is not None and not prefix:
            part += (
                f" = {text(parameter.default)}" if parameter.annotation is not None else f"={text(parameter.default)}"
            )
        parts.append(part)
    returns = getattr(function, "returns", None) if isinstance(function, griffe.Function) else None
    end = f") -> {annotation(returns)}" if returns is not None else ")"
    line = f"{name}({', '.join(parts)}{end}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), end])


def prose(value: str) -> str:
    """Text of a docstring as Markdown: interactive sessions are named so, and indented lines are fenced."""
    value = re.sub(r"```python(?=\n\s*>>>)", "```pycon", value.strip())
    parts = re.split(r"(```.*?```)", value, flags=re.DOTALL)
    indented = re.compile(r"(?:^|(?<=\n\n))((?: {4}.*(?:\n|$))+)")

    def fenced(match: re.Match) -> str:
        return f"```text\n{textwrap.dedent(match[1]).rstrip()}\n```\n"

    return "".join(part if part.startswith("```") else indented.sub(fenced, part) for part in parts)


def cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def sections_of(one: griffe.Object) -> list[str]:
    """The docstring's parts in their order: paragraphs, and a table of arguments."""
    if one.docstring is None:
        return []
    value = one.docstring.value.strip()
    if re.match(r"\w+ \(`", value):  # transformers' decorator puts the heading in front
        value = "\nArgs:\n" + textwrap.indent(value, "    ")
    lines = []
    for section in griffe.Docstring(value, parent=one).parse(
        "google", warnings=False, returns_named_value=False, returns_multiple_items=False
    ):
        if section.kind.value == "text":
            lines += [prose(section.value), ""]
        elif section.kind.value in ("parameters", "attributes"):
            lines += [
                f"| {section.kind.value[:-1].replace('parameter', 'argument')} | type | meaning |",
                "|---|---|---|",
            ]
            for item in section.value:
                kind = "" if item.annotation is None else text(item.annotation)
                kind = kind if "`" in kind or not kind else f"`{kind}`"
                lines.append(f"| `{item.name}` | {cell(kind)} | {cell(item.description)} |")
            lines.append("")
        elif section.kind.value == "returns":
            lines += ["**Returns** " + " ".join(prose(item.description) for item in section.value), ""]
        elif section.kind.value == "raises":
            for item in section.value:
                kind = text(item.annotation)
                lines += [f"**Raises** {kind if '`' in kind else f'`{kind}`'} {prose(item.description)}", ""]
        elif section.kind.value == "admonition":
            lines += [f"**{section.title}** {prose(section.value.description)}", ""]
        else:
            raise SystemExit(f"docs/make_api.py: {one.path}: a section {section.kind.value} of a docstring")
    return lines


def default_and_help(value) -> tuple[str, str]:
    """Of a dataclass's field: what it is where nothing is given, and the help text of its option."""
    if value is None:
        return "", ""
    tree = ast.parse(str(value), mode="eval").body
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "field"):
        return text(value), ""
    given = {keyword.arg: keyword.value for keyword in tree.keywords}
    default = next((ast.unparse(given[name]) for name in ("default", "default_factory") if name in given), "")
    metadata = ast.literal_eval(given["metadata"]) if "metadata" in given else {}
    return default, metadata.get("help", "")


def fields_table(cls: griffe.Class) -> list[str]:
    """The fields of a dataclass whose docstring tells none, with the help texts that its options have."""
    parsed = [] if cls.docstring is None else cls.docstring.parse("google", warnings=False)
    is_dataclass = "dataclass" in cls.labels or any("dataclass" in str(one.value) for one in cls.decorators)
    if not is_dataclass or any(section.kind.value in ("parameters", "attributes") for section in parsed):
        return []
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, member in cls.members.items():
        if name.startswith("_") or not member.is_attribute or member.annotation is None:
            continue
        if "ClassVar" in str(member.annotation):
            continue
        default, meaning = default_and_help(member.value)
        if member.docstring:
            meaning = member.docstring.value
        shown = f"`{cell(default)}`" if default else ""
        lines.append(f"| `{name}` | `{cell(text(member.annotation))}` | {shown} | {cell(meaning)} |")
    return [*lines, ""] if len(lines) > 2 else []


def object_lines(name: str, one: griffe.Object, depth: int = 2, heading: str | None = None) -> list[str]:
    lines = [f"{'#' * depth} {heading or name}", ""]
    if one.is_function or (one.is_class and not is_framework(one)):
        lines += ["```text", signature(name, one), "```", ""]
    elif one.is_attribute:
        value = text(one.value)
        lines += ["```text", f"{name} = {value if len(value) <= 300 else '...'}", "```", ""]
    lines += sections_of(one)
    if one.is_class:
        lines += fields_table(one)
        properties, methods = members(one)
        if properties:
            lines += ["| property | type | meaning |", "|---|---|---|"]
            for each in properties:
                kind = "" if each.annotation is None else f"`{cell(text(each.annotation))}`"
                lines.append(f"| `{each.name}` | {kind} | {cell(each.docstring.value)} |")
            lines.append("")
        for method in methods:
            lines += object_lines(f"{name}.{method.name}", method, depth + 1)
    return lines


def is_framework(cls: griffe.Class) -> bool:
    """Configurations, models and callbacks, whose constructor is the fields that the table has, or transformers' own."""
    return cls.name.endswith(("Config", "Mixin", "Callback", "Output", "Recipe", "Options", "Error", "LoopedLM"))


def page_text(title: str, about: str, modules: list) -> str:
    lines = [MADE, "", f"# {title}", "", about, ""]
    shown = [(module(name), public_objects(name, names)) for name, names in modules]
    lowered = [one.lower() for _, objects in shown for one, _ in objects]
    for source, objects in shown:
        # Anchors have no capitals: `ancestry` and `Ancestry` would share one.
        headings = {
            one: f"{one} (class)" if found.is_class and lowered.count(one.lower()) > 1 else one
            for one, found in objects
        }
        anchors = {
            one: heading.lower().replace(" ", "-").strip("()").replace("(", "") for one, heading in headings.items()
        }
        listed = ", ".join(f"[`{one}`](#{anchors[one]})" for one in headings)
        path = Path(source.filepath).relative_to(ROOT)
        lines += [f"In [`{installed_name(path)}`](../../{path}): {listed}.", ""]
        for one, found in objects:
            lines += object_lines(one, found, heading=headings[one])
    return "\n".join(lines).rstrip() + "\n"


def installed_name(path: Path) -> str:
    """The module's name once it is installed."""
    parts = list(path.with_suffix("").parts)
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "modeling_looped" else ["modeling_looped", *parts])


def index_text() -> str:
    lines = [
        MADE,
        "",
        "# API reference",
        "",
        "What is public, from its docstrings. Everything else may change without notice. Losses are nats per token, FLOPs are",
        "of one token where their name says so, and errors that a user can correct are `ValueError`.",
        "",
        "| page | what |",
        "|---|---|",
    ]
    lines += [
        f"| [{title}]({file}.md) | {cell(about.partition('. ')[0].rstrip('.'))} |" for file, title, about, _ in PAGES
    ]
    lines += ["", "## Arguments that mean the same everywhere", "", "| argument | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {cell(meaning)} |" for name, meaning in sorted(COMMON.items())]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """The text of each file of docs/api."""
    return {"index.md": index_text()} | {f"{file}.md": page_text(*rest) for file, *rest in PAGES}


def main() -> None:
    API.mkdir(exist_ok=True)
    made = pages()
    for name, content in made.items():
        (API / name).write_text(content)
    for old in set(path.name for path in API.glob("*.md")) - made.keys():
        if (API / old).read_text().startswith(MADE):
            (API / old).unlink()
    print(f"{len(made)} pages in docs/api", file=sys.stderr)


if __name__ == "__main__":
    main()
