"""Prompt lookup and suffix decoding: what they find, and what they draft from it."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculativeConfig
from paceline.core.tree import ROOT
from paceline.drafting import Speculator, build_lookups
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods import ngram as ngram_module
from paceline.drafting.methods.ngram import FIRST_TOKEN_PROBABILITY, NEXT_TOKEN_PROBABILITY
from paceline.drafting.methods.suffix import FinishedOutputs
from paceline.drafting.methods.suffix_tree import CACHE_CHILDREN_FROM, SuffixTree
from tests.helpers.drafts import ngram_draft, suffix_draft
from tests.unit.drafting.drafted import DraftedRequest, finished

A, B, C, D, E, X, Y, Z = range(8)
Leaves = list[tuple[list[int], float]]


def ngram(least: int = 1, most: int = 3, width: int = 1) -> Speculator:
    return ngram_draft(least, most, width)


def suffix(width: int = 1, **settings: Any) -> Speculator:
    keys = {f"suffix_decoding_{key}": value for key, value in settings.items()}
    return suffix_draft(SpeculativeConfig.model_validate({"method": "suffix", "tree_width": width} | keys))


def drafted(speculator: Speculator, tokens: Sequence[int], depth: int = 10, nodes: int = 100) -> Leaves:
    request = finished(speculator, tokens, key=99, depth=depth, nodes=nodes)
    speculator.close(99)
    return request.leaves()


def finish(speculator: Speculator, output: Sequence[int], prompt: Sequence[int] = (Z,), salt: str = "") -> None:
    DraftedRequest(speculator, prompt, key=50, cache_salt=salt).commit(output)
    speculator.close(50)


@pytest.mark.parametrize(
    ("settings", "tokens", "depth", "expected"),
    [
        pytest.param({}, [A, B, C, D, E, A, B], 3, [[C, D, E]], id="what followed"),
        pytest.param({}, [A, B, C, B, D, D, A, B], 3, [[C, B, D]], id="the longest run before a recent one"),
        pytest.param({}, [A, B, C, C, A, B, D, D, A, B], 3, [[D, D, A]], id="of equal runs the most recent"),
        pytest.param({"width": 2}, [A, B, C, C, A, B, D, D, A, B], 3, [[D, D, A], [C, C, A]], id="branches"),
        pytest.param({"width": 2}, [A, B, C, X, A, B, C, Y, A, B], 2, [[C, Y], [C, X]], id="shared nodes"),
        pytest.param({}, [A, B, C, D], 3, [], id="not its own end"),
        pytest.param({}, [A], 3, [], id="one token"),
        pytest.param({}, [X, A, A, A], 5, [[A, A, A, A, A]], id="a loop"),
        pytest.param({}, [X, A, B, A, B, A], 5, [[B, A, B, A, B]], id="a longer loop"),
        pytest.param({"least": 2}, [A, B, X, B], 3, [], id="too short a run"),
        pytest.param({"least": 2}, [A, B, X, A, B], 3, [[X, A, B]], id="long enough a run"),
        # The older occurrence agrees in three tokens, the recent one in two.
        pytest.param({"most": 2}, [A, B, C, D, X, B, C, E, A, B, C], 1, [[E]], id="only two tokens count"),
        pytest.param({"most": 3}, [A, B, C, D, X, B, C, E, A, B, C], 1, [[D]], id="three tokens count"),
    ],
)
def test_prompt_lookup(settings: dict[str, int], tokens: list[int], depth: int, expected: list[list[int]]) -> None:
    assert [path for path, _ in drafted(ngram(**settings), tokens, depth)] == expected


def test_confidence_falls_along_a_path_and_with_each_branch() -> None:
    found = drafted(ngram(most=1, width=3), [A, B, A, C, A, D, A], depth=2)
    first = [FIRST_TOKEN_PROBABILITY * (1 - FIRST_TOKEN_PROBABILITY) ** i * NEXT_TOKEN_PROBABILITY for i in range(3)]
    assert [probability for _, probability in found] == pytest.approx(first)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 8),
    st.integers(0, 9),
)
def test_every_token_of_a_prompt_lookup_once_followed_the_same_run(
    tokens: list[int], least: int, more: int, width: int, depth: int, nodes: int, output: int
) -> None:
    opened = max(1, len(tokens) - output)
    request = DraftedRequest(ngram(least, least + more, width), tokens[:opened], depth=depth, nodes=nodes)
    for token in tokens[opened:]:
        request.commit([token])
    request.grow()
    tree = request.tree
    assert tree.size <= nodes
    assert max(tree.depths) <= depth
    if not tree.size:
        return
    found = max(n for n in range(least, least + more + 1) if tokens[-n:] in runs(tokens[:-1], n))
    for parent in (ROOT, *tree.nodes()):
        children = tree.children(parent)
        assert len(children) <= width
        assert sum(math.exp(tree.log_prob(child)) for child in children) <= 1
        so_far = [*tokens, *tree.path_tokens(parent)]
        for child in children:
            assert [*so_far[-found:], tree.tokens[child]] in runs(so_far, found + 1)


def runs(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]


BEFORE = [A, B, C, D, E, X, A, B, C]
HALVES = [A, B, A, B, A, C, X, A]
"""After A: B in two of four, C in one of four."""


@pytest.mark.parametrize(
    ("settings", "tokens", "limits", "expected"),
    [
        pytest.param({}, BEFORE, {}, [([D, E, X], 0.5)], id="as deep as the match is long"),
        pytest.param({"width": 3}, HALVES, {}, [([B], 0.5), ([C], 0.25)], id="shares become branches"),
        pytest.param({}, HALVES, {}, [([B], 0.5)], id="a chain has the likeliest"),
        pytest.param(
            {"max_spec_factor": 3.0}, [A, B, C, A, B, D, A, B, C, X, A], {}, [([B, C, X], 0.25)], id="a long chain"
        ),
        # Each continuation has probability one half: C and D after A, D after B A.
        pytest.param({}, [A, C, A, C, X, B, A, D, Y, B, A], {"depth": 1}, [([D], 0.5)], id="the longer match"),
        # After E B A, D in one of two, and one token ahead; after B A, C in two of four, and two ahead.
        pytest.param(
            {"max_tree_depth": 4, "min_token_prob": 0.5},
            [B, A, C, X, B, A, C, Y, E, B, A, D, E, B, A],
            {},
            [([D], 0.5)],
            id="the longer match though the other one may reach further",
        ),
        pytest.param(
            {"width": 2}, [A, B, A, C, A, D] * 2 + [A], {"depth": 1}, [([D], 2 / 7), ([C], 2 / 7)], id="the latest"
        ),
    ],
)
def test_suffix_decoding(settings: dict[str, Any], tokens: list[int], limits: dict[str, int], expected: Leaves) -> None:
    assert drafted(suffix(**settings), tokens, **limits) == [(path, pytest.approx(chance)) for path, chance in expected]


@pytest.mark.parametrize(("strategy", "leaves"), [("coupled", 2), ("residual", 1), ("logit-comparison", 1)])
@pytest.mark.parametrize(("method", "tokens"), [("suffix", HALVES), ("ngram", [A, B, C, A, B, D, A, B])])
def test_lookups_draft_chains_for_strategies_that_verify_chains(
    method: str, tokens: list[int], strategy: str, leaves: int
) -> None:
    config = {"method": ["custom_class", method], "speculator": "a.B", "rejection_sampling_strategy": strategy}
    [speculator] = build_lookups(SpeculativeConfig.model_validate(config))
    assert len(drafted(speculator, tokens, depth=1)) == leaves


def test_a_lookup_beside_a_draft_is_built_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MethodInputs] = []
    monkeypatch.setattr(ngram_module, "build", seen.append)
    build_lookups(SpeculativeConfig(method="eagle3", model="head", beside=("ngram",), prompt_lookup_max=7))
    config = seen[0].config
    assert (config.method, config.model, config.beside, config.prompt_lookup_max) == ("ngram", None, (), 7)
    with pytest.raises(ValueError, match="method ngram needs `model`"):
        _ = seen[0].model


@dataclass
class ByHand:
    """The definition: how often each string occurs in some sequences."""

    sequences: Sequence[Sequence[int]]
    depth: int
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tokens in self.sequences:
            for start, length in itertools.product(range(len(tokens)), range(1, self.depth + 1)):
                if start + length <= len(tokens):
                    string = tuple(tokens[start : start + length])
                    self.counts[string] = self.counts.get(string, 0) + 1

    def followers(self, string: tuple[int, ...]) -> dict[int, float]:
        """The share of each token among the string's occurrences."""
        counts = {token: self.counts.get((*string, token), 0) for token in range(8)}
        return {token: count / self.counts[string] for token, count in counts.items() if count}

    def paths(self, string: tuple[int, ...], path: float, levels: int, least: float) -> Iterator[float]:
        """The probabilities of all paths after a string."""
        for token, share in self.followers(string).items() if levels else ():
            if path * share >= least:
                yield path * share
                yield from self.paths((*string, token), path * share, levels - 1, least)


@dataclass
class Case:
    """One random case."""

    number: int

    def __post_init__(self) -> None:
        rng = random.Random(self.number)
        letters = rng.choice([1, 2, 2, 3, 3, 5, 8])
        self.depth = rng.randrange(1, 12)
        self.tokens = _sequence(rng, letters, 60)
        self.opened = rng.randrange(1, len(self.tokens) + 1)
        self.outputs = [_sequence(rng, letters, 25) for _ in range(rng.randrange(1, 8))]
        self.kept = rng.randrange(len(self.outputs) + 1)
        self.factor = rng.choice([0.0, 0.5, 1.0, 1.0, 2.5])
        self.least = rng.choice([0.0, 0.1, 0.3, 1.0])
        self.deepest = rng.randrange(0, 8)
        self.nodes = rng.choice([0, 1, 3, 10, 200])

    def found(self, kept: int) -> list[float]:
        """The path probabilities of suffix decoding's draft, falling."""
        speculator = suffix(
            32,
            max_tree_depth=self.depth,
            max_spec_factor=self.factor,
            min_token_prob=self.least,
            max_cached_requests=kept,
        )
        for output in self.outputs:
            finish(speculator, output)
        request = DraftedRequest(speculator, self.tokens[: self.opened], depth=self.deepest, nodes=self.nodes)
        for token in self.tokens[self.opened :]:
            request.commit([token])
        request.grow()
        return sorted(map(math.exp, request.path_log_probs()), reverse=True)

    def matches(self, counts: ByHand) -> Iterator[tuple[tuple[int, ...], int]]:
        """The suffixes that were counted, shortest first, and the depth of a draft after each."""
        context = self.tokens[-self.depth :]
        for length in range(1, len(context)):
            if (match := tuple(context[-length:])) in counts.counts:
                yield match, min(int(length * self.factor + 1e-6), self.deepest, self.depth - length)

    def best(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The path probabilities of the tree with the highest score; of equals, that of the longest match."""
        counts, best = ByHand(sequences, self.depth), list[float]()
        for match, reach in self.matches(counts):
            found = sorted(counts.paths(match, 1.0, reach, self.least), reverse=True)[: self.nodes]
            if sum(found) >= sum(best):
                best = found
        return best


def _sequence(rng: random.Random, letters: int, longest: int) -> list[int]:
    tokens = rng.choices(range(letters), k=rng.randrange(1, longest))
    return tokens[: rng.randrange(1, 6)] * 20 if rng.random() < 0.2 else tokens


@pytest.mark.parametrize("numbers", [range(first, first + 100) for first in range(0, 500, 100)], ids=str)
def test_the_best_tree_is_that_of_the_definition(numbers: range) -> None:
    """Of the request's own strings, and of those of the outputs that are kept."""
    for case in map(Case, numbers):
        own, others = case.best([case.tokens]), case.best(case.outputs[len(case.outputs) - case.kept :])
        assert case.found(0) == pytest.approx(own)
        better = sum(others) > sum(own) + 1e-9
        assert case.found(case.kept) == pytest.approx(others if better else own)


class TestFinishedRequests:
    def test_their_outputs_are_known_and_their_prompts_are_not(self) -> None:
        speculator = suffix()
        finish(speculator, [A, B, C], prompt=[X, Y, Z])
        assert drafted(speculator, [Y, A]) == [([B], 1.0)]
        assert drafted(speculator, [A, X]) == drafted(speculator, [A, Z]) == []

    def test_output_that_was_there_when_a_request_came_is_output(self) -> None:
        speculator = suffix()
        DraftedRequest(speculator, [X, Y, A, B], output=2).commit([C])
        assert drafted(speculator, [Z, A, B]) == [], "a request is not known to others before it ends"
        speculator.close(1)
        assert drafted(speculator, [Z, A, B]) == [([C], 1.0)]
        assert drafted(speculator, [Z, X]) == []

    def test_a_request_that_is_opened_afresh_counts_once(self) -> None:
        speculator = suffix(width=2)
        for _ in range(3):
            DraftedRequest(speculator, [A, B], output=2)
        speculator.close(1)
        finish(speculator, [A, C])
        assert sorted(drafted(speculator, [Z, A])) == [([B], 0.5), ([C], 0.5)]

    def test_of_equals_the_requests_own_wins(self) -> None:
        speculator = suffix()
        finish(speculator, [A, B])
        finish(speculator, [A, C])
        assert drafted(speculator, [A, D, A]) == [([D], 0.5)]
        finish(speculator, [A, C])
        assert drafted(speculator, [A, D, A]) == [([C], pytest.approx(2 / 3))]

    def test_the_most_frequent_continuations_are_found_after_changes(self) -> None:
        """Those of a string with many continuations are remembered meanwhile."""
        speculator = suffix(max_cached_requests=5, min_token_prob=0.0)
        finish(speculator, [A, 9] * 5)
        finish(speculator, [each for token in range(1, 3 * CACHE_CHILDREN_FROM) for each in (A, token)])
        for output, salt, latest in (
            ([A, 7] * 3, "", 9),
            ([A, 7] * 3, "", 7),
            ([A, 9] * 2, "", 9),
            ([A, 9], "other", 7),  # which takes the place of the oldest output
        ):
            finish(speculator, output, salt=salt)
            assert [path for path, _ in drafted(speculator, [X, A])] == [[latest]]

    @pytest.mark.parametrize(
        ("limits", "added", "known"),
        [
            pytest.param({"requests": 2}, ["AB", "AC", "AD"], {"": "AACD"}, id="the oldest is forgotten"),
            pytest.param({"requests": 9, "tokens": 5}, ["AA", "BBB", "C"], {"": "BBBC"}, id="tokens"),
            pytest.param({"requests": 9, "tokens": 3}, ["AAA", "BBBB"], {"": "AAA"}, id="too long alone"),
            pytest.param({"requests": 1}, ["A", ""], {"": "A"}, id="an empty output is no request"),
            pytest.param({"requests": 0}, ["A"], {"": ""}, id="none"),
            pytest.param({"requests": 9}, ["A1", "B2", "C"], {"1": "A", "2": "B", "": "C", "3": ""}, id="salts"),
            pytest.param(
                {"requests": 4},
                ["A1", "B1", "C2", "D2", "E3"],
                {"1": "B", "2": "CD", "3": "E"},
                id="unused for longest",
            ),
            pytest.param(
                {"requests": 4},
                ["A1", "B1", "C2", "D2", "1", "E3"],
                {"1": "AB", "2": "D", "3": "E"},
                id="looked up last",
            ),
            pytest.param(
                {"requests": 4}, ["A1", "B1", "C2", "D2", "E1", "F3"], {"1": "BE", "2": "D", "3": "F"}, id="used last"
            ),
            pytest.param(
                {"requests": 9, "tokens": 5},
                ["AA1", "BB2", "CC3"],
                {"1": "", "2": "BB", "3": "CC"},
                id="over all salts",
            ),
        ],
    )
    def test_the_oldest_outputs_are_forgotten(
        self, limits: dict[str, int], added: list[str], known: dict[str, str]
    ) -> None:
        """Letters are tokens, a digit is the salt. Of the salt that was not used for longest, the oldest goes. A digit
        alone is looked up."""
        outputs = FinishedOutputs(4, 9, **limits)
        for text in added:
            salt = text.strip("ABCDEF")
            outputs.add(list(map(ord, text.removesuffix(salt))), salt)
            if text == salt:
                outputs.tree(salt)
        for salt, letters in known.items():
            tree = outputs.tree(salt)
            counts = tree.continuations((0, 0)) if tree else []
            assert sorted((chr(token), count) for count, token, _ in counts) == [
                (letter, letters.count(letter)) for letter in sorted(set(letters))
            ]


class Output(list[int]):
    """A list that can be referred to weakly."""


def tree_of(outputs: Sequence[list[int]]) -> SuffixTree:
    counts = SuffixTree(6, 1000)
    for output in outputs:
        counts.add(output)
    return counts


def test_a_tree_forgets_removed_sequences() -> None:
    rng = random.Random(1)
    counts, kept, sizes = tree_of([]), list[Output](), list[int]()
    for _ in range(60):
        kept.append(Output(_sequence(rng, 3, 40)))
        counts.add(kept[-1])
        if len(kept) > 5:
            gone = weakref.ref(kept[0])
            counts.remove(kept.pop(0))
            assert gone() is None, "no node refers to a removed sequence"
        assert counts.nodes == tree_of(kept).nodes, "the same size as a tree that never had the others"
        assert counts.nodes < 2 * sum(map(len, kept)), "fewer than two nodes for each token"
        sizes.append(len(pickle.dumps(counts)))
    assert max(sizes[30:]) < 1.5 * max(sizes[:30]), "unused nodes are used again"
    for output in kept:
        counts.remove(output)
    assert counts.nodes == 0


@pytest.mark.parametrize("speculator", [suffix(), ngram()], ids=["suffix", "ngram"])
def test_surviving_nodes_count_towards_the_limit(speculator: Speculator) -> None:
    request = finished(speculator, [A, B, C, D, E, X, Y, A, B], nodes=2)
    assert [path for path, _ in request.leaves()] == [[C, D]]
    request.commit([C])
    assert [path for path, _ in request.grow()] == [(D, E)]
