"""Prompt lookup: which earlier occurrence is found, and what is drafted from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams
from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.methods.ngram import FIRST_TOKEN_PROBABILITY, NEXT_TOKEN_PROBABILITY, NGramSpeculator
from paceline.drafting.speculator import Commit, Opening
from tests.helpers.seen import nodes_of, root_of

A, B, C, D, E, X, Y = range(7)


def opening(tokens: Sequence[int], depth: int = 3, nodes: int = 100, key: int = 1) -> Opening:
    return Opening(key, tokens, 0, SamplingParams(), depth, nodes)


def paths(growth: Growth) -> list[tuple[list[int], float]]:
    """The growth's leaves: tokens from the root, and the probability of the path."""
    known: dict[int, tuple[list[int], float]] = {0: ([], 1.0)}
    rows = zip(growth.node_ids, growth.parent_ids, growth.tokens, growth.log_probs, strict=True)
    for id_, parent, token, log_prob in rows:
        tokens, probability = known[parent]
        known[id_] = ([*tokens, token], probability * math.exp(log_prob))
    return [known[id_] for id_ in growth.node_ids if id_ not in growth.parent_ids]


def drafted(tokens: Sequence[int], *, least: int = 1, most: int = 3, width: int = 1, depth: int = 3) -> list[list[int]]:
    ngram = NGramSpeculator(least, most, width)
    ngram.open(opening(tokens, depth))
    grown = ngram.grow()
    return [path for path, _ in paths(grown[1])] if grown else []


def test_the_continuation_is_drafted() -> None:
    assert drafted([A, B, C, D, E, A, B]) == [[C, D, E]]


def test_the_longest_run_wins_over_a_more_recent_one() -> None:
    assert drafted([A, B, C, B, D, D, A, B]) == [[C, B, D]]


def test_of_equal_runs_the_most_recent_wins() -> None:
    assert drafted([A, B, C, C, A, B, D, D, A, B]) == [[D, D, A]]


def test_older_occurrences_that_went_on_otherwise_are_branches() -> None:
    assert drafted([A, B, C, C, A, B, D, D, A, B], width=2) == [[D, D, A], [C, C, A]]


def test_occurrences_that_go_on_alike_share_their_nodes() -> None:
    assert drafted([A, B, C, X, A, B, C, Y, A, B], width=2, depth=2) == [[C, Y], [C, X]]


def test_the_request_s_own_end_is_never_found() -> None:
    assert drafted([A, B, C, D]) == []
    assert drafted([A]) == []


def test_a_run_that_overlaps_itself_goes_on_as_a_loop() -> None:
    assert drafted([X, A, A, A], depth=5) == [[A, A, A, A, A]]
    assert drafted([X, A, B, A, B, A], depth=5) == [[B, A, B, A, B]]


def test_runs_shorter_than_the_least_do_not_count() -> None:
    assert drafted([A, B, X, B], least=2) == []
    assert drafted([A, B, X, A, B], least=2) == [[X, A, B]]


def test_only_the_longest_allowed_run_is_compared() -> None:
    """The older occurrence agrees in three tokens, the recent one in two; only two count."""
    assert drafted([A, B, C, D, X, B, C, E, A, B, C], most=2, depth=1) == [[E]]
    assert drafted([A, B, C, D, X, B, C, E, A, B, C], most=3, depth=1) == [[D]]


def test_output_is_looked_up_too() -> None:
    ngram = NGramSpeculator(1, 3, 1)
    ngram.open(opening([A, B, C]))
    assert ngram.grow() == {}
    ngram.commit(Commit(1, 2, [D, A, B], 0))
    assert [path for path, _ in paths(ngram.grow()[1])] == [[C, D, A]]


def test_accepted_draft_tokens_are_not_sent_again() -> None:
    ngram = NGramSpeculator(1, 3, 1)
    ngram.open(opening([A, B, C, D, E, A, B], depth=2))
    replica = TokenTree(6, B)
    replica.graft(ngram.grow()[1], 100)
    replica.commit([C])
    ngram.commit(Commit(1, 6, [C], 1))
    growth = ngram.grow()[1]
    assert growth.tokens == [E], "D was sent before"
    replica.graft(growth, 100)
    assert [n.token for n in nodes_of(replica)] == [D, E]


def test_confidence_falls_along_a_path_and_with_each_branch() -> None:
    ngram = NGramSpeculator(1, 1, 3)
    ngram.open(opening([A, B, A, C, A, D, A], depth=2))
    probabilities = [probability for _, probability in paths(ngram.grow()[1])]
    first = [FIRST_TOKEN_PROBABILITY * (1 - FIRST_TOKEN_PROBABILITY) ** i * NEXT_TOKEN_PROBABILITY for i in range(3)]
    assert probabilities == pytest.approx(first)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 8),
)
def test_every_draft_token_once_followed_the_same_run(
    tokens: list[int], least: int, more: int, width: int, depth: int, nodes: int
) -> None:
    ngram = NGramSpeculator(least, least + more, width)
    ngram.open(opening(tokens, depth, nodes))
    grown = ngram.grow()
    if not grown:
        return
    assert len(grown[1].node_ids) <= nodes
    tree = TokenTree(len(tokens) - 1, tokens[-1])
    tree.graft(grown[1], 100)
    found = max(n for n in range(least, least + more + 1) if tokens[-n:] in runs(tokens[:-1], n))
    for parent in (root_of(tree), *nodes_of(tree)):
        assert parent.position - tree.position <= depth
        assert len(parent.children) <= width
        assert sum(math.exp(child.log_prob) for child in parent.children.values()) <= 1
        so_far = [*tokens, *(n.token for n in parent.path())]
        for child in parent.children:
            assert [*so_far[-found:], child] in runs(so_far, found + 1)


def runs(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
