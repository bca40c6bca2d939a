"""What requests are expected to cost, in rows, and how fast a fleet works: learned from the requests so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_RETRY_AFTER_S = 60
THROUGHPUT_MEMORY_S = 5.0


@dataclass(slots=True)
class MovingAverage:
    """The average of the latest values; `value` is a guess until the first one."""

    value: float
    memory: float = 64.0
    """Values after which the weight of an old one has fallen to 1/e."""
    _count: int = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) / min(self._count, self.memory)


@dataclass(slots=True)
class RequestCostModel:
    """The requests of one model."""

    output_tokens: MovingAverage = field(default_factory=lambda: MovingAverage(128.0))
    rows: MovingAverage = field(default_factory=lambda: MovingAverage(256.0))
    """Of a whole request: its prompt without the cached part, and its output."""
    rows_per_s: float = 0.0
    """What the fleet computes for this gateway while it has requests; 0: not measured yet."""
    _rows_since: float = 0.0
    _measured_at: float | None = None

    def expected_output_tokens(self, max_tokens: int) -> float:
        """Tokens that a request with this limit is expected to generate: few requests reach their limit."""
        return max(1.0, min(float(max_tokens), self.output_tokens.value))

    def record_request(self, prompt_rows: int, output_tokens: int) -> None:
        """A request has ended."""
        self.output_tokens.add(output_tokens)
        self.rows.add(prompt_rows + output_tokens)

    def record_rows(self, rows: float) -> None:
        """A target has computed these rows."""
        self._rows_since += rows

    def measure_throughput(self, now: float, *, busy: bool) -> None:
        """To be called periodically. `busy`: requests are in flight."""
        rows, self._rows_since = self._rows_since, 0.0
        before, self._measured_at = self._measured_at, now if busy else None
        if before is None or now <= before or not (busy or rows):
            return
        seconds = now - before
        weight = 1.0 - math.exp(-seconds / THROUGHPUT_MEMORY_S) if self.rows_per_s else 1.0
        self.rows_per_s += weight * (rows / seconds - self.rows_per_s)

    def retry_after_s(self, rows_ahead: float) -> int:
        """Whole seconds, from 1 to `MAX_RETRY_AFTER_S`, until these rows are computed; 1 where that is not known."""
        if self.rows_per_s <= 0:
            return 1
        rows = max(rows_ahead, self.rows.value)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(rows / self.rows_per_s)))
