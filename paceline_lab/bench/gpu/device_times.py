"""How long work takes on a device, without what starting it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Work = Callable[[], object]
COPIED = {"cuda": 2**31, "cpu": 2**24}
"""Bytes that `copy_bytes_per_s` copies: many times what caches hold."""
REPEATS = 10


def wait_for(device: torch.device) -> None:
    """Return when the device has finished everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_us(works: Sequence[Work], device: torch.device) -> float:
    """Microseconds of one of `works`, which run one after another: the median over repetitions.

    On a GPU they are one CUDA graph, so starting them takes no time. Works on different memory find nothing in caches.
    """
    run = _captured(works, device) if device.type == "cuda" else lambda: [work() for work in works]
    run()
    return 1e6 * median(_timed_s(run, device) for _ in range(REPEATS)) / len(works)


def launch_us(works: Sequence[Work], device: torch.device, repeats: int = REPEATS) -> float:
    """As `device_us`, each started from Python."""

    def run() -> None:
        for work in works:
            work()

    run()
    return 1e6 * median(_timed_s(run, device) for _ in range(repeats)) / len(works)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.ones(COPIED[device.type] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e6 * source.numel() / device_us([lambda: target.copy_(source)], device)


def _captured(works: Sequence[Work], device: torch.device) -> Work:
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what libraries allocate at their first call is outside the graph
            for work in works:
                work()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [work() for work in works]

    def replay() -> object:
        graph.replay()
        return kept  # the graph's outputs live as long as it is replayed

    return replay


def _timed_s(run: Work, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - began
