"""Grammars that make a model call tools, in the way that its family writes calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.grammar.lark import GrammarError, json_part
from paceline.grammar.lark_rules import LarkRules
from paceline.grammar.special_tokens import SpecialTokens, lark_parts, merged
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools
from paceline.text import Tokenizer

SPACE = r"/[ \t\r\n]{0,8}/"
"""As models write it behind their reasoning. It is bounded: small models may never end it."""
ANNOTATIONS = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
)
"""Keys of a schema that restrict nothing. Descriptions are most of a usual tool."""
SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keys of a schema whose values are schemas by name."""
VALUES = frozenset(("enum", "const", "required", "dependentRequired", "type"))
"""Keys of a schema whose values are no schemas."""


def forced_call_grammar(
    tool_format: ToolFormat,
    tools: Tools,
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    reasoning: ReasoningFormat | None = None,
) -> str:
    """Lark text: nothing but a call of one of these tools, or of any number of them if `parallel`.

    `tools`: the arguments are an object, whatever the schema says. A little white space may come before the first call.
    `reasoning`: of the model. If the format of its calls has the reasoning in it, so has the grammar; otherwise the
    grammar begins behind it, see `grammar_start`. Raises `GrammarError`.
    """
    if not tools:
        raise GrammarError("there is no tool that could be called")
    special, rules = SpecialTokens(tokenizer), LarkRules()

    def written(text: str) -> str:
        return lark_parts(special.split(text))

    before = written(tool_format.opening.lstrip())
    if reasoning is not None and tool_format.reads_reasoning:
        thought = f"{written(reasoning.begin)} {rules.text_up_to(special.split(reasoning.end))}"
        before = f"({thought} {before})*"
    call = rules.one_of([_call(tool_format, name, schema, special) for name, schema in tools.items()])
    more = f"({written(tool_format.separator)} {call})*" if parallel else ""
    return rules.grammar(f"{SPACE} {before} {call} {more} {written(tool_format.closing)}")


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


def _call(tool_format: ToolFormat, name: str, schema: JsonSchema, special: SpecialTokens) -> str:
    if json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise GrammarError(f"the tool name {name!r} has a quotation mark, a backslash or a control character")
    head = merged([*special.split(tool_format.begin), name, *special.split(tool_format.middle)])
    arguments = json_part({"type": "object", **without_annotations(schema)})
    return f"{lark_parts(head)} {arguments} {lark_parts(special.split(tool_format.end))}"
