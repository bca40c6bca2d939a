"""What suffix decoding asks of a structure that counts strings of tokens, and the trees it grows from the answers."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Place = TypeVar("Place")
"""Where a structure stands once it has read a string. What it is, only the structure knows."""

Follower = tuple[int, int, Place]
"""How often a string occurs with one more token, the token, and the place of both."""

NO_PARENT = -1
"""In `Guess.parents`: hangs from the root."""


@dataclass(frozen=True, slots=True)
class Match(Generic[Place]):
    """Some of a request's ends, `lengths` tokens long, longest first. All of them occur `count` times, and are followed
    by the same."""

    lengths: range
    count: int
    place: Place


class SuffixCounts(Protocol[Place]):
    """A structure that counts."""

    def followers(self, place: Place) -> Sequence[Follower[Place]]:
        """The tokens that follow most often, most frequent first."""


@dataclass(slots=True)
class Guess:
    """A tree of tokens, likeliest first, and so parents before children. `score`: sum of its paths' probabilities,
    which is how many of them are expected to be accepted."""

    parents: list[int] = field(default_factory=list)
    """Index of each token's parent, or `NO_PARENT`."""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    """Of each token where its parent is right."""
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a tree may grow: `reach[m]` tokens deep from a match of m tokens, at most `nodes` of them, none on a path
    less likely than `least_probability`."""

    reach: Sequence[int]
    nodes: int
    least_probability: float

    def longest(self, lengths: range) -> int:
        """How deep from the best of these matches."""
        return max(self.reach[length] for length in lengths)


def better(best: Guess, counts: SuffixCounts[Place], matches: Iterable[Match[Place]], bounds: Bounds) -> Guess:
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
        guess = grown(counts, match, depth, bounds)
        if (guess.score, match.lengths[0]) > (best.score, matched):
            best, matched = guess, match.lengths[0]
    return best


def grown(counts: SuffixCounts[Place], match: Match[Place], depth: int, bounds: Bounds) -> Guess:
    """What follows a match, the likeliest paths first."""
    guess = Guess()
    frontier: list[tuple[float, int, int, int, int, float, int, Place]] = []
    serial = 0  # breaks ties by age, so that places are never compared

    def offer(parent: int, level: int, path: float, count: int, place: Place) -> None:
        nonlocal serial
        for times, token, there in counts.followers(place):
            probability = times / count
            if path * probability < bounds.least_probability:
                return
            serial += 1
            heapq.heappush(frontier, (-path * probability, serial, parent, level, token, probability, times, there))

    offer(NO_PARENT, 1, 1.0, match.count, match.place)
    while frontier and len(guess.tokens) < bounds.nodes:
        unlikeliness, _, parent, level, token, probability, times, place = heapq.heappop(frontier)
        guess.parents.append(parent)
        guess.tokens.append(token)
        guess.probabilities.append(probability)
        guess.score -= unlikeliness
        if level < depth:
            offer(len(guess.tokens) - 1, level + 1, -unlikeliness, times, place)
    return guess
