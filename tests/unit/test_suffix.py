"""Suffix decoding: counts equal those of the definition, and drafts follow from the counts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.tree import TokenTree
from paceline.drafting.methods.suffix import SuffixSpeculator
from paceline.drafting.methods.suffix_automaton import SuffixAutomaton
from paceline.drafting.methods.suffix_matches import NO_PARENT, SuffixBounds, SuffixDraft, best_draft
from paceline.drafting.methods.suffix_outputs import FinishedOutputs
from paceline.drafting.methods.suffix_tree import CACHE_CHILDREN_FROM, SuffixTree
from paceline.drafting.speculator import Commit, Limit, Opening
from tests.helpers.seen import nodes_of

A, B, C, D, E, X, Y, Z = range(8)
ALL = 1000
"""More continuations than any string has."""


@dataclass
class ByHand:
    """The definition: how often each string occurs in some sequences."""

    sequences: Sequence[Sequence[int]]
    depth: int
    counts: dict[tuple[int, ...], int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = {}
        for tokens in self.sequences:
            for start, length in itertools.product(range(len(tokens)), range(1, self.depth + 1)):
                if start + length <= len(tokens):
                    string = tuple(tokens[start : start + length])
                    self.counts[string] = self.counts.get(string, 0) + 1

    def count(self, string: Sequence[int]) -> int:
        return self.counts.get(tuple(string), 0)

    def continuations_of(self, string: Sequence[int]) -> dict[int, int]:
        counts = {token: self.count([*string, token]) for token in range(8)}
        return {token: count for token, count in counts.items() if count}

    def best(self, context: Sequence[int], factor: float, least: float, bounds: SuffixBounds) -> list[float]:
        """The path probabilities of the tree with the highest score, falling; of equals, that of the longest match."""
        best: list[float] = []
        for length in range(1, len(context)):
            match = tuple(context[-length:])
            if not self.count(match):
                break
            reach = min(int(length * factor + 1e-6), bounds.depth_by_match_length[-1], self.depth - length)
            found = sorted(self.paths(match, 1.0, reach, least), reverse=True)[: bounds.nodes]
            if sum(found) >= sum(best):
                best = found
        return best

    def paths(self, string: tuple[int, ...], path: float, levels: int, least: float) -> Iterator[float]:
        for token, count in self.continuations_of(string).items() if levels else ():
            probability = path * (count / self.count(string))
            if probability >= least:
                yield probability
                yield from self.paths((*string, token), probability, levels - 1, least)


def chance(case: int) -> random.Random:
    return random.Random(case)


def sequence(rng: random.Random, letters: int, longest: int) -> list[int]:
    tokens = rng.choices(range(letters), k=rng.randrange(1, longest))
    return tokens[: rng.randrange(1, 6)] * 20 if rng.random() < 0.2 else tokens


def paths(guess: SuffixDraft) -> list[float]:
    """Every node's path probability."""
    found: list[float] = []
    for parent, probability in zip(guess.parents, guess.probabilities, strict=True):
        found.append(probability * (1.0 if parent == NO_PARENT else found[parent]))
    return found


def strings(guess: SuffixDraft) -> list[list[int]]:
    """Every node's path."""
    found: list[list[int]] = []
    for parent, token in zip(guess.parents, guess.tokens, strict=True):
        found.append([*([] if parent == NO_PARENT else found[parent]), token])
    return found


def automaton(tokens: Sequence[int], depth: int, width: int = ALL) -> SuffixAutomaton:
    counts = SuffixAutomaton(depth, width)
    for token in tokens:
        counts.append(token)
    return counts


def tree(sequences: Sequence[list[int]], depth: int, width: int = ALL) -> SuffixTree:
    counts = SuffixTree(depth, width)
    for tokens in sequences:
        counts.add(tokens)
    return counts


@dataclass
class Case:
    """One random case."""

    number: int

    def __post_init__(self) -> None:
        rng = chance(self.number)
        letters = rng.choice([1, 2, 2, 3, 3, 5, 8])
        self.depth = rng.randrange(1, 12)
        self.tokens = sequence(rng, letters, 60)
        self.outputs = [sequence(rng, letters, 25) for _ in range(rng.randrange(1, 8))]
        self.evicted = rng.randrange(len(self.outputs) + 1)
        self.factor = rng.choice([0.0, 0.5, 1.0, 1.0, 2.5])
        self.least = rng.choice([0.0, 0.1, 0.3, 1.0])
        deepest = rng.randrange(0, 8)
        reach = [min(int(m * self.factor + 1e-6), deepest, self.depth - m) for m in range(self.depth)]
        self.bounds = SuffixBounds([*reach, deepest], rng.choice([0, 1, 3, 10, 200]), self.least)

    @property
    def context(self) -> list[int]:
        return self.tokens[-self.depth :]

    def best(self, counts: ByHand) -> list[float]:
        return counts.best(self.context, self.factor, self.least, self.bounds)


CASES = pytest.mark.parametrize("case", [range(first, first + 50) for first in range(0, 500, 50)], ids=str)


@CASES
def test_an_automaton_counts_like_the_definition(case: range) -> None:
    for each in map(Case, case):
        counts = SuffixAutomaton(each.depth, ALL)
        for end, token in enumerate(each.tokens, 1):
            counts.append(token)
            if end % 7 == 0 or end == len(each.tokens):
                seen = ByHand([each.tokens[:end]], each.depth)
                context = each.tokens[max(0, end - each.depth) : end]
                found = {length: match for match in counts.matches() for length in match.lengths}
                followed = {m for m in range(1, len(context)) if seen.continuations_of(context[-m:])} - {each.depth}
                assert set(found) == followed
                for length, match in found.items():
                    assert match.count == seen.count(context[-length:])
                    continuations_of = {token: count for count, token, _ in counts.continuations(match.state)}
                    assert continuations_of == seen.continuations_of(context[-length:])


@CASES
def test_a_tree_counts_like_the_definition_after_removals(case: range) -> None:
    for each in map(Case, case):
        counts = tree(each.outputs, each.depth)
        for gone in each.outputs[: each.evicted]:
            counts.remove(gone)
        left = ByHand(each.outputs[each.evicted :], each.depth)
        found = {match.lengths[0]: match for match in counts.matches(each.context)}
        assert set(found) == {m for m in range(1, len(each.context)) if left.count(each.context[-m:])}
        for length, match in found.items():
            assert match.count == left.count(each.context[-length:])
            if length < each.depth:
                continuations_of = {token: count for count, token, _ in counts.continuations(match.state)}
                assert continuations_of == left.continuations_of(each.context[-length:])


@CASES
def test_the_best_tree_is_that_of_the_definition(case: range) -> None:
    for each in map(Case, case):
        own = automaton(each.tokens, each.depth)
        local = best_draft(SuffixDraft(), own, own.matches(), each.bounds)
        assert paths(local) == pytest.approx(each.best(ByHand([each.tokens], each.depth)))
        assert local.score == pytest.approx(sum(paths(local)))

        others = tree(each.outputs, each.depth)
        found = best_draft(SuffixDraft(), others, others.matches(each.context), each.bounds)
        assert paths(found) == pytest.approx(each.best(ByHand(each.outputs, each.depth)))


@CASES
def test_a_chain_is_what_greedy_choices_give_however_ties_are_broken(case: range) -> None:
    for each in map(Case, case):
        counts = automaton(each.tokens, each.depth, width=1)
        guess = best_draft(SuffixDraft(), counts, counts.matches(), each.bounds)
        seen = ByHand([each.tokens], each.depth)
        scores: dict[int, set[float]] = {}
        for length in range(1, len(each.context)):
            reach = min(each.bounds.depth_by_match_length[length], each.bounds.nodes)
            chains = greedy(seen, tuple(each.context[-length:]), reach, each.least)
            scores[length] = {round(sum(chain), 9) for chain in chains}
        lowest = max((min(each) for each in scores.values()), default=0.0)
        highest = max((max(each) for each in scores.values()), default=0.0)
        assert lowest - 1e-6 <= guess.score <= highest + 1e-6
        assert round(guess.score, 9) in {0.0, *itertools.chain(*scores.values())}
        assert guess.parents == [NO_PARENT, *range(len(guess.tokens) - 1)][: len(guess.tokens)]


def greedy(seen: ByHand, string: tuple[int, ...], levels: int, least: float, path: float = 1.0) -> list[list[float]]:
    """Path probabilities of all chains of most frequent followers."""
    continuations_of = seen.continuations_of(string) if levels else {}
    most = max(continuations_of.values(), default=0)
    path *= most / max(seen.count(string), 1)
    if not most or path < least:
        return [[]]
    likeliest = [token for token, count in continuations_of.items() if count == most]
    return [[path, *rest] for token in likeliest for rest in greedy(seen, (*string, token), levels - 1, least, path)]


def test_a_tree_forgets_removed_sequences() -> None:
    rng = chance(1)
    outputs = [sequence(rng, 3, 40) for _ in range(60)]
    counts = SuffixTree(6, ALL)
    for i, output in enumerate(outputs):
        counts.add(output)
        if i >= 5:
            counts.remove(outputs[i - 5])
            left = tree(outputs[i - 4 : i + 1], 6)
            assert counts.nodes == left.nodes, "the same size as a tree that never had the others"
            names = {id(tokens) for tokens in counts._sequences} - {id(each) for each in outputs[i - 4 : i + 1]}
            assert all(not tokens for tokens in counts._sequences if id(tokens) in names), (
                "and no node refers to a removed sequence"
            )
    for output in outputs[-5:]:
        counts.remove(output)
    assert counts.nodes == 0
    assert len(counts._counts) < 2 * 6 * 40 * 6, "unused nodes are used again"


def test_a_tree_has_fewer_than_two_nodes_for_each_token() -> None:
    rng = chance(2)
    outputs = [rng.choices(range(4), k=200) for _ in range(10)]
    outputs += outputs
    assert tree(outputs, 24).nodes < 2 * 2000


def test_an_automaton_has_fewer_than_two_states_for_each_token() -> None:
    assert len(automaton(chance(3).choices(range(3), k=1000), 24)._lengths) < 2000
    assert len(automaton([A] * 1000, 24)._lengths) == 1001


def test_the_most_frequent_continuations_are_found_after_changes() -> None:
    counts = SuffixTree(4, 2)
    first = [each for token in range(1, 3 * CACHE_CHILDREN_FROM) for each in (A, token)]
    counts.add(first)
    counts.add(list(first))
    counts.add([A, 7, A, 7, A, 9, X])

    def found() -> list[tuple[int, int]]:
        [match] = [match for match in counts.matches([X, A]) if match.lengths[0] == 1]
        return [(token, count) for count, token, _ in counts.continuations(match.state)]

    assert found() == [(7, 4), (9, 3)]
    counts.add([A, 9, A, 9, A, 9])
    assert found() == [(9, 6), (7, 4)]
    counts.remove(first)
    assert found() == [(9, 5), (7, 3)]


def test_of_equally_frequent_continuations_the_latest_are_found() -> None:
    counts = automaton([A, B, A, C, A, D, A, B, A, C, A, D, A], depth=4, width=2)
    *_, match = counts.matches()
    assert match.lengths[-1] == 1
    assert [(count, token) for count, token, _ in counts.continuations(match.state)] == [(2, D), (2, C)]


class TestFinishedOutputs:
    def known(self, outputs: FinishedOutputs, salt: str = "") -> dict[int, int]:
        """How often each token is counted."""
        tree = outputs.tree(salt)
        return {} if tree is None else {token: count for count, token, _ in tree.continuations((0, 0))}

    @pytest.mark.parametrize(
        ("limits", "added", "known"),
        [
            ({"requests": 2}, [[A, B], [A, C], [A, D]], {A: 2, C: 1, D: 1}),
            ({"requests": 100, "tokens": 5}, [[A, A], [B, B, B], [C]], {B: 3, C: 1}),
            pytest.param({"requests": 9, "tokens": 3}, [[A, A, A], [B] * 4], {A: 3}, id="too long alone"),
            pytest.param({"requests": 1}, [[A], []], {A: 1}, id="an empty output is no request"),
            ({"requests": 0}, [[A]], {}),
        ],
    )
    def test_the_oldest_outputs_are_forgotten(
        self, limits: dict[str, int], added: list[list[int]], known: dict[int, int]
    ) -> None:
        outputs = FinishedOutputs(4, 9, **limits)
        for output in added:
            outputs.add(output, "")
        assert self.known(outputs) == known

    def test_salts_are_apart(self) -> None:
        outputs = FinishedOutputs(4, 9, requests=9)
        for token, salt in ((A, "one"), (B, "two"), (C, "")):
            outputs.add([token], salt)
        assert [set(self.known(outputs, salt)) for salt in ("one", "two", "", "new")] == [{A}, {B}, {C}, set()]

    def test_the_salt_unused_for_longest_loses_its_oldest_output(self) -> None:
        outputs = FinishedOutputs(4, 9, requests=4)
        for token, salt in ((A, "one"), (B, "one"), (C, "two"), (D, "two")):
            outputs.add([token], salt)
        outputs.add([E], "three")
        assert set(self.known(outputs, "one")) == {B}
        outputs.add([X], "three")  # "one" was looked up last
        assert [set(self.known(outputs, salt)) for salt in ("two", "one", "three")] == [{D}, {B}, {E, X}]

    def test_the_token_limit_holds_over_all_salts(self) -> None:
        outputs = FinishedOutputs(4, 9, requests=100, tokens=5)
        for salt in map(str, range(50)):
            outputs.add([A, B], salt)
        assert [salt for salt in map(str, range(50)) if self.known(outputs, salt)] == ["48", "49"]


def suffix(width: int = 1, **settings: Any) -> SuffixSpeculator:
    keys = {f"suffix_decoding_{key}": value for key, value in settings.items()}
    return SuffixSpeculator(SpeculativeConfig.model_validate({"method": "suffix", "tree_width": width} | keys))


def opening(tokens: Sequence[int], key: int = 1, *, output: int = 0, depth: int = 10, nodes: int = 100) -> Opening:
    return Opening(key, tokens, output, SamplingParams(), depth, nodes)


def leaves(growth: Growth) -> list[tuple[list[int], float]]:
    """Tokens from the root to each leaf, and the probability of the path."""
    known: dict[int, tuple[list[int], float]] = {0: ([], 1.0)}
    rows = zip(growth.node_ids, growth.parent_ids, growth.tokens, growth.log_probs, strict=True)
    for id_, parent, token, log_prob in rows:
        tokens, probability = known[parent]
        known[id_] = ([*tokens, token], probability * math.exp(log_prob))
    return [known[id_] for id_ in growth.node_ids if id_ not in growth.parent_ids]


def drafted(speculator: SuffixSpeculator, tokens: Sequence[int], **more: int) -> list[tuple[list[int], float]]:
    speculator.open(opening(tokens, 99, **more))
    grown = speculator.grow()
    speculator._drafts.pop(99)
    return leaves(grown[99]) if 99 in grown else []


def finish(speculator: SuffixSpeculator, output: Sequence[int], prompt: Sequence[int] = (Z,)) -> None:
    speculator.open(opening(list(prompt), 50))
    speculator.commit(Commit(50, len(prompt) - 1, output, 0))
    speculator.close(50)


class TestSuffix:
    def test_the_draft_is_as_deep_as_the_match_is_long(self) -> None:
        assert drafted(suffix(), [A, B, C, D, E, X, A, B, C]) == [([D, E, X], 0.5)]

    def test_the_factor_scales_the_depth(self) -> None:
        tokens = [A, B, C, D, E, X, A, B]
        assert drafted(suffix(max_spec_factor=0.5), tokens) == [([C], 0.5)]
        assert drafted(suffix(max_spec_factor=2.0), tokens) == [([C, D, E, X], 0.5)]
        assert drafted(suffix(max_spec_factor=0.0), tokens) == []

    def test_match_and_guess_together_are_no_deeper_than_the_tree(self) -> None:
        assert drafted(suffix(max_tree_depth=5), [A, B, C, D, E, X, A, B, C]) == [([D, E], 0.5)]
        assert drafted(suffix(max_tree_depth=1), [A, A, A]) == []

    def test_the_limits_of_the_request_hold(self) -> None:
        tokens = [A, B, C, D, E, X, A, B, C]
        assert drafted(suffix(), tokens, depth=2) == [([D, E], 0.5)]
        assert drafted(suffix(), tokens, nodes=1) == [([D], 0.5)]
        assert drafted(suffix(), tokens, nodes=0) == []

    def test_shares_become_branches(self) -> None:
        tokens = [A, B, A, B, A, C, X, A]
        assert drafted(suffix(width=3), tokens) == [([B], pytest.approx(0.5)), ([C], pytest.approx(0.25))]
        assert drafted(suffix(width=1), tokens) == [([B], pytest.approx(0.5))]

    def test_unlikely_paths_are_not_drafted(self) -> None:
        tokens = [A, B, A, B, A, C, X, A]
        assert drafted(suffix(width=3, min_token_prob=0.3), tokens) == [([B], pytest.approx(0.5))]
        assert drafted(suffix(width=3, min_token_prob=0.25), tokens)[1:] == [([C], pytest.approx(0.25))]
        assert drafted(suffix(width=3, min_token_prob=0.6), tokens) == []

    def test_finished_outputs_are_known_and_their_prompts_are_not(self) -> None:
        speculator = suffix()
        finish(speculator, [A, B, C], prompt=[X, Y, Z])
        assert drafted(speculator, [Y, A]) == [([B], 1.0)]
        assert drafted(speculator, [A, X]) == []
        assert drafted(speculator, [A, Z]) == []

    def test_output_that_was_there_when_a_request_came_is_output(self) -> None:
        speculator = suffix()
        speculator.open(opening([X, Y, A, B], output=2))
        speculator.commit(Commit(1, 3, [C], 0))
        speculator.close(1)
        assert drafted(speculator, [Z, A, B]) == [([C], 1.0)]
        assert drafted(speculator, [Z, X]) == []

    def test_a_request_is_not_known_to_others_before_it_ends(self) -> None:
        speculator = suffix()
        speculator.open(opening([A, B, C], output=3))
        assert drafted(speculator, [Z, A]) == []
        speculator.close(1)
        assert drafted(speculator, [Z, A]) == [([B], 1.0)]

    def test_a_request_that_is_opened_afresh_counts_once(self) -> None:
        speculator = suffix(width=2)
        for _ in range(3):
            speculator.open(opening([A, B], output=2))
        speculator.close(1)
        finish(speculator, [A, C])
        assert sorted(drafted(speculator, [Z, A])) == [([B], 0.5), ([C], 0.5)]

    def test_no_more_requests_are_kept_than_asked(self) -> None:
        speculator = suffix(max_cached_requests=1)
        finish(speculator, [A, B])
        finish(speculator, [A, C])
        assert drafted(speculator, [Z, A]) == [([C], 1.0)]
        speculator = suffix(max_cached_requests=0)
        finish(speculator, [A, B])
        assert drafted(speculator, [Z, A]) == []

    def test_of_equals_the_request_s_own_wins(self) -> None:
        speculator = suffix()
        finish(speculator, [A, B])
        finish(speculator, [A, C])
        assert drafted(speculator, [A, D, A]) == [([D], 0.5)]
        finish(speculator, [A, C])
        assert drafted(speculator, [A, D, A]) == [([C], pytest.approx(2 / 3))]

    def test_of_equals_the_longer_match_wins(self) -> None:
        """Each continuation has probability one half: C and D after A, D after B A."""
        tokens = [A, C, A, C, X, B, A, D, Y, B, A]
        assert drafted(suffix(), tokens, depth=1) == [([D], 0.5)]

    def test_of_equals_the_longer_match_wins_though_the_other_one_may_reach_further(self) -> None:
        """After E B A, D in one of two, and one token ahead; after B A, C in two of four, and two ahead."""
        tokens = [B, A, C, X, B, A, C, Y, E, B, A, D, E, B, A]
        assert drafted(suffix(max_tree_depth=4, min_token_prob=0.5), tokens) == [([D], 0.5)]
        assert drafted(suffix(max_tree_depth=4, min_token_prob=0.5), tokens[4:]) == [([D], 0.5)]

    def test_output_is_looked_up_too(self) -> None:
        speculator = suffix()
        speculator.open(opening([A, B, C]))
        assert speculator.grow() == {}
        speculator.commit(Commit(1, 2, [D, A, B], 0))
        assert leaves(speculator.grow()[1]) == [([C, D], 0.5)]

    def test_accepted_draft_tokens_are_not_sent_again(self) -> None:
        speculator = suffix()
        speculator.open(opening([A, B, C, D, E, X, Y, A, B]))
        replica = TokenTree(8, B)
        replica.graft(speculator.grow()[1], 100)
        assert [n.token for n in nodes_of(replica)] == [C, D]
        replica.commit([C])
        speculator.commit(Commit(1, 8, [C], 1))
        growth = speculator.grow()[1]
        assert growth.tokens == [E, X], "D was sent before"
        replica.graft(growth, 100)
        assert [n.token for n in nodes_of(replica)] == [D, E, X]

    def test_a_tree_that_is_full_takes_the_likeliest(self) -> None:
        """Surviving nodes count towards the limit."""
        speculator = suffix()
        speculator.open(opening([A, B, C, D, E, X, Y, A, B], nodes=2))
        assert speculator.grow()[1].tokens == [C, D]
        speculator.commit(Commit(1, 8, [C], 1))
        assert speculator.grow()[1].tokens == [E]

    def test_surviving_nodes_count_towards_the_limit(self) -> None:
        speculator = suffix()
        speculator.open(opening([B, B, B, B, D, B, B], nodes=2))
        assert speculator.grow()[1].tokens == [B, D]
        speculator.commit(Commit(1, 6, [B], 1))
        assert speculator.grow()[1].tokens == [B], "D survives, so only one node is left"

    def test_a_paused_request_follows_its_commits_and_grows_nothing(self) -> None:
        speculator = suffix()
        speculator.open(opening([A, B, C, D, A, B]))
        speculator.limit(Limit(1, 0, 0))
        assert speculator.grow() == {}
        speculator.commit(Commit(1, 5, [C], 0))
        assert speculator.grow() == {}
        speculator.limit(Limit(1, 10, 100))
        speculator.commit(Commit(1, 6, [D], 0))
        assert leaves(speculator.grow()[1]) == [([A, B, C, D], 0.5)]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 8),
    st.lists(st.integers(0, 3), max_size=20),
)
def test_a_tree_stays_within_its_limits(
    tokens: list[int], width: int, depth: int, nodes: int, commits: list[int]
) -> None:
    speculator = suffix(width=width)
    speculator.open(opening(tokens, depth=depth, nodes=nodes))
    replica = TokenTree(len(tokens) - 1, tokens[-1])
    for position, token in enumerate([*commits, 0], len(tokens) - 1):
        for growth in speculator.grow().values():
            assert replica.graft(growth, nodes) == len(growth), "no node is sent twice, or beyond the limit"
        assert all(node.position - replica.position <= depth for node in nodes_of(replica))
        replica.commit([token])
        speculator.commit(Commit(1, position, [token], 0))
