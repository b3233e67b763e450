"""GGUF in and out: equal logits and equal tokens as transformers reads the file, and refusals of what would be lost."""

import json
import resource
import time
from pathlib import Path

import pytest
import torch
from conftest import randomise, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from looped_cli import app
from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
from modeling_looped.looping import load, loop
from modeling_looped.recipes.tokens import train_tokenizer


gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'modeling-looped[gguf]'")

from modeling_looped.conversion import ConversionError  # noqa: E402
from modeling_looped.conversion.gguf_llama import convert_gguf, from_pairs, to_gguf, to_pairs  # noqa: E402
from modeling_looped.conversion.tokenizers import TEXTS  # noqa: E402


pytestmark = pytest.mark.slow  # the whole of it takes a minute
SIZE = {"vocab_size": 290, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
SIZE |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
IDS = torch.randint(280, (2, 20), generator=torch.Generator().manual_seed(1))
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


def with_tokenizer(folder: Path) -> None:
    tokenizer = train_tokenizer([*TEXTS, "a few words to cut into pieces " * 9], 280)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def grown(folder: Path, tokenizer: bool = True, **fields) -> GrownLlamaForCausalLM:
    config = GrownLlamaConfig(**{**SIZE, "depth_plan": "Loop(1-2x3-1)", **fields})
    model = randomise(GrownLlamaForCausalLM(config), std=0.15).eval()
    model.save_pretrained(folder)
    if tokenizer:
        with_tokenizer(folder)
    return model


def llama(folder: Path, **fields) -> LlamaForCausalLM:
    model = randomise(LlamaForCausalLM(LlamaConfig(**{**SIZE, "num_hidden_layers": 3, **fields})), std=0.15).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model, **options) -> torch.Tensor:
    return model.eval()(IDS, **options).logits


def read(file: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


def files_in(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ---- Out ----


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"depth_plan": "0 1 1 2 0"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rms_norm_eps": 1e-6},
    ],
)
def test_a_gguf_read_by_transformers_has_the_logits_of_the_looped_model(tmp_path, fields):
    model = grown(tmp_path / "source", **fields)
    ledger = to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    assert torch.equal(logits(read(tmp_path / "out.gguf")), logits(model))
    assert ledger.comparisons[0].max_difference == 0 and ledger.comparisons[0].tokens == 96
    config = read(tmp_path / "out.gguf").config
    assert config.num_hidden_layers == model.config.num_hidden_layers
    assert config.rope_parameters["rope_theta"] == model.config.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == model.config.tie_word_embeddings


def test_recurrences_say_how_often_the_core_is_written_out(tmp_path):
    model = grown(tmp_path / "source")
    ledger = to_gguf(tmp_path / "source", tmp_path / "out.gguf", num_recurrences=5)
    written = read(tmp_path / "out.gguf")
    assert written.config.num_hidden_layers == 12
    assert torch.equal(logits(written), logits(model, num_recurrences=5))
    assert "copied to layers 3, 5, 7, 9" in str(ledger)
    with pytest.raises(ValueError, match="num_recurrences=0 must be a whole number"):
        to_gguf(tmp_path / "source", tmp_path / "other.gguf", num_recurrences=0)


def test_a_llama_and_a_looped_llama_are_written_too(tmp_path):
    model = llama(tmp_path / "source")
    to_gguf(tmp_path / "source", tmp_path / "plain.gguf")
    assert torch.equal(logits(read(tmp_path / "plain.gguf")), logits(model))
    loop(model, 1, 3, 2)
    model.save_pretrained(tmp_path / "looped")
    to_gguf(tmp_path / "looped", tmp_path / "looped.gguf")
    assert read(tmp_path / "looped.gguf").config.num_hidden_layers == 7
    assert torch.equal(logits(read(tmp_path / "looped.gguf")), logits(load(str(tmp_path / "looped"))))
    with pytest.raises(ValueError, match="num_recurrences=2: LlamaForCausalLM has no looped block"):
        to_gguf(tmp_path / "looped", tmp_path / "other.gguf", num_recurrences=2)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_is_the_rounded_source_and_the_difference_is_told(tmp_path, dtype):
    model = grown(tmp_path / "source")
    ledger = to_gguf(tmp_path / "source", tmp_path / "out.gguf", dtype=dtype)
    told, rounded = ledger.comparisons
    assert 0 < told.max_difference < (0.05 if dtype == "f16" else 0.5) and told.tolerance is None
    assert rounded.max_difference == 0 and f"rounded to {dtype}" in str(ledger)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == dtype.upper() and kinds["output_norm.weight"] == "F32"
    half = torch.float16 if dtype == "f16" else torch.bfloat16
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.to(half))
    assert torch.equal(logits(read(tmp_path / "out.gguf")), logits(model))


def test_tokenizer_special_tokens_and_template_arrive(tmp_path):
    grown(tmp_path / "source")
    to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    source = AutoTokenizer.from_pretrained(tmp_path / "source")
    arrived = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    for text in (*TEXTS, "one<|endoftext|>two<|pad|>", "żółć\r\n\t"):
        assert arrived(text)["input_ids"] == source(text)["input_ids"]
        assert arrived.decode(arrived(text)["input_ids"]) == source.decode(source(text)["input_ids"])
    assert (arrived.bos_token, arrived.eos_token, arrived.pad_token) == ("<|endoftext|>", "<|endoftext|>", "<|pad|>")
    assert arrived.chat_template == TEMPLATE
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    assert len(fields["tokenizer.ggml.tokens"].data) == 290  # as many as the embedding has rows
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == "[PAD289]"
    assert fields["tokenizer.ggml.token_type"].contents()[:2] == [3, 3]


def test_a_tokenizer_that_adds_a_begin_and_one_of_another_split_arrive(tmp_path):
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    grown(tmp_path / "source", tokenizer=False)
    tokenizer = train_tokenizer([*TEXTS, "1234567 890 " * 5], 285)
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]), behavior="isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save_pretrained(tmp_path / "source")
    to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    arrived = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    assert arrived("12345 words")["input_ids"] == tokenizer("12345 words")["input_ids"]
    assert arrived("12345 words")["input_ids"][0] == 0


def test_a_tokenizer_like_llama_2s_arrives(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaTokenizer

    grown(tmp_path / "source", tokenizer=False, vocab_size=610)
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained.train_from_iterator([TEXTS[0], "a few words to cut into pieces"] * 9, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = LlamaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True)
    tokenizer.save_pretrained(tmp_path / "source")
    to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    arrived = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    for text in TEXTS:
        assert arrived(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert arrived("a few")["input_ids"][0] == tokenizer.bos_token_id == 1
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:3] == [2, 3, 3] and set(kinds[3:259]) == {6} and kinds[-1] == 5


def test_a_tokenizer_without_words_in_a_gguf_is_refused_or_left_out(tmp_path):
    from tokenizers import pre_tokenizers

    model = grown(tmp_path / "source", tokenizer=False)
    tokenizer = train_tokenizer(list(TEXTS), 280)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="as its Digits, ByteLevel does.*--no-tokenizer"):
        to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    to_gguf(tmp_path / "source", tmp_path / "out.gguf", tokenizer=False)
    assert torch.equal(logits(read(tmp_path / "out.gguf")), logits(model))
    with pytest.raises(Exception, match="tokens|tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    train_tokenizer([*TEXTS, "more and more words, of many kinds " * 9], 300).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="its token 29. is beyond the embedding of 290 rows"):
        to_gguf(tmp_path / "source", tmp_path / "another.gguf")


def test_rows_of_queries_and_keys_are_in_pairs_for_rotary_embeddings(tmp_path):
    """Turning neighbours in the file's order is turning halves in transformers', head by head."""
    rows = torch.randn(3 * 8, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(from_pairs(to_pairs(rows, 3), 3), rows)
    head = rows[:8]
    assert torch.equal(to_pairs(rows, 3)[:8], torch.stack([head[i // 2 + 4 * (i % 2)] for i in range(8)]))
    angles = torch.arange(4.0)
    pairs = to_pairs(head, 1).reshape(4, 2, 5)
    turned = torch.stack(
        [
            pairs[:, 0] * angles.cos()[:, None] - pairs[:, 1] * angles.sin()[:, None],
            pairs[:, 1] * angles.cos()[:, None] + pairs[:, 0] * angles.sin()[:, None],
        ],
        1,
    )
    cos, sin = angles.cos().repeat(2)[:, None], angles.sin().repeat(2)[:, None]
    halves = head * cos + torch.cat([-head[4:], head[:4]]) * sin
    torch.testing.assert_close(from_pairs(turned.reshape(8, 5), 1), halves)


def test_ledger_of_a_gguf_explains_every_tensor_on_both_sides(tmp_path):
    model = grown(tmp_path / "source", tie_word_embeddings=True)
    ledger = to_gguf(tmp_path / "source", tmp_path / "out.gguf", dry_run=True)
    assert not (tmp_path / "out.gguf").exists() and "Nothing was written" in str(ledger)
    ledger = to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert {use.source for use in ledger.used} == {name for name, _ in model.named_parameters()}
    assert sorted(target for use in ledger.used for target in use.targets) == sorted(tensors)
    assert ledger.parameters["total"] == sum(tensor.n_elements for tensor in tensors.values())
    assert ledger.parameters["stored"] == sum(p.numel() for p in model.parameters())
    assert "tokenizer" in ledger.remarks[0] and all(f" {use.targets[0]} " in str(ledger) for use in ledger.used)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 12345.678}}, "rope_theta=12345.678"),
        ({"kv_sharing": "first"}, "kv_sharing='first' shares keys between passes"),
    ],
)
def test_a_model_that_a_gguf_of_llama_cannot_say_is_refused(tmp_path, fields, message):
    grown(tmp_path / "source", tokenizer=False, **fields)
    with pytest.raises(ValueError, match=message):
        to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_other_families_other_dtypes_and_outputs_in_the_way_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "looped_gpt")
    with pytest.raises(ValueError, match="LoopedGPTForCausalLM is no Llama"):
        to_gguf(tmp_path / "looped_gpt", tmp_path / "out.gguf")
    grown(tmp_path / "source", tokenizer=False)
    with pytest.raises(ValueError, match="dtype='q4_0' must be one of f32, f16, bf16"):
        to_gguf(tmp_path / "source", tmp_path / "out.gguf", dtype="q4_0")
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        to_gguf(tmp_path / "absent", tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="is a folder"):
        to_gguf(tmp_path / "source", tmp_path / "looped_gpt")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists: pass --overwrite"):
        to_gguf(tmp_path / "source", tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="something else than a GGUF file: it is not overwritten"):
        to_gguf(tmp_path / "source", tmp_path / "notes.txt", overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    before = (tmp_path / "out.gguf").read_bytes()
    to_gguf(tmp_path / "source", tmp_path / "out.gguf", overwrite=True, dtype="f16")
    assert len((tmp_path / "out.gguf").read_bytes()) < len(before)


def test_numbers_beyond_f16_are_refused(tmp_path):
    model = grown(tmp_path / "source", tokenizer=False)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="blk.0.ffn_down.weight holds numbers beyond f16"):
        to_gguf(tmp_path / "source", tmp_path / "out.gguf", dtype="f16")


def test_a_gguf_that_reads_back_differently_is_taken_away_again(tmp_path, monkeypatch):
    import modeling_looped.conversion.gguf_llama as module

    grown(tmp_path / "source")
    before = files_in(tmp_path)
    monkeypatch.setattr(module, "to_pairs", lambda rows, heads: rows)
    with pytest.raises(ConversionError, match="differs from its source, so nothing was written"):
        to_gguf(tmp_path / "source", tmp_path / "new" / "out.gguf")
    assert files_in(tmp_path) == before


# ---- In ----


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    grown(folder / "source")
    to_gguf(folder / "source", folder / "file.gguf")
    return folder / "file.gguf"


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_the_unrolled_model_with_its_tokenizer(tmp_path, tied):
    model = grown(tmp_path / "source", tie_word_embeddings=tied)
    to_gguf(tmp_path / "source", tmp_path / "file.gguf")
    ledger = convert_gguf(tmp_path / "file.gguf", tmp_path / "plain")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert type(back) is LlamaForCausalLM and torch.equal(logits(back), logits(model))
    assert back.config.rms_norm_eps == 1e-5 and back.config.rope_parameters["rope_theta"] == 500000.0
    assert back.config.tie_word_embeddings == tied and "quantization_config" not in back.config.to_dict()
    assert (back.config.bos_token_id, back.config.eos_token_id, back.config.pad_token_id) == (0, 0, 1)
    arrived, source = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("plain", "source"))
    assert all(arrived(text)["input_ids"] == source(text)["input_ids"] for text in TEXTS)
    assert arrived.chat_template == TEMPLATE and "the GGUF read by transformers" in str(ledger)
    tensors = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "file.gguf").tensors}
    assert {use.source for use in ledger.used} == tensors
    assert {use.targets[0]: use.shape for use in ledger.used} == {n: tuple(p.shape) for n, p in back.named_parameters()}
    assert ledger.parameters["total"] == sum(p.numel() for p in back.parameters())


def test_a_plan_makes_a_grown_llama_of_it(tmp_path, file):
    ledger = convert_gguf(file, tmp_path / "out", "Loop(2-4x3-2)")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is GrownLlamaForCausalLM and model.config.num_recurrences == 3
    assert torch.equal(logits(model, num_recurrences=1), logits(read(file)))
    assert len(ledger.comparisons) == 2 and (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match="does not fit the 8 layers"):
        convert_gguf(file, tmp_path / "other", "Loop(2-4x3-3)")


def rewritten(file: Path, target: Path, drop=(), fields=None, tensors=None, architecture: str = "llama") -> Path:
    """`file` with other metadata and tensors; a callable changes a tensor."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, architecture)
    fields, tensors = fields or {}, dict(tensors or {})
    for name, field in reader.fields.items():
        if name in drop or name in fields or name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name.replace("llama.", f"{architecture}."), field.contents(), kind, sub)
    for name, value in fields.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](name, value)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            change = tensors.pop(tensor.name, lambda values: values)
            writer.add_tensor(tensor.name, change(tensor.data.copy()).copy())
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def numbers(*shape):
    return torch.ones(shape).numpy()


CHANGES = {
    "another architecture": ({"architecture": "qwen2"}, "is of the architecture 'qwen2': only 'llama'"),
    "linear scaling": (
        {"fields": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
        "llama.rope.scaling.type='linear', llama.rope.scaling.factor=4.0, which transformers does not read",
    ),
    "frequencies": ({"tensors": {"rope_freqs.weight": numbers(4)}}, "unexplained: rope_freqs.weight"),
    "biases": ({"tensors": {"blk.0.attn_q.bias": numbers(32)}}, "unexplained: blk.0.attn_q.bias"),
    "experts": ({"fields": {"llama.expert_count": 4}}, "llama.expert_count=4"),
    "a window": ({"fields": {"llama.attention.sliding_window": 16}}, "llama.attention.sliding_window=16"),
    "part of a head turned": ({"fields": {"llama.rope.dimension_count": 4}}, "llama.attention.key_length=8"),
    "heads by layer": ({"fields": {"llama.attention.head_count_kv": [2] * 8}}, r"num_key_value_heads=\[2, 2"),
    "no key heads said": ({"drop": ["llama.attention.head_count_kv"]}, "lacks llama.attention.head_count_kv"),
    "missing tensor": ({"drop": ["blk.3.ffn_up.weight"]}, "missing: blk.3.ffn_up.weight"),
    "more layers said": ({"fields": {"llama.block_count": 9}}, "missing: blk.8.attn_q.weight"),
    "fewer layers said": ({"fields": {"llama.block_count": 7}}, "unexplained: blk.7.attn"),
    "other heads": (
        {"fields": {"llama.attention.head_count_kv": 4}},
        r"wrong shape: blk.0.attn_k.weight \(16, 32\) instead of \(32, 32\)",
    ),
    "shuffled": (
        {"tensors": {"blk.1.ffn_down.weight": lambda values: values.T}},
        r"wrong shape: blk.1.ffn_down.weight \(48, 32\) instead of \(32, 48\)",
    ),
    "other vocabulary": (
        {"fields": {"llama.vocab_size": 280}},
        r"token_embd.weight \(290, 32\) instead of \(280, 32\)",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gguf_that_would_lose_something_is_refused(tmp_path, file, name):
    changes, message = CHANGES[name]
    other = rewritten(file, tmp_path / "other.gguf", **changes)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        convert_gguf(other, tmp_path / "new" / "out")
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert files_in(tmp_path) == before


def test_the_rewriting_of_these_tests_changes_nothing_else(tmp_path, file):
    same = rewritten(file, tmp_path / "same.gguf", fields={"llama.rope.scaling.type": "none"})
    assert torch.equal(logits(read(same)), logits(read(file)))
    convert_gguf(same, tmp_path / "out")


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 5000, -1000, -4])
def test_a_damaged_file_is_refused(tmp_path, file, kept):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="no GGUF file" if 0 <= kept < 4 else "is damaged or truncated"):
        convert_gguf(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_is_refused(tmp_path):
    for name, message in (("absent.gguf", "does not exist"), ("", "is a folder")):
        with pytest.raises(FileNotFoundError, match=message):
            convert_gguf(tmp_path / name, tmp_path / "out")


def test_an_unknown_way_to_cut_words_is_told(tmp_path, file):
    assert "pre-tokenizer" not in str(convert_gguf(file, tmp_path / "known", dry_run=True))
    other = rewritten(file, tmp_path / "other.gguf", fields={"tokenizer.ggml.pre": "smollm"})
    assert "does not know the pre-tokenizer 'smollm'" in str(convert_gguf(other, tmp_path / "out", dry_run=True))


def test_quantized_weights_are_dequantized_as_transformers_does(tmp_path):
    llama(tmp_path / "source", hidden_size=64, intermediate_size=96)
    to_gguf(tmp_path / "source", tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        kind = gguf.GGMLQuantizationType.Q8_0 if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(tensor.data.copy(), kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    ledger = convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    assert "from Q8_0, rows of 4 heads reordered" in str(ledger) and "without a tokenizer" in str(ledger)
    assert torch.equal(
        logits(LlamaForCausalLM.from_pretrained(tmp_path / "out")), logits(read(tmp_path / "small.gguf"))
    )


def test_commands_go_out_and_in(tmp_path):
    model = grown(tmp_path / "source")
    out, back = str(tmp_path / "out.gguf"), str(tmp_path / "back")
    source = str(tmp_path / "source")
    told = CliRunner().invoke(app, ["convert", "to-gguf", source, out, "--recurrences", "2", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["comparisons"][0]["max_difference"] == 0
    told = CliRunner().invoke(app, ["convert", "gguf", out, back])
    assert told.exit_code == 0 and "bit-equal" in told.stdout
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(back)), logits(model, num_recurrences=2))
    told = CliRunner().invoke(app, ["convert", "to-gguf", source, out])
    assert told.exit_code == 2 and "exists: pass --overwrite" in " ".join(told.output.split())


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_goes_in_as_a_loop_and_out_again_with_equal_logits(tmp_path):
    from modeling_looped.eval.smollm2 import smollm2_checkpoint, smollm2_gguf

    try:
        file, plain = smollm2_gguf(), smollm2_checkpoint()
    except (OSError, ValueError) as error:
        pytest.skip(f"needs the SmolLM2-135M weights: {error}")
    start = time.process_time()
    into = convert_gguf(file, tmp_path / "grown", "Loop(10-10x2-10)")
    middle = time.process_time()
    out = to_gguf(tmp_path / "grown", tmp_path / "out.gguf", num_recurrences=1)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"in {middle - start:.0f} s of processor, out {time.process_time() - middle:.0f} s, at most {gigabytes:.1f} GB"
    )
    assert [comparison.max_difference for comparison in (*into.comparisons, *out.comparisons)] == [0, 0, 0]
    assert len(into.used) == len(out.used) == 272
    original = LlamaForCausalLM.from_pretrained(plain)
    model = GrownLlamaForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(logits(model, num_recurrences=1), logits(original))
