"""Every output of tiny worlds, counted: the law is the target's, exactly, whoever drafts.

The project promises an error below 1e-12; counting with fractions, we can ask for none.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.helpers.chance import Chance, law_of
from tests.helpers.rules import (
    Chain,
    Coupled,
    drafter_changes_output,
    law_error,
    normalised,
    truncated,
)
from tests.helpers.worlds import DRAFTERS, Tokens, World, nobody

WORLDS = [World(vocabulary=3, length=3, seed=0), World(3, 3, seed=1), World(vocabulary=2, length=4, seed=3)]


def test_the_counter_counts() -> None:
    """Two throws of a loaded coin, then as many fair ones as there were heads."""
    loaded, fair = [Fraction(1, 3), Fraction(2, 3)], [Fraction(1, 2)] * 2

    def program(chance: Chance) -> Tokens:
        heads = sum(chance.choose(loaded) for _ in range(2))
        return (heads, sum(chance.choose(fair) for _ in range(heads)))

    assert law_of(program) == {
        (0, 0): Fraction(1, 9),
        (1, 0): Fraction(2, 9),
        (1, 1): Fraction(2, 9),
        (2, 0): Fraction(1, 9),
        (2, 1): Fraction(2, 9),
        (2, 2): Fraction(1, 9),
    }


@pytest.mark.parametrize("world", WORLDS, ids=repr)
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
class TestCoupled:
    def test_the_law_is_the_targets(self, world: World, drafter: object) -> None:
        assert law_error(Coupled(), world, drafter) == 0

    def test_the_drafter_changes_nothing(self, world: World, drafter: object) -> None:
        assert not drafter_changes_output(Coupled(), world, drafter)


@pytest.mark.parametrize("world", WORLDS[:2], ids=repr)
@pytest.mark.parametrize(
    "rule",
    [
        Chain(),
        Chain(guesses=1),
        Chain(sampled=lambda law: normalised(truncated(law)), claimed=lambda law: normalised(truncated(law))),
        Chain(sampled=lambda law: normalised(truncated(law, 1)), claimed=lambda law: normalised(truncated(law, 1))),
    ],
    ids=["rejection sampling", "one guess", "truncated draft law", "deterministic draft"],
)
def test_rejection_sampling_has_the_targets_law(rule: Chain, world: World) -> None:
    """The positive control for the mutants of it: the checker accepts what is right."""
    assert law_error(rule, world, nobody) == 0
