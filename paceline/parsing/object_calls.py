"""Calls that are JSON objects: one or several, in a list, in a code block, or bare."""

from __future__ import annotations

from collections.abc import Collection

from paceline.parsing.events import Content
from paceline.parsing.json_text import call_fields
from paceline.parsing.text_reader import Steps, TextReader

FENCE = "```"
BARE = (FENCE, "[", "{")
"""What a call may begin with where nothing announces it."""


def announced_calls(reader: TextReader, index: int) -> Steps[int]:
    """The calls behind a marker. Returns the index of the next call. What is no call is content."""
    return (yield from _begun_calls(reader, index, (yield from reader.skip(*BARE)), None))


def bare_calls(reader: TextReader, index: int, begun: str, tools: Collection[str]) -> Steps[int]:
    """Calls behind one of `BARE`, of which nothing else says that they are calls: so they have names of tools.

    Returns the index of the next call. What is no call is content.
    """
    return (yield from _begun_calls(reader, index, begun, tools))


def _begun_calls(reader: TextReader, index: int, begun: str, names: Collection[str] | None) -> Steps[int]:
    opened = begun
    if begun == FENCE:
        yield from reader.accept("json")
        opened = yield from reader.skip("[", "{")
    following = yield from _calls(reader, index, opened, names)
    if begun == FENCE and following > index:
        yield from reader.skip_closing(FENCE)
    return following


def _calls(reader: TextReader, first: int, opened: str, names: Collection[str] | None) -> Steps[int]:
    """Calls up to the end of their list, if one is opened, or for as long as objects follow one another."""
    index, listed = first, opened == "["
    if listed:
        opened = yield from reader.skip("{")
    while opened == "{" and (yield from call_fields(reader, index, names=names)):
        index += 1
        yield from reader.skip("}")  # models write one too many
        reader.mark()
        separator = yield from reader.skip(",", ";")
        opened = yield from reader.accept("{")
        if separator == "," and not opened:
            reader.reset()  # it belongs to a sentence
    if opened or index == first:
        yield Content(reader.since_mark())
    elif listed:
        yield from reader.skip_closing("]")
    return index
