"""Anthropic's client for Python."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.asked import FORECAST, LIMIT, MODEL, QUESTION, SCHEMA, URL, Forecast, speculated

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
GREEDY: Any = {"temperature": 0}
"""The client has no parameter for it any more."""
MESSAGE: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": LIMIT,
    "extra_body": GREEDY,
}
TOOL: Any = {"name": FORECAST["name"], "description": FORECAST["description"], "input_schema": SCHEMA}


def text_of_message(**fields: Any) -> str:
    message = client.messages.create(**MESSAGE | fields)
    assert message.stop_reason == "end_turn"
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_message(temperature: float) -> None:
    assert speculated(lambda body: text_of_message(extra_body={"temperature": temperature, "seed": 7, **body}))


def test_message_stream() -> None:
    with client.messages.stream(**MESSAGE) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of_message()
    assert final.usage.output_tokens > 0


def test_raw_stream() -> None:
    kinds = [event.type for event in client.messages.create(**MESSAGE, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_async_messages_at_once() -> None:
    async def messages() -> list[Any]:
        async with AsyncAnthropic(base_url=URL, auth_token="none") as many:
            return list(await asyncio.gather(*(many.messages.create(**MESSAGE) for _ in range(8))))

    assert len({message.content[0].text for message in asyncio.run(messages())}) == 1


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_forced_call(kind: str) -> None:
    choice: Any = {"type": "any"} if kind == "any" else {"type": "tool", "name": "forecast"}

    def inputs(body: Any) -> list[Any]:
        fields = MESSAGE | {"extra_body": GREEDY | body, "tools": [TOOL]}
        message = client.messages.create(**fields, tool_choice={**choice, "disable_parallel_tool_use": True})
        assert message.stop_reason == "tool_use"
        return [block.input for block in message.content if block.type == "tool_use" and block.name == "forecast"]

    [given] = speculated(inputs)
    Forecast.model_validate(given)


def test_forced_call_in_a_stream() -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**MESSAGE, tools=[TOOL], tool_choice=choice) as stream:
        final = stream.get_final_message()
    [given] = [block.input for block in final.content if block.type == "tool_use"]
    Forecast.model_validate(given)


def test_result_of_a_tool() -> None:
    turns: Any = [
        *MESSAGE["messages"],
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_1", "name": "forecast", "input": {"city": "Oslo"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
    ]
    fields = MESSAGE | {"messages": turns, "tools": [TOOL]}
    assert speculated(lambda body: client.messages.create(**fields | {"extra_body": GREEDY | body}).content)


def test_parsed_message() -> None:
    parsed = speculated(
        lambda body: (
            client.messages.parse(**MESSAGE | {"extra_body": GREEDY | body}, output_format=Forecast).parsed_output
        )
    )
    assert isinstance(parsed, Forecast)


def test_counted_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGE["messages"])
    usage = client.messages.create(**MESSAGE).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors() -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**MESSAGE | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**MESSAGE | {"extra_body": {"temperature": -1}})
