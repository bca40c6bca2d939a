"""Arguments that models write as Python, as JSON. Nothing is evaluated but literals."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping

from paceline.parsing.json_text import is_json

TOKEN = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<keyword>\w+(?=\s*=))|(?P<word>\w+)""", re.DOTALL
)
RENAMED = "_"
"""Before keywords in a text that Python refuses."""
WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}
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
    return WORDS.get(token["word"], token["word"])


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
