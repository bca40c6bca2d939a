"""gpt-oss: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`.

An output is a row of messages. A message's header names its channel and, for a call, its recipient; the recipient may
stand before the channel. https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.parsing.json_text import call_arguments
from paceline.parsing.text_reader import NAME, Content, Event, Reasoning, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL = "<|call|>"
ENDS = ("<|end|>", CALL, "<|return|>")
FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str

    @property
    def answers(self) -> bool:
        """Whether the message is for the user. `final` is, whatever recipient the model writes."""
        return self.channel == "final" or not (self.recipient or self.channel == "analysis")

    def called(self, tools: Tools) -> str:
        """The name of the tool that the message calls; "": none."""
        name = self.recipient.removeprefix(FUNCTIONS)
        return name if name in tools or (tools and name != self.recipient) else ""


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    """Two messages of one kind get a line break between them. What is for other recipients is no content."""
    event: Callable[[str], Event] = Content
    seen: set[Callable[[str], Event]] = set()
    header = yield from _first_header(reader)
    while True:
        if header is not None and (name := header.called(tools)):
            yield reader.call(name)
            yield from call_arguments(reader)
            event = reader.arguments  # for what is no JSON
        elif header is not None:
            event = Content if header.answers else Reasoning
            if event in seen:
                yield event("\n")
            seen.add(event)
        marker = yield from reader.until((START, CHANNEL, *ENDS), event)
        if not marker:
            return
        header = None
        if marker == CALL and not (yield from _ends_call(reader, event)):
            yield event(reader.since_mark())
            continue
        if event is Reasoning:
            yield Reasoning("")
        if marker in ENDS:
            event = Content
            yield from reader.space()
        elif (header := (yield from _header(reader, marker))) is None:
            yield event(reader.since_mark())


def _ends_call(reader: TextReader, event: Callable[[str], Event]) -> Steps[bool]:
    """Whether the marker of a call's end is one: in a text, something else than a text comes behind it."""
    if event not in (Content, Reasoning):
        return True
    yield from reader.space()
    return (yield from reader.peek()) in ("", "<")


def _first_header(reader: TextReader) -> Steps[_Header | None]:
    """The rest of a header that begins in the prompt, with `<|start|>assistant`; it names a recipient."""
    reader.mark()
    header = yield from _header(reader, "")
    if header is None:
        reader.reset()
    return header


def _header(reader: TextReader, marker: str) -> Steps[_Header | None]:
    """What is between this marker and the message; None: it is no header. Of two channels the last one counts.

    Without a marker, a header begins with its recipient.
    """
    channel = recipient = ""
    if marker == START:
        yield from reader.run(NAME)  # the role
    if marker != CHANNEL:
        recipient = yield from _recipient(reader)
        if not marker and not recipient:
            return None
        marker = yield from reader.accept(CHANNEL)
    while marker == CHANNEL:
        channel = yield from reader.run(NAME)
        recipient = (yield from _recipient(reader)) or recipient
        marker = yield from reader.accept(CHANNEL)
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
    call=(f"{CHANNEL}commentary to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}", ""),  # then the model ends its turn
    separator=f"<|end|>{START}assistant",
    opening=f"{START}assistant",  # behind the reasoning's end
    reads_reasoning=True,
)
