"""Mixture-of-Recursions: who runs which pass, what that does to the states, and what the routers learn from it."""

import pytest
import torch
import torch.nn.functional as F
from conftest import randomise
from transformers import GenerationConfig

from modeling_looped import MixtureOfRecursionsConfig, MixtureOfRecursionsForCausalLM, RecurrentGPTConfig


PASSES, ALPHA = 3, 0.1


def tiny_mixture(**fields) -> MixtureOfRecursionsForCausalLM:
    """Loop(1-2x3-1), width 64, 97 tokens, in eval mode."""
    shape = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_core_layers": 2}
    config = MixtureOfRecursionsConfig(**{**shape, "num_recurrences": PASSES, "max_position_embeddings": 64, **fields})
    return randomise(MixtureOfRecursionsForCausalLM(config)).eval()


def prompt(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def recorded_passes(model) -> list[torch.Tensor]:
    """A list to which every pass over the core adds its input."""
    inputs = []
    model.model.core[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    return inputs


# One text, one token at a time: section 13.2 written out, without a mask, a gather or a batch


def block(layer, queries: torch.Tensor, positions: list[int], memory: dict[int, torch.Tensor], own: bool) -> torch.Tensor:
    """
    One pre-norm block on the tokens at `positions`, in order. With `own` they attend to one another alone, else to
    the normed inputs that `memory` holds for positions up to theirs.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(queries)
    if own:
        memory = dict(zip(positions, normed))
    output = []
    for row, position in zip(range(len(positions)), positions):
        seen = torch.stack([memory[p] for p in sorted(memory) if p <= position])
        query = attention.q_proj(normed[row]).view(4, 1, 16)
        key, value = (project(seen).view(-1, 4, 16).transpose(0, 1) for project in (attention.k_proj, attention.v_proj))
        weights = (query @ key.transpose(1, 2) / 4).softmax(-1)
        output.append(attention.o_proj((weights @ value).transpose(0, 1).reshape(-1)))
    hidden = queries + torch.stack(output)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@torch.no_grad()
def reference(model, ids: torch.Tensor, training: bool) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Logits of one row, the routers' loss in training, and the positions that each pass runs."""
    base, config, length = model.model, model.config, len(ids)
    shared = config.kv_sharing == "first"
    state = base.embed_tokens(ids) + base.embed_positions.weight[:length]
    everyone = list(range(length))
    for layer in base.prelude:
        state = block(layer, state, everyone, {}, own=True)
    runs, loss, memories = [], torch.zeros(()), [{} for _ in base.core]
    by_token = config.routing == "token_choice"
    if by_token:
        logits = base.router[0](state)
        depth, weights = logits.argmax(-1), logits.softmax(-1).amax(-1)
        share = F.one_hot(depth, PASSES).float().mean(0)
        loss = 0.1 * PASSES * (logits.softmax(-1).mean(0) * share).sum() + 1e-5 * (logits.logsumexp(-1) ** 2).mean()
    active = everyone
    for i in range(PASSES):
        if by_token:
            active = [t for t in everyone if depth[t] >= i]
            weights_of_pass = weights
        else:
            scores = base.router[i](state).squeeze(-1)
            weights_of_pass = ALPHA * scores.sigmoid()
            if training:
                best = sorted(active, key=lambda t: -scores[t])[: max(1, (PASSES - i) * length // PASSES)]
                target = torch.tensor([float(t in best) for t in active])
                loss = loss + 0.001 * F.binary_cross_entropy_with_logits(scores[active], target)
                active = sorted(best)
            elif i > 0:
                active = [t for t in active if scores[t].sigmoid() > 0.5]
        runs.append(active)
        if not active:
            continue
        hidden = state[active]
        for memory, layer in zip(memories, base.core):
            if shared and i == 0:
                memory.update(zip(everyone, layer.input_layernorm(hidden)))
            hidden = block(layer, hidden, active, memory, own=not shared)
        state = state.clone()
        for row, t in enumerate(active):
            ends = not by_token or depth[t] == i
            state[t] = state[t] + weights_of_pass[t] * hidden[row] if ends else hidden[row]
    for layer in base.coda:
        state = block(layer, state, everyone, {}, own=True)
    return model.lm_head(base.norm(state)), loss, runs


VARIANTS = [
    {"routing": routing, "kv_sharing": kv_sharing, "router": router}
    for routing in ("expert_choice", "token_choice")
    for kv_sharing in ("all", "first")
    for router in ("linear", "mlp")
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda fields: "-".join(fields.values()))


@every_variant
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_the_algorithm_written_out_token_by_token(variant, training):
    model, ids = tiny_mixture(**variant), prompt()
    model.train(training)
    expected = [reference(model, row, training) for row in ids]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        output = model(ids, labels=ids)
        for row, (logits, _, _) in zip(output.logits, expected):
            torch.testing.assert_close(row, logits, atol=1e-4, rtol=0)
        if training:
            routing = sum(loss for _, loss, _ in expected) / 2
            if variant["routing"] == "token_choice":  # shares and probabilities are means over the whole batch
                both = model(ids).auxiliary_loss
                singles = [model(row[None]).auxiliary_loss for row in ids]
                torch.testing.assert_close(torch.stack(singles), torch.stack([loss for _, loss, _ in expected]))
                routing = both
            torch.testing.assert_close(output.auxiliary_loss, routing, atol=1e-6, rtol=1e-5)
            model.eval()
            plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            torch.testing.assert_close(output.loss, plain + routing)
            model.train()
        else:
            assert output.auxiliary_loss is None
    if not training:
        assert any(0 < len(run) < 12 for _, _, runs in expected for run in runs), "the routers decide nothing here"


# Expert choice in training


@pytest.mark.parametrize(("passes", "length", "sizes"), [(3, 12, [12, 8, 4]), (3, 2, [2, 1, 1]), (4, 10, [10, 7, 5, 2])])
def test_each_pass_runs_as_many_tokens_as_its_capacity(passes, length, sizes):
    model = tiny_mixture(num_recurrences=passes).train()
    inputs = recorded_passes(model)
    model(prompt(length=length))
    assert [one.shape[1] for one in inputs] == sizes


def test_tokens_keep_their_order_and_come_from_the_pass_before():
    model, ids = tiny_mixture().train(), prompt()
    states = model(ids, output_recurrences=True).recurrent_states
    changed = [(after != before).any(-1) for before, after in zip(states, states[1:])]
    assert [mask.sum(1).tolist() for mask in changed] == [[12, 12], [8, 8], [4, 4]]
    assert (changed[1] <= changed[0]).all() and (changed[2] <= changed[1]).all()
    inputs = recorded_passes(model)
    model(ids)
    for i in (1, 2):  # what ran, in the order of the text
        for row in range(2):
            assert torch.equal(inputs[i][row], states[i][row][changed[i][row]])


@pytest.mark.parametrize("routing", ["expert_choice", "token_choice"])
@pytest.mark.parametrize("training", [False, True])
def test_tokens_that_sit_a_pass_out_keep_every_bit(routing, training):
    model, ids = tiny_mixture(routing=routing).train(training), prompt(length=24)
    expected = [reference(model, row, training)[2] for row in ids]
    states = model(ids, output_recurrences=True).recurrent_states
    for i in range(PASSES):
        for row, runs in enumerate(expected):
            still = (states[i + 1][row] == states[i][row]).all(-1).nonzero().flatten().tolist()
            assert still == [t for t in range(24) if t not in runs[i]]
    assert any(len(runs[-1]) < 24 for runs in expected)


def test_padded_rows_train_as_they_would_alone():
    model, ids = tiny_mixture().train(), prompt(rows=3)
    lengths = (12, 7, 3)
    for left in (False, True):
        mask = torch.tensor([[1] * n + [0] * (12 - n) for n in lengths])
        if left:
            mask = mask.flip(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(ids, attention_mask=mask, position_ids=positions)
        for row, n in enumerate(lengths):
            real = mask[row].bool()
            alone = model(ids[row][real][None])
            torch.testing.assert_close(output.logits[row][real], alone.logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("routing", ["expert_choice", "token_choice"])
def test_every_weight_learns(routing):
    model, ids = tiny_mixture(routing=routing).train(), prompt()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_activation_checkpointing_leaves_the_gradients_alone():
    for variant in VARIANTS:
        model, ids = tiny_mixture(**variant).train(), prompt()
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
            grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
            model.activation_checkpointing_enable()
        for name, grad in grads[0].items():
            where = f"{variant} {name}"
            torch.testing.assert_close(grads[1][name], grad, atol=1e-7, rtol=1e-5, msg=lambda m: f"{where}: {m}")


def test_a_micro_batch_adds_its_share_of_the_routers_loss():
    model, ids = tiny_mixture(selection_loss=10.0).train(), prompt()
    alone = model(ids, labels=ids)
    quarter = model(ids, labels=ids, num_items_in_batch=4 * ids[:, 1:].numel())
    assert alone.auxiliary_loss > 1
    torch.testing.assert_close(quarter.loss, alone.loss / 4)


# Outside training


@every_variant
def test_later_tokens_change_nothing_before_them(variant):
    model, ids = tiny_mixture(**variant), prompt()
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 97
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :7], model(other).logits[:, :7], atol=1e-5, rtol=0)


def test_a_pass_that_no_token_needs_is_not_run():
    model, ids = tiny_mixture(), prompt(rows=1)
    with torch.no_grad():
        for router in model.model.router[1:]:
            router.proj.weight.zero_()  # a logit of 0 is not above one half
    inputs = recorded_passes(model)
    settings = {"max_new_tokens": 5, "do_sample": False}
    text = model.generate(ids, **settings)
    assert len(inputs) == 5  # the prompt and four tokens, one pass each
    assert torch.equal(text, model.generate(ids, use_cache=False, **settings))
    static = model.generate(ids, cache_implementation="static", **settings)
    assert torch.equal(text, static)


def test_token_choice_runs_every_token_as_often_as_it_chose():
    model, ids = tiny_mixture(routing="token_choice"), prompt(length=24)
    runs = [0] * PASSES
    with torch.no_grad():
        states = model(ids, output_recurrences=True).recurrent_states
        depth = model.model.router[0](states[0]).argmax(-1)
    for i in range(PASSES):
        runs[i] = int((states[i + 1] != states[i]).any(-1).sum())
    assert runs == [int((depth >= i).sum()) for i in range(PASSES)] and len(set(runs)) > 1


def test_the_balancing_bias_moves_towards_the_depths_that_few_tokens_choose():
    model, ids = tiny_mixture(routing="token_choice", balancing="bias", balancing_rate=0.5), prompt(rows=4, length=32)
    model.train()
    losses = model(ids).auxiliary_loss
    with torch.no_grad():
        chosen = model.model.router[0](model(ids, output_recurrences=True).recurrent_states[0]).argmax(-1)
    share = F.one_hot(chosen, PASSES).float().mean((0, 1))
    model.model.router[0].balance.zero_()
    model(ids)
    assert torch.equal(model.model.router[0].balance, 0.5 * torch.sign(1 / PASSES - share))
    assert losses < 0.01, "without a balancing loss only the z-loss is left"
    before = model.model.router[0].balance.clone()
    model.eval()(ids)
    assert torch.equal(model.model.router[0].balance, before), "only training moves it"


# Configuration


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_sharing": "last"}, ["kv_sharing='last'", "'all', 'first'"]),
        ({"routing": "top_k"}, ["routing='top_k'", "expert_choice, token_choice"]),
        ({"router_function": "softmax"}, ["router_function='softmax'", "token_choice"]),
        ({"num_recurrences": 4, "trained_recurrences": 3}, ["num_recurrences=4", "trained_recurrences=3", "routing"]),
        ({"selection_loss": -1.0}, ["selection_loss=-1.0", "negative"]),
        ({"num_recurrences": 0}, ["num_recurrences=0", "at least 1"]),
    ],
)
def test_an_impossible_mixture_is_refused(fields, words):
    with pytest.raises(ValueError) as error:
        tiny_mixture(**fields)
    assert all(word in str(error.value) for word in words), error.value


def test_fewer_passes_can_be_asked_for_and_more_are_refused():
    for routing in ("expert_choice", "token_choice"):
        model, ids = tiny_mixture(routing=routing), prompt()
        with torch.no_grad():
            states = model(ids, output_recurrences=True).recurrent_states
            fewer = model(ids, num_recurrences=2, output_recurrences=True).recurrent_states
        assert len(states) == 4 and len(fewer) == 3
        if routing == "expert_choice":  # a token that chose three passes has to end with the second
            assert torch.equal(fewer[2], states[2])
        with pytest.raises(ValueError, match="num_recurrences=4"):
            model(ids, num_recurrences=4)


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="continuous batching"):
        tiny_mixture().generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2))


def test_the_twin_of_a_recurrent_gpt_has_its_shape():
    config = RecurrentGPTConfig(hidden_size=1280, num_attention_heads=20, num_core_layers=5, num_recurrences=6)
    twin = MixtureOfRecursionsConfig.twin_of(config, routing="token_choice")
    assert str(twin.plan()) == str(config.plan()) and twin.hidden_size == 1280
    assert twin.routing == "token_choice" and twin.num_dense_layers == config.num_dense_layers
    assert twin.pass_shares() == (1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)
