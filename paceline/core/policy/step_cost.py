"""Which guesses are worth a row, and whether to wait for better ones.

A forward pass over R rows takes t(R) seconds, measured when a worker starts. Verifying nodes with path
probabilities p commits one token per request (the target's own draw) and each node's token with probability p. So
a step earns `(requests + sum(p)) / t(rows)` tokens per second, and the best choice takes nodes in falling
order of p for as long as that rises. How deep, how wide, less at high load, none at all: all follow from this.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate, islice


class RowCost:
    """Seconds of a pass by its number of rows: measured points, with straight lines between.

    Whatever disturbs a measurement makes it longer, and fewer rows never take longer than more. So a point counts for
    no more than those after it: noise makes no steps that are not there.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """`rows` rise. Raises ValueError unless there is a time, all positive, for each of one or more counts."""
        if not rows or len(rows) != len(seconds) or min(seconds) <= 0 or sorted(set(rows)) != list(rows):
            raise ValueError("a row cost needs rising row counts, each with a positive time")
        self._rows = list(rows)
        self._seconds = [*accumulate(reversed(seconds), min)][::-1]
        self._table: list[float] = []

    def __call__(self, rows: int) -> float:
        """Fewer rows than were measured take as long as the fewest; beyond what was measured time is proportional."""
        i = bisect.bisect_left(self._rows, rows)
        if i == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        if self._rows[i] == rows or i == 0:
            return self._seconds[i]
        share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])

    def table(self, rows: int) -> Sequence[float]:
        """Of passes over 0, 1, 2, ... rows, up to `rows` or more."""
        if rows >= len(self._table):
            self._table += map(self, range(len(self._table), 2 * rows + 1))
        return self._table


TIE_TOLERANCE = 1e-9
"""What earns more by no more than this earns the same, and then fewer rows do."""
FREE_ROWS = RowCost([1, 2**20], [1.0, 1.0])
"""As if another row cost nothing: every guess is worth one."""


class StepCost:
    """Seconds of a whole step by its number of rows: the pass, and what the rest of a step takes.

    The rest is a straight line over the guesses among the rows, by least squares over the last steps: each is drawn
    from, walked and committed, and attends to a longer context than passes were measured with. Steps without any draft
    are averaged apart, so that what drafting costs is known: its rows, its waits, its bookkeeping. A single step that
    took much longer than expected counts only in part: machines stall now and then, whatever they do.
    """

    WINDOW_STEPS = 100.0
    """Steps."""
    RIDGE = 10.0
    """Added to the squared deviations of the numbers of guesses: steps that hardly differ in them tell nothing."""
    OUTLIER_SHARE = 1.0
    """Twice the expected rest, and this share of the pass, is believed of one step: where a pass is short, the rest is
    known after a few steps all the same."""
    LEARNING_RATE = 0.1
    """Weight of a plain step in their average."""
    MAX_LOST_STEPS = 4.0
    """Plain steps that one step is believed to have cost."""

    def __init__(self, passes: RowCost) -> None:
        self.passes = passes
        self.overhead_s = 0.0
        """Of a step without guesses, beside its pass."""
        self.node_overhead_s = 0.0
        """Of each guess."""
        self._plain_overhead_s: float | None = None
        self._seen_plain = False
        self._sums = [0.0] * 5  # over steps that fade: 1, guesses, their square, rest, their product

    def __call__(self, rows: int, guesses: int = 0) -> float:
        """`guesses`: how many of the rows are such."""
        return self.passes(rows) + self.overhead_s + guesses * self.node_overhead_s

    def observe(self, rows: int, seconds: float, guesses: int = 0) -> None:
        """A step of so many rows, none of them of prompts, took so long."""
        rest = self._overhead(rows, seconds, self.overhead_s + guesses * self.node_overhead_s)
        fade = 1 - 1 / self.WINDOW_STEPS
        told = (1.0, guesses, guesses * guesses, rest, guesses * rest)
        self._sums = steps, first, square, rests, product = [
            fade * a + b for a, b in zip(self._sums, told, strict=True)
        ]
        slope = (product - first * rests / steps) / (square - first * first / steps + self.RIDGE)
        self.node_overhead_s = min(max(slope, 0.0), rests / max(first, 1.0))  # the line is nowhere below 0
        self.overhead_s = max(0.0, rests - self.node_overhead_s * first) / steps

    def observe_plain(self, requests: int, seconds: float, *, drafted: bool = False) -> None:
        """A step that drew one token for each of these requests took so long. `drafted`: there is a draft, which had
        guessed nothing; such steps count until one without any draft is seen."""
        if drafted and self._seen_plain:
            return
        if self._plain_overhead_s is None or not (drafted or self._seen_plain):
            self._plain_overhead_s = max(seconds - self.passes(requests), 0.0)
        self._seen_plain = not drafted
        rest = self._overhead(requests, seconds, self._plain_overhead_s)
        self._plain_overhead_s += self.LEARNING_RATE * (rest - self._plain_overhead_s)

    def tokens_lost(self, requests: int, seconds: float) -> float:
        """Tokens that these requests would have drawn without drafts in the time by which a step took longer.

        A plain step is taken to be nothing but its pass until one was seen: so a draft that may not pay is soon
        paused, which shows what plain steps take.
        """
        plain_s = self.passes(requests) + (self._plain_overhead_s or 0.0)
        return requests * min(max(seconds / plain_s - 1, 0.0), self.MAX_LOST_STEPS)

    def _overhead(self, rows: int, seconds: float, usual_s: float) -> float:
        expected = self.passes(rows)
        return min(max(seconds - expected, 0.0), 2 * usual_s + self.OUTLIER_SHARE * expected)


def nodes_to_verify(
    probabilities: Sequence[float],
    requests: int,
    rows: int,
    most: int,
    cost: StepCost,
) -> int:
    """How many of the nodes to verify: those that earn the most tokens per second.

    `probabilities`: path probabilities of all nodes of all requests, falling. `requests`: how many of them draw
    a token in this step. `rows`: rows that the step needs anyway. `most`: rows left in the step.
    """
    seconds = cost.passes.table(rows + min(most, len(probabilities)))
    best, best_rate = 0, requests / (seconds[rows] + cost.overhead_s)
    expected = float(requests)
    for count, probability in enumerate(islice(probabilities, most), 1):
        expected += probability
        rate = expected / (seconds[rows + count] + cost.overhead_s + count * cost.node_overhead_s)
        if rate > best_rate * (1 + TIE_TOLERANCE):
            best, best_rate = count, rate
    return best
