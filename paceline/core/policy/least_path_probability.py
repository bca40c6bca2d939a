"""The least path probability of nodes that a draft should send."""

from __future__ import annotations


class LeastPathProbability:
    """The least path probability of useful nodes, from the best node that recent steps had no row for.

    It is 0 while there are rows to spare. A node that is improbable now may become probable after the next commit, so
    the limit is only `MARGIN` times the average of what went unverified. It changes in steps of `CHANGE_FACTOR`, since
    every change is sent to the drafts.
    """

    MARGIN = 0.3
    CHANGE_FACTOR = 2.0
    LEARNING_RATE = 0.1
    NEGLIGIBLE = 1e-3
    """Limits below this are not distinguished."""

    def __init__(self) -> None:
        self.value = 0.0
        self._average = 0.0

    def observe(self, unverified: float) -> bool:
        """Return whether the limit changed. `unverified`: path probability of the likeliest node left without a row."""
        self._average += self.LEARNING_RATE * (unverified - self._average)
        limit, new = self.value, self.MARGIN * self._average
        if max(new, limit) < self.NEGLIGIBLE or limit / self.CHANGE_FACTOR <= new <= limit * self.CHANGE_FACTOR:
            return False
        self.value = new
        return True
