"""How long to delay a step for draft tokens that are on their way, or that a draft in this process would make."""

from __future__ import annotations


class WaitPolicy:
    """Whether a step waits for growth.

    Growth comes in rounds. The first one of a step takes longer than those after it, since the draft has to learn what
    was drawn. Each round brings `gain` expected tokens for each expected token of the deepest nodes, and its nodes are
    the deepest ones then. What drafts elsewhere send too late for this step mostly serves the next, so going ahead
    loses only part of what waiting would bring; a draft in this process grows nothing meanwhile. Waiting
    pays if there is a number of rounds that bring more than their time costs: the loss, per second of waiting, exceeds
    the step's own tokens per second.

    `gain` and both delays are moving averages. They start from an optimistic prior and decay towards it with every
    refusal, so that a refused draft is waited for again.
    """

    PRIOR_GAIN = 0.8
    SALVAGED_SHARE = 0.5
    """Share of late growth's gain that is not lost: it serves the next step if its path is still alive."""
    TIMEOUT_FACTOR = 3.0
    """A wait ends after this many times the usual delay: long enough to learn delays far above the prior. A longer
    round counts as no longer: it has read a prompt, or was disturbed."""
    LEARNING_RATE = 0.1
    """Weight of a wait in the averages."""
    DECAY_TO_PRIOR = 0.001
    """Weight of the prior, at each refusal."""

    def __init__(self, delay_s: float = 1e-3, salvaged_share: float = SALVAGED_SHARE) -> None:
        """`delay_s`: the prior of the delays."""
        self._lost_share = 1 - salvaged_share
        self._prior_delay = delay_s
        self._gain = self.PRIOR_GAIN
        self._delays = {True: delay_s, False: delay_s}
        """Of a step's first round, and of a later one."""

    def wait_s(
        self,
        frontier: float,
        rounds: int,
        expected: float,
        step_s: float,
        *,
        first: bool,
        by_lookups: float = 0.0,
        rows_s: float = 0.0,
    ) -> float:
        """The longest time to wait for the next round; 0: go ahead.

        `expected`: tokens the step would commit now, `frontier` of them from the draft's deepest nodes, `by_lookups`
        from nodes that only lookups have guessed: the draft may guess the same. `rounds`: how many more levels the step
        can verify. `step_s`: duration of the step, the waits so far included. `first`: whether it has not waited yet.
        `rows_s`: duration of the rows for a round's nodes.
        """
        gained, seconds = -by_lookups, 0.0
        for later in range(rounds):
            frontier *= self._gain
            gained += frontier
            seconds += self._delays[first and not later] + rows_s
            if self._lost_share * gained * step_s > expected * seconds:
                return self.TIMEOUT_FACTOR * self._delays[first]
        self._gain += self.DECAY_TO_PRIOR * (self.PRIOR_GAIN - self._gain)
        for each in self._delays:
            self._delays[each] += self.DECAY_TO_PRIOR * (self._prior_delay - self._delays[each])
        return 0.0

    def observe(self, frontier: float, gain: float, delay_s: float, *, first: bool) -> None:
        """A wait took `delay_s` and brought `gain` expected tokens; 0 if nothing arrived."""
        if frontier > 0:
            share = min(1.0, gain / frontier)  # several rounds may arrive at once
            self._gain += self.LEARNING_RATE * min(1.0, frontier) * (share - self._gain)
        usual_s = self._delays[first]
        self._delays[first] += self.LEARNING_RATE * (min(delay_s, self.TIMEOUT_FACTOR * usual_s) - usual_s)
