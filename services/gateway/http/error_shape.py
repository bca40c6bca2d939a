"""Errors as each API writes them: Anthropic's below `/v1/messages`, OpenAI's everywhere else."""

from __future__ import annotations

from paceline_services.gateway.api_errors import ApiError
from paceline_services.gateway.http.json_body import Json

MESSAGES_PATH = "/v1/messages"
MESSAGES_REQUEST_ID_HEADER = "request-id"
"""The header from which Anthropic's clients take a response's request id."""
MESSAGES_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; of other statuses below 500 `invalid_request_error`, from there on `api_error`."""
TOO_LONG = "prompt is too long: "
"""The beginning of Anthropic's error about a prompt beyond the context: agents then shorten their conversation."""


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_body(error: ApiError, path: str, request_id: str) -> Json:
    """The body of an error response to a request for `path`."""
    return messages_error(error, request_id) if is_messages_path(path) else error.body


def messages_error(error: ApiError, request_id: str) -> Json:
    """An error in Anthropic's shape (https://docs.claude.com/en/api/errors)."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    prefix = TOO_LONG if error.code == "context_length_exceeded" else ""
    detail = {"type": MESSAGES_ERROR_TYPES.get(error.status, other), "message": prefix + error.message}
    return {"type": "error", "error": detail, "request_id": request_id}
