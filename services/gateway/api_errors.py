"""Errors of the API, in OpenAI's shape; `error_shape` has Anthropic's.

ApiError                    500
├── InvalidRequestError     400  a field is wrong (403, 408 and 413: the request as a whole)
├── AuthenticationError     401  no known API key
├── UnknownModelError       404
├── RetryLaterError
│   ├── RateLimitError      429  the API key has used up a limit
│   ├── OverloadedError     429  too many requests run or wait
│   └── UnavailableError    503  no target is up, or too many connections are open
└── GenerationError         500  the target failed while it served the request
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.validation_messages import error_message

RETRY_AFTER_S = 1
MAX_ECHOED = 80
"""Characters of a client's text in an error message."""
CLOSE_CONNECTION = {"connection": "close"}


class ApiError(Exception):
    """An error response."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param`: the field at fault, as a path like `messages[0].role`."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.status = status or self.status
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"

    @classmethod
    def of(cls, error: ValidationError) -> InvalidRequestError:
        """From pydantic's first error, in plain words."""
        detail = error.errors(include_url=False)[0]
        param = field_path(detail["loc"]) or None
        return cls(_message(detail, param), param=param, code=_CODES.get(detail["type"]))

    def renamed(self, names: Iterable[tuple[str, str]]) -> InvalidRequestError:
        """The error for a body that was converted to the one at fault.

        `names`: fields of the converted body, as regular expressions, and what the client's body calls them.
        """
        if self.param is None:
            return self
        param = self.param
        for pattern, name in names:
            param = re.sub(pattern, name, param)
        message = param + self.message.removeprefix(self.param) if self.message.startswith(self.param) else self.message
        return InvalidRequestError(message, param=param, code=self.code, status=self.status, headers=self.headers)


class AuthenticationError(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, *, with_key: bool) -> None:
        """`with_key`: whether the request had a key. The message does not show it."""
        unknown, missing = "the API key is not known here", "no API key: send it as `Authorization: Bearer KEY`"
        headers = {"www-authenticate": "Bearer", **CLOSE_CONNECTION}
        super().__init__(unknown if with_key else missing, headers=headers)


class UnknownModelError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, served: Iterable[str]) -> None:
        names = ", ".join(map(repr, served))
        shown = model if len(model) <= MAX_ECHOED else f"{model[:MAX_ECHOED]}..."
        super().__init__(f"the model {shown!r} does not exist; this server has {names}", param="model")


class RetryLaterError(ApiError):
    """An error that a later request may not meet."""

    def __init__(
        self,
        message: str,
        retry_after_s: int = RETRY_AFTER_S,
        *,
        reason: str = "",
        code: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`retry_after_s`: whole seconds, 1 or more. `reason`: one word, for metrics."""
        super().__init__(message, code=code, status=status, headers=headers)
        self.headers["retry-after"] = str(retry_after_s)
        self.retry_after_s = retry_after_s
        self.reason = reason or self.code or ""


class RateLimitError(RetryLaterError):
    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, limit: str, wait_s: float, headers: Mapping[str, str]) -> None:
        """`limit`: requests, tokens or concurrent. `headers`: what is left of the limits."""
        super().__init__(f"{message}; try again in {wait_s:.1f} s", math.ceil(wait_s), reason=limit, headers=headers)
        self.type = limit


class OverloadedError(RetryLaterError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class UnavailableError(RetryLaterError):
    status = 503
    type = "service_unavailable"
    code = "no_target"


class GenerationError(ApiError):
    """The message is the target's."""


def field_path(parts: tuple[str | int, ...]) -> str:
    """`messages`, 0, `role` → `messages[0].role`."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part.startswith("[") and part.endswith("]")):  # a wrong mapping key's mark, or the tag of a type
            path += f".{part}" if path else part
    return path


_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_parameter",
    "json_invalid": "invalid_json",
}


def _message(detail: ErrorDetails, param: str | None) -> str:
    match detail["type"]:
        case "json_invalid":
            return f"the request body is not valid JSON: {detail['ctx']['error']}"
        case "extra_forbidden":
            return f"unknown parameter: {param}"
        case "missing":
            return f"missing parameter: {param}"
        case "union_tag_invalid":  # the tags are in brackets, see `field_path`
            kind, known = detail["ctx"]["tag"][1:-1], re.sub(r"[][]", "", detail["ctx"]["expected_tags"])
            return f"{param}: type {kind[:MAX_ECHOED]!r} is not supported, only {known}"
    message = error_message(detail)
    if message[1:2].islower():  # not "EOF ..."
        message = message[0].lower() + message[1:]
    return f"{param}: {message}" if param else message
