"""Following grammars through the tokens of requests, and through the guesses in their trees.

A mask is part of the law that a token is drawn from, so it has to be a function of grammar and tokens alone. A parser
of llguidance that was rolled back may differ from one that never went there (1.9.1: in where white space may come), so
none is: each place in a tree has a copy of its parent's parser. One takes some 10 µs, and 30 more per 1,000 tokens of
output; a mask takes 10 to 100 µs. Both are made when they are first asked for, and kept while the place can be reached.

All copies of a parser share one lexer (llguidance has a `deep_clone` without that, but not for Python). Its states are
only ever added to and have a limit, so a guess, or another request, can use up what this one needs. Hence a limit that
is hit says nothing yet. The grammar is compiled anew for this request alone and fed its output; only if that hits a
limit, too, it is the request's own, and whoever decodes it, wherever, comes to the same end. It takes as long as
compiling (1 ms, or a second if someone is out for it) and some µs per token, in the thread that compiles: the request
waits, and nobody else. Its own lexer takes up to 40 MB.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from paceline.grammar.place import Mask, Place, consume
from paceline.grammar.writing import LIMITS, PREAMBLE, GrammarError, limits, plainly
from paceline.models import ModelNotFoundError
from paceline.text import Tokenizer

REMEMBERED = 16
"""Grammars that need not be compiled again. A hostile one takes up to 100 MB, a usual one some megabytes."""
REPLAY_LIMITS = limits(initial_lexer_fuel=100_000_000)
"""All tokens of an output share the fuel that compiling leaves. Each took no more than a mask's before."""
PATIENT_LIMITS = limits(initial_lexer_fuel=100_000_000, step_lexer_fuel=1_000_000)
"""For one mask by a lexer that nothing has warmed: those of places before, or of guesses, would have spared it much of
the work. More than ten times what a mask may cost else is the fault of the place itself."""
OUTSIDE = "the output is outside the grammar"

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where requests start: only copies of the parser are used."""

    parser: LLMatcher
    bits: bytes | None = None
    """The mask there, if its parser could not work that out within its limits."""


class Grammars:
    """Compiles grammars for one vocabulary, in threads of its own: whoever decodes does not wait for them."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_size: int) -> None:
        """`tokenizer` is called before the first grammar is compiled; its tokens beyond the size cannot be drawn."""
        self.vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Future[Beginning]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._replays = ThreadPoolExecutor(1, "grammars anew")  # which take longer

    @classmethod
    def of(cls, model: str, vocabulary_size: int) -> Grammars:
        """`model`: by name, see `paceline.models`."""
        return cls(lambda: Tokenizer.load(model), vocabulary_size)

    def follow(self, grammar: str, stop_token_ids: Iterable[int], output: Sequence[int]) -> GrammarState:
        """A request whose output begins like this; see `GrammarState.ready`."""
        stops = [token for token in stop_token_ids if token < self.vocabulary_size]
        return GrammarState(self, grammar, stops, list(output), self._begun(grammar))

    def replay(self, grammar: str, output: Sequence[int], worn: Future[Beginning]) -> Future[Beginning]:
        """One that shares nothing with others, after this output. Nobody shall begin with `worn` any more."""
        if self._compiled.get(grammar) is worn:
            del self._compiled[grammar]
        return self._replays.submit(self._replay, grammar, tuple(output))

    def _begun(self, grammar: str) -> Future[Beginning]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._begin, grammar)
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _begin(self, grammar: str) -> Beginning:
        return Beginning(self._compile(grammar, LIMITS))

    def _replay(self, grammar: str, output: Sequence[int]) -> Beginning:
        parser = self._after(grammar, output, REPLAY_LIMITS)
        parser.compute_bitmask()
        if not parser.is_error():
            return Beginning(parser)
        patient = self._after(grammar, output, PATIENT_LIMITS)
        bits = patient.compute_bitmask()
        if patient.is_error():
            return Beginning(patient)
        return Beginning(self._after(grammar, output, REPLAY_LIMITS), bits)

    def _after(self, grammar: str, output: Sequence[int], limits: LLParserLimits) -> LLMatcher:
        parser = self._compile(grammar, limits)
        if not consume(parser, output):
            raise GrammarError(OUTSIDE)
        return parser

    def _compile(self, grammar: str, limits: LLParserLimits) -> LLMatcher:
        parser = LLMatcher(self._vocabulary, PREAMBLE + grammar, log_level=0, limits=limits)
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
class GrammarState:
    """One request on its way through a grammar. A `path` is a sequence of tokens after what was committed."""

    _grammars: Grammars
    _grammar: str
    _stops: Sequence[int]
    _output: list[int]
    _begun: Future[Beginning]
    """Compiled for all, or replayed for this request."""
    _replayed: int | None = None
    """The length of the output that it was replayed for."""
    _places: dict[Path, Place | None] = field(default_factory=dict)
    """By path; None: the grammar has been left, or the request is over."""

    @property
    def ready(self) -> bool:
        """Whether it is known what may come next, or why that cannot be: see `error`.

        Until then it is being compiled or replayed: ask for nothing but `allowed` and `permits`.
        """
        if not self._begun.done():
            return False
        if self._begun.exception() is not None or self.known():
            return True
        self._begun = self._grammars.replay(self._grammar, self._output, self._begun)
        self._replayed = len(self._output)
        self._places.clear()
        return False

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        futures.wait([self._begun], timeout_s)

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Tokens [V] that may come next. None: whatever comes next will not be committed, or it is not ready."""
        if not self.ready:
            return None
        place = self._place(tuple(path))
        return place.allowed if place is not None and place.open else None

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether the token is known to be one that may come after this path."""
        place = self._place(tuple(path)) if self.ready else None
        return place is not None and place.permits(token)

    def known(self, path: Sequence[int] = ()) -> bool:
        """Whether a commit may go beyond this path. If not, commit the path, and see whether that is `ready`."""
        place = self._place(tuple(path))
        return place is None or not place.limit or self._replayed == len(self._output) + len(path)

    def over(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow this path."""
        place = self._place(tuple(path))
        return place is None or not place.open

    def error(self, path: Sequence[int] = ()) -> str:
        """What is wrong with the grammar, or with the end that the path has come to."""
        if failure := self._begun.exception():
            return str(failure)
        place = self._place(tuple(path))
        return OUTSIDE if place is None else place.error

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        new = tuple(tokens)
        if self._places:  # otherwise it was not looked at yet
            place = self._place(new)
            self._places = {path[len(new) :]: each for path, each in self._places.items() if path[: len(new)] == new}
            self._places[()] = place
        self._output += new

    def _place(self, path: Path) -> Place | None:
        if path not in self._places:
            before = self._place(path[:-1]) if path else self._start()
            self._places[path] = before.after(path[-1]) if path and before is not None else before
        return self._places[path]

    def _start(self) -> Place | None:
        if self._begun.exception() is not None:
            return None
        begun, since = self._begun.result(), self._output[self._replayed or 0 :]
        parser = begun.parser.deep_copy()
        if not consume(parser, since):
            return None
        return Place(parser, self._grammars.vocabulary_size, self._stops, None if since else begun.bits)
