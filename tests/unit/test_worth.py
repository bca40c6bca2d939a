"""A draft that does not pay is paused, tried again ever more rarely, and forgiven as soon as it pays."""

from __future__ import annotations

import itertools

import pytest

from paceline.budget import Worth


def steps_until(worth: Worth, paused: bool, accepted: int) -> int:
    return next(step for step in itertools.count(1) if worth.observe(accepted) and worth.paused is paused)


def test_a_useless_draft_is_paused_soon_but_not_at_once() -> None:
    assert 10 < steps_until(Worth(), paused=True, accepted=0) < 40


def test_pauses_grow_up_to_a_limit() -> None:
    worth = Worth()
    pauses, tries = [], []
    for _ in range(8):
        tries.append(steps_until(worth, paused=True, accepted=0))
        pauses.append(steps_until(worth, paused=False, accepted=0))
    assert pauses == [32, 64, 128, 256, 512, 1024, 1024, 1024]
    assert max(tries[1:]) < 15
    assert sum(tries[-3:]) < 0.02 * sum(pauses[-3:])


def test_one_that_pays_again_is_as_good_as_new() -> None:
    worth = Worth()
    for _ in range(3):
        steps_until(worth, paused=True, accepted=0)
        steps_until(worth, paused=False, accepted=0)
    for _ in range(20):
        assert not worth.observe(1)
    steps_until(worth, paused=True, accepted=0)
    assert steps_until(worth, paused=False, accepted=0) == Worth.LEAST_PAUSE


@pytest.mark.parametrize("every", [2, 5, 10])
def test_one_that_pays_now_and_then_stays(every: int) -> None:
    worth = Worth()
    assert not any(worth.observe(step % every == 0) for step in range(500))


def test_what_others_know_counts_from_the_start() -> None:
    assert Worth(expected=0.01).paused
    assert not Worth(expected=0.5).paused
