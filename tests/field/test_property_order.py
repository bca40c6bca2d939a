"""Properties come in the order that llguidance gives the schema alone, whatever we write beside it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from paceline.grammar import grammar_from_schema
from tests.field.schema_texts import accepts

X, Y = {"x": {"type": "integer"}}, {"y": {"type": "integer"}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "allOf last": {"type": "object", "properties": X, "allOf": [{"properties": Y}]},
    "allOf first": {"allOf": [{"properties": Y}], "type": "object", "properties": X},
    "allOf alone": {"type": "object", "allOf": [{"properties": X}, {"properties": Y}]},
    "a reference last": {"properties": X, "$defs": {"y": {"properties": Y}}, "$ref": "#/$defs/y"},
    "a reference first": {"$ref": "#/$defs/y", "$defs": {"y": {"properties": Y}}, "properties": X},
    "anyOf last": {"type": "object", "properties": X, "anyOf": [{"properties": Y, "required": ["y"]}]},
    "definitions last": {"allOf": [{"properties": Y}], "properties": X, "$defs": {}},
    "annotations between": {"properties": X, "title": "T", "allOf": [{"properties": Y}], "description": "D"},
    "required": {"type": "object", "required": ["y", "x"], "properties": X},
    "properties": {"type": "object", "properties": Y | X},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("white_space", [None, " ?"])
def test_the_order_is_llguidance_s_own(schema: dict[str, Any], white_space: str | None) -> None:
    ours, alone = grammar_from_schema(schema, white_space), f"start: %json {json.dumps(schema)}"
    texts = [json.dumps(dict.fromkeys(keys, 1), separators=(",", ":")) for keys in itertools.permutations("xy")]
    allowed = [accepts(alone, text) for text in texts]
    assert [accepts(ours, text) for text in texts] == allowed
    assert any(allowed)
