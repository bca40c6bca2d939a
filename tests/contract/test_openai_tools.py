"""Tools and reasoning in chat completions, as the official client and plain HTTP and gRPC clients see them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode

from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.target_features import VLLM_LACKS, all_features
from paceline.text import Tokenizer
from paceline.v1 import common_pb2
from paceline.v1 import inference_pb2 as pb
from tests.helpers.openai_stack import EOS, MODEL, Stack, generated, open_stack, refusal, text_script
from tests.helpers.tool_models import call_text, save_tool_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHATS = "/v1/chat/completions"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Köln and 東京?"}]
THOUGHT = "Two cities: two calls."
SAID = "I look it up."
ARGUMENTS = [{"city": "Köln", "days": 2}, {"city": '東京 "}]"', "days": 1}]
WRITTEN = [json.dumps(each, ensure_ascii=False) for each in ARGUMENTS]
CALLS = "\n".join(call_text("weather", each) for each in ARGUMENTS)
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n{CALLS}"
FUNCTION = {
    "name": "weather",
    "description": "The weather of the next days.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOL: Any = {"type": "function", "function": FUNCTION}
JSON_OBJECT = {"type": "json_object"}
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["plain", "special"])
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A model that thinks, speaks and calls twice, whatever it is asked. Its markers are plain or special tokens."""
    folder = save_tool_model(tmp_path_factory.mktemp("model"), special=request.param)
    script = text_script(TEXT, Tokenizer.load(folder))
    async with open_stack(script, folder=folder, context=2048) as stack:
        yield stack


def output_of(stack: Stack) -> list[int]:
    return [*stack.model.tokenizer.encode(TEXT, add_special_tokens=False), EOS]


async def whole(stack: Stack, **fields: Any) -> dict[str, Any]:
    """The response to one chat."""
    answer = await stack.http.post(CHATS, json={"messages": ASKED, "tools": [TOOL], **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas amount to, in the form of a whole one, with its finish reason."""
    message: dict[str, Any] = {"content": None, "refusal": None}
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        message |= {"role": delta["role"]} if "role" in delta else {}
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["function"]["arguments"] == ""
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            assert call["index"] == len(calls) - 1
    return {
        "message": message,
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1]["stop_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


async def streamed(stack: Stack, **fields: Any) -> dict[str, Any]:
    return joined(await stack.events(CHATS, {"messages": ASKED, "tools": [TOOL], **fields}))


async def test_the_official_client_gets_reasoning_text_and_parallel_calls(stack: Stack) -> None:
    answer = await stack.client.chat.completions.create(model=MODEL, messages=ASKED, tools=[TOOL])
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (SAID, "tool_calls")
    assert choice.message.model_extra == {"reasoning_content": THOUGHT, "reasoning": THOUGHT}
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls if call.type == "function"] == WRITTEN
    assert [call.function.name for call in choice.message.tool_calls if call.type == "function"] == ["weather"] * 2
    ids = {call.id for call in choice.message.tool_calls}
    assert len(ids) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", id_) for id_ in ids)


async def test_the_official_client_accumulates_the_stream(stack: Stack) -> None:
    manager = stack.client.chat.completions.stream(model=MODEL, messages=ASKED, tools=[TOOL])
    async with manager as stream:
        final = await stream.get_final_completion()
    [choice] = final.choices
    assert (choice.message.content, choice.finish_reason) == (SAID, "tool_calls")
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == THOUGHT
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or ()] == ARGUMENTS


@pytest.mark.parametrize("burst", [1, 2, 1000])
async def test_a_stream_amounts_to_the_whole_response_whatever_its_deltas(stack: Stack, burst: int) -> None:
    """Token ids and log-probabilities come once each, although a delta may become several chunks."""
    stack.decoder._burst = burst
    fields: dict[str, Any] = {"return_token_ids": True, "return_accepted": True, "logprobs": True}
    try:
        answer = await whole(stack, **fields)
        *chunks, last = await stack.events(CHATS, {"messages": ASKED, "tools": [TOOL], **fields, **WITH_USAGE})
    finally:
        stack.decoder._burst = 3
    [expected] = answer["choices"]
    got = joined(chunks)
    assert without_ids(got["message"]) == without_ids(expected["message"])
    assert (got["finish_reason"], last["usage"]) == (expected["finish_reason"], answer["usage"])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for name in ("token_ids", "accepted", "text_offset"):
        assert [each for choice in choices for each in choice.get(name, ())] == expected[name]
    assert expected["token_ids"] == output_of(stack)
    scored = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert scored == expected["logprobs"]["content"]


async def test_reasoning_tokens_are_counted(stack: Stack) -> None:
    encode = stack.model.tokenizer.encode
    usage = (await whole(stack))["usage"]
    [least, most] = [len(encode(text)) for text in (THOUGHT, f"<think>\n{THOUGHT}\n</think>\n\n")]
    assert least <= usage["completion_tokens_details"]["reasoning_tokens"] <= most
    assert usage["completion_tokens"] == len(output_of(stack))


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_have_calls_of_their_own(stack: Stack, stream: bool) -> None:
    if stream:
        chunks = await stack.events(CHATS, {"messages": ASKED, "tools": [TOOL], "n": 2})
        messages = [joined(chunks, index)["message"] for index in (0, 1)]
    else:
        messages = [choice["message"] for choice in (await whole(stack, n=2))["choices"]]
    assert without_ids(messages[0]) == without_ids(messages[1])
    assert len({call["id"] for message in messages for call in message["tool_calls"]}) == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected", "ended"),
    [
        ({"stop": "two"}, {"reasoning": "Two cities: "}, ("stop", "two")),
        ({"stop": "look"}, {"reasoning": THOUGHT, "content": "I "}, ("stop", "look")),
        ({"stop": "Kö"}, {"content": SAID, "arguments": ['{"city": "']}, ("stop", "Kö")),
        (
            {"stop": "Kö", "include_stop_str_in_output": True},
            {"content": SAID, "arguments": ['{"city": "Kö']},
            ("stop", "Kö"),
        ),
        ({"stop": "}\n</tool_call>"}, {"arguments": WRITTEN[:1]}, ("tool_calls", "}\n</tool_call>")),
        ({"stop": "never"}, {"arguments": WRITTEN}, ("tool_calls", None)),
        ({"parallel_tool_calls": False}, {"content": SAID, "arguments": WRITTEN[:1]}, ("tool_calls", None)),
        ({"include_reasoning": False}, {"reasoning": None, "arguments": WRITTEN}, ("tool_calls", None)),
        ({"tools": None}, {"reasoning": THOUGHT, "arguments": []}, ("stop", None)),
    ],
    ids=[
        "in reasoning",
        "in content",
        "in arguments",
        "in arguments, kept",
        "behind arguments",
        "none",
        "one call",
        "no reasoning",
        "no tools",
    ],
)
async def test_the_parts_of_a_message(
    stack: Stack, fields: dict[str, Any], expected: dict[str, Any], ended: tuple[str, Any], stream: bool
) -> None:
    choice = await streamed(stack, **fields) if stream else (await whole(stack, **fields))["choices"][0]
    message = choice["message"]
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    got = {"content": message["content"], "reasoning": message.get("reasoning"), "arguments": arguments}
    assert {name: got[name] for name in expected} == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ended


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_or_a_stop_token_at_every_place_cuts_the_message_there(stack: Stack, stream: bool) -> None:
    """Whatever is cut off, the parts are beginnings of the whole ones, and a cut call is no finished one."""
    output = output_of(stack)
    full = (await whole(stack))["choices"][0]["message"]
    for size in range(1, len(output), 5 if stream else 1):
        cut: dict[str, Any] = {"max_tokens": size}
        choice = await streamed(stack, **cut) if stream else (await whole(stack, **cut))["choices"][0]
        message = choice["message"]
        content = (message["content"] or "").rstrip()
        assert choice["finish_reason"] == "length"
        assert full["reasoning"].startswith(message.get("reasoning", "").rstrip())
        assert SAID.startswith(content) or content.startswith(SAID), "a call without a name is text"
        for call, entire in zip(message.get("tool_calls", ()), full["tool_calls"], strict=False):
            # half a character at the end is U+FFFD
            assert entire["function"]["arguments"].startswith(call["function"]["arguments"].rstrip("\ufffd"))
    token = output[6]
    before = stack.model.tokenizer.decode(output[: output.index(token)], skip_special_tokens=False)
    choice = (await whole(stack, stop_token_ids=[token]))["choices"][0]
    assert f"<think>\n{choice['message']['reasoning']}" == before
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


async def test_without_a_choice_of_tools_the_text_is_what_the_model_writes(stack: Stack) -> None:
    stack.decoder.requests.clear()
    [choice] = (await whole(stack, tool_choice="none"))["choices"]
    tokenizer = stack.model.tokenizer
    behind = f"{SAID}\n{CALLS}"
    assert choice["message"]["content"] == tokenizer.decode(tokenizer.encode(behind))
    special = tokenizer.token_id("<tool_call>") in tokenizer.special_ids
    assert ("<tool_call>" in choice["message"]["content"]) != special
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "weather" not in tokenizer.decode(stack.decoder.requests[0].prompt), "the prompt shows no tools"
    assert await stack.text(max_tokens=1000) == tokenizer.decode(output_of(stack)[:-1]), "completions are raw"


async def test_content_is_null_where_a_message_only_calls(tmp_path: Path) -> None:
    folder = save_tool_model(tmp_path, special=True)
    async with open_stack(text_script(CALLS, Tokenizer.load(folder)), folder=folder, context=2048) as stack:
        for choice in ((await whole(stack))["choices"][0], await streamed(stack)):
            message = choice["message"]
            assert (message["content"], len(message["tool_calls"])) == (None, 2)
            assert "reasoning" not in message
            assert choice["finish_reason"] == "tool_calls"


async def test_the_conversation_goes_on_with_results(stack: Stack) -> None:
    """What the client got goes back as it came: arguments as text, null for absent parts, reasoning under its name."""
    first = await stack.client.chat.completions.create(model=MODEL, messages=ASKED, tools=[TOOL])
    message = first.choices[0].message.model_dump()
    message["tool_calls"] = message["tool_calls"][:1]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    stack.decoder.requests.clear()
    await stack.client.chat.completions.create(model=MODEL, messages=[*ASKED, message, result], tools=[TOOL])
    prompt = stack.model.tokenizer.decode(stack.decoder.requests[0].prompt, skip_special_tokens=False)
    _, shown, history = prompt.partition(json.dumps(TOOL, ensure_ascii=False))
    assert shown, "the template gets the tools as they are"
    assert f"<think>\n{THOUGHT}\n</think>\n{SAID}<tool_call>" in history
    assert f'{{"name": "weather", "arguments": {WRITTEN[0]}}}' in history, "an object for the template"
    assert "<|im_start|>tool\nrain<|im_end|>" in history


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("high", True), (None, True)])
async def test_effort_reaches_the_template(stack: Stack, effort: str | None, thinks: bool) -> None:
    stack.decoder.requests.clear()
    await whole(stack, reasoning_effort=effort)
    prompt = stack.model.tokenizer.decode(stack.decoder.requests[0].prompt, skip_special_tokens=False)
    assert prompt.endswith("<think>\n\n</think>\n\n") == (not thinks)
    body = {"messages": ASKED, "tools": [TOOL], "reasoning_effort": effort}
    tokens = (await stack.http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == list(stack.decoder.requests[0].prompt)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def with_function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**FUNCTION, **changes}}]}


def after_call(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL] * 129}, "tools"),
        (with_function(description="x" * 262_144), "tools"),
        (with_function(name="a.b"), "tools[0].function.name"),
        (with_function(name="a" * 65), "tools[0].function.name"),
        (with_function(parameters=[]), "tools[0].function.parameters"),
        (with_function(parameters={"type": "string"}), "tools[0].function.parameters"),
        (with_function(cache_control={}), "tools[0].function.cache_control"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": named("weather")}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {**named("weather"), "mode": "auto"}}, "tool_choice.mode"),
        ({"tool_choice": named("time")}, "tool_choice.function.name"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        (after_call("{} {}"), "messages[1].tool_calls[0].function.arguments"),
        (after_call("[1]"), "messages[1].tool_calls[0].function.arguments"),
        (after_call("[" * 1000), "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [{"role": "tool", "tool_call_id": 3, "content": "x"}]}, "messages[0].tool_call_id"),
        ({"reasoning_effort": "loud"}, "reasoning_effort"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)
async def test_errors_name_the_field(stack: Stack, fields: dict[str, Any], param: str) -> None:
    stack.decoder.requests.clear()
    answer = await stack.http.post(CHATS, json={"messages": ASKED, "tools": [TOOL], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param.split(".")[-1].split("[")[0] in answer.json()["error"]["message"]
    assert stack.decoder.requests == [], "nothing reaches a target"


@pytest.mark.parametrize(
    ("fields", "names", "parallel"),
    [
        ({"tool_choice": "required"}, ["time", "weather"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["time", "weather"], False),
        ({"tool_choice": named("weather")}, ["weather"], False),
        ({"tool_choice": named("weather"), "response_format": JSON_OBJECT}, ["weather"], False),
    ],
    ids=str,
)
async def test_forced_calls_are_a_grammar_behind_the_reasoning(
    stack: Stack, fields: dict[str, Any], names: list[str], *, parallel: bool
) -> None:
    """A marker that is no token of its own may be written in several ways, so the grammar cannot wait for it."""
    tokenizer = stack.model.tokenizer
    time = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    await whole(stack, tools=[time, TOOL], **fields)
    schemas = {"time": {"type": "object"}, "weather": FUNCTION["parameters"]}
    tools: Any = {name: schemas[name] for name in names}
    sampling = stack.decoder.requests[-1].sampling
    assert sampling.grammar == forced_call_grammar(HERMES, tools, tokenizer, parallel=parallel)
    opening, closing = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    assert sampling.grammar_begins_after == (() if closing is None else (closing,))
    assert sampling.grammar_waits_if == opening


async def test_a_continued_answer_has_its_grammar_at_once_but_inside_its_reasoning(stack: Stack) -> None:
    closing = stack.model.tokenizer.token_id("</think>")
    continued = {"continue_final_message": True, "add_generation_prompt": False, "response_format": JSON_OBJECT}
    for said, begins_after in (("{", ()), ("<think>So", () if closing is None else (closing,))):
        await whole(stack, tools=None, **continued, messages=[*ASKED, {"role": "assistant", "content": said}])
        sampling = stack.decoder.requests[-1].sampling
        assert sampling.grammar
        assert (sampling.grammar_begins_after, sampling.grammar_waits_if) == (begins_after, None)


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"response_format": JSON_OBJECT}, {"structured_outputs": {"regex": "a+"}}],
    ids=str,
)
async def test_a_grammar_behind_the_reasoning_is_refused_by_the_client_s_field_where_no_target_has_it(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder, features = save_tool_model(tmp_path, special=True), all_features(without=VLLM_LACKS)
    async with open_stack(text_script(TEXT), folder=folder, context=2048, features=features) as stack:
        refused = await stack.http.post(CHATS, json={"messages": ASKED, "tools": [TOOL], **fields})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("fields", [{"tools": []}, {"tools": None, "tool_choice": "none"}], ids=str)
async def test_no_tools_are_no_tools(stack: Stack, fields: dict[str, Any]) -> None:
    [choice] = (await whole(stack, **fields))["choices"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


async def test_markers_around_the_answer_are_dropped_without_tools_too(tmp_path: Path) -> None:
    folder = save_tool_model(tmp_path, special=False)
    script = text_script("<think>\nHm.\n</think>\n<answer>\nYes\n</answer>", Tokenizer.load(folder))
    async with open_stack(script, folder=folder, context=2048, tool_call_parser="hunyuan_a13b") as stack:
        [choice] = (await whole(stack, tools=None))["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Yes")


async def test_parsers_may_be_switched_off(tmp_path: Path) -> None:
    folder = save_tool_model(tmp_path, special=False)
    settings = {"tool_call_parser": "none", "reasoning_parser": "none"}
    async with open_stack(text_script(TEXT, Tokenizer.load(folder)), folder=folder, context=2048, **settings) as stack:
        [choice] = (await whole(stack, tools=None))["choices"]
        assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        refused = await stack.http.post(CHATS, json={"messages": ASKED, "tools": [TOOL]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("marker", "warned"), [("</think>", False), ("</musing>", True)])
async def test_a_start_tells_of_reasoning_with_unknown_markers(
    tmp_path: Path, marker: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tool_model(tmp_path, special=False)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("</think>", marker))
    async with open_stack(text_script(TEXT, Tokenizer.load(folder)), folder=folder, context=2048):
        assert ("reasoning with unknown markers" in caplog.text) == warned


def grpc_request(**fields: Any) -> pb.GenerateRequest:
    schema = json.dumps(FUNCTION["parameters"])
    tool = pb.Tool(name="weather", description=FUNCTION["description"], parameters=schema, strict=True)
    Message = pb.GenerateRequest.Chat.Message
    call = pb.ToolCall(id="c", name="weather", arguments=WRITTEN[0])
    messages = [
        Message(role="user", content=ASKED[0]["content"]),
        Message(role="assistant", tool_calls=[call], reasoning="Hm."),
        Message(role="tool", content="rain", tool_call_id="c"),
    ]
    chat = pb.GenerateRequest.Chat(messages=messages, **{"tools": [tool], **fields})
    return pb.GenerateRequest(chat=chat, sampling=pb.GenerateRequest.Sampling(max_tokens=500))


async def test_the_same_over_grpc(stack: Stack) -> None:
    stack.decoder.requests.clear()
    async with stack.inference() as stub:
        responses = await generated(stub, grpc_request())
    assert "".join(each.text for each in responses) == SAID
    assert "".join(each.reasoning for each in responses) == THOUGHT
    parts = [call for each in responses for call in each.tool_calls]
    assert [call.name for call in parts if call.id] == ["weather"] * 2
    for index, written in enumerate(WRITTEN):
        assert "".join(call.arguments for call in parts if call.index == index) == written
    counted = (await whole(stack))["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert sum(each.reasoning_tokens for each in responses) == counted
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    prompt = stack.model.tokenizer.decode(stack.decoder.requests[0].prompt, skip_special_tokens=False)
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    assert f"<think>\nHm.\n</think>\n{call_line()}<|im_end|>\n<|im_start|>tool\nrain" in prompt


def call_line() -> str:
    return f'<tool_call>{{"name": "weather", "arguments": {WRITTEN[0]}}}</tool_call>'


@pytest.mark.parametrize(
    ("fields", "named_field"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_name": "time"}, "tool_choice.function.name"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools[0].function.parameters"),
        ({"tools": [pb.Tool(name="")]}, "tools[0].function.name"),
        ({"reasoning_effort": "loud"}, "reasoning_effort"),
    ],
    ids=str,
)
async def test_errors_over_grpc_name_the_field_of_http(stack: Stack, fields: dict[str, Any], named_field: str) -> None:
    async with stack.inference() as stub:
        error = await refusal(stub, grpc_request(**fields))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert named_field in (error.details() or "")


async def test_choices_over_grpc(stack: Stack) -> None:
    async with stack.inference() as stub:
        hidden = await generated(stub, grpc_request(include_reasoning=False, parallel_tool_calls=False))
        plain = await generated(stub, grpc_request(tool_choice="none"))
    assert "".join(each.reasoning for each in hidden) == ""
    assert {call.index for each in hidden for call in each.tool_calls} == {0}
    assert not [call for each in plain for call in each.tool_calls]
