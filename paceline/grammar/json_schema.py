"""JSON schemas in the keywords that llguidance knows, with the same meaning.

What says nothing about a JSON text is dropped: annotations, formats that llguidance does not check (by the standard all
formats are annotations), and keywords without their partner. llguidance refuses all other keywords that it does not
know. With `strict: false` it leaves them out and warns; `unknown_keywords` reads the warnings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


Node: TypeAlias = dict[str, Any]
"""One schema, an object, in a document of schemas."""

ANNOTATIONS = frozenset(
    ("title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment")
)
"""Keywords that restrict nothing. Descriptions are most of a usual tool."""
SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name."""
VALUES = frozenset(("enum", "const", "required", "dependentRequired", "type"))
"""Keywords whose values are no schemas."""
COUNTS = frozenset(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"))
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that llguidance checks."""
TEXT_KEYWORDS = frozenset(("type", "enum", "const", "pattern", "format", "minLength", "maxLength"))
"""Keywords that say what a text is."""
APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas"))
"""Keywords with schemas that may name properties or items of the same value."""
SHORT_ESCAPES = 'nrbtf\\"'
"""What may stand behind a backslash in a JSON string, without `u`."""
LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Parts of a pattern that no grammar can follow."""
PATTERN_LEFT_OUT = "pattern"
"""A format that llguidance does not know, in the place of a pattern: llguidance's warning names it."""

DROPPED: dict[str, Callable[[Node], bool]] = {
    "format": lambda node: isinstance(node["format"], str) and node["format"] not in FORMATS,
    "if": lambda node: not {"then", "else", "unevaluatedItems", "unevaluatedProperties"} & node.keys(),
    "then": lambda node: "if" not in node,
    "else": lambda node: "if" not in node,
    "contains": lambda node: node.get("minContains") == 0 and "maxContains" not in node,
    "minContains": lambda node: "contains" not in node,
    "maxContains": lambda node: "contains" not in node,
    "uniqueItems": lambda node: node["uniqueItems"] is False or node.get("maxItems") in (0, 1),
    "not": lambda node: node["not"] is False,
    "propertyNames": lambda node: _names_any(node["propertyNames"]),
    "dependentRequired": lambda node: not node["dependentRequired"],
    "dependentSchemas": lambda node: not node["dependentSchemas"],
    "unevaluatedItems": lambda node: (
        node["unevaluatedItems"] in (True, {}) or isinstance(node.get("items"), dict | bool)
    ),
    "unevaluatedProperties": lambda node: node["unevaluatedProperties"] in (True, {}) or "additionalProperties" in node,
}
"""Keywords that say nothing beside such keywords. Later ones see what earlier ones leave."""


OURS = ("lenient", "json_allowed_escapes")
"""Options that a schema cannot set."""


def llguidance_schema(schema: Mapping[str, Any] | bool, options: Node, *, strict: bool = True) -> Node | bool:
    """The schema in llguidance's keywords. Its own `x-guidance` replaces `options`, except for the keys in `OURS`.

    `strict`: False leaves out keywords that llguidance cannot compile. Raises `GrammarError`.
    """
    if isinstance(schema, bool):
        return schema
    translation = _Translation(schema, strict=strict)
    node = translation.schema({key: value for key, value in schema.items() if key != "x-guidance"})
    if isinstance(node, bool):
        return node
    if translation.confusable:
        options = {**options, "json_allowed_escapes": SHORT_ESCAPES}
    if not strict:
        options = {**options, "lenient": True}
    # It comes last: llguidance moves the last keyword into its place, and the order of keywords orders properties.
    own = schema.get("x-guidance", options)
    if not isinstance(own, Mapping):
        raise GrammarError("x-guidance: it has to be an object of llguidance's options")
    chosen = {key: each for key, each in own.items() if key not in OURS}
    return {**node, "x-guidance": chosen | {key: options[key] for key in OURS if key in options}}


def unknown_keywords(text: str) -> list[str]:
    """The keywords that llguidance cannot keep to, by a warning or an error of its."""
    match = _UNKNOWN.search(text.replace("min/max", "minProperties, max"))
    return re.findall(r"[$\w]+", next(filter(None, match.groups()))) if match else []


class _Translation:
    """The schemas of one document."""

    def __init__(self, document: Mapping[str, Any], *, strict: bool) -> None:
        self._document, self._strict = document, strict
        self._dynamic = '"$dynamicRef"' in json.dumps(document)
        self.confusable = False
        """Whether llguidance allows a free key that is an escaped spelling of a named one: `"a\\u0062"` of "ab"."""

    def schema(self, value: Any) -> Any:
        """A schema, a list of schemas, or a value without any."""
        if isinstance(value, list):
            return [self.schema(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        node = {key: self._value(key, each) for key, each in value.items() if key not in ANNOTATIONS}
        if node.get("not") in (True, {}):
            return False
        return self._rewritten(node)

    def _value(self, key: str, value: Any) -> Any:
        if key in VALUES:
            return value
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self.schema(each) for name, each in value.items()}
        if key in COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        return self.schema(value)

    def _rewritten(self, node: Node) -> Node:
        if not self._dynamic:
            node.pop("$dynamicAnchor", None)
        if "propertyNames" in node:
            node["propertyNames"] = self._resolved(node["propertyNames"])
        _close(node)
        _name_patterns(node)
        for keyword, says_nothing in DROPPED.items():
            if keyword in node and says_nothing(node):
                del node[keyword]
        if not self._strict and LOOK_AROUND.search(str(node.get("pattern", ""))):
            _leave_pattern_out(node)
        _check_least(node)
        free = node.get("additionalProperties") is not False
        self.confusable |= free and any(node.get(key) for key in ("properties", "required", "patternProperties"))
        return node

    def _resolved(self, value: Any) -> Any:
        """The schema of a text that a mere reference within the document refers to; else the value."""
        if not isinstance(value, Mapping) or value.keys() != {"$ref"} or not str(value["$ref"]).startswith("#/"):
            return value
        found: Any = self._document
        for part in str(value["$ref"])[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or found.keys() - ANNOTATIONS - TEXT_KEYWORDS:
            return value
        return self.schema(found)


def _leave_pattern_out(node: Node) -> None:
    del node["pattern"]
    others = node.get("allOf")
    node["allOf"] = [*(others if isinstance(others, list) else []), {"format": PATTERN_LEFT_OUT}]


def _names_any(names: Any) -> bool:
    """Whether this schema of keys allows any. A format of a key is an annotation: no pattern is known for it."""
    if not isinstance(names, dict):
        return names is True
    return names.get("type", "string") == "string" and names.keys() <= {"type", "format"}


def _name_patterns(node: Node) -> None:
    """Write `propertyNames` as a pattern, if there are no properties but additional ones."""
    names = node.get("propertyNames")
    if {"properties", "patternProperties"} & node.keys() or not isinstance(names, dict):
        return
    if pattern := _name_pattern({key: value for key, value in names.items() if (key, value) != ("type", "string")}):
        del node["propertyNames"]
        node["patternProperties"] = {pattern: node.get("additionalProperties", True)}
        node["additionalProperties"] = False


def _name_pattern(names: Node) -> str:
    """A regular expression for strings that fit this schema; "": not known, or all of them."""
    match names:
        case {"enum": [*values]} if len(names) == 1:
            return _literals(values)
        case {"const": str(value)} if len(names) == 1:
            return _literals([value])
        case {"pattern": str(pattern)} if len(names) == 1:
            return pattern
        case _ if names and names.keys() <= {"minLength", "maxLength"}:
            return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    return ""


def _literals(values: list[Any]) -> str:
    texts = [re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", value) for value in values if isinstance(value, str)]
    return f"^(?:{'|'.join(texts)})$" if texts else ""


def _close(node: Node) -> None:
    """What no keyword names is unevaluated."""
    if {*APPLICATORS, "contains"} & node.keys():
        return
    for unevaluated, additional in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if unevaluated in node and not isinstance(node.get(additional), list):
            node.setdefault(additional, node.pop(unevaluated))


def _check_least(node: Node) -> None:
    """Raises `GrammarError` if several free keys are needed: llguidance would count the same one twice."""
    least, required = node.get("minProperties"), node.get("required")
    named = len(required) if isinstance(required, list) else 0
    free = node.get("additionalProperties") is not False or node.get("patternProperties")
    if isinstance(least, int) and least - named > 1 and free:
        raise GrammarError(f"minProperties: at most one more than the required properties, not {least}")


_UNKNOWN = re.compile(
    r"Unimplemented keys: \[(.*)\]"
    r"|(oneOf) (?:constraints are )?not"
    r"|(minProperties, maxProperties) only"
    r"|Unknown format: (pattern)$"
)
"""Finds the keywords that a warning or an error of llguidance names as unsupported."""
