"""Grammars that make a model call tools, in the way that its family writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.grammar.lark import GrammarError, json_part
from paceline.grammar.special_tokens import SpecialTokens, lark_parts, merged
from paceline.parsing.tool_format import ToolFormat
from paceline.text import Tokenizer

ANNOTATIONS = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
)
"""Keys of a schema that restrict nothing. Descriptions are most of a usual tool."""
SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keys of a schema whose values are schemas by name."""
VALUES = frozenset(("enum", "const", "required", "dependentRequired", "type"))
"""Keys of a schema whose values are no schemas."""


def forced_call_grammar(
    tool_format: ToolFormat, tools: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """Lark text: nothing but a call of one of these tools, or of any number of them if `parallel`.

    `tools`: by name, the JSON schema of the arguments, which are an object in any case. A little white space may come
    before the first call. Raises `GrammarError`.
    """
    if not tools:
        raise GrammarError("there is no tool that could be called")
    special = SpecialTokens(tokenizer)
    calls = [_call(tool_format, name, schema, special) for name, schema in tools.items()]
    separator = lark_parts(special.split(tool_format.separator))
    more = f"({separator} call)*" if parallel else ""
    opening = lark_parts(special.split(tool_format.opening.lstrip()))
    lines = [
        f"start: SPACE? {opening} call {more} {lark_parts(special.split(tool_format.closing))}",
        "SPACE: /[ \\t\\r\\n]{1,8}/",
        f"call: {' | '.join(f'call_{number}' for number in range(len(calls)))}",
        *(f"call_{number}: {call}" for number, call in enumerate(calls)),
    ]
    return "\n".join(lines)


def without_annotations(schema: Any) -> Any:
    """The schema without what restricts nothing, at every depth."""
    if isinstance(schema, list):
        return [without_annotations(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _value_without(key, value) for key, value in schema.items() if key not in ANNOTATIONS}


def _value_without(key: str, value: Any) -> Any:
    if key in VALUES:
        return value
    if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: without_annotations(each) for name, each in value.items()}
    return without_annotations(value)


def _call(tool_format: ToolFormat, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> str:
    if json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise GrammarError(f"the tool name {name!r} has a quotation mark, a backslash or a control character")
    head = merged([*special.split(tool_format.begin), name, *special.split(tool_format.middle)])
    arguments = json_part({"type": "object", **without_annotations(schema)})
    return f"{lark_parts(head)} {arguments} {lark_parts(special.split(tool_format.end))}"
