"""Prompt lookup: what followed the last few tokens when they were seen before.

The longest run of last tokens, `prompt_lookup_min` to `prompt_lookup_max` long, that occurs earlier in the request is
found, the most recent occurrence first; what followed it is the guess. (The rule of vLLM's `ngram` and transformers'
prompt lookup, except that those prefer the earliest occurrence.) Further occurrences with other continuations
become branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculators.base import Commit, DraftError, Opening, Speculator
from paceline.tree import Growth, Node, TokenTree

FIRST_GUESS = math.log(0.6)
NEXT_GUESS = math.log(0.85)
"""Confidence in a continuation's first token and in each later one; the target's calibration corrects them."""
BRANCH_DISCOUNT = math.log(0.4)
"""Confidence lost with each older occurrence."""


@dataclass(slots=True)
class _Lookup:
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

    def occurrences(self) -> list[int]:
        """Where the longest known run of last tokens ended before, most recent first."""
        for length in reversed(self.lengths):
            found = self.ends.get(tuple(self.tokens[-length:])) if length <= len(self.tokens) else None
            if found:
                return found[::-1]
        return []


class NGram(Speculator):
    """Method `ngram`. It knows only ids, so it serves any vocabulary."""

    method = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int, tree_width: int) -> None:
        self._lengths = range(lookup_min, lookup_max + 1)
        self._width = tree_width
        self._lookups: dict[int, _Lookup] = {}

    def open(self, opening: Opening) -> None:
        lookup = _Lookup(opening, self._lengths)
        lookup.extend(opening.tokens)
        lookup.tree = TokenTree(len(lookup.tokens) - 1, lookup.tokens[-1])
        self._lookups[opening.request_id] = lookup

    def commit(self, commit: Commit) -> None:
        lookup = self._lookups.get(commit.request_id)
        if lookup is None:
            return
        if lookup.tree.root.position != commit.base_position:
            raise DraftError(f"the root is at {lookup.tree.root.position}, the commit at {commit.base_position}")
        lookup.tree.commit(commit.tokens)
        lookup.extend(commit.tokens)

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

    def _guess(self, lookup: _Lookup) -> list[Node]:
        nodes: list[Node] = []
        for rank, end in enumerate(lookup.occurrences()[: self._width]):
            confidence = FIRST_GUESS + rank * BRANCH_DISCOUNT
            node = lookup.tree.root
            for token in lookup.tokens[end : end + lookup.opening.max_depth]:
                known = node.children.get(token)
                if known is None:
                    if lookup.tree.size >= lookup.opening.max_nodes:
                        return nodes
                    known = lookup.tree.add(node, token, confidence)
                    nodes.append(known)
                node, confidence = known, NEXT_GUESS
        return nodes
