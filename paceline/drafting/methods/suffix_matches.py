"""Draft trees from counts of token strings: the part of suffix decoding that does not depend on how they are stored."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

StateT = TypeVar("StateT")
"""A structure's own reference to a string that it counts."""

Continuation = tuple[int, int, StateT]
"""How often a string occurs followed by a token, the token, and the state of both together."""

NO_PARENT = -1
"""In `SuffixGuesses.parents`: a child of the root."""


@dataclass(frozen=True, slots=True)
class SuffixMatch(Generic[StateT]):
    """Suffixes of a request that occur equally often, `count` times, with the same continuations."""

    lengths: range
    """Longest first."""
    count: int
    state: StateT


class SuffixCounts(Protocol[StateT]):
    """A structure that counts strings."""

    def continuations(self, state: StateT) -> Sequence[Continuation[StateT]]:
        """The tokens that follow most often, most frequent first."""


@dataclass(slots=True)
class SuffixGuesses:
    """A tree of draft tokens, likeliest paths first, so parents come before children."""

    parents: list[int] = field(default_factory=list)
    """The index of each token's parent, or `NO_PARENT`."""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    """The probability of each token after its parent."""
    score: float = 0.0
    """The sum of all path probabilities, which is the expected number of accepted tokens."""


@dataclass(frozen=True, slots=True)
class SuffixBounds:
    """Limits of a draft: its depth by the length of the match, its nodes, and the least probability of a path."""

    depth_by_match_length: Sequence[int]
    nodes: int
    least_probability: float

    def longest(self, lengths: range) -> int:
        """The largest depth of these match lengths."""
        return max(self.depth_by_match_length[length] for length in lengths)


def best_guesses(
    best: SuffixGuesses, counts: SuffixCounts[StateT], matches: Iterable[SuffixMatch[StateT]], bounds: SuffixBounds
) -> SuffixGuesses:
    """The draft with the highest score among `best` and those of these matches. Of equals `best`, then the longest
    match.

    The probabilities at one depth sum to at most 1, so a score is at most the depth. Matches that allow more depth come
    first, and the search ends when the depth is below the best score.
    """
    matched = sys.maxsize
    for match in sorted(matches, key=lambda match: bounds.longest(match.lengths), reverse=True):
        depth = min(bounds.longest(match.lengths), bounds.nodes)
        if not depth or depth < best.score:
            break
        guesses = guesses_of_match(counts, match, depth, bounds)
        if (guesses.score, match.lengths[0]) > (best.score, matched):
            best, matched = guesses, match.lengths[0]
    return best


def guesses_of_match(
    counts: SuffixCounts[StateT], match: SuffixMatch[StateT], depth: int, bounds: SuffixBounds
) -> SuffixGuesses:
    """The likeliest continuations of a match."""
    guesses = SuffixGuesses()
    frontier: list[tuple[float, int, int, int, int, float, int, StateT]] = []
    serial = 0  # breaks ties by age, so that states are never compared

    def push(parent: int, level: int, path: float, count: int, state: StateT) -> None:
        nonlocal serial
        for times, token, following in counts.continuations(state):
            probability = times / count
            if path * probability < bounds.least_probability:
                return
            serial += 1
            heapq.heappush(frontier, (-path * probability, serial, parent, level, token, probability, times, following))

    push(NO_PARENT, 1, 1.0, match.count, match.state)
    while frontier and len(guesses.tokens) < bounds.nodes:
        negative, _, parent, level, token, probability, times, state = heapq.heappop(frontier)
        guesses.parents.append(parent)
        guesses.tokens.append(token)
        guesses.probabilities.append(probability)
        guesses.score -= negative
        if level < depth:
            push(len(guesses.tokens) - 1, level + 1, -negative, times, state)
    return guesses
