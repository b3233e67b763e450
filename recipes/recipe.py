"""One parser for the three scripts: a recipe YAML of sections, options that override its fields, and a dry run."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from transformers import AutoConfig, PreTrainedConfig

from looped_cli import ends_in_a_sentence, example_block
from modeling_looped import LoopedGPTConfig


BUDGETS = ("total_steps", "budget_tokens", "budget_flops")  # a layer of settings that has one replaces all below it
FAMILIES = ("looped_gpt", "recurrent_gpt", "mixture_of_recursions", "grown_llama")
NESTED = ("fields",)  # mappings that a higher layer adds to instead of replacing them


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 and 1e18 as text, since they have no point or no sign: here they are numbers."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)
# And it reads no, yes, on and off as truth values, where a recipe means precision: no.
for first, resolvers in YamlLoader.yaml_implicit_resolvers.items():
    if first not in "tTfF":
        YamlLoader.yaml_implicit_resolvers[first] = [one for one in resolvers if one[0] != "tag:yaml.org,2002:bool"]


def read_yaml(name: str):
    """The values of a recipe file, or of a bundled one by its name."""
    try:
        return yaml.load(recipe_file(name).read_text(encoding="utf-8"), YamlLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def recipe_file(name: str) -> Path:
    """A file by its path, or of a bundled recipe by its name."""
    if Path(name).is_file():
        return Path(name)
    bundled = sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))
    if name.removesuffix(".yaml") not in bundled:
        raise ValueError(f"{name!r} is neither a file nor a bundled recipe{hint(name.removesuffix('.yaml'), bundled)}")
    return Path(__file__).parent / f"{name.removesuffix('.yaml')}.yaml"


def checked(kind: type, values, where: str):
    """The dataclass `kind` from a mapping whose keys and types fit."""
    types = get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values!r} must be a mapping with {', '.join(types)}.")
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"{where}: there is no key {name!r}{hint(name, types)}")
        expected = types[name] | int if isinstance(0.5, types[name]) else types[name]
        takes_bool = bool in (types[name], *get_args(types[name]))  # to isinstance True is an int
        if not isinstance(value, expected) or (isinstance(value, bool) and not takes_bool):
            kind_name = types[name].__name__ if isinstance(types[name], type) else types[name]
            raise ValueError(f"{where}: {name}={value!r} must be of type {kind_name}.")
    missing = [f.name for f in fields(kind) if f.name not in values and f.default is f.default_factory is MISSING]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing.")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def hint(name, choices: Iterable[str]) -> str:
    near = get_close_matches(str(name), choices, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(choices)}."


@dataclass(frozen=True)
class ModelSource:
    """The model of a run: a configuration to start from scratch, or a checkpoint to start from."""

    architecture: str | None = field(
        default=None,
        metadata={
            "help": "A ready configuration's name (looped-gpt-s10-r4), a folder with a config.json, a Hub name, a "
            "model_type to be filled by fields, or iso-depth, which size and recurrences fill."
        },
    )
    checkpoint: str | None = field(default=None, metadata={"help": "A checkpoint whose weights the run starts from."})
    size: int | None = field(default=None, metadata={"help": "Of architecture iso-depth: width 64 * size."})
    recurrences: int | None = field(default=None, metadata={"help": "Passes over the core; of iso-depth, at equal depth."})
    fields: dict = field(default_factory=dict, metadata={"help": "Fields of the configuration to change: {name: value}."})

    def __post_init__(self):
        if (self.architecture is None) == (self.checkpoint is None):
            raise ValueError(
                f"architecture={self.architecture!r} and checkpoint={self.checkpoint!r}: give one of the two, a "
                "configuration to start from scratch or a checkpoint to start from."
            )
        if (self.architecture == "iso-depth") != (self.size is not None):
            raise ValueError(f"size={self.size!r} belongs to architecture 'iso-depth' (it is {self.architecture!r}).")

    def config(self) -> PreTrainedConfig:
        """
        The configuration of the model at the start of training.

        Raises:
            `ValueError`: for names that lead nowhere, and fields that the configuration does not have or refuses.
        """
        changes = dict(self.fields)
        if self.architecture == "iso-depth":
            for key in set(changes) & {"hidden_size", "num_core_layers", "num_recurrences"}:
                raise ValueError(f"fields: {key} of architecture 'iso-depth' follows from size and recurrences.")
            return LoopedGPTConfig.iso_depth(self.size, self.recurrences or 1, **changes)
        if self.recurrences is not None:
            changes["num_recurrences"] = self.recurrences
        config = self._named()
        known = {name for name in vars(config) if not name.startswith("_")} | {one.name for one in fields(type(config))}
        known.add("num_recurrences")  # of a GrownLlama it follows from its plan, and turns it
        for name in changes:
            if name not in known:
                raise ValueError(f"fields: {type(config).__name__} has no {name!r}{hint(name, sorted(known))}")
        # Of a bare model_type, defaults that follow from other fields have to follow from these.
        values = dict(changes) if self.architecture == config.model_type else {**config.to_dict(), **changes}
        if {"depth_plan", "num_recurrences"} & set(changes) and "trained_recurrences" not in changes:
            values.pop("trained_recurrences", None)  # a run trains the depth that it is given
        values.pop("transformers_version", None)
        if not hasattr(config, "depth_plan"):
            return type(config)(**values)
        depth = values.pop("num_recurrences", None)
        made = type(config)(**values)
        if depth is not None:
            made.num_recurrences = depth
            made.trained_recurrences = changes.get("trained_recurrences", depth)
        return made

    def _named(self) -> PreTrainedConfig:
        name = self.checkpoint or self.architecture
        bundled = Path(find_spec("modeling_looped.configuration").origin).parent
        if self.architecture is not None:
            if (bundled / name / "config.json").is_file():
                return AutoConfig.from_pretrained(bundled / name)
            if name in FAMILIES:
                return AutoConfig.for_model(name)
        ready = sorted(path.parent.name for path in bundled.glob("*/config.json"))
        near = get_close_matches(name, ready, 1, 0.85) if self.checkpoint is None and not Path(name).exists() else []
        if near:  # before the Hub is asked
            raise ValueError(f"architecture={name!r} is no ready configuration: did you mean {near[0]!r}?")
        try:
            return AutoConfig.from_pretrained(name)
        except Exception as error:  # of many kinds: a missing file, an unknown model_type, no network
            what = "architecture" if self.checkpoint is None else "checkpoint"
            near = get_close_matches(name, ready, 1)
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{what}={name!r} holds no configuration" + (f": did you mean {near[0]!r}?" if near else f" ({reason}).")
            ) from error  # a network that is not there is no fault of the call


@dataclass
class ParsedRecipe:
    """`sections` holds one checked dataclass a section; `values` the plain mapping that they were made of."""

    sections: dict[str, Any]
    values: dict[str, dict]
    output_dir: str | None
    resume: str | None
    overwrite: bool
    dry_run: bool
    as_json: bool = False


def parse_recipe(
    sections: dict[str, type],
    description: str,
    arguments: Sequence[str] | None = None,
    command: str = "pretrain",
    examples: Sequence[str] = (),
) -> ParsedRecipe:
    """
    The recipe that a script is asked to run: `--config` names a YAML file or a bundled recipe, `--toy` lays the
    recipe's own `toy` section over it, and every field of every section is an option that overrides both. What the
    user can correct ends the process with its sentence and status 2.

    Args:
        sections: A dataclass for each section of the YAML. Field names differ between them.
        arguments: Instead of the command line's.
        command: What it is called, after `looped`.
        examples: Calls that the help ends with.
    """
    with ends_in_a_sentence(command):
        return _parse(_parser(sections, description, command, examples), sections, arguments)


def _parser(
    sections: dict[str, type], description: str, command: str, examples: Sequence[str] = ()
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"looped {command}",
        description=description,
        epilog=example_block(examples).strip() if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example stays one line
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="A recipe .yaml, or the name of a bundled one.")
    parser.add_argument("--output_dir", metavar="DIR", help="Where checkpoints, metrics and packed data go.")
    parser.add_argument("--toy", action="store_true", help="The recipe's small twin, which two CPU cores run in minutes.")
    parser.add_argument("--dry-run", dest="dry_run", action="store_true", help="Print model, tokens and FLOPs; write nothing.")
    parser.add_argument("--json", dest="as_json", action="store_true", help="With --dry-run: print JSON.")
    parser.add_argument("--resume", choices=["auto"], help="auto continues from the newest checkpoint in DIR, if any.")
    parser.add_argument("--overwrite", action="store_true", help="Delete the run that DIR holds, and start again.")
    for section, kind in sections.items():
        group = parser.add_argument_group(f"section {section}")
        for one in fields(kind):
            default = "" if one.default in (None, MISSING) else f" Default {one.default}."
            text = (one.metadata.get("help", "") + default).replace("%", "%%")
            group.add_argument(f"--{one.name}", metavar="VALUE", help=text, default=argparse.SUPPRESS)
    return parser


def _parse(parser: argparse.ArgumentParser, sections: dict[str, type], arguments) -> ParsedRecipe:
    arguments = [_underscored(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    given, unknown = parser.parse_known_args(arguments)
    options = vars(given)
    homes = {one.name: section for section, kind in sections.items() for one in fields(kind)}
    if unknown and not unknown[0].startswith("-"):
        raise ValueError(f"{unknown[0]!r} belongs to no option: write --name value.")
    if unknown:
        names = [option.removeprefix("--") for option in parser._option_string_actions]
        raise ValueError(f"there is no option {unknown[0]!r}{hint(unknown[0].lstrip('-').partition('=')[0], names)}")
    layers = recipe_layers(given.config, sections, given.toy)
    typed: dict[str, dict] = {}
    for name, section in homes.items():
        if name in options:
            value = _load(options[name], f"--{name}")
            if value is not None and str in _alternatives(sections[section], name) and not isinstance(value, (dict, list)):
                value = options[name]  # a name that looks like a number stays a name
            typed.setdefault(section, {})[name] = value
    values = merged([*layers, typed], {section: f"{given.config}, {section}" for section in sections})
    made = {
        section: checked(kind, values.get(section, {}), f"{given.config}, {section}") for section, kind in sections.items()
    }
    if given.output_dir is None and not given.dry_run:
        raise ValueError("--output_dir is missing: name the folder of this run, or ask for a --dry-run.")
    if given.resume and given.overwrite:
        raise ValueError("--resume continues a run and --overwrite deletes it: give one of the two.")
    if given.as_json and not given.dry_run:
        raise ValueError("--json prints the figures of a --dry-run: add that, or leave it out.")
    return ParsedRecipe(made, values, given.output_dir, given.resume, given.overwrite, given.dry_run, given.as_json)


def recipe_layers(name: str, sections: dict[str, type], toy: bool = False) -> list[dict[str, dict]]:
    """The settings of a recipe, what it `extends` before it and, where asked for, the nearest `toy` section last."""
    asked, layers, toys = name, [], []
    seen: dict[Path, str] = {}
    while name is not None:
        file = recipe_file(name).resolve()
        if file in seen:
            raise ValueError(f"{asked}: extends goes in a circle, {' -> '.join([*seen.values(), name])}.")
        seen[file] = name
        values = dict(_mapping(read_yaml(name), name, sections))
        parent, small = values.pop("extends", None), values.pop("toy", None)
        if parent is not None and not isinstance(parent, str):
            raise ValueError(f"{name}: extends={parent!r} must be the name or file of one recipe.")
        _check_sections(values, name, sections)
        if small is not None:
            _check_sections(_mapping(small, f"{name}, toy", sections), f"{name}, toy", sections)
            toys.append(small)
        layers.insert(0, values)
        name = None if parent is None else path_of_parent(name, parent)
    if toy and not toys:
        raise ValueError(f"{asked} has no toy section: leave --toy out.")
    return [*layers, toys[0]] if toy else layers


def _mapping(values, where: str, sections: dict[str, type]) -> dict:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values!r} must be a mapping with {', '.join(sections)}.")
    return values


def _check_sections(values: dict, where: str, sections: dict[str, type]) -> None:
    for key in values:
        if key not in sections:
            raise ValueError(f"{where}: there is no section {key!r}{hint(key, sections)}")


def path_of_parent(name: str, parent: str) -> str:
    """A recipe that another one extends: beside it, or bundled."""
    if Path(name).is_file():
        for beside in (Path(name).parent / parent, Path(name).parent / f"{parent}.yaml"):
            if beside.is_file() and not beside.samefile(name):  # one of its own name is the bundled one
                return str(beside)
    return parent


def merged(layers: list[dict[str, dict]], where: dict[str, str]) -> dict[str, dict]:
    """One mapping of sections: later layers win, budgets as a whole, and `fields` add up."""
    result: dict[str, dict] = {}
    for layer in layers:
        for section, values in layer.items():
            if not isinstance(values, dict):
                raise ValueError(f"{where.get(section, section)}: {values!r} must be a mapping.")
            into = result.setdefault(section, {})
            budgets = [name for name in BUDGETS if values.get(name) is not None]
            if len(budgets) > 1:
                raise ValueError(f"{where.get(section, section)}: give one of {' and '.join(budgets)}; the rest follows.")
            if budgets:
                for name in BUDGETS:
                    into.pop(name, None)
            for pair in (("architecture", "checkpoint"), ("checkpoint", "architecture")):
                if section == "model" and values.get(pair[0]) is not None:
                    into.pop(pair[1], None)
            if section == "model" and values.get("architecture") not in (None, "iso-depth"):
                into.pop("size", None)
            for name, value in values.items():
                if name in NESTED and isinstance(value, dict) and isinstance(into.get(name), dict):
                    value = {**into[name], **value}
                into[name] = value
    return result


def _underscored(argument: str) -> str:
    """--total-steps is --total_steps."""
    if not argument.startswith("--") or argument == "--dry-run":
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}".replace("--dry_run", "--dry-run")


def _load(text: str, where: str):
    try:
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError:
        raise ValueError(f"{where} {text!r} is not a value: quote it, or write lists and mappings as in YAML.") from None


def _alternatives(kind: type, name: str) -> tuple:
    hint_ = get_type_hints(kind)[name]
    return getattr(hint_, "__args__", (hint_,))


def as_yaml(values: dict) -> str:
    """Text that a recipe file may hold."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
