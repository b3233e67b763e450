"""Training: gradients, losses, initialisation, checkpointing, compilation, LoRA and the Trainer."""

import copy
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    HEAVY_TAIL,
    INJECTIONS,
    TINY_MODELS,
    gradients,
    is_bit_equal,
    next_token_loss,
    tiny_config,
    tiny_grown_config,
    tiny_grown_llama,
    tiny_mixture,
    tiny_model,
    tiny_recurrent_config,
    tiny_recurrent_gpt,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.utils import counters
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from modeling_looped import GrownLlamaForCausalLM, LoopedGPTForCausalLM, LoopedGPTModel, RecurrentGPTForCausalLM
from modeling_looped.keyed_noise import NoiseKey, set_noise_key


TRUNCATABLE = ("linear", "additive", "none")
TINY_VOCABULARY = 97
quiet_recurrent_gpt = partial(tiny_recurrent_gpt, state_noise=0.0, gate_noise=0.0)
every_family = pytest.mark.parametrize("tiny", TINY_MODELS.values(), ids=TINY_MODELS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These models are too small for two threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def described(value) -> str | None:
    """A readable name of a test's case that is a `partial`."""
    if isinstance(value, partial):
        return "-".join([value.func.__name__, *map(str, value.keywords.values())])


def token_rows(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, TINY_VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def ragged_labels(rows: torch.Tensor) -> torch.Tensor:
    """Row i counts 2i + 3 tokens less: means of means then differ from the mean over all tokens."""
    labels = rows.clone()
    for i in range(len(labels)):
        labels[i, : 2 * i + 3] = -100
    return labels


def unrolled_logits(model, rows, recurrences: int, backprop: int | None = None, passes: list | None = None):
    """
    Sections 1.1 to 1.7 of the paper's specification written out, without a loop module: pass i uses the core, the
    injection and the norm of `passes[i]`, which are the model's own unless copies are given.
    """
    base = model.model
    config = base.config
    own = SimpleNamespace(core=base.core, injection=base.injection, norm=base.recurrence_norm)
    passes = passes or [own] * recurrences
    hidden = base.embedding_norm(base.embed_tokens(rows))
    rotary = base.rotary_emb(hidden, position_ids=torch.arange(rows.shape[1]).unsqueeze(0))
    for layer in base.prelude:
        hidden = layer(hidden, position_embeddings=rotary)

    e = hidden
    h = torch.zeros_like(e) if config.injection == "additive" else e
    lanes = [e] * config.num_lanes
    for i in range(recurrences):
        injection = passes[i].injection
        if config.injection == "linear":
            u = F.linear(torch.cat([e, h], dim=-1), injection.proj.weight)
        elif config.injection == "additive":
            u = h + e
        elif config.injection == "none":
            u = h
        else:
            u = sum(injection.alpha[i, k] * lane for k, lane in enumerate(lanes))
        for layer in passes[i].core:
            u = layer(u, position_embeddings=rotary)
        h = passes[i].norm(u)
        if backprop is not None and i < recurrences - backprop:
            h = h.detach()
        if config.injection == "hyperconnection":
            mixing, beta = injection.mixing[i], injection.beta[i]
            lanes = [
                sum(mixing[k, j] * lane for j, lane in enumerate(lanes)) + beta[k] * h for k in range(len(lanes))
            ]

    hidden = sum(lanes) if config.injection == "hyperconnection" else h
    for layer in base.coda:
        hidden = layer(hidden, position_embeddings=rotary)
    return 15 * torch.tanh(model.lm_head(base.norm(hidden)) / 15)


def assert_same(left: dict, right: dict, atol: float = 1e-5) -> None:
    """Equal names, `None` in the same places, and values equal to `atol` of each tensor's largest entry."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (value is None) == (right[name] is None), name
        if value is not None:
            scale = max(right[name].abs().max().item(), 1e-3)
            torch.testing.assert_close(value, right[name], rtol=0, atol=atol * scale, msg=lambda m: f"{name}: {m}")


def largest_difference(left: dict, right: dict) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left)


# Truncated backpropagation and sharing


@pytest.mark.parametrize("injection", TRUNCATABLE)
@pytest.mark.parametrize(("recurrences", "backprop"), [(3, 1), (3, 2), (5, 2)])
def test_truncated_gradients_are_those_of_a_detached_unrolled_network(injection, recurrences, backprop):
    model = tiny_model(injection=injection, backprop_recurrences=backprop, trained_recurrences=5).train()
    model.model.recurrence_norm.weight.data.mul_(8)  # left small, the state counts for little beside what enters
    rows = token_rows()
    output = model(rows, labels=rows, num_recurrences=recurrences)
    expected_logits = unrolled_logits(model, rows, recurrences, backprop)
    torch.testing.assert_close(output.logits, expected_logits, rtol=0, atol=1e-4)
    truncated = gradients(model, output.loss)
    assert_same(truncated, gradients(model, next_token_loss(expected_logits, rows)))

    full = gradients(model, next_token_loss(unrolled_logits(model, rows, recurrences), rows))
    for name in ("model.core.0.mlp.up_proj.weight", "model.core.1.self_attn.q_proj.weight"):
        assert (truncated[name] - full[name]).abs().max() > 0.01 * full[name].abs().max(), "truncation does nothing"


@pytest.mark.parametrize("injection", INJECTIONS)
def test_full_gradients_are_those_of_the_unrolled_network(injection):
    model = tiny_model(injection=injection, trained_recurrences=4).train()
    rows = token_rows()
    output = model(rows, labels=rows, num_recurrences=4)
    expected_logits = unrolled_logits(model, rows, 4)
    torch.testing.assert_close(output.logits, expected_logits, rtol=0, atol=1e-4)
    assert_same(gradients(model, output.loss), gradients(model, next_token_loss(expected_logits, rows)))


@pytest.mark.parametrize("injection", TRUNCATABLE)
def test_truncation_leaves_the_forward_alone_and_is_none_from_r_on(injection):
    model = tiny_model(injection=injection).train()
    rows = token_rows()
    results = {}
    for backprop in (None, 1, 2, 3, 7):
        model.config.backprop_recurrences = backprop
        output = model(rows, labels=rows)
        results[backprop] = output.logits, gradients(model, output.loss)
    for logits, _ in results.values():
        assert torch.equal(logits, results[None][0])
    assert is_bit_equal(results[3][1], results[None][1]) and is_bit_equal(results[7][1], results[None][1])
    assert not is_bit_equal(results[2][1], results[None][1])


@pytest.mark.parametrize(("injection", "trains"), [("linear", True), ("additive", True), ("none", False)])
def test_the_prelude_trains_under_truncation_where_the_injection_feeds_it_to_late_passes(injection, trains):
    model = tiny_model(injection=injection, backprop_recurrences=1).train()
    rows = token_rows()
    found = gradients(model, model(rows, labels=rows).loss)
    before_the_core = [name for name in found if ".prelude." in name or "embed" in name]
    assert len(before_the_core) > 5
    for name in before_the_core:
        assert (found[name] is not None) == trains, name
        assert not trains or found[name].abs().max() > 0, name


@pytest.mark.parametrize("injection", INJECTIONS)
def test_the_gradient_of_a_shared_block_is_the_sum_over_an_untied_unrolled_copy(injection):
    model = tiny_model(injection=injection).train()
    base, rows = model.model, token_rows()
    shared = {"core": base.core, "injection": base.injection, "norm": base.recurrence_norm}
    passes = [SimpleNamespace(**{name: copy.deepcopy(module) for name, module in shared.items()}) for _ in range(3)]
    next_token_loss(unrolled_logits(model, rows, 3, passes=passes), rows).backward()
    model.zero_grad()
    model(rows, labels=rows).loss.backward()

    for part, module in shared.items():
        copies = [dict(getattr(one, part).named_parameters()) for one in passes]
        summed = {
            name: sum(one[name].grad for one in copies if one[name].grad is not None)
            for name, _ in module.named_parameters()
        }
        assert_same({name: parameter.grad for name, parameter in module.named_parameters()}, summed)
    assert not torch.allclose(passes[0].core[0].mlp.up_proj.weight.grad, passes[2].core[0].mlp.up_proj.weight.grad)


# The label contract


@every_family
def test_the_loss_is_shifted_cross_entropy_without_the_ignored_labels(tiny):
    model = tiny()
    rows = token_rows(4)
    labels = ragged_labels(rows)
    labels[1, 7] = -100  # a gap in the middle, too
    output = model(rows, labels=labels)
    torch.testing.assert_close(output.loss, next_token_loss(output.logits, labels), rtol=0, atol=1e-5)
    assert (output.loss - next_token_loss(output.logits, rows)).abs() > 1e-3
    assert torch.equal(output.logits, model(rows).logits) and model(rows).loss is None


@pytest.mark.parametrize(
    "tiny",
    [tiny_model, tiny_recurrent_gpt, partial(tiny_mixture, selection_loss=0.0), tiny_grown_llama],
    ids=TINY_MODELS,
)
def test_four_micro_batches_of_one_are_one_batch_of_four(tiny):
    model = tiny().train()
    rows = token_rows(4)
    labels = ragged_labels(rows)
    counted = (labels[:, 1:] != -100).sum()

    def part(i, **kwargs):
        set_noise_key(model, NoiseKey(first_row=i))  # of models that have noise
        return model(rows[i : i + 1], labels=labels[i : i + 1], **kwargs).loss

    set_noise_key(model, NoiseKey())
    whole = model(rows, labels=labels)
    parts = [part(i, num_items_in_batch=counted) for i in range(4)]
    torch.testing.assert_close(sum(parts), whole.loss, rtol=0, atol=1e-5)
    assert_same(gradients(model, sum(parts)), gradients(model, whole.loss))

    means = [part(i) for i in range(4)]
    assert (sum(means) / 4 - whole.loss).abs() > 1e-3, "the rows are too alike to tell the two averages apart"


# The Trainer


def rows_dataset(rows: int = 16) -> list[dict[str, list[int]]]:
    """Rows of equal length whose numbers of counted labels differ by position in the list."""
    tokens = token_rows(rows, seed=3)
    labels = torch.cat([ragged_labels(four) for four in tokens.split(4)])
    return [{"input_ids": row.tolist(), "labels": label.tolist()} for row, label in zip(tokens, labels)]


def trainer(model, folder: Path, **arguments) -> Trainer:
    defaults = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    settings = TrainingArguments(output_dir=str(folder), **{**defaults, **arguments})
    return Trainer(model=model, args=settings, train_dataset=rows_dataset(), eval_dataset=rows_dataset(4))


def trained_weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize(
    "tiny", [tiny_model, quiet_recurrent_gpt, tiny_grown_llama], ids=["looped_gpt", "recurrent_gpt", "grown_llama"]
)
def test_the_trainer_gives_equal_weights_for_accumulation_of_four_and_a_batch_of_four(tmp_path, tiny):
    # Plain SGD without clipping: Adam and the clip both hide a wrong scale of the gradient.
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    weights = {}
    for size, accumulation in ((1, 4), (4, 1)):
        run = trainer(
            tiny(),
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            **plain,
        )
        run.train()
        weights[size] = trained_weights(run)
    torch.testing.assert_close(weights[1], weights[4], rtol=0, atol=1e-5)
    assert largest_difference(weights[1], dict(tiny().named_parameters())) > 1e-2, "nothing was trained"


@every_family
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_trainer_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, tiny, checkpointing):
    arguments = {"save_strategy": "steps", "save_steps": 2, "activation_checkpointing": checkpointing}
    whole = trainer(tiny(), tmp_path, **arguments)
    assert math.isfinite(whole.train().training_loss)

    resumed = trainer(tiny(seed=1), tmp_path, **arguments)  # other weights: all must come from the checkpoint
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert is_bit_equal(trained_weights(resumed), trained_weights(whole))

    loss = resumed.evaluate()["eval_loss"]
    assert math.isfinite(loss)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert is_bit_equal(dict(reloaded.named_parameters()), trained_weights(whole))
    rows = [{name: torch.tensor(value) for name, value in row.items()} for row in rows_dataset(4)]
    rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        assert reloaded(**rows).loss.item() == pytest.approx(loss, abs=1e-5)


# Activation checkpointing and compilation


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recurrences", [1, 3, 5])
@pytest.mark.parametrize(
    ("tiny", "backprop"),
    [
        *((partial(tiny_model, injection=name), None) for name in INJECTIONS),
        *((partial(tiny_model, injection=name), 2) for name in TRUNCATABLE),
        (tiny_recurrent_gpt, None),
        (tiny_recurrent_gpt, 2),
        (tiny_grown_llama, None),
    ],
    ids=described,
)
def test_activation_checkpointing_leaves_every_bit_of_the_gradients(tiny, backprop, recurrences, reentrant):
    model = tiny(trained_recurrences=5, **truncation(backprop))
    check_checkpointing(model, backprop, recurrences, reentrant)


@every_family
@pytest.mark.parametrize("recurrences", [1, 3, 5])
def test_activation_checkpointing_leaves_every_bit_of_the_gradients_under_kv_sharing_first(tiny, recurrences):
    check_checkpointing(tiny(kv_sharing="first", trained_recurrences=5), None, recurrences, reentrant=False)


def truncation(backprop: int | None) -> dict[str, int]:
    """A field that not every family has."""
    return {} if backprop is None else {"backprop_recurrences": backprop}


def check_checkpointing(model, backprop, recurrences, reentrant):
    model.train()
    rows = token_rows()
    runs = []
    first_of_core = model.model.unique_layers()[model.config.num_prelude_layers]
    first_of_core.mlp.register_forward_pre_hook(lambda *_: runs.append(1))

    def step():
        runs.clear()
        torch.manual_seed(0)  # for models with noise
        output = model(rows, labels=rows, num_recurrences=recurrences, use_cache=False)
        return output.loss, gradients(model, output.loss), len(runs)

    loss, plain, once = step()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed_loss, checkpointed, twice = step()
    assert torch.equal(loss, checkpointed_loss)
    assert is_bit_equal(checkpointed, plain)
    recomputed = min(backprop or recurrences, recurrences)  # nothing flows back into the passes before
    assert (once, twice) == (recurrences, recurrences + recomputed)


@pytest.fixture
def fresh_dynamo():
    """Compiled code hangs on the layer's class: without a reset one test's graphs count against another's limit."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compile_layers(model, **options) -> None:
    for layer in model.model.unique_layers():
        layer.compile(fullgraph=True, **options)


def graphs_of_all_depths(model, first: int) -> tuple[int, int]:
    """Graphs compiled after one training step at r = `first`, and after further steps at r = 1 ... 8."""
    rows = token_rows()

    def step(recurrences):
        model(rows, labels=rows, num_recurrences=recurrences, use_cache=False).loss.backward()
        return counters["stats"]["unique_graphs"]

    return step(first), [step(recurrences) for recurrences in range(1, 9)][-1]


@pytest.mark.parametrize(
    ("tiny", "backprop", "first"),
    [
        (tiny_model, None, 3),
        *((partial(tiny_model, injection=name), None, 1) for name in INJECTIONS),
        (tiny_model, 2, 1),
        (partial(tiny_model, injection="additive"), 2, 1),
        (tiny_recurrent_gpt, None, 3),
        (tiny_recurrent_gpt, None, 1),
        (tiny_recurrent_gpt, 2, 1),
        (tiny_grown_llama, None, 3),
        (tiny_grown_llama, None, 1),
    ],
    ids=described,
)
def test_regional_compilation_never_recompiles_for_another_depth(fresh_dynamo, tiny, backprop, first):
    # aot_eager has the tracing and the guards of the default backend, which a slow test below runs.
    model = tiny(trained_recurrences=8, **truncation(backprop)).train()
    compile_layers(model, backend="aot_eager")
    assert graphs_of_all_depths(model, first) == (1, 1)


@pytest.mark.parametrize(
    ("tiny", "graphs"),
    [
        # Without injection the core's input after a detached pass wants no gradient.
        (partial(tiny_model, injection="none", backprop_recurrences=2), (2, 2)),
        # Outside the core, the first pass, and the passes of any other number.
        (partial(tiny_recurrent_gpt, lora_rank=4), (3, 3)),
    ],
    ids=described,
)
def test_regional_compilation_takes_few_more_graphs_where_passes_differ(fresh_dynamo, tiny, graphs):
    model = tiny(trained_recurrences=8).train()
    compile_layers(model, backend="aot_eager")
    assert graphs_of_all_depths(model, 3) == graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiny", [tiny_model, quiet_recurrent_gpt, tiny_grown_llama], ids=["looped_gpt", "recurrent_gpt", "grown_llama"]
)
def test_regionally_compiled_training_has_the_gradients_of_eager_without_recompiling(fresh_dynamo, tiny):
    model = tiny(trained_recurrences=8).train()
    rows = token_rows()
    eager = gradients(model, model(rows, labels=rows, num_recurrences=5, use_cache=False).loss)
    compile_layers(model)
    assert graphs_of_all_depths(model, 3) == (1, 1)
    model.zero_grad()
    assert_same(gradients(model, model(rows, labels=rows, num_recurrences=5, use_cache=False).loss), eager, atol=1e-4)


# Initialisation


def statistics_config(**fields):
    return tiny_config(vocab_size=2000, hidden_size=128, num_key_value_heads=4, **fields)


def assert_uniform(weight: torch.Tensor, bound: float) -> None:
    rounding = torch.finfo(weight.dtype).eps
    assert 0.99 * bound < weight.abs().max() <= (1 + rounding) * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert abs(weight.mean().item()) < 0.03 * bound


def assert_initialised_as_published(base: LoopedGPTModel) -> None:
    d = base.config.hidden_size
    assert base.embed_tokens.weight.std().item() == pytest.approx(1, rel=0.02)
    assert abs(base.embed_tokens.weight.mean().item()) < 0.02
    for layer in [*base.prelude, *base.core, *base.coda]:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.up_proj):
            assert_uniform(module.weight, math.sqrt(3 / d))
        assert_uniform(mlp.down_proj.weight, math.sqrt(3 / (4 * d)))
    norms = [module for module in base.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) == 2 * 4 + 3 and all((norm.weight == 1).all() for norm in norms)
    assert_injection_as_published(base)


def assert_injection_as_published(base: LoopedGPTModel) -> None:
    injection, d = base.injection, base.config.hidden_size
    if base.config.injection == "linear":
        assert torch.equal(injection.proj.weight.float(), torch.cat([torch.eye(d), torch.zeros(d, d)], dim=1))
    elif base.config.injection == "hyperconnection":
        assert injection.alpha.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
        assert injection.mixing.tolist() == [torch.eye(3).tolist()] * 5
        assert injection.beta.tolist() == [[1, 1, 1]] * 5
    else:
        assert not list(injection.parameters())


@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_new_model_is_initialised_as_published(injection):
    set_seed(0)
    config = statistics_config(injection=injection, num_lanes=3, num_recurrences=5)
    for model in (AutoModelForCausalLM.from_config(config), LoopedGPTForCausalLM(config)):
        assert_initialised_as_published(model.model)
        assert model.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.02)
    assert_initialised_as_published(AutoModel.from_config(config))


@pytest.fixture(scope="module")
def base_checkpoint(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A base model without head whose weights are nothing that an initialisation would make."""
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model().model
    model.save_pretrained(folder)
    return folder, model.state_dict()


def assert_base_is_the_checkpoint(base: LoopedGPTModel, saved: dict[str, torch.Tensor], dtype=torch.float32) -> None:
    loaded = base.state_dict()
    for name in loaded.keys() & saved.keys():
        assert torch.equal(loaded[name], saved[name].to(loaded[name].dtype)), name
        assert loaded[name].dtype in (dtype, torch.float32)
    assert len(loaded.keys() & saved.keys()) > 30


def test_a_new_language_model_head_is_initialised_beside_loaded_weights(base_checkpoint):
    folder, saved = base_checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_base_is_the_checkpoint(model.model, saved)
    assert model.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_classification_head_is_initialised_beside_loaded_weights(base_checkpoint, dtype):
    folder, saved = base_checkpoint
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=50, dtype=dtype)
    assert_base_is_the_checkpoint(model.model, saved, dtype)
    assert model.score.weight.dtype == dtype
    assert_uniform(model.score.weight, math.sqrt(3 / 64))
    rows = token_rows(3)
    output = model(rows, labels=torch.tensor([4, 0, 49]))
    assert output.logits.shape == (3, 50) and output.loss.isfinite()


@pytest.mark.parametrize(
    ("injection", "fields"),
    [("linear", {}), ("hyperconnection", {"num_lanes": 3, "num_recurrences": 5, "trained_recurrences": 5})],
)
def test_a_new_injection_is_initialised_beside_loaded_weights(tmp_path, injection, fields):
    source = tiny_model(injection="none").model
    source.save_pretrained(tmp_path)
    model, info = LoopedGPTModel.from_pretrained(tmp_path, injection=injection, output_loading_info=True, **fields)
    assert info["missing_keys"] and all(key.startswith("injection.") for key in info["missing_keys"])
    assert_base_is_the_checkpoint(model, source.state_dict())
    assert_injection_as_published(model)


def test_at_initialisation_linear_injection_gives_one_output_for_every_depth():
    set_seed(0)
    linear = LoopedGPTModel(tiny_config()).eval()
    additive = LoopedGPTModel(tiny_config(injection="additive")).eval()
    additive.load_state_dict(linear.state_dict(), strict=False)
    rows = token_rows()
    with torch.no_grad():
        outputs = {r: linear(rows, num_recurrences=r).last_hidden_state for r in (1, 2, 3, 8)}
        once, twice = (additive(rows, num_recurrences=r).last_hidden_state for r in (1, 2))
    for output in outputs.values():
        torch.testing.assert_close(output, outputs[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(once, outputs[1], rtol=0, atol=1e-5)
    assert (twice - once).abs().max() > 0.1, "the core does nothing, so equality proves nothing"


# bf16 and LoRA


# Without injection LoopedGPT does not learn (the paper's table 5): here it stops at the frequencies of the tokens.
# GrownLlama has none either, and is held to the same.
@pytest.mark.parametrize(
    ("model_class", "config", "left"),
    [
        *((LoopedGPTForCausalLM, tiny_config(injection=name), 0.7 if name == "none" else 0.5) for name in INJECTIONS),
        (RecurrentGPTForCausalLM, tiny_recurrent_config(), 0.5),
        (RecurrentGPTForCausalLM, tiny_recurrent_config(**HEAVY_TAIL), 0.5),
        (GrownLlamaForCausalLM, tiny_grown_config(), 0.7),
    ],
    ids=[*INJECTIONS, "recurrent_gpt", "recurrent_gpt-heavy_tail", "grown_llama"],
)
def test_bf16_autocast_halves_the_loss_on_one_batch_in_twenty_steps(model_class, config, left):
    set_seed(0)
    model = model_class(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows, losses = token_rows(2, 16), []
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(rows, labels=rows, use_cache=False).loss
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(TINY_VOCABULARY), abs=0.1)
    assert losses[-1] < left * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("part", ["all", "core"])
@every_family
def test_lora_trains_with_checkpointing_and_is_saved_reloaded_and_merged(tmp_path, tiny, part):
    set_seed(0)
    base, family = tiny().model, tiny().config.model_type
    unique = {id(layer) for layer in base.unique_layers()}
    layers = {name for name, module in base.named_modules() if id(module) in unique}
    core = r"layers\.[12]" if family == "grown_llama" else r"core\.\d"
    targets = "all-linear" if part == "all" else rf".*\.{core}\..*_proj"
    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    adapted = {".".join(name.split(".")[3:5]) for name, one in model.named_parameters() if one.requires_grad}
    assert adapted & layers == (layers if part == "all" else {name for name in layers if re.fullmatch(core, name)})
    assert len(adapted & layers) == (4 if part == "all" else 2)
    beside = {"grown_llama": set(), "mixture_of_recursions": {"router"}}.get(family, {"injection"})
    assert {name.split(".")[0] for name in adapted - layers} == (beside if part == "all" else set())

    rows = token_rows()
    model.train()
    model.base_model.model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(8):
        loss = model(input_ids=rows, labels=rows, num_recurrences=2 + step % 2, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[1] - 0.1, "at the same depth"
    model.save_pretrained(tmp_path)

    reloaded = PeftModel.from_pretrained(tiny(), tmp_path).eval()
    model.eval()
    with torch.no_grad():
        before = tiny()(rows, num_recurrences=3).logits
        trained = {r: model(input_ids=rows, num_recurrences=r).logits for r in (2, 3)}
        assert (trained[3] - before).abs().max() > 0.1
        for r, logits in trained.items():
            assert torch.equal(reloaded(input_ids=rows, num_recurrences=r).logits, logits)
        merged = reloaded.merge_and_unload()
        assert isinstance(merged, type(tiny()))
        for r, logits in trained.items():
            torch.testing.assert_close(merged(rows, num_recurrences=r).logits, logits, rtol=0, atol=1e-4)
