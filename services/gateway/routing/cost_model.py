"""What requests are expected to cost, in rows: learned from those that have ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LONGEST_RETRY_S = 60


@dataclass(slots=True)
class MovingAverage:
    """A moving average, of which the latest values weigh most; `value` is a guess until the first one."""

    value: float
    memory: float = 64.0
    """Values."""
    _count: int = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) / min(self._count, self.memory)


@dataclass(slots=True)
class RequestCostModel:
    """Of the requests of one model."""

    output_tokens: MovingAverage = field(default_factory=lambda: MovingAverage(128.0))
    rows: MovingAverage = field(default_factory=lambda: MovingAverage(256.0))
    """Of a whole request: its prompt, as far as no cache holds it, and its output."""

    def expected_output_tokens(self, most: int) -> float:
        """Tokens that a request will say which may say `most`: few use up what they may."""
        return max(1.0, min(float(most), self.output_tokens.value))

    def record(self, prompt_rows: int, output_tokens: int) -> None:
        self.output_tokens.add(output_tokens)
        self.rows.add(prompt_rows + output_tokens)


class RemainingCost:
    """One request's rows that are still to come. Beyond its expected end, one row is."""

    def __init__(self, prompt_rows: float, output_tokens: float) -> None:
        self._prompt = prompt_rows
        self._output = output_tokens

    @property
    def rows(self) -> float:
        return self._prompt + self._output

    def advance(self, count: int) -> float:
        """So many tokens have come, so the prompt is computed; by how many rows that lowers the cost."""
        before = self.rows
        self._prompt = 0.0
        self._output = max(1.0, self._output - count)
        return before - self.rows


class FleetThroughput:
    """Rows per second that a fleet gets done for this gateway, measured while it has work."""

    MEMORY_S = 5.0

    def __init__(self) -> None:
        self.rows_per_s = 0.0
        """0: not known yet."""
        self._rows = 0.0
        self._at: float | None = None

    def add(self, rows: float) -> None:
        self._rows += rows

    def tick(self, now: float, *, busy: bool) -> None:
        """To be called now and then. `busy`: there was work since the last time."""
        rows, self._rows = self._rows, 0.0
        before, self._at = self._at, now if busy else None
        if before is None or now <= before or not (busy or rows):
            return
        seconds = now - before
        rate = rows / seconds
        weight = 1.0 - math.exp(-seconds / self.MEMORY_S) if self.rows_per_s else 1.0
        self.rows_per_s += weight * (rate - self.rows_per_s)


def retry_after_s(rows_ahead: float, rows_per_s: float) -> int:
    """Whole seconds until so much work is done; 1 where nothing is known, and never long enough to be forgotten."""
    if rows_per_s <= 0:
        return 1
    return max(1, min(LONGEST_RETRY_S, math.ceil(rows_ahead / rows_per_s)))
