"""Holds a grammar back until a model's reasoning has ended, see `ReasoningGate`.

While the gate is closed, any token is allowed but those that end a request: the mask is the same everywhere. Whether it
is closed is a function of the output's tokens alone, so all of it applies to draft tokens, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.grammar.matcher import GrammarMatcher, Mask, Matcher


@dataclass
class ReasoningMatcher(Matcher):
    """The state inside the reasoning."""

    closing: tuple[int, ...]
    mask: Mask
    """`allowed`: the same everywhere in the reasoning."""
    begin: Callable[[], GrammarMatcher | None]
    """The grammar before its first token."""
    last: tuple[int, ...] = ()
    """The last tokens, fewer than `closing` has."""

    @property
    def allowed(self) -> Mask:
        return self.mask

    def _advanced(self, token: int) -> Matcher | None:
        if not self.permits(token):
            return None
        last = (*self.last, token)
        if last == self.closing:
            return self.begin()
        return replace(self, last=last[1:] if len(last) == len(self.closing) else last)


@dataclass
class OpeningMatcher(Matcher):
    """The state before an output that one token may open as reasoning."""

    opening: int
    grammar: GrammarMatcher
    reasoning: ReasoningMatcher

    @cached_property
    def allowed(self) -> Mask:
        """Tokens [V]: those that the grammar allows, and the one that opens the reasoning."""
        mask = self.grammar.allowed.copy()
        mask[self.opening : self.opening + 1] = True
        return mask

    @property
    def limit(self) -> str:
        return self.grammar.limit

    def permits(self, token: int) -> bool:
        return token == self.opening or self.grammar.permits(token)

    def _advanced(self, token: int) -> Matcher | None:
        return self.reasoning if token == self.opening else self.grammar.after(token)


def reasoning_mask(size: int, stops: Sequence[int]) -> Mask:
    """Tokens [V]: all but those that end a request."""
    mask = np.ones(size, np.bool_)
    mask[list(stops)] = False
    return mask
