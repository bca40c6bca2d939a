"""Stop strings: a request's text ends before the first one, wherever the token boundaries are."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches text that arrives in parts, and holds back only text that may be the start of a stop string.

    Of several stop strings, the first one to be complete counts; of those complete at the same character, the longest.
    So the outcome does not depend on how the text is cut.
    """

    found: str | None = None
    """The first stop string in the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty; a stop string may not."""
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._longest = max(map(len, stops), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; return the text that can be shown now. When `found` is set, all text before it is shown."""
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
        """End the text; return the text held back, which is no stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
