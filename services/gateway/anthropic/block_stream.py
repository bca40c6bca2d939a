"""The content of a response: what the model's output has in it, as content blocks, whole or as events of a stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

from pydantic_core import from_json

from paceline.parsing import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline.parsing.json_text import is_json
from paceline_services.gateway.http.json_body import Json, encode_json

EMPTY_BLOCKS: dict[str, Json] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
INVALID_JSON = "INVALID_JSON"
"""The key under which a call has its arguments as a text if the model did not write an object. Anthropic's guide to
fine-grained tool streaming names it."""

CUT_NUMBER = re.compile(r"(?<=[:,\[\s])-?(?:\d[-+.\deE]*)?$")
"""A number at the end of arguments that are cut off: it may have more digits."""


class BlockStream:
    """Turns the output of one request into events of Anthropic's streams. Output of one kind in a row is one block."""

    def __init__(self, request_id: str, call_id: Callable[[int], str], *, omit_thinking: bool) -> None:
        """`request_id`: signatures are derived from it, so that a repeated stream repeats them.

        `call_id`: the id of the index-th call. `omit_thinking`: blocks of reasoning stay empty.
        """
        self.called = False
        """Whether the model has called a tool."""
        self._request_id = request_id
        self._call_id = call_id
        self._omit_thinking = omit_thinking
        self._index = 0
        """Of the open block; if none is open, of the next one."""
        self._open = ""
        """The type of the open block; "": none is open."""

    def feed(self, event: Event) -> Iterator[Json]:
        """The events for one part of the output."""
        match event:
            case Content(text):
                yield from self._within("text")
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                yield from self._within("thinking")
                if not self._omit_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall(index, name):
                self.called = True
                yield from self.close()
                yield self._start({"type": "tool_use", "id": self._call_id(index), "name": name, "input": {}})
            case ToolArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[Json]:
        """The end of the open block, if there is one."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature()})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
            self._index += 1
            self._open = ""

    def _within(self, kind: str) -> Iterator[Json]:
        """Open a block of this type, unless one is open."""
        if self._open != kind:
            yield from self.close()
            yield self._start(EMPTY_BLOCKS[kind])

    def _start(self, block: Json) -> Json:
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _signature(self) -> str:
        return blake2b(f"{self._request_id}/{self._index}".encode(), digest_size=16).hexdigest()


def whole_blocks(events: Iterable[Json]) -> list[Json]:
    """The blocks that these events build up, as Anthropic's clients do it."""
    blocks: list[Json] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                for name, text in event["delta"].items():
                    if name != "type":
                        blocks[-1][name] = blocks[-1].get(name, "") + text
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = tool_input(blocks[-1].pop("partial_json", ""))
    return blocks


def tool_input(arguments: str) -> Json:
    """The arguments of a call as an object. Where the output ends amid them, the values that are complete."""
    complete = arguments if is_json(arguments) else CUT_NUMBER.sub("", arguments)
    try:
        value = from_json(complete or "{}", allow_inf_nan=False, allow_partial=True)
        encode_json(value)  # 1e999 is a number that cannot be sent
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
