"""Everything a client can do wrong or run into, and the one shape in which it is told.

ApiError
├── InvalidRequestError  400  a field is wrong; names it
├── AuthenticationError  401  no API key that is known
├── ForeignSiteError     403  a page of another site sent it
├── UnknownModelError    404  no such model here
├── BodyTooLargeError    413  the body exceeds the limit
├── SlowBodyError        408  the body does not come
├── RateLimitError       429  the API key has used up a limit
├── OverloadedError      429  too many requests run; try again later
├── NoTargetError        503  no target is up; try again later
├── CrowdedError         503  too many connections are open; try again later
└── GenerationError      500  the target failed while it served the request
    └── PoisonError      500  engines died while they served the request: do not send it again
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.validation_messages import error_message

RETRY_AFTER_S = 1
MAX_ECHOED = 80
"""Characters of what a client sent."""


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """`param` is the field at fault, as a path like `messages[0].role`."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {}


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"

    @classmethod
    def of(cls, error: ValidationError) -> InvalidRequestError:
        """The first complaint of pydantic, in words for whoever wrote the request."""
        detail = error.errors(include_url=False)[0]
        param = field_path(detail["loc"]) or None
        return cls(_complaint(detail, param), param=param, code=_CODES.get(detail["type"]))


class AuthenticationError(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, given: object) -> None:
        """`given`: whether there was a key at all. What it was is told nobody."""
        told = "the API key is not known here" if given else "no API key: send it as `Authorization: Bearer KEY`"
        super().__init__(told)

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer", "connection": "close"}


class ForeignOriginError(ApiError):
    status = 403
    type = "invalid_request_error"
    code = "foreign_origin"

    def __init__(self, origin: str) -> None:
        named = origin[:MAX_ECHOED]
        super().__init__(f"pages of {named} may not use this server: start it with --allow-origin {named} if they may")


class UnknownModelError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, model: str, served: Iterable[str]) -> None:
        has = ", ".join(map(repr, served))
        named = model if len(model) <= MAX_ECHOED else f"{model[:MAX_ECHOED]}..."
        super().__init__(f"the model {named!r} does not exist; this server has {has}", param="model")


class BodyTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body exceeds the limit of {limit} bytes", code="body_too_large")

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class SlowBodyError(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "body_too_slow"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request body did not come within {limit_s:g} s")

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class RetryLaterError(ApiError):
    """Base of errors that pass by themselves."""

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S, *, reason: str = "") -> None:
        """`retry_after_s`: whole seconds, 1 or more. `reason`: in one word, for metrics."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason or self.code or ""

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class RateLimitError(RetryLaterError):
    """`limit`: requests, tokens or concurrent. `told`: headers that say what is left."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, limit: str, wait_s: float, told: Mapping[str, str]) -> None:
        super().__init__(f"{message}; try again in {wait_s:.1f} s", math.ceil(wait_s), reason=limit)
        self.type = limit
        self._limit_headers = told

    @property
    def headers(self) -> dict[str, str]:
        return {**self._limit_headers, **super().headers}


class OverloadedError(RetryLaterError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class NoTargetError(RetryLaterError):
    status = 503
    type = "service_unavailable"
    code = "no_target"


class TooManyConnectionsError(RetryLaterError):
    status = 503
    type = "service_unavailable"
    code = "crowded"

    def __init__(self) -> None:
        super().__init__("too many connections are open; try again soon", reason="connections")


class GenerationError(ApiError):
    """The message is the target's."""


class EnginesDiedError(GenerationError):
    """Of a request that would cost further engines."""

    code = "engines_died"

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # OpenAI's clients send a request with status 500 again otherwise


def field_path(parts: tuple[str | int, ...]) -> str:
    """`messages`, 0, `role` → `messages[0].role`."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # pydantic's mark for a wrong key of a mapping
            path += f".{part}" if path else part
    return path


_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_parameter",
    "json_invalid": "invalid_json",
}


def _complaint(detail: ErrorDetails, param: str | None) -> str:
    match detail["type"]:
        case "json_invalid":
            return f"the request body is not valid JSON: {detail['ctx']['error']}"
        case "extra_forbidden":
            return f"unknown parameter: {param}"
        case "missing":
            return f"missing parameter: {param}"
    words = error_message(detail)
    return f"{param}: {words[0].lower()}{words[1:]}" if param else words
