"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding"): the tokens that followed the request's last tokens before.

Every suffix of the request is looked up among the strings of its own prompt and output (*local* counts), and among the
outputs of finished requests with the same cache salt (*global* counts). What followed a suffix gives a tree: the
probability of a token is its share of the suffix's occurrences. The request's end counts as an occurrence that nothing
followed, so a continuation seen once has probability one half. The tree with the highest score wins (`suffix_matches`);
of equals, the one with the longer match, then the local one.

Settings have vLLM's names. A match of m tokens gives nodes at most m * `suffix_decoding_max_spec_factor` deep; match
and depth together are at most `suffix_decoding_max_tree_depth`. Paths less likely than `suffix_decoding_min_token_prob`
are left out.

A look-up takes 0.1 ms on one core of a Xeon, with Python 3.11, requests of 2,000 tokens and as many outputs as may be
kept; one in a hundred takes 0.5 ms. When a request ends, adding its output takes 10 µs per token.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.config import SpeculativeConfig
from paceline.core.tree import ROOT
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods.suffix_automaton import SuffixAutomaton
from paceline.drafting.methods.suffix_matches import NO_PARENT, SuffixBounds, SuffixGuesses, best_guesses
from paceline.drafting.methods.suffix_tree import SuffixTree
from paceline.drafting.speculator import DraftDescription, Opening, Speculator
from paceline.drafting.tree_speculator import LookupSpeculator, TreeRequest

MOST_CACHED_TOKENS = 500_000
"""Over all outputs of finished requests; a token takes about 220 bytes."""


@dataclass(slots=True)
class _SaltOutputs:
    tree: SuffixTree
    outputs: deque[list[int]] = field(default_factory=deque)
    """Oldest first."""


class FinishedOutputs:
    """Keeps the latest outputs of finished requests, and counts their strings apart for each cache salt.

    When there are too many, the salt that was not used for longest loses its oldest output.
    """

    def __init__(self, depth: int, width: int, requests: int, tokens: int = MOST_CACHED_TOKENS) -> None:
        """`depth` and `width`: see `SuffixTree`. `requests` and `tokens`: most to keep."""
        self._depth, self._width = depth, width
        self._most_requests, self._most_tokens = requests, tokens
        self._by_salt: OrderedDict[str, _SaltOutputs] = OrderedDict()
        """The salt that was used last is last."""
        self._requests = 0
        self._tokens = 0

    def tree(self, salt: str) -> SuffixTree | None:
        """The counts of this salt's outputs; None if there are none."""
        if salt not in self._by_salt:
            return None
        self._by_salt.move_to_end(salt)
        return self._by_salt[salt].tree

    def add(self, output: list[int], salt: str) -> None:
        """Keep an output, unless it is empty or longer than all that may be kept."""
        if not output or not self._most_requests or len(output) > self._most_tokens:
            return
        while self._requests == self._most_requests or self._tokens + len(output) > self._most_tokens:
            self._forget()
        if salt not in self._by_salt:
            self._by_salt[salt] = _SaltOutputs(SuffixTree(self._depth, self._width))
        self._by_salt.move_to_end(salt)
        self._by_salt[salt].outputs.append(output)
        self._by_salt[salt].tree.add(output)
        self._requests += 1
        self._tokens += len(output)

    def _forget(self) -> None:
        salt, oldest = next(iter(self._by_salt.items()))
        output = oldest.outputs.popleft()
        oldest.tree.remove(output)
        self._requests -= 1
        self._tokens -= len(output)
        if not oldest.outputs:
            del self._by_salt[salt]


class SuffixLookup:
    """One request's tokens and the counts of their strings, beside those of finished outputs."""

    def __init__(self, config: SpeculativeConfig, outputs: FinishedOutputs, opening: Opening) -> None:
        self._depth = config.suffix_decoding_max_tree_depth
        self._least = config.suffix_decoding_min_token_prob
        self._factor = config.suffix_decoding_max_spec_factor
        self._outputs, self._salt = outputs, opening.cache_salt
        self._prompt_tokens = len(opening.tokens) - opening.output_tokens
        self._tokens: list[int] = []
        self._counts = SuffixAutomaton(self._depth, config.tree_width)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._counts.append(token)
        self._tokens += tokens

    def add_nodes(self, request: TreeRequest) -> list[int]:
        """As many of the best guesses as fit."""
        if not request.opening.max_nodes:
            return []
        guesses = self._best_guesses(request.opening)
        nodes = {NO_PARENT: ROOT}
        new: list[int] = []
        for i, (parent, token) in enumerate(zip(guesses.parents, guesses.tokens, strict=True)):
            node = request.tree.child(nodes[parent], token)
            if node is None:
                if not request.nodes_left:
                    return new
                node = request.tree.add(nodes[parent], token, math.log(guesses.probabilities[i]))
                new.append(node)
            nodes[i] = node
        return new

    def finish(self) -> None:
        """Keep the output for later requests."""
        self._outputs.add(self._tokens[self._prompt_tokens :], self._salt)

    def _best_guesses(self, opening: Opening) -> SuffixGuesses:
        bounds = SuffixBounds(self._depth_by_match_length(opening.max_depth), opening.max_nodes, self._least)
        local = best_guesses(SuffixGuesses(), self._counts, self._counts.matches(), bounds)
        outputs = self._outputs.tree(self._salt)
        if outputs is None:
            return local
        return best_guesses(local, outputs, outputs.matches(self._tokens[-self._depth :]), bounds)

    def _depth_by_match_length(self, max_depth: int) -> list[int]:
        depths = (min(int(length * self._factor + 1e-6), max_depth) for length in range(self._depth + 1))
        return [min(depth, self._depth - length) for length, depth in enumerate(depths)]


def build(inputs: MethodInputs) -> Speculator:
    config = inputs.config
    depth, kept = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
    outputs = FinishedOutputs(depth, config.tree_width, kept)
    return LookupSpeculator(DraftDescription("suffix"), partial(SuffixLookup, config, outputs))
