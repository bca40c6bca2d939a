"""Items of a conversation, as clients send them and as they are kept; their names and fields are OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from paceline_services.gateway.http.json_body import TEXT, Body, Json, Unsupported, Unused, any_of, type_tag

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
MAX_ID = 256
"""Characters of an id."""
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ItemText(Body):
    """A part of a message's content, or of what a function returned."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Unused = None
    logprobs: Unused = None
    prompt_cache_breakpoint: Unused = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
ItemTexts = Annotated[list[ItemText], BeforeValidator(_as_parts), any_of(TEXT, OBJECTS)]
"""A text, or a list of text parts."""


class ConversationItem(Body):
    """What all items share. Clients may give an item an id; other items get one when they are kept."""

    id_prefix: ClassVar[str]

    id: ItemId | None = None
    status: ItemStatus | None = None

    def as_json(self, id_: str) -> Json:
        """The item as the API shows it. `id_`: for an item without an id."""
        return {"id": self.id or id_, "status": self.status or "completed"}


class MessageItem(ConversationItem):
    id_prefix: ClassVar[str] = "msg"

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemTexts
    phase: Unused = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)

    def as_json(self, id_: str) -> Json:
        texts = [part.text for part in self.content]
        if self.role == "assistant":
            parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
        else:
            parts = [{"type": "input_text", "text": text} for text in texts]
        return super().as_json(id_) | {"type": self.type, "role": self.role, "content": parts}


class FunctionCallItem(ConversationItem):
    id_prefix: ClassVar[str] = "fc"

    type: Literal["function_call"]
    call_id: ItemId
    name: str = Field(min_length=1)
    arguments: str
    namespace: Unsupported = None
    caller: Unused = None

    def as_json(self, id_: str) -> Json:
        call = {"type": self.type, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return super().as_json(id_) | call


class FunctionCallOutputItem(ConversationItem):
    id_prefix: ClassVar[str] = "fco"

    type: Literal["function_call_output"]
    call_id: ItemId
    output: ItemTexts
    name: Unused = None
    namespace: Unused = None
    caller: Unused = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.output)

    def as_json(self, id_: str) -> Json:
        return super().as_json(id_) | {"type": self.type, "call_id": self.call_id, "output": self.text}


class ReasoningItem(ConversationItem):
    id_prefix: ClassVar[str] = "rs"

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: Unused = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    def as_json(self, id_: str) -> Json:
        summary = [part.model_dump() for part in self.summary]
        content = [part.model_dump() for part in self.content or ()]
        return super().as_json(id_) | {"type": self.type, "summary": summary, "content": content}


def _check_type(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    kind = value.get("type", "message")
    if kind not in ITEM_TYPES:
        raise ValueError(f"items of type {str(kind)[:80]!r} are not supported, only {', '.join(ITEM_TYPES)}")
    return value


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(lambda value: type_tag(value) or "[message]"),
    BeforeValidator(_check_type),
]
