"""A gateway whose model reasons and calls tools, with Anthropic's client before it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx

from paceline.messages import GenerationRequest
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.text.chat_template import ChatTemplate
from paceline_services.gateway.generation.admission import AdmissionLimits
from tests.helpers.openai_stack import EOS, MODEL, TOKENIZER, FailsAfter, Stack, open_stack

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
CONTEXT = 2048
BODY_LIMIT = 100_000
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "[{{ message.role }}{% if message.tool_call_id %} {{ message.tool_call_id }}{% endif %}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}]"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
"""Shows everything that a conversation has. With `enable_thinking` the output begins inside of the reasoning."""
USER: dict[str, Any] = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a town",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
SAMPLING = ("temperature", "top_p", "top_k", "seed", "speculative")
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
THINKING = {"type": "enabled", "budget_tokens": 1024}


class Speaker:
    """A script whose output is `text`, and then the error, if there is one."""

    text = "hello"
    error = ""

    def __call__(self, request: GenerationRequest) -> Sequence[int]:
        tokens = TOKENIZER.encode(self.text, add_special_tokens=False)
        if self.error:
            raise FailsAfter(self.error, tokens)
        return [*tokens, EOS]


class MessagesStack:
    """The gateway, the client, and what the model shall write."""

    def __init__(self, stack: Stack, speaker: Speaker, client: anthropic.AsyncAnthropic) -> None:
        self.stack = stack
        self.client = client
        self._speaker = speaker

    def speak(self, text: str, error: str = "") -> None:
        self._speaker.text, self._speaker.error = text, error

    async def create(self, **fields: Any) -> Any:
        """The whole message."""
        return await self.client.messages.create(**as_arguments(fields))

    async def stream(self, **fields: Any) -> Any:
        """The message that the events of a stream add up to."""
        async with self.client.messages.stream(**as_arguments(fields)) as stream:
            return await stream.get_final_message()

    async def post(self, path: str = MESSAGES, **fields: Any) -> httpx.Response:
        return await self.stack.http.post(path, json=complete(**fields))

    async def prompt(self, **fields: Any) -> str:
        """The prompt that the model gets."""
        self.stack.decoder.requests.clear()
        await self.create(**fields)
        [request] = self.stack.decoder.requests
        return TOKENIZER.decode(request.prompt)

    async def events(self, headers: Any = None, **fields: Any) -> list[Any]:
        """The data of all events of a stream, each of which must have its type as its name."""
        body = complete(**fields | {"stream": True})
        async with self.stack.http.stream("POST", f"{MESSAGES}?beta=true", json=body, headers=headers) as response:
            raw = (await response.aread()).decode()
            assert response.status_code == 200, raw
            assert response.headers["content-type"].startswith("text/event-stream")
        events = []
        for part in raw.removesuffix("\n\n").split("\n\n"):
            *_, name, data = part.split("\n")  # an error has no id before them
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


@asynccontextmanager
async def open_messages_stack() -> AsyncIterator[MessagesStack]:
    speaker = Speaker()
    limits = AdmissionLimits(max_body_bytes=BODY_LIMIT)
    async with open_stack(speaker, context=CONTEXT, limits=limits) as stack:
        stack.model.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
        stack.model.output_format = OutputFormat(REASONING_FORMATS["qwen3"], HERMES)
        url = f"http://{stack.addresses.http}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
            yield MessagesStack(stack, speaker, client)


def complete(**fields: Any) -> dict[str, Any]:
    """A body that has all it needs, with these fields; None leaves a field out."""
    every = {"model": MODEL, "max_tokens": 200, "messages": [USER]} | fields
    return {name: value for name, value in every.items() if value is not None}


def as_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """A complete body for the client, whose latest releases have no arguments for the parameters of sampling."""
    body = complete(**fields)
    extra = {name: body.pop(name) for name in SAMPLING if name in body}
    return body | {"extra_body": extra | body.get("extra_body", {})}


def says(role: str, *content: Any) -> dict[str, Any]:
    """A message; a text is a block."""
    return {"role": role, "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    """What came of `TOOL_USE`."""
    return {"type": "tool_result", "tool_use_id": TOOL_USE["id"], "content": content, **fields}


def reminder(text: str) -> str:
    """A system message amid the conversation, as the model reads it."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in a response, which must have Anthropic's shape."""
    content = response.json()
    assert content.keys() == {"type", "error", "request_id"}
    assert content["type"] == "error"
    assert content["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert content["error"].keys() == {"type", "message"}
    return dict(content["error"])
