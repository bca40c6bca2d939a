"""Shared noise as algebra: the joint distribution of the draft's and the target's draws, exactly and in closed form.

A draw by Gumbel noise is a race: token i arrives at E_i / p_i, with E_i exponential, and the first wins. Draft and
target run the same race with different speeds. No sampling here; `test_draw_distribution` ties the code to these
formulas.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

Distribution = Sequence[Fraction]


def random_distribution(rng: random.Random, size: int) -> Distribution:
    weights = [rng.choice([1, 2, 3, 10, 100]) * rng.randint(1, 9) for _ in range(size)]
    return [Fraction(w, sum(weights)) for w in weights]


def both_draw(target: Distribution, draft: Distribution, token: int) -> Fraction:
    """The probability that both draw `token`."""
    return 1 / sum(max(p / target[token], q / draft[token]) for p, q in zip(target, draft, strict=True))


def draws_differ(target: Distribution, draft: Distribution, a: int, b: int) -> Fraction:
    """The probability that the draft draws `a` and the target `b`, another token.

    Given E_a = t and E_b = r t, the others must arrive later in both races, so their exponents are linear in t with
    slope max(q_i / q_a, r p_i / p_b). Integrating t out leaves the integral of 1 / (slope(r))^2 over the ratios r for
    which a beats b in the draft's race and loses in the target's; the slope is linear between its kinks.
    """
    low, high = draft[b] / draft[a], target[b] / target[a]
    if low >= high:
        return Fraction(0)
    others = [i for i in range(len(target)) if i not in (a, b)]
    meet = [(draft[i] / draft[a]) / (target[i] / target[b]) for i in others]
    ends = sorted({low, high, *(r for r in meet if low < r < high)})

    def slope(r: Fraction) -> Fraction:
        return 1 + r + sum(max(draft[i] / draft[a], r * target[i] / target[b]) for i in others)

    return sum(((s - r) / (slope(r) * slope(s)) for r, s in itertools.pairwise(ends)), Fraction(0))


def joint(target: Distribution, draft: Distribution) -> list[list[Fraction]]:
    """[draft's draw][target's draw]."""
    size = range(len(target))
    return [[both_draw(target, draft, a) if a == b else draws_differ(target, draft, a, b) for b in size] for a in size]


@pytest.mark.parametrize("seed", range(40))
def test_the_output_has_the_target_s_distribution_whatever_the_draft_s_is(seed: int) -> None:
    """Accept if the draws agree, else commit the target's. They agree with a probability of (1 - TV) / (1 + TV) to
    1 - TV, the best that any rule can do with one guess; always, if the distributions are equal."""
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    target, draft = random_distribution(rng, size), random_distribution(rng, size)
    draft = target if seed == 0 else draft
    table = joint(target, draft)
    accepted = [table[token][token] for token in range(size)]
    bonus = [sum(row[token] for a, row in enumerate(table) if a != token) for token in range(size)]
    assert [a + b for a, b in zip(accepted, bonus, strict=True)] == target
    assert [sum(row) for row in table] == draft
    distance = sum(abs(p - q) for p, q in zip(target, draft, strict=True)) / 2
    assert (1 - distance) / (1 + distance) <= sum(accepted) <= 1 - distance
