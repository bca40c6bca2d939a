"""Whether a step is held back for guesses: by where they are made, and one schedule to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.budget import NextRound, Patience, Price, StepCost
from paceline.engine.request import Request
from paceline.engine.scheduler import Frontier, best_guesses, frontier, height, outlook

Clock = Callable[[], float]
"""Seconds since whenever."""
Receive = Callable[[float], bool]
"""Take in what arrives within so many seconds, at least one message; whether something did, and more may come."""


class Waiting(Protocol):
    """Called before a step that runs no prompts."""

    ahead: int
    """How many times the depth of one step a draft is to grow."""

    @property
    def wanted(self) -> float:
        """Path probability from which on guesses are wanted."""

    def wait(self, drawing: Sequence[Request], receive: Receive) -> None:
        """`drawing`: all that the step would run, with at least one request that has a draft."""

    def refused(self, path_probability: float) -> bool:
        """A step had no row for a guess as probable as this, but for all that are more so; whether `wanted` changed."""


class LockStep:
    """What a target does that asks its draft: wait until it has drafted, verify, commit, wait again."""

    ahead = 1
    wanted = 0.0
    PATIENCE_S = 1.0
    """A draft that takes longer is not waited for in this step."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock

    def wait(self, drawing: Sequence[Request], receive: Receive) -> None:
        until = self._clock() + self.PATIENCE_S  # in all: a draft may go on for ever with what is of no use
        while any(self._lacks(request) for request in drawing):
            left_s = until - self._clock()
            if left_s <= 0 or not receive(left_s):
                return

    def refused(self, path_probability: float) -> bool:
        return False

    def _lacks(self, request: Request) -> bool:
        return request.drafted and height(request, best_guesses(request)) < request.depth_allowed()


class Priced:
    """What the schedules share that wait only where it pays: guesses have a price, and steps a cost."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        self._cost = cost
        self._clock = clock
        self._price = Price()

    @property
    def wanted(self) -> float:
        return self._price.wanted

    def refused(self, path_probability: float) -> bool:
        return self._price.observe(path_probability)


class Streamed(Priced):
    """Verify what is there, and wait only where that earns more tokens per second (`Patience`)."""

    ahead = 2

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._patience = Patience()

    def wait(self, drawing: Sequence[Request], receive: Receive) -> None:
        waited_s = 0.0
        now = outlook(drawing, self._cost)
        while wait_s := self._patience.wait_s(now.height, now.tokens, now.seconds + waited_s):
            start = self._clock()
            came = receive(wait_s)
            delay_s = self._clock() - start
            before, now = now, outlook(drawing, self._cost)
            self._patience.observe(before.height, now.tokens - before.tokens, delay_s)
            waited_s += delay_s
            if not came:
                return


class TakingTurns(Priced):
    """Drafts in the target's process have only its time: they get it while that earns more than a step would."""

    ahead = 1
    AT_MOST_S = 1.0
    """A round that takes longer is given up."""

    def __init__(self, cost: StepCost, clock: Clock = time.perf_counter) -> None:
        super().__init__(cost, clock)
        self._next = NextRound()

    def wait(self, drawing: Sequence[Request], receive: Receive) -> None:
        drafting_s = 0.0
        now = frontier(drawing)
        while not (begun := all(r.heard for r in drawing if r.drafted)) or self._pays(now, drawing, drafting_s):
            start = self._clock()
            came = receive(self.AT_MOST_S)
            delay_s = self._clock() - start
            before, now = now, frontier(drawing)
            if begun:  # a first round reads a prompt, and is like no other
                self._next.observe(before.ends, now.own - before.own, delay_s)
            drafting_s += delay_s
            if not came or now.own <= before.own:
                return

    def _pays(self, now: Frontier, drawing: Sequence[Request], drafting_s: float) -> bool:
        """A round costs its own time, and that of a row more for each request."""
        step = outlook(drawing, self._cost)
        more = step.guesses + len(drawing)
        rows_s = self._cost(len(drawing) + more, more) - step.seconds
        return self._next.pays(now.ends, step.tokens, step.seconds + drafting_s, now.beyond, rows_s)


def waiting_for(concurrent: bool, lockstep: bool, cost: StepCost, clock: Clock) -> Waiting:
    """`concurrent`: whether drafts go on while the target computes."""
    if lockstep:
        return LockStep(clock)
    return Streamed(cost, clock) if concurrent else TakingTurns(cost, clock)
