"""Requests of a draft are paused together but for those that it helps, and one of them tries it again."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.policy.draft_gate import DraftGate
from paceline.engine.worker_gate import WorkerGate
from tests.helpers.bare import bare_request


class Judged:
    """A trial of some requests, who was told what, and for how many steps each was drafted for."""

    def __init__(self, requests: int = 3, helped: int | None = None, every: int = 3, lost: float = 0.0) -> None:
        """`helped`: a request that has a guess accepted in one of so many steps, whatever the others have. `lost`:
        tokens that each step of drafting costs."""
        self.told: list[tuple[int, bool]] = []
        self.drafted: Counter[int] = Counter()
        self.helped, self.every, self.lost = helped, every, lost
        self.trial = WorkerGate(lambda request: self.told.append((request.key, request.paused)))
        for key in range(1, requests + 1):
            self.trial.add(bare_request([1], key=key))
        self._step = 0

    def steps(self, count: int, accepted: int = 0, *, heard: bool = True) -> None:
        for _ in range(count):
            self._step += 1
            for key, each in list(self.trial.requests.items()):
                each.draft_started = heard and not each.paused
                self.drafted[key] += each.draft_started
                self.trial.record_accepted(each, self._step % self.every == 0 if key == self.helped else accepted)
            self.trial.end_step(self.lost)

    def until_told(self) -> list[tuple[int, bool]]:
        self.told.clear()
        for _ in range(2 * DraftGate.MAX_PAUSE_STEPS):
            if self.told:
                break
            self.steps(1)
        return self.told


def test_all_are_paused_at_once_and_one_tries_again() -> None:
    judged = Judged()
    assert judged.until_told() == [(1, True), (2, True), (3, True)]
    assert judged.until_told() == [(1, False)]
    assert judged.until_told() == [(1, True)]


@pytest.mark.parametrize(("lost", "pauses"), [(0.5, False), (1.5, True)])
def test_a_draft_pays_that_brings_more_than_it_costs(lost: float, pauses: bool) -> None:
    judged = Judged(lost=lost)
    judged.steps(100, accepted=1)
    assert ((1, True) in judged.told) is pauses


def test_what_the_scout_finds_holds_for_all() -> None:
    judged = Judged()
    judged.until_told()
    judged.until_told()
    judged.steps(2, accepted=1)
    assert judged.told == [(1, False), (2, False), (3, False)]


def steps_to_a_verdict() -> int:
    alone, steps = DraftGate(), 0
    while not alone.paused:
        alone.observe(0)
        steps += 1
    return steps


def test_many_requests_do_not_make_a_verdict_hastier() -> None:
    judged = Judged()
    judged.steps(steps_to_a_verdict() - 1)
    assert judged.told == []
    judged.steps(1)
    assert len(judged.told) == 3


def test_one_that_joins_a_paused_draft_is_paused() -> None:
    judged = Judged()
    judged.until_told()
    late = bare_request([1], key=4)
    judged.trial.add(late)
    assert late.paused
    assert judged.told[-1] == (4, True)


def test_another_scout_takes_over_when_one_leaves() -> None:
    judged = Judged()
    judged.until_told()
    judged.until_told()
    judged.trial.remove(1)
    judged.steps(1, heard=False)
    assert judged.told[-1] == (2, False)


def test_steps_before_the_first_growth_say_nothing() -> None:
    judged = Judged()
    judged.steps(500, heard=False)
    assert judged.told == []


def test_every_trial_has_another_scout() -> None:
    judged = Judged()
    judged.until_told()
    scouts = []
    for _ in range(3):
        scouts += judged.until_told()
        judged.until_told()
    assert scouts == [(1, False), (2, False), (3, False)]


@pytest.mark.parametrize("every", [3, 10])
def test_of_nine_the_one_that_it_helps_is_drafted_for(every: int) -> None:
    judged = Judged(9, helped=5, every=every)
    judged.steps(4000)
    useless = set(range(1, 10)) - {5}
    assert judged.drafted[5] == 4000
    assert 0 < max(judged.drafted[key] for key in useless) < 0.03 * 4000
    assert {key for key, paused in judged.told if paused} == useless


def test_one_that_it_helps_no_longer_is_paused_as_well() -> None:
    judged = Judged(9, helped=5)
    judged.until_told()
    judged.helped = None
    assert judged.until_told() == [(5, True)]


def test_one_that_joined_just_before_the_verdict_has_its_chance() -> None:
    judged = Judged(9)
    judged.steps(steps_to_a_verdict() - 1)
    judged.trial.add(bare_request([1], key=10))
    judged.steps(1)
    assert judged.told == [(key, True) for key in range(1, 10)]
    assert judged.until_told() == [(10, True)]
    assert judged.drafted[10] == steps_to_a_verdict()


def test_one_that_joined_a_paused_draft_is_its_next_scout_and_may_be_helped() -> None:
    judged = Judged(9, helped=10)
    judged.until_told()
    judged.trial.add(bare_request([1], key=10))
    assert judged.until_told() == [(10, False)]
    assert judged.until_told() == [(key, False) for key in range(1, 10)]
    judged.steps(4000)
    assert judged.drafted[10] > 0.98 * 4000 > 50 * judged.drafted[1]


def test_where_only_those_are_left_that_it_helps_a_draft_pays_again() -> None:
    judged = Judged(9, helped=5)
    judged.until_told()
    for key in set(judged.trial.requests) - {5}:
        judged.trial.remove(key)
    judged.steps(2 * DraftGate.MIN_PAUSE_STEPS)
    late = bare_request([1], key=10)
    judged.trial.add(late)
    assert not late.paused
