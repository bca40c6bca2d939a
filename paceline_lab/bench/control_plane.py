"""`paceline bench control-plane`: what everything but the model costs.

The models are tables: logits are looked up, in some ten microseconds instead of milliseconds, and the draft's table
agrees with the target's in seven contexts of ten. Everything else is in earnest: HTTP and event streams, gateway,
frames over gRPC, scheduler, draws, verification, draft worker, Redis; each service in a process of its own, on the
one machine that runs the clients too.

- `step_overhead_ms`, one request at a time: the time from sending a request to the end of its stream, on the
  client's clock, less the time that the target was inside the model, over the number of its steps; median over
  requests. Being the whole request's time, it is an upper bound of what the control plane adds to a step.
- `tokens_per_s`: what `streams` clients receive together, each sending its next request when one ends, over the time
  from the first request sent to the end of the last stream.
- `drafted_tokens`: how many guesses were verified at one request, over all of them. Where a step costs next to
  nothing, waiting for guesses does not pay, and the target knows it: expect few.

Greedy; every stream must have the text that its prompt gives when it is decoded alone and plainly, or the benchmark
fails. While the clock runs, clients only collect the bytes.
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
from paceline.cli.local_stack import ready_stack
from paceline.cli.progress import progress
from paceline.config import SpeculativeConfig

TARGET = "table:4096"
DRAFT = "table:4096:0.3"
MAX_TOKENS = 256
PROMPTS = tuple(f"{7 * i} {11 * i} {13 * i}" for i in range(1, 41))
REQUESTS_ALONE = 20
REQUESTS_PER_STREAM = 6


class OutputDiffersError(Exception):
    """A stream's text is not what its prompt gives when it is decoded alone and plainly."""


@dataclass(frozen=True, slots=True)
class ControlPlaneResult:
    step_overhead_ms: float
    tokens_per_s: float
    streams: int
    drafted_tokens: int


@dataclass(slots=True)
class Recording:
    """A stream as it came."""

    prompt: str
    seconds: float
    body: bytes

    def answer(self) -> HttpCompletion:
        answer = HttpCompletion(wall_s=self.seconds)
        for line in self.body.splitlines():
            if line.startswith(b"data: {"):
                answer.take(json.loads(line.removeprefix(b"data: ")))
        return answer


def run(console: Console, streams: int) -> ControlPlaneResult:
    """Raises `ServiceStartError`, `StateError` or `OverlapOutputDiffersError`."""
    return asyncio.run(_run(console, streams))


async def measure(http: httpx.AsyncClient, streams: int, done: Callable[[], None] = lambda: None) -> ControlPlaneResult:
    """Measure the server of TARGET behind `http`. `done` is told of each request. Raises
    `OverlapOutputDiffersError`."""
    plain = await _client(http, PROMPTS, done, speculative=False)
    expected = {recording.prompt: recording.answer().text for recording in plain}
    alone = checked(await _client(http, PROMPTS[:REQUESTS_ALONE], done), expected)
    began = time.perf_counter()
    together = await asyncio.gather(*(_client(http, _share(number), done) for number in range(streams)))
    seconds = time.perf_counter() - began
    answers = [answer for recordings in together for answer in checked(recordings, expected)]
    return ControlPlaneResult(
        step_overhead_ms=round(median(map(_overhead_ms, alone)), 3),
        tokens_per_s=round(sum(len(answer.tokens) for answer in answers) / seconds, 1),
        streams=streams,
        drafted_tokens=sum(answer.speculation["drafted_tokens"] for answer in alone),
    )


async def _run(console: Console, streams: int) -> ControlPlaneResult:
    wish = DeploymentOptions(TARGET, SpeculativeConfig(method="draft_model", model=DRAFT))
    async with (
        ready_stack(plan_deployment(wish), console) as stack,
        httpx.AsyncClient(base_url=stack.deployment.url, timeout=TIMEOUT_S, trust_env=False) as http,
    ):
        asked = len(PROMPTS) + REQUESTS_ALONE + streams * REQUESTS_PER_STREAM
        with progress(console, "requests", asked) as done:
            return await measure(http, streams, done)


def _share(number: int) -> Sequence[str]:
    """The prompts of one of the clients: each has its own order, so that few run at the same place."""
    return [PROMPTS[(number * REQUESTS_PER_STREAM + i) % len(PROMPTS)] for i in range(REQUESTS_PER_STREAM)]


async def _client(
    http: httpx.AsyncClient, prompts: Sequence[str], done: Callable[[], None], *, speculative: bool = True
) -> list[Recording]:
    """One request after the other."""
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
    answers = [recording.answer() for recording in recordings]
    for recording, answer in zip(recordings, answers, strict=True):
        if answer.text != expected[recording.prompt]:
            raise OutputDiffersError(f"after {recording.prompt!r}: {answer.text!r}")
    return answers


def _overhead_ms(answer: HttpCompletion) -> float:
    return float((answer.wall_s - answer.timings["compute_s"]) / answer.speculation["steps"] * 1e3)
