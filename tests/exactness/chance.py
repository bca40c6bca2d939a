"""Exact distributions of random programs: run one on every possible outcome of every choice it makes.

A program gets all its randomness from a `Chance`. `law_of` replays it with every script of choices there is and
adds up probabilities as fractions, so that a distribution is right or wrong, not close.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import TypeVar

Result = TypeVar("Result", bound=Hashable)

NOISE_LEVELS = 6
"""The noise at one place takes this many values, all equally likely."""
EVEN = [Fraction(1, NOISE_LEVELS)] * NOISE_LEVELS


class Chance:
    """The choices of one run: those of `script`, then the first possible ones, with the others kept for later."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.probability = Fraction(1)
        self.untried: list[tuple[int, ...]] = []
        self._script = script
        self._taken: list[int] = []
        self._noise: dict[Hashable, int] = {}

    def choose(self, distribution: Sequence[Fraction]) -> int:
        """An index, drawn afresh from a distribution."""
        assert sum(distribution) == 1
        return self._choose(distribution)

    def noise(self, key: Hashable) -> int:
        """The noise of `key`: the same at every call."""
        if key not in self._noise:
            self._noise[key] = self._choose(EVEN)
        return self._noise[key]

    def _choose(self, distribution: Sequence[Fraction]) -> int:
        if len(self._taken) < len(self._script):
            choice = self._script[len(self._taken)]
        else:
            choice, *others = (i for i, weight in enumerate(distribution) if weight)
            self.untried += [(*self._taken, other) for other in others]
        self._taken.append(choice)
        self.probability *= distribution[choice]
        return choice


def distribution_of(program: Callable[[Chance], Result]) -> dict[Result, Fraction]:
    """The exact distribution of what a program returns."""
    distribution: defaultdict[Result, Fraction] = defaultdict(Fraction)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Chance(scripts.pop())
        distribution[program(chance)] += chance.probability
        scripts += chance.untried
    return distribution
