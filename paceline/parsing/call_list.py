"""Calls in a list."""

from __future__ import annotations

from collections.abc import Callable

from paceline.parsing.events import Content
from paceline.parsing.text_reader import Steps, TextReader


def call_list(reader: TextReader, index: int, call: Callable[[int], Steps[bool]]) -> Steps[int]:
    """Calls behind a "[", separated by ",", up to the "]". Returns the index of the next call.

    `call(index)` consumes one and yields its events; it returns False, without events, for what is no call. That is
    content, and so is what comes after it.
    """
    while (yield from call(index)):
        index += 1
        if (yield from reader.skip(",", "]")) != ",":
            return index
        reader.mark()
    yield Content(reader.since_mark())
    return index
