"""The line that operators know: how well drafting went in the last few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.messages import SpeculationStats
from paceline.state.acceptance import AcceptanceCounts

logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
"""How often to `emit`."""


def acceptance_line(stats: AcceptanceCounts, tokens: int, seconds: float) -> str:
    """One line about so many committed tokens in so many seconds, for example:

    Draft tokens: 145/160 (90.62%) accepted | acceptance length 1.81/2 without bonus | per position [95%, 91%]
    | efficiency 94% | 812 tokens/s, 578 guesses/s

    The length stands beside the deepest position verified; the rate of a position is conditional on all earlier
    ones. All leave out the bonus token, but efficiency and tokens/s have it: efficiency is what verifications
    committed, over what they would have if every depth had been accepted.
    """
    speed = f"{tokens / seconds:.0f} tokens/s"
    if not stats.drafted:
        return f"Draft tokens: none verified | {speed}"
    share = stats.accepted / stats.drafted
    rates = ", ".join(f"{rate:.0%}" for rate in stats.rates())
    verifications = stats.drafted_by_depth[0]  # whoever verifies anything verifies depth 1
    efficiency = (stats.accepted + verifications) / (sum(stats.drafted_by_depth) + verifications)
    return (
        f"Draft tokens: {stats.accepted:.0f}/{stats.drafted:.0f} ({share:.2%}) accepted"
        f" | acceptance length {stats.acceptance_length:.2f}/{len(stats.drafted_by_depth)} without bonus"
        f" | per position [{rates}] | efficiency {efficiency:.0%} | {speed}, {stats.drafted / seconds:.0f} guesses/s"
    )


@dataclass
class AcceptanceLog:
    """Adds up steps, and logs one line per interval in which tokens were committed."""

    clock: Callable[[], float] = time.monotonic
    _totals: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    _tokens: int = 0
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def add(self, stats: SpeculationStats, tokens: int) -> None:
        """One step verified this and committed so many tokens."""
        self._totals += AcceptanceCounts.of(stats)
        self._tokens += tokens

    def emit(self) -> None:
        """Log what came since the last time, if anything did."""
        now = self.clock()
        totals, tokens, seconds = self._totals, self._tokens, now - self._since
        self._totals, self._tokens, self._since = AcceptanceCounts(), 0, now
        if tokens:
            logger.info(acceptance_line(totals, tokens, seconds))
