"""What suffix decoding asks of a structure that counts strings of tokens, and the trees it grows from the answers."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

StateT = TypeVar("StateT")
"""Where a structure stands once it has read a string. What it is, only the structure knows."""

Continuation = tuple[int, int, StateT]
"""How often a string occurs with one more token, the token, and the place of both."""

NO_PARENT = -1
"""In `SuffixDraft.parents`: hangs from the root."""


@dataclass(frozen=True, slots=True)
class SuffixMatch(Generic[StateT]):
    """Some of a request's ends, `lengths` tokens long, longest first. All of them occur `count` times, and are followed
    by the same."""

    lengths: range
    count: int
    state: StateT


class SuffixCounts(Protocol[StateT]):
    """A structure that counts."""

    def continuations(self, place: StateT) -> Sequence[Continuation[StateT]]:
        """The tokens that follow most often, most frequent first."""


@dataclass(slots=True)
class SuffixDraft:
    """A tree of tokens, likeliest first, and so parents before children. `score`: sum of its paths' probabilities,
    which is how many of them are expected to be accepted."""

    parents: list[int] = field(default_factory=list)
    """Index of each token's parent, or `NO_PARENT`."""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    """Of each token where its parent is right."""
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class SuffixBounds:
    """How far a tree may grow: `reach[m]` tokens deep from a match of m tokens, at most `nodes` of them, none on a path
    less likely than `least_probability`."""

    depth_by_match_length: Sequence[int]
    nodes: int
    least_probability: float

    def longest(self, lengths: range) -> int:
        """How deep from the best of these matches."""
        return max(self.depth_by_match_length[length] for length in lengths)


def best_draft(
    best: SuffixDraft, counts: SuffixCounts[StateT], matches: Iterable[SuffixMatch[StateT]], bounds: SuffixBounds
) -> SuffixDraft:
    """The guess with the highest score of `best` and of those that these matches give. Of equals `best` wins, or else
    the one with the longest match.

    No tree scores more than its depth, since at each depth the probabilities sum to at most 1. So the matches that may
    reach far are looked at first, and most of the others never.
    """
    matched = sys.maxsize
    for match in sorted(matches, key=lambda match: bounds.longest(match.lengths), reverse=True):
        depth = min(bounds.longest(match.lengths), bounds.nodes)
        if not depth or depth < best.score:
            break
        guess = draft_from_match(counts, match, depth, bounds)
        if (guess.score, match.lengths[0]) > (best.score, matched):
            best, matched = guess, match.lengths[0]
    return best


def draft_from_match(
    counts: SuffixCounts[StateT], match: SuffixMatch[StateT], depth: int, bounds: SuffixBounds
) -> SuffixDraft:
    """What follows a match, the likeliest paths first."""
    guess = SuffixDraft()
    frontier: list[tuple[float, int, int, int, int, float, int, StateT]] = []
    serial = 0  # breaks ties by age, so that places are never compared

    def offer(parent: int, level: int, path: float, count: int, place: StateT) -> None:
        nonlocal serial
        for times, token, there in counts.continuations(place):
            probability = times / count
            if path * probability < bounds.least_probability:
                return
            serial += 1
            heapq.heappush(frontier, (-path * probability, serial, parent, level, token, probability, times, there))

    offer(NO_PARENT, 1, 1.0, match.count, match.state)
    while frontier and len(guess.tokens) < bounds.nodes:
        unlikeliness, _, parent, level, token, probability, times, place = heapq.heappop(frontier)
        guess.parents.append(parent)
        guess.tokens.append(token)
        guess.probabilities.append(probability)
        guess.score -= unlikeliness
        if level < depth:
            offer(len(guess.tokens) - 1, level + 1, -unlikeliness, times, place)
    return guess
