"""Bodies of HTTP requests and responses, for every API of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paceline.messages import Delta, GenerationRequest
from paceline_services.gateway.api_errors import CLOSE_CONNECTION, MAX_ECHOED, InvalidRequestError, OverloadedError
from paceline_services.gateway.generation.model_directory import ModelDirectory
from paceline_services.gateway.http.event_stream import ClientGoneError
from paceline_services.gateway.http.server_sent_event import encode_json

AnyBody = TypeVar("AnyBody", bound=BaseModel)

IDENTITY = "identity"
"""The encoding of a body that is sent as it is (RFC 9110)."""


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()


async def read_body(request: Request, models: ModelDirectory) -> bytes:
    """Read the body within the limits. Raises `InvalidRequestError`, `OverloadedError` or `ClientGoneError`."""
    if (encoding := request.headers.get("content-encoding", IDENTITY).strip().lower()) not in ("", IDENTITY):
        raise InvalidRequestError(
            f"content-encoding {encoding[:MAX_ECHOED]} is not read: send the body as it is",
            status=415,
            code="unsupported_encoding",
            headers={"accept-encoding": IDENTITY, **CLOSE_CONNECTION},
        )
    capacity, limits = models.capacity, models.capacity.limits
    body = bytearray()
    try:
        async with asyncio.timeout(limits.max_body_s):
            async for part in request.stream():
                body += part
                capacity.bytes_reading += len(part)
                if len(body) > limits.max_body_bytes:
                    raise InvalidRequestError(
                        f"the request body exceeds the limit of {limits.max_body_bytes} bytes",
                        status=413,
                        code="body_too_large",
                        headers=CLOSE_CONNECTION,
                    )
                capacity.check_body(len(body))
    except TimeoutError:
        raise InvalidRequestError(
            f"the request body did not come within {limits.max_body_s:g} s",
            status=408,
            code="body_too_slow",
            headers=CLOSE_CONNECTION,
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    except OverloadedError as error:
        models.count_rejection(error)
        raise
    finally:
        capacity.bytes_reading -= len(body)
    return bytes(body)


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """Raises `InvalidRequestError`."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error


async def collect(requests: Sequence[GenerationRequest], deltas: AsyncGenerator[tuple[int, Delta]]) -> list[Delta]:
    """The whole output of each completion."""
    outputs = [Delta(each.request_id) for each in requests]
    async with aclosing(deltas):
        async for index, delta in deltas:
            outputs[index].extend(delta)
    return outputs
