"""What a schema becomes for llguidance means the same: jsonschema judges the texts that it allows."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from paceline.grammar import GrammarError, grammar_from_schema
from paceline.grammar.grammar_checker import complaint
from tests.field.schema_texts import accepts

INTEGER = {"type": "integer"}
SCHEMAS: list[dict[str, Any]] = [
    {"minLength": 1.0, "maxItems": 1.0, "maxProperties": 1.0},
    {"uniqueItems": False, "minContains": 2, "then": False, "else": False},
    {"uniqueItems": True, "maxItems": 1},
    {"contains": INTEGER, "minContains": 0},
    {"if": INTEGER},
    {"not": False},
    {"anyOf": [{"not": True}, INTEGER]},
    {"propertyNames": {"enum": ["a", "b.c", 1]}},
    {"propertyNames": {"const": "a"}, "additionalProperties": INTEGER},
    {"propertyNames": {"pattern": "^a"}, "required": ["ab"]},
    {"propertyNames": {"minLength": 2, "maxLength": 3}},
    {"propertyNames": {"maxLength": 1}, "unevaluatedProperties": INTEGER},
    {"propertyNames": {"$ref": "#/$defs/key"}, "$defs": {"key": {"title": "Key", "enum": ["a"]}}},
    {"properties": {"a": INTEGER}, "unevaluatedProperties": False},
    {"properties": {"a": INTEGER}, "additionalProperties": INTEGER, "unevaluatedProperties": False},
    {"prefixItems": [INTEGER], "unevaluatedItems": False},
    {"prefixItems": [INTEGER], "items": {"type": "string"}, "unevaluatedItems": False},
    {"$dynamicAnchor": "node", "type": ["integer", "object"]},
]
VALUES: list[Any] = [
    *(1, None, "", "ab", [], [1], [1, 1], [1, "x"], ["x"], {}),
    *({"a": 1}, {"a": "x"}, {"ab": 1}, {"b.c": 1}, {"bxc": 1}, {"a": 1, "z": 1}, {"a": 1, "z": "x"}, {"abcd": 1}),
]
KEYWORDS = [*SCHEMAS[0], "propertyNames", "required", "properties", "if", "not", "contains", "format", "enum", "$ref"]
KEYWORDS += ["minProperties", "unevaluatedItems", "pattern", "x-guidance", "items", "dependentRequired", "oneOf"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_a_rewritten_schema_allows_the_same_texts(schema: dict[str, Any]) -> None:
    grammar, validator = grammar_from_schema(schema), Draft202012Validator(schema)
    valid = [value for value in VALUES if validator.is_valid(value)]
    assert [value for value in VALUES if accepts(grammar, json.dumps(value))] == valid
    assert valid


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-1, 3) | st.sampled_from(["", "type", "#", "#/$defs/a", "(?=a)"]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
        max_leaves=12,
    ).filter(lambda value: isinstance(value, dict)),
    st.booleans(),
)
def test_a_broken_schema_is_llguidance_s_to_refuse(schema: Any, strict: bool) -> None:
    with suppress(GrammarError):
        assert grammar_from_schema(schema, strict=strict)


def test_keys_that_are_described_by_themselves_are_refused() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"propertyNames": {"$ref": "#/$defs/a"}}}}
    assert "propertyNames" in complaint(grammar_from_schema(schema))


def test_items_in_their_older_form_leave_others_unevaluated() -> None:
    refused = complaint(grammar_from_schema({"items": [INTEGER], "unevaluatedItems": False}))
    assert "unevaluatedItems" in refused
