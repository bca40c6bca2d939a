"""How long to hold a step back for guesses that are under way."""

from __future__ import annotations


class WaitPolicy:
    """Whether to hold a step back for guesses that are under way.

    Learned from waiting: when trees are `height` nodes high, waiting for the next growth takes `delay[height]` seconds
    and adds `gain[height]` expected tokens. Growth that comes too late for a step is mostly there for the next, so only
    part of that is lost by going ahead. Waiting pays while the loss, per second of waiting, exceeds what the step earns
    per second as things stand. Both are moving averages that start from a hopeful guess. A height that is not waited
    for teaches nothing, so with every refusal the averages creep back towards that guess: it is tried again now and
    then.
    """

    MAX_HEIGHT = 12
    """Trees this high are never waited for."""
    SALVAGED_SHARE = 0.5
    """Share of a late guess's worth that is not lost: it is there for the next step, if its path still stands."""
    TIMEOUT_FACTOR = 1.5
    """Growth is given up after this many times its usual delay."""
    LEARNING_RATE = 0.1
    """Weight of a wait in the averages."""
    DECAY_TO_PRIOR = 0.001
    """Weight of the first guess, with each refusal."""

    def __init__(self, delay_s: float = 1e-3) -> None:
        """`delay_s`: the guess at a delay to start from."""
        self._prior_delay = delay_s
        self._prior_gain = [0.6**height for height in range(1, self.MAX_HEIGHT + 1)]
        self._gain = self._prior_gain.copy()
        self._delay = [delay_s] * self.MAX_HEIGHT

    def wait_s(self, height: int, expected: float, step_s: float) -> float:
        """How long to wait for more, at most; 0: go ahead.

        `expected`: tokens that the step would commit now. `step_s`: what they would take, waits so far included.
        """
        if height >= self.MAX_HEIGHT:
            return 0.0
        if (1 - self.SALVAGED_SHARE) * self._gain[height] * step_s > expected * self._delay[height]:
            return self.TIMEOUT_FACTOR * self._delay[height]
        self._update(height, self._prior_gain[height], self._prior_delay, self.DECAY_TO_PRIOR)
        return 0.0

    def observe(self, height: int, gain: float, delay_s: float) -> None:
        """A wait at this height took `delay_s` and brought `gain` expected tokens; 0 if nothing came."""
        self._update(height, gain, delay_s, self.LEARNING_RATE)

    def _update(self, height: int, gain: float, delay_s: float, weight: float) -> None:
        self._gain[height] += weight * (gain - self._gain[height])
        self._delay[height] += weight * (delay_s - self._delay[height])
