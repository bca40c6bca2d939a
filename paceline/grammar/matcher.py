"""The state of a grammar's parser after one sequence of tokens, and the tokens that may follow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from paceline.grammar.lark import limit_of

Mask = NDArray[np.bool_]


def consume(parser: LLMatcher, tokens: Iterable[int]) -> bool:
    """Advance the parser; return False if the grammar does not allow these tokens.

    If a limit keeps that from being known, the tokens count as consumed, and the parser is in error.
    """
    for token in tokens:
        if parser.try_consume_tokens([token]) != 1:
            if not parser.is_stopped():
                parser.consume_token(token)  # an exhausted lexer refuses every token; this call sets its error
            if not limit_of(parser):
                return False
    return True


class Matcher(ABC):
    """Where an output is, in a grammar or in front of it, after one sequence of tokens."""

    @property
    def can_continue(self) -> bool:
        """Whether any token but the end can follow."""
        return True

    @property
    def limit(self) -> str:
        """The limit that keeps the following tokens from being known. Empty: they are known."""
        return ""

    @property
    def error(self) -> str:
        """Why no token can follow; empty if one can, or if the text may end."""
        return ""

    @property
    @abstractmethod
    def allowed(self) -> Mask:
        """Tokens [V] that may be drawn."""

    def permits(self, token: int) -> bool:
        """Whether `allowed` has this token. May be cheaper than `allowed`."""
        return token < len(self.allowed) and bool(self.allowed[token])

    def after(self, token: int) -> Matcher | None:
        """The state after one more token; None if it is not allowed, or ends the request. The same at every call."""
        if token not in self._after:
            self._after[token] = self._advanced(token)
        return self._after[token]

    @cached_property
    def _after(self) -> dict[int, Matcher | None]:
        return {}

    @abstractmethod
    def _advanced(self, token: int) -> Matcher | None: ...


@dataclass
class GrammarMatcher(Matcher):
    """A parser after some tokens. `size`: of the vocabulary, V. `stops`: tokens that end a request.

    `end`: llguidance's end of a text. The model's tokens from there on have no text.
    """

    parser: LLMatcher
    size: int
    end: int
    stops: Sequence[int]
    bits: bytes | None = None
    """The mask, see `CompiledGrammar`; None: the parser computes it."""
    may_end: bool = field(init=False)

    def __post_init__(self) -> None:
        self.may_end = self.parser.is_accepting()

    def permits(self, token: int) -> bool:
        """Whether `allowed` has this token, without computing the mask. False where a limit was hit."""
        if "continues" in vars(self):
            return bool(self.allowed[token])
        after = self.after(token)
        return (isinstance(after, GrammarMatcher) and not after.parser.is_error()) or (
            self.may_end and token in self.stops
        )

    def _advanced(self, token: int) -> GrammarMatcher | None:
        if token >= min(self.size, self.end):
            return None
        parser = self.parser.deep_copy()
        return GrammarMatcher(parser, self.size, self.end, self.stops) if consume(parser, [token]) else None

    @cached_property
    def can_continue(self) -> bool:
        return bool(self.continues.any())

    @cached_property
    def continues(self) -> Mask:
        """Tokens [V] that continue the text."""
        bits = self.bits or self.parser.compute_bitmask()
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self.size, bitorder="little").view(np.bool_)
        mask[self.end :] = False
        return np.zeros_like(mask) if self.parser.is_stopped() else mask

    @cached_property
    def allowed(self) -> Mask:
        """Tokens [V] that may be drawn: those that continue the text, and stop tokens where the text may end."""
        mask = self.continues
        if self.may_end and self.stops:
            mask = mask.copy()
            mask[self.stops] = True
        return mask

    @property
    def limit(self) -> str:
        return "" if self.can_continue else limit_of(self.parser)

    @property
    def error(self) -> str:
        if self.can_continue:
            return ""
        return self.limit or ("" if self.may_end else "no token of this vocabulary can continue it")
