"""Statistics of one engine step of a target, the source of its metrics and of the acceptance line in the log.

And of one round of drafting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.messages import SpeculationStats


class StatsTimer:
    """Which steps' deltas carry statistics of running requests: the first of each interval."""

    INTERVAL_S = 0.5

    def __init__(self) -> None:
        self._last = -math.inf

    def due(self, now: float) -> bool:
        """Called in each step."""
        due = now - self._last >= self.INTERVAL_S
        self._last = now if due else self._last
        return due


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. `speculation` sums `SpeculationStats.record` over the step's requests.

    Seconds per step, median:
        histogram_quantile(0.5, rate(paceline_step_seconds_bucket[1m]))
    Acceptance length, without the bonus token:
        rate(paceline_spec_decode_num_accepted_tokens_total[1m])
        / rate(paceline_spec_decode_num_drafts_total[1m])
    Share of drafted tokens that were accepted:
        rate(paceline_spec_decode_num_accepted_tokens_total[1m])
        / rate(paceline_spec_decode_num_draft_tokens_total[1m])
    Share of verifications whose token at each position was accepted, along with all before it:
        rate(paceline_spec_decode_num_accepted_tokens_per_pos_total[1m])
        / ignoring(position) group_left rate(paceline_spec_decode_num_drafts_total[1m])
    Share of the drafts' nodes that were late, duplicate or too many:
        rate(paceline_growth_nodes_dropped_total[1m]) / rate(paceline_growth_nodes_received_total[1m])
    """

    step_s: float
    """Wall-clock time of the step."""
    rows: int
    """Rows of the forward pass, padding excluded."""
    running: int
    waiting: int
    free_slots: int
    prompt_tokens: int = 0
    """Prompt tokens computed in this step, without those found in the prefix cache."""
    generation_tokens: int = 0
    """Tokens committed: accepted and bonus."""
    preemptions: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    nodes_received: int = 0
    """Nodes that drafts sent since the last step."""
    nodes_grafted: int = 0
    """Received nodes that joined a tree. The others were late, duplicate, or over the tree's limit."""
    calibration_samples: Sequence[tuple[int, bool]] = ()
    """For each draft token whose parent was drawn: its cell of `Calibration`, and whether it was drawn too."""


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
