"""Whether a step is held back for guesses: by where they are made, and one schedule to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.policy.inline_round_policy import InlineRoundPolicy
from paceline.core.policy.min_path_probability import MinPathProbability
from paceline.core.policy.step_cost import StepCost
from paceline.core.policy.wait_policy import WaitPolicy
from paceline.engine.request import Request
from paceline.engine.scheduler import DraftFrontier, candidate_nodes, draft_frontier, forecast_step, tree_height

Clock = Callable[[], float]
"""Seconds since whenever."""
ReceiveUpdates = Callable[[float], bool]
"""Take in what arrives within so many seconds, at least one message; whether something did, and more may come."""


class DraftSchedule(Protocol):
    """Called before a step that runs no prompts."""

    depth_factor: int
    """How many times the depth of one step a draft is to grow."""

    @property
    def min_path_probability(self) -> float:
        """Path probability from which on guesses are wanted."""

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        """`drawing`: all that the step would run, with at least one request that has a draft."""

    def observe_unverified(self, path_probability: float) -> bool:
        """A step had no row for a guess as probable as this, but for all that are more so; whether `wanted` changed."""


class LockstepSchedule:
    """What a target does that asks its draft: wait until it has drafted, verify, commit, wait again."""

    depth_factor = 1
    min_path_probability = 0.0
    TIMEOUT_S = 1.0
    """A draft that takes longer is not waited for in this step."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        until = self._clock() + self.TIMEOUT_S  # in all: a draft may go on for ever with what is of no use
        while any(self._is_short(request) for request in drawing):
            left_s = until - self._clock()
            if left_s <= 0 or not receive(left_s):
                return

    def observe_unverified(self, path_probability: float) -> bool:
        return False

    def _is_short(self, request: Request) -> bool:
        return request.drafted and tree_height(request, candidate_nodes(request)) < request.depth_allowed()


class CostAwareSchedule:
    """What the schedules share that wait only where it pays: guesses have a price, and steps a cost."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        self._cost = cost
        self._clock = clock
        self._min_path_probability = MinPathProbability()

    @property
    def min_path_probability(self) -> float:
        return self._min_path_probability.min_path_probability

    def observe_unverified(self, path_probability: float) -> bool:
        return self._min_path_probability.observe(path_probability)


class StreamedSchedule(CostAwareSchedule):
    """Verify what is there, and wait only where that earns more tokens per second (`WaitPolicy`)."""

    depth_factor = 2

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._wait_policy = WaitPolicy()

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        waited_s = 0.0
        now = forecast_step(drawing, self._cost)
        while wait_s := self._wait_policy.wait_s(now.height, now.tokens, now.seconds + waited_s):
            start = self._clock()
            came = receive(wait_s)
            delay_s = self._clock() - start
            before, now = now, forecast_step(drawing, self._cost)
            self._wait_policy.observe(before.height, now.tokens - before.tokens, delay_s)
            waited_s += delay_s
            if not came:
                return


class InlineSchedule(CostAwareSchedule):
    """Drafts in the target's process have only its time: they get it while that earns more than a step would."""

    depth_factor = 1
    TIMEOUT_S = 1.0
    """A round that takes longer is given up."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._round_policy = InlineRoundPolicy()

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        drafting_s = 0.0
        now = draft_frontier(drawing)
        while not (begun := all(r.draft_started for r in drawing if r.drafted)) or self._round_pays(
            now, drawing, drafting_s
        ):
            start = self._clock()
            came = receive(self.TIMEOUT_S)
            delay_s = self._clock() - start
            before, now = now, draft_frontier(drawing)
            if begun:  # a first round reads a prompt, and is like no other
                self._round_policy.observe(before.deepest, now.own - before.own, delay_s)
            drafting_s += delay_s
            if not came or now.own <= before.own:
                return

    def _round_pays(self, now: DraftFrontier, drawing: Sequence[Request], drafting_s: float) -> bool:
        """A round costs its own time, and that of a row more for each request."""
        step = forecast_step(drawing, self._cost)
        more = step.nodes + len(drawing)
        rows_s = self._cost(len(drawing) + more, more) - step.seconds
        return self._round_policy.pays(
            now.deepest, step.tokens, step.seconds + drafting_s, now.covered_by_lookups, rows_s
        )


def make_draft_schedule(concurrent: bool, lockstep: bool, cost: StepCost, clock: Clock) -> DraftSchedule:
    """`concurrent`: whether drafts go on while the target computes."""
    if lockstep:
        return LockstepSchedule(clock)
    return StreamedSchedule(cost, clock) if concurrent else InlineSchedule(cost, clock)
