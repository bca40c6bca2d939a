"""Validation errors of settings as messages for users; pydantic's own are for programmers."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

MESSAGES = {
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "missing": "is missing",
    "extra_forbidden": "is not known here",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "union_tag_not_found": "must be an object with a type",
    "json_invalid": "is not valid JSON: {error}",
}
"""By pydantic's type of error; other types keep the message of the validator or of pydantic."""
WITHOUT_INPUT = ("missing", "extra_forbidden", "json_invalid")
MAX_QUOTED = 60
"""Characters of the given value; a longer one is not quoted."""


def error_message(detail: ErrorDetails, *, quote: bool = True) -> str:
    """The error without the field's name. `quote`: with the given value, if it is short."""
    template = MESSAGES.get(detail["type"])
    if template is None:
        return detail["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = template.format(**detail.get("ctx", {}))
    given = detail["input"]
    if not quote or detail["type"] in WITHOUT_INPUT or not isinstance(given, str | int | float | bool):
        return message
    return f"{message}, not {given!r}" if len(repr(given)) <= MAX_QUOTED else message


def first_error(error: ValidationError, *, quote: bool = True) -> str:
    """The first error, with the field's name. `quote`: see `error_message`."""
    detail = error.errors(include_url=False)[0]
    where = ".".join(map(str, detail["loc"]))
    message = error_message(detail, quote=quote)
    return f"{where}: {message}" if where else message
