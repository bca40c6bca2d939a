"""Suffix decoding: what followed the last tokens, counted in this request and in what earlier ones were answered.

After Oliaro et al. 2024, "SuffixDecoding". Every end of the request, one token long or more, is looked up among the
strings of its own prompt and output (the *local* counts), and among the outputs of requests that have finished (the
*global* ones), if they have the same cache salt. What followed a string gives a tree: a token is as likely as the
share of the string's occurrences that it followed. The end of the request counts as an occurrence that nothing
followed, so what was seen once before has one half. The tree with the highest score wins, see `suffix_counts`; of
equals a longer match, and the local one.

Settings have vLLM's names. A match of m tokens reaches m × `suffix_decoding_max_spec_factor` tokens ahead, and not
beyond `suffix_decoding_max_tree_depth` with the match; nothing on a path less likely than
`suffix_decoding_min_token_prob` is guessed.

A guess takes 0.1 ms on one core of a Xeon, with Python 3.11, requests of 2,000 tokens and as many as may be kept; one
in a hundred takes 0.5 ms. When a request ends, its output takes 10 µs per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.methods.suffix_automaton import SuffixAutomaton
from paceline.drafting.methods.suffix_matches import NO_PARENT, SuffixBounds, SuffixDraft, best_draft
from paceline.drafting.methods.suffix_outputs import OutputsBySalt
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening, Speculator


@dataclass(slots=True)
class _SuffixRequest:
    """One request: its tokens, and the counts of their strings."""

    opening: Opening
    counts: SuffixAutomaton
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(init=False)
    fresh: bool = True

    def __post_init__(self) -> None:
        self.extend(self.opening.tokens)
        self.tree = TokenTree(len(self.tokens) - 1, self.tokens[-1])

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.counts.append(token)
        self.tokens += tokens
        self.fresh = True

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.opening.tokens) - self.opening.output_tokens :]

    def add(self, guess: SuffixDraft) -> list[int]:
        """Put a guess into the tree, as far as there is room. What came true of the last one is there already."""
        nodes = {NO_PARENT: ROOT}
        new: list[int] = []
        for i, (parent, token) in enumerate(zip(guess.parents, guess.tokens, strict=True)):
            known = self.tree.child(nodes[parent], token)
            if known is None:
                if self.tree.size >= self.opening.max_nodes:
                    return new
                known = self.tree.add(nodes[parent], token, math.log(guess.probabilities[i]))
                new.append(known)
            nodes[i] = known
        return new


class SuffixSpeculator(Speculator):
    """Method `suffix`. It knows only ids, so it serves any vocabulary."""

    method = "suffix"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._width = config.tree_width
        self._least = config.suffix_decoding_min_token_prob
        self._factor = config.suffix_decoding_max_spec_factor
        self._global = OutputsBySalt(self._depth, self._width, config.suffix_decoding_max_cached_requests)
        self._requests: dict[int, _SuffixRequest] = {}

    def open(self, opening: Opening) -> None:
        self._requests[opening.request_id] = _SuffixRequest(opening, SuffixAutomaton(self._depth, self._width))

    def commit(self, commit: Commit) -> None:
        request = self._requests.get(commit.request_id)
        if request is None:
            return
        if request.tree.position != commit.base_position:
            raise DraftError(f"the root is at {request.tree.position}, the commit at {commit.base_position}")
        request.tree.commit(commit.tokens)
        request.extend(commit.tokens)

    def limit(self, limit: Limit) -> None:
        if request := self._requests.get(limit.request_id):
            request.opening = replace(request.opening, max_depth=limit.max_depth, max_nodes=limit.max_nodes)

    def close(self, request_id: int) -> None:
        """What it was answered is what later requests may be answered, too."""
        if request := self._requests.pop(request_id, None):
            self._global.add(request.output, request.opening.cache_salt)

    def grow(self) -> dict[int, Growth]:
        grown = {}
        for request_id, request in self._requests.items():
            if request.fresh:
                request.fresh = False
                nodes = request.add(self._guess(request)) if request.opening.max_nodes else []
                if nodes:
                    grown[request_id] = request.tree.growth(nodes)
        return grown

    def _guess(self, request: _SuffixRequest) -> SuffixDraft:
        bounds = SuffixBounds(self._reach(request.opening.max_depth), request.opening.max_nodes, self._least)
        local = best_draft(SuffixDraft(), request.counts, request.counts.matches(), bounds)
        known = self._global.tree(request.opening.cache_salt)
        if known is None:
            return local
        return best_draft(local, known, known.matches(request.tokens[-self._depth :]), bounds)

    def _reach(self, max_depth: int) -> list[int]:
        """By the match's length. The sum of both is at most the depth to which strings are counted."""
        wanted = (min(int(length * self._factor + 1e-6), max_depth) for length in range(self._depth + 1))
        return [min(reach, self._depth - length) for length, reach in enumerate(wanted)]
