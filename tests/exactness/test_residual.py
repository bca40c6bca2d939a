"""`residual` and block verification by enumeration: exactly the target's distribution; almost right rules are caught.

The rules are the real ones; they know nothing but `*` and `<` of a uniform number, so a `Coin` can stand for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from paceline.core.strategies.block_verification import accept_block
from paceline.core.strategies.residual import ChainAcceptance, ChainToken, accept_each
from tests.exactness.chance import Chance, distribution_of
from tests.exactness.rules import Coin, Rejection, by_position, distribution_error, left_over, normalised
from tests.exactness.test_identity import random_distribution
from tests.exactness.worlds import Distribution, Scene, Tokens, World, no_draft

WORLDS = [
    *(World(vocabulary=2, length=3, seed=seed) for seed in (0, 2, 3)),
    *(World(vocabulary=3, length=2, seed=seed) for seed in (0, 1, 4, 21)),
    World(vocabulary=2, length=4, seed=5),
]
VISIBLE = Fraction(1, 1000)

RULES = {"one by one": accept_each, "as a block": accept_block}


class RandomPair:
    """A target's and a draft's distribution after every prefix, any fractions."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.size = 2 + seed % 3

    def distributions(self, prefix: Tokens) -> tuple[Distribution, Distribution]:
        rng = random.Random(repr((self.seed, prefix)))
        target, draft = random_distribution(rng, self.size), random_distribution(rng, self.size)
        return target, draft if rng.random() < 0.9 else target

    def link(self, prefix: Tokens, token: int) -> ChainToken:
        target, draft = self.distributions(prefix)
        return ChainToken(token, dict(enumerate(draft)), dict(enumerate(target)))

    def verified(self, rule: Any, guesses: int, chance: Chance) -> tuple[Tokens, Tokens]:
        """The chain, and what is committed after one verification."""
        chain: Tokens = ()
        for _ in range(guesses):
            chain = (*chain, chance.choose(self.distributions(chain)[1]))
        links = [self.link(chain[:i], token) for i, token in enumerate(chain)]
        result = rule(links, [Coin(chance) for _ in links])
        accepted = chain[: result.accepted]
        target, draft = self.distributions(accepted)
        if result.accepted < guesses:
            target = left_over(target, draft, Fraction(result.weight))
        return chain, (*accepted, chance.choose(target))


@pytest.mark.parametrize("guesses", [1, 2])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(12))
def test_the_output_has_the_targets_distribution(seed: int, rule: Any, guesses: int) -> None:
    """The committed tokens, completed by the target's own draws, have the target's distribution."""
    pair = RandomPair(seed)

    def program(chance: Chance) -> Tokens:
        tokens = pair.verified(rule, guesses, chance)[1]
        while len(tokens) <= guesses:
            tokens = (*tokens, chance.choose(pair.distributions(tokens)[0]))
        return tokens

    distribution = distribution_of(program)
    assert sum(distribution.values()) == 1
    for tokens, weight in distribution.items():
        assert weight == math.prod(pair.distributions(tokens[:i])[0][token] for i, token in enumerate(tokens))


def committed(rule: Any, pair: RandomPair, guesses: int) -> Fraction:
    """The mean number of tokens of one verification."""
    distribution = distribution_of(lambda chance: len(pair.verified(rule, guesses, chance)[1]))
    return sum((count * weight for count, weight in distribution.items()), Fraction(0))


@pytest.mark.parametrize("seed", range(12))
def test_one_token_has_the_optimal_acceptance_and_a_block_accepts_at_least_as_many(seed: int) -> None:
    pair = RandomPair(seed)
    assert committed(accept_each, pair, 1) == 1 + sum(map(min, *pair.distributions(())))
    pair = RandomPair(3 * seed)  # of two tokens
    each, block = (committed(rule, pair, 3) for rule in (accept_each, accept_block))
    assert block > each if seed <= 3 else block >= each


def rows_by_own_token(scene: Scene, nodes: Sequence[int]) -> int:
    """A guess has a row if it is token 0, and those before it are."""
    return next((i for i, node in enumerate(nodes) if scene.tree.tokens[node]), len(nodes))


def rows_by_the_next_token(scene: Scene, nodes: Sequence[int]) -> int:
    """A guess has a row if the one after it is token 0."""
    return max(0, rows_by_own_token(scene, nodes[1:]))


def rows_by_prefix(scene: Scene, nodes: Sequence[int]) -> int:
    """A token has a row unless a 1 precedes it."""
    return min(len(nodes), rows_by_own_token(scene, nodes) + 1)


RIGHT = {
    "one guess ahead": Rejection(ahead=1),
    "three guesses ahead": Rejection(ahead=3),
    "no rows": Rejection(ahead=3, rows=lambda scene, nodes: 0),
    "rows by prefix": Rejection(ahead=3, rows=rows_by_prefix),
    "rows by the guess": Rejection(ahead=3, rows=rows_by_own_token),
    "rows by the guess after it": Rejection(ahead=3, rows=rows_by_the_next_token),
    "keyed by position": Rejection(ahead=3, guess_key=by_position, coin_key=by_position),
    "a block": Rejection(accept_block, ahead=2),
    "a long block": Rejection(accept_block, ahead=3),
    "blocks without rows": Rejection(accept_block, ahead=3, rows=lambda scene, nodes: 0),
    "blocks by prefix": Rejection(accept_block, ahead=3, rows=rows_by_prefix),
}


@pytest.mark.parametrize("world", WORLDS, ids=repr)
@pytest.mark.parametrize("rule", RIGHT.values(), ids=RIGHT)
def test_every_world_has_the_targets_distribution(rule: Rejection, world: World) -> None:
    assert distribution_error(rule, world, no_draft) == 0


def sharper(distribution: Distribution) -> Distribution:
    return normalised([p * p for p in distribution])


def unaccumulated(links: Sequence[ChainToken], uniforms: Sequence[Any]) -> ChainAcceptance:
    """Block verification without the joint weight: each guess by its own ratio, the last success counts."""
    result = ChainAcceptance(0)
    for depth, (link, u) in enumerate(zip(links, uniforms, strict=True), 1):
        if u * link.draft_probs[link.token] < link.target_probs[link.token]:
            result = ChainAcceptance(depth)
    return result


def unweighted(links: Sequence[ChainToken], uniforms: Sequence[Any]) -> ChainAcceptance:
    """The weight is forgotten when a guess is replaced."""
    return ChainAcceptance(accept_block(links, uniforms).accepted)


def accepts_to_the_end(links: Sequence[ChainToken], uniforms: Sequence[Any]) -> ChainAcceptance:
    """The running weight alone decides at every place, as it should at the last one only."""
    result, weight = ChainAcceptance(0), Fraction(1)
    for depth, (link, u) in enumerate(zip(links, uniforms, strict=True), 1):
        weight = min(Fraction(1), weight * link.target_probs[link.token] / link.draft_probs[link.token])
        if u < weight:
            result = ChainAcceptance(depth, weight)
    return result


def likeliest(target: Distribution, draft: Distribution, weight: Fraction) -> Distribution:
    """A miss path that takes the argmax."""
    best = max(range(len(target)), key=target.__getitem__)
    return [Fraction(token == best) for token in range(len(target))]


MUTANTS = {
    "resamples from the target's law": Rejection(replace=lambda target, draft, weight: target),
    "resamples from the draft's law": Rejection(replace=lambda target, draft, weight: draft),
    "resamples from the reversed residual": Rejection(
        replace=lambda target, draft, weight: left_over(draft, target, weight) if draft != target else target
    ),
    "replaces by the argmax": Rejection(replace=likeliest),
    "draft temperature mismatch": Rejection(sampled=sharper),
    "draws from the whole law, claims the truncated one": Rejection(
        claimed=lambda distribution: (
            {t: 6 for t, p in enumerate(distribution) if p == max(distribution)}
            | {t: 1 for t, p in enumerate(distribution) if p}
        )
    ),
    "a slot chosen by its own token": Rejection(ahead=3, rows=rows_by_own_token, beyond=False),
    "a guess sent only if it is likely": Rejection(
        sent=lambda distribution, token: distribution[token] >= Fraction(1, 2)
    ),
    "accepts by argmax": Rejection(
        lambda links, uniforms: ChainAcceptance(
            next((i for i, x in enumerate(links) if x.target_probs[x.token] < max(x.target_probs.values())), len(links))
        )
    ),
    "block without the joint weight": Rejection(unaccumulated, ahead=3),
    "block forgets the weight of what is left": Rejection(unweighted, ahead=3),
    "block accepts by the weight at every place": Rejection(accepts_to_the_end, ahead=3),
    "block whose end follows from the guess after it": Rejection(accept_block, ahead=3, rows=rows_by_the_next_token),
    "block with guesses' noise keyed by position": Rejection(accept_block, ahead=3, guess_key=by_position),
    "block with tests' noise keyed by position": Rejection(accept_block, ahead=3, coin_key=by_position),
}


@pytest.mark.parametrize("rule", MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_residual_are_caught(rule: Rejection) -> None:
    assert max(distribution_error(rule, world, no_draft) for world in WORLDS) > VISIBLE


def test_a_swapped_ratio_is_caught() -> None:
    def swapped(links: Sequence[ChainToken], uniforms: Sequence[Any]) -> ChainAcceptance:
        return accept_each([ChainToken(each.token, each.target_probs, each.draft_probs) for each in links], uniforms)

    # A target probability of 0 would divide by it.
    several = [World(2, 2, seed=seed) for seed in range(30)]
    positive = [w for w in several if all(min(*w.target(p), *w.draft(p)) > 0 for p in ((), (0,), (1,)))]
    assert max(distribution_error(Rejection(swapped), world, no_draft) for world in positive) > VISIBLE


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_grid_of_uniform_numbers_accepts_its_share(rule: Any) -> None:
    """An impossible token is rejected even by the smallest number, 0."""
    for share in (0, 16, 32, 63, 64):
        link = ChainToken(3, {3: 1.0}, {3: share / 64})
        assert sum(rule([link], [i / 64]).accepted for i in range(64)) == share
