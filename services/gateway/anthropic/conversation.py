"""Anthropic's messages as chat messages, which chat templates know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from paceline_services.gateway.anthropic.content_blocks import (
    ContentBlock,
    InputMessage,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline_services.gateway.http.json_body import Json

SEPARATOR = "\n\n"
"""Between the texts of blocks that become one text."""
ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code puts before its system prompt, for Anthropic's accounts alone. It differs
from request to request, so that no prefix of the prompt could be found in the cache."""


@dataclass(slots=True)
class Turn:
    """Messages of one side in a row: the API takes them as one."""

    role: Literal["user", "assistant"]
    blocks: list[ContentBlock] = field(default_factory=list)


def chat_messages(system: Sequence[TextBlock], messages: Sequence[InputMessage]) -> list[Json]:
    """The conversation, with the system prompt and the system messages before the first turn as its first message.

    A later system message becomes a text of the user that is marked as a reminder. Few templates take a system message
    there, and one that moved to the front would change the prompt's beginning, which is cached.
    """
    leading = list(takewhile(lambda message: message.role == "system", messages))
    instructions = [*system, *(block for message in leading for block in message.content)]
    converted = []
    if text := _joined(instructions):
        converted.append({"role": "system", "content": text})
    for turn in _turns(messages[len(leading) :]):
        converted += _user_messages(turn.blocks) if turn.role == "user" else [_assistant_message(turn.blocks)]
    return converted


def _turns(messages: Iterable[InputMessage]) -> list[Turn]:
    turns: list[Turn] = []
    for message in messages:
        role: Literal["user", "assistant"] = "assistant" if message.role == "assistant" else "user"
        if not turns or turns[-1].role != role:
            turns.append(Turn(role))
        if message.role == "system":
            _add_reminder(turns[-1], _joined(message.content))
        else:
            turns[-1].blocks += message.content
    return turns


def _add_reminder(turn: Turn, text: str) -> None:
    """Append it to the turn; behind results alone it belongs to the last one.

    Templates forget the reasoning before the user's latest message, so there must be none among the calls of tools.
    """
    reminder = TextBlock(text=_reminder(text))
    last = turn.blocks[-1] if turn.blocks else None
    if isinstance(last, ToolResultBlock):
        turn.blocks[-1] = last.model_copy(update={"content": [*(last.content or ()), reminder]})
    else:
        turn.blocks.append(reminder)


def _user_messages(blocks: Sequence[ContentBlock]) -> Iterator[Json]:
    """The results of tools, and then what the user writes."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        text = _joined(result.content or ())
        yield {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "content": f"Error: {text}" if result.is_error else text,
        }
    text = _joined(blocks)
    if text or not results:
        yield {"role": "user", "content": text}


def _assistant_message(blocks: Sequence[ContentBlock]) -> Json:
    message: Json = {"role": "assistant", "content": _joined(blocks)}
    if reasoning := SEPARATOR.join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = reasoning
    if calls := [_tool_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _tool_call(block: ToolUseBlock) -> Json:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _joined(blocks: Iterable[ContentBlock | ToolReferenceBlock]) -> str:
    """The texts of these blocks."""
    return SEPARATOR.join(filter(None, map(_text, blocks)))


def _text(block: ContentBlock | ToolReferenceBlock) -> str:
    match block:
        case TextBlock():
            return "" if block.text.startswith(ATTRIBUTION) else block.text
        case SystemBlock():
            return _reminder(_joined(block.content))
        case ToolReferenceBlock():
            return f"The tool {block.tool_name} is available."
    return ""


def _reminder(text: str) -> str:
    """A text by which the client, not the user, instructs the model, as Claude Code writes it."""
    return f"<system-reminder>\n{text}\n</system-reminder>" if text else ""
