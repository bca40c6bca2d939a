"""All requests of a draft are paused together, and one of them tries it again."""

from __future__ import annotations

from paceline.budget import Worth
from paceline.config import SamplingParams
from paceline.engine.request import Request
from paceline.engine.trial import Trial
from paceline.messages import Submission
from paceline.tree import TokenTree


def request(key: int) -> Request:
    law = SamplingParams()
    return Request(key, Submission(str(key), [1], law), law, 9, (4, 8), 16, TokenTree(0, 1), 0.0)


class Judged:
    """A trial of three requests, and who was told what."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []
        self.trial = Trial(lambda request: self.told.append((request.key, request.paused)))
        self.requests = [request(key) for key in (1, 2, 3)]
        for each in self.requests:
            self.trial.join(each)

    def steps(self, count: int, accepted: int = 0, *, heard: bool = True) -> None:
        for _ in range(count):
            for each in list(self.trial.requests.values()):
                each.heard = heard and not each.paused
                self.trial.count(each, accepted)
            self.trial.judge()

    def until_told(self) -> list[tuple[int, bool]]:
        self.told.clear()
        while not self.told:
            self.steps(1)
        return self.told


def test_all_are_paused_at_once_and_one_tries_again() -> None:
    judged = Judged()
    assert judged.until_told() == [(1, True), (2, True), (3, True)]
    assert judged.until_told() == [(1, False)]
    assert judged.until_told() == [(1, True)]


def test_what_the_scout_finds_holds_for_all() -> None:
    judged = Judged()
    judged.until_told()
    judged.until_told()
    judged.steps(2, accepted=1)
    assert judged.told == [(1, False), (2, False), (3, False)]


def test_many_requests_do_not_make_a_verdict_hastier() -> None:
    judged, alone = Judged(), Worth()
    steps = 0
    while not alone.paused:
        alone.observe(0)
        steps += 1
    judged.steps(steps - 1)
    assert judged.told == []
    judged.steps(1)
    assert len(judged.told) == 3


def test_one_that_joins_a_paused_draft_is_paused() -> None:
    judged = Judged()
    judged.until_told()
    late = request(4)
    judged.trial.join(late)
    assert late.paused
    assert judged.told[-1] == (4, True)


def test_another_scout_takes_over_when_one_leaves() -> None:
    judged = Judged()
    judged.until_told()
    judged.until_told()
    judged.trial.leave(1)
    judged.steps(1, heard=False)
    assert judged.told[-1] == (2, False)


def test_steps_before_the_first_growth_say_nothing() -> None:
    judged = Judged()
    judged.steps(500, heard=False)
    assert judged.told == []
