"""When drafts are polled: concurrent drafts before every step, a local draft when the schedule says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.growth import Growth
from paceline.engine.draft_client import DraftUpdates, NoDraftClient
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import ReceiveUpdates
from paceline.engine.request import Request
from tests.helpers.bare_request import bare_request


class Polled(NoDraftClient):
    """Sends one node per poll."""

    def __init__(self, *, concurrent: bool, more: bool = True) -> None:
        self.concurrent = concurrent
        self.more = more
        self.polls = 0

    def poll(self, timeout_s: float) -> DraftUpdates:
        self.polls += 1
        return DraftUpdates([(1, Growth(2, self.polls, [self.polls - 1], [5], [-0.1]))], may_continue=self.more)


class FixedRounds:
    """Waits for a fixed number of rounds."""

    depth_factor, min_path_probability = 1, 0.0

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.waits: list[Sequence[Request]] = []

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        self.waits.append(drawing)
        for _ in range(self._rounds):
            if not receive(1.0):
                return

    def observe_unverified(self, path_probability: float) -> bool:
        return False


def drafted_request() -> Request:
    return bare_request([1, 2, 3], draft="somebody")


@pytest.mark.parametrize(
    ("concurrent", "draws", "polls"), [(False, True, 0), (False, False, 1), (True, True, 1), (True, False, 1)]
)
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_local_draft_runs_one_round_with_prompts_and_else_by_schedule(
    concurrent: bool, draws: bool, polls: int, rounds: int
) -> None:
    """A concurrent draft is polled once before the schedule may wait."""
    request, drafting, schedule = drafted_request(), Polled(concurrent=concurrent), FixedRounds(rounds)
    manager = DraftManager(drafting, (), "coupled", schedule, 10, lambda: 0.0, gated=False)
    manager.receive_growth({1: request}, [request] if draws else ())
    assert drafting.polls == manager.grafted == polls + rounds * draws
    assert schedule.waits == [[request]] * draws


def test_a_paused_draft_is_not_waited_for() -> None:
    request, schedule = drafted_request(), FixedRounds(1)
    request.paused = True
    manager = DraftManager(Polled(concurrent=True), (), "coupled", schedule, 10, lambda: 0.0, gated=False)
    manager.receive_growth({1: request}, [request])
    assert not schedule.waits


def test_a_finished_draft_is_not_polled_again() -> None:
    """A lookup sends all its nodes at once; another poll would only cost time."""
    request, drafting = drafted_request(), Polled(concurrent=False, more=False)
    manager = DraftManager(drafting, (), "coupled", FixedRounds(5), 10, lambda: 0.0, gated=False)
    manager.receive_growth({1: request}, [request])
    assert drafting.polls == 1
    assert request.tree.size == 1
