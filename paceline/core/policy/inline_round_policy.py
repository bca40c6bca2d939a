"""Whether a draft in the target's process gets another round of drafting before the step."""

from __future__ import annotations


class InlineRoundPolicy:
    """Whether another drafting round, run on the target's own time, pays before a step.

    The next round takes `delay` seconds, and verifying its nodes takes rows. It brings `gain` expected tokens for each
    expected token of the deepest nodes, less the tokens that other drafts have already guessed below them. All of that
    is lost if the step goes ahead: the draft grows nothing meanwhile. The round pays if it brings more tokens per
    second than the step. `gain` and `delay` are moving averages. They start from an optimistic prior and decay towards
    it with every refusal, so that a refused draft is tried again.
    """

    PRIOR_GAIN = 0.8
    LEARNING_RATE = 0.1
    """Weight of a round in the averages."""
    OUTLIER_FACTOR = 3.0
    """A round's delay counts as at most this many times the average."""
    DECAY_TO_PRIOR = 0.001
    """Weight of the prior, at each refusal."""

    def __init__(self, delay_s: float = 1e-5) -> None:
        """`delay_s`: the prior of the delay."""
        self._prior_delay = self._delay = delay_s
        self._gain = self.PRIOR_GAIN

    def pays(self, frontier: float, expected: float, step_s: float, beyond: float = 0.0, rows_s: float = 0.0) -> bool:
        """`expected`: tokens the step would commit now, `frontier` of them from the draft's deepest nodes, `beyond`
        from other drafts' nodes right below those. `step_s`: duration of the step, the rounds so far included.
        `rows_s`: duration of the rows for a round's nodes."""
        if (frontier * self._gain - beyond) * step_s > expected * (self._delay + rows_s):
            return True
        self._gain += self.DECAY_TO_PRIOR * (self.PRIOR_GAIN - self._gain)
        self._delay += self.DECAY_TO_PRIOR * (self._prior_delay - self._delay)
        return False

    def observe(self, frontier: float, gain: float, delay_s: float) -> None:
        """A round took `delay_s` and brought `gain` expected tokens.

        Rounds below improbable nodes have little weight in the gain. A very long round has read a prompt, or was
        disturbed.
        """
        if frontier > 0:
            self._gain += self.LEARNING_RATE * min(1.0, frontier) * (gain / frontier - self._gain)
        self._delay += self.LEARNING_RATE * (min(delay_s, self.OUTLIER_FACTOR * self._delay) - self._delay)
