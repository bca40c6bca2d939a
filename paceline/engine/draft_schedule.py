"""Whether a step waits for draft tokens: one schedule for drafts elsewhere, one for drafts in this process, and one for
comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.policy.inline_round_policy import InlineRoundPolicy
from paceline.core.policy.step_cost import RowChoice, StepCost
from paceline.core.policy.wait_policy import WaitPolicy
from paceline.core.tree import ROOT
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE, DraftedRequest

Clock = Callable[[], float]
"""Seconds since some fixed time."""
ReceiveUpdates = Callable[[float], bool]
"""Receive updates for up to so many seconds, until the first. Whether there were any, and more may follow."""


class DraftSchedule(Protocol):
    """Called before a step that runs no prompt tokens."""

    depth_factor: int
    """How many times the depth of one step a draft grows."""

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates) -> None:
        """Receive updates while waiting pays. `drawing`: the requests of the step; at least one has a draft."""


class LockstepSchedule:
    """Like a target that calls its draft: wait until every tree has its full depth, then step."""

    depth_factor = 1
    TIMEOUT_S = 1.0
    """A step waits no longer than this."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates) -> None:
        deadline = self._clock() + self.TIMEOUT_S  # of all rounds: a draft may send useless growth forever
        while any(self._is_short(request) for request in drawing):
            left_s = deadline - self._clock()
            if left_s <= 0 or not receive(left_s):
                return

    def _is_short(self, request: DraftedRequest) -> bool:
        return request.draft_active and request.tree.height(request.candidate_nodes()) < request.depth_allowed()


class CostAwareSchedule:
    """Base of the schedules that wait only where it pays."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        self._cost = cost
        self._clock = clock

    def _forecast(self, drawing: Sequence[DraftedRequest]) -> tuple[float, float, float]:
        """Of the step with the nodes at hand: expected tokens, seconds, and seconds for one more node per request."""
        step = RowChoice([(request.tree, request.candidate_nodes()) for request in drawing], self._cost)
        return step.tokens, step.seconds(), step.seconds(len(drawing)) - step.seconds()


class StreamedSchedule(CostAwareSchedule):
    """Verify the nodes at hand; wait only where that commits more tokens per second (`WaitPolicy`)."""

    depth_factor = 2

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._wait_policy = WaitPolicy()

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates) -> None:
        waited_s, first = 0.0, True
        now = draft_frontier(drawing)
        while wait_s := self._wait_s(now, drawing, waited_s, first=first):
            start = self._clock()
            received = receive(wait_s)
            delay_s = self._clock() - start
            before, now = now, draft_frontier(drawing)
            self._wait_policy.observe(before.deepest, now.own - before.own, delay_s, first=first)
            waited_s, first = waited_s + delay_s, False
            if not received:
                return

    def _wait_s(self, now: DraftFrontier, drawing: Sequence[DraftedRequest], waited_s: float, *, first: bool) -> float:
        tokens, seconds, rows_s = self._forecast(drawing)
        return self._wait_policy.wait_s(
            now.deepest,
            now.levels_left,
            tokens,
            seconds + waited_s,
            first=first,
            by_lookups=now.by_lookups,
            rows_s=rows_s,
        )


class InlineSchedule(CostAwareSchedule):
    """For drafts in the target's process: run drafting rounds while they pay (`InlineRoundPolicy`)."""

    depth_factor = 1
    TIMEOUT_S = 1.0
    """The timeout of one round."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._round_policy = InlineRoundPolicy()

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates) -> None:
        drafting_s = 0.0
        now = draft_frontier(drawing)
        while not (started := all(r.draft_started for r in drawing if r.draft_active)) or self._round_pays(
            now, drawing, drafting_s
        ):
            start = self._clock()
            received = receive(self.TIMEOUT_S)
            delay_s = self._clock() - start
            before, now = now, draft_frontier(drawing)
            if started:  # a first round reads the prompt, so its delay is not typical
                self._round_policy.observe(before.deepest, now.own - before.own, delay_s)
            drafting_s += delay_s
            if not received or now.own <= before.own:
                return

    def _round_pays(self, now: DraftFrontier, drawing: Sequence[DraftedRequest], drafting_s: float) -> bool:
        """A round costs its own time, and that of one more row for each request."""
        tokens, seconds, rows_s = self._forecast(drawing)
        return self._round_policy.pays(now.deepest, tokens, seconds + drafting_s, now.covered_by_lookups, rows_s)


def make_draft_schedule(concurrent: bool, lockstep: bool, cost: StepCost, clock: Clock) -> DraftSchedule:
    """`concurrent`: whether drafts run while the target computes."""
    if lockstep:
        return LockstepSchedule(clock)
    return StreamedSchedule(cost, clock) if concurrent else InlineSchedule(cost, clock)


@dataclass(frozen=True, slots=True)
class DraftFrontier:
    """Expected tokens of a step, by the source of the nodes: the requests' own drafts, or lookup drafts."""

    own: float
    """From the requests' drafts, whether or not a lookup guessed the same node."""
    deepest: float
    """From the drafts' deepest nodes, where deeper ones are allowed. The root counts as 1 if a draft has no node."""
    covered_by_lookups: float
    """From lookup nodes right below the drafts' deepest nodes."""
    by_lookups: float
    """From all nodes that only lookups have guessed."""
    levels_left: int
    """How many levels a step could verify below the drafts' deepest nodes, for the request with most of them."""


def draft_frontier(drawing: Sequence[DraftedRequest]) -> DraftFrontier:
    """The frontier of the drafted requests among these."""
    own, deepest, covered, by_lookups, levels_left = 0.0, 0.0, 0.0, 0.0, 0
    for request in filter(lambda each: each.draft_active, drawing):
        tree = request.tree
        probs = {node: math.exp(tree.path_log_probs[node]) for node in request.candidate_nodes()}
        own_probs = {node: prob for node, prob in probs.items() if tree.guessed_by(OWN_DRAFT_SOURCE, node)}
        own += sum(own_probs.values())
        by_lookups += sum(probs.values()) - sum(own_probs.values())
        height = tree.height(list(own_probs))
        levels_left = max(levels_left, request.depth_allowed() - height)
        if height < request.depth_allowed():
            ends = {node: prob for node, prob in own_probs.items() if tree.depths[node] == height} or {ROOT: 1.0}
            deepest += sum(ends.values())
            covered += sum(prob for node, prob in probs.items() if tree.parents[node] in ends)
    return DraftFrontier(own, deepest, covered, by_lookups, levels_left)
