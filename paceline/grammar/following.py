"""Following grammars through the tokens of requests, and through the guesses in their trees.

A mask is part of the law that a token is drawn from, so it has to be a function of grammar and tokens alone. A parser
of llguidance that was rolled back may differ from one that never went there (1.9.1: in where white space may come), so
none is: each place in a tree has a copy of its parent's parser. One takes some 10 µs, and 30 more per 1,000 tokens of
output; a mask takes 10 to 100 µs. Both are made when they are first asked for, and kept while the place can be reached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from paceline.grammar.writing import LIMITS, PREAMBLE, GrammarError, plainly
from paceline.models import ModelNotFoundError
from paceline.text import Tokenizer

REMEMBERED = 32
"""Grammars that need not be compiled again."""

Mask = NDArray[np.bool_]
Path = tuple[int, ...]


class Grammars:
    """Compiles grammars for one vocabulary, in a thread of its own: whoever decodes does not wait for them."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_size: int) -> None:
        """`tokenizer` is called before the first grammar is compiled; its tokens beyond the size cannot be drawn."""
        self.vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")

    @classmethod
    def of(cls, model: str, vocabulary_size: int) -> Grammars:
        """`model`: by name, see `paceline.models`."""
        return cls(lambda: Tokenizer.load(model), vocabulary_size)

    def follow(self, grammar: str, stop_token_ids: Iterable[int], output: Sequence[int]) -> GrammarState:
        """A request whose output begins like this; see `GrammarState.ready`."""
        stops = [token for token in stop_token_ids if token < self.vocabulary_size]
        return GrammarState(self._begun(grammar), self.vocabulary_size, stops, output)

    def _begun(self, grammar: str) -> Future[LLMatcher]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> LLMatcher:
        parser = LLMatcher(self._vocabulary, PREAMBLE + grammar, log_level=0, limits=LIMITS)
        if error := parser.get_error():
            raise GrammarError(plainly(error))
        return parser

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Raises `GrammarError` if it is not known what the tokens say."""
        try:
            tokenizer = self._tokenizer()
            pieces = tokenizer.pieces[: self.vocabulary_size]
        except (ModelNotFoundError, ValueError) as error:
            raise GrammarError(f"this model cannot follow grammars: {error}") from error
        return LLTokenizer(TokenizerWrapper(_Spelling(pieces, tokenizer.special_ids, self.vocabulary_size)))


class _Spelling:
    """A vocabulary as llguidance wants it described, with one token more than there are: the end of a text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Iterable[int], size: int) -> None:
        unused = [b""] * (size - len(pieces))
        self.eos_token_id = size
        self.tokens = [*pieces, *unused, b"<end>"]
        self.special_token_ids = [*(token for token in special_ids if token < size), size]

    def __call__(self, text: bytes) -> list[int]:
        """How to write a text matters only where text is forced, which is switched off."""
        return []


@dataclass(slots=True)
class _Place:
    """Where a request would be after some tokens."""

    parser: LLMatcher
    size: int
    stops: Sequence[int]
    may_end: bool = field(init=False)
    _mask: Mask | None = None

    def __post_init__(self) -> None:
        self.may_end = self.parser.is_accepting()

    def after(self, token: int) -> _Place | None:
        """None if the grammar has no such token here, or the request is over with it."""
        parser = self.parser.deep_copy()
        return _Place(parser, self.size, self.stops) if parser.try_consume_tokens([token]) == 1 else None

    def permits(self, token: int) -> bool:
        """As the mask says, which need not be computed for it."""
        if self._mask is not None:
            return bool(self.allowed[token])
        return self.after(token) is not None or (self.may_end and token in self.stops)

    @property
    def open(self) -> bool:
        """Whether anything can follow but the end."""
        return bool(self.continues.any())

    @property
    def continues(self) -> Mask:
        """Tokens [V] with which the text goes on."""
        if self._mask is None:
            bits = np.frombuffer(self.parser.compute_bitmask(), np.uint8)
            mask = np.unpackbits(bits, count=self.size, bitorder="little").view(np.bool_)
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
    def error(self) -> str:
        """Why there is no way on from here, if the text may not end here either."""
        if self.open or self.may_end:
            return ""
        reason = plainly(self.parser.get_error())
        dead_end = not reason or reason.startswith("NoExtension")
        return "no token of this vocabulary can continue it" if dead_end else reason


@dataclass(slots=True)
class GrammarState:
    """One request on its way through a grammar. A `path` is a sequence of tokens after what was committed."""

    _compiled: Future[LLMatcher]
    _size: int
    _stops: Sequence[int]
    _output: Sequence[int]
    _places: dict[Path, _Place | None] = field(default_factory=dict)
    """By path; None: the grammar has been left, or the request is over."""

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled, or could not be: see `error`. Until then ask for nothing but `allowed`."""
        return self._compiled.done()

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        futures.wait([self._compiled], timeout_s)

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Tokens [V] that may come next. None: whatever comes next will not be committed, or it is not ready."""
        if not self.ready:
            return None
        place = self._place(tuple(path))
        return place.allowed if place is not None and place.open else None

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether the token may come after this path."""
        place = self._place(tuple(path))
        return place is not None and place.permits(token)

    def over(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow this path."""
        place = self._place(tuple(path))
        return place is None or not place.open

    def error(self, path: Sequence[int] = ()) -> str:
        """What is wrong with the grammar, or with the end that the path has come to."""
        if failure := self._compiled.exception():
            return str(failure)
        place = self._place(tuple(path))
        return "the output is outside the grammar" if place is None else place.error

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        if not self._places:  # it was not looked at yet
            self._output = [*self._output, *tokens]
            return
        new = tuple(tokens)
        place = self._place(new)
        self._places = {path[len(new) :]: each for path, each in self._places.items() if path[: len(new)] == new}
        self._places[()] = place

    def _place(self, path: Path) -> _Place | None:
        if path not in self._places:
            before = self._place(path[:-1]) if path else self._start()
            self._places[path] = before.after(path[-1]) if path and before is not None else before
        return self._places[path]

    def _start(self) -> _Place | None:
        if self._compiled.exception() is not None:
            return None
        parser = self._compiled.result().deep_copy()
        begun = parser.try_consume_tokens(list(self._output)) == len(self._output)
        return _Place(parser, self._size, self._stops) if begun else None
