"""How long to delay a step for draft tokens that are on their way."""

from __future__ import annotations


class WaitPolicy:
    """Whether a step waits for growth from drafts that run elsewhere.

    By the mean height of the trees, it learns that waiting for the next growth takes `delay[height]` seconds and adds
    `gain[height]` expected tokens. Growth that arrives too late for this step mostly serves the next, so going ahead
    loses only part of the gain. Waiting pays while that loss, per second of waiting, exceeds the step's own tokens per
    second. Both are moving averages. They start from an optimistic prior and decay towards it with every refusal, so
    that a height that is not waited for is tried again.
    """

    MAX_HEIGHT = 12
    """Trees of this height are never waited for."""
    SALVAGED_SHARE = 0.5
    """Share of late growth's gain that is not lost: it serves the next step if its path is still alive."""
    TIMEOUT_FACTOR = 3.0
    """A wait ends after this many times the usual delay: long enough to learn delays far above the prior."""
    LEARNING_RATE = 0.1
    """Weight of a wait in the averages."""
    DECAY_TO_PRIOR = 0.001
    """Weight of the prior, at each refusal."""

    def __init__(self, delay_s: float = 1e-3) -> None:
        """`delay_s`: the prior of the delay."""
        self._prior_delay = delay_s
        self._prior_gain = [0.6**height for height in range(1, self.MAX_HEIGHT + 1)]
        self._gain = self._prior_gain.copy()
        self._delay = [delay_s] * self.MAX_HEIGHT

    def wait_s(self, height: int, expected: float, step_s: float) -> float:
        """The longest time to wait; 0: go ahead.

        `expected`: tokens the step would commit now. `step_s`: duration of the step, the waits so far included.
        """
        if height >= self.MAX_HEIGHT:
            return 0.0
        if (1 - self.SALVAGED_SHARE) * self._gain[height] * step_s > expected * self._delay[height]:
            return self.TIMEOUT_FACTOR * self._delay[height]
        self._update(height, self._prior_gain[height], self._prior_delay, self.DECAY_TO_PRIOR)
        return 0.0

    def observe(self, height: int, gain: float, delay_s: float) -> None:
        """A wait at this height took `delay_s` and brought `gain` expected tokens; 0 if nothing arrived."""
        self._update(height, gain, delay_s, self.LEARNING_RATE)

    def _update(self, height: int, gain: float, delay_s: float, weight: float) -> None:
        self._gain[height] += weight * (gain - self._gain[height])
        self._delay[height] += weight * (delay_s - self._delay[height])
