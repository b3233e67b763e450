"""What a recurrence does to the state: exits, similarity, fixed points, and the gate, against their definitions."""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from conftest import INJECTIONS, TINY_MODELS, randomise, tiny_grown_llama, tiny_model, tiny_recurrent_gpt
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_looped.diagnostics import gates, states
from modeling_looped.diagnostics.gates import (
    Deciles,
    gate_attribution,
    gate_interventions,
    gate_statistics,
    projection_contrast,
    token_difficulty,
    token_losses,
)
from modeling_looped.diagnostics.probe import Probe, batches
from modeling_looped.diagnostics.states import exit_curve, fixed_point, state_similarity, verdict_of
from modeling_looped.eval.exit_curve import exit_curve as exits_one_by_one


pytest.importorskip("pandas")

GENERATOR = torch.Generator().manual_seed(7)
ROWS = [torch.randint(1, 97, (length,), generator=GENERATOR).tolist() for length in (14, 9, 20, 11)]
EVEN = [row[:9] for row in ROWS]
SMALL = {"hidden_size": 32, "num_attention_heads": 2}


def gated(**fields):
    """Random weights under which the gate moves."""
    return tiny_recurrent_gpt(**{**SMALL, "gate_bias_init": 0.0, **fields})


def gpt2():
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=2, n_positions=64)
    return randomise(GPT2LMHeadModel(config)).eval()


def hold_gate(model, value: float):
    """The model with a gate that is 1 for `torch.inf` and 0 for `-torch.inf`."""
    with torch.no_grad():
        model.model.injection.gate_logit.bias.fill_(value)
    return model


def loss_alone(model, rows=ROWS, **options):
    """The mean over all predicted tokens of all rows, each run alone."""
    losses = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logits = model(ids, **options).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    return torch.cat(losses).double().numpy()


def values(measurement) -> np.ndarray:
    return measurement.to_frame().select_dtypes("number").to_numpy(dtype=float)


MEASUREMENTS = {
    "exit_curve": exit_curve,
    "state_similarity": state_similarity,
    "fixed_point": fixed_point,
    "gate_statistics": gate_statistics,
    "gate_attribution": gate_attribution,
    "token_difficulty": token_difficulty,
    "gate_interventions": gate_interventions,
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_left_padded_batches_equal_single_rows(name):
    model = gated()
    alone = MEASUREMENTS[name](model, ROWS, batch_size=1)
    together = MEASUREMENTS[name](model, ROWS, batch_size=3)
    np.testing.assert_allclose(values(together), values(alone), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_the_model_is_left_as_it_was_found_and_a_second_measurement_equals_the_first(name):
    model = gated(state_noise=0.1, gate_noise=0.1).train()
    before = copy.deepcopy(model.state_dict()), model.config.to_dict()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    drawn = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    first = MEASUREMENTS[name](model, ROWS)
    assert torch.equal(torch.rand(3), drawn[0]) and (random.random(), np.random.rand()) == drawn[1:]
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == before[1]
    for module in model.modules():
        assert module.training and not module._forward_hooks and not module._forward_pre_hooks
    np.testing.assert_array_equal(values(MEASUREMENTS[name](model, ROWS)), values(first))


def test_a_failing_intervention_gives_the_anchor_and_the_hooks_back(monkeypatch):
    model = gated()
    probe, calls = Probe(model), []

    def run(batch):
        calls.append(model.config.anchor)
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return Probe.run(probe, batch)

    monkeypatch.setattr(probe, "run", run)
    with pytest.raises(RuntimeError, match="no memory"):
        gate_interventions(probe, ROWS)
    assert calls == ["prelude", "zeros", "embedding"] and model.config.anchor == "prelude"
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", [*MEASUREMENTS, "projection_contrast"])
def test_every_measurement_has_a_table_a_figure_and_a_sentence(name):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    model = gated()
    found = projection_contrast(model) if name == "projection_contrast" else MEASUREMENTS[name](model, ROWS)
    assert len(found.to_frame()) > 1 and found.headline().endswith(".") and found.reading.endswith(".") and found.title
    for label in (None, "a model"):
        figure, ax = plt.subplots()
        found.plot(ax, label=label)
        figure.canvas.draw()
        plt.close(figure)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.title = "another"


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_model_without_a_loop_is_refused_by_name(name):
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no recurrences"):
        MEASUREMENTS[name](gpt2(), ROWS)
    dense = randomise(type(gated())(gated().config.dense_twin()))
    with pytest.raises(ValueError, match="RecurrentGPTForCausalLM has no recurrences"):
        MEASUREMENTS[name](dense, ROWS)
    with pytest.raises(ValueError, match="GrownLlamaForCausalLM has no recurrences"):
        MEASUREMENTS[name](tiny_grown_llama(depth_plan="0 1 0 2"), ROWS)
    with pytest.raises(ValueError, match="num_recurrences=1 or more"):
        MEASUREMENTS[name](gated(num_recurrences=0), ROWS)


@pytest.mark.parametrize("measure", [gate_statistics, gate_attribution, gate_interventions])
def test_a_looped_model_without_a_gate_is_refused_where_the_gate_is_measured(measure):
    for model in (tiny_model(), gated(gate="none")):
        with pytest.raises(ValueError, match="has no gate to look at"):
            measure(model, ROWS)


# Exits


@pytest.mark.parametrize("family", TINY_MODELS)
def test_the_loss_of_exit_k_is_the_loss_of_a_forward_of_k_passes(family):
    model = TINY_MODELS[family]()
    curve = exit_curve(model, ROWS)
    assert len(curve.loss) == 4 and curve.num_recurrences == 3 and curve.tokens == sum(map(len, ROWS)) - len(ROWS)
    for k in range(model.config.min_recurrences, 4):
        assert abs(curve.loss[k] - loss_alone(model, num_recurrences=k).mean()) < 2e-5


@pytest.mark.parametrize("family", TINY_MODELS)
def test_all_columns_are_those_of_the_curve_that_runs_each_exit_on_its_own(family):
    model = TINY_MODELS[family]()
    most = 3 if family == "mixture_of_recursions" else 5
    frame = exit_curve(model, EVEN, max_recurrences=most).to_frame()
    points = exits_one_by_one(model, [torch.tensor(EVEN)], max_recurrences=most)
    for point in points:
        here = frame.set_index("num_recurrences").loc[point.num_recurrences]
        for name in ("loss", "accuracy", "retention", "kl_to_final", "kl_from_final"):
            assert here[name] == pytest.approx(getattr(point, name), rel=1e-3, abs=2e-5, nan_ok=True)
        if points[0].num_recurrences == 0 and point.gain is not None:
            assert here["gain"] == pytest.approx(point.gain, abs=5e-5)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_the_last_exit_has_all_of_the_gain_and_no_distance_to_itself(injection):
    model = tiny_model(injection=injection)
    said = model.generate(torch.tensor(EVEN), max_new_tokens=6, do_sample=False).tolist()
    curve = exit_curve(model, said)
    assert curve.accuracy[3] >= 0.4 and curve.frac_cum[0] == 0 and curve.frac_cum[3] == 1 and curve.retention[3] == 1
    assert curve.kl_to_final[3] == curve.kl_from_final[3] == 0 and np.isnan(curve.gain[0])
    assert np.nansum(curve.gain) == pytest.approx(curve.loss[0] - curve.loss[3])


def test_exits_beyond_the_trained_number_are_compared_with_the_exit_that_the_model_is_meant_to_take():
    model = gated(num_recurrences=2, trained_recurrences=4)
    curve = exit_curve(model, ROWS)
    assert len(curve.loss) == 5 and curve.num_recurrences == 2 and curve.frac_cum[2] == 1
    again = exit_curve(Probe(model, 3), ROWS, max_recurrences=6)
    assert len(again.loss) == 7 and again.num_recurrences == 3 and again.kl_to_final[3] == 0
    np.testing.assert_allclose(again.loss[:5], curve.loss, atol=1e-6)


def test_an_exit_curve_that_cannot_be_had_is_refused():
    with pytest.raises(ValueError, match="max_recurrences=2 must be at least 3"):
        exit_curve(gated(), ROWS, max_recurrences=2)
    with pytest.raises(ValueError, match="num_recurrences=4 exceeds trained_recurrences=3"):
        exit_curve(tiny_model(injection="hyperconnection"), ROWS, max_recurrences=4)


# Similarity


def cka(x, y):
    """Of (tokens, width) each, through the matrices of tokens by tokens."""
    x, y = (np.asarray(z, dtype=float) for z in (x, y))
    x, y = (z - z.mean(0) for z in (x, y))
    k, l = x @ x.T, y @ y.T
    return (k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum())


def all_states(model):
    """(states, tokens, width), each row run alone."""
    with torch.no_grad():
        runs = [model(torch.tensor([row]), output_recurrences=True).recurrent_states for row in ROWS]
    return np.concatenate([torch.cat(run).numpy() for run in runs], axis=1)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_similarity_is_linear_cka_and_one_with_itself(family):
    model = TINY_MODELS[family]()
    found, expected = state_similarity(model, ROWS, batch_size=3), all_states(model)
    assert found.similarity.shape == (4, 4) and found.tokens == sum(map(len, ROWS))
    np.testing.assert_allclose(found.similarity, [[cka(x, y) for y in expected] for x in expected], atol=1e-5)
    np.testing.assert_allclose(np.diag(found.similarity), 1, atol=1e-12)


def test_similarity_does_not_see_rotation_scale_or_shift():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=generator, dtype=torch.double) * torch.arange(1, 9)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.double)).Q
    y = torch.stack([x, 3 * x @ rotation + 100, torch.zeros_like(x), torch.full_like(x, 0.3)])
    moments = states._Moments()
    moments.add(x[None, :15], y[:, :15])
    moments.add(x[None, 15:], y[:, 15:])
    same, turned, *constant = moments.similarity()[0]
    assert same == pytest.approx(1) and turned == pytest.approx(1) and np.isnan(constant).all()


def test_states_are_compared_with_what_the_layers_of_another_decoder_read():
    model, other = gated(), gpt2()
    found = state_similarity(model, ROWS, other, batch_size=3)
    assert found.similarity.shape == (4, 3) and found.other
    with torch.no_grad():
        runs = [other(torch.tensor([row]), output_hidden_states=True).hidden_states[:3] for row in ROWS]
    layers = np.concatenate([torch.cat(run).numpy() for run in runs], axis=1)
    expected = [[cka(x, y) for y in layers] for x in all_states(model)]
    np.testing.assert_allclose(found.similarity, expected, atol=1e-5)
    assert set(found.to_frame().columns) == {"passes", "layer", "similarity"}


# Fixed points


def measures_of(sequence):
    """step, residual and two_back of a state (passes + 1, width)."""
    h = np.asarray(sequence, dtype=float)
    step, length = np.linalg.norm(np.diff(h, axis=0), axis=1), np.linalg.norm(h[1:], axis=1)
    return step, step / length, np.linalg.norm(h[2:] - h[:-2], axis=1) / length[1:]


PLACE = np.array([3.0, 4.0])
ASIDE = np.array([2.0, -1.5])
SEQUENCES = {
    "converges": [
        [PLACE] * 9,
        [PLACE + 0.5**r * ASIDE for r in range(9)],
        [PLACE + (-0.5) ** r * ASIDE for r in range(9)],
        [PLACE + 0.8**r * ASIDE for r in range(13)],
        [PLACE, PLACE + 0.01 * ASIDE, PLACE + 0.011 * ASIDE],
    ],
    "cycles": [
        [PLACE + (-1) ** r * ASIDE for r in range(9)],
        [PLACE + (1 + 0.5**r) * (-1) ** r * ASIDE for r in range(13)],
        [PLACE + 0.002 * r * ASIDE + (-1) ** r * ASIDE for r in range(9)],
    ],
    "drifts": [
        [(1 + r) * PLACE for r in range(13)],
        [PLACE + r * ASIDE for r in range(13)],
        [np.log(1 + r) * PLACE + ASIDE for r in range(13)],
        [1.5**r * PLACE for r in range(9)],
        [(np.cos(r / 2), np.sin(r / 2)) for r in range(13)],
    ],
}


@pytest.mark.parametrize("verdict, sequence", [(name, s) for name, many in SEQUENCES.items() for s in many])
def test_the_verdict_names_where_a_crafted_sequence_goes(verdict, sequence):
    assert verdict_of(*measures_of(sequence)) == verdict


def test_a_verdict_needs_two_passes():
    with pytest.raises(ValueError, match="1 passes"):
        verdict_of([1.0], [1.0], [])
    with pytest.raises(ValueError, match="max_recurrences=1 must be at least 2"):
        fixed_point(gated(), ROWS, max_recurrences=1)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_a_fixed_point_s_numbers_follow_their_definitions_at_every_pass(family):
    model = TINY_MODELS[family]()
    found = fixed_point(model, ROWS, batch_size=3)
    passes = len(found.step)
    assert passes == (3 if family == "mixture_of_recursions" else 6) and found.wanted == 6
    assert ("no more than 3 passes" in found.headline()) == (passes == 3)
    with torch.no_grad():
        runs = [model(torch.tensor([row]), num_recurrences=passes, output_recurrences=True) for row in ROWS]
    h = torch.cat([torch.cat(run.recurrent_states) for run in runs], dim=1).double()
    step = h.diff(dim=0)
    length = h[1:].norm(dim=-1)
    np.testing.assert_allclose(found.step, step.norm(dim=-1).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.residual, (step.norm(dim=-1) / length).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.two_back, ((h[2:] - h[:-2]).norm(dim=-1) / length[1:]).mean(-1), rtol=1e-4)
    cosine = torch.cosine_similarity(step[1:], step[:-1], dim=-1).mean(-1)
    np.testing.assert_allclose(found.cosine, cosine, atol=1e-4)
    np.testing.assert_allclose(found.contraction, found.step[1:] / found.step[:-1], rtol=1e-6)


def test_a_closed_gate_converges_a_negating_core_cycles_and_a_residual_stream_that_grows_drifts():
    still = fixed_point(hold_gate(gated(), torch.inf), ROWS)
    assert still.verdict == "converges" and not still.step.any() and not still.contraction.any()

    # Blocks that add nothing, and W [h; e] = e - 0.99 h: h goes to and fro around e / 1.99.
    model = hold_gate(gated(), -torch.inf)
    with torch.no_grad():
        for layer in model.model.core:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.injection.proj.weight.copy_(torch.cat([-torch.eye(32), torch.eye(32)], dim=1))
    cycle = fixed_point(model, ROWS)
    assert cycle.verdict == "cycles" and cycle.two_back[-1] < 1e-5
    np.testing.assert_allclose(cycle.cosine, -1, atol=1e-5)

    # A core of one layer that adds the same to whatever it reads.
    grown = tiny_grown_llama(depth_plan="Loop(1-1x3-1)")
    with torch.no_grad():
        grown.model.layers[0].mlp.down_proj.weight.mul_(20)
        grown.model.layers[1].input_layernorm.weight.zero_()
        grown.model.layers[1].mlp.down_proj.weight.mul_(20)
    assert fixed_point(grown, ROWS, max_recurrences=8).verdict == "drifts"


def test_a_model_that_has_weights_for_its_own_passes_only_is_followed_as_far_as_they_go():
    model = tiny_model(injection="hyperconnection")
    assert len(fixed_point(model, ROWS).step) == 3
    with pytest.raises(ValueError, match="num_recurrences=6 exceeds trained_recurrences=3"):
        fixed_point(model, ROWS, max_recurrences=6)


# The gate


def gate_by_hand(model, ids):
    """Of one row: lists over passes of h(r-1), normed h(r-1), normed anchor, g, o, h(r), from the equations."""
    injection, base, found = model.model.injection, model.model, []
    with torch.no_grad():
        hidden = base.embed_tokens(ids) + base.embed_positions(torch.arange(ids.shape[1])[None])
        length = ids.shape[1]
        mask = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)[None, None]
        rest = {"attention_mask": mask, "position_embeddings": None, "key_values": None, "cache_slot": 0}
        for layer in base.prelude:
            hidden = layer(hidden, **rest)
        anchor = state = hidden
        for _ in range(model.config.num_recurrences):
            output = injection.proj(torch.cat([state, anchor], -1))
            for layer in base.core:
                output = layer(output, **rest)
            x, p = injection.state_norm(state), injection.anchor_norm(anchor)
            both = injection.gate_norm(torch.cat([x, p], -1))
            logit = injection.gate_logit(torch.nn.functional.silu(injection.gate_hidden(both)))
            gate = torch.sigmoid(logit / model.config.gate_temperature)
            new = gate * state + (1 - gate) * output
            found.append((state, x, p, gate, output, new))
            state = new
    return [torch.stack(kind)[:, 0].double() for kind in zip(*found, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gate_statistics_follow_the_equations(temperature):
    model = gated(gate_temperature=temperature)
    found = gate_statistics(model, ROWS, batch_size=3)
    runs = [gate_by_hand(model, torch.tensor([row])) for row in ROWS]
    state, _, _, gate, output, new = (torch.cat(kind, dim=1) for kind in zip(*runs, strict=True))
    applied, proposal = ((1 - gate) * output).norm(dim=-1), output.norm(dim=-1)
    expected = {
        "gate": gate.mean((1, 2)),
        "deviation": gate.flatten(1).std(-1, unbiased=False),
        "copied": (gate > 0.95).double().mean((1, 2)),
        "written": (gate < 0.05).double().mean((1, 2)),
        "proposal": proposal.mean(-1),
        "applied": applied.mean(-1),
        "change": (new - state).norm(dim=-1).mean(-1),
        "openness": applied.mean(-1) / proposal.mean(-1),
        "openness_of_tokens": (applied / proposal).mean(-1),
    }
    frame = found.to_frame()
    for name, value in expected.items():
        np.testing.assert_allclose(frame[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert gate.std() > 0.05  # it does move
    assert found.tokens == sum(map(len, ROWS)) and (0 <= found.openness).all() and (found.openness <= 1).all()


@pytest.mark.parametrize("bias", [0.0, 4.0])
def test_the_mean_gate_at_the_published_initialisation_is_the_sigmoid_of_its_bias(bias):
    config = gated(gate_bias_init=bias).config
    torch.manual_seed(0)
    found = gate_statistics(type(gated())(config), ROWS)
    np.testing.assert_allclose(found.gate, 1 / (1 + np.exp(-bias)), atol=1e-2)


def test_the_change_of_a_state_that_the_coda_gets_normed_is_that_of_the_state_itself():
    model = gated(state_init="noise", gate_noise=0.0, state_noise=0.0)
    held = gate_statistics(hold_gate(model, torch.inf), ROWS)
    assert not held.change.any() and not held.openness.any() and (held.copied == 1).all()


def test_openness_is_one_where_all_is_written_and_nothing_where_all_is_copied():
    written = gate_statistics(hold_gate(gated(), -torch.inf), ROWS)
    assert (written.openness == 1).all() and (written.written == 1).all()
    assert not gate_statistics(hold_gate(gated(), torch.inf), ROWS).openness.any()


@pytest.mark.parametrize("concat_norm", [True, False])
def test_gate_attribution_equals_its_definition_and_both_shares_add_up_to_one(concat_norm):
    model = gated(gate_concat_norm=concat_norm)
    injection = model.model.injection
    found = gate_attribution(model, ROWS, batch_size=3, seed=5)
    runs = [gate_by_hand(model, torch.tensor([row])) for row in ROWS]
    x, p = (torch.cat([run[kind] for run in runs], dim=1).float() for kind in (1, 2))
    orders = [np.random.default_rng([5, n]).permutation(len(row)) for n, row in enumerate(ROWS)]
    starts = np.cumsum([0, *map(len, ROWS)])
    order = np.concatenate([start + one for start, one in zip(starts, orders)])
    with torch.no_grad():
        logit = gates.gate_logit(injection, x, p)
        errors = []
        for kind, (a, b) in enumerate(((x[:, order], p), (x, p[:, order]))):
            errors.append((gates.gate_logit(injection, a, b) - logit).double().square().mean(1))
            drop = (errors[kind] / logit.double().var(1, unbiased=False)).mean(-1)
            np.testing.assert_allclose((found.state_drop, found.anchor_drop)[kind], drop, rtol=1e-3)
        # [LN(h); 0] and [0; LN(h_pre)] through the first matrix as the derivative of all that is linear in them.
        both = torch.cat([x, p], -1)
        if concat_norm:
            spread = (both.var(-1, unbiased=False, keepdim=True) + model.config.layer_norm_eps).sqrt()
            centre = torch.eye(64) - torch.full((64, 64), 1 / 64)
            matrix = centre @ torch.diag(injection.gate_norm.weight) @ injection.gate_hidden.weight.T
            z = [x @ matrix[:32] / spread, p @ matrix[32:] / spread]
        else:
            z = [x @ injection.gate_hidden.weight[:, :32].T, p @ injection.gate_hidden.weight[:, 32:].T]
        torch.testing.assert_close(z[0] + z[1], injection.gate_hidden(injection.gate_norm(both)), rtol=1e-4, atol=1e-4)
    variance = [part.double().var(1, unbiased=False) for part in z]
    np.testing.assert_allclose(found.state, (variance[0] / sum(variance)).mean(-1), rtol=1e-4)
    np.testing.assert_allclose(found.state_shuffled, (errors[0] / sum(errors)).mean(-1), rtol=1e-3)
    frame = found.to_frame()
    for name in ("", "_shuffled"):
        pair = frame[f"state{name}"], frame[f"anchor{name}"]
        assert all(((0 <= share) & (share <= 1)).all() for share in pair)
        np.testing.assert_allclose(pair[0] + pair[1], 1)


def test_a_gate_that_reads_one_input_is_attributed_to_it():
    for half, share in ((slice(32, 64), 1.0), (slice(0, 32), 0.0)):
        model = gated(gate_concat_norm=False)
        with torch.no_grad():
            model.model.injection.gate_hidden.weight[:, half] = 0
        found = gate_attribution(model, ROWS)
        assert (found.state == share).all() and (found.state_shuffled == share).all()
        assert ((found.state_drop > 0) == bool(share)).all() and ((found.anchor_drop > 0) != bool(share)).all()


def test_projection_contrast_knows_which_half_reads_the_state():
    recurrent, looped = gated(), tiny_model(injection="linear", **SMALL, num_key_value_heads=2)
    matrix = torch.cat([2 * torch.eye(32), -torch.eye(32)], dim=1)
    with torch.no_grad():
        recurrent.model.injection.proj.weight.copy_(matrix)
        looped.model.injection.proj.weight.copy_(torch.cat([matrix[:, 32:], matrix[:, :32]], dim=1))
    for model in (recurrent, looped):
        found = projection_contrast(model)
        np.testing.assert_allclose(found.cosine, -1, atol=1e-6)
        assert found.above_half == 0
        np.testing.assert_allclose(found.spectra["state"], 2, atol=1e-5)
        np.testing.assert_allclose(found.spectra["anchor"], 1, atol=1e-5)
    assert set(found.spectra) == {"state", "anchor"}
    first = recurrent.model.injection.gate_hidden.weight.detach().double().numpy()
    spectra = projection_contrast(recurrent).spectra
    for name, half in (("gate_state", first[:, :32]), ("gate_anchor", first[:, 32:])):
        np.testing.assert_allclose(spectra[name], np.linalg.svd(half, compute_uv=False), rtol=1e-3, atol=1e-5)
    # As u = W [h; e] says: without its state half, what the core reads no longer depends on the state.
    with torch.no_grad():
        recurrent.model.injection.proj.weight[:, :32] = 0
        reads = [recurrent.model.injection("read", torch.ones(1, 1, 32), torch.randn(1, 1, 32), 0, None) for _ in "ab"]
    assert torch.equal(*reads)


def test_rows_whose_halves_point_the_same_way_count_as_above_one_half():
    model = gated()
    with torch.no_grad():
        weight = model.model.injection.proj.weight
        weight[:8, 32:] = weight[:8, :32]
        weight[8:, 32:] = -weight[8:, :32]
    found = projection_contrast(model)
    assert found.above_half == 0.25 and found.cosine.mean() == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="injection='linear'"):
        projection_contrast(tiny_model(injection="none"))


# Which tokens


@pytest.mark.parametrize("model", [gpt2, gated, tiny_model], ids=["gpt2", "recurrent_gpt", "looped_gpt"])
def test_token_losses_are_those_of_each_text_alone(model):
    model = model()
    np.testing.assert_allclose(token_losses(model, ROWS, batch_size=3), loss_alone(model), atol=2e-5)


def test_the_logits_that_exist_at_once_do_not_matter(monkeypatch):
    model = gated()
    whole = values(exit_curve(model, ROWS)), token_losses(model, ROWS)
    monkeypatch.setattr(states, "AT_ONCE", 5)
    np.testing.assert_allclose(values(exit_curve(model, ROWS)), whole[0], atol=1e-6)
    np.testing.assert_allclose(token_losses(model, ROWS), whole[1], atol=1e-6)


def test_deciles_have_equally_many_tokens_and_find_a_line():
    generator = np.random.default_rng(0)
    score = generator.exponential(size=200)
    found = Deciles.of(score, 3 * score - 1)
    assert (found.tokens == 20).all() and found.r_squared == pytest.approx(1)
    np.testing.assert_allclose(found.gain, 3 * found.score - 1)
    assert (np.diff(found.score) > 0).all() and found.score.mean() == pytest.approx(score.mean())
    uneven = Deciles.of(score[:197], generator.normal(size=197))
    assert uneven.tokens.sum() == 197 and set(uneven.tokens) == {19, 20}
    expected = np.corrcoef(uneven.score, uneven.gain)[0, 1] ** 2
    assert uneven.r_squared == pytest.approx(expected)


def test_difficulty_bins_the_gain_of_all_passes_by_this_model_s_first_exit_and_by_another_model():
    model, other = gated(), gpt2()
    before, after = loss_alone(model, num_recurrences=0), loss_alone(model)
    score = token_losses(other, ROWS)
    found = token_difficulty(model, ROWS, difficulty=score, batch_size=3)
    for deciles, by in ((found.initial, before), (found.independent, score)):
        for name, values_ in (("score", by), ("gain", before - after)):
            expected = [values_[chosen].mean() for chosen in np.array_split(np.argsort(by), 10)]
            np.testing.assert_allclose(getattr(deciles, name), expected, atol=1e-4)
    assert list(found.to_frame()["by"]) == ["initial"] * 10 + ["independent"] * 10
    assert "independent score" in found.headline()


def test_a_difficulty_that_does_not_fit_the_texts_is_refused():
    with pytest.raises(ValueError, match=r"difficulty of shape \(3,\) must be \(50,\)"):
        token_difficulty(gated(), ROWS, difficulty=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="finite"):
        token_difficulty(gated(), ROWS, difficulty=[np.nan] * 50)
    with pytest.raises(ValueError, match="have 3 tokens to predict"):
        token_difficulty(gated(), [[1, 2, 3, 4]])


# Interventions


def test_a_gate_held_at_one_makes_every_exit_the_one_without_a_pass():
    curve = exit_curve(hold_gate(gated(), torch.inf), ROWS)
    assert (curve.loss == curve.loss[0]).all() and not curve.kl_to_final.any()
    assert np.isnan(curve.frac_cum).all()


def test_interventions_on_the_gate_are_those_of_a_model_whose_gate_is_held():
    model = gated(gate_temperature=3.0)
    found = gate_interventions(model, ROWS).loss
    assert found["clean"] == pytest.approx(loss_alone(model).mean(), abs=2e-5)
    assert found["gate = 1"] == pytest.approx(loss_alone(model, num_recurrences=0).mean(), abs=2e-5)
    assert found["gate = 1"] == exit_curve(hold_gate(gated(), torch.inf), ROWS).loss[0]
    assert found["gate = 0"] == pytest.approx(loss_alone(hold_gate(gated(), -torch.inf)).mean(), abs=2e-5)
    assert len({round(loss, 5) for loss in found.values()}) == 6


@pytest.mark.parametrize("own", ["prelude", "embedding"])
def test_interventions_on_the_anchor_are_those_of_a_model_with_that_anchor(own, tmp_path):
    gated(anchor=own).save_pretrained(tmp_path)
    model = type(gated()).from_pretrained(tmp_path)
    found = gate_interventions(model, ROWS).loss
    others = {"zeros", "embedding", "previous", "prelude"} - {own}
    assert {name for name in found if name.startswith("anchor")} == {f"anchor = {anchor}" for anchor in others}
    for anchor in others:
        assert found[f"anchor = {anchor}"] == pytest.approx(loss_alone(gated(anchor=anchor)).mean(), abs=2e-5)
    assert model.config.anchor == own


def test_a_probe_s_number_of_passes_is_the_one_that_is_measured():
    model = gated()
    for measure in (gate_statistics, gate_attribution):
        assert (
            len(measure(Probe(model, 5), ROWS).to_frame())
            == len(measure(model, ROWS, num_recurrences=5).to_frame())
            == 5
        )
    assert state_similarity(model, ROWS, num_recurrences=2).similarity.shape == (3, 3)
    rows = next(batches(ROWS, 4))
    assert len(Probe(model, 5).run(rows).recurrent_states) == 6
