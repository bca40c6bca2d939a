"""What drafts make likely together follows from their being right or wrong independently of each other."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.witnesses import LEAST_DOUBT, together

Words = list[dict[int, float]]
"""Probabilities, by guess and draft."""


def chances(words: Words) -> list[float]:
    logs = [{draft: math.log(p) if p else -1e4 for draft, p in guess.items()} for guess in words]
    return [math.exp(log_prob) for log_prob in together(logs)]


@st.composite
def words(draw: st.DrawFn) -> Words:
    """Three drafts' words on some of four guesses. Each of them leaves some doubt, and every guess is somebody's."""
    guesses: Words = [{} for _ in range(4)]
    for draft in range(3):
        for guess in guesses:
            if draw(st.booleans()):
                guess[draft] = draw(st.floats(1e-6, 0.24))
    return [guess for guess in guesses if guess]


def worlds(words: Words) -> list[float]:
    """The same, counted out: each draft is right with one of its guesses or wrong with all, independently, and what
    cannot be is left out: that two different guesses are right."""
    drafts = sorted({draft for guess in words for draft in guess})
    said = {draft: {i: guess[draft] for i, guess in enumerate(words) if draft in guess} for draft in drafts}
    totals, nothing = [0.0] * len(words), 0.0
    for right in itertools.product(*({None: 1 - sum(said[d].values()), **said[d]}.items() for d in drafts)):
        chance = math.prod(p for _, p in right)
        guesses = {guess for guess, _ in right if guess is not None}
        if not guesses:
            nothing += chance
        elif len(guesses) == 1:
            totals[guesses.pop()] += chance
    return [total / (sum(totals) + nothing) for total in totals]


@given(words())
def test_it_is_what_independent_witnesses_come_to(words: Words) -> None:
    assert chances(words) == pytest.approx(worlds(words), rel=1e-6)


@given(words())
def test_what_one_alone_says_is_left_as_it_is(words: Words) -> None:
    alone = [{0: guess[0]} for guess in words if 0 in guess]
    assert chances(alone) == pytest.approx([guess[0] for guess in alone])


@given(words(), st.integers(0, 3))
def test_another_word_for_a_guess_makes_it_likelier_and_all_others_less_likely(words: Words, which: int) -> None:
    before = chances(words)
    after = chances([{**guess, 9: 0.5} if i == which else guess for i, guess in enumerate(words)])
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new > old if i == which else new < old or which >= len(words)


@pytest.mark.parametrize("sure", [1.0, 0.999999])
def test_who_is_certain_can_be_contradicted(sure: float) -> None:
    first, second = chances([{0: sure}, {1: sure}])
    assert first == pytest.approx(second) == pytest.approx(0.5, abs=LEAST_DOUBT)


def test_what_is_next_to_impossible_stays_finite() -> None:
    logs = together([{0: -1e4, 1: -1e4}, {0: 0.0, 1: 0.0}])
    assert all(map(math.isfinite, logs))
    assert math.exp(logs[0]) < 1e-300 < 0.99 < math.exp(logs[1]) < 1.0
