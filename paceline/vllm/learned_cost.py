"""What a step of vLLM costs by its rows, learned while it serves: nothing can be measured before its first step."""

from __future__ import annotations

from paceline.core.policy.step_cost import FREE_ROWS, RowCost

MAX_ROWS = 2**20


class LearnedRowCost:
    """Moving averages of step times, by number of rows.

    Up to 15 rows each number has an average of its own. Beyond, numbers with the same four highest bits share one.
    More rows than were ever seen are taken to cost as much as the most that were: so a step tries them. Steps with
    fewer rows draw the averages of more rows down, so that those are tried again: their first steps may have been slow,
    and what costs too much has no others.
    """

    LEARNING_RATE = 0.1
    OUTLIER = 2.0
    """A step counts for at most this many times the mean, or that of fewer rows: machines stall, and prompts join."""
    OPTIMISM = 0.003
    """Weight of a step in the averages of more rows, if it took less."""
    REFRESH_STEPS = 8

    def __init__(self) -> None:
        self.cost = FREE_ROWS
        self._mean_s: dict[int, float] = {}
        self.steps = 0

    def observe(self, rows: int, seconds: float) -> bool:
        """A step of this many rows took `seconds`. Returns whether `cost` changed."""
        width = 1 << max(0, rows.bit_length() - 4)
        bucket = rows // width * width
        known = self._mean_s.get(bucket)
        usual = known or max((mean for fewer, mean in self._mean_s.items() if fewer < bucket), default=seconds)
        counted = min(seconds, self.OUTLIER * usual)
        self._mean_s[bucket] = counted if known is None else known + self.LEARNING_RATE * (counted - known)
        for more, mean in self._mean_s.items():
            if more > bucket and mean > counted:
                self._mean_s[more] += self.OPTIMISM * (counted - mean)
        self.steps += 1
        if known is not None and self.steps % self.REFRESH_STEPS:
            return False
        points = sorted(self._mean_s.items())
        self.cost = RowCost([*(rows for rows, _ in points), MAX_ROWS], [*(s for _, s in points), points[-1][1]])
        return True
