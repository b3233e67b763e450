"""The probe, residual statistics and skip effects, on every family and on transformers' decoders."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_looped import (
    GrownLlamaConfig,
    GrownLlamaForCausalLM,
    LoopedGPTConfig,
    LoopedGPTForCausalLM,
    MixtureOfRecursionsConfig,
    MixtureOfRecursionsForCausalLM,
    RecurrentGPTConfig,
    RecurrentGPTForCausalLM,
)
from modeling_looped.interventions import swap


pytest.importorskip("pandas")

from modeling_looped.diagnostics.probe import ANATOMIES, Anatomy, Probe, batches  # noqa: E402
from modeling_looped.diagnostics.residual import residual_statistics  # noqa: E402
from modeling_looped.diagnostics.skipping import (  # noqa: E402
    DepthScore,
    depth_score,
    depth_score_of,
    skip_boundaries,
    skip_effects,
)


TINY = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}
LOOP = {"num_prelude_layers": 1, "num_coda_layers": 1, "num_recurrences": 2}
THEIRS = {
    **TINY,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROWS = [[int(x) for x in np.random.default_rng(n).integers(3, 64, n)] for n in (14, 9, 20)]


def from_transformers(name: str, **fields):
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**THEIRS, **fields}))


def looped_gpt(injection: str):
    fields = {**TINY, **LOOP, "num_core_layers": 2, "trained_recurrences": 4, "injection": injection}
    return lambda: LoopedGPTForCausalLM(LoopedGPTConfig(**fields))


def grown(plan: str):
    return lambda: GrownLlamaForCausalLM(GrownLlamaConfig(**TINY, intermediate_size=48, depth_plan=plan))


GPT2 = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": from_transformers("llama"),
    "mistral": from_transformers("mistral"),
    "qwen2": from_transformers("qwen2"),
    "qwen3": from_transformers("qwen3"),
    "gemma": from_transformers("gemma"),
    "gemma2": from_transformers("gemma2"),
    "gemma3": from_transformers("gemma3_text"),
    "gpt2": lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **GPT2)),
    "hrm_text": from_transformers("hrm_text", num_layers_per_stack=2, H_cycles=2, L_cycles=2),
    "looped_gpt-linear": looped_gpt("linear"),
    "looped_gpt-additive": looped_gpt("additive"),
    "looped_gpt-none": looped_gpt("none"),
    "looped_gpt-hyperconnection": looped_gpt("hyperconnection"),
    "recurrent_gpt": lambda: RecurrentGPTForCausalLM(RecurrentGPTConfig(**TINY, **LOOP, num_core_layers=1)),
    "mixture_of_recursions": lambda: MixtureOfRecursionsForCausalLM(
        MixtureOfRecursionsConfig(**TINY, **LOOP, num_core_layers=1, trained_recurrences=2)
    ),
    "grown-dense": grown("4x1"),
    "grown-looped": grown("Loop(1-2x2-1)"),
}
ORDERS = {
    "hrm_text": [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3],
    "recurrent_gpt": [0, 1, 1, 2],
    "mixture_of_recursions": [0, 1, 1, 2],
    "grown-looped": [0, 1, 2, 1, 2, 3],
    **{f"looped_gpt-{name}": [0, 1, 2, 1, 2, 3] for name in ("linear", "additive", "none", "hyperconnection")},
}


def build(name: str):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.fixture(scope="module", params=MODELS)
def named(request):
    return request.param, build(request.param)


def state_of(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    return (
        hooks,
        weights,
        modes,
        model.config.to_dict(),
        [
            m._output_capturing_hooks_installed if hasattr(m, "_output_capturing_hooks_installed") else None
            for m in model.modules()
        ],
    )


def test_layers_are_found_in_the_order_in_which_they_run(named):
    name, model = named
    assert Probe(model).order == ORDERS.get(name, [0, 1, 2, 3])


def test_measurements_leave_the_model_as_found(named):
    name, model = named
    model.train()
    before, generators = state_of(model), (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    residual_statistics(model, ROWS)
    for reach in ("future", "local", "current"):
        skip_effects(model, ROWS[:1], reach=reach, part="attention")
    after = state_of(model)
    assert before[0] == after[0] and before[2:] == after[2:]
    assert all(torch.equal(before[1][key], after[1][key]) for key in before[1])
    assert random.getstate() == generators[0] and np.random.get_state()[1].tolist() == generators[1]
    assert torch.equal(torch.get_rng_state(), generators[2])
    model.eval()


def test_a_left_padded_batch_gives_the_numbers_of_single_rows(named):
    name, model = named
    together, alone = residual_statistics(model, ROWS, batch_size=3), residual_statistics(model, ROWS, batch_size=1)
    assert together.tokens == alone.tokens == sum(map(len, ROWS))
    np.testing.assert_allclose(together.to_frame(), alone.to_frame(), rtol=2e-5, atol=2e-5)


def test_the_lens_of_the_last_state_is_what_the_model_says(named):
    name, model = named
    if name == "hrm_text":
        pytest.skip("its last layer's output goes through the norm of its stack, which is the head's")
    probe, seen = Probe(model), {}
    rows = next(batches(ROWS[:1], 1))
    probe.run(rows, on_output=lambda position, out: seen.update({position: out}))
    with torch.no_grad():
        said = model(rows.input_ids).logits
        torch.testing.assert_close(probe.lens(seen[probe.depth - 1]), said.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(probe.logits(rows), said.float(), rtol=1e-5, atol=1e-5)


def test_an_unknown_architecture_is_told_how_to_be_added(monkeypatch):
    model = build("llama")
    monkeypatch.delitem(ANATOMIES, "LlamaDecoderLayer")
    with pytest.raises(ValueError, match=r"ANATOMIES\['LlamaDecoderLayer'\] = Anatomy\("):
        Probe(model)
    monkeypatch.setitem(ANATOMIES, "LlamaDecoderLayer", Anatomy("self_attn", "mlp"))
    assert Probe(model).depth == 4


def test_wrong_names_are_noticed(monkeypatch):
    monkeypatch.setitem(ANATOMIES, "LlamaDecoderLayer", Anatomy("self_attn", "post_attention_layernorm"))
    with pytest.raises(ValueError, match="output is not its input plus the outputs of self_attn and post_attention"):
        Probe(build("llama"))
    monkeypatch.setitem(ANATOMIES, "LlamaDecoderLayer", Anatomy("attention"))
    with pytest.raises(ValueError, match="has no 'attention'"):
        Probe(build("llama"))


def test_what_cannot_be_probed_is_refused():
    with pytest.raises(ValueError, match="no language model head"):
        Probe(build("llama").model)
    with pytest.raises(ValueError, match="num_recurrences=2: LlamaForCausalLM has no loop"):
        Probe(build("llama"), num_recurrences=2)
    with pytest.raises(ValueError, match="no texts"):
        residual_statistics(build("llama"), [])
    with pytest.raises(ValueError, match="Text 1 has 1 tokens"):
        residual_statistics(build("llama"), [[1, 2], [3]])
    with pytest.raises(ValueError, match="reach='past'"):
        skip_effects(build("llama"), ROWS, reach="past")
    with pytest.raises(ValueError, match="part='norm'"):
        skip_effects(build("llama"), ROWS, part="norm")
    with pytest.raises(ValueError, match=r"boundaries=\[14\] of text 0"):
        skip_effects(build("llama"), ROWS[:1], boundaries=[[14]])


def test_depth_follows_the_recurrences_that_are_asked_for():
    model = build("looped_gpt-linear")
    assert Probe(model, 3).order == [0, 1, 2, 1, 2, 1, 2, 3] and Probe(model, 3).boundaries == [1, 3, 5, 7]


def test_edited_and_looped_orders_are_seen_as_they_run():
    from modeling_looped.looping import loop

    model = build("llama")
    with swap(model, 0, 1):
        assert Probe(model).order == [1, 0, 2, 3]
    loop(model, 1, 3, 1)
    assert Probe(model).order == [0, 1, 2, 1, 2, 3]


def test_attention_adds_nothing_where_its_output_matrix_is_zero():
    model = build("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = residual_statistics(model, ROWS)
    assert np.all(found.attention == 0) and np.all(found.mlp > 0)
    np.testing.assert_allclose(found.layer, found.mlp, rtol=1e-5)


def test_contributions_are_means_of_per_token_ratios():
    model = build("llama").eval()
    stream, captured = [], {}
    hooks = [
        model.model.layers[2].register_forward_pre_hook(lambda module, args: stream.append(args[0])),
        model.model.layers[2].self_attn.register_forward_hook(lambda module, args, out: captured.update(a=out[0])),
        model.model.layers[2].mlp.register_forward_hook(lambda module, args, out: captured.update(m=out)),
    ]
    with torch.no_grad():
        model(torch.tensor(ROWS[:1]))
    for hook in hooks:
        hook.remove()
    h, a, m = stream[0][0], captured["a"][0], captured["m"][0]
    found = residual_statistics(model, ROWS[:1])
    assert found.norm[2] == pytest.approx(h.norm(dim=-1).mean().item(), rel=1e-5)
    assert found.attention[2] == pytest.approx((a.norm(dim=-1) / h.norm(dim=-1)).mean().item(), rel=1e-5)
    assert found.mlp[2] == pytest.approx((m.norm(dim=-1) / (h + a).norm(dim=-1)).mean().item(), rel=1e-5)
    assert found.layer_max[2] == pytest.approx(((a + m).norm(dim=-1) / h.norm(dim=-1)).max().item(), rel=1e-5)
    assert found.attention_cosine[2] == pytest.approx(F.cosine_similarity(a, h, dim=-1).mean().item(), abs=1e-6)
    assert found.in_out_cosine[2] == pytest.approx(F.cosine_similarity(h + a + m, h, dim=-1).mean().item(), abs=1e-6)


# Skip effects against a model of their own, written out layer by layer


def layers_of(model):
    """The executed layers of a Llama-shaped model as functions of the stream, and the plan's order."""
    base = model.model
    order = list(model.config.plan().order) if hasattr(model.config, "plan") else range(len(base.layers))
    unique = base.unique_layers() if hasattr(base, "unique_layers") else base.layers

    def runner(layer, length):
        position_ids = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]

        def run(h):
            embeddings = base.rotary_emb(h, position_ids=position_ids)
            return layer(h, attention_mask=mask, position_embeddings=embeddings, position_ids=position_ids)

        return run

    return lambda length: [runner(unique[i], length) for i in order]


def brute_force(model, row, boundary, reach):
    ids, length = torch.tensor([row]), len(row)
    layers = layers_of(model)(length)
    changed = torch.zeros(length, dtype=torch.bool)
    changed[1 : boundary if reach != "current" else length] = True
    watched = slice(boundary, None) if reach != "current" else slice(None)
    effect, output = np.zeros((len(layers), len(layers))), np.zeros(len(layers))
    with torch.no_grad():
        stream = [model.model.embed_tokens(ids)]
        for layer in layers:
            stream.append(layer(stream[-1]))
        added = [after - before for before, after in zip(stream, stream[1:])]
        clean = model.lm_head(model.model.norm(stream[-1])).softmax(-1)
        for s in range(len(layers)):
            h = stream[s]
            for position in range(s, len(layers)):
                if reach == "local" and position > s:
                    h = stream[position] - changed[None, :, None] * added[s]
                out = layers[position](h)
                if position == s:
                    out = torch.where(changed[None, :, None], h, out)
                else:
                    change = (added[position] - (out - h)).norm(dim=-1) / added[position].norm(dim=-1)
                    effect[s, position] = change[0, watched].max()
                h = out
            said = model.lm_head(model.model.norm(h)).softmax(-1)
            output[s] = (said - clean)[0, watched].norm(dim=-1).max()
    return effect, output


@pytest.mark.parametrize("reach", ["future", "local", "current"])
@pytest.mark.parametrize("name", ["llama", "grown-dense", "grown-looped"])
def test_skip_effects_equal_those_of_layers_run_one_by_one(name, reach):
    model = build(name).eval()
    model.set_attn_implementation("eager")
    expected = [brute_force(model, ROWS[2], t, reach) for t in (8, 13)]
    # A batch of few rows, so that sources are spread over several.
    found = skip_effects(model, ROWS[2:], reach=reach, boundaries=[[8, 13]], batch_tokens=60)
    effect = np.max([one for one, _ in expected], axis=0)
    above = np.triu_indices(len(effect), 1)
    np.testing.assert_allclose(found.effect[above], effect[above], rtol=2e-4, atol=1e-6)
    assert np.isnan(found.effect[np.tril_indices(len(effect))]).all()
    if reach != "local":
        np.testing.assert_allclose(found.output, np.max([one for _, one in expected], axis=0), rtol=2e-4, atol=1e-6)


def test_local_equals_propagated_in_the_next_layer_and_differs_later():
    model = build("llama")
    local, future = (skip_effects(model, ROWS, reach=reach) for reach in ("local", "future"))
    np.testing.assert_allclose(np.diag(local.effect, 1), np.diag(future.effect, 1), rtol=1e-4, atol=1e-6)
    assert not np.allclose(np.diag(local.effect, 2), np.diag(future.effect, 2), rtol=1e-2)


def test_a_layer_that_adds_nothing_has_no_effect():
    model = build("llama")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        torch.nn.init.zeros_(model.model.layers[1].get_submodule(name).weight)
    for reach in ("future", "local"):
        found = skip_effects(model, ROWS, reach=reach)
        assert np.nanmax(found.effect[1]) == 0 and np.nanmin(found.effect[0, 2:]) > 0


def test_leaving_out_a_zero_part_has_no_effect_and_the_other_part_has():
    model = build("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert np.nanmax(skip_effects(model, ROWS, part="attention").effect) == 0
    # Without attention nothing passes from earlier tokens to later ones: facts 15 of the specification.
    assert np.nanmax(skip_effects(model, ROWS, part="mlp").effect) == 0
    assert np.nanmin(skip_effects(model, ROWS, reach="current", part="mlp").effect[np.triu_indices(4, 1)]) > 0


def test_the_first_token_and_those_behind_the_boundary_keep_the_skipped_layer():
    model = build("llama").eval()
    probe, seen = Probe(model), {}
    original = probe.run

    def watch(rows, on_input=None, on_output=None, **more):
        def record(position, out):
            changed = on_output(position, out)
            if rows.input_ids.shape[0] > 1 and position == 0:
                seen["out"], seen["clean"] = changed, out
            return changed

        return original(rows, on_input=on_input, on_output=record, **more)

    probe.run = watch
    skip_effects(probe, ROWS[:1], boundaries=[[5]])
    differs = (seen["out"][0] != seen["clean"][0]).any(-1)  # row 0 leaves out layer 0
    assert differs.tolist() == [False, *[True] * 4, *[False] * (len(ROWS[0]) - 5)]
    assert torch.equal(seen["out"][1:], seen["clean"][1:])


def test_a_text_costs_one_row_for_each_source_and_boundary():
    probe = Probe(build("llama"))
    rows_run, original = [], probe.run
    probe.run = lambda rows, **edits: (rows_run.append(rows.input_ids.shape[0]), original(rows, **edits))[1]
    for reach in ("future", "local"):
        rows_run.clear()
        skip_effects(probe, ROWS[2:], reach=reach, boundaries=[[4, 8, 12]])
        assert sum(rows_run) == 1 + 3 * probe.depth  # of depth layers each: E^2


def test_boundaries_are_multiples_of_eight_that_leave_a_rest():
    assert sorted(skip_boundaries(64, 10, random.Random(0))) == [8, 16, 24, 32, 40, 48, 56]
    assert len(skip_boundaries(640, 4, random.Random(0))) == 4
    assert skip_boundaries(9, 4, random.Random(0)) == [4]


def test_depth_score_is_a_centre_of_gravity():
    assert depth_score_of(np.ones(24)) == 11.5
    assert depth_score_of(np.eye(24)[7]) == 7
    assert depth_score_of(np.arange(24.0)) == depth_score_of(10 * np.arange(24.0))
    with pytest.raises(ValueError, match="No layer changes the output"):
        depth_score_of(np.zeros(4))


def test_depth_score_is_the_mean_over_groups():
    model = build("llama")
    first, second = depth_score(model, ROWS[:1], [[6]]), depth_score(model, ROWS[2:], [[9]])
    both = depth_score(model, [ROWS[0], ROWS[2]], [[6], [9]], groups=["1", "2"])
    assert both.score == pytest.approx((first.score + second.score) / 2)
    assert both.pooled == pytest.approx(DepthScore((first.output + second.output) / 2).score)
    assert both.by_group == {"1": pytest.approx(first.score), "2": pytest.approx(second.score)}
    with pytest.raises(ValueError, match="groups has 1 names for 2 texts"):
        depth_score(model, [ROWS[0], ROWS[2]], groups=["1"])


def test_every_measurement_draws_itself_and_says_its_number():
    from matplotlib.figure import Figure

    model = build("grown-looped")
    for found in (residual_statistics(model, ROWS), skip_effects(model, ROWS), depth_score(model, ROWS)):
        found.plot(Figure().subplots(), label="model")
        assert len(found.to_frame()) > 0 and found.headline().endswith(".") and found.reading.endswith(".")
