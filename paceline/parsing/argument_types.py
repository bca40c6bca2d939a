"""Arguments that models write as plain text, as JSON of the types that a tool's schema has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType

from paceline.parsing.json_text import is_json, parse_json
from paceline.parsing.python_literals import literal_json
from paceline.parsing.tool_format import JsonSchema

PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (NoneType,),
}
"""Of values of a JSON schema's types, without `string`."""
UNKNOWN = ("array", "object", "string")
"""For an argument whose schema names no type."""


def argument_types(schema: JsonSchema, key: str) -> Sequence[str]:
    """The types that a tool's schema allows for an argument, in its order. What it does not know is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return ("string",)
    return _types(properties[key]) or UNKNOWN


def value_json(text: str, types: Sequence[str]) -> str:
    """The value as JSON of the first type that it has; a string if it has none of them."""
    literal = text.strip()
    found = literal if is_json(literal) else literal_json(literal)
    if found is not None:
        value = parse_json(found)
        null_first = sorted(types, key=lambda name: name != "null")  # "null" is no text where null is allowed
        for name in null_first:
            if name == "string":
                break
            if type(value) in PYTHON_TYPES.get(name, ()):
                return found
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    named = schema.get("type")
    types = [each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)]
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            types += _types(option)
    return types
