"""Whether a step waits for draft tokens: one schedule for drafts elsewhere, one for drafts in this process, and one for
comparison."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class StreamedSchedule:
    """Verify the nodes at hand; wait only where that commits more tokens per second (`WaitPolicy`)."""

    depth_factor = 2
    first_differs = True
    """Whether a step's first round takes longer than those after it."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        self.policy = WaitPolicy()
        self._cost = cost
        self._clock = clock

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates, waited_s: float = 0.0) -> None:
        """`waited_s`: so far."""
        first, now = True, draft_frontier(drawing)
        while wait_s := self._wait_s(now, drawing, waited_s, first=first):
            start = self._clock()
            received = receive(wait_s)
            delay_s = self._clock() - start
            before, now = now, draft_frontier(drawing)
            self.policy.observe(before.deepest, now.own - before.own, delay_s, first=first)
            waited_s, first = waited_s + delay_s, not self.first_differs
            if not self.goes_on(received, now.own - before.own):
                return

    def goes_on(self, received: bool, gain: float) -> bool:
        """Whether more may follow a wait that brought `gain` expected tokens."""
        return received

    def reach(self, now: DraftFrontier) -> tuple[int, float]:
        """How many rounds ahead count, and expected tokens of nodes that the draft may guess again."""
        return now.levels_left, now.by_lookups

    def _wait_s(self, now: DraftFrontier, drawing: Sequence[DraftedRequest], waited_s: float, *, first: bool) -> float:
        step = RowChoice([(request.tree, request.candidate_nodes()) for request in drawing], self._cost)
        seconds = step.seconds()
        rounds, by_lookups = self.reach(now)
        return self.policy.wait_s(
            now.deepest,
            rounds,
            step.tokens,
            seconds + waited_s,
            first=first,
            by_lookups=by_lookups,
            rows_s=step.seconds(more=len(drawing)) - seconds,  # one more node of each request
        )


class InlineSchedule(StreamedSchedule):
    """For drafts in the target's process: a wait is a round of drafting, on the target's own time."""

    depth_factor = 1
    first_differs = False
    TIMEOUT_S = 1.0
    """The timeout of one round."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self.policy = WaitPolicy(delay_s=1e-5, salvaged_share=0.0)

    def wait(self, drawing: Sequence[DraftedRequest], receive: ReceiveUpdates, waited_s: float = 0.0) -> None:
        start = self._clock()  # a first round reads the prompt, so its delay is not typical
        while not all(request.draft_started for request in drawing if request.draft_active):
            own = draft_frontier(drawing).own
            received = receive(self.TIMEOUT_S)
            if not self.goes_on(received, draft_frontier(drawing).own - own):
                return
        super().wait(drawing, lambda _: receive(self.TIMEOUT_S), waited_s + self._clock() - start)

    def goes_on(self, received: bool, gain: float) -> bool:
        return received and gain > 0

    def reach(self, now: DraftFrontier) -> tuple[int, float]:
        return 1, now.covered_by_lookups


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
