"""Statistics of one round of drafting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round over all open requests. It has no nodes if no request needs another draft token.

    Nodes per second:
        rate(paceline_draft_nodes_total[1m])
    Share of time spent drafting:
        rate(paceline_draft_round_seconds_sum[1m])
    """

    round_s: float
    """Wall-clock time of the round."""
    nodes: int
    """Nodes drafted."""
    dropped: int = 0
    """Requests dropped since the last round, because they cannot be drafted for."""
