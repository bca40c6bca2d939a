"""Responses of Anthropic's Messages API as its official client reads them, and as a terminal agent asks for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from tests.contract.anthropic_stack import (
    CONTEXT,
    COUNT_TOKENS,
    MESSAGES,
    THINKING,
    USER,
    WEATHER,
    MessagesStack,
    complete,
    open_messages_stack,
    reminder,
    says,
)
from tests.helpers.openai_stack import MODEL, TOKENIZER, counts, open_stack
from tests.helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLS = (
    "I look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"town": "Köln", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)
CUT_OFF = CALLS[: CALLS.index("ln")]
AGENT = json.loads(Path(__file__).with_name("claude_code.json").read_text(encoding="utf-8"))
"""Requests as Claude Code 2.1 sends them, written after its gateway protocol reference (code.claude.com) and captures
that its users have published."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[MessagesStack]:
    async with open_messages_stack() as stack:
        yield stack


async def test_the_official_client_gets_a_message(served: MessagesStack) -> None:
    """The scripted target reports one cached token for every completion."""
    served.speak("Grüße, 東京")
    message = await served.create()
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Grüße, 東京"}
    ]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    request = served.stack.decoder.requests[-1]
    assert message.id == f"msg_{request.group}"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (len(request.prompt) - 1, 1)
    assert message.usage.output_tokens == len(TOKENIZER.encode("Grüße, 東京", add_special_tokens=False)) + 1
    assert message._request_id, "the client finds the request's id"


OUTPUTS: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "text": ("hello", {}, ["text"], "end_turn"),
    "nothing": ("", {}, [], "end_turn"),
    "reasoning": ("let me\nthink</think>\n\nhello", {"thinking": THINKING}, ["thinking", "text"], "end_turn"),
    "reasoning that nobody asked for": ("<think>let me think</think>hello", {}, ["text"], "end_turn"),
    "reasoning, omitted": (
        "let me think</think>hello",
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        ["thinking", "text"],
        "end_turn",
    ),
    "calls": (CALLS, {"tools": [WEATHER]}, ["text", "tool_use", "tool_use"], "tool_use"),
    "reasoning and calls": (
        f"hm</think>{CALLS}",
        {"tools": [WEATHER], "thinking": THINKING},
        ["thinking", "text", "tool_use", "tool_use"],
        "tool_use",
    ),
    "calls without tools": (CALLS, {}, ["text"], "end_turn"),
    "a call cut off": (
        CALLS,
        {"tools": [WEATHER], "max_tokens": len(TOKENIZER.encode(CUT_OFF, add_special_tokens=False))},
        ["text", "tool_use"],
        "max_tokens",
    ),
}
"""By name: an output, fields of the request, the types of the response's blocks, and the stop reason."""


def anonymous(message: Any) -> Any:
    """The message without what is derived from its request's id."""
    return json.loads(re.sub(r"[0-9a-f]{24,}", "", message.model_dump_json(exclude_none=True)))


@pytest.mark.parametrize("name", OUTPUTS)
async def test_a_stream_adds_up_to_the_whole_message(served: MessagesStack, name: str) -> None:
    text, fields, types, stop_reason = OUTPUTS[name]
    served.speak(text)
    whole, streamed = await served.create(**fields), await served.stream(**fields)
    assert anonymous(streamed) == anonymous(whole)
    assert ([block.type for block in whole.content], whole.stop_reason) == (types, stop_reason)


@pytest.mark.parametrize("name", OUTPUTS)
async def test_the_events_of_a_stream_are_in_order(served: MessagesStack, name: str) -> None:
    text, fields, types, _ = OUTPUTS[name]
    served.speak(text)
    start, ping, *blocks, delta, stop = await served.events(**fields)
    outer = [event["type"] for event in (start, ping, delta, stop)]
    assert outer == ["message_start", "ping", "message_delta", "message_stop"]
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    steps = "".join(f"{event['type'].removeprefix('content_block_')[0]}{event['index']}" for event in blocks)
    assert re.fullmatch("".join(f"s{index}(d{index})*s{index}" for index in range(len(types))), steps), steps
    counted = delta["usage"]
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == start["message"]["usage"]["input_tokens"]


async def test_text_is_streamed_as_it_comes(served: MessagesStack) -> None:
    served.speak("one two three four five six")
    texts = [event["delta"]["text"] for event in await served.events() if event["type"] == "content_block_delta"]
    assert len(texts) > 1
    assert "".join(texts) == "one two three four five six"


async def test_a_tool_s_round_trip(served: MessagesStack) -> None:
    served.speak(CALLS)
    first = await served.stream(tools=[WEATHER])
    _, call, other = first.content
    assert (call.input, other.input) == ({"town": "Köln", "days": [1, 2]}, {})
    assert call.id != other.id
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": "rain"} for each in (call, other)]
    served.speak("Rain.")
    prompt = await served.prompt(
        tools=[WEATHER],
        messages=[USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}],
    )
    tools, _, conversation = prompt.partition("</tools>")
    shown = json.loads(tools.removeprefix("<tools>"))
    assert (shown["name"], shown["parameters"]) == ("weather", WEATHER["input_schema"])
    assert conversation == (
        "[user]hi[assistant]I look."
        '<tool_call>{"name": "weather", "arguments": {"town": "Köln", "days": [1, 2]}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
        f"[tool {call.id}]rain[tool {other.id}]rain[assistant]"
    )


@pytest.mark.parametrize("arguments", ["[1}", '{"days": 1e999}', "{days: 2024}"])
async def test_arguments_that_are_no_object_are_kept(served: MessagesStack, arguments: str) -> None:
    served.speak(f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>')
    [call] = (await served.create(tools=[WEATHER])).content
    assert call.input == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    ("arguments", "complete"),
    [
        ('{"', {}),
        ('{"days": 1', {}),
        ('{"days": -1.5e', {}),
        ('{"days": -', {}),
        ('{"dry": true', {"dry": True}),
        ('{"days": [1, 23', {"days": [1]}),
        ('{"days": 17, "dry": t', {"days": 17}),
        ('{"days": 17, "town": "Ul', {"days": 17}),
    ],
)
async def test_values_that_a_limit_cuts_off_are_left_out(
    served: MessagesStack, arguments: str, complete: dict[str, Any]
) -> None:
    """A number that ends at the cut may have more digits."""
    served.speak(f'<tool_call>{{"name": "weather", "arguments": {arguments}')
    message = await served.create(tools=[WEATHER])
    assert message.content[-1].input == complete


async def test_reasoning_returns_with_the_conversation(served: MessagesStack) -> None:
    served.speak("let me think</think>hello")
    message = await served.create(thinking=THINKING)
    thinking, _ = message.content
    assert (thinking.thinking, bool(thinking.signature)) == ("let me think", True)
    messages = [USER, {"role": "assistant", "content": message.content}, USER]
    prompt = await served.prompt(messages=messages, thinking=THINKING)
    assert prompt == "[user]hi[assistant]<think>let me think</think>hello[user]hi[assistant]<think>"


async def test_omitted_reasoning_leaves_a_signature(served: MessagesStack) -> None:
    served.speak("let me think</think>hello")
    thinking, _ = (await served.stream(thinking={"type": "adaptive", "display": "omitted"})).content
    assert (thinking.thinking, bool(thinking.signature)) == ("", True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown", "reason", "sequence"),
    [
        ({"stop_sequences": ["three", "nowhere"]}, "one two ", "stop_sequence", "three"),
        ({"stop_sequences": ["nowhere"]}, "one two three", "end_turn", None),
        ({"max_tokens": 1}, TOKENIZER.decode(TOKENIZER.encode("one two three")[:1]), "max_tokens", None),
    ],
)
async def test_why_a_message_ends(
    served: MessagesStack, stream: bool, fields: Any, shown: str, reason: str, sequence: str | None
) -> None:
    served.speak("one two three")
    message = await (served.stream if stream else served.create)(**fields)
    [block] = message.content
    assert (block.text, message.stop_reason, message.stop_sequence) == (shown, reason, sequence)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_an_abort_cuts_off_is_not_to_be_run(served: MessagesStack, stream: bool) -> None:
    served.speak(CUT_OFF + "ln" * 50)
    decoder = served.stack.decoder
    decoder.hold_after = 12
    asking = asyncio.create_task((served.stream if stream else served.create)(tools=[WEATHER]))
    await until(lambda: not decoder.gate.is_set())
    await served.stack.all_received()
    assert served.stack.models.abort("", decoder.requests[-1].group)
    decoder.gate.set()
    message = await asking
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.stop_reason == "end_turn"


async def test_a_limit_beyond_the_context_ends_where_the_context_ends() -> None:
    async with open_stack(counts, context=128) as small:
        answer = (await small.http.post(MESSAGES, json=complete(max_tokens=32_000))).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 128


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "A", "messages": [USER, says("assistant", "b"), USER]},
        {"tools": [WEATHER], "thinking": THINKING},
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"output_config": {"effort": "max"}},
        {"messages": [USER, says("assistant", "It is (")]},
    ],
)
async def test_counted_tokens_are_those_of_the_prompt(served: MessagesStack, fields: Any) -> None:
    served.speak("x")
    usage = (await served.create(**fields)).usage
    counted = await served.client.messages.count_tokens(**complete(**fields, max_tokens=None))
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_a_terminal_agent_s_turn(served: MessagesStack) -> None:
    served.speak(f"twelve</think>It has 12 lines.{CALLS.removeprefix('I look.').replace('weather', 'Read')}")
    served.stack.decoder.requests.clear()
    *_, delta, _ = await served.events(AGENT["headers"], **AGENT["turn"])
    assert delta["delta"]["stop_reason"] == "tool_use"
    [request] = served.stack.decoder.requests
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt)
    assert TOKENIZER.decode(request.prompt).partition("</tools>")[2] == (
        "[system]You are Claude Code, Anthropic's official CLI for Claude.\n\n"
        "You are an interactive agent that helps users with software engineering tasks.[user]"
        + reminder("As you answer the user's questions, you can use the following context.")
        + "\n\nHow long is notes.txt?\n\n"
        + reminder("Available agent types: general-purpose")
        + "[assistant]<think>I should count the lines.</think>I count its lines."
        '<tool_call>{"name": "Bash", "arguments": {"command": "wc -l notes.txt", "description": "Count lines"}}'
        "</tool_call>[tool toolu_01A09q90qw90lq917835lq9]12 notes.txt[assistant medium]<think>"
    )


async def test_a_terminal_agent_s_title_is_bound_to_its_schema(served: MessagesStack) -> None:
    served.speak('{"title": "Length of notes.txt"}')
    served.stack.decoder.requests.clear()
    *_, delta, _ = await served.events(AGENT["headers"], **AGENT["title"])
    assert delta["delta"]["stop_reason"] == "end_turn"
    [request] = served.stack.decoder.requests
    assert "title" in request.sampling.grammar


async def test_a_terminal_agent_counts_a_tool(served: MessagesStack) -> None:
    answer = await served.stack.http.post(f"{COUNT_TOKENS}?beta=true", json=AGENT["count"], headers=AGENT["headers"])
    bare = await served.post(COUNT_TOKENS, messages=AGENT["count"]["messages"], max_tokens=None)
    assert answer.json()["input_tokens"] > bare.json()["input_tokens"] > 0


async def test_the_description_matches_the_api(served: MessagesStack) -> None:
    served.speak("hello")
    answer = await served.stack.http.get("/openapi.json")
    schema = answer.json()
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) <= set(schema["components"]["schemas"])
    assert "text/event-stream" in schema["paths"][MESSAGES]["post"]["responses"]["200"]["content"]
    answered, refused = await served.post(), await served.post(max_tokens=0)
    for name, each in (
        ("MessagesBody", complete(system="A")),
        ("MessagesBody", AGENT["turn"]),
        ("CountTokensBody", AGENT["count"]),
        ("Message", answered.json()),
        ("MessagesError", refused.json()),
    ):
        described = {"$ref": f"#/components/schemas/{name}", "components": schema["components"]}
        assert validator_for(described, Draft202012Validator)(described).is_valid(each), name
