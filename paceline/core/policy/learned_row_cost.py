"""The cost of passes, from few measured ones at the start and from those of serving."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from itertools import accumulate

from paceline.core.policy.step_cost import RowCost


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
