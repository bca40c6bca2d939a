"""Arguments that models write as Python, as JSON. Nothing is evaluated but literals."""

from __future__ import annotations

import ast
import json
import warnings

from paceline.parsing.json_text import is_json


def keywords_json(text: str) -> str | None:
    """`a=1, b="x"` as a JSON object. None: there is something else than keywords with literals.

    A JSON object in their place is allowed, too: grammars write that.
    """
    if text.lstrip().startswith("{") and is_json(text):
        return text
    call = _expression(f"f({text})")
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        return None
    keys = [ast.Constant(keyword.arg) for keyword in call.keywords]
    return _json(ast.Dict([*keys], [keyword.value for keyword in call.keywords]))


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
