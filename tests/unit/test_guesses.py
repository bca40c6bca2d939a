"""When a draft gets its turn: those elsewhere have their own time, one in this process has only the target's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.growth import Growth
from paceline.engine.draft_client import DraftUpdates, NoDraftClient
from paceline.engine.draft_manager import DraftManager
from paceline.engine.draft_schedule import ReceiveUpdates
from paceline.engine.request import Request
from tests.helpers.bare import bare_request


class Polled(NoDraftClient):
    """Drafts for whoever asks, one guess at a poll."""

    def __init__(self, *, concurrent: bool, more: bool = True) -> None:
        self.concurrent = concurrent
        self.more = more
        self.polls = 0

    def poll(self, timeout_s: float) -> DraftUpdates:
        self.polls += 1
        return DraftUpdates([(1, Growth(2, self.polls, [self.polls - 1], [5], [-0.1]))], may_continue=self.more)


class SoManyRounds:
    """Waits for as many rounds as it is told to, whatever they bring."""

    depth_factor, min_path_probability = 1, 0.0

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.asked: list[Sequence[Request]] = []

    def wait(self, drawing: Sequence[Request], receive: ReceiveUpdates) -> None:
        self.asked.append(drawing)
        for _ in range(self._rounds):
            if not receive(1.0):
                return

    def observe_unverified(self, path_probability: float) -> bool:
        return False


def drafted_for() -> Request:
    return bare_request([1, 2, 3], draft="somebody")


@pytest.mark.parametrize(
    ("concurrent", "draws", "polls"), [(False, True, 0), (False, False, 1), (True, True, 1), (True, False, 1)]
)
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_draft_on_the_target_s_time_gets_one_round_beside_prompts_and_else_what_that_is_worth(
    concurrent: bool, draws: bool, polls: int, rounds: int
) -> None:
    """One elsewhere has drafted already: what has come is taken in, and then the step may be held back."""
    request, drafting, waiting = drafted_for(), Polled(concurrent=concurrent), SoManyRounds(rounds)
    guesses = DraftManager(drafting, (), "coupled", waiting, 10, lambda: 0.0, judged=False)
    guesses.receive_growth({1: request}, [request] if draws else ())
    assert drafting.polls == guesses.grafted == polls + rounds * draws
    assert waiting.asked == [[request]] * draws


def test_nobody_is_waited_for_who_does_not_draft() -> None:
    request, waiting = drafted_for(), SoManyRounds(1)
    request.paused = True
    guesses = DraftManager(Polled(concurrent=True), (), "coupled", waiting, 10, lambda: 0.0, judged=False)
    guesses.receive_growth({1: request}, [request])
    assert not waiting.asked


def test_who_has_said_all_it_knows_is_not_asked_again() -> None:
    """A lookup guesses all at once; another poll would cost its time, and what it is worth would have to be weighed."""
    request, drafting = drafted_for(), Polled(concurrent=False, more=False)
    guesses = DraftManager(drafting, (), "coupled", SoManyRounds(5), 10, lambda: 0.0, judged=False)
    guesses.receive_growth({1: request}, [request])
    assert drafting.polls == 1
    assert request.tree.size == 1
