"""Generation with depth that turns: every cache and every decoding method computes what no cache computes."""

import copy
from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch
import torch.nn.functional as F
from conftest import HEAVY_TAIL, INJECTIONS, tiny_grown_llama, tiny_mixture, tiny_model, tiny_recurrent_gpt
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.utils import is_optimum_quanto_available, logging

from modeling_looped.modeling_looped_gpt import LoopedGPTInjection


TRAINED = 3
close = partial(torch.testing.assert_close, atol=1e-4, rtol=0)
equal = partial(torch.testing.assert_close, atol=0, rtol=0)


@lru_cache
def looped_gpt(injection: str, **fields) -> PreTrainedModel:
    """Loop(1-2x3-1) with a state as large as what enters beside it: left small, a third pass changes nothing."""
    model = tiny_model(injection=injection, **fields)
    with torch.no_grad():
        model.model.recurrence_norm.weight.mul_(8)
    return model


def copies(build: Callable[..., PreTrainedModel], *args, **fields) -> Callable[..., PreTrainedModel]:
    """A factory of models that a test may change: copying is cheaper than building."""
    return lambda **more: copy.deepcopy(build(*args, **fields, **more))


recurrent_gpt = lru_cache(tiny_recurrent_gpt)
mixture = lru_cache(tiny_mixture)
grown_llama = lru_cache(tiny_grown_llama)

# A family joins the whole suite with a row here: the factory takes configuration fields and returns a model in eval
# mode, trained at TRAINED recurrences. Its plain reference for kv_sharing goes into REFERENCES below.
FAMILIES: list[tuple[str, Callable[..., PreTrainedModel]]] = [
    *((f"looped_gpt-{injection}", copies(looped_gpt, injection)) for injection in INJECTIONS),
    ("recurrent_gpt", copies(recurrent_gpt)),
    ("recurrent_gpt-heavy_tail", copies(recurrent_gpt, **HEAVY_TAIL)),
    ("mixture_of_recursions", copies(mixture)),
    ("mixture_of_recursions-token_choice", copies(mixture, routing="token_choice")),
    ("grown_llama", copies(grown_llama)),
]
SHAPES = {
    "2-1xr-1": {"num_prelude_layers": 2, "num_core_layers": 1},
    "0-2xr-1": {"num_prelude_layers": 0},
    "1-2xr-0": {"num_coda_layers": 0},
    "2xr": {"num_prelude_layers": 0, "num_coda_layers": 0},
}


def allows(factory: Callable, recurrences: int) -> bool:
    try:
        factory().config.check_recurrences(recurrences)
    except ValueError:
        return False
    return True


def cases(families: list) -> list:
    return [
        pytest.param(factory, recurrences, id=f"{name}-r{recurrences}")
        for name, factory in families
        for recurrences in (0, 1, TRAINED, TRAINED + 2)
        if allows(factory, recurrences)
    ]


# Those whose passes run every token, which alone can compress the keys and values of several into one. Mixtures know
# "all" and "first", and are held against their algorithm in test_mixture_of_recursions.py.
COMPRESSING = [(name, factory) for name, factory in FAMILIES if "last" in factory().config.kv_strategies]
every_case = pytest.mark.parametrize(("factory", "recurrences"), cases(FAMILIES))
every_compressing_case = pytest.mark.parametrize(("factory", "recurrences"), cases(COMPRESSING))
every_family = pytest.mark.parametrize("factory", [pytest.param(factory, id=name) for name, factory in FAMILIES])
every_shape = pytest.mark.parametrize("shape", [pytest.param(fields, id=name) for name, fields in SHAPES.items()])
# For what no injection can change, and for what transformers does around the model.
first_family = FAMILIES[0][1]
first_family_cases = pytest.mark.parametrize("recurrences", [1, TRAINED, TRAINED + 2])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Matrices this small only lose by being shared between threads, and lose most on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def warnings_of(caplog):
    """The warnings that contain a text. `logger.warning_once` remembers its messages as long as the process lives."""
    logging.warning_once.cache_clear()
    yield lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]
    logging.warning_once.cache_clear()


def prompt(rows: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    """(rows, length) token ids, none of them the padding token 0."""
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def uncached(model: PreTrainedModel, ids: torch.Tensor, recurrences: int, **kwargs) -> torch.Tensor:
    """Logits of one forward without a cache."""
    return model(ids, use_cache=False, num_recurrences=recurrences, **kwargs).logits


@torch.no_grad()
def in_chunks(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int], recurrences: int, cache=None):
    """Logits of `ids` fed to one cache in chunks of `lengths` tokens, and the cache."""
    logits = []
    for chunk in ids.split(lengths, dim=1):
        output = model(chunk, cache=cache, use_cache=True, num_recurrences=recurrences)
        cache = output.cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def generate(model: PreTrainedModel, ids: torch.Tensor | None, recurrences: int | None = None, **kwargs):
    """The output of `model.generate`: its `sequences`, and its `logits` as (rows, new tokens, vocabulary)."""
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    if recurrences is not None:
        settings["num_recurrences"] = recurrences
    torch.manual_seed(0)
    output = model.generate(ids, **{**settings, **kwargs})
    output.logits = torch.stack(output.logits, dim=1)
    return output


def count_passes(model: PreTrainedModel) -> list[int]:
    """A list to which each coming forward adds the number of passes over the core that it ran."""
    passes = []

    def one_more(*_):
        passes[-1] += 1

    model.base_model.register_forward_pre_hook(lambda *_: passes.append(0))
    first_of_core = model.base_model.unique_layers()[model.config.num_prelude_layers]
    first_of_core.register_forward_hook(one_more)
    return passes


def skips_passes(model: PreTrainedModel) -> bool:
    """Mixtures do not run a pass that no token of the chunk needs."""
    return hasattr(model.base_model, "router")


def assert_ran(model: PreTrainedModel, passes: list[int], expected: set[int]) -> None:
    assert set(passes) == expected or skips_passes(model) and 1 <= min(passes) <= max(passes) <= max(expected)


def caches(model: PreTrainedModel, recurrences: int) -> dict:
    """Every kind of full-precision cache, for `recurrences` passes and 16 tokens. None: the model builds its own."""
    config = model.config.cache_config(recurrences)
    return {
        "own": None,
        "lazy": DynamicCache(),
        "dynamic": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=16),
    }


# One forward after the other


@every_family
def test_the_models_of_this_suite_tell_recurrence_counts_apart(factory):
    model, ids = factory(), prompt()
    logits = [uncached(model, ids, r) for r in (0, 1, 2, TRAINED, TRAINED + 2) if allows(factory, r)]
    for i, one in enumerate(logits):
        assert all((one - other).abs().max() > 0.5 for other in logits[:i])


def check_every_cache(model: PreTrainedModel, recurrences: int) -> None:
    ids, expected = prompt(), uncached(model, prompt(), recurrences)
    kept = 1 if model.config.kv_sharing == "first" else recurrences
    depth = model.config.plan(kept).effective_depth
    for cache in caches(model, recurrences).values():
        logits, cache = in_chunks(model, ids, [5, 1, 1, 3, 1], recurrences, cache)
        close(logits, expected)
        assert [int(layer.get_seq_length()) for layer in cache.layers] == [11] * depth


@every_case
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cached_logits_equal_uncached_logits_at_every_step(factory, recurrences, attention):
    model = factory()
    model.set_attn_implementation(attention)
    check_every_cache(model, recurrences)


@first_family_cases
@every_shape
def test_cached_logits_equal_uncached_logits_in_every_shape(shape, recurrences):
    check_every_cache(first_family(**shape), recurrences)


def check_cropping(factory: Callable, recurrences: int) -> None:
    model, ids, others = factory(), prompt(length=6), prompt(length=5, seed=2)
    expected = uncached(model, torch.cat([ids, others], dim=1), recurrences)[:, 6:]
    for kind in ("own", "static"):
        seen = torch.cat([ids, ids[:, :3]], dim=1)
        _, cache = in_chunks(model, seen, [5, 3, 1], recurrences, caches(model, recurrences)[kind])
        cache.crop(-3)
        logits, _ = in_chunks(model, others, [1, 3, 1], recurrences, cache)
        close(logits, expected)


@every_case
def test_a_cropped_cache_continues_as_if_it_had_never_seen_the_tokens(factory, recurrences):
    check_cropping(factory, recurrences)


@first_family_cases
def test_a_cache_with_slots_to_spare_gives_the_same_logits(recurrences):
    model, ids = first_family(), prompt()
    for cache in caches(model, 8).values():
        logits, _ = in_chunks(model, ids, [6, 1, 4], recurrences, cache)
        close(logits, uncached(model, ids, recurrences))


@every_case
def test_right_padding_leaves_the_logits_of_real_positions_alone(factory, recurrences):
    model, ids = factory(), prompt(rows=3)
    lengths = (11, 6, 2)
    mask = torch.tensor([[1] * n + [0] * (11 - n) for n in lengths])
    singles = [uncached(model, ids[row : row + 1, :n], recurrences)[0] for row, n in enumerate(lengths)]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for use_cache in (False, True):
            settings = {"attention_mask": mask, "use_cache": use_cache, "num_recurrences": recurrences}
            with torch.no_grad():
                logits = model(ids * mask, **settings).logits
            for row, n in enumerate(lengths):
                close(logits[row, :n], singles[row])


@every_case
@pytest.mark.parametrize("kv_sharing", ["all", 1, "first"])
def test_packed_rows_equal_separate_rows(factory, recurrences, kv_sharing):
    if kv_sharing == 1 and "last" not in factory().config.kv_strategies:
        kv_sharing = "all"
    model, ids = factory(kv_sharing=kv_sharing), prompt()
    packs = ((5, 4, 2), (3, 8))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in packs])
    separate = torch.stack(
        [
            torch.cat([uncached(model, alone[None], recurrences)[0] for alone in ids[row].split(lengths)])
            for row, lengths in enumerate(packs)
        ]
    )
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for use_cache in (False, True):
            with torch.no_grad():
                output = model(ids, position_ids=positions, use_cache=use_cache, num_recurrences=recurrences)
            close(output.logits, separate)


@every_case
def test_embeddings_as_input_give_the_same_logits_with_and_without_a_cache(factory, recurrences):
    model, ids = factory(), prompt()
    embeds = model.get_input_embeddings()(ids).detach()
    expected = uncached(model, ids, recurrences)
    close(uncached(model, None, recurrences, inputs_embeds=embeds), expected)
    cache, logits = None, []
    with torch.no_grad():
        for chunk in embeds.split([6, 1, 4], dim=1):
            output = model(inputs_embeds=chunk, cache=cache, use_cache=True, num_recurrences=recurrences)
            cache = output.cache
            logits.append(output.logits)
    close(torch.cat(logits, dim=1), expected)


@pytest.mark.parametrize("backend", ["fp8", "quanto"])
@every_case
def test_a_quantized_cache_keeps_every_pass_near_its_exact_keys(factory, recurrences, backend):
    if backend == "quanto" and not is_optimum_quanto_available():
        pytest.skip("the int4 cache needs optimum-quanto")
    model, ids = factory(), prompt()
    settings = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 16}
    cache = QuantizedCache(backend, config=model.config.cache_config(recurrences), **settings)
    logits, cache = in_chunks(model, ids, [10, 1], recurrences, cache)
    _, exact = in_chunks(model, ids[:, :10], [10], recurrences)
    # The 10 tokens of the prompt are stored rounded, but were attended to before they were rounded.
    expected = uncached(model, ids, recurrences)
    close(logits[:, :10], expected[:, :10])
    assert 0 < (logits - expected)[:, 10].abs().mean() < 0.3 * expected.std()
    assert len(cache.layers) == len(exact.layers) == model.config.plan(recurrences).effective_depth
    for rounded, layer in zip(cache.layers, exact.layers, strict=True):
        error = rounded._dequantize(rounded._quantized_keys)[:, :, :10] - layer.keys
        assert 0 < error.abs().mean() < {"fp8": 0.03, "quanto": 0.1}[backend] * layer.keys.std()


@pytest.mark.slow  # compiles a kernel for each length
@torch.no_grad()
def test_flex_attention_equals_eager_attention():
    torch._dynamo.reset()
    model, ids = first_family(), prompt()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = uncached(model, ids, TRAINED, attention_mask=mask)
    model.set_attn_implementation("flex_attention")
    logits = uncached(model, ids, TRAINED, attention_mask=mask)
    close(logits[0], expected[0])
    close(logits[1, 4:], expected[1, 4:])
    stepwise, _ = in_chunks(model, ids[:1], [10, 1], TRAINED)  # 8 is NaN on CPUs, for Llama too (torch 2.13)
    close(stepwise, expected[:1])


# generate


METHODS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 4},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "assisted": {},
}
MORE_METHODS = {
    "static_chunked": {"cache_implementation": "static", "prefill_chunk_size": 4},
    "static_beam": {"cache_implementation": "static", "num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "sampled_beam": {"do_sample": True, "num_beams": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@lru_cache
def generate_uncached(factory: Callable, recurrences: int, rows: int, decoding: tuple):
    return generate(factory(), generation_prompt(rows), recurrences, use_cache=False, **dict(decoding))


def generation_prompt(rows: int) -> torch.Tensor:
    """Repeats itself, so that prompt lookup finds something."""
    return prompt(rows, length=5).repeat(1, 2)


def assistant_of(factory: Callable) -> PreTrainedModel:
    """The model with some noise: some of its drafts are accepted and some are not."""
    assistant = factory()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.05 * torch.randn(assistant.lm_head.weight.shape, generator=noise))
    return assistant


def check_method(factory: Callable, recurrences: int, method: str) -> None:
    rows = 1 if method in ("assisted", "prompt_lookup") else 2
    settings = {**METHODS, **MORE_METHODS}[method]
    decoding = {k: v for k, v in settings.items() if k in ("num_beams", "num_return_sequences", "do_sample")}
    expected = generate_uncached(factory, recurrences, rows, tuple(decoding.items()))
    assistant = {"assistant_model": assistant_of(factory)} if method == "assisted" else {}
    model = factory()
    passes = count_passes(model)
    output = generate(model, generation_prompt(rows), recurrences, **settings, **assistant)
    assert_ran(model, passes, {recurrences})
    equal(output.sequences, expected.sequences)
    close(output.logits, expected.logits)


@every_case
@pytest.mark.parametrize("method", METHODS)
def test_generate_with_a_cache_equals_generate_without(factory, recurrences, method):
    check_method(factory, recurrences, method)


@first_family_cases
@pytest.mark.parametrize("method", MORE_METHODS)
def test_generate_in_further_ways_equals_generate_without_a_cache(recurrences, method):
    check_method(first_family, recurrences, method)


def check_left_padding(factory: Callable, recurrences: int) -> None:
    model, ids = factory(), prompt(rows=3, length=8)
    lengths = (8, 5, 2)
    mask = torch.tensor([[0] * (8 - n) + [1] * n for n in lengths])
    singles = [
        generate(model, ids[row : row + 1, 8 - n :], recurrences, max_new_tokens=4, use_cache=False)
        for row, n in enumerate(lengths)
    ]
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        for implementation in ("dynamic", "static"):
            settings = {"cache_implementation": implementation, "attention_mask": mask, "max_new_tokens": 4}
            output = generate(model, ids * mask, recurrences, **settings)
            equal(output.sequences[:, 8:], torch.cat([single.sequences[:, -4:] for single in singles]))
            close(output.logits, torch.cat([single.logits for single in singles]))


@every_case
def test_left_padded_rows_generate_what_single_rows_generate(factory, recurrences):
    check_left_padding(factory, recurrences)


@every_case
def test_generate_continues_from_the_cache_of_an_earlier_call(factory, recurrences):
    model, ids, others = factory(), prompt(), prompt(length=3, seed=2)
    at_once = generate(model, ids, recurrences, max_new_tokens=8, use_cache=False)
    first = generate(model, ids, recurrences, max_new_tokens=4)
    second = generate(model, first.sequences, recurrences, max_new_tokens=4, cache=first.cache)
    equal(second.sequences, at_once.sequences)
    close(torch.cat([first.logits, second.logits], dim=1), at_once.logits)
    # And with a turn of the user's in between.
    dialogue = torch.cat([second.sequences, others], dim=1)
    third = generate(model, dialogue, recurrences, max_new_tokens=2, cache=second.cache)
    close(third.logits, generate(model, dialogue, recurrences, max_new_tokens=2, use_cache=False).logits)


@first_family_cases
def test_generate_continues_on_a_static_cache_of_the_caller(recurrences):
    model, ids = first_family(), prompt()
    cache = StaticCache(config=model.config.cache_config(recurrences), max_cache_len=24)
    first = generate(model, ids, recurrences, max_new_tokens=4, cache=cache)
    second = generate(model, first.sequences, recurrences, max_new_tokens=4, cache=cache)
    at_once = generate(model, ids, recurrences, max_new_tokens=8, use_cache=False)
    equal(second.sequences, at_once.sequences)
    close(torch.cat([first.logits, second.logits], dim=1), at_once.logits)


@every_case
def test_generate_takes_embeddings(factory, recurrences):
    model, ids = factory(), generation_prompt(2)
    expected = generate_uncached(factory, recurrences, 2, ())
    embeds = model.get_input_embeddings()(ids).detach()
    for implementation in ("dynamic", "static"):
        output = generate(model, None, recurrences, inputs_embeds=embeds, cache_implementation=implementation)
        equal(output.sequences, expected.sequences[:, ids.shape[1] :])
        close(output.logits, expected.logits)


def check_early_exit(factory: Callable, recurrences: int, prepare: Callable[[PreTrainedModel], dict]) -> None:
    draft = next(r for r in (0, 1, 2) if r != recurrences and allows(factory, r))
    model = factory()
    settings = prepare(model)
    expected = generate_uncached(factory, recurrences, 1, ())
    passes = count_passes(model)
    early_exit = model.config.plan(draft).effective_depth
    output = generate(model, generation_prompt(1), assistant_early_exit=early_exit, **settings)
    equal(output.sequences, expected.sequences)
    close(output.logits, expected.logits)
    assert_ran(model, passes, {draft, recurrences})
    if not skips_passes(model):
        assert passes[0] == draft and passes[-1] == recurrences
    assert model.config.num_recurrences == TRAINED


@every_case
def test_early_exit_drafts_with_fewer_recurrences_and_gives_exactly_the_greedy_text(factory, recurrences):
    check_early_exit(factory, recurrences, lambda model: {"num_recurrences": recurrences})


def test_early_exit_drafts_with_fewer_recurrences_than_the_config_the_model_or_the_caller_asks_for():
    def in_the_models_generation_config(model):
        model.generation_config.num_recurrences = TRAINED + 2
        return {}

    check_early_exit(first_family, TRAINED, lambda model: {})
    check_early_exit(first_family, TRAINED + 2, in_the_models_generation_config)
    settings = {"generation_config": GenerationConfig(num_recurrences=TRAINED + 2)}
    check_early_exit(first_family, TRAINED + 2, lambda model: settings)


@every_family
def test_an_early_exit_inside_the_core_is_refused_and_leaves_the_config_alone(factory):
    model = factory()
    inside = model.config.plan(1).effective_depth + 1
    with pytest.raises(ValueError, match=f"num_hidden_layers={inside}"):
        generate(model, prompt(rows=1), assistant_early_exit=inside)
    assert model.config.num_recurrences == TRAINED


def test_a_model_without_recurrences_can_be_the_assistant():
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    for recurrences in (1, TRAINED + 2):
        output = generate(first_family(), generation_prompt(1), recurrences, assistant_model=llama)
        equal(output.sequences, generate_uncached(first_family, recurrences, 1, ()).sequences)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recurrences", "kv_sharing"),
    [
        ("looped_gpt-linear", TRAINED + 1, "all"),
        ("looped_gpt-linear", TRAINED, 1),
        ("looped_gpt-linear", TRAINED, "first"),
        ("recurrent_gpt", TRAINED, "average"),
        ("recurrent_gpt-heavy_tail", TRAINED, "all"),
        ("mixture_of_recursions", TRAINED, "all"),
        ("mixture_of_recursions-token_choice", TRAINED, "first"),
        ("grown_llama", TRAINED + 1, "all"),
        ("grown_llama", TRAINED, "average"),
    ],
)
def test_static_decoding_compiles_to_one_graph_and_equals_eager_decoding(family, recurrences, kv_sharing):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids = dict(FAMILIES)[family](kv_sharing=kv_sharing, num_core_layers=1, num_coda_layers=0), prompt()
    settings = {"cache_implementation": "static", "max_new_tokens": 4}
    expected = generate(model, ids, recurrences, **settings)
    compile_config = CompileConfig(mode="default", fullgraph=True)
    compile_config._compile_all_devices = True  # on its own, generate compiles for accelerators alone
    output = generate(model, ids, recurrences, compile_config=compile_config, **settings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    equal(output.sequences, expected.sequences)
    close(output.logits, expected.logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the offloaded cache moves layers between a GPU and the CPU")
@every_case
def test_an_offloaded_cache_equals_no_cache(factory, recurrences):
    model, ids = factory().cuda(), prompt().cuda()
    output = generate(model, ids, recurrences, cache_implementation="offloaded")
    expected = generate(model, ids, recurrences, use_cache=False)
    equal(output.sequences, expected.sequences)
    close(output.logits, expected.logits)


# Continuous batching


def generate_batch(model: PreTrainedModel, ids: torch.Tensor, **settings) -> list[tuple[list[int], torch.Tensor]]:
    """Six tokens for each of two prompts of unequal length, and their log-probabilities."""
    rows = [ids[0].tolist(), ids[1, :6].tolist()]
    settings.setdefault("generation_config", GenerationConfig(max_new_tokens=6, do_sample=False))
    small = ContinuousBatchingConfig(num_blocks=32, block_size=4, max_batch_tokens=32, return_logprobs=True)
    results = model.generate_batch(rows, continuous_batching_config=small, warmup=False, **settings)
    assert [result.error for result in results.values()] == [None, None]
    return [(result.generated_tokens, torch.tensor(result.logprobs)) for result in results.values()]


@pytest.mark.parametrize(
    ("factory", "recurrences"),
    [(first_family, TRAINED + 2), *((factory, 2) for _, factory in COMPRESSING)],
    ids=[f"{FAMILIES[0][0]}-r{TRAINED + 2}", *(f"{name}-r2" for name, _ in COMPRESSING)],
)
def test_continuous_batching_at_the_configured_recurrences_equals_single_rows(factory, recurrences):
    model, ids = factory(), prompt()
    singles = [generate(model, row[None], recurrences, use_cache=False) for row in (ids[0], ids[1, :6])]
    model.config.num_recurrences = recurrences
    for (tokens, log_probs), single in zip(generate_batch(model, ids), singles, strict=True):
        assert tokens == single.sequences[0, -6:].tolist()
        close(log_probs, single.logits[0].log_softmax(-1).amax(-1))


@pytest.mark.parametrize("given", ["as argument", "in the generation config"])
def test_continuous_batching_takes_recurrences_like_generate(given):
    model, ids = first_family(), prompt()
    passes = count_passes(model)
    settings = GenerationConfig(max_new_tokens=6, do_sample=False)
    if given == "as argument":
        generate_batch(model, ids, generation_config=settings, num_recurrences=TRAINED + 2)
    else:
        settings.num_recurrences = TRAINED + 2
        generate_batch(model, ids, generation_config=settings)
    assert set(passes) == {TRAINED + 2}
    assert model.config.num_recurrences == TRAINED


@pytest.mark.parametrize(("kv_sharing", "kept"), [(2, 2), ("first", 1), ("average", 1), ("last", 1)])
def test_continuous_batching_with_fewer_kept_passes_is_refused_before_it_starts(kv_sharing, kept):
    model, ids = first_family(kv_sharing=kv_sharing), prompt()
    with pytest.raises(ValueError, match=f"kv_sharing={kv_sharing!r}"):
        generate_batch(model, ids)
    assert generate_batch(model, ids, num_recurrences=kept)


# Which number of recurrences runs


def test_an_argument_of_generate_beats_the_generation_config_which_beats_the_config(tmp_path):
    model, ids = first_family(), prompt()
    passes = count_passes(model)

    def ran(**kwargs) -> set[int]:
        passes.clear()
        model.generate(ids, do_sample=False, **kwargs)
        return set(passes)

    settings = GenerationConfig(max_new_tokens=2, do_sample=False, num_recurrences=2)
    assert ran(max_new_tokens=2) == {TRAINED}
    assert ran(generation_config=settings) == {2}
    assert ran(generation_config=settings, num_recurrences=4) == {4}
    settings.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert ran() == {2}
    assert ran(num_recurrences=1) == {1}
    assert ran(generation_config=GenerationConfig(max_new_tokens=2, num_recurrences=5)) == {5}
    model.generation_config = GenerationConfig(max_new_tokens=2)
    model.config.num_recurrences = 1
    assert ran() == {1}


def test_a_misspelt_argument_of_generate_is_refused():
    with pytest.raises(ValueError, match="num_recurrence'"):
        first_family().generate(prompt(), num_recurrence=2)


@pytest.mark.parametrize("wrong", [0, 2.0, "4"])
def test_a_wrong_number_of_recurrences_is_refused_by_generate(wrong):
    with pytest.raises(ValueError, match="num_recurrences"):
        first_family().generate(prompt(), max_new_tokens=2, num_recurrences=wrong)


def test_going_beyond_the_trained_recurrences_warns_once(warnings_of):
    model = first_family()
    generate(model, prompt(), TRAINED)
    uncached(model, prompt(), 1)
    assert not warnings_of("trained with")
    generate(model, prompt(), TRAINED + 2)
    uncached(model, prompt(), TRAINED + 2)
    uncached(model, prompt(), TRAINED + 1)
    (message,) = warnings_of("trained with")
    assert f" {TRAINED} " in message


@every_case
@torch.no_grad()
def test_recorded_outputs_follow_the_recurrences_of_the_call(factory, recurrences):
    model, ids = factory(), prompt()
    model.set_attn_implementation("eager")
    depth = model.config.plan(recurrences).effective_depth
    for use_cache in (False, True):
        settings = {"num_recurrences": recurrences, "use_cache": use_cache}
        output = model.base_model(ids, output_hidden_states=True, output_attentions=True, **settings)
        assert len(output.hidden_states) == 1 + depth and len(output.attentions) == depth
        equal(output.hidden_states[-1], output.last_hidden_state)
        heads = model.config.num_attention_heads
        assert all(weights.shape == (2, heads, 11, 11) for weights in output.attentions)


@first_family_cases
@pytest.mark.parametrize("selection", [-1, [-1], [0, -2], [3], [12], [-10, 1]])
@torch.no_grad()
def test_selected_hidden_states_count_from_the_depth_of_the_call(recurrences, selection):
    model, ids = first_family(), prompt()
    every = model(ids, num_recurrences=recurrences, output_hidden_states=True).hidden_states
    some = model(ids, num_recurrences=recurrences, output_hidden_states=selection).hidden_states
    picked = [selection] if isinstance(selection, int) else selection
    expected = {i % len(every) for i in picked if -len(every) <= i < len(every)}  # others select nothing, as upstream
    assert len(some) == len(every) and {i for i, state in enumerate(some) if state is not None} == expected
    for i in expected:
        equal(some[i], every[i])


# Recurrences and the cache


@every_shape
@pytest.mark.parametrize("kind", ["own", "lazy", "dynamic", "static"])
def test_recurrences_may_fall_between_calls_on_one_cache_and_may_not_rise(shape, kind):
    model, ids = first_family(num_recurrences=4, **shape), prompt()
    cache = caches(model, 4)[kind]
    _, cache = in_chunks(model, ids[:, :5], [4, 1], 2, cache)
    with pytest.raises(ValueError, match="num_recurrences=4"):
        in_chunks(model, ids[:, 5:6], [1], 4, cache)
    cache = caches(model, 4)[kind]
    _, cache = in_chunks(model, ids[:, :5], [4, 1], 4, cache)
    fallen, cache = in_chunks(model, ids[:, 5:7], [1, 1], 2, cache)
    expected = reference(model, ids[:, :7], [5, 1, 1], [4, 2, 2])
    close(fallen, expected[:, 5:])
    with pytest.raises(ValueError, match="num_recurrences=4 is more than"):
        in_chunks(model, ids[:, 7:8], [1], 4, cache)
    cache.reset()
    logits, _ = in_chunks(model, ids, [6, 5], 4, cache)
    close(logits, uncached(model, ids, 4))


def test_generate_refuses_to_raise_recurrences_on_a_returned_cache():
    model, ids = first_family(), prompt()
    first = generate(model, ids, 2)
    with pytest.raises(ValueError, match="num_recurrences=3"):
        generate(model, first.sequences, 3, cache=first.cache)


def test_a_cache_with_too_few_slots_is_refused():
    model, ids = first_family(), prompt()
    config = model.config
    for cache in (
        DynamicCache(config=config),
        StaticCache(config=config, max_cache_len=16),
        QuantizedCache("fp8", config=config),
    ):
        with pytest.raises(ValueError, match=r"8 slots and num_recurrences=5 needs 12.*cache_config\(5\)"):
            in_chunks(model, ids, [11], 5, cache)
        with pytest.raises(ValueError, match=r"cache_config\(5\)"):
            generate(model, ids, 5, cache=cache)


# kv_sharing: a pass sees less of earlier chunks than what it left there itself


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """y1 = x1 cos + x2 sin, y2 = -x1 sin + x2 cos, the halves of the head rotated by the negative angle."""
    first, second = x.chunk(2, dim=-1)
    frequencies = base ** (-torch.arange(first.shape[-1]) / first.shape[-1])
    angle = positions[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def rotate_and_norm(x: torch.Tensor, positions: torch.Tensor, config) -> torch.Tensor:
    """What LoopedGPT does to queries and keys, (rows, heads, n, head size)."""
    rotated = rotate(x, positions, config.rope_parameters["rope_theta"])
    return F.rms_norm(rotated, (x.shape[-1],), eps=config.rms_norm_eps)


def attend(attention, x: torch.Tensor, place: Callable, past: list[tuple], own: tuple | None = None):
    """
    Plain causal attention of the chunk `x`, (rows, n, width), to `past` chunks of (keys, values) and to itself, with
    keys and values `own` where they are given. Returns its output and its (keys, values).
    """
    config, (rows, n, _) = attention.config, x.shape
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    query, key, value = (
        project(x).view(rows, n, -1, size).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = place(query), place(key)
    key, value = own or (key, value)
    keys, values = (torch.cat(chunks, dim=2) for chunks in zip(*past, (key, value), strict=True))
    keys, values = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (keys, values))
    scores = query @ keys.transpose(2, 3) / size**0.5
    later = torch.arange(keys.shape[2]) > keys.shape[2] - n + torch.arange(n)[:, None]
    output = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
    return attention.o_proj(output.transpose(1, 2).reshape(rows, n, -1)), (key, value)


def sections_of(base: PreTrainedModel) -> dict[str, list]:
    """The unique layers of prelude, core and coda."""
    layers, start, sections = list(base.unique_layers()), 0, {}
    for section in ("prelude", "core", "coda"):
        stop = start + getattr(base.config, f"num_{section}_layers")
        sections[section], start = layers[start:stop], stop
    return sections


@torch.no_grad()
def plain_reference(
    model, ids: torch.Tensor, chunks: list[tuple[int, int]], kv_sharing: str | int, embed: Callable, place: Callable
) -> torch.Tensor:
    """
    Logits, chunk after chunk of (length, recurrences), in plain loops with two stores: `earlier` holds (keys, values)
    of the chunks before, `current` those of this one's passes, both by (section, layer, pass).
    """
    base, config, logits, start = model.model, model.config, [], 0
    sections = sections_of(base)
    injection = getattr(base, "injection", None) or LoopedGPTInjection(config)  # "none": the state goes on as it is
    norm = getattr(base, "recurrence_norm", torch.nn.Identity())
    kept = {"all": 99, "first": 1, "average": 1, "last": 1}.get(kv_sharing, kv_sharing)
    earlier: dict[tuple, list] = {}
    for length, recurrences in chunks:
        current, positions = {}, start + torch.arange(length)
        placed = partial(place, positions=positions, config=config)

        def run(section: str, recurrence: int, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(sections[section]):
                past = earlier.get((section, index, recurrence % kept), [])
                own = current[section, index, 0] if kv_sharing == "first" and recurrence > 0 else None
                attended, own = attend(layer.self_attn, layer.input_layernorm(x), placed, past, own)
                current[section, index, recurrence] = own
                x = x + attended
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            return x

        embeddings = embed(base, ids[:, start : start + length], positions)
        x = run("prelude", 0, embeddings)
        anchor, noise = base.anchor(embeddings, x), base.noise(positions[None], len(ids))
        state = injection.open(x, noise)
        for i in range(recurrences):
            output = norm(run("core", i, injection.read(anchor, state, i, noise)))
            state = injection.write(anchor, state, output, i, noise, None)
        logits.append(model.logits(base.norm(run("coda", 0, injection.close(state)))))
        for section, index in dict.fromkeys((section, index) for section, index, _ in current):
            passes = [own for (*layer, _), own in current.items() if layer == [section, index]]
            for slot in range(min(kept, len(passes))):
                left = passes[slot::kept]  # of which the last stays, or the mean
                means = tuple(torch.stack(tensors).mean(0) for tensors in zip(*left, strict=True))
                earlier.setdefault((section, index, slot), []).append(means if kv_sharing == "average" else left[-1])
        start += length
    return torch.cat(logits, dim=1)


# By model type: (model, ids, [(length, recurrences), ...], kv_sharing) -> logits.
REFERENCES = {
    "looped_gpt": partial(
        plain_reference,
        embed=lambda base, ids, positions: base.embedding_norm(base.embed_tokens(ids)),
        place=rotate_and_norm,
    ),
    "recurrent_gpt": partial(
        plain_reference,
        embed=lambda base, ids, positions: base.embed_tokens(ids) + base.embed_positions.weight[positions],
        place=lambda x, positions, config: x,
    ),
    "grown_llama": partial(
        plain_reference,
        embed=lambda base, ids, positions: base.embed_tokens(ids),
        place=lambda x, positions, config: rotate(x, -positions, config.rope_parameters["rope_theta"]),
    ),
}


def reference(model: PreTrainedModel, ids: torch.Tensor, lengths: list[int], recurrences: int | list, kv_sharing="all"):
    """Logits of chunks of `lengths`, all with the same number of recurrences or each with its own."""
    each = recurrences if isinstance(recurrences, list) else [recurrences] * len(lengths)
    return REFERENCES[model.config.model_type](model, ids, list(zip(lengths, each, strict=True)), kv_sharing)


SHARED_CASES = pytest.mark.parametrize(
    ("factory", "recurrences", "kv_sharing"),
    [
        pytest.param(*case.values, kv_sharing, id=f"{case.id}-{kv_sharing}")
        for case in cases(COMPRESSING)
        for kv_sharing in (1, 2, "average")
        if case.values[1] > (2 if kv_sharing == 2 else 1)
    ],
)


@every_compressing_case
def test_the_reference_equals_the_model_where_nothing_is_shared(factory, recurrences):
    model, ids = factory(), prompt()
    expected = uncached(model, ids, recurrences)
    close(reference(model, ids, [11], recurrences), expected)
    close(reference(model, ids, [6, 1, 4], recurrences), expected)
    close(reference(model, ids, [6, 1, 4], recurrences, kv_sharing=max(1, recurrences)), expected)


@every_compressing_case
def test_one_chunk_is_exact_where_kv_sharing_compresses(factory, recurrences):
    ids = prompt()
    expected = uncached(factory(), ids, recurrences)
    for kv_sharing in (1, 2, 3, "average"):
        model = factory(kv_sharing=kv_sharing)
        equal(uncached(model, ids, recurrences), expected)
        for cache in caches(model, recurrences).values():
            logits, _ = in_chunks(model, ids, [11], recurrences, cache)
            close(logits, expected)


def check_sharing(model: PreTrainedModel, recurrences: int, kv_sharing: int | str) -> None:
    ids, lengths = prompt(), [5, 1, 4, 1]
    exact = uncached(model, ids, recurrences)
    expected = reference(model, ids, lengths, recurrences, kv_sharing)
    for cache in caches(model, recurrences).values():
        logits, cache = in_chunks(model, ids, lengths, recurrences, cache)
        close(logits, expected)
        close(logits[:, :5], exact[:, :5])
        assert (logits - exact)[:, 5:].abs().max() > 0.05, "sharing changes what later chunks see"
        slots = model.config.plan(1 if kv_sharing == "average" else kv_sharing).effective_depth
        assert [int(layer.get_seq_length()) for layer in cache.layers] == [11] * slots


@SHARED_CASES
def test_chunks_under_kv_sharing_equal_the_reference(factory, recurrences, kv_sharing):
    check_sharing(factory(kv_sharing=kv_sharing), recurrences, kv_sharing)


@every_shape
@pytest.mark.parametrize("kv_sharing", [2, "average"])
def test_chunks_under_kv_sharing_equal_the_reference_in_every_shape(shape, kv_sharing):
    check_sharing(first_family(kv_sharing=kv_sharing, **shape), TRAINED + 2, kv_sharing)


@pytest.mark.parametrize("factory", [pytest.param(factory, id=name) for name, factory in COMPRESSING])
def test_last_is_one_kept_pass(factory):
    ids = prompt()
    (one, kept), (last, cache) = (
        in_chunks(factory(kv_sharing=kv_sharing), ids, [5, 1, 4, 1], TRAINED) for kv_sharing in (1, "last")
    )
    equal(last, one)
    assert len(cache.layers) == len(kept.layers)


def test_average_is_a_mean_in_fp32_in_a_model_in_bf16():
    every, mean = (
        in_chunks(first_family(kv_sharing=kv_sharing).bfloat16(), prompt(), [11], TRAINED)[1].layers
        for kv_sharing in ("all", "average")
    )
    passes = [every[slot] for slot in (2, 4, 6)]  # of the first core layer, after prelude and coda
    for name in ("keys", "values"):
        exact = torch.stack([getattr(one, name).float() for one in passes]).mean(0)
        equal(getattr(mean[2], name), exact.bfloat16())


@every_compressing_case
def test_keeping_as_many_passes_as_run_is_keeping_all(factory, recurrences):
    ids = prompt()
    expected = uncached(factory(), ids, recurrences)
    sharings = [(max(1, recurrences), "own"), (max(1, recurrences), "static"), (recurrences + 1, "own")]
    if recurrences <= 1:
        sharings += [("first", "own"), ("average", "own"), ("last", "static")]
    for kv_sharing, kind in sharings:
        model = factory(kv_sharing=kv_sharing)
        logits, cache = in_chunks(model, ids, [6, 1, 4], recurrences, caches(model, recurrences)[kind])
        close(logits, expected)
        assert len(cache.layers) == model.config.plan(recurrences).effective_depth


@SHARED_CASES
@pytest.mark.parametrize(("implementation", "prefill"), [("dynamic", None), ("static", None), ("dynamic", 4)])
def test_generate_under_kv_sharing_equals_the_reference(factory, recurrences, kv_sharing, implementation, prefill):
    model, ids = factory(kv_sharing=kv_sharing), prompt(rows=1)
    settings = {"cache_implementation": implementation, "prefill_chunk_size": prefill, "max_new_tokens": 4}
    output = generate(model, ids, recurrences, **settings)
    lengths = [*([11] if prefill is None else [4, 4, 3]), 1, 1, 1]
    expected = reference(model, output.sequences[:, :-1], lengths, recurrences, kv_sharing)[:, -4:]
    close(output.logits, expected)
    equal(output.sequences[:, -4:], expected.argmax(-1))


@SHARED_CASES
def test_padding_cropping_and_beams_under_kv_sharing_equal_the_reference(factory, recurrences, kv_sharing):
    model, ids = factory(kv_sharing=kv_sharing), prompt()
    mask = torch.tensor([[1] * 11, [0] * 5 + [1] * 6])
    output = generate(model, ids * mask, recurrences, attention_mask=mask, max_new_tokens=3)
    for row, first in ((0, 0), (1, 5)):
        tokens = output.sequences[row : row + 1, first:-1]
        expected = reference(model, tokens, [11 - first, 1, 1], recurrences, kv_sharing)[:, -3:]
        close(output.logits[row], expected[0])

    _, cache = in_chunks(model, ids, [6, 1, 3, 1], recurrences)
    cache.crop(-4)
    logits, _ = in_chunks(model, ids.flip(1)[:, :2], [1, 1], recurrences, cache)
    tokens = torch.cat([ids[:, :7], ids.flip(1)[:, :2]], dim=1)
    close(logits, reference(model, tokens, [6, 1, 1, 1], recurrences, kv_sharing)[:, -2:])

    output = generate(model, ids, recurrences, num_beams=3, max_new_tokens=3, output_scores=True)
    log_probs = reference(model, output.sequences[:, :-1], [11, 1, 1], recurrences, kv_sharing)[:, -3:].log_softmax(-1)
    close(output.sequences_scores, log_probs.gather(2, output.sequences[:, -3:, None]).squeeze(2).mean(1))


@pytest.mark.parametrize("kv_sharing", [1, "average"])
def test_a_cache_that_cannot_rewrite_entries_is_refused_under_kv_sharing(kv_sharing):
    model, ids = first_family(kv_sharing=kv_sharing), prompt()
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(ValueError, match="kv_sharing"):
        generate(model, ids, **settings)
    generate(model, ids, 1, **settings)
    generate(first_family(kv_sharing="first"), ids, **settings)  # rewrites nothing


@pytest.mark.parametrize(("kv_sharing", "kept"), [(2, 2), ("average", 1), ("first", 1)])
def test_raising_recurrences_is_refused_under_kv_sharing_only_where_it_needs_new_slots(kv_sharing, kept):
    model, ids = first_family(kv_sharing=kv_sharing), prompt()
    if kept > 1:
        _, cache = in_chunks(model, ids[:, :5], [5], 1)
        with pytest.raises(ValueError, match="num_recurrences"):
            in_chunks(model, ids[:, 5:6], [1], 2, cache)
    _, cache = in_chunks(model, ids[:, :5], [5], kept)
    logits, _ = in_chunks(model, ids[:, 5:6], [1], 5, cache)
    close(logits, reference(model, ids[:, :6], [5, 1], [kept, 5], kv_sharing)[:, 5:])


@pytest.mark.parametrize("kv_sharing", [1, "average"])
def test_generate_without_a_cache_warns_once_that_it_computes_the_exact_function(warnings_of, kv_sharing):
    ids = prompt()
    exact = generate(first_family(), ids, use_cache=False)
    model = first_family(kv_sharing=kv_sharing)
    generate(model, ids)
    assert not warnings_of("use_cache=False")
    for _ in range(2):
        output = generate(model, ids, use_cache=False)
    close(output.logits, exact.logits)
    (message,) = warnings_of("use_cache=False")
    assert f"kv_sharing={kv_sharing!r}" in message


def test_generate_without_a_cache_does_not_warn_where_nothing_is_compressed(warnings_of):
    generate(first_family(), prompt(), use_cache=False)
    generate(first_family(kv_sharing=TRAINED), prompt(), use_cache=False)
    generate(first_family(kv_sharing="first"), prompt(), use_cache=False)
    generate(first_family(kv_sharing=1), prompt(), 1, use_cache=False)
    assert not warnings_of("use_cache=False")


# kv_sharing = "first": every pass attends to the first one's keys and values, and nothing is compressed


FIRST = [
    (name, partial(factory, kv_sharing="first"), recurrences)
    for name, factory in FAMILIES
    for recurrences in (TRAINED, TRAINED + 2)
    if allows(factory, recurrences)
]
every_first_case = pytest.mark.parametrize(
    ("factory", "recurrences"), [pytest.param(factory, r, id=f"{name}-r{r}") for name, factory, r in FIRST]
)


@every_first_case
def test_under_first_a_forward_equals_the_reference_and_not_the_exact_function(factory, recurrences):
    model, ids = factory(), prompt()
    logits = uncached(model, ids, recurrences)
    for lengths in ([11], [5, 1, 4, 1]) if model.config.model_type in REFERENCES else ():
        close(logits, reference(model, ids, lengths, recurrences, "first"))
    model.config.kv_sharing = "all"
    assert (logits - uncached(model, ids, recurrences)).abs().max() > 0.05


@every_first_case
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_under_first_cached_logits_equal_uncached_logits_at_every_step(factory, recurrences, attention):
    model = factory()
    model.set_attn_implementation(attention)
    check_every_cache(model, recurrences)


@every_shape
def test_under_first_cached_logits_equal_uncached_logits_in_every_shape(shape):
    check_every_cache(first_family(kv_sharing="first", **shape), TRAINED)


@every_first_case
def test_under_first_cropping_and_left_padding_change_nothing(factory, recurrences):
    check_cropping(factory, recurrences)
    check_left_padding(factory, recurrences)


@every_first_case
@pytest.mark.parametrize("method", METHODS)
def test_under_first_generate_with_a_cache_equals_generate_without(factory, recurrences, method):
    check_method(factory, recurrences, method)
