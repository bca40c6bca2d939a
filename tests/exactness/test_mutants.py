"""Coupled rules that are almost right: the checker rejects each of them. `test_residual` has those of `residual`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from paceline.core.tree import ROOT, TokenTree
from tests.helpers.rules import Coupled, distribution_error, drafter_changes_output, draw
from tests.helpers.worlds import DRAFTERS, Scene, World, drawn

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
    """Rows of draft tokens have their own noise. The distribution is right, but the output depends on the draft."""
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise((len(prefix), node != ROOT)))


def draw_again_on_a_miss(scene: Scene, node: int) -> int:
    """A draw without a node is repeated once, for a better chance of acceptance."""
    token = draw(scene, node)
    if scene.tree.child(node, token) or not scene.tree.children(node):
        return token
    prefix = scene.prefix(node)
    return drawn(scene.world.target(prefix), scene.chance.noise((len(prefix), "again")))


def draw_by_committed_history(scene: Scene, node: int) -> int:
    """A penalty does not see the path."""
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
    "commits a token that was not drawn": Coupled(walk=walk_without_bonus_on_a_miss),
}


@pytest.mark.parametrize("rule", COUPLED.values(), ids=COUPLED)
def test_mutants_of_the_coupled_rule_are_caught(rule: Coupled) -> None:
    assert any(
        distribution_error(rule, world, drafter) > VISIBLE or drafter_changes_output(rule, world, drafter)
        for world in WORLDS
        for drafter in DRAFTERS.values()
    )
