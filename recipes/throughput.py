"""How fast a run is against what its machine can multiply."""

import time

import torch


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
