"""Items of the Responses API as messages of a chat, and which of them stay if the context is too short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.responses.conversion import chat_messages
from paceline_services.gateway.responses.generation import TOO_LONG, truncated_to_fit
from paceline_services.gateway.responses.input_items import InputItem, MessageItem

ITEMS = TypeAdapter(list[InputItem])


def message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def thought(text: str) -> dict[str, Any]:
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "content": parts}


def call(id_: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": "{}"}


def output(id_: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": text}


def chat_call(id_: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(id_: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "name": "f", "content": text}


@pytest.mark.parametrize(
    ("instructions", "items", "messages"),
    [
        (None, [message("user", "a")], [message("user", "a")]),
        (
            "i",
            [message("developer", "d"), message("system", "s"), message("user", "a"), message("developer", "late")],
            [message("system", "i\n\nd\n\ns"), message("user", "a"), message("system", "late")],
        ),
        (
            None,
            [message("user", "a"), thought("t"), message("assistant", "b"), call("1"), call("2"), output("1", "x")],
            [
                message("user", "a"),
                {**message("assistant", "b"), "reasoning_content": "t", "tool_calls": [chat_call("1"), chat_call("2")]},
                tool("1", "x"),
            ],
        ),
        (
            None,
            [message("assistant", "b"), message("assistant", "c"), thought("t"), call("1"), message("assistant", "d")],
            [
                message("assistant", "b"),
                message("assistant", "c"),
                {**message("assistant", ""), "reasoning_content": "t", "tool_calls": [chat_call("1")]},
                message("assistant", "d"),
            ],
        ),
        (
            None,
            [thought("t"), thought("u"), message("user", [{"type": "input_text", "text": t} for t in "ab"])],
            [{**message("assistant", ""), "reasoning_content": "tu"}, message("user", "a\nb")],
        ),
    ],
    ids=["one", "system", "all parts of a turn", "several of the assistant", "texts in parts"],
)
def test_items_become_messages(
    instructions: str | None, items: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> None:
    assert chat_messages(instructions, ITEMS.validate_python(items)) == messages


def test_what_the_api_shows_of_items_are_items_again() -> None:
    """Stored conversations are read from it."""
    given = [message("user", "a"), thought("t"), message("assistant", "b"), call("1"), output("1", "x")]
    items = ITEMS.validate_python(given)
    shown = [item.as_json(f"id_{index}") for index, item in enumerate(items)]
    again = ITEMS.validate_python(shown)
    assert chat_messages(None, again) == chat_messages(None, items)
    assert [item.as_json("new") for item in again] == shown


@settings(max_examples=100)
@given(
    roles=st.lists(st.sampled_from(["user", "user", "user", "assistant", "system"]), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 9), min_size=12, max_size=12),
    room=st.integers(1, 60),
)
async def test_as_many_of_the_latest_turns_as_fit(roles: list[str], sizes: list[int], room: int) -> None:
    """By search from the longest."""
    items = ITEMS.validate_python([message(role, "x" * size) for role, size in zip(roles, sizes, strict=False)])

    async def build(kept: Sequence[InputItem]) -> Sequence[InputItem]:
        if sum(len(item.text) for item in kept if isinstance(item, MessageItem)) > room:
            raise InvalidRequestError("too long", code=TOO_LONG)
        return kept

    starts = [0, *(index for index, role in enumerate(roles) if role == "user" and index)]
    for start in starts:
        kept = [item for index, item in enumerate(items) if index >= start or roles[index] == "system"]
        if sum(len(item.text) for item in kept if isinstance(item, MessageItem)) <= room:
            assert await truncated_to_fit(items, build) == kept
            return
    with pytest.raises(InvalidRequestError):
        await truncated_to_fit(items, build)
