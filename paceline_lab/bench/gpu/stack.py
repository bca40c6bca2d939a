"""The whole stack on one GPU, its draft in a process of its own: streams through the gateway.

`itl_ms` is the time between tokens, the median over streams; `longest_gap_ms` the longest wait for the next chunk.
`identical`: every stream has the tokens of `LLM`, without drafts, in one process on the same GPU.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice, pairwise
from statistics import median
from typing import Any

import torch
from rich.console import Console

from paceline import family
from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.config import EngineConfig, SamplingParams
from paceline.doctor.prompt_file import code_prompts
from paceline.llm import LLM
from paceline_lab.bench.bench_measurement import results_kept_on_interrupt
from paceline_lab.bench.measured_stack import ready_stack

STREAMS = {"cuda": (1, 8, 64), "cpu": (1, 2)}
MAX_TOKENS = {"cuda": 96, "cpu": 8}
SLOTS = 2**15


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    streams, max_tokens = STREAMS[device.type], MAX_TOKENS[device.type]
    engine = EngineConfig(device=str(device), slots=SLOTS)
    prompts = [f"# {i}\n{prompt}" for i, prompt in enumerate(islice(cycle(code_prompts()), streams[-1]))]
    expected = _decoded(engine, prompts, max_tokens)
    found: dict[str, Any] = {}
    with results_kept_on_interrupt(Console(stderr=True)):
        asyncio.run(_serve(engine, expected, streams, max_tokens, found))
    yield found


def _decoded(engine: EngineConfig, prompts: Sequence[str], max_tokens: int) -> dict[str, list[int]]:
    """Tokens by prompt. The model's memory is free again afterwards."""
    llm = LLM(family.NAMES[0], engine_config=engine)
    completions = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), speculative=False)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return {prompt: each.tokens for prompt, each in zip(prompts, completions, strict=True)}


async def _serve(
    engine: EngineConfig,
    expected: Mapping[str, Sequence[int]],
    streams: Sequence[int],
    max_tokens: int,
    found: dict[str, Any],
) -> None:
    """Adds the figures of each number of streams to `found`."""
    options = DeploymentOptions(engine=engine)
    async with (
        ready_stack(plan_deployment(options), Console(stderr=True)) as stack,
        open_client(stack.deployment.url) as client,
    ):
        await asyncio.gather(*(_stream(client, prompt, max_tokens) for prompt in expected))  # captures graphs
        for count in streams:
            began = time.perf_counter()
            prompts = list(expected)[:count]
            received = await asyncio.gather(*(_stream(client, prompt, max_tokens) for prompt in prompts))
            figures = _figures(received, time.perf_counter() - began)
            identical = [each.tokens for each, _ in received] == [expected[prompt] for prompt in prompts]
            found[f"{count} streams"] = {**figures, "identical": identical}


Received = tuple[HttpCompletion, list[float]]
"""A completion, and when its chunks came."""


async def _stream(client: HttpClient, prompt: str, max_tokens: int) -> Received:
    times: list[float] = []
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    completion = await client.stream("/v1/completions", body, lambda _: times.append(time.perf_counter()))
    return completion, times


def _figures(received: Sequence[Received], seconds: float) -> dict[str, float]:
    tokens = sum(len(each.tokens) for each, _ in received)
    between = [(times[-1] - times[0]) / max(1, len(each.tokens) - 1) for each, times in received]
    longest = max(after - before for _, times in received for before, after in pairwise(times))
    return {
        "tokens_per_s": round(tokens / seconds),
        "itl_ms": round(1e3 * median(between), 3),
        "longest_gap_ms": round(1e3 * longest, 3),
    }
