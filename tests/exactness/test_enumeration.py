"""Every output of tiny worlds, enumerated: with any drafter the distribution is exactly the target's.

Probabilities are fractions, so the error has to be 0.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.helpers.chance import Chance, distribution_of
from tests.helpers.rules import Coupled, distribution_error, drafter_changes_output
from tests.helpers.worlds import DRAFTERS, Tokens, World

WORLDS = [World(vocabulary=3, length=3, seed=0), World(3, 3, seed=1), World(vocabulary=2, length=4, seed=3)]


def test_the_counter_counts() -> None:
    """Two throws of a loaded coin, then as many fair ones as there were heads."""
    loaded, fair = [Fraction(1, 3), Fraction(2, 3)], [Fraction(1, 2)] * 2

    def program(chance: Chance) -> Tokens:
        heads = sum(chance.choose(loaded) for _ in range(2))
        return (heads, sum(chance.choose(fair) for _ in range(heads)))

    assert distribution_of(program) == {
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
    def test_the_output_has_the_targets_distribution(self, world: World, drafter: object) -> None:
        assert distribution_error(Coupled(), world, drafter) == 0

    def test_the_drafter_does_not_change_the_output(self, world: World, drafter: object) -> None:
        assert not drafter_changes_output(Coupled(), world, drafter)
