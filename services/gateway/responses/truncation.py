"""`truncation: auto`: a conversation that exceeds the context loses its oldest turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.responses.conversion import SYSTEM_ROLES
from paceline_services.gateway.responses.input_items import InputItem, MessageItem

TOO_LONG = "context_length_exceeded"
"""The code of the error for a conversation that exceeds the context."""

T = TypeVar("T")


async def truncated_to_fit(items: Sequence[InputItem], build: Callable[[Sequence[InputItem]], Awaitable[T]]) -> T:
    """What `build` makes of the most turns, the latest ones, that it does not refuse as too long.

    A turn begins with a message of the user. System messages stay. Raises what `build` raises, for the latest turn if
    that is too long itself.
    """
    turns = [index for index, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
    starts = [0, *(index for index in turns if index > 0)]
    low, high, built = 0, len(starts) - 1, None
    while low < high:
        middle = (low + high) // 2
        try:
            built, high = await build(from_turn(items, starts[middle])), middle
        except InvalidRequestError as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
    if built is None:  # all but the latest turn alone were too long
        return await build(from_turn(items, starts[high]))
    return built


def from_turn(items: Sequence[InputItem], start: int) -> list[InputItem]:
    """The items from `start` on, and the system messages before it."""
    return [item for index, item in enumerate(items) if index >= start or _is_system(item)]


def _is_system(item: InputItem) -> bool:
    return isinstance(item, MessageItem) and item.role in SYSTEM_ROLES
