"""One place in a text that follows a grammar: what may come there, and whether that can be said at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from paceline.grammar.lark import limit_of

Mask = NDArray[np.bool_]


def consume(parser: LLMatcher, tokens: Iterable[int]) -> bool:
    """Whether the grammar has these tokens next. If a limit keeps that from being known, they count as consumed, and
    the parser is in error."""
    for token in tokens:
        if parser.try_consume_tokens([token]) != 1:
            if not parser.is_stopped():
                parser.consume_token(token)  # a lexer that is used up refuses every token; asked like this, it says so
            if not limit_of(parser):
                return False
    return True


@dataclass(slots=True)
class GrammarMatcher:
    """Where a request would be after some tokens."""

    parser: LLMatcher
    size: int
    stops: Sequence[int]
    bits: bytes | None = None
    """As in `CompiledGrammar`."""
    may_end: bool = field(init=False)
    _mask: Mask | None = None

    def __post_init__(self) -> None:
        self.may_end = self.parser.is_accepting()

    def advanced(self, token: int) -> GrammarMatcher | None:
        """None if the grammar has no such token here, or the request is over with it."""
        if token >= self.size:  # the first of them is llguidance's end
            return None
        parser = self.parser.deep_copy()
        return GrammarMatcher(parser, self.size, self.stops) if consume(parser, [token]) else None

    def permits(self, token: int) -> bool:
        """As the mask says, which need not be computed for it. Where a limit was hit, no more than that."""
        if self._mask is not None:
            return bool(self.allowed[token])
        after = self.advanced(token)
        return (after is not None and not after.parser.is_error()) or (self.may_end and token in self.stops)

    @property
    def can_continue(self) -> bool:
        """Whether anything can follow but the end."""
        return bool(self.continues.any())

    @property
    def continues(self) -> Mask:
        """Tokens [V] with which the text goes on."""
        if self._mask is None:
            bits = self.bits or self.parser.compute_bitmask()
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.size, bitorder="little").view(np.bool_)
            self._mask = np.zeros_like(mask) if self.parser.is_stopped() else mask
        return self._mask

    @property
    def allowed(self) -> Mask:
        """Tokens [V] that may be drawn: also those that end the request, where the text may end."""
        mask = self.continues
        if self.may_end and self.stops:
            mask = mask.copy()
            mask[self.stops] = True
        return mask

    @property
    def limit(self) -> str:
        """Which limit keeps it from being known what can follow, the end or anything else. Empty: it is known."""
        return "" if self.can_continue else limit_of(self.parser)

    @property
    def error(self) -> str:
        """Why there is no way on from here, unless the text may end here."""
        if self.can_continue:
            return ""
        return self.limit or ("" if self.may_end else "no token of this vocabulary can continue it")
