"""Rules that are almost right. The checker that passes the right ones must reject every one of these."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from paceline.core.tree import ROOT, TokenTree
from tests.helpers.rules import (
    Chain,
    Coupled,
    Rule,
    drafter_changes_output,
    draw,
    law_error,
    likely_as,
    normalised,
    truncated,
)
from tests.helpers.worlds import DRAFTERS, Law, Scene, World, drawn, nobody

# The smallest first: mutants that waste noise take long to count.
WORLDS = [World(vocabulary=2, length=2), *(World(vocabulary=3, length=3, seed=seed) for seed in range(3))]
VISIBLE = Fraction(1, 100)
"""Errors below this would make a mutant hard to see by other means; none of ours hides that well."""


def draw_with_one_noise(scene: Scene, node: int) -> int:
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise("everywhere"))


def draw_with_noise_by_depth(scene: Scene, node: int) -> int:
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise(len(prefix) - len(scene.output)))


def draw_with_noise_by_guess(scene: Scene, node: int) -> int:
    """Rows of guesses have noise of their own. The law is right, but the output depends on what was guessed."""
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise((len(prefix), node != ROOT)))


def draw_again_on_a_miss(scene: Scene, node: int) -> int:
    """A draw that nobody guessed is taken back once, for a better chance of acceptance."""
    token = draw(scene, node)
    if scene.tree.child(node, token) or not scene.tree.children(node):
        return token
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise((len(prefix), "again")))


def draw_by_committed_history(scene: Scene, node: int) -> int:
    """A rule that looks back is not told of the guesses on the way."""
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix, history=scene.output), scene.chance.noise(len(prefix)))


def walk_into_unverified(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """An unverified child that equals the draw is followed; the draw after it is taken from its parent."""
    draw_after = dict(zip([ROOT, *verified], draws, strict=True))
    committed, node, token = [], ROOT, draws[0]
    while True:
        token = draw_after.get(node, token)
        committed.append(token)
        child = tree.child(node, token)
        if child is None:
            return committed
        node = child


def walk_to_a_sibling(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """Any verified child will do."""
    draw_after = dict(zip([ROOT, *verified], draws, strict=True))
    node = ROOT
    while True:
        draw = draw_after[node]
        children = {tree.tokens[child]: child for child in tree.children(node) if child in draw_after}
        if not children:
            return [*tree.path_tokens(node), draw]
        node = children.get(draw) or next(iter(children.values()))


def walk_without_bonus_on_a_miss(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """The most praised child is committed where nothing was accepted, so that a step is never wasted."""
    draw_after = dict(zip([ROOT, *verified], draws, strict=True))
    token = draw_after[ROOT]
    children = tree.children(ROOT)
    if tree.child(ROOT, token) is None and children:
        return [tree.tokens[max(children, key=tree.log_prob)]]
    return [token]


COUPLED = {
    "noise reused across positions": Coupled(draw=draw_with_one_noise),
    "noise keyed by depth": Coupled(draw=draw_with_noise_by_depth),
    "noise keyed by the guess": Coupled(draw=draw_with_noise_by_guess),
    "drawn again on a miss": Coupled(draw=draw_again_on_a_miss),
    "penalties not advanced along the path": Coupled(draw=draw_by_committed_history),
    "walks into an unverified child": Coupled(walk=walk_into_unverified),
    "accepts a sibling": Coupled(walk=walk_to_a_sibling),
    "commits a guess nobody drew": Coupled(walk=walk_without_bonus_on_a_miss),
}


@pytest.mark.parametrize("rule", COUPLED.values(), ids=COUPLED)
def test_mutants_of_the_coupled_rule_are_caught(rule: Coupled) -> None:
    assert any(
        law_error(rule, world, drafter) > VISIBLE or drafter_changes_output(rule, world, drafter)
        for world in WORLDS
        for drafter in DRAFTERS.values()
    )


def sharpened(law: Law) -> Law:
    """The law at half the temperature."""
    return normalised([p * p for p in law])


class AcceptsOnArgmax:
    """A miss path: some fallback guesses a token, which is accepted if it is the target's likeliest."""

    def __call__(self, world: World, drafter: object, chance: object) -> tuple[int, ...]:
        output: tuple[int, ...] = ()
        while len(output) < world.length:
            law = world.target(output)
            likeliest = law.index(max(law))
            guess = max(range(world.vocabulary), key=world.draft(output).__getitem__)
            output = (*output, likeliest if guess == likeliest else chance.choose(law))
        return output


CHAIN: dict[str, Rule] = {
    "resamples from the target's law": Chain(replace=lambda target, claimed: target),
    "resamples from the reversed residual": Chain(
        replace=lambda target, claimed: normalised(
            [max(q - p, Fraction(0)) for p, q in zip(target, claimed, strict=True)]
        )
    ),
    "swapped ratio": Chain(
        accept=lambda target, claimed: min(Fraction(1), claimed / target) if target else Fraction(1)
    ),
    "accepts at equality too": Chain(
        # A uniform of 60 levels that may be 0: `u <= ratio` accepts one level too many.
        accept=lambda target, claimed: min(Fraction(1), likely_as(target, claimed) + Fraction(1, 60))
    ),
    "draft temperature mismatch": Chain(sampled=sharpened),
    "unnormalised truncated draft law": Chain(
        sampled=lambda law: normalised(truncated(law)), claimed=lambda law: truncated(law)
    ),
    "a slot chosen by its own token": Chain(admitted=lambda claimed: claimed >= Fraction(1, 2)),
    "miss path accepts on argmax": AcceptsOnArgmax(),
}


@pytest.mark.parametrize("rule", CHAIN.values(), ids=CHAIN)
def test_mutants_of_rejection_sampling_are_caught(rule: Rule) -> None:
    assert max(law_error(rule, world, nobody) for world in WORLDS) > VISIBLE


def test_a_known_bias_is_measured_right() -> None:
    """A published example: target (1/2, 1/2), draft (9/10, 1/10), verified only where the draft is sure.

    The output's law is then (0.55, 0.45).
    """

    class TwoTokens(World):
        def target(self, prefix: tuple[int, ...], history: tuple[int, ...] | None = None) -> Law:
            return [Fraction(1, 2), Fraction(1, 2)]

        def draft(self, prefix: tuple[int, ...]) -> Law:
            return [Fraction(9, 10), Fraction(1, 10)]

    rule = Chain(admitted=lambda claimed: claimed > Fraction(1, 2), guesses=1)
    assert law_error(rule, TwoTokens(vocabulary=2, length=1), nobody) == Fraction(5, 100)
