"""The walk, case by case; that it is exact is shown by `test_enumeration`."""

from __future__ import annotations

from typing import get_args

import pytest

from paceline import config
from paceline.config import SamplingParams
from paceline.core.tree import ROOT, TokenTree
from paceline.core.verify import STRATEGIES, strategy_of, walk


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


def at(tree: TokenTree, *path: int) -> int:
    nodes = tree.match(path)
    assert len(nodes) == len(path)
    return nodes[-1]


def test_plain_decoding_commits_the_draw(tree: TokenTree) -> None:
    assert walk(tree, [], [7]) == [7]


def test_an_unverified_node_ends_the_walk(tree: TokenTree) -> None:
    assert walk(tree, [], [1]) == [1]
    assert walk(tree, [at(tree, 1)], [1, 2]) == [1, 2]


def test_accepted_tokens_then_the_bonus(tree: TokenTree) -> None:
    verified = [at(tree, 1), at(tree, 1, 2), at(tree, 1, 2, 3)]
    assert walk(tree, verified, [1, 2, 3, 8]) == [1, 2, 3, 8]
    assert walk(tree, verified, [1, 2, 9, 8]) == [1, 2, 9]
    assert walk(tree, verified, [9, 2, 3, 8]) == [9]


def test_branches_are_distinguished(tree: TokenTree) -> None:
    verified = [at(tree, 5), at(tree, 1), at(tree, 1, 4), at(tree, 1, 2)]
    assert walk(tree, verified, [1, 50, 4, 40, 20]) == [1, 4, 40]
    assert walk(tree, verified, [1, 50, 2, 40, 20]) == [1, 2, 20]
    assert walk(tree, verified, [5, 50, 2, 40, 20]) == [5, 50]


def test_a_node_without_its_parent_is_not_reached(tree: TokenTree) -> None:
    assert walk(tree, [at(tree, 1, 2)], [1, 3]) == [1]


@pytest.mark.parametrize("draws", [[], [1], [1, 2, 3]])
def test_one_draw_for_the_root_and_each_verified_node(tree: TokenTree, draws: list[int]) -> None:
    with pytest.raises(ValueError, match="zip"):
        walk(tree, [at(tree, 1)], draws)


def test_every_configurable_strategy_exists() -> None:
    assert set(STRATEGIES) == set(get_args(config.StrategyName))


def test_promises_of_strategies() -> None:
    asked = SamplingParams(temperature=0.7, top_k=5, presence_penalty=0.5, seed=3)
    assert STRATEGIES["coupled"].effective_params(asked) == asked
    assert STRATEGIES["greedy"].effective_params(asked) == asked.model_copy(update={"temperature": 0.0})
    assert [name for name, strategy in STRATEGIES.items() if strategy.exact] == ["coupled", "residual"]
    assert [name for name, strategy in STRATEGIES.items() if strategy.drafter_invariant] == ["coupled", "greedy"]
    assert [name for name, strategy in STRATEGIES.items() if strategy.sampled_drafts] == [
        "residual",
        "logit-comparison",
    ]


def test_warnings() -> None:
    warnings = {name: strategy.warning for name, strategy in STRATEGIES.items()}
    assert warnings.pop("coupled") == ""
    assert "not drafter-invariant" in warnings.pop("residual")
    assert all("lossy" in caveat for caveat in warnings.values())


def test_keys_that_modify_a_strategy() -> None:
    thinking = {"begin_thinking_phase_token": 1, "end_thinking_phase_token": 2}
    for keys, name in (
        ({"synthetic_acceptance_rate": 0.0}, "synthetic"),
        ({"use_relaxed_acceptance_for_thinking": True, **thinking}, "relaxed-thinking"),
    ):
        strategy = strategy_of(config.SpeculativeConfig(method="ngram", **keys))
        assert (strategy.name, strategy.exact, strategy.drafter_invariant) == (name, False, False)
    assert strategy_of(config.SpeculativeConfig()) == STRATEGIES["coupled"]
