"""Whether a draft in the target's process gets another round before the step."""

from __future__ import annotations


class InlineRoundPolicy:
    """Whether a draft that works on the target's own time gets more of it before a step.

    Nothing grows unless it is waited for, so the whole of what a round would bring is lost by going ahead. For each
    token that the draft's deepest guesses are expected to bring, the next ones bring `gain`, less what others have
    guessed there; a round takes `delay`, and its guesses take rows, in which time the step would have earned tokens.
    Both averages start from a hopeful guess, and creep back to it with every refusal, or else a draft that is refused
    would be for ever.
    """

    PRIOR_GAIN = 0.8
    LEARNING_RATE = 0.1
    """Weight of a round in the averages."""
    OUTLIER_FACTOR = 3.0
    """So many times the usual delay is believed of one round."""
    DECAY_TO_PRIOR = 0.001
    """Weight of the first guess, with each refusal."""

    def __init__(self, delay_s: float = 1e-5) -> None:
        """`delay_s`: the guess at a delay to start from."""
        self._prior_delay = self._delay = delay_s
        self._gain = self.PRIOR_GAIN

    def pays(self, frontier: float, expected: float, step_s: float, beyond: float = 0.0, rows_s: float = 0.0) -> bool:
        """`expected`: tokens that the step would commit now, `frontier` of them by the draft's deepest guesses, and
        `beyond` by what others guess right after these. `step_s`: what all would take, rounds so far included.
        `rows_s`: what the rows of a round's guesses would take."""
        if (frontier * self._gain - beyond) * step_s > expected * (self._delay + rows_s):
            return True
        self._gain += self.DECAY_TO_PRIOR * (self.PRIOR_GAIN - self._gain)
        self._delay += self.DECAY_TO_PRIOR * (self._prior_delay - self._delay)
        return False

    def observe(self, frontier: float, gain: float, delay_s: float) -> None:
        """A round took `delay_s` and brought the draft `gain` expected tokens. What follows unlikely guesses teaches
        little, and a round that takes very long has read a prompt, or been disturbed."""
        if frontier > 0:
            self._gain += self.LEARNING_RATE * min(1.0, frontier) * (gain / frontier - self._gain)
        self._delay += self.LEARNING_RATE * (min(delay_s, self.OUTLIER_FACTOR * self._delay) - self._delay)
