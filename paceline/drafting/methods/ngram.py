"""Prompt lookup: what followed the last few tokens when they were seen before.

The longest run of last tokens, `prompt_lookup_min` to `prompt_lookup_max` long, that occurs earlier in the request is
found, the most recent occurrence first; what followed it is the guess. (The rule of vLLM's `ngram` and transformers'
prompt lookup, except that those prefer the earliest occurrence.) Where what followed reaches the end of the request, it
is guessed to go on as a loop. Older occurrences with other continuations become branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening, Speculator

FIRST_TOKEN_PROBABILITY = 0.6
NEXT_TOKEN_PROBABILITY = 0.85
"""Probability of a continuation's first token and of each later one; a further branch at the same place gets as large
a share of what the ones before leave. The target's calibration corrects them."""


@dataclass(slots=True)
class _NGramRequest:
    """One request: its tokens, and where every run of them ends."""

    opening: Opening
    lengths: range
    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    tree: TokenTree = field(init=False)
    fresh: bool = True

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # A run is entered once a token follows it, so the request's own end is never found.
            for length in self.lengths:
                if length <= len(self.tokens):
                    self.ends.setdefault(tuple(self.tokens[-length:]), []).append(len(self.tokens))
            self.tokens.append(token)
        self.fresh = True

    def occurrences(self, most: int) -> Sequence[int]:
        """Where the longest known run of last tokens ended before, most recent first."""
        for length in reversed(self.lengths):
            found = self.ends.get(tuple(self.tokens[-length:])) if length <= len(self.tokens) else None
            if found:
                return found[: -most - 1 : -1]
        return ()

    def continuation(self, end: int) -> list[int]:
        """What followed an occurrence that ended here, as deep as guesses are wanted."""
        period = len(self.tokens) - end
        return [self.tokens[end + i % period] for i in range(self.opening.max_depth)]


class NGramSpeculator(Speculator):
    """Method `ngram`. It knows only ids, so it serves any vocabulary."""

    method = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int, tree_width: int) -> None:
        self._lengths = range(lookup_min, lookup_max + 1)
        self._width = tree_width
        self._lookups: dict[int, _NGramRequest] = {}

    def open(self, opening: Opening) -> None:
        lookup = _NGramRequest(opening, self._lengths)
        lookup.extend(opening.tokens)
        lookup.tree = TokenTree(len(lookup.tokens) - 1, lookup.tokens[-1])
        self._lookups[opening.request_id] = lookup

    def commit(self, commit: Commit) -> None:
        lookup = self._lookups.get(commit.request_id)
        if lookup is None:
            return
        if lookup.tree.position != commit.base_position:
            raise DraftError(f"the root is at {lookup.tree.position}, the commit at {commit.base_position}")
        lookup.tree.commit(commit.tokens)
        lookup.extend(commit.tokens)

    def limit(self, limit: Limit) -> None:
        if lookup := self._lookups.get(limit.request_id):
            lookup.opening = replace(lookup.opening, max_depth=limit.max_depth, max_nodes=limit.max_nodes)

    def close(self, request_id: int) -> None:
        self._lookups.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        grown = {}
        for request_id, lookup in self._lookups.items():
            if lookup.fresh:
                lookup.fresh = False
                nodes = self._guess(lookup)
                if nodes:
                    grown[request_id] = lookup.tree.growth(nodes)
        return grown

    def _guess(self, lookup: _NGramRequest) -> list[int]:
        tree = lookup.tree
        nodes: list[int] = []
        for end in lookup.occurrences(self._width):
            node, probability = ROOT, FIRST_TOKEN_PROBABILITY
            for token in lookup.continuation(end):
                known = tree.child(node, token)
                if known is None:
                    if tree.size >= lookup.opening.max_nodes:
                        return nodes
                    share = probability * (1 - probability) ** len(tree.children(node))
                    known = tree.add(node, token, math.log(share))
                    nodes.append(known)
                node, probability = known, NEXT_TOKEN_PROBABILITY
        return nodes
