"""Waiting for something that happens in the background."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

PATIENCE_S = 120.0
"""Timeout for what must happen. Only a failing test waits that long."""


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. Raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError after `PATIENCE_S`."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def within(seconds: float = 20.0) -> Iterator[None]:
    """Let a loop try again until the time is over; then raise TimeoutError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
    raise TimeoutError(f"not within {seconds:g} s")
