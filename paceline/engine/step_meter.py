"""The times and counts of an engine's steps, and what steps cost."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.policy.step_cost import RowCost, StepCost
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import Clock
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledRequest, Scheduler
from paceline.messages import Delta, SpeculationStats
from paceline.telemetry.step_stats import StatsTimer, StepStats


class StepMeter:
    """Called by `Engine.step`, in the order of the methods."""

    def __init__(self, passes: RowCost, slots: int, clock: Clock) -> None:
        self.cost = StepCost(passes)
        self.stats_due = False
        """Whether the step's deltas carry statistics. Final deltas always do."""
        self.last_stats_due = False
        """The same of the last step that has ended."""
        self.last_step = StepStats(0.0, 0, 0, 0, slots)
        self._clock = clock
        self._timer = StatsTimer()

    def begin(self) -> None:
        self.pass_s = 0.0
        """Duration of the pass."""
        self.prompt_tokens = 0
        """Prompt tokens computed for the first time."""
        self.speculation = SpeculationStats()
        self.calibration_samples: list[tuple[int, bool]] = []
        self._began = self._received_at = self._clock()
        self.stats_due = self._timer.due(self._began)

    def received(self) -> None:
        """Growth has been received and waited for: this is no part of a step's cost."""
        self._received_at = self._clock()

    def scheduled(self, batch: Sequence[ScheduledRequest]) -> None:
        self._nodes = sum(len(each.nodes) for each in batch)
        self._rows = sum(each.stop - each.start for each in batch) + self._nodes
        self._drawing: list[Request] = (
            [each.request for each in batch] if all(each.only_draws for each in batch) else []
        )
        """The step's requests if it computes no prompt tokens. Other steps teach nothing about costs."""
        self.scheduled_at = self._clock()

    def draft_overhead_tokens(self) -> float:
        """Tokens that drafting cost each drafted request, in the step so far."""
        drafted = sum(request.draft_active for request in self._drawing)
        return self.cost.tokens_lost(len(self._drawing), self._clock() - self._began) / drafted if drafted else 0.0

    def end(self, deltas: Sequence[Delta], scheduler: Scheduler, draft_manager: DraftManager) -> None:
        now = self._clock()
        self.last_stats_due = self.stats_due
        if self._drawing:
            self._observe_cost(now - self._received_at)
        self.last_step = StepStats(
            now - self._began,
            rows=self._rows,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_slots=scheduler.pool.free,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=sum(len(delta.tokens) for delta in deltas),
            preemptions=scheduler.preemptions,
            speculation=self.speculation,
            nodes_received=draft_manager.received,
            nodes_grafted=draft_manager.grafted,
            calibration_samples=self.calibration_samples,
        )
        scheduler.preemptions = draft_manager.received = draft_manager.grafted = 0

    def _observe_cost(self, seconds: float) -> None:
        requests, nodes = len(self._drawing), self._nodes
        self.cost.passes.observe(requests + nodes, self.pass_s)
        self.cost.observe(requests + nodes, seconds, nodes)
        if not nodes:
            self.cost.observe_plain(requests, seconds, drafted=any(each.draft_active for each in self._drawing))
