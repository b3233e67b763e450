"""Checkpoints of the paper's code, written here by an independent implementation of it, and what becomes of them."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import LoopedGPTForCausalLM
from modeling_looped.accounting import parameter_counts
from modeling_looped.conversion import ConversionError, Ledger, Use, convert_iso_depth


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are several times slower on two threads when the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- The paper's model in plain torch, from appendix C (GPT-style parameter names as in its checkpoints) ----


def rms(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return rms(x) * self.weight


class Block(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        d, self.heads, self.groups = c["n_embd"], c["n_head"], c["n_kv_head"]
        kv = d // self.heads * self.groups
        linear = partial(nn.Linear, bias=False)
        self.attn = nn.ModuleDict(
            {"c_q": linear(d, d), "c_k": linear(d, kv), "c_v": linear(d, kv), "c_proj": linear(d, d)}
        )
        self.mlp = nn.ModuleDict({"c_fc": linear(d, 4 * d), "c_proj": linear(4 * d, d)})
        self.n1, self.n3 = Scale(d), Scale(d)

    def attend(self, x, cos, sin):
        def split(y, heads):
            return y.unflatten(-1, (heads, -1))

        def rotate(y):
            left, right = y.chunk(2, dim=-1)
            return torch.cat([left * cos + right * sin, right * cos - left * sin], dim=-1)

        a, length = self.attn, x.shape[1]
        q = rms(rotate(split(a["c_q"](x), self.heads)))
        k = rms(rotate(split(a["c_k"](x), self.groups))).repeat_interleave(self.heads // self.groups, 2)
        v = split(a["c_v"](x), self.groups).repeat_interleave(self.heads // self.groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return a["c_proj"](torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.n1(x), cos, sin)
        return x + self.mlp["c_proj"](self.mlp["c_fc"](self.n3(x)).relu().square())


class PaperModel(nn.Module):
    """Appendix C and G.1 of arXiv 2604.21106 for `model_config` c."""

    def __init__(self, c: dict, table_dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.c, d, rows = c, c["n_embd"], -(-c["vocab_size"] // 64) * 64
        blocks = {"prelude": c["n_prelude"], "recur": c["n_recur_block"], "coda": c["n_coda"]}
        sections = {name: nn.ModuleList(Block(c) for _ in range(count)) for name, count in blocks.items()}
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(rows, d), **sections})
        if c["input_injection"] == "inject_init_prelude":
            self.inject = nn.Linear(2 * d, d, bias=False)
        if c["input_injection"] == "hyperconnect":
            r, lanes = c["num_recur"], c["num_lanes"]
            self.lane_alpha = nn.Parameter(torch.empty(r, lanes))
            self.lane_mixing = nn.Parameter(torch.empty(r, lanes, lanes))
            self.lane_beta = nn.Parameter(torch.empty(r, lanes))
        self.norm_emb, self.norm_recur, self.norm_final = Scale(d), Scale(d), Scale(d)
        self.lm_head = nn.Linear(d, rows, bias=False)

        size = d // c["n_head"]
        frequencies = 1 / 10000.0 ** (torch.arange(0, size, 2) / size)
        angles = torch.arange(10 * c["sequence_len"])[:, None, None] * frequencies
        self.register_buffer("cos", angles.cos().to(table_dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(table_dtype), persistent=False)

    def forward(self, tokens: torch.Tensor, num_recur: int | None = None) -> torch.Tensor:
        """(batch, length) tokens to (batch, length, vocab_size) softcapped logits."""
        c, t = self.c, self.transformer
        mode, r = c["input_injection"], num_recur or c["num_recur"]
        tables = self.cos[: tokens.shape[1]].float(), self.sin[: tokens.shape[1]].float()

        def run(blocks, x):
            for block in blocks:
                x = block(x, *tables)
            return x

        e = run(t["prelude"], self.norm_emb(t["wte"](tokens)))
        state = torch.zeros_like(e) if mode == "additive" else e
        lanes = [e] * c["num_lanes"]
        for i in range(r):
            if mode == "inject_init_prelude":
                u = self.inject(torch.cat([e, state], -1))
            elif mode == "hyperconnect":
                u = sum(a * lane for a, lane in zip(self.lane_alpha[i], lanes))
            else:
                u = state + e if mode == "additive" else state
            state = self.norm_recur(run(t["recur"], u))
            if mode == "hyperconnect":
                mixed = [sum(m * lane for m, lane in zip(row, lanes)) for row in self.lane_mixing[i]]
                lanes = [lane + b * state for lane, b in zip(mixed, self.lane_beta[i])]
            if i < r - (c["bptt_k"] or r):
                state = state.detach()
        x = self.norm_final(run(t["coda"], sum(lanes) if mode == "hyperconnect" else state))
        cap = c["logit_softcap"]
        return cap * torch.tanh(self.lm_head(x)[..., : c["vocab_size"]].float() / cap)


def uses(ledger: Ledger) -> dict[str, Use]:
    """By the name in the source, where each tensor went to one place."""
    assert all(len(use.targets) == 1 for use in ledger.used)
    return {use.source: use for use in ledger.used}


def model_config(**fields) -> dict:
    """Loop(1-2x3-1) of width 64 with grouped-query attention, 97 tokens in 128 rows."""
    config = {"sequence_len": 32, "vocab_size": 97, "size": 1, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
    config |= {"n_prelude": 1, "n_recur_block": 2, "n_coda": 1, "num_recur": 3, "bptt_k": 3}
    config |= {"input_injection": "inject_init_prelude", "num_lanes": 2, "logit_softcap": 15.0}
    return {**config, **fields}


def paper_model(seed: int = 0, **fields) -> PaperModel:
    """Random weights of the size that training starts from, but an injection, norms and a head that all matter."""
    torch.manual_seed(seed)
    model = PaperModel(model_config(**fields)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            std = 1.0 if "wte" in name or "lane" in name else p.shape[-1] ** -0.5
            p.copy_(torch.randn(p.shape) * std if p.dim() > 1 else 1 + 0.2 * torch.randn(p.shape))
    return model


def save(folder: Path, model: PaperModel | None = None, step: int = 10, state=None, **meta) -> Path:
    """The folder that the paper's code would leave."""
    model = model or paper_model()
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict() if state is None else state, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": model.c, **meta}))
    return folder


def converted(tmp_path: Path, model: PaperModel) -> tuple[LoopedGPTForCausalLM, Ledger]:
    ledger = convert_iso_depth(save(tmp_path / "source", model), tmp_path / "out")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ledger


def tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(1))


MODELS = {
    "linear": {},
    "additive": {"input_injection": "additive"},
    "passthrough": {"input_injection": "passthrough"},
    "hyperconnect": {"input_injection": "hyperconnect"},
    "three lanes": {"input_injection": "hyperconnect", "num_lanes": 3, "num_recur": 4, "bptt_k": None},
    "dense": {"input_injection": "passthrough", "n_prelude": 0, "n_recur_block": 4, "n_coda": 0, "num_recur": 1},
    "one linear pass": {"num_recur": 1, "bptt_k": 1},
    "truncated": {"num_recur": 5, "bptt_k": 2},
    "no padding": {"vocab_size": 128, "n_kv_head": 4, "logit_softcap": 3.0},
}


# ---- Equality with the original ----


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_converted_logits_equal_the_papers_model(tmp_path, name):
    paper = paper_model(**MODELS[name])
    model, ledger = converted(tmp_path, paper)
    assert ledger.new == () and model.dtype == torch.float32
    torch.testing.assert_close(model(tokens()).logits, paper(tokens()), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "additive", "passthrough", "hyperconnect"])
def test_converted_logits_equal_the_papers_model_at_every_recurrence_count(tmp_path, name):
    paper = paper_model(**MODELS[name])
    model, _ = converted(tmp_path, paper)
    allowed = (1, 2, 3) if name == "hyperconnect" else (1, 2, 5)
    logits = {r: model(tokens(), num_recurrences=r).logits for r in allowed}
    for r in allowed:
        torch.testing.assert_close(logits[r], paper(tokens(), num_recur=r), atol=1e-5, rtol=0)
    assert (logits[1] - logits[2]).abs().max() > 0.1  # the override does something


@pytest.mark.parametrize("name", ["linear", "hyperconnect", "truncated", "truncated passthrough", "truncated additive"])
def test_converted_gradients_equal_the_papers_model(tmp_path, name):
    truncated = {"num_recur": 4, "bptt_k": 2, "input_injection": name.removeprefix("truncated ")}
    paper = paper_model(**MODELS.get(name, truncated))
    model, ledger = converted(tmp_path, paper)
    loss = model(tokens(), labels=tokens()).loss
    original = nn.functional.cross_entropy(paper(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    torch.testing.assert_close(loss, original, atol=1e-5, rtol=0)
    loss.backward()
    original.backward()
    theirs, ours = dict(paper.named_parameters()), dict(model.named_parameters())
    assert set(uses(ledger)) == set(theirs)
    for key, use in uses(ledger).items():
        (target,), shape = use.targets, use.shape
        if theirs[key].grad is None:  # truncation without an injection cuts off the prelude
            assert name == "truncated passthrough" and ours[target].grad is None
            continue
        torch.testing.assert_close(ours[target].grad, theirs[key].grad[: shape[0]], atol=1e-5, rtol=1e-4, msg=key)
        assert not theirs[key].grad[shape[0] :].any()  # padding never learned anything


@torch.no_grad()
def test_bf16_rotary_tables_are_what_the_equality_rests_on(tmp_path):
    paper = paper_model()
    model, _ = converted(tmp_path, paper)
    assert model.config.rotary_dtype == "bfloat16"
    model.config.rotary_dtype = model.model.config.rotary_dtype = "float32"
    assert (model(tokens()).logits - paper(tokens())).abs().max() > 1e-4
    exact = PaperModel(paper.c, table_dtype=torch.float32)
    exact.load_state_dict(paper.state_dict())
    torch.testing.assert_close(model(tokens()).logits, exact(tokens()), atol=1e-5, rtol=0)


def test_configuration_says_what_the_meta_file_said(tmp_path):
    source = save(tmp_path / "source", paper_model(**MODELS["truncated"]), bos_token_id=1)
    convert_iso_depth(source, tmp_path / "out")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert str(config.plan()) == "Loop(1-2x5-1)" and config.injection == "linear"
    assert (config.backprop_recurrences, config.trained_recurrences, config.logit_softcap) == (2, 5, 15.0)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (4, 2, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (97, 32)
    assert (config.bos_token_id, config.eos_token_id) == (1, None)


@pytest.mark.parametrize("bptt_k, kept", [(None, None), (3, None), (4, None), (2, 2)])
def test_backpropagation_through_every_recurrence_becomes_none(tmp_path, bptt_k, kept):
    model, _ = converted(tmp_path, paper_model(bptt_k=bptt_k))
    assert model.config.backprop_recurrences == kept


# ---- What a source may look like ----


def test_keys_of_a_compiled_model_are_accepted(tmp_path):
    paper = paper_model()
    compiled = {f"_orig_mod.{key}": tensor for key, tensor in paper.state_dict().items()}
    ledger = convert_iso_depth(save(tmp_path / "source", paper, state=compiled), tmp_path / "out")
    assert uses(ledger)["_orig_mod.lm_head.weight"].targets == ("lm_head.weight",)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.injection.proj.weight, paper.inject.weight)


def test_embedding_saved_in_bf16_is_widened_to_the_master_dtype(tmp_path):
    # The official code keeps the embedding alone in bf16 on CUDA.
    paper = paper_model()
    paper.transformer["wte"].bfloat16()
    model, ledger = converted(tmp_path, paper)
    widened = [use.source for use in ledger.used if "from bfloat16" in use.notes]
    assert widened == ["transformer.wte.weight"] and "from bfloat16" in str(ledger)
    embedding = model.get_input_embeddings().weight
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, paper.transformer["wte"].weight[:97].float())


def test_dtype_of_the_file_is_kept(tmp_path):
    model, ledger = converted(tmp_path, paper_model().bfloat16())
    assert model.model.norm.weight.dtype == torch.bfloat16 and "from bfloat16" not in str(ledger)


def test_checkpoint_written_without_zip_is_read(tmp_path):
    source = save(tmp_path / "source")
    torch.save(paper_model().state_dict(), source / "model_000010.pt", _use_new_zipfile_serialization=False)
    ledger = convert_iso_depth(source, tmp_path / "out")
    assert uses(ledger)["lm_head.weight"].notes == ("31 rows of padding dropped",)


def test_newest_of_several_steps_is_converted_and_named(tmp_path):
    for step in (9, 1000000, 20):
        save(tmp_path / "source", paper_model(seed=step), step)
    ledger = convert_iso_depth(tmp_path / "source", tmp_path / "out")
    assert "step 1000000, the newest of 000009, 000020, 1000000" in str(ledger)
    older = convert_iso_depth(tmp_path / "source" / "model_000020.pt", tmp_path / "older")
    assert "the newest of" not in str(older) and older.source.name == "model_000020.pt"
    for folder, seed in (("out", 1000000), ("older", 20)):
        head = AutoModelForCausalLM.from_pretrained(tmp_path / folder).lm_head.weight
        assert torch.equal(head, paper_model(seed=seed).lm_head.weight[:97])


def test_alias_of_a_step_is_converted_by_its_own_name(tmp_path):
    source = save(tmp_path / "source")
    for kind, end in (("model", "pt"), ("meta", "json")):
        (source / f"{kind}_pre_warmdown.{end}").symlink_to(f"{kind}_000010.{end}")
    alias = convert_iso_depth(source / "model_pre_warmdown.pt", tmp_path / "alias")
    assert alias.source.name == "model_pre_warmdown.pt"
    assert convert_iso_depth(source, tmp_path / "out").source.name == "model_000010.pt"


# ---- The ledger ----


def test_ledger_accounts_for_every_tensor_and_every_parameter(tmp_path):
    paper = paper_model(**MODELS["hyperconnect"])
    (save(tmp_path / "source", paper) / "optim_000010_rank0.pt").write_bytes(b"")
    ledger = convert_iso_depth(tmp_path / "source", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    here = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {use.targets[0]: use.shape for use in ledger.used} == here
    dropped = [use.source for use in ledger.used if use.notes == ("31 rows of padding dropped",)]
    assert dropped == ["transformer.wte.weight", "lm_head.weight"]
    assert set(ledger.unused) == {"model_config.size", "optim_000010_rank0.pt"}
    assert ledger.parameters == parameter_counts(model.config)
    assert ledger.parameters["total"] + 2 * 31 * 64 == sum(p.numel() for p in paper.parameters())
    text = str(ledger)
    assert all(f"{use.source} " in text and f" {use.targets[0]} " in text for use in ledger.used)
    assert "97 x 64" in text and f"{ledger.parameters['total']:,}" in text and "Loop(1-2x3-1)" in text


def test_parameters_of_an_official_size_are_the_papers_integer(tmp_path):
    fields = {"vocab_size": 32001, "n_embd": 384, "size": 6, "n_head": 3, "n_kv_head": 3, "n_prelude": 2, "n_coda": 2}
    with torch.device("meta"):
        paper = PaperModel(model_config(**fields, n_recur_block=4, num_recur=4, bptt_k=4))
    zeros = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in paper.named_parameters()}
    source = save(tmp_path / "source", paper, state=zeros)
    ledger = convert_iso_depth(source, tmp_path / "out")
    assert ledger.parameters["unique"] == 14457984
    assert ledger.parameters["total"] + 2 * 63 * 384 == 39083136


# ---- Refusals ----


def without(*parts):
    def edit(source: Path):
        state = torch.load(source / "model_000010.pt")
        torch.save({k: v for k, v in state.items() if not any(p in k for p in parts)}, source / "model_000010.pt")

    return edit


def with_tensors(**tensors):
    def edit(source: Path):
        state = torch.load(source / "model_000010.pt")
        torch.save({**state, **{k.replace("__", "."): v for k, v in tensors.items()}}, source / "model_000010.pt")

    return edit


def with_config(remove: str = "", **fields):
    def edit(source: Path):
        meta = json.loads((source / "meta_000010.json").read_text())
        meta["model_config"].update(fields)
        meta["model_config"].pop(remove, None)
        (source / "meta_000010.json").write_text(json.dumps(meta))

    return edit


def with_file(name: str, content):
    def edit(source: Path):
        if isinstance(content, str):
            (source / name).write_text(content)
        else:
            torch.save(content, source / name)

    return edit


class Hostile:
    """A pickle that runs a command when it is loaded without weights_only."""

    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_FOLDER"],)


REFUSALS = {
    # The tensors
    "unknown tensor": (with_tensors(value_embeds__weight=torch.ones(2)), "unexplained: value_embeds.weight"),
    "bias": (with_tensors(lm_head__bias=torch.ones(128)), "unexplained: lm_head.bias"),
    "missing tensor": (without("recur.1.mlp.c_fc"), "missing: transformer.recur.1.mlp.c_fc.weight"),
    "missing layer": (without("coda.0"), r"n_coda=1.*missing: .*coda\.0\.attn\.c_q"),
    "missing injection": (without("inject"), "missing: inject.weight"),
    "duplicate": (with_tensors(_orig_mod__lm_head__weight=torch.ones(128, 64)), "lm_head.weight twice"),
    "integers": (with_tensors(lm_head__weight=torch.ones(128, 64, dtype=torch.int8)), "stored as int8"),
    "a number": (with_tensors(step=10), "'step', of type int"),
    "wrong shape": (with_tensors(inject__weight=torch.ones(64, 64)), r"\(64, 64\), but .*n_embd=64 asks for \(64, 12"),
    "transposed": (with_tensors(transformer__coda__0__mlp__c_fc__weight=torch.ones(64, 256)), r"asks for \(256, 64\)"),
    "not a state dict": (with_file("model_000010.pt", [torch.ones(2)]), "holds a list"),
    "empty": (with_file("model_000010.pt", {}), "holds an empty one"),
    "wrapped": (with_file("model_000010.pt", {"model": {}}), "'model', of type dict"),
    "damaged": (with_file("model_000010.pt", "no checkpoint"), "it is damaged"),
    # What the meta file says of them
    "other width": (with_config(n_embd=128), r"shape \(128, 64\), but .*n_embd=128 asks for \(128, 128\)"),
    "other vocabulary": (with_config(vocab_size=200), r"vocab_size=200, n_embd=64 asks for \(256, 64\)"),
    "vocabulary less than padding": (with_config(vocab_size=60), r"vocab_size=60, n_embd=64 asks for \(64, 64\)"),
    "other groups": (with_config(n_kv_head=4), r"n_kv_head=4 asks for \(64, 64\)"),
    "more prelude": (with_config(n_prelude=2), "n_prelude=2.*missing: transformer.prelude.1"),
    "fewer core layers": (with_config(n_recur_block=1), "n_recur_block=1.*unexplained: transformer.recur.1"),
    "other injection": (with_config(input_injection="additive"), "'additive'.*unexplained: inject.weight"),
    "lanes": (with_config(input_injection="hyperconnect"), "missing: lane_alpha, lane_mixing, lane_beta; unexplained"),
    # The meta file itself
    "random state": (with_config(input_injection="inject_init_random"), "'inject_init_random' must be one of"),
    "unhashable injection": (with_config(input_injection=["additive"]), r"\['additive'\] must be one of"),
    "unknown field": (with_config(sandwich_norm=False), "sandwich_norm, which may change what the model computes"),
    "older field": (with_config("num_recur", train_recur_mean=4.0), "train_recur_mean"),
    "missing field": (with_config("n_coda"), "lacks n_coda"),
    "missing lanes": (with_config("num_lanes", input_injection="hyperconnect"), "lacks num_lanes"),
    "text for a number": (with_config(n_head="4"), "n_head='4' must be a whole number"),
    "no core": (with_config(n_recur_block=0), "n_recur_block=0 must be a whole number of at least 1"),
    "no backpropagation": (with_config(bptt_k=0), "bptt_k=0 must be a whole number of at least 1, or null"),
    "heads": (with_config(n_head=3), "hidden_size=64 must be num_attention_heads=3 times"),
    "softcap": (with_config(logit_softcap=-1.0), "logit_softcap=-1.0 must be positive"),
    "truncated lanes": (with_config(input_injection="hyperconnect", bptt_k=2), "does not allow: set it to None"),
    "no model_config": (with_file("meta_000010.json", "{}"), "has no 'model_config'"),
    "a list": (with_file("meta_000010.json", "[1]"), "has no 'model_config'"),
    "not JSON": (with_file("meta_000010.json", "{"), "is not JSON"),
    # The files
    "no meta file": (lambda source: (source / "meta_000010.json").unlink(), "no meta_000010.json beside it"),
    "newest without meta file": (with_file("model_000011.pt", {}), "no meta_000011.json beside it"),
    "no model file": (lambda source: (source / "model_000010.pt").unlink(), "holds no checkpoint"),
}


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_in_one_sentence_before_anything_is_written(tmp_path, name):
    break_it, message = REFUSALS[name]
    break_it(save(tmp_path / "source"))
    before = files_in(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        convert_iso_depth(tmp_path / "source", tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert isinstance(refusal.value, FileNotFoundError) == name.endswith(" file")
    assert files_in(tmp_path) == before


def test_code_in_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE_FOLDER", str(tmp_path / "owned"))
    source = save(tmp_path / "source", state={"lm_head.weight": Hostile()})
    with pytest.raises(ValueError, match="holds more than a state dict"):
        convert_iso_depth(source, tmp_path / "out")
    assert not (tmp_path / "owned").exists() and not (tmp_path / "out").exists()
    torch.load(source / "model_000010.pt", weights_only=False)
    assert (tmp_path / "owned").exists()  # it would have been


@pytest.mark.parametrize("name", ["absent", "model_10.bin", "notes_000010.pt"])
def test_source_that_is_no_checkpoint_is_refused(tmp_path, name):
    source = save(tmp_path / "source") / name
    if name != "absent":
        source.write_text("")
    with pytest.raises((ValueError, FileNotFoundError), match="does not exist|is not named like a checkpoint"):
        convert_iso_depth(source, tmp_path / "out")


# ---- The output ----


def test_output_in_the_way_is_refused_and_left_alone(tmp_path):
    source = save(tmp_path / "source")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    before = files_in(tmp_path)
    for output, overwrite, message in (
        ("notes", False, "is not empty: pass --overwrite"),
        ("notes", True, "holds something else than a checkpoint"),
        ("file", True, "is a file"),
        ("source", True, "is the checkpoint that is read"),
        ("", True, "is the checkpoint that is read"),
        ("run", True, "holds folders.*checkpoint-5"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_iso_depth(source, tmp_path / output, overwrite=overwrite)
    assert files_in(tmp_path) == before


def test_empty_output_is_used_and_overwrite_replaces_the_files(tmp_path):
    (tmp_path / "out").mkdir()
    convert_iso_depth(save(tmp_path / "source"), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text("stale")
    second = paper_model(seed=5)
    convert_iso_depth(save(tmp_path / "source", second), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, second.lm_head.weight[:97])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("moment", ["while saving", "while renaming"])
def test_failure_leaves_the_old_output_and_nothing_else(tmp_path, monkeypatch, moment):
    source = save(tmp_path / "source")
    convert_iso_depth(source, tmp_path / "out")
    before = files_in(tmp_path)
    save_pretrained, rename = LoopedGPTForCausalLM.save_pretrained, Path.rename

    def full_disk(self, folder, **kwargs):
        save_pretrained(self, folder, **kwargs)
        raise OSError("No space left on device")

    def no_rename(self, target):
        if self.name == "written":
            raise OSError("No space left on device")
        return rename(self, target)

    if moment == "while saving":
        monkeypatch.setattr(LoopedGPTForCausalLM, "save_pretrained", full_disk)
    else:
        monkeypatch.setattr(Path, "rename", no_rename)
    for output, overwrite in (("out", True), ("fresh", False)):
        with pytest.raises(OSError, match="No space left"):
            convert_iso_depth(source, tmp_path / output, overwrite=overwrite)
        assert files_in(tmp_path) == before


def test_command_prints_the_ledger_or_one_sentence(tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, ["convert", "iso-depth", *map(str, arguments)])
        return result.exit_code, " ".join(result.output.split())

    source, output = save(tmp_path / "source"), tmp_path / "out"
    code, printed = run(source, output)
    assert code == 0 and "transformer.wte.weight model.embed_tokens.weight 97 x 64" in printed and "new (0)" in printed
    code, printed = run(source, output)
    assert code == 2 and "is not empty: pass --overwrite" in printed and "Traceback" not in printed
    assert run(source, output, "--overwrite")[0] == 0
    code, printed = run(tmp_path / "absent", tmp_path / "other")
    assert code == 2 and "does not exist" in printed and not (tmp_path / "other").exists()


def test_the_written_checkpoint_was_read_back_and_the_ledger_says_against_what(tmp_path):
    ledger = convert_iso_depth(save(tmp_path / "source"), tmp_path / "out")
    (comparison,) = ledger.comparisons
    assert (comparison.max_difference, comparison.agreement, comparison.tokens) == (0.0, 1.0, 64)
    assert "the code of the source is not here" in str(ledger) and "bit-equal" in str(ledger)


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path):
    source = save(tmp_path / "source")
    ledger = convert_iso_depth(source, tmp_path / "out", dry_run=True)
    assert "Nothing was written" in str(ledger) and not (tmp_path / "out").exists()
    assert ledger.used == convert_iso_depth(source, tmp_path / "out").used
    without("inject")(source)
    with pytest.raises(ValueError, match="missing: inject.weight"):
        convert_iso_depth(source, tmp_path / "other", dry_run=True)


def test_a_checkpoint_that_reads_back_differently_is_taken_away_again(tmp_path, monkeypatch):
    save_pretrained = LoopedGPTForCausalLM.save_pretrained

    def save_another(self, folder, **kwargs):
        with torch.no_grad():
            self.lm_head.weight[3, 5] += 1e-3
            save_pretrained(self, folder, **kwargs)
            self.lm_head.weight[3, 5] -= 1e-3

    source = save(tmp_path / "source")
    before = files_in(tmp_path)
    monkeypatch.setattr(LoopedGPTForCausalLM, "save_pretrained", save_another)
    with pytest.raises(ConversionError, match="differs from its source, so nothing was written"):
        convert_iso_depth(source, tmp_path / "new" / "out")
    assert files_in(tmp_path) == before


def test_weights_that_are_not_finite_are_refused(tmp_path):
    paper = paper_model()
    with torch.no_grad():
        paper.inject.weight[2, 3] = torch.nan
    with pytest.raises(ConversionError, match="logits are not finite"):
        convert_iso_depth(save(tmp_path / "source", paper), tmp_path / "out")
    assert not (tmp_path / "out").exists()
