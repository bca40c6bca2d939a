"""Arguments that models write one by one, each a key and a value as plain text between markers.

A value becomes JSON of the types that the tool's schema has for it. Arguments in Python become JSON, too: nothing of
Python is evaluated but literals.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TypeAlias

from paceline.parsing.json_text import call_arguments, is_json, parse_json
from paceline.parsing.text_reader import SPACE, Content, Steps, TextReader, ToolArguments
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
IMPLIED: Mapping[str, str] = {"properties": "object", "additionalProperties": "object", "items": "array"}
"""Of schemas that name no type."""
WORDS: Mapping[str, str] = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""JSON's words, and Python's, which models write in any case."""
UNKNOWN = ("array", "object", "string")
"""For an argument whose schema names no type."""


def argument_types(schema: JsonSchema, key: str) -> Sequence[str]:
    """The types that a tool's schema allows for an argument, in its order. What it does not know is a string."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return ("string",)
    return _types(properties[key]) or UNKNOWN


def value_json(text: str, types: Sequence[str]) -> str:
    """The value as JSON of the first type that it has. A string is the last choice: models write no quotes."""
    literal = text.strip()
    literal = WORDS.get(literal.lower(), literal)
    found = literal if is_json(literal) else literal_json(literal)
    if found is not None:
        value = parse_json(found)
        for name in sorted(types, key=lambda name: name != "null"):  # "null" is no text where null is allowed
            if type(value) in PYTHON_TYPES.get(name, ()):
                return found
            if name == "integer" and isinstance(value, float) and value.is_integer():
                return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> list[str]:
    """The types that a schema names or implies; none: it may be any."""
    if not isinstance(schema, Mapping):
        return []
    named = schema.get("type")
    types = [each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)]
    if types:
        return types
    values = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    types += [_type_of(value) for value in values]
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema, key):
            types += _types(option) or UNKNOWN
    return types or [name for key, name in IMPLIED.items() if key in schema]


def _listed(schema: Mapping[str, object], key: str) -> list[object]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    return next((name for name, types in PYTHON_TYPES.items() if type(value) in types), "string")


TOKEN = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<keyword>\w+(?=\s*=))|(?P<word>\w+)""", re.DOTALL
)
RENAMED = "_"
"""Before keywords in a text that Python refuses."""
PYTHON_WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}
"""JSON's."""


def keywords_json(text: str) -> str | None:
    """`a=1, b="x"` as a JSON object. None: there is something else than keywords with literals.

    A JSON object in their place is allowed, too: grammars write that. So are JSON's words, line breaks in quotes, and
    keywords that are words of Python, such as `from`.
    """
    if text.lstrip().startswith("{") and is_json(text):
        return text
    return _keywords(text) or _keywords(TOKEN.sub(_as_python, text), renamed=True)


def _keywords(text: str, *, renamed: bool = False) -> str | None:
    call = _expression(f"f({text})")
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        return None
    keys = [ast.Constant((keyword.arg or "").removeprefix(RENAMED if renamed else "")) for keyword in call.keywords]
    return _json(ast.Dict([*keys], [keyword.value for keyword in call.keywords]))


def _as_python(token: re.Match[str]) -> str:
    """A quoted text without line breaks, a keyword that is no word of Python, or Python's word for JSON's."""
    if token["quoted"]:
        return token["quoted"].replace("\n", "\\n").replace("\r", "\\r")
    if token["keyword"]:
        return RENAMED + token["keyword"]
    return PYTHON_WORDS.get(token["word"], token["word"])


def literal_json(text: str) -> str | None:
    """A Python literal as JSON; None: it is none, or JSON has no such value."""
    expression = _expression(text)
    return None if expression is None else _json(expression)


def _expression(text: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None


def _json(expression: ast.expr) -> str | None:
    try:
        text = json.dumps(ast.literal_eval(expression), ensure_ascii=False, allow_nan=False)
        text.encode()  # halves of characters cannot be sent
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


Ends: TypeAlias = Mapping[str, tuple[str, ...]]
"""The markers that end a value, each with the texts of which one must come next. Elsewhere they are mere text."""
Argument: TypeAlias = tuple[str, Sequence[str]]
"""An argument's key, and the types that its value may have."""


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks the arguments of a call."""

    begin: str
    """The marker before an argument."""
    head: Callable[[TextReader, JsonSchema], Steps[Argument | None]]
    """`head(reader, schema)`: consume what is between that marker and the value. None: it is no argument."""
    value_ends: Ends
    end: str
    """The marker behind the last argument."""


def tagged_call(reader: TextReader, name: str, schema: JsonSchema, tags: Tags) -> Steps[bool]:
    """A call of `name`, if there is a name and its arguments or its end come next. False: no event.

    A JSON object in the place of the arguments is read, too: grammars write that.
    """
    yield from reader.space()
    if not name or not ((yield from reader.peek()) == "{" or (yield from reader.next_of(tags.begin, tags.end))):
        return False
    yield reader.call(name)
    if (yield from reader.peek()) == "{":
        yield from call_arguments(reader)
        yield from reader.skip_closing(tags.end)
    else:
        yield from _arguments(reader, schema, tags)
    return True


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def argument_value(reader: TextReader, types: Sequence[str], ends: Ends, *, start: str = "") -> Steps[str]:
    """A value of these types up to one of these markers, as JSON; a text as it arrives.

    `start`: text of it that is consumed already. Returns the marker behind it; "": the end of all text.
    """
    if set(types) == {"string"}:
        return (yield from text_value(reader, ends, start=start))
    return (yield from _literal(reader, types, ends, start))


def text_value(reader: TextReader, ends: Ends, *, start: str = "") -> Steps[str]:
    """A text as a JSON string, as it arrives. See `argument_value`."""

    def event(text: str) -> ToolArguments:
        return reader.arguments(quoted(text)[1:-1])

    yield reader.arguments('"')
    yield event(start)
    while marker := (yield from reader.until(tuple(ends), event)):
        before = reader.gap
        reader.commit()
        behind, ended = yield from _end(reader, ends[marker])
        if ended:
            yield event(before)
            yield reader.arguments('"')
            return marker
        yield event(before + marker + behind)
    return ""


def _arguments(reader: TextReader, schema: JsonSchema, tags: Tags) -> Steps[None]:
    """Arguments up to the end of the call. Those that the end of the text cuts off stay open."""
    before, marker = "{", ""
    while marker != tags.end and (yield from _starts(reader, tags.begin)):
        argument = yield from tags.head(reader, schema)
        if argument is None:
            broken = reader.since_mark()
            cut = not (yield from reader.peek())
            key = broken.removeprefix(tags.begin).strip()
            yield reader.arguments(before + quoted(key)[:-1] if key else "") if cut else Content(broken)
            return
        reader.commit()
        key, types = argument
        yield reader.arguments(f"{before}{quoted(key)}: ")
        before = ", "
        marker = yield from argument_value(reader, types, tags.value_ends)
        if not marker:
            return
    if marker == tags.end or (yield from reader.accept(tags.end)):
        yield reader.arguments("{}" if before == "{" else "}")
        yield from reader.space()
    else:
        yield from reader.skip_closing(tags.begin, tags.end)


def _starts(reader: TextReader, marker: str) -> Steps[bool]:
    """Consume the marker if it comes next, and set the mark before it."""
    reader.mark()
    return bool((yield from reader.accept(marker)))


def _literal(reader: TextReader, types: Sequence[str], ends: Ends, start: str) -> Steps[str]:
    """A value that may be something else than a text: it has to be complete. See `argument_value`."""
    parts = [start]
    while True:
        text, marker = yield from reader.text_until(tuple(ends))
        parts.append(text)
        if not marker:
            yield reader.arguments("".join(parts))
            return ""
        behind, ended = yield from _end(reader, ends[marker])
        if ended:
            yield reader.arguments(value_json("".join(parts), types))
            return marker
        parts.append(marker + behind)


def _end(reader: TextReader, next_texts: tuple[str, ...]) -> Steps[tuple[str, bool]]:
    """White space behind a marker, which is consumed, and whether the marker ends the value."""
    behind = yield from reader.run(SPACE)
    found = yield from reader.next_of(*next_texts)
    return behind, bool(found) or reader.ends_before(*next_texts)
