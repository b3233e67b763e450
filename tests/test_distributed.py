"""Two ranks equal one process: DDP, FSDP2 and tensor parallelism over gloo, started by torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import distributed_worker as worker
import pytest
import torch
from conftest import TINY_MODELS
from safetensors.torch import load_file

from modeling_looped.growth import grow
from modeling_looped.recipes.optimizers import make_adamw


pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run_two_ranks(case: str, folder: Path) -> list[dict]:
    """What each of two torchrun ranks left after `case` in distributed_worker.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, worker.__file__, case, str(folder)],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=280)
        finally:
            if process.poll() is None:  # ranks that wait for each other outlive torchrun, so the whole session ends
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def two_rank_runs(request, tmp_path_factory) -> list[dict]:
    return run_two_ranks(request.param, tmp_path_factory.mktemp(request.param))


def assert_equal_training(two: dict, one: dict) -> None:
    """Gradients to 1e-6 of each tensor's largest entry (at least 1), and weights to 1e-6."""
    assert two.keys() == one.keys()
    for part, tensors in one.items():
        assert tensors.keys() == two[part].keys(), part
        for name, expected in tensors.items():
            scale = 1 if part == "weights" else max(1, expected.abs().max().item())
            torch.testing.assert_close(
                two[part][name], expected, rtol=0, atol=1e-6 * scale, msg=lambda m: f"{part}: {name}: {m}"
            )


def test_the_ranks_draw_different_depths_at_different_steps():
    drawn = [worker.sampled_recurrences(worker.SEED, step) for step in range(worker.STEPS)]
    assert min(drawn) <= 2 < max(drawn), "truncation to 2 passes has to matter in some steps and not in others"
    assert len(set(drawn)) == worker.STEPS


@pytest.mark.parametrize("name", worker.RUNS)
def test_two_ranks_train_as_one_process_at_sampled_depths(two_rank_runs, name):
    expected = worker.train(worker.run_model(name))
    start = dict(worker.run_model(name).named_parameters())
    assert max((expected["weights"][key] - start[key]).abs().max() for key in start) > 1e-3, "nothing was trained"
    for rank in two_rank_runs:
        assert_equal_training(rank[name], expected)


def layer_names(model) -> list[str]:
    """Of the unique layers, in the order of the plan's numbers."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(layer)] for layer in model.model.unique_layers()]


@pytest.mark.parametrize("name", ["linear", "recurrent_gpt", "grown_llama"])
def test_transformers_shards_by_the_configurations_fsdp_plan_and_trains_as_one_process(tmp_path, name):
    worker.run_model(name).save_pretrained(tmp_path)
    ranks = run_two_ranks("fsdp_plan", tmp_path)
    assert set(layer_names(worker.run_model(name))) <= set(ranks[0]["units"])
    whole = {key: tuple(parameter.shape) for key, parameter in worker.run_model(name).named_parameters()}
    for key, shape in whole.items():
        assert sum(rank["local shapes"][key][0] for rank in ranks) == shape[0], key
    expected = worker.train(worker.run_model(name), recurrences=3)
    for rank in ranks:
        assert_equal_training({key: rank[key] for key in expected}, expected)
    assert_saved_unchanged(tmp_path)


@pytest.mark.parametrize("tiny", TINY_MODELS.values(), ids=TINY_MODELS)
def test_tensor_parallel_ranks_predict_as_one_process(tmp_path, tiny):
    model = tiny(trained_recurrences=5)
    model.save_pretrained(tmp_path)
    ranks = run_two_ranks("tp", tmp_path)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    split = {"self_attn.k_proj": 0, "self_attn.o_proj": 1, "mlp.up_proj": 0, "mlp.down_proj": 1}
    if model.config.model_type == "grown_llama":
        split["mlp.gate_proj"] = 0
    for layer in layer_names(model):
        for name, dimension in split.items():
            key = f"{layer}.{name}.weight"
            halves = [rank["local shapes"][key][dimension] for rank in ranks]
            assert halves == [sizes[key][dimension] // 2] * 2, key
    expected = worker.predict(model)
    for rank in ranks:
        for name, value in expected.items():
            if name.startswith("text"):
                assert torch.equal(rank[name], value), name
            else:
                torch.testing.assert_close(rank[name], value, rtol=0, atol=1e-5, msg=lambda m: f"{name}: {m}")
    assert_saved_unchanged(tmp_path)


def test_growing_on_two_ranks_equals_growing_the_file_and_one_process(tmp_path):
    two = run_two_ranks("grow", tmp_path)
    assert two[0]["growths"] == [2, 5]
    for rank in two:
        assert torch.equal(rank["whole"], rank["by file"])
    one = torch.tensor(worker.growing_run(tmp_path / "one"))
    torch.testing.assert_close(two[0]["whole"], one, rtol=0, atol=1e-5)
    left, right = (load_file(tmp_path / run / "step-12" / "model.safetensors") for run in ("whole", "one"))
    assert left.keys() == right.keys() and "model.layers.5.mlp.up_proj.weight" in left
    for name, value in right.items():  # AdamW divides by the root of squares, rounding of small gradients included
        torch.testing.assert_close(left[name], value, rtol=0, atol=1e-4)


def test_a_sharded_model_grows_and_trains_on_as_one_process(tmp_path):
    two = run_two_ranks("grow_fsdp", tmp_path)
    model = worker.growing_model().train()
    optimizers = make_adamw(model, 1e-2, 0.1)
    losses = worker.sharded_losses(model, optimizers[0], range(3), 0, 1)
    grow(model, "lidas", 2, optimizers)
    losses += worker.sharded_losses(model, optimizers[0], range(3, 6), 0, 1)
    weights = dict(model.named_parameters())
    assert len(model.model.layers) == 8 and losses[5] < losses[0]
    for rank in two:
        torch.testing.assert_close(rank["losses"], torch.stack(losses), rtol=0, atol=1e-5)
        assert rank["weights"].keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(rank["weights"][name], value.detach(), rtol=0, atol=1e-4)


def assert_saved_unchanged(checkpoint: Path) -> None:
    """What the ranks saved together is the checkpoint that they loaded."""
    saved, loaded = (load_file(folder / "model.safetensors") for folder in (checkpoint / "saved", checkpoint))
    if "lm_head.weight" not in loaded:  # tied: transformers saves it all the same, of Llama too
        assert torch.equal(saved.pop("lm_head.weight"), saved["model.embed_tokens.weight"])
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], value) for name, value in loaded.items())
