"""Every output of tiny worlds, enumerated: with any drafter the distribution is exactly the target's.

Probabilities are fractions, so the error has to be 0. Rules that are almost right have an error: the checker can fail.
`test_residual.py` does the same for `residual`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction

import pytest

from paceline.core.tree import ROOT, TokenTree
from tests.exactness.chance import Chance, distribution_of
from tests.exactness.rules import Coupled, Draw, distribution_error, drafter_changes_output, draw
from tests.exactness.worlds import DRAFTERS, Drafter, Scene, Tokens, World, drawn

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
def test_the_output_is_the_target_s_whatever_the_drafter(world: World, drafter: Drafter) -> None:
    assert distribution_error(Coupled(), world, drafter) == 0
    assert not drafter_changes_output(Coupled(), world, drafter)


# The smallest first: mutants that waste noise take long to count.
MUTANT_WORLDS = [World(vocabulary=2, length=2), *(World(vocabulary=3, length=3, seed=seed) for seed in range(3))]
VISIBLE = Fraction(1, 100)
"""Errors below this would make a mutant hard to see by other means; none of ours hides that well."""


def noise_by(key: Callable[[Scene, int], Hashable]) -> Draw:
    """Draws right but for the key of the noise."""
    return lambda scene, node: drawn(scene.world.target(scene.prefix(node)), scene.chance.noise(key(scene, node)))


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


def follow_into_unverified(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
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


def follow_to_a_sibling(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """Any verified child will do."""
    draw_after = dict(zip([ROOT, *verified], draws, strict=True))
    node = ROOT
    while True:
        draw = draw_after[node]
        children = {tree.tokens[child]: child for child in tree.children(node) if child in draw_after}
        if not children:
            return [*tree.path_tokens(node), draw]
        node = children.get(draw) or next(iter(children.values()))


def follow_without_bonus_on_a_miss(tree: TokenTree, verified: Sequence[int], draws: Sequence[int]) -> list[int]:
    """The most praised child is committed where nothing was accepted, so that a step is never wasted."""
    draw_after = dict(zip([ROOT, *verified], draws, strict=True))
    token = draw_after[ROOT]
    children = tree.children(ROOT)
    if tree.child(ROOT, token) is None and children:
        return [tree.tokens[max(children, key=tree.log_prob)]]
    return [token]


MUTANTS = {
    "noise reused across positions": Coupled(draw=noise_by(lambda scene, node: "everywhere")),
    "noise keyed by depth": Coupled(draw=noise_by(lambda scene, node: scene.tree.depths[node])),
    # The distribution is right, but the output depends on the draft.
    "noise keyed by the guess": Coupled(draw=noise_by(lambda scene, node: (len(scene.prefix(node)), node != ROOT))),
    "drawn again on a miss": Coupled(draw=draw_again_on_a_miss),
    "penalties not advanced along the path": Coupled(draw=draw_by_committed_history),
    "walks into an unverified child": Coupled(follow=follow_into_unverified),
    "accepts a sibling": Coupled(follow=follow_to_a_sibling),
    "commits a token that was not drawn": Coupled(follow=follow_without_bonus_on_a_miss),
}


@pytest.mark.parametrize("rule", MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_the_coupled_rule_are_caught(rule: Coupled) -> None:
    assert any(
        distribution_error(rule, world, drafter) > VISIBLE or drafter_changes_output(rule, world, drafter)
        for world in MUTANT_WORLDS
        for drafter in DRAFTERS.values()
    )
