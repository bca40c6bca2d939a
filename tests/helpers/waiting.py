"""Waiting for something that happens in the background."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds. Raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
