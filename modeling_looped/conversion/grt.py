"""
Checkpoints of arXiv 2608.15062 (RecurrentGPT, or GRT: `Amr-Hegazy/grt-{medium,large}-{isoflop,isoparam}` on the Hub) as
RecurrentGPT.

    looped convert grt model.safetensors grt-medium --cell medium-isoflops --draft map.json
    looped convert grt model.safetensors grt-medium --cell medium-isoflops --map map.json

The names of the tensors in these files were not known when this was written, and the authors' code is not here. So
tensors are matched by shape and by the order of their names, helped by nanoGPT's names where there are some; what stays
open is refused with its candidates, and a map settles it. Totals are checked against section 3 of the paper's
specification. Equal logits were shown on a synthetic checkpoint only, written by an independent implementation.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from ..accounting import parameter_counts
from ..configuration_recurrent_gpt import RecurrentGPTConfig
from ..modeling_recurrent_gpt import RecurrentGPTForCausalLM
from .ledger import Ledger, Use, build, check_output, compare_read_back, dtype_name, listed, write_checkpoint
from .weights import FLOATS, read_file, read_pickle


@dataclass(frozen=True)
class Cell:
    """A model of the paper: width, heads, layers of prelude, core and coda, recurrences, and its parameters."""

    hidden_size: int
    num_attention_heads: int
    num_prelude_layers: int
    num_core_layers: int
    num_coda_layers: int
    num_recurrences: int
    total: int
    vocab_size: int = 50304
    max_position_embeddings: int = 1024


CELLS = {  # section 3; the totals are those of the files on the Hub
    "medium-isoflops": Cell(1024, 16, 2, 5, 2, 4, 171_073_536),
    "medium-isoparams": Cell(1024, 16, 2, 20, 2, 4, 359_847_936),
    "large-isoflops": Cell(1280, 20, 1, 5, 5, 6, 290_196_480),
    "large-isoparams": Cell(1280, 20, 3, 30, 3, 6, 781_780_480),
}
SWAPPED = "the names of the two medium repositories on the Hub are swapped: grt-medium-isoparam holds medium-isoflops"
# What a config.json may call the numbers.
NUMBERS = {
    "num_prelude_layers": ("num_prelude_layers", "n_prelude", "n_pre", "prelude_layers"),
    "num_core_layers": ("num_core_layers", "n_core", "n_rec", "n_recur", "n_recurrent", "core_layers"),
    "num_coda_layers": ("num_coda_layers", "n_coda", "coda_layers"),
    "num_recurrences": ("num_recurrences", "R", "n_recurrences", "num_recur", "max_recurrences"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "block_size", "n_positions"),
}
SECTIONS = {
    "prelude": ("prelude", "pre"),
    "core": ("core", "rec", "recur", "recurrent", "shared"),
    "coda": ("coda", "post"),
}
QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
LICENCE = (
    "The weights of Amr-Hegazy/grt-* are CC-BY-4.0 (Hegazy, Alanwar, Elhoushi, arXiv 2608.15062): name the authors."
)
PARITY = "equal logits were shown on a synthetic checkpoint only: neither the official files nor the authors' code were there"
README = f"""---
license: cc-by-4.0
---
RecurrentGPT, converted by modeling-looped from a checkpoint of arXiv 2608.15062 (Amr Hegazy, Amr Alanwar, Mostafa
Elhoushi). The released weights, `Amr-Hegazy/grt-*` on the Hub, are licensed CC-BY-4.0; they were renamed and, where
queries, keys and values were one matrix, cut. In the conversion, {PARITY}.
"""

Shape = tuple[int, ...]


@dataclass
class Match:
    """Tensor of the source -> tensors here (more than one: its rows, cut in order); and what stays open."""

    found: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    open: list[tuple[list[str], list[str]]] = field(default_factory=list)  # (candidates there, places here)
    placeholders: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of blocks whose section is open

    def settle(self, source: str, *targets: str) -> None:
        self.found[source] = targets

    def draft(self) -> dict[str, Any]:
        """The map as far as it is known, with the choices that are left in words."""
        known = {**self.found, **self.placeholders}
        settled = {name: places[0] if len(places) == 1 else list(places) for name, places in known.items()}
        chosen = {
            name: f"one of: {', '.join(places)}" for names, places in self.open for name in names if "#" not in name
        }
        return {**settled, **chosen, **dict.fromkeys(self.unused)}


def convert_grt(
    source: str | Path,
    output: str | Path,
    cell: str | None = None,
    map_file: str | Path | None = None,
    draft: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Ledger:
    """
    Turns a checkpoint of the paper's code into a folder that `AutoModelForCausalLM.from_pretrained` takes, in its dtype.
    Equal logits were shown on a synthetic checkpoint only.

    Args:
        source (`str` or `Path`): A `.safetensors`, `.pt` or `.bin` file, or a folder with one.
        output (`str` or `Path`): The folder to write.
        cell (`str`, *optional*):
            Which of the paper's models it is, `"medium-isoflops"` for example. Needed where no `config.json` beside the
            weights has the numbers of layers and recurrences.
        map_file (`str` or `Path`, *optional*):
            A JSON of `{their name: our name}`, for every tensor. A list of names cuts a tensor's rows in that order (one
            matrix for queries, keys and values); `null` leaves a tensor out.
        draft (`str` or `Path`, *optional*): Where such a map is written, with open choices, when tensors stay ambiguous.
        overwrite (`bool`, defaults to `False`): Replace the checkpoint that `output` holds.
        dry_run (`bool`, defaults to `False`): Check everything and write nothing.

    Raises:
        `FileNotFoundError`: where there are no weights.
        `ValueError`: where tensors are ambiguous, missing or unexplained, or the total is not the model's.
        `ConversionError`: where what was written gives other logits when it is read back.
    """
    source, output = Path(source).expanduser(), Path(output).expanduser().resolve()
    file = _find(source)
    if not dry_run:
        check_output(output, {file.parent, file.resolve().parent}, overwrite)
    whole, said = _read(file)
    state, unused = _without_copies(whole)
    config = _config(file, state, cell, said)
    with torch.device("meta"):
        here = {name: tuple(tensor.shape) for name, tensor in RecurrentGPTForCausalLM(config).state_dict().items()}
    del here["lm_head.weight"]  # tied
    match = match_grt(state, config) if map_file is None else _from_map(Path(map_file).expanduser(), whole)
    state = whole
    match.unused |= {name: reason for name, reason in unused.items() if name not in match.found}
    _check_match(file, match, state, here, map_file, draft)
    total = _check_total(file, match, state, config)

    dtype = reduce(torch.promote_types, (state[name].dtype for name in match.found))
    used, parts = [], {}
    place = {target: position for position, target in enumerate(here)}
    for name, targets in sorted(match.found.items(), key=lambda item: place[item[1][0]]):
        notes = [f"from {dtype_name(state[name].dtype)}"] if state[name].dtype != dtype else []
        first = 0
        for target in targets:
            rows = here[target][0]
            cut = (f"rows {first} to {first + rows - 1}",) if len(targets) > 1 else ()
            used.append(Use(name, (target,), here[target], (*cut, *notes)))
            parts[target] = (name, first)
            first += rows
    chosen = f"matched by {Path(map_file).name}" if map_file is not None else "matched by shape and the order of names"
    model = f"RecurrentGPTForCausalLM {config.plan()}, {dtype_name(dtype)}"
    remarks = (chosen, total, PARITY, LICENCE)
    counts = parameter_counts(config)
    ledger = Ledger(file, output, model, tuple(used), match.unused, (), counts, remarks, dry_run=dry_run)
    if dry_run:
        return ledger

    weights = {
        target: state[name][first : first + here[target][0]].to(dtype).contiguous()
        for target, (name, first) in parts.items()
    }
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    converted = build(RecurrentGPTForCausalLM, config, weights, dtype)
    comparisons = write_checkpoint(
        converted,
        output,
        lambda folder: compare_read_back(converted, folder),
        lambda folder: (folder / "README.md").write_text(README, encoding="utf-8"),
    )
    return replace(ledger, comparisons=comparisons)


# ---- The source ----


def _find(source: Path) -> Path:
    kinds = (".safetensors", ".pt", ".bin", ".pth")
    if source.is_file():
        return source
    if not source.is_dir():
        raise FileNotFoundError(f"{source} does not exist: pass a file ({', '.join(kinds)}) or a folder with one.")
    files = sorted(file for file in source.iterdir() if file.suffix in kinds)
    if not files:
        raise FileNotFoundError(f"{source} holds no weights: a file ending in {', '.join(kinds)} is expected in it.")
    if len(files) > 1:
        raise ValueError(f"{source} holds {listed(file.name for file in files)}: name one of them.")
    return files[0]


def _read(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by name, and the numbers that nanoGPT keeps beside them in a checkpoint of training."""
    numbers = {}
    if file.suffix == ".safetensors":
        state = read_file(file)
    else:
        state = read_pickle(file)
        if isinstance(state, dict) and isinstance(state.get("model"), dict):
            numbers, state = state.get("model_args") or {}, state["model"]
        if not isinstance(state, dict) or not state or not all(isinstance(x, torch.Tensor) for x in state.values()):
            raise ValueError(f"{file} should hold named tensors, alone or as 'model', and holds something else.")
        if wrong := [name for name, tensor in state.items() if tensor.dtype not in FLOATS]:
            raise ValueError(f"{file} holds {listed(wrong)} in a dtype that weights do not have.")
    found = {}
    for name, tensor in state.items():
        key = re.sub(r"^(_orig_mod\.|module\.)+", "", name)
        if key in found:
            raise ValueError(f"{file} holds {key} twice, with and without a prefix.")
        found[key] = tensor
    return found, numbers


def _without_copies(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Without causal masks and without a head that is the token table once more; these, with the reason."""
    unused = {}
    for name, tensor in state.items():
        if tensor.dim() == 4 and torch.equal(tensor[0, 0], torch.ones_like(tensor[0, 0]).tril()):
            unused[name] = "a causal mask"
    heads = [name for name in state if name.split(".")[-2:] == ["lm_head", "weight"]]
    for head in heads:
        same = [
            name
            for name, x in state.items()
            if name != head and x.shape == state[head].shape and torch.equal(x, state[head])
        ]
        if same:
            unused[head] = f"the same as {same[0]}, to which the head is tied"
    return {name: tensor for name, tensor in state.items() if name not in unused}, unused


def _config(file: Path, state: dict[str, torch.Tensor], cell: str | None, said: dict[str, Any]) -> RecurrentGPTConfig:
    beside = file.with_name("config.json")
    if beside.is_file():
        try:
            said = {**said, **json.loads(beside.read_text(encoding="utf-8"))}
        except (ValueError, TypeError):
            raise ValueError(f"{beside} is damaged: it holds no JSON object.") from None
    numbers = {}
    for ours, names in NUMBERS.items():
        values = {name: said[name] for name in names if said.get(name) is not None}
        if len(set(values.values())) > 1 or any(not isinstance(v, int) or isinstance(v, bool) for v in values.values()):
            raise ValueError(f"{beside} says {values} of {ours}: one whole number is expected.")
        numbers |= {ours: value for value in values.values()}
    if cell is not None:
        if cell not in CELLS:
            raise ValueError(f"cell={cell!r} must be one of {', '.join(CELLS)}.")
        of_cell = {ours: getattr(CELLS[cell], ours) for ours in NUMBERS}
        if wrong := [f"{ours}={numbers[ours]}" for ours in numbers if numbers[ours] != of_cell[ours]]:
            raise ValueError(f"{beside} says {listed(wrong)}, and --cell {cell} something else: leave one of them out.")
        numbers = of_cell
    total = sum(tensor.numel() for tensor in state.values())
    if missing := [ours for ours in NUMBERS if ours not in numbers and ours != "num_attention_heads"]:
        sized = [name for name, known in CELLS.items() if known.total == total]
        hint = f"its {total:,} parameters are those of {sized[0]}" if sized else f"it holds {total:,} numbers"
        raise ValueError(
            f"Nothing beside {file} says {', '.join(missing)}: pass --cell (one of {', '.join(CELLS)}; {hint}), or write "
            f"them into {beside.name}. Mind that {SWAPPED}."
        )
    if cell is not None and total != CELLS[cell].total:
        sized = [name for name, known in CELLS.items() if known.total == total]
        those = f"which are those of {sized[0]} ({SWAPPED})" if sized else "which are those of no cell"
        raise ValueError(
            f"{file} holds {total:,} parameters, {those}, and {cell} has {CELLS[cell].total:,}: it is another model, or not "
            "whole."
        )
    widths = Counter(tensor.shape[0] for tensor in state.values() if tensor.dim() == 1)
    if not widths:
        raise ValueError(f"{file} holds no vectors, of which every norm is one: it is no checkpoint of this family.")
    width = CELLS[cell].hidden_size if cell else widths.most_common(1)[0][0]
    heads = numbers.setdefault("num_attention_heads", max(1, width // 64))  # heads of 64 in all of the paper's models
    if width % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide the width {width} of the norms in {file}.")
    return RecurrentGPTConfig(hidden_size=width, **numbers)


# ---- Matching ----


def match_grt(state: dict[str, torch.Tensor], config: RecurrentGPTConfig) -> Match:
    """Tensors of the source, by shape and by the order of their names, as those of the model of `config`."""
    width = config.hidden_size
    match = Match()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    blocks = _blocks(shapes, width)
    prefixes = {
        ".".join(parts[:length]) for name in shapes for parts in [name.split(".")] for length in range(1, len(parts))
    }
    whole = {prefix for found in blocks.values() for prefix in found}
    incomplete = {
        prefix: _difference(prefix, shapes, width)
        for prefix in _in_order([one for one in prefixes - whole if re.sub(r"\d+", "#", one) in blocks])
    }
    sections = _sections(blocks, config, match, incomplete)
    for key, places in sections.items():
        for prefix, place in zip(blocks[key], places, strict=True):
            names = [name for name in shapes if name.startswith(f"{prefix}.")]
            settled = None if place.startswith("model.SECTION") else match
            _match_block(prefix, place, {name: shapes[name] for name in names}, width, settled, match)
    inside = tuple(f"{prefix}." for prefixes in blocks.values() for prefix in prefixes)
    loose = {name: shape for name, shape in shapes.items() if not name.startswith(inside)} if inside else shapes
    _match_loose(loose, config, match)
    return match


def _blocks(shapes: dict[str, Shape], width: int) -> dict[str, list[str]]:
    """
    Prefixes of names below which there are the tensors of one block, in lists: the prefix with its numbers replaced by #
    -> the prefixes in the order of their numbers.
    """
    kinds = [_block_shapes(width, fused) for fused in (True, False)]
    below: dict[str, Counter] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            below.setdefault(".".join(parts[:length]), Counter())[shape] += 1
    found = [prefix for prefix, counted in below.items() if counted in kinds]
    found = [prefix for prefix in found if not any(other.startswith(f"{prefix}.") for other in found)]
    lists: dict[str, list[str]] = {}
    for prefix in _in_order(found):
        lists.setdefault(re.sub(r"\d+", "#", prefix), []).append(prefix)
    return dict(sorted(lists.items()))


def _block_shapes(width: int, fused: bool) -> Counter:
    attention = [(3 * width, width), (width, width)] if fused else [(width, width)] * 4
    return Counter([*attention, (4 * width, width), (width, 4 * width), (width,), (width,)])


def _sections(
    blocks: dict[str, list[str]], config: RecurrentGPTConfig, match: Match, incomplete: dict[str, str]
) -> dict[str, list[str]]:
    """List of blocks -> their places here. `SECTION` stands in them where it is not known which section it is."""
    counts = {name: getattr(config, f"num_{name}_layers") for name in SECTIONS}
    counts = {name: count for name, count in counts.items() if count}
    places = {name: [f"model.{name}.{index}" for index in range(count)] for name, count in counts.items()}
    held = {key: len(prefixes) for key, prefixes in blocks.items()}
    wanted = " + ".join(f"{count} of the {name}" for name, count in counts.items())
    if sum(held.values()) != sum(counts.values()):
        there = ", ".join(f"{count} in {key}" for key, count in held.items()) or "none"
        broken = (
            f" Not so: {listed(f'{prefix} ({wrong})' for prefix, wrong in incomplete.items())}." if incomplete else ""
        )
        raise ValueError(
            f"{sum(counts.values())} blocks ({wanted}) are expected, each of the shapes {_listed_shapes(config.hidden_size)} "
            f"below one name, and there are {sum(held.values())} ({there}): tensors are missing, too many, or have other "
            f"shapes.{broken}"
        )
    if len(blocks) == 1:  # one list, in the order of depth
        return {next(iter(blocks)): [place for section in places.values() for place in section]}
    named = {
        key: [name for name in counts if set(SECTIONS[name]) & set(re.split(r"[._]", key.lower()))] for key in blocks
    }
    fits = {key: [name for name in (named[key] or counts) if counts[name] == held[key]] for key in blocks}
    while True:  # what only one section fits, nothing else is
        sure = {key: names[0] for key, names in fits.items() if len(names) == 1}
        narrowed = {
            key: names if key in sure else [name for name in names if name not in sure.values()]
            for key, names in fits.items()
        }
        if narrowed == fits:
            break
        fits = narrowed
    if any(not names for names in fits.values()) or len(set(sure.values())) < len(sure):
        there = ", ".join(f"{count} in {key}" for key, count in held.items())
        raise ValueError(f"The lists of blocks ({there}) are not {wanted}: the configuration is another model's.")
    if unsure := [key for key in fits if key not in sure]:
        match.open.append((unsure, sorted({name for key in unsure for name in fits[key]})))
    return {
        key: places[sure[key]] if key in sure else [f"model.SECTION.{index}" for index in range(held[key])]
        for key in blocks
    }


def _in_order(names: list[str]) -> list[str]:
    """By the numbers in them: 2 before 10."""
    return sorted(names, key=lambda name: ([int(number) for number in re.findall(r"\d+", name)], name))


def _numbered(names: list[str]) -> bool:
    """Whether only numbers tell them apart."""
    return len({re.sub(r"\d+", "#", name) for name in names}) == 1


def _difference(prefix: str, shapes: dict[str, Shape], width: int) -> str:
    """What is too many, and of which shapes a tensor lacks, below a prefix that is not quite a block."""
    below = {name: shape for name, shape in shapes.items() if name.startswith(f"{prefix}.")}
    held = Counter(below.values())
    wanted = min(
        (_block_shapes(width, fused) for fused in (True, False)),
        key=lambda kind: (held - kind).total() + (kind - held).total(),
    )
    surplus, lacking = held - wanted, wanted - held
    names = [f"{name.removeprefix(prefix)[1:]} {_words(shape)}" for name, shape in below.items() if surplus[shape]]
    parts = [f"too many: {listed(names)}"] * bool(names)
    parts += [f"missing: {listed(_words(shape) for shape in lacking.elements())}"] * bool(lacking)
    return "; ".join(parts)


def _words(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _listed_shapes(width: int) -> str:
    return ", ".join(_words(shape) for shape in _block_shapes(width, True))


def _match_block(prefix: str, place: str, shapes: dict[str, Shape], width: int, settled: Match | None, match: Match):
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    here: dict[str, tuple[str, ...]] = {
        by_shape[4 * width, width][0]: ("mlp.up_proj.weight",),
        by_shape[width, 4 * width][0]: ("mlp.down_proj.weight",),
    }
    square = by_shape[width, width]
    if len(square) == 1:
        here[by_shape[3 * width, width][0]] = QKV
        here[square[0]] = ("self_attn.o_proj.weight",)
    else:
        for letter, target in zip("qkv", QKV):
            hint = rf"[._](c_|w)?{letter}(uery|ey|alue)?(_proj)?\.weight$"
            if len(names := [name for name in square if re.search(hint, name.lower())]) == 1:
                here[names[0]] = (target,)
        rest = [name for name in square if name not in here]
        if len(rest) == 1:
            here[rest[0]] = ("self_attn.o_proj.weight",)
        else:
            taken = {target for targets in here.values() for target in targets}
            left = [target for target in (*QKV, "self_attn.o_proj.weight") if target not in taken]
            match.open.append((rest, [f"{place}.{target}" for target in left]))
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = _in_order(by_shape[width,])
    if _numbered(names):  # ln_1 and ln_2
        here |= {name: (target,) for name, target in zip(names, norms)}
    else:
        match.open.append((names, [f"{place}.{target}" for target in norms]))
    for name, targets in here.items():
        whole = tuple(f"{place}.{target}" for target in targets)
        if settled is None:
            match.placeholders[name] = whole
        else:
            settled.settle(name, *whole)


def _match_loose(shapes: dict[str, Shape], config: RecurrentGPTConfig, match: Match) -> None:
    """What is no block: tables, injection and gate, the last norm."""
    width = config.hidden_size
    injection = "model.injection."
    places = {
        "model.embed_tokens.weight": ((config.vocab_size, width), r"(^|\.)wte\."),
        "model.embed_positions.weight": ((config.max_position_embeddings, width), r"(^|\.)wpe\."),
        "model.norm.weight": ((width,), r"(^|\.)ln_f\."),
        f"{injection}gate_logit.bias": ((width,), r"\.bias$"),
        f"{injection}state_norm.weight": ((width,), None),
        f"{injection}anchor_norm.weight": ((width,), None),
        f"{injection}gate_norm.weight": ((2 * width,), None),
        f"{injection}gate_hidden.weight": ((width, 2 * width), "gate"),
        f"{injection}proj.weight": ((width, 2 * width), None),
        f"{injection}gate_logit.weight": ((width, width), None),
    }
    for shape in dict.fromkeys(shape for shape, _ in places.values()):
        left = [place for place, (wanted, _) in places.items() if wanted == shape]
        names = [name for name, found in shapes.items() if found == shape]
        if len(left) != len(names):
            continue  # missing, or unexplained: `_check_match` says so
        for place in list(left):
            hint = places[place][1]
            hits = [name for name in names if hint and re.search(hint, name.lower())]
            if len(hits) == 1:
                match.settle(hits[0], place)
                left.remove(place)
                names.remove(hits[0])
        if len(left) == 1:
            match.settle(names[0], left[0])
        elif len(left) == 2 and left[0].endswith("state_norm.weight") and _numbered(names):
            for name, place in zip(_in_order(names), left):  # the gate reads [state, anchor]
                match.settle(name, place)
        elif left:
            match.open.append((names, left))


def _from_map(file: Path, state: dict[str, torch.Tensor]) -> Match:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from None
    whole = isinstance(said, dict) and all(
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(x, str) for x in value) and value)
        for value in said.values()
    )
    if not whole:
        raise ValueError(f"{file} should be an object of {{their name: our name, a list of our names, or null}}.")
    if strange := [name for name in said if name not in state]:
        raise ValueError(f"{file} maps {listed(strange)}, which the checkpoint does not hold.")
    match = Match()
    for name, targets in said.items():
        if targets is None:
            match.unused[name] = f"left out by {file.name}"
        else:
            match.settle(name, *([targets] if isinstance(targets, str) else targets))
    return match


def _check_match(
    file: Path,
    match: Match,
    state: dict[str, torch.Tensor],
    here: dict[str, Shape],
    map_file: str | Path | None,
    draft: str | Path | None,
) -> None:
    """That every tensor of both sides is explained, once."""
    targets = [target for places in match.found.values() for target in places]
    explained = {*match.found, *match.unused, *match.placeholders, *(name for names, _ in match.open for name in names)}
    expected = {*targets, *(place for _, places in match.open for place in places)}
    wrong_shape = []
    for name, places in match.found.items():
        if all(target in here for target in places):
            wanted = (sum(here[target][0] for target in places), *here[places[0]][1:])
            if tuple(state[name].shape) != wanted:
                wrong_shape.append(f"{name} {tuple(state[name].shape)} instead of {wanted} for {', '.join(places)}")
    sections = any(place in SECTIONS for _, places in match.open for place in places)
    wrong = {
        "missing": [] if sections else [target for target in here if target not in expected],
        "unexplained": [name for name in state if name not in explained],
        "unknown here": [target for target in targets if target not in here],
        "twice": [target for target, times in Counter(targets).items() if times > 1],
        "wrong shape": wrong_shape,
    }
    place = f"{file}, matched by {Path(map_file).name}," if map_file is not None else f"{file}"
    if any(wrong.values()):
        lists = "; ".join(f"{kind}: {listed(names)}" for kind, names in wrong.items() if names)
        raise ValueError(f"{place} does not fit the model: {lists}.")
    if match.open:
        choices = "; ".join(f"{' or '.join(names)} may be {' or '.join(places)}" for names, places in match.open[:4])
        more = f" (and {len(match.open) - 4} choices more)" if len(match.open) > 4 else ""
        where = "--draft FILE.json writes it as far as it is known"
        if draft is not None:
            drafted = Path(draft).expanduser()
            if drafted.exists():
                raise ValueError(f"The draft {drafted} exists already: name another file.")
            drafted.write_text(json.dumps(match.draft(), indent=2) + "\n", encoding="utf-8")
            where = f"{drafted} has it as far as it is known"
        raise ValueError(
            f"{file} is ambiguous: {choices}{more}. Pass --map FILE.json of {{their name: our name}}; {where}."
        )


def _check_total(file: Path, match: Match, state: dict[str, torch.Tensor], config: RecurrentGPTConfig) -> str:
    """Section 3: V d + S d + d + u (12 d^2 + 2 d) + 5 d^2 + 5 d. In words."""
    d, u = config.hidden_size, config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
    expected = (
        (config.vocab_size + config.max_position_embeddings + 1) * d + u * (12 * d * d + 2 * d) + 5 * d * d + 5 * d
    )
    held = sum(state[name].numel() for name in match.found)
    if held != expected:
        raise ValueError(f"{file} holds {held:,} parameters in what was matched, and section 3 asks for {expected:,}.")
    known = [name for name, cell in CELLS.items() if cell.total == held]
    return f"{held:,} parameters, as section 3 of the specification has them" + (f" for {known[0]}" if known else "")
