"""Requests of Anthropic's Messages API: what the model reads, what has no effect, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from paceline_services.gateway.anthropic.bodies import MessagesBody
from paceline_services.gateway.anthropic.conversion import chat_body
from tests.contract.anthropic_stack import (
    THINKING,
    TOOL_USE,
    USER,
    WEATHER,
    MessagesStack,
    complete,
    error_of,
    open_messages_stack,
    reminder,
    result,
    says,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[MessagesStack]:
    async with open_messages_stack() as stack:
        yield stack


CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
CONVERSATIONS: dict[str, tuple[Any, list[Any], str]] = {
    "no system": (None, [USER], "[user]hi[assistant]"),
    "system": ("A", [USER], "[system]A[user]hi[assistant]"),
    "system in blocks": (
        [{"type": "text", "text": each} for each in ("x-anthropic-billing-header: cch=1;", "A", "B")],
        [USER],
        "[system]A\n\nB[user]hi[assistant]",
    ),
    "a system message first": ("A", [says("system", "B"), USER], "[system]A\n\nB[user]hi[assistant]"),
    "one after the user": (None, [USER, says("system", "B")], f"[user]hi\n\n{reminder('B')}[assistant]"),
    "one after the assistant": (
        None,
        [USER, says("assistant", "b"), says("system", "B"), USER],
        f"[user]hi[assistant]b[user]{reminder('B')}\n\nhi[assistant]",
    ),
    "one after a result": (
        None,
        [USER, says("assistant", TOOL_USE), says("user", result("r")), says("system", "B")],
        f"[user]hi[assistant]{CALL}[tool t1]r\n\n{reminder('B')}[assistant]",
    ),
    "a system block": (
        None,
        [says("user", "hi", {"type": "mid_conv_system", "content": [{"type": "text", "text": "B"}]})],
        f"[user]hi\n\n{reminder('B')}[assistant]",
    ),
    "messages of one role in a row": (
        None,
        [says("user", "a", "b"), says("user", "", "c"), says("assistant", "d"), says("assistant", "e"), USER],
        "[user]a\n\nb\n\nc[assistant]d\n\ne[user]hi[assistant]",
    ),
    "text beside a result": (
        None,
        [USER, says("assistant", "c", TOOL_USE), says("user", "b", result([{"type": "text", "text": "r"}]))],
        f"[user]hi[assistant]c{CALL}[tool t1]r[user]b[assistant]",
    ),
    "an error": (
        None,
        [USER, says("assistant", TOOL_USE), says("user", result("bad", is_error=True))],
        f"[user]hi[assistant]{CALL}[tool t1]Error: bad[assistant]",
    ),
    "a tool that was searched": (
        None,
        [USER, says("assistant", TOOL_USE), says("user", result([{"type": "tool_reference", "tool_name": "g"}]))],
        f"[user]hi[assistant]{CALL}[tool t1]The tool g is available.[assistant]",
    ),
    "redacted thinking": (
        None,
        [USER, says("assistant", {"type": "redacted_thinking", "data": "x"}, "b"), USER],
        "[user]hi[assistant]b[user]hi[assistant]",
    ),
    "a beginning to continue": (None, [USER, says("assistant", "It is (")], "[user]hi[assistant]It is ("),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_what_the_model_reads(served: MessagesStack, name: str) -> None:
    system, messages, expected = CONVERSATIONS[name]
    assert await served.prompt(system=system, messages=messages) == expected


CHOICE = {"type": "function", "function": {"name": "weather"}}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"tool_choice": None, "parallel_tool_calls": None, "response_format": None}),
    ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": None}),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
    ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
    ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
    ({"tool_choice": {"type": "tool", "name": "weather"}}, {"tool_choice": CHOICE}),
    ({"temperature": 0.5, "top_p": 0.25, "top_k": 3}, {"temperature": 0.5, "top_p": 0.25, "top_k": 3}),
    ({"max_tokens": 7, "stop_sequences": ["a"], "seed": 5}, {"max_tokens": 7, "stop": ["a"], "seed": 5}),
    ({"metadata": {"user_id": "me", "other": 1}}, {"prompt_cache_key": "me"}),
    ({"speculative": False}, {"speculative": {"enabled": False}}),
    ({"output_config": {"effort": "xhigh"}}, {"chat_template_kwargs": {"reasoning_effort": "high"}}),
    ({}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
    ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
    ({"chat_template_kwargs": {"thinking": 5}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": 5}}),
    ({"output_format": {"type": "json_schema", "schema": {}}}, {"response_format": {"type": "json_schema"}}),
]
"""Fields, and what they become in a chat completion: in objects at least this."""


@pytest.mark.parametrize(("given", "expected"), FIELDS)
async def test_fields_become_those_of_a_chat_completion(given: dict[str, Any], expected: dict[str, Any]) -> None:
    raw = json.dumps(complete(tools=[WEATHER]) | given)
    converted = chat_body(MessagesBody.model_validate_json(raw)).model_dump()
    for name, value in expected.items():
        assert converted[name] == (converted[name] | value if isinstance(value, dict) else value), name


async def test_parameters_reach_the_target(served: MessagesStack) -> None:
    served.stack.decoder.requests.clear()
    await served.create(temperature=0.5, top_k=3, seed=11, speculative=False)
    [request] = served.stack.decoder.requests
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 11)
    assert request.speculative.enabled is False


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": None}, "missing parameter: max_tokens"),
        ({"model": None}, "missing parameter: model"),
        ({"temperature": -1}, "temperature: must be at least 0"),
        ({"temperature": "1"}, "temperature: must be a number"),
        ({"top_p": 0}, "top_p: must be more than 0"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]: must have at least 1"),
        ({"messages": []}, "messages: must have at least 1"),
        ({"messages": [says("system", "A")]}, "messages: one with role user"),
        ({"messages": [says("user", IMAGE)]}, r"messages\[0\]\.content: content of type image is not supported"),
        (
            {"messages": [says("user", result([IMAGE]))]},
            r"^messages\[0\]\.content\[0\]\.content: content of type image",
        ),
        ({"messages": [says("user", {"type": "document"})]}, "content of type document is not supported"),
        ({"messages": [says("user", TOOL_USE)]}, r"messages\[0\]: content of type tool_use is not possible"),
        ({"messages": [USER, says("assistant", TOOL_USE)]}, "no text to continue"),
        ({"messages": [says("user", {"text": "x"})]}, r"messages\[0\]\.content\[0\]: must be an object with a type"),
        (
            {"messages": [says("user", {"type": "text", "text": 3})]},
            r"^messages\[0\]\.content\[0\]\.text: must be a text",
        ),
        ({"messages": [says("user", {"type": 3})]}, r"content\[0\]: type '3' is not supported, only 'text', 'mid"),
        (
            {"messages": [says("user", result([{"type": "tool_reference"}]))]},
            r"^missing parameter: messages\[0\]\.content\[0\]\.content\[0\]\.tool_name",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role: must be one of"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]\.type: must be"),
        ({"tools": [{"name": "f"}]}, r"missing parameter: tools\[0\]\.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, "no tool is called 'g'"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, r"tool_choice\.name is needed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, r"thinking\.budget_tokens: must be at least 1024"),
        ({"output_config": {"format": {"type": "json_schema"}}}, r"missing parameter: output_config\.format\.schema"),
        ({"thinking": {"type": "between_tools"}}, r"thinking\.type: must be one of"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: is not supported"),
        ({"thread": {"type": "create"}}, "thread: is not supported"),
        ({"temprature": 1}, "unknown parameter: temprature"),
        ({"metadata": {"user_id": "x" * 1025}}, r"^metadata\.user_id: "),
        ({"tools": [WEATHER | {"name": "a b"}]}, r"^tools\[0\]\.name: "),
        ({"tools": [WEATHER | {"input_schema": {"type": "string"}}]}, r"^tools\[0\]\.input_schema: must be a schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            r"^output_config\.format\.schema: ",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(served: MessagesStack, fields: Any, message: str) -> None:
    served.stack.decoder.requests.clear()
    response = await served.post(**fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert re.search(message, error["message"]), error["message"]
    assert served.stack.decoder.requests == [], "nothing reaches a target"


async def test_what_cannot_matter_is_accepted(served: MessagesStack) -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    marked = {"type": "text", "text": "hi", "cache_control": cached}
    fields: dict[str, Any] = {
        "system": [marked],
        "messages": [{"role": "user", "content": [marked]}],
        "tools": [WEATHER | {"cache_control": cached, "type": "custom", "input_examples": [{"town": "x"}]}],
        "thinking": THINKING,
        "extra_headers": {"anthropic-beta": "effort-2025-11-24,another", "anthropic-version": "2030-01-01"},
        "extra_body": {
            "service_tier": "auto",
            "inference_geo": "eu",
            "speed": "fast",
            "cache_control": cached,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    }
    plain = {"system": "hi", "tools": [WEATHER], "thinking": THINKING}
    assert await served.prompt(**fields) == await served.prompt(**plain)
