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


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """Where in an output a grammar begins: behind the first `closing` tokens, or at once if there are none.

    `opening`: if it is given, there is reasoning only in an output that begins with this token.
    """

    closing: tuple[int, ...] = ()
    opening: int | None = None

    def grammar_start(self, output: Sequence[int]) -> int | None:
        """The index of the first token that the grammar applies to; None: the gate is closed.

        An empty output has its grammar at index 0 even if `opening` may still come.
        """
        if not self.closing or (self.opening is not None and tuple(output[:1]) != (self.opening,)):
            return 0
        first, size = self._first, len(self.closing)
        ends = range(first + size, len(output) + 1)
        return next((end for end in ends if tuple(output[end - size : end]) == self.closing), None)

    def next_opening(self, output: Sequence[int]) -> int | None:
        """The token that would open the reasoning as the next one; None: there is none, or it is too late."""
        return self.opening if self.closing and not output else None

    def last_tokens(self, output: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the reasoning with which `closing` may have begun, at most all but its last one."""
        reasoning = tuple(output[self._first :])
        return reasoning[max(0, len(reasoning) - len(self.closing) + 1) :]

    @property
    def _first(self) -> int:
        """The index of the first token of the reasoning."""
        return 0 if self.opening is None else 1


ALWAYS = ReasoningGate()
"""The grammar begins with the output."""


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
