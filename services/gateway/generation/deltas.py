"""Streams of deltas: several as one, a whole one, and one with fewer deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias

from paceline.output_processor import TextDelta
from paceline_services.gateway.generation.completion_request import CompletionRequest

Deltas: TypeAlias = AsyncGenerator[tuple[int, TextDelta]]
"""The deltas of an API request's completions as they come, each with its completion's index."""


async def collect(requests: Sequence[CompletionRequest], deltas: Deltas) -> list[TextDelta]:
    """The whole output of each completion."""
    outputs = [TextDelta(each.request_id) for each in requests]
    async with aclosing(deltas):
        async for index, delta in deltas:
            outputs[index].extend(delta)
    return outputs


async def interleaved(outputs: Mapping[int, AsyncGenerator[TextDelta]]) -> Deltas:
    """The deltas of several generators as they come, each with its generator's key. The first error ends all."""
    if len(outputs) == 1:
        [(index, deltas)] = outputs.items()
        async with aclosing(deltas):
            async for delta in deltas:
                yield index, delta
        return
    ready: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()
    tasks = []
    try:
        for index, deltas in outputs.items():
            tasks.append(asyncio.create_task(_enqueue(ready, index, deltas)))
            await asyncio.sleep(0)  # a thousand requests take seconds: let other requests run between them
        running = len(tasks)
        while running:
            index, delta_or_error = await ready.get()
            if isinstance(delta_or_error, Exception):
                raise delta_or_error
            running -= delta_or_error.finish_reason is not None
            yield index, delta_or_error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _enqueue(
    ready: asyncio.Queue[tuple[int, TextDelta | Exception]], index: int, deltas: AsyncGenerator[TextDelta]
) -> None:
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                ready.put_nowait((index, delta))
    except Exception as error:  # noqa: BLE001 - `interleaved` raises it
        ready.put_nowait((index, error))


class DeltaBuffer:
    """Joins the deltas of each completion until they have `interval` tokens.

    The first tokens and the end of a completion do not wait, as in vLLM. A delta without tokens joins the next one.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, TextDelta] = {}
        self._begun: set[int] = set()

    def add(self, index: int, delta: TextDelta) -> TextDelta | None:
        """What is to be sent of the index-th completion now."""
        if (held := self._held.pop(index, None)) is not None:
            held.extend(delta)
            delta = held
        least = self._interval if index in self._begun else 1
        if len(delta.tokens) < least and delta.finish_reason is None:
            self._held[index] = delta
            return None
        self._begun.add(index)
        return delta
