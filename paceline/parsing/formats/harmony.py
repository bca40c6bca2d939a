"""gpt-oss: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

An output is a row of messages. A message's header names its channel and, for a call, its recipient; the recipient may
stand before the channel. https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.parsing.events import Content, Event, Reasoning, ToolArguments, ToolCall
from paceline.parsing.json_text import call_arguments
from paceline.parsing.text_reader import NAME, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str

    def called(self, tools: Tools) -> str:
        """The name of the tool that the message calls; "": none."""
        name = self.recipient.removeprefix(FUNCTIONS)
        return name if name in tools or (tools and name != self.recipient) else ""


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """Two messages of one kind get a line break between them. What is for other recipients is no content."""
    index = 0
    event: Callable[[str], Event] = Content
    seen: set[Callable[[str], Event]] = set()
    while marker := (yield from reader.until((START, CHANNEL, *ENDS), event)):
        if event is Reasoning:
            yield Reasoning("")
        if marker in ENDS:
            event = Content
            yield from reader.space()
        elif (header := (yield from _header(reader, marker))) is None:
            yield event(reader.since_mark())
        elif name := header.called(tools):
            yield ToolCall(index, name)
            yield from call_arguments(reader, index)
            event = partial(ToolArguments, index)  # for what is no JSON
            index += 1
        else:
            event = Reasoning if header.recipient or header.channel == "analysis" else Content
            if event in seen:
                yield event("\n")
            seen.add(event)


def _header(reader: TextReader, marker: str) -> Steps[_Header | None]:
    """What is between this marker and the message; None: it is no header."""
    channel = recipient = ""
    if marker == START:
        yield from reader.run(NAME)  # the role
        recipient = yield from _recipient(reader)
        marker = yield from reader.accept(CHANNEL)
    if marker == CHANNEL:
        channel = yield from reader.run(NAME)
        recipient = (yield from _recipient(reader)) or recipient
    yield from reader.skip(CONSTRAIN)
    yield from reader.run(NAME)  # the type of the message: json
    return _Header(channel, recipient) if (yield from reader.skip(MESSAGE)) else None


def _recipient(reader: TextReader) -> Steps[str]:
    if not (yield from reader.skip("to=")):
        return ""
    recipient = yield from reader.run(NAME)
    yield from reader.space()
    return recipient


OPENAI = ToolFormat(
    "openai",
    parse,
    markers=(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    template_signs=(START, CHANNEL, MESSAGE),
    begin=f"{CHANNEL}commentary to={FUNCTIONS}",
    middle=f" {CONSTRAIN}json{MESSAGE}",
    end="",  # then the model ends its turn
    separator=f"<|end|>{START}assistant",
    opening=f"{START}assistant",  # behind the reasoning's end
    reads_reasoning=True,
)
