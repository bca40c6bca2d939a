"""The acceptance line: a summary of recent speculation in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.state.acceptance import AcceptanceCounts

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0


def acceptance_line(counts: AcceptanceCounts, tokens: int, seconds: float) -> str:
    """One line about `tokens` committed tokens in `seconds` seconds, for example:

    Draft tokens: 145/160 (90.62%) accepted | acceptance length 1.81/2 without bonus | per position [95%, 91%]
    | efficiency 94% | 812 tokens/s, 578 guesses/s

    The acceptance length stands beside the deepest position verified. The rate of a position is conditional on all
    earlier positions. These leave out the bonus token; efficiency and tokens/s include it. Efficiency is the number of
    tokens that verifications committed, over the number if every depth had been accepted.
    """
    speed = f"{tokens / seconds:.0f} tokens/s"
    if not counts.drafted:
        return f"Draft tokens: none verified | {speed}"
    share = counts.accepted / counts.drafted
    rates = ", ".join(f"{rate:.0%}" for rate in counts.rates())
    verifications = counts.verifications
    efficiency = (counts.accepted + verifications) / (sum(counts.drafted_by_depth) + verifications)
    return (
        f"Draft tokens: {counts.accepted:.0f}/{counts.drafted:.0f} ({share:.2%}) accepted"
        f" | acceptance length {counts.acceptance_length:.2f}/{len(counts.drafted_by_depth)} without bonus"
        f" | per position [{rates}] | efficiency {efficiency:.0%} | {speed}, {counts.drafted / seconds:.0f} guesses/s"
    )


@dataclass
class AcceptanceLog:
    """Sums counts, and logs one line per `INTERVAL_S` seconds in which tokens were committed."""

    clock: Callable[[], float] = time.monotonic
    _totals: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    _tokens: int = 0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def add(self, counts: AcceptanceCounts, tokens: int) -> None:
        """Add the counts of some steps and the number of tokens that they committed; log if the interval is over."""
        self._totals += counts
        self._tokens += tokens
        now = self.clock()
        if (seconds := now - self._since) < INTERVAL_S:
            return
        if self._tokens:
            logger.info(acceptance_line(self._totals, self._tokens, seconds))
        self._totals, self._tokens, self._since = AcceptanceCounts(), 0, now
