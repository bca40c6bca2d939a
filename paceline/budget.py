"""Which guesses are worth a row, and whether to wait for better ones.

A forward pass over R rows takes t(R) seconds, measured when a worker starts. Verifying nodes with path
probabilities p commits one token per request (the target's own draw) and each node's token with probability p. So
a step earns `(requests + sum(p)) / t(rows)` tokens per second, and the best choice takes nodes in falling
order of p for as long as that rises. How deep, how wide, less at high load, none at all: all follow from this.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

ROW_BUCKET = 8
"""Rows are padded to a multiple of this, so nodes that fill the last bucket are free."""


class RowCost:
    """Seconds of a pass by its number of rows: measured points, made monotone, with straight lines between."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` rise. Raises ValueError unless there is a time, all positive, for each of one or more counts."""
        if not rows or len(rows) != len(seconds) or min(seconds) <= 0 or sorted(set(rows)) != list(rows):
            raise ValueError("a row cost needs rising row counts, each with a positive time")
        self._rows = list(rows)
        self._seconds: list[float] = []
        for s in seconds:
            self._seconds.append(max(s, self._seconds[-1]) if self._seconds else s)

    def __call__(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows, padding included."""
        padded = max(-(-rows // ROW_BUCKET) * ROW_BUCKET, self._rows[0])
        i = bisect.bisect_left(self._rows, padded)
        if i == len(self._rows):
            return self._seconds[-1] * padded / self._rows[-1]
        if self._rows[i] == padded or i == 0:
            return self._seconds[i]
        share = (padded - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])


def worthwhile(probabilities: Sequence[float], requests: int, rows: int, most: int, cost: RowCost) -> int:
    """How many of the nodes to verify: those that earn the most tokens per second.

    `probabilities`: path probabilities of all nodes of all requests, falling. `requests`: how many of them draw
    a token in this step. `rows`: rows that the step needs anyway. `most`: rows left in the step.
    """
    best, best_rate = 0, requests / cost(max(rows, 1))
    expected = float(requests)
    for count, probability in enumerate(probabilities[:most], 1):
        expected += probability
        last_of_bucket = (rows + count) % ROW_BUCKET == 0 or count == min(len(probabilities), most)
        if last_of_bucket and expected / cost(rows + count) > best_rate:
            best, best_rate = count, expected / cost(rows + count)
    return best


class Patience:
    """Whether to hold a step back for guesses that are under way.

    Learned from waiting: when trees are `height` nodes high, the next growth comes after `delay[height]` seconds
    and adds `gain[height]` expected tokens. Waiting pays while that gain per second exceeds what the step earns
    per second now. Both are moving averages; the first values are a hopeful guess.
    """

    MEMORY = 0.9
    HORIZON = 12
    """Trees this high are never waited for."""
    LATE = 2.0
    """Growth is given up after this many times its usual delay."""

    def __init__(self, delay_s: float = 1e-3) -> None:
        self._gain = [0.6**height for height in range(1, self.HORIZON + 1)]
        self._delay = [delay_s] * self.HORIZON

    def observe(self, height: int, gain: float, delay_s: float) -> None:
        """A wait at this height took `delay_s` and brought `gain` expected tokens; 0 if nothing came."""
        self._gain[height] += (1 - self.MEMORY) * (gain - self._gain[height])
        self._delay[height] += (1 - self.MEMORY) * (delay_s - self._delay[height])

    def wait_s(self, height: int, expected: float, step_s: float) -> float:
        """How long to wait for more, at most; 0: go ahead. `expected`: tokens that the step would commit now."""
        if height >= self.HORIZON:
            return 0.0
        delay = self._delay[height]
        return self.LATE * delay if self._gain[height] * step_s > expected * delay else 0.0


class Calibration:
    """What a draft's confidence is worth: guesses by the probability the draft gave them, and how many were drawn.

    Bin i of `BINS` covers probabilities in [i/BINS, (i+1)/BINS). Until much is known a bin believes the draft; old
    counts fade, so that it follows a draft or a workload that changes.
    """

    BINS = 20
    BELIEF = 8.0
    """Weight of the draft's own word, in guesses."""
    MEMORY = 2000.0
    """Guesses after which a bin's older counts weigh half."""

    def __init__(self) -> None:
        self.drafted = [0.0] * self.BINS
        self.accepted = [0.0] * self.BINS

    def seed(self, drafted: Sequence[float], accepted: Sequence[float]) -> None:
        """Start from what was learned elsewhere: counts by bin, which weigh no more than a full memory."""
        for i, (tried, drawn) in enumerate(zip(drafted[: self.BINS], accepted, strict=False)):
            scale = min(1.0, self.MEMORY / tried) if tried else 0.0
            self.drafted[i], self.accepted[i] = tried * scale, drawn * scale

    def __call__(self, log_prob: float) -> float:
        """The corrected log-probability of a guess whose parent was drawn."""
        i = self.bin_of(log_prob)
        share = (self.accepted[i] + self.BELIEF * math.exp(log_prob)) / (self.drafted[i] + self.BELIEF)
        return math.log(max(share, 1e-9))

    def observe(self, log_prob: float, accepted: bool) -> None:
        """A guess whose parent was drawn was verified."""
        i = self.bin_of(log_prob)
        if self.drafted[i] >= self.MEMORY:
            self.drafted[i] /= 2
            self.accepted[i] /= 2
        self.drafted[i] += 1
        self.accepted[i] += accepted

    @classmethod
    def bin_of(cls, log_prob: float) -> int:
        return min(int(math.exp(log_prob) * cls.BINS), cls.BINS - 1)
