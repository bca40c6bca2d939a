"""JSON in the bodies of requests and responses."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from paceline_services.gateway.api_errors import InvalidRequestError

AnyBody = TypeVar("AnyBody", bound=BaseModel)

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """Raises `InvalidRequestError`."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError.of(error) from error
