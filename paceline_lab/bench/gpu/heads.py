"""Drafting inside the target's process: methods compared, and the parts of a round of EAGLE-3.

A round's `host` is its time in Python, with the profiler's own; `waits` the part of it that waits for the GPU; `device`
the time of the kernels that it starts. The head for the 8B model has random weights: its guesses are wrong, its time is
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.engine.draft_client import LocalDraftClient
from paceline.engine.draft_gate import DraftGate
from paceline.llm import LLM
from paceline.model.row_probe import quick_row_cost
from paceline_lab.bench.gpu.device_trace import marked_calls, traced
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, shape_for
from paceline_lab.bench.gpu.random_models import build_model, make_network, write_eagle3
from paceline_lab.bench.method_comparison import LIMITS, load_methods, methods, prompts_of, row
from paceline_lab.bench.method_comparison import measure as compare
from paceline_lab.bench.step_profile import HardwareFloor, ProfileCase
from paceline_lab.bench.step_profile import measure as profile_step
from paceline_lab.bench.workloads import workloads

METHODS = ("eagle3", "draft_model", "suffix", "suffix + eagle3")
TEMPERATURES = {"cuda": (0.0, 0.8), "cpu": (0.0,)}
PROMPTS = {"cuda": 4, "cpu": 1}
REPETITIONS = {"cuda": 2, "cpu": 1}
TRACED_TOKENS = 48
SLOTS = 4096
NO_FLOOR = HardwareFloor(0, 0, 1.0, 1.0)


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    known, temperatures = methods(), TEMPERATURES[device.type]
    llms = load_methods({name: known[name] for name in METHODS}, str(device))
    for temperature, workload in product(temperatures, workloads()):
        prompts = prompts_of(workload)[: PROMPTS[device.type]]
        measured = compare(llms, prompts, temperature, repetitions=REPETITIONS[device.type])
        rows = [row(name, workload.name, temperature, measured) for name in llms]
        yield {f"{workload.name}, T {temperature:g}": {each.pop("method"): each for each in rows}}
    for temperature in temperatures:
        yield {f"eagle3 round_ms, T {temperature:g}": round_parts(llms["eagle3"], temperature, device)}
    llms.clear()
    yield {"8B head": large_head(device)}


def round_parts(llm: LLM, temperature: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of a round, while one prompt is decoded; no round is left out because it does not pay."""
    sampling = SamplingParams(temperature=temperature, seed=7, max_tokens=TRACED_TOKENS)
    [prompt, *_] = prompts_of(workloads()[0])
    with patch.object(DraftGate, "PAUSE_BELOW", -inf), marked_calls(LocalDraftClient, "poll"):
        return traced(lambda: llm.generate([prompt], sampling), device, host=True).part_figures()


def large_head(device: torch.device) -> dict[str, Any]:
    """The step of one request of an 8B model with a head of its size, as `bench profile` takes it apart."""
    shape = shape_for(LLAMA_8B, device)
    engine = EngineConfig(device=str(device), slots=SLOTS, enable_prefix_caching=False)
    model = build_model(make_network(shape, device), engine)
    target: Any = SimpleNamespace(model=model, config=engine, cost=quick_row_cost(model, engine.max_num_batched_rows))
    with TemporaryDirectory() as folder:
        head = write_eagle3(Path(folder), shape, device)
        config = SpeculativeConfig.model_validate(
            {**LIMITS, "method": "eagle3", "model": head, "draft_placement": "worker"}
        )
        case = profile_step(target, ProfileCase("8B", 1, "eagle3"), config, NO_FLOOR)
    return {"step_ms": round(case.total_ms, 3), "parts_ms": case.parts_ms, "round_ms": case.round_ms, "rows": case.rows}
