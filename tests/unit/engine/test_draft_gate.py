"""The draft gate pauses a draft that does not pay, except for requests it helps, and probes it ever more rarely."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.engine.draft_gate import DraftGate
from tests.unit.engine.bare_request import bare_request


class Gated:
    """A gate over some requests: its changes, and in how many steps each request was drafted."""

    def __init__(
        self, requests: int = 3, helped: int | None = None, every: int = 3, pause_below: float | None = None
    ) -> None:
        """`helped`: a request that has a token accepted in one of `every` steps, whatever the other requests have."""
        self.changes: list[tuple[int, bool]] = []
        self.drafted: Counter[int] = Counter()
        self.helped, self.every = helped, every
        self.gate = DraftGate(lambda request: self.changes.append((request.key, request.paused)), pause_below)
        self._step = 0
        for key in range(1, requests + 1):
            self.add(key)

    def add(self, key: int, before: float | None = None) -> None:
        """`before`: the request's average at its last target."""
        self.gate.add(bare_request([1], key=key, accepted_average=before))

    def steps(self, count: int, accepted: int = 0, *, lost: float = 0.0, started: bool = True) -> None:
        for _ in range(count):
            self._step += 1
            for key, request in list(self.gate.requests.items()):
                request.draft_started = started and not request.paused
                self.drafted[key] += request.draft_started
                helps = self._step % self.every == 0 if key == self.helped else accepted
                self.gate.record_accepted(request, helps)
            self.gate.end_step(lost)

    def until_change(self, *, lost: float = 0.0) -> int:
        """Steps until requests are paused or resumed; `changes` has these changes."""
        self.changes.clear()
        for step in range(1, 2 * DraftGate.MAX_PAUSE_STEPS):
            self.steps(1, lost=lost)
            if self.changes:
                return step
        raise AssertionError("no request was paused or resumed")

    def next_changes(self) -> list[tuple[int, bool]]:
        self.until_change()
        return self.changes.copy()


class TestOneRequest:
    def test_pauses_double_up_to_a_limit(self) -> None:
        gated, pauses, probes = Gated(1), [], []
        for _ in range(10):
            probes.append(gated.until_change())
            pauses.append(gated.until_change())
        assert pauses == [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]
        assert 10 < probes[0] < 40, "soon, but not at once"
        assert max(probes[1:]) < 15
        assert sum(probes[-3:]) < 0.02 * sum(pauses[-3:])

    def test_a_draft_that_pays_again_starts_over(self) -> None:
        gated = Gated(1)
        for _ in range(6):
            gated.until_change()
        gated.steps(30, accepted=1)
        assert gated.gate.pays
        assert gated.next_changes() == [(1, True)]
        assert gated.until_change() == DraftGate.MIN_PAUSE_STEPS

    @pytest.mark.parametrize("every", [2, 5, 10])
    def test_a_draft_that_helps_now_and_then_stays(self, every: int) -> None:
        gated = Gated(1, helped=1, every=every)
        gated.steps(500)
        assert gated.changes == []

    def test_a_local_draft_without_cost_stays(self) -> None:
        gated = Gated(1, pause_below=DraftGate.PAUSE_LOCAL_BELOW)
        for step in range(500):
            gated.steps(1, lost=-0.01 if step % 2 else 0.02)
        assert gated.changes == []
        assert gated.until_change(lost=0.1) < 20

    @pytest.mark.parametrize(("lost", "pauses"), [(0.5, False), (1.5, True)])
    def test_a_draft_has_to_bring_more_than_it_costs(self, lost: float, pauses: bool) -> None:
        gated = Gated(1)
        gated.steps(100, accepted=1, lost=lost)
        assert ((1, True) in gated.changes) is pauses

    def test_steps_before_the_first_growth_do_not_count(self) -> None:
        gated = Gated(1)
        gated.steps(500, started=False)
        assert gated.changes == []


class TestManyRequests:
    def test_all_are_paused_at_once_and_the_probe_decides_for_all(self) -> None:
        """Each probe is another request."""
        gated = Gated(3)
        assert gated.until_change() == Gated(1).until_change(), "not sooner than one"
        assert gated.changes == [(1, True), (2, True), (3, True)]
        for probe in (1, 2, 3):
            assert gated.next_changes() == [(probe, False)]
            assert gated.next_changes() == [(probe, True)]
        gated.until_change()
        gated.steps(2, accepted=1)
        assert gated.changes == [(1, False), (2, False), (3, False)]

    def test_a_probe_that_leaves_is_replaced(self) -> None:
        gated = Gated()
        gated.until_change()
        gated.until_change()
        gated.gate.remove(1)
        gated.steps(1, started=False)
        assert gated.changes[-1] == (2, False)

    @pytest.mark.parametrize("every", [3, 10])
    def test_a_request_that_is_helped_stays_unpaused(self, every: int) -> None:
        gated = Gated(9, helped=5, every=every)
        gated.steps(4000)
        others = set(range(1, 10)) - {5}
        assert gated.drafted[5] == 4000
        assert 0 < max(gated.drafted[key] for key in others) < 0.03 * 4000
        assert {key for key, paused in gated.changes if paused} == others
        gated.helped = None
        gated.steps(40)
        assert (5, True) in gated.changes, "no longer helped"

    def test_a_draft_with_only_helped_requests_left_pays_again(self) -> None:
        gated = Gated(9, helped=5)
        gated.until_change()
        for key in set(gated.gate.requests) - {5}:
            gated.gate.remove(key)
        gated.steps(2 * DraftGate.MIN_PAUSE_STEPS)
        gated.add(10)
        assert not gated.gate.requests[10].paused


class TestLateRequests:
    def test_a_request_that_joins_a_paused_draft_is_paused_and_is_the_next_probe(self) -> None:
        """It may be helped."""
        gated = Gated(9, helped=10)
        gated.until_change()
        gated.add(10)
        assert gated.changes[-1] == (10, True)
        assert gated.next_changes() == [(10, False)]
        assert gated.next_changes() == [(key, False) for key in range(1, 10)]
        gated.steps(4000)
        assert gated.drafted[10] > 0.98 * 4000 > 50 * gated.drafted[1]

    def test_a_request_that_joins_just_before_the_pause_is_judged_alone(self) -> None:
        steps = Gated(1).until_change()
        gated = Gated(9)
        gated.steps(steps - 1)
        gated.add(10)
        gated.steps(1)
        assert gated.changes == [(key, True) for key in range(1, 10)]
        assert gated.next_changes() == [(10, True)]
        assert gated.drafted[10] == steps


class TestReplayedRequests:
    """Requests that another target had."""

    @pytest.mark.parametrize(("before", "paused"), [(None, True), (0.01, True), (2.0, False)])
    def test_a_request_that_was_helped_joins_a_paused_draft_unpaused(self, before: float | None, paused: bool) -> None:
        gated = Gated(9)
        gated.until_change()
        gated.add(10, before)
        assert gated.gate.requests[10].paused is paused
        assert all(gated.gate.requests[key].paused for key in range(1, 10))

    @pytest.mark.parametrize(
        ("before", "paused"), [((0.01,), True), ((0.01, 2.0), False), ((2.0, 0.01), False), ((0.01, None), False)]
    )
    def test_they_judge_a_draft_that_no_step_has_judged(self, before: tuple[float | None, ...], paused: bool) -> None:
        """All together, in any order; a request without an earlier target hopes."""
        gated = Gated(0)
        for key, average in enumerate(before, 1):
            gated.add(key, average)
        assert gated.gate.pays is not paused
        assert [each.paused for each in gated.gate.requests.values()] == [paused] * len(before)
        if paused:
            assert gated.until_change() == DraftGate.MIN_PAUSE_STEPS

    def test_one_of_them_judges_no_draft_that_steps_have_judged(self) -> None:
        gated = Gated(1)
        gated.steps(1, accepted=1)
        gated.add(2, 0.0)
        assert gated.gate.pays

    def test_a_second_draft_starts_anew(self) -> None:
        gated = Gated(0)
        request = bare_request([1], accepted_average=0.0)
        request.stats.drafts += ["lost", "next"]
        gated.gate.add(request)
        assert not request.paused

    def test_the_average_is_told(self) -> None:
        gated = Gated(0)
        gated.add(1, 2.0)
        gated.steps(1, accepted=3)
        assert gated.gate.requests[1].stats.accepted_average == pytest.approx(2.1)

    def test_the_average_is_told_before_the_draft_sends_anything(self) -> None:
        """The target may be lost before."""
        gated = Gated(0)
        gated.add(1, 2.0)
        assert gated.gate.requests[1].stats.accepted_average == 2.0
