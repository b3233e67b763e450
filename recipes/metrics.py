"""What is written down of a run while it trains: losses, and how fast it is against what its machine can multiply."""

import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from modeling_looped.accounting import training_flops_per_token


class Speed:
    """Tokens and FLOPs per second of the steps alone: evaluations and checkpoints stop the clock."""

    def __init__(self, accelerator: Accelerator, length: int):
        self.length, self.world = length, accelerator.num_processes
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        self.peak = matmul_peak(accelerator.device, dtype) * self.world
        self.tokens = self.flops = 0
        self._seconds, self._since = 0.0, time.perf_counter()
        self._per_token: dict[int, int] = {}

    def count(self, config, depth: int, rows: int) -> None:
        if depth not in self._per_token:
            self._per_token[depth] = training_flops_per_token(config, self.length, depth)
        self.tokens += rows * self.length * self.world
        self.flops += rows * self.length * self.world * self._per_token[depth]

    def grown(self) -> None:
        """A step costs something else from now on."""
        self._per_token.clear()

    def pause(self) -> None:
        """Forget the time since the last step ended."""
        self._since = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self._seconds, 1e-9)

    def numbers(self) -> dict[str, float]:
        """Read once at the end of each step."""
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
        rate = self.flops / max(self._seconds, 1e-9)
        return {
            "seconds": round(self._seconds, 4),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "mfu": round(rate / self.peak, 4),
        }


class Metrics:
    """
    `metrics.jsonl`, one line a step and one an evaluation, and the tracker. A continued run cuts off the lines of steps
    that its checkpoint does not have.
    """

    def __init__(self, output_dir: Path, start: int, accelerator: Accelerator, tracker: str, settings: dict):
        self.accelerator, self.tracked = accelerator, tracker != "none"
        self.file = None
        if accelerator.is_main_process:
            output_dir.mkdir(parents=True, exist_ok=True)
            path, aside = output_dir / "metrics.jsonl", output_dir / ".writing-metrics.jsonl"
            if path.is_file():
                lines = (line for line in path.read_text().splitlines() if line.endswith("}"))  # a killed one may end early
                aside.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= start))
                os.replace(aside, path)
            self.file = path.open("a")
        if self.tracked:
            accelerator.init_trackers("modeling-looped", settings)

    def add(self, step: int, **values) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            self.file.flush()
        if self.tracked:
            self.accelerator.log(values, step=step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.tracked:
            self.accelerator.end_training()


def read_losses(output_dir: str | Path) -> list[float]:
    """The loss of every step of a run, over its interruptions."""
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 2048) -> float:
    """
    FLOP per second of a square product on one device, the fastest of several: what MFU is measured against. Half a
    second on two cores, so it is measured anew in each run and not looked up.
    """
    if device.type == "cpu":
        size = 768
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
