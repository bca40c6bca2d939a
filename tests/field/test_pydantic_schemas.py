"""Schemas that pydantic and Zod write compile, or the refusal names the keyword, and the tool."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import UUID4, Base64Str, Field, Json, SecretStr, TypeAdapter

from paceline.grammar import GrammarError, grammar_from_schema
from paceline.grammar.grammar_checker import complaint
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.tool_grammar import forced_call_grammar
from paceline.text import Tokenizer
from tests.field.schema_texts import accepts


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Path, '"/tmp/a b"'),
        (bytes, '"abc"'),
        (SecretStr, '"secret"'),
        (re.Pattern, '"^a+$"'),
        (ipaddress.IPv4Network, '"10.0.0.0/8"'),
        (ipaddress.IPv6Interface, '"::1/64"'),
        (UUID4, '"16fd2706-8baf-433b-82eb-8c7fada847da"'),
        (Base64Str, '"YQ=="'),
        (Json[list[int]], '"[1]"'),
        (dict[Color, int], '{"red": 1}'),
        (dict[UUID, int], '{"16fd2706-8baf-433b-82eb-8c7fada847da": 1}'),
        (dict[int, str], '{"1": "a"}'),
        (dict[Literal["a.b"], int], '{"a.b": 1}'),
        (dict[Annotated[str, Field(min_length=1, max_length=3)], int], '{"ab": 1}'),
        (dict[Annotated[str, Field(pattern="^x-")], int], '{"x-a": 1}'),
    ],
)
def test_what_says_nothing_about_the_text_is_dropped(kind: Any, text: str) -> None:
    adapter = TypeAdapter(kind)
    adapter.validate_json(text)
    assert accepts(grammar_from_schema(adapter.json_schema()), text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
            '{"a": 1}',
        ),
        ({"type": "array", "items": {"not": {}}}, "[]"),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, "null"),
    ],
)
def test_what_zod_writes_compiles(schema: dict[str, Any], text: str) -> None:
    assert accepts(grammar_from_schema(schema), text)


@pytest.mark.parametrize("kind", [dict[Color, int], dict[Literal["a.b"], int]], ids=["enum", "literal"])
def test_a_key_of_another_type_is_refused(kind: Any) -> None:
    grammar = grammar_from_schema(TypeAdapter(kind).json_schema())
    assert not accepts(grammar, '{"redd": 1}')
    assert not accepts(grammar, '{"axb": 1}')


@pytest.mark.parametrize("key", [r"\u0061b", r"a\u0062", r"\u0061\u0062"])
@pytest.mark.parametrize("named", [{"properties": {"ab": {"type": "integer"}}}, {"patternProperties": {"^ab": False}}])
def test_a_named_key_has_one_spelling(key: str, named: dict[str, Any]) -> None:
    """Else its value would be that of a free key."""
    grammar = grammar_from_schema({"type": "object", **named})
    assert not accepts(grammar, f'{{"{key}": "text"}}')
    assert accepts(grammar, '{"b": "text"}')


def test_the_same_key_counts_once() -> None:
    for schema in ({"minProperties": 2}, {"minProperties": 3, "required": ["a"]}):
        with pytest.raises(GrammarError, match="minProperties"):
            grammar_from_schema({"type": "object", **schema})
    grammar = grammar_from_schema({"type": "object", "minProperties": 2, "required": ["a"]})
    assert accepts(grammar, '{"a": 1, "b": 1}')
    assert not accepts(grammar, '{"a": 1, "a": 1}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"not": {"type": "null"}}, "not"),
        ({"if": {"type": "null"}, "then": False}, "if, then"),
        ({"oneOf": [{"type": "integer"}, {"multipleOf": 2}]}, "oneOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
    ],
)
def test_a_refusal_names_the_tool_and_the_keyword(schema: dict[str, Any], keyword: str) -> None:
    tools = {"known": {"type": "object"}, "strange": {"properties": {"a": schema}}, "other": {}}
    try:
        error = complaint(forced_call_grammar(HERMES, tools, Tokenizer.load("pydoc"), parallel=False))
    except GrammarError as raised:
        error = str(raised)
    assert re.match(f"strange: .*{keyword}", error)
