"""One message of a conversation, as clients send it and as chat templates expect it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import from_json

from paceline.text import ChatTemplate
from paceline_services.gateway.http.json_body import TEXT, TEXT_PARTS, Body, any_of


class ExtensibleBody(Body):
    """An object of a message. The chat template receives further fields (`name`, ...), too."""

    model_config = ConfigDict(extra="allow", strict=True)


def _parse_arguments(value: Any) -> Any:
    """The object in a JSON text, or what there is of one that was cut off: clients send back the calls that they got.
    No arguments are an empty object."""
    if value is None or value == "":
        return {}
    if not isinstance(value, str):
        return value
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith("EOF"):
            return from_json(value, allow_inf_nan=False, allow_partial="trailing-strings")
        raise ValueError(f"is not valid JSON: {error}") from None


class CalledFunction(ExtensibleBody):
    name: str = Field(min_length=1)
    arguments: Annotated[dict[str, Any], BeforeValidator(_parse_arguments), any_of(TEXT, {"type": "object"})]
    """Templates iterate over them, so they are an object here and a text on the wire."""


class MessageToolCall(ExtensibleBody):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ExtensibleBody):
    role: str = Field(min_length=1)
    content: Annotated[str | None, any_of(TEXT, TEXT_PARTS, {"type": "null"})] = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under vLLM's newer name."""

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Joins content that comes in parts, which must be text, each on lines of its own. null is an empty text."""
        if value is None:
            return ""
        if not isinstance(value, list):
            return value
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
            raise ValueError("only parts of type text are supported")
        return "\n".join(part["text"] for part in value)

    def for_template(self, template: ChatTemplate) -> dict[str, Any]:
        """The message for a chat template.

        Templates ask whether a message has `tool_calls` at all, add to its `content`, and read the reasoning of earlier
        turns under one of several names. To one without a turn for the role `developer`, it is `system`.
        """
        message = self.model_dump(exclude_unset=True)
        if self.role == "developer" and not template.has_turn("developer"):
            message["role"] = "system"
        if self.tool_calls:
            message.setdefault("content", "")
        else:
            message.pop("tool_calls", None)
        if (reasoning := self.reasoning_content or self.reasoning) is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
            if "message.thinking" in template.source and not (self.tool_calls and self.content):
                message["thinking"] = reasoning  # gpt-oss, which refuses it beside the content of a message with calls
        return message
