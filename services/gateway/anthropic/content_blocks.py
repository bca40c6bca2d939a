"""What messages of a request are made of. Fields that are not known are ignored, types of blocks are not.

Clients mark blocks for caches and for features of Anthropic's models. Such a mark cannot change an answer here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from paceline_services.gateway.api_errors import MAX_ECHOED
from paceline_services.gateway.http.json_body import TEXT, any_of, type_tag

TEXT_OR_BLOCKS = any_of(TEXT, {"type": "array", "items": {"type": "object"}})


def _as_blocks(*types: str) -> Callable[[Any], Any]:
    """A validator: a text becomes one block. Raises ValueError for a block of another type than these."""

    def blocks(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        for block in value if isinstance(value, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in types:
                raise ValueError(f"content of type {kind[:MAX_ECHOED]} is not supported here")
        return value

    return blocks


class LenientBody(BaseModel):
    """A part of a body whose further fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(LenientBody):
    type: Literal["text"] = "text"
    text: str


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks("text")), TEXT_OR_BLOCKS]


class SystemBlock(LenientBody):
    """Instructions in the middle of a user's message."""

    type: Literal["mid_conv_system"]
    content: Texts


class ThinkingBlock(LenientBody):
    """Reasoning of an earlier response. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(LenientBody):
    type: Literal["redacted_thinking"]


class ToolUseBlock(LenientBody):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolReferenceBlock(LenientBody):
    """A tool that the client's search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("[text]")] | Annotated[ToolReferenceBlock, Tag("[tool_reference]")],
            Discriminator(type_tag),
        ]
    ],
    BeforeValidator(_as_blocks("text", "tool_reference")),
    TEXT_OR_BLOCKS,
]


class ToolResultBlock(LenientBody):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: ResultBlocks | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[SystemBlock, Tag("[mid_conv_system]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    Discriminator(type_tag),
]
ROLE_TYPES = {
    "user": ("text", "tool_result", "mid_conv_system"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
"""By role, the types of blocks in its messages."""
ContentBlocks = Annotated[
    list[ContentBlock],
    BeforeValidator(_as_blocks(*ROLE_TYPES["user"], *ROLE_TYPES["assistant"])),
    TEXT_OR_BLOCKS,
]


class InputMessage(LenientBody):
    role: Literal["user", "assistant", "system"]
    content: ContentBlocks

    @model_validator(mode="after")
    def _possible(self) -> InputMessage:
        for block in self.content:
            if block.type not in ROLE_TYPES[self.role]:
                raise ValueError(f"content of type {block.type} is not possible with role {self.role}")
        return self
