"""OpenAI's Responses API as its clients see it, the official one first."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel

from paceline.messages import GenerationRequest
from paceline.text import Tokenizer
from tests.helpers.openai_stack import EOS, MODEL, Stack, log_probs, open_stack
from tests.helpers.tool_models import call_text, save_tool_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES = "/v1/responses"
QUESTION = "Do I need an umbrella in Oslo?"
THOUGHT = "I do not know the weather."
SAID = "I look it up."
ARGUMENTS = {"city": "Oslo → 東京"}
ANSWER = "No: it is dry in Oslo."
FIRST = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{call_text('weather', ARGUMENTS)}"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CODEX = json.loads(Path(__file__).with_name("codex.json").read_text(encoding="utf-8"))
CONTEXT = 1024
EVENTS = {
    kind: event
    for event in get_args(get_args(ResponseStreamEvent)[0])
    for kind in get_args(event.model_fields["type"].annotation)
}
"""The official client's class of each event."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A model that thinks, speaks and calls a function; once it has the function's output, it answers."""
    folder = save_tool_model(tmp_path_factory.mktemp("model"), special=True)
    tokenizer = Tokenizer.load(folder)
    texts = [[*tokenizer.encode(text, add_special_tokens=False), EOS] for text in (FIRST, ANSWER)]

    def script(request: GenerationRequest) -> Sequence[int]:
        return texts["<|im_start|>tool" in tokenizer.decode(request.prompt, skip_special_tokens=False)]

    async with open_stack(script, folder=folder, context=CONTEXT) as stack:
        yield stack


def prompt(stack: Stack) -> str:
    """The latest prompt."""
    return stack.model.tokenizer.decode(stack.decoder.requests[-1].prompt, skip_special_tokens=False)


async def create(stack: Stack, **fields: Any) -> Any:
    """A whole response to the question, by the official client."""
    return await stack.client.responses.create(**{"model": MODEL, "input": QUESTION, **fields})


async def events_of(stack: Stack, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each valid as the official client's class of its type, and numbered."""
    body = {"input": QUESTION, "stream": True, **fields}
    async with stack.http.stream("POST", RESPONSES, json=body) as response:
        assert response.status_code == 200, await response.aread()
        parts = (await response.aread()).decode().removesuffix("\n\n").split("\n\n")
    events = []
    for number, part in enumerate(parts):
        _, name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS[event["type"]].model_validate(event)
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """The types of the events, with equal neighbours as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two requests."""
    response = json.loads(json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID"))
    for call in response["output"]:
        call.pop("call_id", None)
    return {name: value for name, value in response.items() if name not in ("created_at", "completed_at")}


async def test_a_whole_response(stack: Stack) -> None:
    response = await create(stack, tools=[TOOL], instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    Response.model_validate(response.model_dump(by_alias=True))
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", THOUGHT, [])
    assert (message.type, response.output_text) == ("message", SAID)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
    assert {item.status for item in response.output} == {"completed"}
    assert (response.status, response.metadata, response.temperature) == ("completed", {"a": "b"}, 0.5)
    tokens = len(stack.model.tokenizer.encode(FIRST, add_special_tokens=False)) + 1
    usage = response.usage
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (tokens, 1)
    assert 0 < usage.output_tokens_details.reasoning_tokens < tokens
    assert usage.input_tokens == len(stack.decoder.requests[-1].prompt)
    assert "Be brief." in prompt(stack)
    assert stack.decoder.requests[-1].sampling.temperature == 0.5


async def test_a_stream_has_every_event_and_amounts_to_the_whole_response(stack: Stack) -> None:
    whole = (await stack.http.post(RESPONSES, json={"input": QUESTION, "tools": [TOOL]})).json()
    events = await events_of(stack, tools=[TOOL])
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in text),
        *(name.format("output_text") for name in text),
        *call,
        "completed",
    ]
    assert comparable(events[-1]["response"]) == comparable(whole)
    for index, (kind, done, field) in enumerate(
        [
            ("reasoning_text", THOUGHT, "text"),
            ("output_text", SAID, "text"),
            ("function_call_arguments", None, "arguments"),
        ]
    ):
        mine = [event for event in events if event.get("output_index") == index]
        joined = "".join(event["delta"] for event in mine if event["type"] == f"response.{kind}.delta")
        [ended] = [event for event in mine if event["type"] == f"response.{kind}.done"]
        assert ended[field] == joined == (done or whole["output"][2]["arguments"])
        assert mine[-1]["item"] == events[-1]["response"]["output"][index]
        assert {event.get("item_id", mine[-1]["item"]["id"]) for event in mine} == {mine[-1]["item"]["id"]}
    request_id = events[0]["response"]["id"].removeprefix("resp_")
    assert [item["id"] for item in events[-1]["response"]["output"]] == [
        f"{prefix}_{request_id}_{index}" for index, prefix in enumerate(("rs", "msg", "fc"))
    ]


async def test_the_official_client_accumulates_a_stream(stack: Stack) -> None:
    async with stack.client.responses.stream(model=MODEL, input=QUESTION, tools=[TOOL]) as stream:
        seen = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == SAID
    assert seen[-1] == "response.completed"


class Weather(BaseModel):
    city: str
    dry: bool


async def test_a_schema_binds_the_text(stack: Stack) -> None:
    """The grammar is that of the same schema in a chat completion."""
    with pytest.raises(ValueError, match="Invalid JSON"):  # the scripted model knows no grammar
        await stack.client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    ours = stack.decoder.requests[-1].sampling
    with pytest.raises(ValueError, match="Invalid JSON"):
        await stack.client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], response_format=Weather
        )
    theirs = stack.decoder.requests[-1].sampling
    assert ours.grammar == theirs.grammar != ""
    await create(stack, text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert stack.decoder.requests[-1].sampling.grammar not in ("", ours.grammar)


@pytest.mark.parametrize("stored", [False, True], ids=["by items", "by previous_response_id"])
async def test_a_conversation_with_a_tool(stack: Stack, stored: bool) -> None:
    """The second request has the prompt of the same conversation as a chat completion."""
    question = {"role": "user", "content": QUESTION}
    first = await create(stack, input=[question], tools=[TOOL], instructions="Forgotten.", store=stored)
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    conversation: Any = [result] if stored else [question, *first.output, result]
    second = await create(
        stack, input=conversation, tools=[TOOL], previous_response_id=first.id if stored else None, store=stored
    )
    assert second.output_text == ANSWER
    assert second.previous_response_id == (first.id if stored else None)
    asked = prompt(stack)
    function = {"name": "weather", "arguments": call.arguments}
    chat = [
        question,
        {
            "role": "assistant",
            "content": SAID,
            "reasoning_content": THOUGHT,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "dry"},
    ]
    tools = [{"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}]
    await stack.http.post("/v1/chat/completions", json={"messages": chat, "tools": tools})
    assert asked == prompt(stack)
    assert "Forgotten." not in asked
    if stored:
        third = await create(stack, input="Thanks!", tools=[TOOL], previous_response_id=second.id)
        assert prompt(stack).startswith(asked.removesuffix("<|im_start|>assistant\n"))
        listed = [each async for each in stack.client.responses.input_items.list(third.id, limit=2, order="asc")]
        types = [item.type for item in listed]
        assert types == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call_output",
            "message",
            "message",
        ]
        assert listed[1].id == first.output[0].id


async def test_stored_responses_are_read_and_deleted(stack: Stack) -> None:
    response = await create(
        stack, input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    )
    again = await stack.client.responses.retrieve(response.id)
    assert again.model_dump() == response.model_dump()
    assert again.model_extra is not None
    page = (await stack.http.get(f"{RESPONSES}/{response.id}/input_items", params={"limit": 1})).json()
    assert [item["content"][0]["text"] for item in ResponseItemList.model_validate(page).model_dump()["data"]] == ["Hi"]
    assert (page["has_more"], page["first_id"]) == (True, page["last_id"])
    await stack.client.responses.delete(response.id)
    for path in ("", "/input_items"):
        gone = await stack.http.get(f"{RESPONSES}/{response.id}{path}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
    with pytest.raises(openai.NotFoundError):
        await stack.client.responses.delete(response.id)
    unstored = await create(stack, store=False)
    with pytest.raises(openai.NotFoundError, match="or is not stored"):
        await create(stack, previous_response_id=unstored.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_leaves_the_response_incomplete(stack: Stack, stream: bool) -> None:
    tokens = len(stack.model.tokenizer.encode(FIRST.partition(SAID)[0] + "I look", add_special_tokens=False))
    if stream:
        *_, last = await events_of(stack, max_output_tokens=tokens)
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = (await create(stack, max_output_tokens=tokens)).model_dump()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["content"][0]["text"] == "I look"


async def test_log_probabilities_are_of_the_message(stack: Stack) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [TOOL]}
    events = await events_of(stack, **asked)
    message = events[-1]["response"]["output"][1]["content"][0]
    streamed = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert streamed == message["logprobs"] != []
    spelled = "".join(each["token"] for each in streamed)
    assert SAID in spelled
    assert "weather" not in spelled, "neither the reasoning nor the call"
    expected = log_probs(0, 2).top
    assert [each["logprob"] for each in streamed[0]["top_logprobs"]] == [log_prob for _, log_prob in expected]
    unasked = (await events_of(stack, tools=[TOOL]))[-1]["response"]["output"][1]
    assert unasked["content"][0]["logprobs"] == []


async def test_codex_is_served_as_it_is(stack: Stack) -> None:
    """It offers OpenAI's search in the web unasked, which the model does not see."""
    answer = await stack.http.post(RESPONSES, json=CODEX["turn"] | {"max_output_tokens": 8}, headers=CODEX["headers"])
    assert answer.status_code == 200, answer.text
    assert '"name": "update_plan"' in prompt(stack)
    assert "12 notes.txt" in prompt(stack)
    assert "web_search" not in prompt(stack)


async def test_a_choice_of_allowed_tools_offers_only_those(stack: Stack) -> None:
    other = {**TOOL, "name": "forecast"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "forecast"}]}
    response = await create(stack, tools=[TOOL, other], tool_choice=allowed)
    assert '"name": "forecast"' in prompt(stack)
    assert '"name": "weather"' not in prompt(stack)
    assert len(response.tools) == 2
    await create(stack, tool_choice="auto")


async def test_parameters_of_chat_completions_reach_the_target(stack: Stack) -> None:
    await create(stack, extra_body={"seed": 11, "priority": -3, "speculative": False})
    request = stack.decoder.requests[-1]
    assert (request.sampling.seed, request.priority, request.speculative.enabled) == (11, -3, False)


@pytest.mark.parametrize(
    "field",
    [
        '"reasoning": {"mode": 1e999}',
        '"text": {"verbosity": NaN}',
        '"tools": [{"type": "function", "name": "f", "parameters": {"x": 1e999}}]',
    ],
)
async def test_a_setting_with_a_number_that_json_has_not_is_shown_as_null(stack: Stack, field: str) -> None:
    answer = await stack.http.post(RESPONSES, content=f'{{"input": "x", "tool_choice": "none", {field}}}')
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "completed"


async def test_reasoning_may_be_left_out(stack: Stack) -> None:
    response = await create(stack, extra_body={"include_reasoning": False})
    assert [item.type for item in response.output] == ["message"]
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_it_may(stack: Stack) -> None:
    turns: Any = [{"role": "system", "content": "Be kind."}]
    for number in range(40):
        turns += [{"role": "user", "content": f"Question {number}: " + "a b " * 20}]
        turns += [{"role": "assistant", "content": f"Answer {number}."}]
    turns.append({"role": "user", "content": "And now?"})
    with pytest.raises(openai.BadRequestError) as refused:
        await create(stack, input=turns, max_output_tokens=40)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    response = await create(stack, input=turns, max_output_tokens=40, truncation="auto")
    assert response.truncation == "auto"
    kept = prompt(stack)
    assert kept.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nQuestion")
    assert "And now?" in kept
    assert "Question 39" in kept
    assert "Question 0:" not in kept
    turn = len(stack.model.tokenizer.encode("<|im_start|>user\nQuestion 10: " + "a b " * 20 + "\nAnswer 10."))
    assert CONTEXT - 40 - 2 * turn < len(stack.decoder.requests[-1].prompt) <= CONTEXT - 40, "as many as fit"
    with pytest.raises(openai.BadRequestError):
        await create(stack, input="a b " * 1000, truncation="auto")


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [CALL | {"name": ""}]}, "input[0].name"),
        ({"input": [CALL | {"arguments": "{} {}"}]}, "input"),
        ({"input": [CALL | {"type": "function_call_output"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": "x" * 20_000}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice.tools",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 5000}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}},
            "text.format.schema",
        ),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"user": 5}, "user"),
        ({"safety_identifier": {}}, "safety_identifier"),
        ({"max_tool_calls": "many"}, "max_tool_calls"),
        ({"inputs": "x"}, "inputs"),
    ],
)
async def test_errors_name_the_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    stack.decoder.requests.clear()
    sent = {name: value for name, value in ({"input": QUESTION} | body).items() if value is not None}
    refused = await stack.http.post(RESPONSES, json=sent)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "messages" not in error["message"]
    assert stack.decoder.requests == [], "nothing reaches a target"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=msg_nowhere", "before=x"])
async def test_a_list_of_items_names_the_wrong_parameter(stack: Stack, query: str) -> None:
    response = await create(stack)
    refused = await stack.http.get(f"{RESPONSES}/{response.id}/input_items?{query}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_the_api_s_description_has_the_routes(stack: Stack) -> None:
    paths = (await stack.http.get("/openapi.json")).json()["paths"]
    for path, methods in {"": {"post"}, "/{response_id}": {"get", "delete"}, "/{response_id}/cancel": {"post"}}.items():
        assert paths[RESPONSES + path].keys() == methods
    listed = paths[RESPONSES + "/{response_id}/input_items"]["get"]
    assert {each["name"] for each in listed["parameters"]} == {"response_id", "after", "limit", "order"}
