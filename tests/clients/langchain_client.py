"""LangChain's client, for chat completions and for responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.asked import CODE, LIMIT, MODEL, QUESTION, URL, Forecast, speculated

SERVER: Any = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0, "max_retries": 0}
each_api = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


def model(*, responses: bool = False, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**SERVER, max_completion_tokens=LIMIT, use_responses_api=responses, **fields)


@tool(args_schema=Forecast)
def forecast(city: str, days: int, hourly: bool) -> str:
    """Forecast the weather."""
    return f"{city}: rain for {days} days"


@each_api
def test_invoke(responses: bool) -> None:
    def text(body: Any) -> str:
        return model(responses=responses, extra_body=body).invoke(QUESTION).text

    assert speculated(text)


@each_api
def test_stream(responses: bool) -> None:
    client = model(responses=responses)
    assert "".join(chunk.text for chunk in client.stream(QUESTION)) == client.invoke(QUESTION).text


def test_async_stream_and_batch() -> None:
    async def streamed() -> str:
        return "".join([chunk.text async for chunk in model().astream(QUESTION)])

    [text] = {answer.text for answer in model().batch([QUESTION] * 4)}
    assert text == asyncio.run(streamed())


@each_api
@pytest.mark.parametrize("choice", ["any", "forecast"])
def test_forced_call_and_its_result(responses: bool, choice: str) -> None:
    def calls(body: Any) -> list[Any]:
        client = model(responses=responses, extra_body=body)
        bound = client.bind_tools([forecast], tool_choice=choice, strict=True, parallel_tool_calls=False)
        return [call["args"] for call in bound.invoke(QUESTION).tool_calls]

    [arguments] = speculated(calls)
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[{"name": "forecast", "args": arguments, "id": "call_1"}]),
        ToolMessage(forecast.invoke(arguments), tool_call_id="call_1"),
    ]
    model(responses=responses).bind_tools([forecast]).invoke(turns)


@each_api
def test_forced_call_in_a_stream(responses: bool) -> None:
    bound = model(responses=responses).bind_tools([forecast], tool_choice="any", strict=True, parallel_tool_calls=False)
    first, *others = bound.stream(QUESTION)
    for each in others:
        first += each
    [call] = first.tool_calls
    Forecast.model_validate(call["args"])


@each_api
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(responses: bool, method: Any) -> None:
    def output(body: Any) -> Any:
        client = model(responses=responses, extra_body=body)
        return client.with_structured_output(Forecast, method=method).invoke(QUESTION)

    assert isinstance(speculated(output), Forecast)


def test_log_probabilities() -> None:
    answer = model().bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"]


def test_completion() -> None:
    assert OpenAI(**SERVER, max_tokens=24).invoke(CODE)
