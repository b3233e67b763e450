"""RecurrentGPT is section 2 of its specification: recurrence, gate, noise, initialisation, exits, ablations."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    HEAVY_TAIL,
    gradients,
    is_bit_equal,
    next_token_loss,
    randomise,
    tiny_recurrent_config,
    tiny_recurrent_gpt,
)
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, set_seed

from modeling_looped import RecurrentGPTForCausalLM, RecurrentGPTModel
from modeling_looped.keyed_noise import Noise, NoiseKey, set_noise_key


IDS = torch.randint(1, 97, (2, 11), generator=torch.Generator().manual_seed(1))
STATE, GATE, START = 0, 1, 2  # streams of noise
VARIANTS = {
    "default": {},
    "injection none": {"injection": "none"},
    "injection additive": {"injection": "additive"},
    "gate none": {"gate": "none"},
    "gate and injection none": {"gate": "none", "injection": "none"},
    "anchor embedding": {"anchor": "embedding"},
    "anchor previous": {"anchor": "previous"},
    "anchor previous additive": {"anchor": "previous", "injection": "additive"},
    "anchor zeros": {"anchor": "zeros"},
    "no concat norm": {"gate_concat_norm": False},
    "temperature": {"gate_temperature": 0.5},
    "element noise": {"gate_noise_shape": "element"},
    "heavy tail": HEAVY_TAIL,
    "gated from noise": {"state_init": "noise"},
    "lora": {"lora_rank": 4},
    "no prelude": {"num_prelude_layers": 0, "anchor": "embedding"},
    "no coda": {"num_coda_layers": 0},
    "core alone": {"num_prelude_layers": 0, "num_coda_layers": 0},
}
every_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
close = torch.testing.assert_close


def given_noise(like: torch.Tensor, recurrence: int, stream: int, truncated_at: float | None = None) -> torch.Tensor:
    """Known numbers in place of random ones."""
    generator = torch.Generator().manual_seed(10 * recurrence + stream)
    return torch.randn(like.shape, generator=generator).clamp(-3, 3)


@torch.no_grad()
def written_out(model: RecurrentGPTForCausalLM, ids: torch.Tensor, recurrences: int) -> SimpleNamespace:
    """
    Sections 2.2 to 2.4 as formulas, with the noise of `given_noise` in a model that trains: `logits` of every exit,
    `states` h(0), h(1), ... and, of every pass, `proposals` o and `gates` g.
    """
    config, base = model.config, model.model
    sigma_x, sigma_g = (config.state_noise, config.gate_noise) if model.training else (0, 0)

    def norm(x, layer_norm):
        x = x - x.mean(-1, keepdim=True)
        return layer_norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + config.layer_norm_eps).sqrt()

    def linear(x, module, recurrence):
        weight = module.weight
        if getattr(module, "lora", None) is not None:
            weight = weight + 2 * module.lora.up[recurrence] @ module.lora.down[recurrence]
        return x @ weight.T

    def block(x, layer, r=None):
        attention, mlp = layer.self_attn, layer.mlp
        y = norm(x, layer.input_layernorm)
        q, k, v = (
            linear(y, projection, r).unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores += torch.full(scores.shape[2:], -math.inf).triu(1)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), attention.o_proj, r)
        y = linear(norm(x, layer.post_attention_layernorm), mlp.up_proj, r)
        return x + linear(y * (1 + torch.erf(y / math.sqrt(2))) / 2, mlp.down_proj, r)

    def exit(h):
        h = norm(h, base.injection.norm) if config.state_init == "noise" else h
        for layer in base.coda:
            h = block(h, layer)
        return norm(h, base.norm) @ base.embed_tokens.weight.T

    x = base.embed_tokens.weight[ids] + base.embed_positions.weight[: ids.shape[1]]
    h = x
    for layer in base.prelude:
        h = block(h, layer)
    anchors = {"prelude": h, "embedding": x, "zeros": torch.zeros_like(h)}
    if config.state_init == "noise":
        h = math.sqrt(2 / (5 * config.hidden_size)) * given_noise(h, 0, START)
    found = SimpleNamespace(logits=[exit(h)], states=[h], proposals=[], gates=[])
    for r in range(recurrences):
        anchor = h if config.anchor == "previous" else anchors[config.anchor]
        read = h + sigma_x * given_noise(h, r, STATE)
        if config.injection == "linear":
            o = torch.cat([read, anchor], dim=-1) @ base.injection.proj.weight.T
        else:
            o = read + anchor if config.injection == "additive" else read
        for layer in base.core:
            o = block(o, layer, r)
        g = torch.zeros_like(o)
        if config.gate == "mlp":
            gate = base.injection
            both = torch.cat([norm(h, gate.state_norm), norm(anchor, gate.anchor_norm)], dim=-1)
            both = norm(both, gate.gate_norm) if config.gate_concat_norm else both
            hidden = both @ gate.gate_hidden.weight.T
            logit = (hidden * torch.sigmoid(hidden)) @ gate.gate_logit.weight.T + gate.gate_logit.bias
            noise = given_noise(o[..., :1] if config.gate_noise_shape == "token" else o, r, GATE)
            g = 1 / (1 + torch.exp(-(logit / config.gate_temperature + sigma_g * noise)))
        h = g * h + (1 - g) * o
        found.logits.append(exit(h))
        for name, value in (("states", h), ("proposals", o), ("gates", g)):
            getattr(found, name).append(value)
    return found


@torch.no_grad()
def run(model: RecurrentGPTForCausalLM, ids: torch.Tensor = IDS, **kwargs):
    return model(ids, **{"use_cache": False, "output_recurrences": True, "output_exits": True, **kwargs})


def depths(model: RecurrentGPTForCausalLM) -> range:
    """0 to 3, where 0 runs any layer at all."""
    return range(0 if len(model.model.prelude) + len(model.model.coda) else 1, 4)


def forced_gate(bias: float, **fields) -> RecurrentGPTForCausalLM:
    model = tiny_recurrent_gpt(**fields)
    torch.nn.init.constant_(model.model.injection.gate_logit.bias, bias)
    return model


# The equations


@every_variant
@pytest.mark.parametrize("training", [False, True])
def test_every_exit_is_the_specification_written_out(fields, training):
    model = tiny_recurrent_gpt(**fields).train(training)
    model.model.noise = lambda *_: given_noise
    expected = written_out(model, IDS, 3)
    for k in depths(model):
        close(run(model, num_recurrences=k).logits, expected.logits[k], atol=1e-4, rtol=0)
    assert all((a - b).abs().max() > 0.5 for i, a in enumerate(expected.logits) for b in expected.logits[:i])
    if training and (model.config.state_noise or model.config.gate_noise):
        assert (expected.logits[3] - written_out(model.eval(), IDS, 3).logits[3]).abs().max() > 0.05


def test_gate_statistics_are_those_of_the_gates():
    model = forced_gate(0.0)
    output, expected = run(model), written_out(model, IDS, 3)
    gates, proposals = torch.stack(expected.gates), torch.stack(expected.proposals)
    statistics = {
        "mean": gates.mean(-1),
        "copied": (gates > 0.95).float().mean(-1),
        "written": (gates < 0.05).float().mean(-1),
        "proposal_norm": proposals.norm(dim=-1),
        "update_norm": ((1 - gates) * proposals).norm(dim=-1),
    }
    close(output.gate_statistics, statistics, atol=1e-4, rtol=1e-5)
    assert statistics["copied"].mean() > 0.05 and statistics["written"].mean() > 0.05
    assert run(model, output_recurrences=False).gate_statistics is None
    assert run(tiny_recurrent_gpt(gate="none")).gate_statistics is None


@every_variant
def test_an_exit_after_k_passes_is_what_a_deeper_run_taps_after_k(fields):
    model = tiny_recurrent_gpt(**fields)
    whole = run(model)
    assert len(whole.recurrent_states) == len(whole.exit_states) == 4
    for k in depths(model):
        exit = run(model, num_recurrences=k)
        assert torch.equal(exit.logits, model.logits(whole.exit_states[k]))
        assert torch.equal(exit.recurrent_states[-1], whole.recurrent_states[k])
        assert torch.equal(exit.exit_states[-1], whole.exit_states[k])


@every_variant
def test_cached_logits_equal_uncached_logits_in_every_variant(fields):
    model, logits, cache = tiny_recurrent_gpt(**fields), [], None
    for chunk in IDS.split([5, 1, 4, 1], dim=1):
        output = run(model, chunk, cache=cache, use_cache=True, output_exits=False)
        logits, cache = [*logits, output.logits], output.cache
    close(torch.cat(logits, dim=1), run(model).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_a_gate_of_one_keeps_the_state_bit_for_bit_though_there_is_noise(training):
    model = forced_gate(1e4).train(training)
    output = run(model)
    first = run(model, num_recurrences=0).logits
    assert torch.equal(output.logits, first) and torch.equal(run(model, num_recurrences=2).logits, first)
    assert all(torch.equal(state, output.recurrent_states[0]) for state in output.recurrent_states)


def core_outputs(model: RecurrentGPTForCausalLM) -> list[torch.Tensor]:
    """A list to which each pass adds what the core's last layer gave."""
    outputs = []
    model.model.core[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    return outputs


def test_a_gate_of_zero_writes_the_proposal_bit_for_bit():
    model = forced_gate(-1e4)
    proposals = core_outputs(model)
    states = run(model).recurrent_states[1:]
    assert len(states) == 3 and all(map(torch.equal, states, proposals))


def test_each_state_lies_between_the_last_one_and_the_proposal():
    model = forced_gate(0.0)
    proposals = core_outputs(model)
    states = run(model).recurrent_states
    for before, proposal, after in zip(states[:-1], proposals, states[1:], strict=True):
        low, high = torch.minimum(before, proposal), torch.maximum(before, proposal)
        assert ((low <= after) & (after <= high)).all()
        assert ((low < after) & (after < high)).float().mean() > 0.9


@pytest.mark.parametrize("fields", [{}, {"kv_sharing": "first"}, {"gate_noise_shape": "element"}, HEAVY_TAIL], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_no_logit_depends_on_later_tokens_at_any_exit(fields, training):
    model = tiny_recurrent_gpt(**fields).train(training)
    set_noise_key(model, NoiseKey(seed=3))
    changed = IDS.clone()
    changed[:, 6:] = changed[:, 6:] % 96 + 1
    exits = zip(run(model).exit_states, run(model, changed).exit_states, strict=True)
    for k, (one, other) in enumerate(exits):
        close(one[:, :6], other[:, :6], atol=1e-5, rtol=0)
        assert k == 0 or (one - other)[:, 6:].abs().max() > 0.1


@pytest.mark.parametrize("fields", [{}, {"loss_per_recurrence": True}], ids=str)
@pytest.mark.parametrize("recurrences", [1, 2, 3])
def test_gradients_reach_every_parameter_at_every_depth(fields, recurrences):
    model = tiny_recurrent_gpt(**fields).train()
    found = gradients(model, model(IDS, labels=IDS, num_recurrences=recurrences).loss)
    parts = ("prelude", "core", "coda", "injection.proj", "injection.gate_logit", "embed_positions")
    assert all(any(part in name for name in found) for part in parts)
    assert all(gradient.abs().max() > 0 for gradient in found.values())


@pytest.mark.parametrize("recorded", ["output_hidden_states", "output_attentions"])
def test_exits_are_not_mixed_with_recorded_layers(recorded):
    model = tiny_recurrent_gpt()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="output_exits=True"):
        run(model, **{recorded: True})
    assert len(run(model, output_exits=False, **{recorded: True})[recorded.removeprefix("output_")]) >= 8


def test_the_state_stays_in_fp32_under_autocast():
    model = tiny_recurrent_gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states = run(model).recurrent_states
    assert {state.dtype for state in states} == {torch.float32}


# Sizes and initialisation


@pytest.mark.parametrize("recurrences", [1, 3, 10])
def test_the_tiny_model_of_the_specification_has_its_parameters_at_every_depth(recurrences):
    config = tiny_recurrent_config(max_position_embeddings=32, num_recurrences=recurrences)
    assert RecurrentGPTForCausalLM(config).num_parameters() == 226_240


def published(tmp_path, **fields) -> list[RecurrentGPTModel]:
    """New models, and the new gate and injection beside the weights of a checkpoint that has neither."""
    config = tiny_recurrent_config(hidden_size=128, **fields)
    old = RecurrentGPTModel(tiny_recurrent_config(hidden_size=128, gate="none", injection="none"))
    randomise(old).save_pretrained(tmp_path)
    overrides = {"gate": "mlp", "injection": "linear", **fields}
    loaded, info = RecurrentGPTModel.from_pretrained(tmp_path, output_loading_info=True, **overrides)
    new = {name for name, _ in loaded.named_parameters() if name.startswith("injection.")}
    assert info["missing_keys"] == new and len(new) == 7 and not info["unexpected_keys"]
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in old.state_dict().items())
    return [AutoModelForCausalLM.from_config(config).model, AutoModel.from_config(config), loaded]


def test_the_gate_starts_at_its_bias_in_new_models_and_beside_loaded_weights(tmp_path):
    set_seed(0)
    for model in published(tmp_path):
        assert (model.injection.gate_logit.bias == 4).all()
        for module in (model.injection.gate_logit, model.injection.gate_hidden, model.injection.proj):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.03)
        with torch.no_grad():
            means = model.eval()(IDS, output_recurrences=True).gate_statistics["mean"]
        assert means.mean().item() == pytest.approx(torch.tensor(4.0).sigmoid().item(), abs=1e-3)
        assert means.mean().item() == pytest.approx(0.98201, abs=1e-3)
    assert all((model.injection.gate_logit.bias == -2).all() for model in published(tmp_path, gate_bias_init=-2.0))


@pytest.mark.parametrize(("fields", "dense"), [({}, 8), ({"num_dense_layers": 50}, 50), ({"num_recurrences": 10}, 22)])
def test_weights_that_write_to_the_residual_stream_start_smaller(fields, dense):
    set_seed(0)
    model = RecurrentGPTForCausalLM(tiny_recurrent_config(hidden_size=128, **fields))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (4 if name.endswith("bias") else 1)).all(), name
        else:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.02 / math.sqrt(2 * dense) if small else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


# Noise


def loss_of(model: RecurrentGPTForCausalLM, key: NoiseKey | None = None) -> torch.Tensor:
    set_noise_key(model, key)
    return model(IDS, labels=IDS, use_cache=False).loss


QUIET = {"state_noise": 0.0, "gate_noise": 0.0}
NOISES = {"state": {"gate_noise": 0.0}, "gate": {"state_noise": 0.0}, "both": {}}


@pytest.mark.parametrize("fields", NOISES.values(), ids=NOISES)
def test_noise_is_for_training_unless_asked_for_at_evaluation(fields):
    quiet = loss_of(tiny_recurrent_gpt(**QUIET).train())
    model = tiny_recurrent_gpt(**fields)
    assert torch.equal(loss_of(model), quiet)
    for noisy in (model.train(), tiny_recurrent_gpt(noise_at_eval=True, **fields)):
        losses = {loss_of(noisy).item() for _ in range(3)} | {quiet.item()}
        assert len(losses) == 4, "fresh in every forward"


def test_noise_is_fresh_in_every_pass_and_of_one_number_a_token_on_the_gate():
    calls = []

    def noise(like, recurrence, stream, truncated_at=None):
        calls.append((recurrence, stream, tuple(like.shape)))
        return given_noise(like, recurrence, stream)

    for shape, channels in (("token", 1), ("element", 64)):
        calls.clear()
        model = tiny_recurrent_gpt(gate_noise_shape=shape).train()
        model.model.noise = lambda *_: noise
        run(model)
        steps = [((r, STATE, (2, 11, 64)), (r, GATE, (2, 11, channels))) for r in range(3)]
        assert calls == [call for step in steps for call in step]


KEYS = [NoiseKey(), NoiseKey(seed=1), NoiseKey(step=1), NoiseKey(micro_step=1), NoiseKey(first_row=1)]


@pytest.mark.parametrize("fields", [{}, {"gate_noise_shape": "element"}, {"gate": "none"}, HEAVY_TAIL], ids=str)
def test_a_noise_key_repeats_the_loss_and_another_key_gives_another(fields):
    model = tiny_recurrent_gpt(**fields).train()
    losses = [loss_of(model, key) for key in KEYS]
    assert len({loss.item() for loss in losses}) == len(KEYS)
    assert all(torch.equal(loss_of(model, key), loss) for key, loss in zip(KEYS, losses, strict=True))
    assert loss_of(model) != loss_of(model), "without a key torch's generator goes on"
    torch.manual_seed(0)
    once = loss_of(model)
    torch.manual_seed(0)
    assert torch.equal(loss_of(model), once)


@pytest.mark.parametrize("fields", [{}, HEAVY_TAIL], ids=["default", "heavy_tail"])
def test_the_rows_of_a_rank_have_the_noise_of_the_whole_batch(fields):
    model = tiny_recurrent_gpt(**fields).train()
    ids = IDS.repeat(2, 1)
    set_noise_key(model, NoiseKey(seed=5, step=2))
    whole = run(model, ids).logits
    assert (whole[0] - whole[2]).abs().max() > 0.1, "equal rows have noise of their own"
    set_noise_key(model, NoiseKey(seed=5, step=2, first_row=2))
    close(run(model, ids[2:]).logits, whole[2:], atol=1e-5, rtol=0)


def test_keyed_noise_at_evaluation_is_the_same_with_a_cache():
    model = tiny_recurrent_gpt(noise_at_eval=True)
    set_noise_key(model, NoiseKey(seed=5))
    cache, logits = None, []
    for chunk in IDS.split([5, 1, 5], dim=1):
        output = run(model, chunk, cache=cache, use_cache=True, output_exits=False)
        logits, cache = [*logits, output.logits], output.cache
    close(torch.cat(logits, dim=1), run(model).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("key", [NoiseKey(3, 4, 1, 7), None], ids=["keyed", "global"])
@pytest.mark.parametrize("truncated_at", [None, 3.0])
def test_noise_is_standard_normal_and_independent_in_every_direction(key, truncated_at):
    torch.manual_seed(0)
    noise, like = Noise(key, torch.arange(50)[None], 40), torch.empty(40, 50, 60)
    first, later, other = (noise(like, *place, truncated_at) for place in ((0, 0), (1, 0), (0, 1)))
    probabilities = torch.tensor([0.02, 0.16, 0.5, 0.84, 0.98])
    inside = 1 if truncated_at is None else math.erf(truncated_at / math.sqrt(2))
    quantiles = math.sqrt(2) * torch.erfinv(inside * (2 * probabilities - 1))
    close(first.flatten().quantile(probabilities), quantiles, atol=0.03, rtol=0)
    assert 3.5 < first.abs().max() < 6 if truncated_at is None else 2.9 < first.abs().max() <= truncated_at
    shifted = [first.roll(1, dimension) for dimension in range(3)]
    assert all(abs((first * one).mean()) < 0.015 for one in (later, other, *shifted))


# Losses, exits and relaxed recursion


def test_the_loss_per_recurrence_is_the_mean_over_the_exits_but_the_first():
    model = tiny_recurrent_gpt(loss_per_recurrence=True, **QUIET).train()
    for recurrences in (1, 2, 3):
        exits = [next_token_loss(logits, IDS) for logits in written_out(model, IDS, recurrences).logits]
        loss = model(IDS, labels=IDS, num_recurrences=recurrences).loss
        close(loss, sum(exits[1:]) / recurrences, atol=1e-5, rtol=0)
        close(model.eval()(IDS, labels=IDS, num_recurrences=recurrences).loss, exits[-1], atol=1e-5, rtol=0)
        model.train()


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}], ids=["plain", "lora"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fields", [{}, {"loss_per_recurrence": True}, {"backprop_recurrences": 2}, HEAVY_TAIL])
def test_activation_checkpointing_repeats_keyed_noise_and_each_pass_s_weights(fields, lora, reentrant):
    model = tiny_recurrent_gpt(**fields, **lora).train()
    loss = loss_of(model, NoiseKey(7))
    plain = gradients(model, loss)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    again = loss_of(model, NoiseKey(7))
    assert torch.equal(loss, again) and is_bit_equal(gradients(model, again), plain)
    if lora and "backprop_recurrences" not in fields:
        ups = [gradient for name, gradient in plain.items() if name.endswith("lora.up")]
        assert len(ups) == 12 and all((up.flatten(1).abs().amax(1) > 0).all() for up in ups)


def test_low_rank_weights_start_as_the_model_without_them():
    set_seed(0)
    model = tiny_recurrent_gpt()
    relaxed = RecurrentGPTForCausalLM(tiny_recurrent_config(lora_rank=4)).eval()
    new, _ = relaxed.load_state_dict(model.state_dict(), strict=False)
    assert len(new) == 24 and all(".core." in name and ".lora." in name for name in new)
    assert torch.equal(run(relaxed).logits, run(model).logits)
    for down in (parameter for name, parameter in relaxed.named_parameters() if name.endswith("lora.down")):
        assert down.shape[:2] == (3, 4) and down.std().item() == pytest.approx(down.shape[-1] ** -0.5, rel=0.1)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_each_pass_has_low_rank_weights_of_its_own(changed):
    model = tiny_recurrent_gpt(lora_rank=4)
    before = run(model).exit_states
    model.model.core[1].mlp.up_proj.lora.up.data[changed] += 1
    after = run(model).exit_states
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [k <= changed for k in range(4)]


# The twins


def test_the_dense_twin_is_a_gpt2_without_biases():
    config = tiny_recurrent_config(num_dense_layers=5).dense_twin()
    model = randomise(RecurrentGPTForCausalLM(config)).eval()
    assert str(config.plan()) == "5x1" and not hasattr(model.model, "injection")
    settings = {"vocab_size": 97, "n_positions": 128, "n_embd": 64, "n_layer": 5, "n_head": 4}
    gpt2 = GPT2LMHeadModel(GPT2Config(**settings, activation_function="gelu")).eval()
    base, weights = model.model, {name: torch.zeros_like(value) for name, value in gpt2.state_dict().items()}
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = base.embed_tokens.weight
    weights |= {"transformer.wpe.weight": base.embed_positions.weight, "transformer.ln_f.weight": base.norm.weight}
    for i, layer in enumerate(base.prelude):
        attention, mlp = layer.self_attn, layer.mlp
        fused = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        weights |= {
            f"transformer.h.{i}.ln_1.weight": layer.input_layernorm.weight,
            f"transformer.h.{i}.attn.c_attn.weight": fused.T,
            f"transformer.h.{i}.attn.c_proj.weight": attention.o_proj.weight.T,
            f"transformer.h.{i}.ln_2.weight": layer.post_attention_layernorm.weight,
            f"transformer.h.{i}.mlp.c_fc.weight": mlp.up_proj.weight.T,
            f"transformer.h.{i}.mlp.c_proj.weight": mlp.down_proj.weight.T,
        }
    gpt2.load_state_dict(weights)
    with torch.no_grad():
        close(model(IDS).logits, gpt2(IDS).logits, atol=1e-5, rtol=0)
        text, expected = (one.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0) for one in (model, gpt2))
    assert torch.equal(text, expected)


def test_the_heavy_tail_twin_starts_from_noise_that_evaluation_repeats():
    config = tiny_recurrent_config().heavy_tail_twin()
    assert (config.gate, config.state_init, config.trained_recurrences) == ("none", "noise", 6)
    model = randomise(RecurrentGPTForCausalLM(config)).eval()
    whole = run(model)
    assert torch.equal(run(model).logits, whole.logits)
    for row in range(2):
        close(run(model, IDS[row : row + 1]).logits[0], whole.logits[row], atol=1e-5, rtol=0)
    model.train()
    assert (run(model).logits - run(model).logits).abs().max() > 0.1
    prelude_output = torch.empty(20, 30, 64)
    start = model.model.injection.open(prelude_output, model.model.noise(torch.arange(30)[None], 20))
    deviation = math.sqrt(2 / (5 * 64))
    assert start.std().item() == pytest.approx(0.9866 * deviation, rel=0.02) and start.abs().max() <= 3.001 * deviation


# Learned positions


def shorter(**fields) -> RecurrentGPTForCausalLM:
    return tiny_recurrent_gpt(max_position_embeddings=16, **fields)


@pytest.mark.parametrize("settings", [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_a_text_may_fill_every_position_and_is_refused_beyond_before_any_forward(settings):
    model, forwards = shorter(), []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    assert model.generate(IDS, max_new_tokens=6, do_sample=False, **settings).shape == (2, 17)
    forwards.clear()
    with pytest.raises(ValueError, match="max_position_embeddings=16"):
        model.generate(IDS, max_new_tokens=7, do_sample=False, **settings)
    assert not forwards


def test_a_forward_past_the_last_position_is_refused():
    model, ids = shorter(), IDS.repeat(1, 2)
    assert run(model, ids[:, :16]).logits.shape == (2, 16, 97)
    cache = run(model, ids[:, :16], use_cache=True).cache
    for arguments in ({"ids": ids[:, :17]}, {"ids": ids[:, :1], "cache": cache, "output_exits": False}):
        with pytest.raises(ValueError, match="Position 16 is past the end.*max_position_embeddings=16"):
            run(model, **arguments)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_padding_on_the_left_takes_no_positions(implementation):
    model, ids = shorter(), torch.nn.functional.pad(IDS, (10, 0))
    mask = (ids != 0).long()
    mask[1, :14] = 0
    settings = {"max_new_tokens": 5, "do_sample": False}
    text = model.generate(ids * mask, attention_mask=mask, cache_implementation=implementation, **settings)
    for row, first in ((0, 10), (1, 14)):
        assert torch.equal(text[row, first:], model.generate(ids[row : row + 1, first:], **settings)[0])
    with pytest.raises(ValueError, match="max_position_embeddings=16"):
        model.generate(ids * mask, attention_mask=mask, max_new_tokens=7)
