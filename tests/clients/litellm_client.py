"""LiteLLM, as a client of OpenAI's APIs and of Anthropic's."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tests.clients.asked import CODE, FORECAST, LIMIT, MODEL, QUESTION, URL, Forecast, speculated

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet for prices
import litellm

OPENAI: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}
ASKED: Any = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": LIMIT}
FORCED: Any = {
    "tools": [{"type": "function", "function": FORECAST}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
both = pytest.mark.parametrize("provider", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])


def text(provider: Any, **fields: Any) -> str:
    return str(litellm.completion(**provider, **ASKED | fields).choices[0].message.content or "")


@both
def test_chat(provider: Any) -> None:
    assert speculated(lambda body: text(provider, **body))


@both
def test_chat_stream(provider: Any) -> None:
    chunks = litellm.completion(**provider, **ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text(provider)


@both
def test_forced_call(provider: Any) -> None:
    message = litellm.completion(**provider, **ASKED, **FORCED).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "forecast"
    Forecast.model_validate_json(call.function.arguments)


@both
def test_schema(provider: Any) -> None:
    Forecast.model_validate_json(text(provider, response_format=Forecast))


def test_async_chats_at_once() -> None:
    async def chats() -> list[Any]:
        return list(await asyncio.gather(*(litellm.acompletion(**OPENAI, **ASKED) for _ in range(4))))

    assert {answer.choices[0].message.content for answer in asyncio.run(chats())} == {text(OPENAI)}


def test_completion() -> None:
    provider = OPENAI | {"model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(**provider, prompt=CODE, max_tokens=24, temperature=0)
    assert answer.choices[0].text


def test_response() -> None:
    answer = litellm.responses(**OPENAI, input=QUESTION, temperature=0, max_output_tokens=LIMIT)
    [message] = [item for item in answer.output if item.type == "message"]
    assert message.content[0].text == text(OPENAI)


def test_errors() -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**OPENAI | {"model": "openai/nobody"}, **ASKED)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**OPENAI, **ASKED | {"temperature": -1})
