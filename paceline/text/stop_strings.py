"""Stop strings: the text of a request ends before the first one, wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in text that arrives in pieces, and holds back only what may yet become one.

    Of several, the one that is complete first counts; of those complete at the same character, the longest.
    So the outcome depends on the text alone and not on how it was cut.
    """

    found: str | None = None
    """The stop string that was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty, but none of them may be."""
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown now. Once `found` is set, all before the stop is shown."""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        shown = len(text) - self._undecided(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """No more text comes: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
