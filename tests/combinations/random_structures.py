"""Random JSON schemas, regular expressions and tools, with texts short enough to be written to their end."""

from __future__ import annotations

from random import Random
from typing import Any

Json = dict[str, Any]

NAMES = ("a", "name", "is_open", "long name", 'quote"d', "größe", "x-1")
VALUES: tuple[Any, ...] = ("red", "green", "a \\ b", 'say "x"', "é", "", 0, 17, -2.5, True, False, None)
PATTERNS = ("^[a-z]{1,3}-[0-9]{2}$", "^(yes|no|maybe)$", "^[A-Z][a-z]{0,9}$", "^v[0-9]\\.[0-9]{1,2}$")
STRING_FORMATS = ("date", "ipv4", "ipv6", "uuid")
ATOMS = ("a", "th", "[a-f]", "[^a-z\\n]", "[0-9]", "\\d", "\\.", "-", "(ab|cd|e)", "[A-Z_]", " ", "ü", "\\w", "\\(")
QUANTIFIERS = ("", "", "", "?", "{2}", "{1,3}", "{0,4}")


def random_schema(draw: Random) -> Json:
    """A schema of any type, with a part that it may refer to."""
    return _any(draw, 3) | {"$defs": {"part": _any(draw, 0)}}


def random_record(draw: Random) -> Json:
    """The same of an object."""
    return _record(draw, 3) | {"$defs": {"part": _any(draw, 0)}}


def random_regex(draw: Random) -> str:
    parts = (draw.choice(ATOMS) + draw.choice(QUANTIFIERS) for _ in range(draw.randint(1, 6)))
    regex = "".join(parts)
    if draw.random() < 0.3:
        regex = f"({regex}|{draw.choice(ATOMS)}{draw.choice(ATOMS)})"
    return regex + draw.choice(("", "", "[a-z]*", "( [a-z]+)+", "."))


def random_tools(draw: Random) -> list[Json]:
    """One to three functions."""
    names = draw.sample(("f", "get_weather", "a-b", "search"), draw.randint(1, 3))
    return [{"type": "function", "function": {"name": name, "parameters": random_record(draw)}} for name in names]


def _any(draw: Random, depth: int) -> Json:
    """A schema that nests at most so deep."""
    nested = (_record, _array, _tuple, _union, _reference) if depth else ()
    return draw.choice((_integer, _number, _string, _enumeration, _constant, _plain, *nested))(draw, depth - 1)


def _record(draw: Random, depth: int) -> Json:
    names = draw.sample(NAMES, draw.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: Random, depth: int) -> Json:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth), "minItems": least, "maxItems": least + 1}


def _tuple(draw: Random, depth: int) -> Json:
    items = [_any(draw, depth) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": draw.randint(0, 2)}


def _union(draw: Random, depth: int) -> Json:
    return {"anyOf": [_any(draw, depth), _any(draw, depth)]}


def _reference(draw: Random, depth: int) -> Json:
    return {"$ref": "#/$defs/part"}


def _integer(draw: Random, depth: int) -> Json:
    least = draw.randint(-50, 50)
    return {
        "type": "integer",
        "minimum": least,
        draw.choice(("maximum", "exclusiveMaximum")): least + draw.randint(1, 999),
    }


def _number(draw: Random, depth: int) -> Json:
    return {"type": "number", "minimum": draw.randint(-9, 0), "maximum": draw.randint(1, 9)}


def _string(draw: Random, depth: int) -> Json:
    length = draw.randint(0, 5)
    return {
        "type": "string",
        **draw.choice(
            (
                {"minLength": length, "maxLength": length + draw.randint(0, 7)},
                {"pattern": draw.choice(PATTERNS)},
                {"format": draw.choice(STRING_FORMATS)},
            )
        ),
    }


def _enumeration(draw: Random, depth: int) -> Json:
    return {"enum": draw.sample(VALUES, draw.randint(1, 4))}


def _constant(draw: Random, depth: int) -> Json:
    return {"const": draw.choice(VALUES)}


def _plain(draw: Random, depth: int) -> Json:
    return {"type": draw.choice(("boolean", "null", ["boolean", "null"]))}
