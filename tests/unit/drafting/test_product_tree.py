"""Trees from distributions per depth, compared with all paths."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from paceline.config import SamplingParams
from paceline.core.logits_rules import History
from paceline.core.sampling import scores
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.block import draw_rows, grow_product_tree
from paceline.drafting.draw_prediction import RankedTokens, predict_draws
from tests.helpers.llamas import LAWS, VOCABULARY


def random_distribution(rng: random.Random, tokens: int) -> RankedTokens:
    weights = sorted((rng.random() ** 3 for _ in range(tokens)), reverse=True)
    chosen = rng.sample(range(20), tokens)
    return [(token, math.log(weight / sum(weights))) for token, weight in zip(chosen, weights, strict=True)]


def every_path(distributions: Sequence[RankedTokens]) -> dict[tuple[int, ...], float]:
    return {
        tuple(token for token, _ in path): sum(log_prob for _, log_prob in path)
        for depth in range(1, len(distributions) + 1)
        for path in itertools.product(*distributions[:depth])
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0, 1, 5, 30, 1000])
def test_the_likeliest_paths_of_all_are_grown(seed: int, most: int) -> None:
    rng = random.Random(seed)
    distributions = [random_distribution(rng, rng.randint(1, 4)) for _ in range(rng.randint(0, 4))]
    floor = math.log(rng.choice([1e-9, 0.01, 0.1]))
    tree = TokenTree(5, 1)
    new = grow_product_tree(tree, distributions, most, floor)
    likely = {path: chance for path, chance in every_path(distributions).items() if chance > floor}
    best = dict(sorted(likely.items(), key=lambda item: -item[1])[:most])
    assert {tuple(tree.path_tokens(node)): tree.path_log_probs[node] for node in new} == pytest.approx(best)
    assert sorted(new) == list(tree.nodes())


def test_nodes_that_were_there_get_children_and_are_not_counted() -> None:
    """Whether or not the new distributions contain them."""
    tree = TokenTree(0, 0)
    stale, known = tree.add(ROOT, 9, math.log(0.9)), tree.add(ROOT, 1, math.log(0.1))

    def grown() -> set[tuple[int, ...]]:
        distributions = [[(1, math.log(0.6)), (2, math.log(0.4))], [(3, math.log(0.8))]]
        return {tuple(tree.path_tokens(node)) for node in grow_product_tree(tree, distributions, 3, math.log(0.01))}

    assert grown() == {(2,), (9, 3), (2, 3)}
    assert tree.log_prob(stale) == pytest.approx(math.log(0.9))
    assert grown() == {tuple(tree.path_tokens(tree.children(known)[0]))} == {(1, 3)}


def test_nodes_come_in_the_order_of_their_parents() -> None:
    rng = random.Random(3)
    tree = TokenTree(0, 0)
    new = grow_product_tree(tree, [random_distribution(rng, 3) for _ in range(4)], 60, -math.inf)
    growth = tree.growth(new)
    assert len(new) == 60
    assert list(growth.parent_ids) == sorted(growth.parent_ids)
    siblings = [list(map(tree.log_prob, tree.children(node))) for node in (ROOT, *tree.nodes())]
    assert all(each == sorted(each, reverse=True) for each in siblings), "the rank of a guess is its place"
    assert TokenTree(0, 0).graft(growth, 1000) == 60


@pytest.mark.parametrize("distribution", LAWS)
def test_what_is_predicted_is_the_target_s_draw(distribution: SamplingParams) -> None:
    """With the noise of each position; forbidden tokens have probability 0."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, VOCABULARY)
    history = History(distribution, [1, 2, 3], [4, 5], VOCABULARY)
    rows = draw_rows(history, 9, 5)
    assert [row.position for row in rows] == [9, 10, 11, 12, 13]
    expected = scores(logits, rows)
    for ranked, score in zip(predict_draws(logits, rows, VOCABULARY), expected, strict=True):
        assert ranked[0][0] == int(score.argmax())
        assert sum(math.exp(log_prob) for _, log_prob in ranked) == pytest.approx(1, abs=1e-4)
    assert [len(each) for each in predict_draws(logits, rows, 3)] == [3] * 5


def test_a_shortest_length_is_counted_along_the_unknown_guesses() -> None:
    barred = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=9, stop_token_ids=(7,))
    logits = torch.zeros(5, 10).index_fill(1, torch.tensor([7]), 5.0)
    distributions = predict_draws(logits, draw_rows(History(barred, [1], [2], 10), 2, 5), 1)
    assert [each[0][0] == 7 for each in distributions] == [False, False, False, True, True]


def test_columns_may_stand_for_other_tokens() -> None:
    ids = torch.tensor([4, 9])
    [distribution] = predict_draws(torch.tensor([[0.0, 3.0]]), draw_rows(History(LAWS[0], [1], [], 20), 1, 1), 5, ids)
    assert [token for token, _ in distribution] == [9, 4]
