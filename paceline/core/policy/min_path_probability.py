"""From which path probability on a draft should send its guesses."""

from __future__ import annotations


class MinPathProbability:
    """What a row is worth: the path probability below which guesses are not verified, as of late.

    With rows to spare it is 0. A draft need not grow what nobody would verify. But what is improbable now may be
    probable once more is known, so that it is wanted from a `SHARE` of the price on. A demand is changed when it is off
    by more than `SLACK`.
    """

    MARGIN = 0.3
    CHANGE_FACTOR = 2.0
    LEARNING_RATE = 0.1

    def __init__(self) -> None:
        self.min_path_probability = 0.0
        """Path probability from which on guesses are wanted."""
        self._average = 0.0

    def observe(self, refused: float) -> bool:
        """The likeliest guess that a step did not verify had this path probability; whether `wanted` has changed."""
        self._average += self.LEARNING_RATE * (refused - self._average)
        wanted = self.MARGIN * self._average
        if (
            self.min_path_probability / self.CHANGE_FACTOR <= wanted <= self.min_path_probability * self.CHANGE_FACTOR
            or max(wanted, self.min_path_probability) < 1e-3
        ):
            return False
        self.min_path_probability = wanted
        return True
