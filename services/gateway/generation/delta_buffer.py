"""Deltas of a stream that wait for more tokens (`stream_interval`)."""

from __future__ import annotations

from paceline.output_processor import TextDelta


class DeltaBuffer:
    """Joins the deltas of each completion until they have `interval` tokens.

    The first tokens and the end of a completion do not wait, as in vLLM. A delta without tokens joins the next one.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, TextDelta] = {}
        self._begun: set[int] = set()

    def add(self, index: int, delta: TextDelta) -> TextDelta | None:
        """What is to be sent of the index-th completion now."""
        if (held := self._held.pop(index, None)) is not None:
            held.extend(delta)
            delta = held
        least = self._interval if index in self._begun else 1
        if len(delta.tokens) < least and delta.finish_reason is None:
            self._held[index] = delta
            return None
        self._begun.add(index)
        return delta
