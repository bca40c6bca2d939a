"""Draws followed down a tree, and what strategies draw with. That they are exact is shown by `test_enumeration`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from paceline.config import STRATEGIES, SamplingParams, StrategyName
from paceline.core.strategies import BUILDERS
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import follow_draws

METHODS = Path(__file__).parents[2] / "docs/methods.md"


@pytest.fixture
def tree() -> TokenTree:
    r"""Root 0, then

    1 ── 2 ── 3
     ╲── 4
    5 ── 6
    """
    tree = TokenTree(10, 0)
    for path in ([1, 2, 3], [1, 4], [5, 6]):
        node = ROOT
        for token in path:
            node = tree.child(node, token) or tree.add(node, token, -0.1)
    return tree


ONE, FIVE = [(1,), (1, 2), (1, 2, 3)], [(5,), (1,), (1, 4), (1, 2)]
WALKS: dict[str, tuple[Sequence[Sequence[int]], Sequence[int], Sequence[int]]] = {
    "plain decoding commits the draw": ([], [7], [7]),
    "an unverified node ends the walk": ([], [1], [1]),
    "an unverified node ends the walk further down": ([(1,)], [1, 2], [1, 2]),
    "the bonus comes after the last accepted token": (ONE, [1, 2, 3, 8], [1, 2, 3, 8]),
    "another draw ends the walk": (ONE, [1, 2, 9, 8], [1, 2, 9]),
    "another draw after the root ends the walk": (ONE, [9, 2, 3, 8], [9]),
    "the first branch": (FIVE, [5, 50, 2, 40, 20], [5, 50]),
    "the second branch's first child": (FIVE, [1, 50, 2, 40, 20], [1, 2, 20]),
    "the second branch's second child": (FIVE, [1, 50, 4, 40, 20], [1, 4, 40]),
    "a node without its parent is not reached": ([(1, 2)], [1, 3], [1]),
}
"""Paths to the verified nodes, draws, and what is committed."""


@pytest.mark.parametrize(("verified", "draws", "committed"), WALKS.values(), ids=WALKS)
def test_the_walk_follows_the_draws(
    tree: TokenTree, verified: Sequence[Sequence[int]], draws: Sequence[int], committed: Sequence[int]
) -> None:
    verdict = follow_draws(tree, [tree.match(path)[-1] for path in verified], draws)
    assert verdict.tokens(tree) == committed
    assert verdict.accepted == tree.match(committed[:-1])


@pytest.mark.parametrize("draws", [[], [1], [1, 2, 3]])
def test_the_root_and_each_verified_node_have_one_draw(tree: TokenTree, draws: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        follow_draws(tree, tree.match([1]), draws)


def test_every_strategy_has_a_verifier_and_a_line_in_the_docs() -> None:
    assert STRATEGIES.keys() == set(get_args(StrategyName))
    assert BUILDERS.keys() - {"relaxed-thinking", "synthetic"} == STRATEGIES.keys()
    ways = METHODS.read_text().split("## Ways to verify")[1].split("\n## ")[0]
    assert STRATEGIES.keys() <= set(re.findall(r"^\| `([a-z-]+)` \|", ways, re.MULTILINE))


def test_every_configurable_strategy_keeps_the_request_s_parameters_but_greedy() -> None:
    asked = SamplingParams(temperature=0.7, top_k=5, presence_penalty=0.5, seed=3)
    effective = {name: strategy.effective_params(asked) for name, strategy in STRATEGIES.items()}
    assert effective.pop("greedy") == asked.model_copy(update={"temperature": 0.0})
    assert effective == dict.fromkeys(STRATEGIES.keys() - {"greedy"}, asked)
    sampled = {name for name, strategy in STRATEGIES.items() if strategy.sampled_drafts}
    assert sampled == {"residual", "logit-comparison"}
