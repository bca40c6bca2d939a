"""What steps cost, and which nodes are worth a row.

A forward pass over R rows takes t(R) seconds, learned from a worker's passes. Verifying nodes with path probabilities p
commits one token per request (the target's own draw) and each node's token with probability p. So a step commits
`(requests + sum(p)) / t(rows)` tokens per second. The best choice takes nodes in falling order of p while that rises.
Depth and width of the trees, backing off at high load and plain decoding all follow from this.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, takewhile

from paceline.core.tree import TokenTree


class RowCost:
    """Seconds of a pass by its number of rows: measured points, linear interpolation between them.

    Disturbances only make a measurement longer, and fewer rows never take longer than more. So each point is capped by
    the points after it.
    """

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Raises ValueError unless `rows` is not empty, rises, and has a positive time for each entry."""
        if not rows or len(rows) != len(seconds) or min(seconds) <= 0 or sorted(set(rows)) != list(rows):
            raise ValueError("a row cost needs rising row counts, each with a positive time")
        self.points = dict(zip(rows, seconds, strict=True))
        """Seconds by rows, as measured."""
        self._rows = list(rows)
        self._seconds = [*accumulate(reversed(seconds), min)][::-1]
        self._table: list[float] = []

    def __call__(self, rows: int) -> float:
        """Constant below the first measured point, proportional to the rows beyond the last."""
        i = bisect.bisect_left(self._rows, rows)
        if i == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        if self._rows[i] == rows or i == 0:
            return self._seconds[i]
        share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of this many rows took `seconds`. A cost that was measured in full learns nothing from it."""

    def table(self, rows: int) -> Sequence[float]:
        """Seconds of passes over 0, 1, 2, ... rows, up to `rows` or more."""
        if rows >= len(self._table):
            self._table += map(self, range(len(self._table), 2 * rows + 1))
        return self._table


class LearnedRowCost(RowCost):
    """Each point is the fastest pass seen so far with that many rows.

    Disturbances only make a pass longer, so the points never need to rise. A count that was never seen is interpolated;
    a second pass that is slower than the interpolation makes it a point, since the first may have been disturbed.
    Beyond the last point the curve goes on with the slope before it: a guess that is too low is corrected as soon as
    such a pass runs, and one that is too high would keep such passes from running.
    """

    TOLERANCE = 0.01
    """A pass that is faster by less than this share changes nothing."""

    def __init__(self, points: Mapping[int, float]) -> None:
        """`points`: seconds by rows. Raises ValueError as `RowCost` does."""
        rows = sorted(points)
        super().__init__(rows, [points[each] for each in rows])
        self._unconfirmed: dict[int, float] = {}

    def __call__(self, rows: int) -> float:
        beyond = rows - self._rows[-1]
        if beyond <= 0 or len(self._rows) == 1:
            return super().__call__(rows)
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return self._seconds[-1] + beyond * slope

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of this many rows took `seconds`."""
        known = self.points.get(rows)
        if known is None and seconds > self(rows):
            first = self._unconfirmed.pop(rows, None)
            if first is None:
                self._unconfirmed[rows] = seconds
                return
            seconds = min(seconds, first)
        if seconds > 0 and (known is None or seconds < known * (1 - self.TOLERANCE)):
            self._set(rows, seconds)

    def _set(self, rows: int, seconds: float) -> None:
        if rows not in self.points:
            bisect.insort(self._rows, rows)
        self.points[rows] = seconds
        self._seconds = [*accumulate((self.points[each] for each in reversed(self._rows)), min)][::-1]
        self._table = []


TIE_TOLERANCE = 1e-9
"""Rates that differ by less than this count as equal; then fewer rows are chosen."""
FREE_ROWS = RowCost([1, 2**20], [1.0, 1.0])
"""Additional rows cost nothing: every node is worth one."""
NOT_MEASURED = RowCost([1, 2**20], [1e-9, 1e-9])
"""The cost of passes where none was measured: next to nothing, so that all of a step is overhead."""


class StepCost:
    """Seconds of a whole step by its number of rows: the pass, and the overhead beside it.

    The overhead is a line over the number of verified nodes, fitted by least squares to recent steps: each node is
    drawn from, walked and committed, and attends to a longer context than in the measured passes. Steps without any
    draft are averaged apart, which shows what drafting costs: rows, waits, bookkeeping. A single step that took much
    longer than expected counts only in part, since machines stall now and then.
    """

    WINDOW_STEPS = 100.0
    RIDGE = 10.0
    """Added to the squared deviations of the node counts: steps with nearly equal counts do not determine a slope."""
    OUTLIER_SHARE = 1.0
    """A step's overhead counts as at most 2 × the expected overhead + OUTLIER_SHARE × the pass, so that one stalled
    step does not distort the average."""
    LEARNING_RATE = 0.1
    """Weight of a plain step in the plain steps' average."""
    MAX_LOST_STEPS = 4.0
    """One step costs at most this many plain steps."""

    def __init__(self, passes: RowCost = NOT_MEASURED) -> None:
        """`passes`: the cost of a pass by its rows, if it was measured."""
        self.passes = passes
        self.overhead_s = 0.0
        """Overhead of a step without nodes."""
        self.node_overhead_s = 0.0
        """Overhead of each node."""
        self._plain_overhead_s: float | None = None
        self._seen_plain = False
        self._sums = [0.0] * 5  # fading sums over steps: 1, nodes, nodes², overhead, nodes · overhead

    def __call__(self, rows: int, nodes: int = 0) -> float:
        """`nodes`: how many of the rows are draft tokens."""
        return self.passes(rows) + self.overhead_s + nodes * self.node_overhead_s

    def observe(self, rows: int, seconds: float, nodes: int = 0) -> None:
        """A step of this many rows, none of them prompt tokens, took `seconds`."""
        overhead = self._overhead(rows, seconds, self.overhead_s + nodes * self.node_overhead_s)
        fade = 1 - 1 / self.WINDOW_STEPS
        sample = (1.0, nodes, nodes * nodes, overhead, nodes * overhead)
        self._sums = steps, first, square, overheads, product = [
            fade * a + b for a, b in zip(self._sums, sample, strict=True)
        ]
        slope = (product - first * overheads / steps) / (square - first * first / steps + self.RIDGE)
        self.node_overhead_s = min(max(slope, 0.0), overheads / max(first, 1.0))  # the line is nowhere below 0
        self.overhead_s = max(0.0, overheads - self.node_overhead_s * first) / steps

    def observe_plain(self, requests: int, seconds: float, *, drafted: bool = False) -> None:
        """A step that drew one token for each of these requests took `seconds`.

        `drafted`: a draft was active but had sent nothing. Such steps count until one without a draft is seen.
        """
        if drafted and self._seen_plain:
            return
        if self._plain_overhead_s is None or not (drafted or self._seen_plain):
            self._plain_overhead_s = max(seconds - self.passes(requests), 0.0)
        self._seen_plain = not drafted
        overhead = self._overhead(requests, seconds, self._plain_overhead_s)
        self._plain_overhead_s += self.LEARNING_RATE * (overhead - self._plain_overhead_s)

    def tokens_lost(self, requests: int, seconds: float) -> float:
        """Tokens that plain decoding would have drawn for these requests in a step's extra time.

        Until a plain step is seen its overhead counts as 0. A draft that may not pay is therefore paused soon, and the
        pause shows what plain steps take.
        """
        plain_s = self.passes(requests) + (self._plain_overhead_s or 0.0)
        return requests * min(max(seconds / plain_s - 1, 0.0), self.MAX_LOST_STEPS)

    def _overhead(self, rows: int, seconds: float, usual_s: float) -> float:
        expected = self.passes(rows)
        most = 2 * usual_s + self.OUTLIER_SHARE * expected
        if not usual_s and self.passes is NOT_MEASURED:
            most = seconds
        return min(max(seconds - expected, 0.0), most)


def nodes_to_verify(
    probabilities: Sequence[float],
    requests: int,
    rows: int,
    most: int,
    cost: StepCost,
) -> int:
    """How many of the best nodes to verify for the most tokens per second.

    `probabilities`: path probabilities of all nodes of all requests, falling. `requests`: how many of them draw a token
    in this step. `rows`: rows that the step needs anyway. `most`: rows left in the step.
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


class RowChoice:
    """The nodes that a step verifies for the most tokens per second, over all its requests."""

    def __init__(
        self,
        candidates: Sequence[tuple[TokenTree, Sequence[int]]],
        cost: StepCost,
        rows: int | None = None,
        most: int | None = None,
    ) -> None:
        """`candidates`: for each request that draws, its tree and the nodes it may verify, best first, parents before
        children. `rows`: rows that the step needs anyway, by default one for each of them. `most`: rows left in the
        step; None: enough."""
        self._candidates = candidates
        self._cost = cost
        self._rows = len(candidates) if rows is None else rows
        paths = [tree.path_log_probs[node] for tree, nodes in candidates for node in nodes]
        paths.sort(reverse=True)
        probabilities = list(map(math.exp, paths))
        most = len(paths) if most is None else most
        self.count = nodes_to_verify(probabilities, len(candidates), self._rows, most, cost) if paths else 0
        """How many nodes are verified."""
        self.tokens = len(candidates) + sum(probabilities[: self.count])
        """Expected committed tokens."""
        self._least = paths[self.count - 1] if self.count else 0.0

    def seconds(self, more: int = 0) -> float:
        """Duration of the step with so many nodes more."""
        nodes = self.count + more
        return self._cost(self._rows + nodes, nodes)

    def nodes(self) -> list[list[int]]:
        """The chosen nodes of each request, parents before children; `count` in all."""
        left, chosen = self.count, []
        for tree, nodes in self._candidates:
            best = takewhile(lambda node, paths=tree.path_log_probs: paths[node] >= self._least, nodes)  # type: ignore[misc]
            chosen.append(list(islice(best, left)))
            left -= len(chosen[-1])
        return chosen
