"""The completions of one request, interleaved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from paceline.core.messages import Delta, FinishReason
from paceline_services.gateway.served_model import interleaved


async def test_other_tasks_run_while_many_completions_begin() -> None:
    """One takes a moment to begin, so a thousand at once would stop every stream."""
    turn, begun = 0, []

    async def other_task() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def completion() -> AsyncGenerator[Delta]:
        begun.append(turn)
        yield Delta("r", finish_reason=FinishReason.STOP)

    task = asyncio.create_task(other_task())
    assert len([each async for each in interleaved([completion() for _ in range(10)])]) == 10
    task.cancel()
    assert len(set(begun)) == 10
