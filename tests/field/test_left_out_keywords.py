"""`strict: false` leaves out what a grammar cannot keep to, and each API says so. Without it the request is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from paceline.grammar import grammar_from_schema
from paceline.grammar.grammar_checker import examined
from paceline.grammar.json_schema import GrammarError
from paceline.text import Tokenizer
from paceline.v1 import inference_pb2 as pb
from tests.field.schema_texts import accepts
from tests.helpers.openai_stack import EOS, MODEL, Stack, open_stack
from tests.helpers.tool_models import call_text, save_tool_model

loop = pytest.mark.asyncio(loop_scope="module")

SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
RECORD = {"type": "object", "properties": {"a": SET}, "required": ["a"], "additionalProperties": False}
LEFT_OUT = ["uniqueItems"]
MESSAGES = [{"role": "user", "content": "numbers"}]
FUNCTION = {"name": "save", "parameters": RECORD}


def chat(strict: bool | None) -> tuple[str, dict[str, Any]]:
    json_schema = {"name": "x", "schema": RECORD} | ({} if strict is None else {"strict": strict})
    return "/v1/chat/completions", {
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }


def completion(strict: bool | None) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "x", "response_format": chat(strict)[1]["response_format"]}


def chat_tool(strict: bool | None) -> tuple[str, dict[str, Any]]:
    function = FUNCTION | ({} if strict is None else {"strict": strict})
    tools = [{"type": "function", "function": function}]
    return "/v1/chat/completions", {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}


def response(strict: bool | None) -> tuple[str, dict[str, Any]]:
    text_format = {"type": "json_schema", "name": "x", "schema": RECORD} | (
        {} if strict is None else {"strict": strict}
    )
    return "/v1/responses", {"input": "numbers", "text": {"format": text_format}}


def message(strict: bool | None) -> tuple[str, dict[str, Any]]:
    tool = {"name": "save", "input_schema": RECORD} | ({} if strict is None else {"strict": strict})
    fields = {"max_tokens": 50, "tools": [tool], "tool_choice": {"type": "any"}}
    return "/v1/messages", {"model": MODEL, "messages": MESSAGES, **fields}


APIS = [chat, completion, chat_tool, response, message]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = save_tool_model(tmp_path_factory.mktemp("model"), special=True)
    tokens = Tokenizer.load(folder).encode(call_text("save", {"a": [1]}), add_special_tokens=False)
    async with open_stack(lambda _: [*tokens, EOS], folder=folder, context=2048) as stack:
        yield stack


@loop
@pytest.mark.parametrize("api", APIS)
async def test_a_response_says_what_was_left_out(stack: Stack, api: Any) -> None:
    path, body = api(False)
    whole = await stack.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    assert whole.json()["left_out_keywords"] == LEFT_OUT
    streamed = await stack.http.post(path, json=body | {"stream": True})
    assert '"left_out_keywords":["uniqueItems"]' in streamed.text


@loop
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("api", APIS)
async def test_without_it_the_refusal_names_the_keyword(stack: Stack, api: Any, strict: bool | None) -> None:
    path, body = api(strict)
    refused = await stack.http.post(path, json=body)
    assert refused.status_code == 400, refused.text
    assert "uniqueItems" in refused.text
    assert "tools" not in body or "save" in refused.json()["error"]["message"]


@loop
async def test_nothing_is_said_of_a_schema_that_is_kept_to(stack: Stack) -> None:
    path, body = chat(False)
    body["response_format"]["json_schema"]["schema"] = {"type": "object"}
    whole = await stack.http.post(path, json=body)
    assert "left_out_keywords" not in whole.json()


@loop
async def test_grpc_says_it_in_metadata(stack: Stack) -> None:
    asked = pb.GenerateRequest.Chat(
        messages=[pb.GenerateRequest.Chat.Message(role="user", content="numbers")],
        tools=[pb.Tool(name="save", parameters='{"properties": {"a": {"uniqueItems": true}}}', strict=False)],
        tool_choice="required",
    )
    async with stack.inference() as stub:
        call = stub.Generate(pb.GenerateRequest(chat=asked))
        assert dict(await call.initial_metadata())["left-out-keywords"] == "uniqueItems"


@pytest.mark.parametrize(
    ("schema", "left_out", "text"),
    [
        (SET, ["uniqueItems"], "[1, 1]"),
        ({"contains": {"const": 1}, "maxContains": 2}, ["contains", "maxContains"], "[2]"),
        ({"not": {"type": "null"}}, ["not"], "null"),
        ({"if": {"type": "null"}, "then": False, "else": True}, ["else", "if", "then"], "null"),
        ({"oneOf": [{"type": "integer"}, {"multipleOf": 2}]}, ["oneOf"], "2"),
        ({"pattern": "^(?!a)", "type": "string"}, ["pattern"], '"a"'),
        ({"pattern": "^(?!a)", "type": "string", "format": "date"}, ["pattern"], '"2026-11-28"'),
        ({"dependentRequired": {"a": ["b"]}, "type": "object"}, ["dependentRequired"], '{"a": 1}'),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
            ["maxProperties", "minProperties"],
            '{"c": 1}',
        ),
        ({"propertyNames": {"format": "uuid", "minLength": 1}}, ["propertyNames"], '{"a": 1}'),
    ],
    ids=str,
)
def test_the_rest_of_the_schema_is_kept_to(schema: dict[str, Any], left_out: list[str], text: str) -> None:
    grammar = grammar_from_schema({"type": "array", "items": schema, "minItems": 1}, strict=False)
    assert examined(grammar) == ("", left_out)
    assert accepts(grammar, f"[{text}]")
    assert not accepts(grammar, "[]")
    assert examined(grammar_from_schema({"items": schema}))[0]


def test_a_format_beside_a_pattern_that_is_left_out_is_kept_to() -> None:
    grammar = grammar_from_schema({"type": "string", "format": "date", "pattern": "^(?!a)"}, strict=False)
    assert accepts(grammar, '"2026-11-28"')
    assert not accepts(grammar, '"b"')


def test_options_that_are_no_object_are_refused() -> None:
    with pytest.raises(GrammarError, match="x-guidance"):
        grammar_from_schema({**SET, "x-guidance": 5}, strict=False)


@pytest.mark.parametrize("given", [{"whitespace_flexible": False}, {"lenient": False}, {"json_allowed_escapes": ""}])
def test_a_schemas_own_options_decide_nothing_about_what_is_left_out(given: dict[str, object]) -> None:
    assert examined(grammar_from_schema({**SET, "x-guidance": given}, strict=False)) == ("", LEFT_OUT)
    assert examined(grammar_from_schema({**SET, "x-guidance": {**given, "lenient": True}}))[0]
