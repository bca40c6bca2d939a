"""JSON in the bodies of requests and responses: types of fields that bodies share, parsing and writing."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
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


Json = dict[str, Any]


def type_tag(value: Any) -> str | None:
    """The tag of an object in a union by `type`. In brackets, so that errors do not show it: see `field_path`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return None if kind is None else f"[{kind}]"


class Body(BaseModel):
    """An object that a client sends. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


def any_of(*schemas: Json) -> WithJsonSchema:
    """The types that a client may send, where validation converts them."""
    return WithJsonSchema({"anyOf": list(schemas)})


def as_string_list(value: Any) -> Any:
    """A text as a list of one; other values unchanged."""
    return [value] if isinstance(value, str) else value


def refused(message: str) -> BeforeValidator:
    """A validator for a field of type None. It accepts values that ask for nothing, such as false."""

    def refuse(value: Any) -> None:
        if value:
            raise ValueError(message)

    return BeforeValidator(refuse)


def _refuse_renamed(value: Any) -> None:
    if value is not None:
        raise ValueError("is a key of structured_outputs now")


TEXT: Json = {"type": "string"}
TEXTS: Json = {"type": "array", "items": TEXT}
TEXT_PARTS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": TEXT},
        "required": ["type", "text"],
    },
}
IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
UNUSED = Field(description="accepted as OpenAI does; has no effect here")
Unused = Annotated[Any, UNUSED]
Unsupported = Annotated[None, refused("is not supported")]
"""Known, but not implemented: accepted only where it asks for nothing."""
Renamed = Annotated[None, BeforeValidator(_refuse_renamed)]
"""A field of vLLM before 0.12. Even an empty schema asks for something."""
