"""
Checkpoints of RecurrentGPT's paper, written here by an independent implementation of it under names that are guesses:
nobody had an official file. What is shown is that the conversion computes the same, or refuses.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import RecurrentGPTForCausalLM
from modeling_looped.accounting import parameter_counts
from modeling_looped.conversion.grt import CELLS, convert_grt


# ---- The paper's model in plain torch, without noise (sections 2.1 to 2.3 of its specification) ----


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, 1e-5)


class Block(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = Norm(d), Norm(d)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d, bias=False), "c_proj": nn.Linear(d, d, bias=False)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d, bias=False), "c_proj": nn.Linear(4 * d, d, bias=False)})

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        x = x + self.attn["c_proj"]((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


SMALL = {"vocab_size": 97, "block_size": 32, "n_embd": 64, "n_head": 4, "n_pre": 1, "n_rec": 2, "n_coda": 1, "R": 3}


class PaperModel(nn.Module):
    def __init__(self, **fields):
        super().__init__()
        c = self.c = {**SMALL, **fields}
        d, blocks = c["n_embd"], c["n_pre"] + c["n_rec"] + c["n_coda"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c["vocab_size"], d),
                "wpe": nn.Embedding(c["block_size"], d),
                "h": nn.ModuleList(Block(d, c["n_head"]) for _ in range(blocks)),
                "ln_f": Norm(d),
            }
        )
        self.w_proj = nn.Linear(2 * d, d, bias=False)
        self.gate = nn.ModuleDict(
            {
                "ln_h": Norm(d),
                "ln_anchor": Norm(d),
                "ln_cat": Norm(2 * d),
                "fc": nn.Linear(2 * d, d, bias=False),
                "out": nn.Linear(d, d),
            }
        )

    def forward(self, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        t, c, g = self.transformer, self.c, self.gate
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[1]))
        pre, core = c["n_pre"], c["n_pre"] + c["n_rec"]
        for block in t["h"][:pre]:
            x = block(x)
        state = x
        for _ in range(steps):
            o = self.w_proj(torch.cat([state, x], -1))
            for block in t["h"][pre:core]:
                o = block(o)
            both = g["ln_cat"](torch.cat([g["ln_h"](state), g["ln_anchor"](x)], -1))
            gate = torch.sigmoid(g["out"](nn.functional.silu(g["fc"](both))))
            state = gate * state + (1 - gate) * o
        for block in t["h"][core:]:
            state = block(state)
        return t["ln_f"](state) @ t["wte"].weight.T


def paper_model(seed: int = 0, **fields) -> PaperModel:
    """Random weights that all matter, gate and norms included."""
    torch.manual_seed(seed)
    model = PaperModel(**fields).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            std = 0.3 if "wte" in name or "wpe" in name else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape) * std if p.dim() > 1 else 1 + 0.3 * torch.randn(p.shape))
    return model


def state_of(model: PaperModel) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def save(folder: Path, state=None, said=None, kind: str = "safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    state = state_of(paper_model()) if state is None else state
    if kind == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    else:
        torch.save(state, folder / "ckpt.pt")
    if said is not False:
        (folder / "config.json").write_text(json.dumps(said or SMALL))
    return folder


def complete_map(tmp_path: Path, source: Path) -> Path:
    """The draft, with the choice of the two norms before the gate made."""
    draft = tmp_path / "map.json"
    with pytest.raises(ValueError, match="is ambiguous"):
        convert_grt(source, tmp_path / "out", draft=draft)
    known = json.loads(draft.read_text())
    chosen = {"gate.ln_h.weight": "state_norm", "gate.ln_anchor.weight": "anchor_norm"}
    assert {name for name, place in known.items() if str(place).startswith("one of: ")} == set(chosen)
    known |= {name: f"model.injection.{place}.weight" for name, place in chosen.items()}
    draft.write_text(json.dumps(known))
    return draft


def tokens() -> torch.Tensor:
    return torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ---- Equality ----


@torch.no_grad()
def test_mapped_checkpoint_has_the_papers_logits_at_every_exit(tmp_path):
    paper = paper_model()
    source = save(tmp_path / "source", state_of(paper))
    ledger = convert_grt(source, tmp_path / "out", map_file=complete_map(tmp_path, source))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(model.config.plan()) == "Loop(1-2x3-1)" and model.config.max_position_embeddings == 32
    logits = {r: model(tokens(), num_recurrences=r).logits for r in (0, 1, 3, 5)}
    for r, found in logits.items():
        torch.testing.assert_close(found, paper(tokens(), r), atol=2e-5, rtol=0)
    assert (logits[0] - logits[1]).abs().max() > 0.1 and (logits[1] - logits[3]).abs().max() > 0.1
    assert ledger.parameters == parameter_counts(model.config) and ledger.parameters["total"] == 226_240


def test_ledger_explains_every_tensor_and_says_what_was_not_shown(tmp_path):
    state = state_of(paper_model())
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    for index in range(4):
        state[f"transformer.h.{index}.attn.bias"] = torch.ones(32, 32).tril()[None, None]
    source = save(tmp_path / "source", state)
    ledger = convert_grt(source, tmp_path / "out", map_file=complete_map(tmp_path, source))
    assert {use.source for use in ledger.used} | set(ledger.unused) == set(state)
    assert "tied" in ledger.unused["lm_head.weight"] and "mask" in ledger.unused["transformer.h.0.attn.bias"]
    fused = [use for use in ledger.used if use.source == "transformer.h.2.attn.c_attn.weight"]
    assert [use.notes for use in fused] == [("rows 0 to 63",), ("rows 64 to 127",), ("rows 128 to 191",)]
    assert fused[1].targets == ("model.core.1.self_attn.k_proj.weight",)
    model = RecurrentGPTForCausalLM.from_pretrained(tmp_path / "out")
    assert {use.targets[0] for use in ledger.used} == set(dict(model.named_parameters()))
    text = str(ledger)
    assert "synthetic checkpoint only" in text and "CC-BY-4.0" in text and "226,240 parameters, as section 3" in text
    assert "the code of the source is not here" in text
    assert "license: cc-by-4.0" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "modeling_recurrent_gpt.py").is_file()


@torch.no_grad()
def test_names_with_numbers_and_sections_need_no_map(tmp_path):
    paper = paper_model(n_pre=2, n_rec=3, n_coda=2)
    sections = {**dict.fromkeys((0, 1), "prelude"), **dict.fromkeys((2, 3, 4), "core"), 5: "coda", 6: "coda"}
    state = {}
    for name, tensor in state_of(paper).items():
        parts = name.split(".")
        if parts[1] == "h":
            section = sections[int(parts[2])]
            first = min(index for index, other in sections.items() if other == section)
            name = f"blocks.{section}.{int(parts[2]) - first}.{'.'.join(parts[3:])}"
            if "c_attn" in name:
                whole = name.replace("c_attn", "{}")
                state |= {whole.format(f"{n}_proj"): rows.clone() for n, rows in zip("qkv", tensor.chunk(3))}
                continue
        name = name.replace("gate.ln_h", "gate.norms.0").replace("gate.ln_anchor", "gate.norms.1")
        state[f"_orig_mod.{name}"] = tensor
    numbers = {"n_pre": 2, "n_rec": 3, "n_coda": 2, "n_head": 4, "vocab_size": 97, "block_size": 32, "R": 3}
    source = save(tmp_path / "source", {"model": state, "model_args": numbers, "iter_num": 7}, False, "pt")
    ledger = convert_grt(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(model.config.plan()) == "Loop(2-3x3-2)" and "matched by shape" in str(ledger)
    torch.testing.assert_close(model(tokens()).logits, paper(tokens(), 3), atol=2e-5, rtol=0)


def test_dtype_of_the_file_is_kept_and_a_wider_tensor_widens_all(tmp_path):
    state = {name: tensor.bfloat16() for name, tensor in state_of(paper_model()).items()}
    source = save(tmp_path / "source", state)
    path = complete_map(tmp_path, source)
    convert_grt(source, tmp_path / "half", map_file=path)
    assert RecurrentGPTForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    state["transformer.ln_f.weight"] = state["transformer.ln_f.weight"].float()
    ledger = convert_grt(save(source, state), tmp_path / "whole", map_file=path)
    assert sum("from bfloat16" in use.notes for use in ledger.used) == len(ledger.used) - 1


# ---- The released sizes: shapes alone, in files that hold one number a tensor ----


def official(folder: Path, cell: str, said: bool = False) -> Path:
    """A file with the shapes of the released checkpoint, as views of one number."""
    known = CELLS[cell]
    numbers = {"n_pre": known.num_prelude_layers, "n_rec": known.num_core_layers, "n_coda": known.num_coda_layers}
    with torch.device("meta"):
        paper = PaperModel(
            **numbers, n_embd=known.hidden_size, n_head=known.num_attention_heads, vocab_size=50304, block_size=1024
        )
    state = {
        name.replace("gate.ln_h", "gate.norms.0").replace("gate.ln_anchor", "gate.norms.1"): torch.zeros(1).expand(
            p.shape
        )
        for name, p in paper.state_dict().items()
    }
    return save(folder, state, False, "pt")


@pytest.mark.parametrize("cell", CELLS)
def test_totals_of_the_released_checkpoints_are_those_of_section_3(tmp_path, cell):
    ledger = convert_grt(official(tmp_path / "source", cell), tmp_path / "out", cell=cell, dry_run=True)
    total = {"medium-isoflops": 171073536, "medium-isoparams": 359847936}
    total |= {"large-isoflops": 290196480, "large-isoparams": 781780480}
    assert ledger.parameters["total"] == total[cell] and f"{total[cell]:,} parameters" in str(ledger)
    assert not (tmp_path / "out").exists() and "Nothing was written" in str(ledger)


def test_the_swapped_names_on_the_hub_are_told(tmp_path):
    source = official(tmp_path / "source", "medium-isoflops")
    with pytest.raises(
        ValueError, match="those of medium-isoflops .*are swapped.*, and medium-isoparams has 359,847,936"
    ):
        convert_grt(source, tmp_path / "out", cell="medium-isoparams")
    with pytest.raises(ValueError, match="pass --cell .*171,073,536 parameters are those of medium-isoflops"):
        convert_grt(source, tmp_path / "out")


# ---- Refusals ----


def drop(*parts):
    return lambda state: {k: v for k, v in state.items() if not any(p in k for p in parts)}


def add(name, *shape):
    return lambda state: {**state, name: torch.ones(*shape)}


def put(name, *shape):
    return lambda state: {**state, name: torch.ones(*shape)} if name in state else 1 / 0


def rename(old, new):
    return lambda state: {k.replace(old, new): v for k, v in state.items()}


def halves(state):
    """Two lists of blocks whose names say nothing, and of equal length."""
    move = {"transformer.h.0": "a.0", "transformer.h.1": "b.0", "transformer.h.2": "b.1", "transformer.h.3": "c.0"}
    return {next((k.replace(o, n) for o, n in move.items() if k.startswith(o)), k): v for k, v in state.items()}


REFUSALS = {
    "norms of the gate": (
        lambda state: state,
        r"gate.ln_anchor.weight or gate.ln_h.weight may be .*state_norm.weight or .*anchor_norm",
    ),
    "norms of a block": (
        lambda state: {k.replace("ln_1", "a").replace("ln_2", "b"): v for k, v in state.items()},
        r"h\.0\.a\.weight or .*h\.0\.b\.weight may be .*input_layernorm.weight or .*post_attention_layernorm",
    ),
    "projection and gate": (rename("gate.fc", "x.fc"), r"w_proj.weight or x.fc.weight may be .*gate_hidden.*proj"),
    "prelude and coda": (halves, "a.# or c.# may be coda or prelude"),
    "missing tensor": (drop("h.2.mlp.c_fc"), r"4 blocks .* there are 3 .*transformer.h.2 \(missing: 256 x 64\)"),
    "missing block": (drop("h.3."), r"4 blocks \(1 of the prelude \+ 2 of the core \+ 1 of the coda\).* there are 3"),
    "a block more": (
        lambda s: {**s, **{k.replace("h.3", "h.4"): v.clone() for k, v in s.items()}},
        r"4 blocks .* there are 5",
    ),
    "missing norm": (drop("ln_cat"), r"missing: model.injection.gate_norm.weight"),
    "bias of a block": (
        add("transformer.h.0.attn.c_proj.bias", 64),
        r"there are 3 .*transformer.h.0 \(too many: .*attn.c_proj.bias 64,",
    ),
    "another bias": (add("w_proj.bias", 64), "unexplained: gate.ln_anchor.weight, .* w_proj.bias"),
    "unknown tensor": (add("router.weight", 3, 64), "unexplained: router.weight"),
    "untied head": (add("lm_head.weight", 97, 64), "unexplained: lm_head.weight, transformer.wte.weight"),
    "no mask": (
        add("transformer.h.0.attn.bias", 1, 1, 32, 32),
        r"there are 3 .*transformer.h.0 \(too many: attn.bias 1 x 1 x 32 x 32\)",
    ),
    "wrong shape": (put("gate.out.weight", 64, 65), "missing: .*gate_logit.weight; unexplained: gate.out.weight"),
    "transposed": (
        put("transformer.h.1.mlp.c_fc.weight", 64, 256),
        r"h.1 \(too many: mlp.c_fc.weight 64 x 256, .*missing: 256 x 64\)",
    ),
    "other vocabulary": (put("transformer.wte.weight", 98, 64), "unexplained: transformer.wte.weight"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_sentence_and_nothing_is_written(tmp_path, name):
    edit, message = REFUSALS[name]
    source = save(tmp_path / "source", edit(state_of(paper_model())))
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        convert_grt(source, tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("w_proj.weight"), "missing: model.injection.proj.weight; unexplained: w_proj.weight"),
        (lambda m: m.update({"w_proj.weight": "model.injection.nothing"}), "unknown here: model.injection.nothing"),
        (
            lambda m: m.update({"w_proj.weight": "model.injection.gate_hidden.weight"}),
            "twice: model.injection.gate_hidden.weight",
        ),
        (
            lambda m: m.update({"transformer.wte.weight": "model.norm.weight"}),
            r"wrong shape: transformer.wte.weight \(97, 64\) instead of \(64,\) for model.norm.weight",
        ),
        (
            lambda m: m.update({"transformer.h.0.attn.c_attn.weight": "model.prelude.0.self_attn.q_proj.weight"}),
            r"missing: model.prelude.0.self_attn.k_proj.weight.*wrong shape: .* \(192, 64\) instead of \(64, 64\)",
        ),
        (lambda m: m.update({"w_proj.weight": None}), "missing: model.injection.proj.weight"),
        (lambda m: m.update({"strange.weight": "model.norm.weight"}), "maps strange.weight, which the checkpoint"),
        (lambda m: m.update({"w_proj.weight": 3}), "should be an object of"),
    ],
)
def test_a_map_has_to_be_complete_and_to_fit(tmp_path, edit, message):
    source = save(tmp_path / "source")
    path = complete_map(tmp_path, source)
    mapped = json.loads(path.read_text())
    edit(mapped)
    path.write_text(json.dumps(mapped))
    with pytest.raises(ValueError, match=message):
        convert_grt(source, tmp_path / "out", map_file=path)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_are_refused(tmp_path):
    source = save(tmp_path / "source")
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    for content, message in ((whole[: len(whole) // 2], "damaged or truncated"), (b"", "damaged or truncated")):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            convert_grt(source, tmp_path / "out")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        convert_grt(source, tmp_path / "out")
    (source / "a.pt").write_text("no pickle")
    with pytest.raises(ValueError, match="it is damaged"):
        convert_grt(source, tmp_path / "out")
    (source / "b.pt").write_text("")
    with pytest.raises(ValueError, match="holds a.pt, b.pt: name one"):
        convert_grt(source, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        convert_grt(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_missing_or_contradict_each_other_are_refused(tmp_path):
    source = save(tmp_path / "source", said={**SMALL, "R": None})
    with pytest.raises(ValueError, match="says num_recurrences: pass --cell .* it holds 226,240 numbers"):
        convert_grt(source, tmp_path / "out")
    save(source, said={**SMALL, "num_recurrences": 4})
    with pytest.raises(ValueError, match=r"\{'num_recurrences': 4, 'R': 3\} of num_recurrences"):
        convert_grt(source, tmp_path / "out")
    save(source)
    with pytest.raises(ValueError, match="num_prelude_layers=1.* and --cell medium-isoflops something else"):
        convert_grt(source, tmp_path / "out", cell="medium-isoflops")
    with pytest.raises(ValueError, match="cell='medium' must be one of medium-isoflops"):
        convert_grt(source, tmp_path / "out", cell="medium")


def test_a_draft_replaces_nothing(tmp_path):
    source = save(tmp_path / "source")
    (tmp_path / "map.json").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        convert_grt(source, tmp_path / "out", draft=tmp_path / "map.json")
    assert (tmp_path / "map.json").read_text() == "mine"


def test_command_refuses_drafts_and_converts(tmp_path):
    source, path = str(save(tmp_path / "source")), str(tmp_path / "drafted.json")
    result = CliRunner().invoke(app, ["convert", "grt", source, str(tmp_path / "out"), "--draft", path])
    assert result.exit_code == 2 and "has it as far as it is known" in " ".join(result.output.split())
    mapped = complete_map(tmp_path, tmp_path / "source")
    result = CliRunner().invoke(app, ["convert", "grt", source, str(tmp_path / "out"), "--map", str(mapped), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["parameters"]["total"] == 226_240 and told["comparisons"][0]["max_difference"] == 0
