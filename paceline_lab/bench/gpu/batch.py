"""Many requests at once in one process: tokens per second, the parts of a step, and how long the GPU idles in it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from paceline import family
from paceline.config import SamplingParams
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.messages import Delta
from paceline_lab.bench import step_profile
from paceline_lab.bench.bench_measurement import PLAIN, Measurement
from paceline_lab.bench.gpu.device_trace import traced
from paceline_lab.bench.gpu.large_model import pass_ms
from paceline_lab.bench.method_comparison import LIMITS, methods, prompts_of
from paceline_lab.bench.workloads import workloads

TARGET = family.NAMES[0]
METHOD = "eagle3"
REQUESTS = {"cuda": (1, 8, 64), "cpu": (2,)}
MAX_TOKENS = {"cuda": 96, "cpu": 8}
CONTEXT = 120


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    requests = REQUESTS[device.type]
    engine = {"device": str(device), "slots": 2**15, "enable_prefix_caching": False}
    llm = LLM(TARGET, {**LIMITS, **methods()[METHOD]}, engine)
    yield {"numerics": llm.model.numerics, f"pass_ms after {CONTEXT}": pass_ms(llm.model, CONTEXT)}
    for count in requests:
        yield {f"{count} requests": throughput(llm, count, device)}
    yield {"idle_ms": {name: idle_ms(llm, requests[-1], device, speculative=name != PLAIN) for name in (PLAIN, METHOD)}}
    del llm
    result = step_profile.run(Console(quiet=True), ["shipped"], requests, METHOD, None, str(device))
    yield {"profile": {f"{each['requests']} requests, {each['method']}": each for each in result["cases"]}}


def throughput(llm: LLM, count: int, device: torch.device) -> dict[str, Any]:
    """Tokens per second, plain and with drafts, and whether both have the same tokens."""
    measured: dict[str, Measurement] = {}
    prompts, sampling = _prompts(count), _sampling(device)
    for name in (PLAIN, METHOD):
        this = measured[name] = Measurement()
        for _ in range(2):  # the first compiles kernels and captures graphs
            began = time.perf_counter()
            completions = llm.generate(prompts, sampling, speculative=name != PLAIN)
            this.add(0, [each.tokens for each in completions], time.perf_counter() - began)
    figures = {f"{name}_tokens_per_s": round(this.fastest_speed) for name, this in measured.items()}
    return {**figures, "identical": measured[METHOD].equal_prompts(measured[PLAIN]) == count}


def idle_ms(llm: LLM, count: int, device: torch.device, *, speculative: bool) -> float | None:
    """Milliseconds per step in which no kernel runs, prompts included; None on a CPU."""
    step = Engine.step

    def overlapped(engine: Engine) -> Sequence[Delta]:
        """A step as the engine's process makes it."""
        if not engine.model.asynchronous:
            return step(engine)
        deltas: list[Delta] = []
        engine.overlapped_step(deltas.extend)
        return deltas

    with patch.object(Engine, "step", autospec=True, side_effect=overlapped) as steps:
        trace = traced(lambda: llm.generate(_prompts(count), _sampling(device), speculative=speculative), device)
    return round(1e-3 * (trace.us - trace.busy_us) / steps.call_count, 3) if trace.kernels else None


def _prompts(count: int) -> Sequence[list[int]]:
    return list(islice(cycle(prompt for workload in workloads() for prompt in prompts_of(workload)), count))


def _sampling(device: torch.device) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS[device.type])
