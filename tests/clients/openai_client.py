"""OpenAI's client for Python."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.asked import CODE, FORECAST, LIMIT, MODEL, QUESTION, URL, Forecast, speculated

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CHAT: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": LIMIT}
TOOL: Any = {"type": "function", "function": FORECAST}
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}
RESPONSE_TOOL: Any = {"type": "function", "strict": True, **FORECAST}


def text_of_chat(**fields: Any) -> str:
    answer = client.chat.completions.create(**CHAT | fields)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= LIMIT
    return answer.choices[0].message.content or ""


def test_models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_chat(temperature: float) -> None:
    assert speculated(lambda body: text_of_chat(temperature=temperature, seed=7, extra_body=body))


def test_chat_is_speculated() -> None:
    answer = client.chat.completions.create(**CHAT, extra_body={"speculation_stats": True})
    assert answer.model_extra is not None
    assert sum(answer.model_extra["speculation"]["accepted_by_depth"]) > 0


def test_chat_stream() -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == text_of_chat()
    assert chunks[-1].usage is not None


def test_chat_stream_helper() -> None:
    with client.chat.completions.stream(**CHAT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == text_of_chat()


def test_async_chats_at_once() -> None:
    async def chats() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as many:
            return list(await asyncio.gather(*(many.chat.completions.create(**CHAT) for _ in range(8))))

    assert {answer.choices[0].message.content for answer in asyncio.run(chats())} == {text_of_chat()}


def test_chat_choices_and_log_probabilities() -> None:
    answer = client.chat.completions.create(**CHAT | {"temperature": 1}, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_call(choice: Any) -> None:
    def arguments(body: Any) -> list[str]:
        answer = client.chat.completions.create(
            **CHAT, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, extra_body=body
        )
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.name for call in calls if call.type == "function"] == ["forecast"] * len(calls)
        return [call.function.arguments for call in calls if call.type == "function"]

    calls = speculated(arguments)
    assert calls
    for each in calls:
        Forecast.model_validate_json(each)


def test_forced_call_in_a_stream() -> None:
    with client.chat.completions.stream(
        **CHAT,
        tools=[openai.pydantic_function_tool(Forecast)],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls
    for call in final.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Forecast)


def test_tool_that_may_be_called_and_its_result() -> None:
    assert speculated(lambda body: text_of_chat(tools=[TOOL], extra_body=body))
    call = {"id": "call_1", "type": "function", "function": {"name": "forecast", "arguments": '{"city": "Oslo"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    assert speculated(lambda body: text_of_chat(messages=turns, tools=[TOOL], extra_body=body))


def test_parsed_chat() -> None:
    def parsed(body: Any) -> Any:
        return client.chat.completions.parse(**CHAT, response_format=Forecast, extra_body=body).choices[0].message

    assert isinstance(speculated(parsed).parsed, Forecast)


def test_json_object() -> None:
    text = text_of_chat(response_format={"type": "json_object"})
    assert text.lstrip().startswith("{")


def test_completion_and_its_stream() -> None:
    fields: Any = {"model": MODEL, "prompt": CODE, "max_tokens": LIMIT, "temperature": 0}
    text = speculated(lambda body: client.completions.create(**fields, extra_body=body).choices[0].text)
    assert text == "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))


def test_scored_prompt() -> None:
    def scores(body: Any) -> Any:
        answer = client.completions.create(
            model=MODEL, prompt=[CODE, QUESTION], max_tokens=0, echo=True, logprobs=1, extra_body=body
        )
        assert [choice.text for choice in answer.choices] == [CODE, QUESTION]
        return [choice.logprobs for choice in answer.choices]

    for each in speculated(scores):
        assert each.token_logprobs[0] is None
        assert all(score <= 0 for score in each.token_logprobs[1:])


RESPONSE: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": LIMIT}


def test_response_and_one_that_follows() -> None:
    first = client.responses.create(**RESPONSE)
    assert first.output_text == speculated(
        lambda body: client.responses.create(**RESPONSE, extra_body=body).output_text
    )
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**RESPONSE | {"input": "And json.loads?"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert len(client.responses.input_items.list(second.id).data) > 1
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_stream() -> None:
    with client.responses.stream(**RESPONSE) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.output_text == client.responses.create(**RESPONSE).output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "forecast"}], ids=["required", "named"])
def test_forced_call_of_a_response(choice: Any) -> None:
    def arguments(body: Any) -> list[str]:
        answer = client.responses.create(
            **RESPONSE, tools=[RESPONSE_TOOL], tool_choice=choice, parallel_tool_calls=False, extra_body=body
        )
        return [item.arguments for item in answer.output if item.type == "function_call" and item.name == "forecast"]

    calls = speculated(arguments)
    assert calls
    for each in calls:
        Forecast.model_validate_json(each)


def test_parsed_response() -> None:
    parsed = speculated(
        lambda body: client.responses.parse(**RESPONSE, text_format=Forecast, extra_body=body).output_parsed
    )
    assert isinstance(parsed, Forecast)


def test_errors() -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**CHAT | {"model": "gpt-5"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**CHAT | {"temperature": -1})
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input=QUESTION)
