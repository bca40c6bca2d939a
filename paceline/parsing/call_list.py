"""Calls in a list."""

from __future__ import annotations

from collections.abc import Callable

from paceline.parsing.events import Content
from paceline.parsing.text_reader import Steps, TextReader


def call_list(reader: TextReader, index: int, call: Callable[[int], Steps[bool | None]]) -> Steps[int]:
    """Calls behind a "[", separated by ",", up to the "]". Returns the index of the next call.

    `call(index)` consumes one and yields its events. It returns False, without events, for what is no call: that is
    content, and so is what comes after it. It returns None for a bad call, of which it knows the end: that is content,
    and the next one may be a call.
    """
    while (read := (yield from call(index))) is not False:
        index += read is True
        if read is None:
            yield Content(reader.since_mark())
            reader.mark()
        if (yield from reader.skip(",", "]")) != ",":
            break
        if read:
            reader.mark()
    if not read:
        yield Content(reader.since_mark())
    return index
