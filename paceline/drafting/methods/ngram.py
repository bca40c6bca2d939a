"""Prompt lookup: the tokens that followed an earlier occurrence of the last few tokens.

The longest run of last tokens, between `prompt_lookup_min` and `prompt_lookup_max` long, that occurs earlier in the
request is looked up; the most recent occurrence comes first. (vLLM's `ngram` and transformers' prompt lookup prefer the
earliest occurrence.) A continuation that reaches the end of the request goes on as a loop. Older occurrences with other
continuations become branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Opening, Speculator
from paceline.drafting.tree_speculator import LookupRequest, LookupSpeculator

FIRST_TOKEN_PROBABILITY = 0.6
NEXT_TOKEN_PROBABILITY = 0.85
"""Assumed probability of a continuation's first token, and of each later one. A further branch at the same node gets
this share of what the earlier branches leave. The target's calibration corrects both."""


@dataclass(slots=True, eq=False)
class NGramRequest(LookupRequest):
    """A request and the index of its runs."""

    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """The positions after each run of tokens."""

    def continuation(self, end: int) -> list[int]:
        """The tokens from position `end` on, to the depth that is wanted."""
        period = len(self.tokens) - end
        return [self.tokens[end + i % period] for i in range(self.opening.max_depth)]


class NGramSpeculator(LookupSpeculator[NGramRequest]):
    """Method `ngram`."""

    method = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int, tree_width: int) -> None:
        super().__init__()
        self._lengths = range(lookup_min, lookup_max + 1)
        self._width = tree_width

    def new_request(self, opening: Opening, tree: TokenTree) -> NGramRequest:
        request = NGramRequest(opening, tree, [])
        self.index(request, opening.tokens)
        return request

    def index(self, request: NGramRequest, tokens: Sequence[int]) -> None:
        known = request.tokens
        for token in tokens:
            # A run is indexed when a token follows it, so the request's own end is never found.
            for length in self._lengths:
                if length <= len(known):
                    request.ends.setdefault(tuple(known[-length:]), []).append(len(known))
            known.append(token)

    def add_nodes(self, request: NGramRequest) -> list[int]:
        tree = request.tree
        new: list[int] = []
        for end in self._occurrences(request):
            node, probability = ROOT, FIRST_TOKEN_PROBABILITY
            for token in request.continuation(end):
                child = tree.child(node, token)
                if child is None:
                    if not request.nodes_left:
                        return new
                    share = probability * (1 - probability) ** len(tree.children(node))
                    child = tree.add(node, token, math.log(share))
                    new.append(child)
                node, probability = child, NEXT_TOKEN_PROBABILITY
        return new

    def _occurrences(self, request: NGramRequest) -> Sequence[int]:
        """The positions after earlier occurrences of the longest known run of last tokens, most recent first."""
        for length in reversed(self._lengths):
            ends = request.ends.get(tuple(request.tokens[-length:])) if length <= len(request.tokens) else None
            if ends:
                return ends[: -self._width - 1 : -1]
        return ()


def build(inputs: MethodInputs) -> Speculator:
    config = inputs.config
    return NGramSpeculator(config.prompt_lookup_min, config.prompt_lookup_max, config.tree_width)
