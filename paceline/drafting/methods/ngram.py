"""Prompt lookup: the tokens that followed an earlier occurrence of the last few tokens.

The longest run of last tokens, between `prompt_lookup_min` and `prompt_lookup_max` long, that occurs earlier in the
request is looked up; the most recent occurrence comes first. (vLLM's `ngram` and transformers' prompt lookup prefer the
earliest occurrence.) A continuation that reaches the end of the request goes on as a loop. Older occurrences with other
continuations become branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.tree import ROOT
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import DraftDescription, Speculator
from paceline.drafting.tree_speculator import LookupSpeculator, TreeRequest

FIRST_TOKEN_PROBABILITY = 0.6
NEXT_TOKEN_PROBABILITY = 0.85
"""Assumed probability of a continuation's first token, and of each later one. A further branch at the same node gets
this share of what the earlier branches leave. The target's calibration corrects both."""


class NGramLookup:
    """One request's tokens, and the index of their runs."""

    def __init__(self, lengths: range, tree_width: int) -> None:
        """`lengths`: of the runs."""
        self._lengths, self._width = lengths, tree_width
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        """The positions after each run of tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        known = self._tokens
        for token in tokens:
            # A run is indexed when a token follows it, so the request's own end is never found.
            for length in self._lengths:
                if length <= len(known):
                    self._ends.setdefault(tuple(known[-length:]), []).append(len(known))
            known.append(token)

    def add_nodes(self, request: TreeRequest) -> list[int]:
        tree = request.tree
        new: list[int] = []
        for end in self._occurrences():
            node, probability = ROOT, FIRST_TOKEN_PROBABILITY
            for token in self._continuation(end, request.opening.max_depth):
                child = tree.child(node, token)
                if child is None:
                    if not request.nodes_left:
                        return new
                    share = probability * (1 - probability) ** len(tree.children(node))
                    child = tree.add(node, token, math.log(share))
                    new.append(child)
                node, probability = child, NEXT_TOKEN_PROBABILITY
        return new

    def finish(self) -> None:
        pass

    def _occurrences(self) -> Sequence[int]:
        """The positions after earlier occurrences of the longest known run of last tokens, most recent first."""
        for length in reversed(self._lengths):
            ends = self._ends.get(tuple(self._tokens[-length:])) if length <= len(self._tokens) else None
            if ends:
                return ends[: -self._width - 1 : -1]
        return ()

    def _continuation(self, end: int, count: int) -> list[int]:
        """The `count` tokens from position `end` on."""
        period = len(self._tokens) - end
        return [self._tokens[end + i % period] for i in range(count)]


def build(inputs: MethodInputs) -> Speculator:
    config = inputs.config
    lengths = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
    return LookupSpeculator(DraftDescription("ngram"), lambda _: NGramLookup(lengths, config.tree_width))
