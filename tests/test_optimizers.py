"""MuonH against a float64 transcription of its algorithm, and the learning rates that go with it."""

import copy
import io

import pytest
import torch

from modeling_looped import LoopedGPTConfig
from modeling_looped.accounting import training_flops_per_token
from modeling_looped.recipes import optimizers as module
from modeling_looped.recipes.optimizers import MuonH
from modeling_looped.recipes.transfer import learning_rates


SHAPES = {"wide": (24, 64), "tall": (64, 24), "square": (48, 48)}
COEFFICIENTS = (  # section 5.1 of the specification, typed again
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def transcription(weight, gradients, lr, mu=0.95) -> torch.Tensor:
    """One matrix, in float64, step by step as the specification writes it."""
    w = weight.double()
    m, c = torch.zeros_like(w), w.norm()
    for gradient in gradients:
        grad = gradient.double()
        m = mu * m + (1 - mu) * grad
        x = (1 - mu) * grad + mu * m
        x = x / (1.02 * x.norm() + 1e-6)
        for a, b, k in COEFFICIENTS:
            if x.shape[0] > x.shape[1]:
                gram = x.T @ x
                x = a * x + x @ (b * gram + k * gram @ gram)
            else:
                gram = x @ x.T
                x = a * x + (b * gram + k * gram @ gram) @ x
        w = w - lr * (x * c / x.norm())
        w = w * c / w.norm()
    return w


def matrices(seed: int = 0) -> list[torch.nn.Parameter]:
    """Three of each shape, so that equal shapes are stepped together."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values() for _ in range(3)]


def gradients_at(step: int, like: list) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(parameter.shape, generator=generator) * 10 ** (step % 3) for parameter in like]


def run(optimizer, parameters, steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients_at(step, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_it_is_the_published_algorithm_to_the_precision_of_its_iteration(monkeypatch, dtype, tolerance):
    monkeypatch.setattr(module, "fastest_dtype", lambda: dtype)
    parameters = matrices()
    expected = [
        transcription(parameter.detach(), [gradients_at(step, parameters)[i] for step in range(10)], lr=0.05)
        for i, parameter in enumerate(parameters)
    ]
    start = [parameter.detach().clone() for parameter in parameters]
    run(MuonH(parameters, lr=0.05), parameters, range(10))
    for parameter, reference, before in zip(parameters, expected, start, strict=True):
        moved = (reference - before).norm()
        assert (parameter - reference).norm() < tolerance * moved


def test_the_norm_of_wide_tall_and_square_matrices_stays_and_a_step_has_the_relative_length():
    parameters = matrices(seed=1)
    optimizer = MuonH(parameters, lr=0.02)
    norms = [parameter.norm().item() for parameter in parameters]
    before = [parameter.detach().clone() for parameter in parameters]
    run(optimizer, parameters, range(1))
    for parameter, old, norm in zip(parameters, before, norms, strict=True):
        assert (parameter - old).norm().item() == pytest.approx(0.02 * norm, rel=0.05)
    run(optimizer, parameters, range(1, 10))
    for parameter, norm in zip(parameters, norms, strict=True):
        assert abs(parameter.norm().item() / norm - 1) < 1e-5 and abs(parameter.norm().item() - norm) < 1e-4


def test_matrices_step_together_as_they_would_alone():
    together, alone = matrices(seed=2), matrices(seed=2)
    run(MuonH(together, lr=0.05), together, range(4))
    for i, parameter in enumerate(alone):
        single = MuonH([parameter], lr=0.05)
        for step in range(4):
            parameter.grad = gradients_at(step, alone)[i]
            single.step()
        torch.testing.assert_close(together[i], parameter, rtol=0, atol=1e-5)


def test_a_continued_run_keeps_the_radius_it_started_with():
    whole, stopped = matrices(seed=3), matrices(seed=3)
    run(MuonH(whole, lr=0.05), whole, range(8))
    first = MuonH(stopped, lr=0.05)
    run(first, stopped, range(5))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    radii = [first.state[parameter]["radius"].clone() for parameter in stopped]
    with torch.no_grad():
        for parameter in stopped:  # what rounding in a file of fewer bits might do
            parameter.mul_(1 + 1e-3)
    again = MuonH(stopped, lr=0.05)
    again.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for parameter in stopped:
            parameter.div_(1 + 1e-3)
    run(again, stopped, range(5, 8))
    assert all(torch.equal(again.state[p]["radius"], radius) for p, radius in zip(stopped, radii, strict=True))
    for left, right in zip(whole, stopped, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5)


def test_a_matrix_without_a_gradient_rests_and_what_is_no_matrix_is_refused():
    parameters = matrices()
    optimizer = MuonH(parameters, lr=0.05)
    before = parameters[0].detach().clone()
    for parameter, gradient in zip(parameters[1:], gradients_at(0, parameters)[1:], strict=True):
        parameter.grad = gradient
    optimizer.step()
    assert torch.equal(parameters[0], before) and parameters[0] not in optimizer.state
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is none"):
        MuonH([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="lr=-1"):
        MuonH(copy.deepcopy(parameters), lr=-1)


@pytest.mark.parametrize(
    ("size", "flops", "recurrences", "matrix", "width_factor"),
    [(6, 4.64e17, 1, 0.014030, 1.2910), (34, 2.15e19, 1, 0.010271, 0.5423), (34, 2.15e19, 4, 0.010470, 0.5423)],
)
def test_the_published_learning_rates_come_out_at_other_sizes_and_budgets(size, flops, recurrences, matrix, width_factor):
    config = LoopedGPTConfig.iso_depth(size, recurrences)
    tokens = int(flops / training_flops_per_token(config, 2048))
    rates = learning_rates(config.hidden_size, 2**18, tokens, recurrences)
    assert round(rates.matrix, 6) == matrix
    assert rates.embedding / 0.3 == pytest.approx(width_factor, abs=5e-5)
    for name, base in (("head", 0.004), ("norm", 0.005), ("lanes", 0.01)):
        assert getattr(rates, name) / base == pytest.approx(width_factor, abs=5e-5)


def test_the_batch_moves_matrices_embedding_and_head_but_no_norms():
    small, large = (learning_rates(640, batch, 983_315_200, 1) for batch in (2**18, 2**19))
    assert small.matrix == 0.014 and small.embedding == 0.3
    for name in ("matrix", "embedding", "head"):
        assert getattr(large, name) / getattr(small, name) == pytest.approx(2**0.558)
    assert (large.norm, large.lanes) == (small.norm, small.lanes)
    with pytest.raises(ValueError, match="training_tokens=0 must be a whole number of at least 1"):
        learning_rates(640, 2**18, 0, 1)


def test_a_model_trains_on_the_sphere_grows_there_and_continues(tmp_path):
    import numpy as np

    from modeling_looped import GrownLlamaConfig, GrownLlamaForCausalLM
    from modeling_looped.recipes.pretrain import PretrainRecipe, pretrain
    from modeling_looped.recipes.tokens import TokenRows

    recipe = PretrainRecipe(
        total_steps=8, batch_size=4, optimizer="muonh", precision="no", decay="trapezoid", warmup_steps=1,
        growth_operator="lidas", growth_block_size=2, checkpoint_every=100, matrix_lr=0.05,
    )  # fmt: skip
    rows = TokenRows(np.random.default_rng(3).integers(1, 97, 2000).astype(np.int32), 16)
    size = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}

    def model():
        torch.manual_seed(0)
        return GrownLlamaForCausalLM(GrownLlamaConfig(**size, num_hidden_layers=4, max_position_embeddings=16))

    norm = model().model.layers[0].mlp.up_proj.weight.norm().item()
    trained = model()
    whole = pretrain(trained, rows, recipe, tmp_path / "whole", progress=False).losses
    assert trained.model.layers[2].mlp.up_proj.weight.norm().item() == pytest.approx(norm, rel=1e-5)  # layer 0's copy
    losses = []
    while len(losses) < 8:
        losses += pretrain(model(), rows, recipe, tmp_path / "killed", progress=False, limit_seconds=0).losses
    assert losses == whole
