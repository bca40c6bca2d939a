"""Calls in lists, and calls that are JSON objects: one or several, in a list, in a code block, or bare."""

from __future__ import annotations

from collections.abc import Callable, Collection

from paceline.parsing.json_text import call_fields
from paceline.parsing.text_reader import Content, Steps, TextReader

FENCE = "```"
BARE = (FENCE, "[", "{")
"""What a call may begin with where nothing announces it."""


def object_calls(reader: TextReader, begun: str, names: Collection[str] | None = None) -> Steps[bool]:
    """Calls behind one of `BARE`. Returns whether there is one. What is no call is content.

    `names`: nothing else says that they are calls, so they need one of these.
    """
    opened = begun
    if begun == FENCE:
        yield from reader.accept("json")
        opened = yield from reader.skip("[", "{")
    found = yield from _calls(reader, opened, names)
    if begun == FENCE and found:
        yield from reader.skip_closing(FENCE)
    return found


def _calls(reader: TextReader, opened: str, names: Collection[str] | None) -> Steps[bool]:
    """Calls up to the end of their list, if one is opened, or for as long as objects follow one another."""
    found, listed = False, opened == "["
    if listed:
        opened = yield from reader.skip("{")
    while opened == "{" and (yield from call_fields(reader, names=names)):
        found = True
        yield from reader.skip("}")  # models write one too many
        reader.mark()
        separator = yield from reader.skip(",", ";")
        opened = yield from reader.accept("{")
        if separator == "," and not opened:
            reader.reset()  # it belongs to a sentence
    if opened or not found:
        yield Content(reader.since_mark())
    elif listed:
        yield from reader.skip_closing("]")
    return found


def call_list(reader: TextReader, call: Callable[[TextReader], Steps[bool | None]]) -> Steps[bool]:
    """Calls behind a "[", separated by ",", up to the "]". Returns whether there is one.

    `call(reader)` consumes one and yields its events. It returns False, without events, for what is no call: that is
    content, and so is what comes after it. It returns None for a bad call, of which it knows the end: that is content,
    and the next one may be a call.
    """
    found = False
    while (read := (yield from call(reader))) is not False:
        if read is None:
            yield Content(reader.since_mark())
            reader.mark()
        found = found or read is True
        if (yield from reader.skip(",", "]")) != ",":
            break
        if read:
            reader.mark()
    if not read:
        yield Content(reader.since_mark())
    return found
