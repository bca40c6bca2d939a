"""`paceline bench control-plane`: the cost of everything but the model.

The models are tables: logits are looked up, in some ten microseconds instead of milliseconds, and the draft's table
agrees with the target's in seven contexts of ten. Everything else is real: HTTP and event streams, gateway,
frames over gRPC, scheduler, draws, verification, draft worker, Redis; each service in a process of its own, on the
machine that also runs the clients.

- `step_overhead_ms`, one request at a time: the time from sending a request to the end of its stream, on the
  client's clock, less the target's time inside the model, over the number of its steps; median over
  requests. It covers the whole request, so it is an upper bound of the control plane's share of a step.
- `tokens_per_s`: tokens that `streams` clients receive together, each sending its next request when one ends, over the
  time from the first request sent to the end of the last stream.
- `drafted_tokens`: draft tokens verified, over all requests sent one at a time. Where a step costs next to nothing,
  waiting for draft tokens does not pay, and the target does not wait: expect few.

Greedy; every stream must have the text of its prompt decoded alone and plainly, or the benchmark fails. While the
clock runs, clients only collect the bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import httpx
from rich.console import Console

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.http_client import TIMEOUT_S, HttpCompletion
from paceline.cli.progress import progress
from paceline.config import SpeculativeConfig
from paceline_lab.bench.measured_stack import ready_stack

TARGET = "table:4096"
DRAFT = "table:4096:0.3"
MAX_TOKENS = 256
PROMPTS = tuple(f"{7 * i} {11 * i} {13 * i}" for i in range(1, 41))
REQUESTS_ALONE = 20
REQUESTS_PER_STREAM = 6


class OutputDiffersError(Exception):
    """A stream's text differs from that of its prompt decoded alone and plainly."""


@dataclass(frozen=True, slots=True)
class ControlPlaneResult:
    step_overhead_ms: float
    tokens_per_s: float
    streams: int
    drafted_tokens: int


@dataclass(slots=True)
class Recording:
    """A received stream, not yet parsed."""

    prompt: str
    seconds: float
    body: bytes

    def completion(self) -> HttpCompletion:
        completion = HttpCompletion(wall_s=self.seconds)
        for line in self.body.splitlines():
            if line.startswith(b"data: {"):
                completion.take(json.loads(line.removeprefix(b"data: ")))
        return completion


def run(console: Console, streams: int) -> ControlPlaneResult:
    """Raises `StartError`, `StateError` or `OutputDiffersError`."""
    return asyncio.run(_run(console, streams))


async def measure(http: httpx.AsyncClient, streams: int, done: Callable[[], None] = lambda: None) -> ControlPlaneResult:
    """Measure the server of TARGET behind `http`. `done` is called after each request. Raises
    `OutputDiffersError`."""
    plain = await _client(http, PROMPTS, done, speculative=False)
    expected = {recording.prompt: recording.completion().text for recording in plain}
    alone = checked(await _client(http, PROMPTS[:REQUESTS_ALONE], done), expected)
    began = time.perf_counter()
    together = await asyncio.gather(*(_client(http, _share(number), done) for number in range(streams)))
    seconds = time.perf_counter() - began
    completions = [completion for recordings in together for completion in checked(recordings, expected)]
    return ControlPlaneResult(
        step_overhead_ms=round(median(map(_overhead_ms, alone)), 3),
        tokens_per_s=round(sum(len(completion.tokens) for completion in completions) / seconds, 1),
        streams=streams,
        drafted_tokens=sum(completion.speculation["drafted_tokens"] for completion in alone),
    )


async def _run(console: Console, streams: int) -> ControlPlaneResult:
    options = DeploymentOptions(TARGET, SpeculativeConfig(method="draft_model", model=DRAFT))
    async with (
        ready_stack(plan_deployment(options), console) as stack,
        httpx.AsyncClient(base_url=stack.deployment.url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        asked = len(PROMPTS) + REQUESTS_ALONE + streams * REQUESTS_PER_STREAM
        with progress(console, "requests", asked) as done:
            return await measure(http, streams, done)


def _share(number: int) -> Sequence[str]:
    """The prompts of one client. Each client has its own order, so few decode the same prompt at once."""
    return [PROMPTS[(number * REQUESTS_PER_STREAM + i) % len(PROMPTS)] for i in range(REQUESTS_PER_STREAM)]


async def _client(
    http: httpx.AsyncClient, prompts: Sequence[str], done: Callable[[], None], *, speculative: bool = True
) -> list[Recording]:
    """Send one request after another."""
    recordings = []
    for prompt in prompts:
        recordings.append(await _record(http, prompt, speculative))
        done()
    return recordings


async def _record(http: httpx.AsyncClient, prompt: str, speculative: bool) -> Recording:
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "speculative": speculative,
        "stream": True,
        "return_token_ids": True,
        "speculation_stats": True,
    }
    began = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        received = b"".join([part async for part in response.aiter_raw()])
        response.raise_for_status()
    return Recording(prompt, time.perf_counter() - began, received)


def checked(recordings: Sequence[Recording], expected: Mapping[str, str]) -> list[HttpCompletion]:
    """The completions. Raises `OutputDiffersError` unless all have the expected text."""
    completions = [recording.completion() for recording in recordings]
    for recording, completion in zip(recordings, completions, strict=True):
        if completion.text != expected[recording.prompt]:
            raise OutputDiffersError(f"after {recording.prompt!r}: {completion.text!r}")
    return completions


def _overhead_ms(completion: HttpCompletion) -> float:
    return float((completion.wall_s - completion.timings["compute_s"]) / completion.speculation["steps"] * 1e3)
