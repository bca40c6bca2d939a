"""A draft that does not pay is paused, tried again ever more rarely, and forgiven as soon as it pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from paceline.core.policy.draft_gate import DraftGate


def steps_until(worth: DraftGate, state: Callable[[DraftGate], bool], accepted: float) -> int:
    for step in itertools.count(1):
        worth.observe(accepted)
        if state(worth):
            return step
    raise AssertionError


def paused(worth: DraftGate) -> bool:
    return worth.paused


def tried(worth: DraftGate) -> bool:
    return worth.probing


def test_a_useless_draft_is_paused_soon_but_not_at_once() -> None:
    assert 10 < steps_until(DraftGate(), paused, 0) < 40


def test_pauses_grow_up_to_a_limit() -> None:
    worth = DraftGate()
    pauses, tries = [], []
    for _ in range(10):
        tries.append(steps_until(worth, paused, 0))
        pauses.append(steps_until(worth, tried, 0))
    assert pauses == [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096]
    assert max(tries[1:]) < 15
    assert sum(tries[-3:]) < 0.02 * sum(pauses[-3:])


def test_one_that_pays_again_is_as_good_as_new() -> None:
    worth = DraftGate()
    for _ in range(3):
        steps_until(worth, paused, 0)
        steps_until(worth, tried, 0)
    steps_until(worth, lambda worth: worth.pays, 1)
    for _ in range(20):
        worth.observe(1)
        assert worth.pays
    steps_until(worth, paused, 0)
    assert steps_until(worth, tried, 0) == DraftGate.MIN_PAUSE_STEPS


def test_one_that_costs_nothing_is_not_paused_where_all_costs_are_known() -> None:
    worth = DraftGate(DraftGate.PAUSE_LOCAL_BELOW)
    for step in range(500):
        worth.observe(0.01 if step % 2 else -0.02)
        assert worth.pays
    assert steps_until(worth, paused, -0.1) < 20


@pytest.mark.parametrize("every", [2, 5, 10])
def test_one_that_pays_now_and_then_stays(every: int) -> None:
    worth = DraftGate()
    for step in range(500):
        worth.observe(step % every == 0)
        assert worth.pays
