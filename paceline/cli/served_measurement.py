"""Measures a running server over HTTP: each prompt with speculation and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.cli.http_client import HttpClient, HttpCompletion, open_client
from paceline.config import SpeculativeConfig
from paceline.doctor.measurement import CONCURRENCIES, SEED, groups
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.doctor.prompt_file import Prompt
from paceline.messages import SpeculationStats

USAGE = {"stream_options": {"include_usage": True}}
COUNTS = ("drafted_by_depth", "accepted_by_depth", "drafted_tokens", "verifications", "steps")


def prompt_count(prompts: Sequence[Prompt], temperatures: Sequence[float]) -> int:
    """The number of prompts in all passes."""
    return sum(len(group) for _, at_once in passes(temperatures) for group in groups(prompts, at_once))


def passes(temperatures: Sequence[float]) -> list[tuple[float, int]]:
    """Temperature and requests at once of each pass. Only the first temperature has several at once."""
    return [(each, n) for each in temperatures for n in (1, *CONCURRENCIES) if n == 1 or each == temperatures[0]]


async def measure(
    url: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperatures: Sequence[float],
    facts: MethodFacts,
    done: Callable[[], None],
) -> MethodMeasurement:
    """`done` is called `prompt_count` times. Ctrl-C ends it with the results so far; without any it is raised.

    Raises `ApiRefusedError` if the server at `url` refuses a prompt, httpx's errors if none answers there.
    """
    speeds: list[Speed] = []
    acceptances: list[MeasuredAcceptance] = []
    same = promised = True
    async with open_client(url) as client:
        model = await client.model()
        for temperature, at_once in passes(temperatures):
            sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": SEED, **USAGE}
            try:
                plain, speculative, (plain_s, speculative_s) = await _paired(client, prompts, sampling, at_once, done)
            except asyncio.CancelledError:  # only Ctrl-C cancels
                if not speeds:
                    raise
                break
            same &= [each.tokens for each in plain] == [each.tokens for each in speculative]
            promised &= all(each.speculation["drafter_invariant"] for each in speculative)
            if temperature == temperatures[0]:
                speeds.append(Speed(at_once, _tokens(plain) / plain_s, _tokens(speculative) / speculative_s))
            if at_once == 1:
                acceptances.append(MeasuredAcceptance(temperature, list(map(measured_completion, speculative))))
    identical = same if promised else None
    return MethodMeasurement(f"{model}, as served", SpeculativeConfig(), acceptances, speeds, identical, facts)


def measured_completion(completion: HttpCompletion) -> MeasuredCompletion:
    stats = SpeculationStats(**{key: completion.speculation[key] for key in COUNTS})
    return MeasuredCompletion(completion.prompt_tokens, completion.accepted, stats)


def body_of(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Route and body of a request."""
    if isinstance(prompt, str):
        return "/v1/completions", {"prompt": prompt}
    return "/v1/chat/completions", {"messages": list(prompt)}


async def _paired(
    client: HttpClient, prompts: Sequence[Prompt], sampling: Mapping[str, Any], at_once: int, done: Callable[[], None]
) -> tuple[list[HttpCompletion], list[HttpCompletion], tuple[float, float]]:
    """Completions without and with speculation, and the seconds of each. Prompts are cached before."""
    completions: tuple[list[HttpCompletion], list[HttpCompletion]] = ([], [])
    seconds = [0.0, 0.0]
    for group in groups(prompts, at_once):
        await _collect(client, group, {**sampling, "max_tokens": 1, "speculative": False})
        for side, speculative in enumerate((False, True)):
            began = time.perf_counter()
            completions[side].extend(await _collect(client, group, {**sampling, "speculative": speculative}))
            seconds[side] += time.perf_counter() - began
        for _ in group:
            done()
    return *completions, (seconds[0], seconds[1])


async def _collect(client: HttpClient, group: Sequence[Prompt], options: Mapping[str, Any]) -> list[HttpCompletion]:
    bodies = ((path, {**body, **options}) for path, body in map(body_of, group))
    return list(await asyncio.gather(*(client.collect(path, body) for path, body in bodies)))


def _tokens(completions: Sequence[HttpCompletion]) -> int:
    return sum(len(completion.tokens) for completion in completions)
