"""What one round of drafting did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round over all open requests. None of them worth another guess: a round without nodes.

    Nodes per second:
        rate(paceline_draft_nodes_total[1m])
    Share of time spent drafting:
        rate(paceline_draft_round_seconds_sum[1m])
    """

    round_s: float
    """Wall-clock time of the round."""
    nodes: int
    """Nodes guessed."""
    dropped: int = 0
    """Requests given up since the last round: they cannot be drafted for."""
