"""Measures what a running server drafts with, over HTTP: each prompt with speculation and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from paceline.cli.http_client import ApiRefusedError, HttpClient, open_client
from paceline.cli.http_client import HttpCompletion as HttpAnswer
from paceline.cli.supervised_process import StartError
from paceline.config import SpeculativeConfig
from paceline.core.messages import SpeculationStats
from paceline.doctor.measurement import CONCURRENCIES, SEED, groups
from paceline.doctor.measurements import MeasuredAcceptance, MeasuredCompletion, MethodFacts, MethodMeasurement, Speed
from paceline.doctor.prompt_file import Prompt

USAGE = {"stream_options": {"include_usage": True}}
COUNTS = ("drafted_by_depth", "accepted_by_depth", "drafted_tokens", "verifications", "steps")


def measure(
    url: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperatures: Sequence[float],
    facts: MethodFacts,
    done: Callable[[], None] = lambda: None,
) -> MethodMeasurement:
    """`done` is told of each of the prompts `prompt_count`. After Ctrl-C, what was measured by then, if anything was.

    Raises `ServiceStartError` if no server answers at `url`, or it refuses a prompt.
    """
    try:
        return asyncio.run(_measure(url, prompts, max_tokens, temperatures, facts, done))
    except ApiRefusedError as error:
        raise StartError(f"the server at {url} refuses a prompt: {error}") from error
    except httpx.HTTPError as error:
        raise StartError(f"no server answers at {url} ({error}): start one with `paceline serve`") from error


def prompt_count(prompts: Sequence[Prompt], temperatures: Sequence[float]) -> int:
    """How many prompts, over all passes."""
    return sum(len(group) for _, at_once in passes(temperatures) for group in groups(prompts, at_once))


def passes(temperatures: Sequence[float]) -> list[tuple[float, int]]:
    """Over all prompts: at which temperature, and how many requests at once, which is tried at the first one only."""
    return [(each, n) for each in temperatures for n in (1, *CONCURRENCIES) if n == 1 or each == temperatures[0]]


async def _measure(
    url: str,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperatures: Sequence[float],
    facts: MethodFacts,
    done: Callable[[], None],
) -> MethodMeasurement:
    speeds: list[Speed] = []
    acceptances: list[MeasuredAcceptance] = []
    same = promised = True
    async with open_client(url) as client:
        model = await client.model()
        for temperature, at_once in passes(temperatures):
            sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": SEED, **USAGE}
            try:
                plain, speculative, (plain_s, speculative_s) = await _both(client, prompts, sampling, at_once, done)
            except asyncio.CancelledError:  # by Ctrl-C, the only one who does
                if not speeds:
                    raise
                break
            same &= [answer.tokens for answer in plain] == [answer.tokens for answer in speculative]
            promised &= all(answer.speculation["drafter_invariant"] for answer in speculative)
            if temperature == temperatures[0]:
                speeds.append(Speed(at_once, _tokens(plain) / plain_s, _tokens(speculative) / speculative_s))
            if at_once == 1:
                acceptances.append(MeasuredAcceptance(temperature, list(map(measured_completion, speculative))))
    identical = same if promised else None
    return MethodMeasurement(f"{model}, as served", SpeculativeConfig(), acceptances, speeds, identical, facts)


def measured_completion(answer: HttpAnswer) -> MeasuredCompletion:
    stats = SpeculationStats(**{key: answer.speculation[key] for key in COUNTS})
    return MeasuredCompletion(answer.prompt_tokens, answer.accepted, stats)


def body_of(prompt: Prompt) -> tuple[str, dict[str, Any]]:
    """Route and body."""
    if isinstance(prompt, str):
        return "/v1/completions", {"prompt": prompt}
    return "/v1/chat/completions", {"messages": list(prompt)}


async def _both(
    client: HttpClient, prompts: Sequence[Prompt], sampling: Mapping[str, Any], at_once: int, done: Callable[[], None]
) -> tuple[list[HttpAnswer], list[HttpAnswer], tuple[float, float]]:
    """Answers without and with speculation, and the seconds that each took. Prompts are cached before."""
    answers: tuple[list[HttpAnswer], list[HttpAnswer]] = ([], [])
    seconds = [0.0, 0.0]
    for group in groups(prompts, at_once):
        await _ask(client, group, {**sampling, "max_tokens": 1, "speculative": False})
        for side, speculative in enumerate((False, True)):
            began = time.perf_counter()
            answers[side].extend(await _ask(client, group, {**sampling, "speculative": speculative}))
            seconds[side] += time.perf_counter() - began
        for _ in group:
            done()
    return *answers, (seconds[0], seconds[1])


async def _ask(client: HttpClient, group: Sequence[Prompt], options: Mapping[str, Any]) -> list[HttpAnswer]:
    bodies = ((path, {**body, **options}) for path, body in map(body_of, group))
    return list(await asyncio.gather(*(client.collect(path, body) for path, body in bodies)))


def _tokens(answers: Sequence[HttpAnswer]) -> int:
    return sum(len(answer.tokens) for answer in answers)
