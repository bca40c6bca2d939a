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

from paceline.grammar.lark import LIMITS, PREAMBLE, GrammarError, limits, short_error
from paceline.grammar.matcher import GrammarMatcher, Mask, consume
from paceline.model_names import ModelNotFoundError
from paceline.text import Tokenizer

CACHED_GRAMMARS = 16
"""Grammars that need not be compiled again. A hostile one takes up to 100 MB, a usual one some megabytes."""
REPLAY_LIMITS = limits(initial_lexer_fuel=100_000_000)
"""All tokens of an output share the fuel that compiling leaves. Each took no more than a mask's before."""
PATIENT_LIMITS = limits(initial_lexer_fuel=100_000_000, step_lexer_fuel=1_000_000)
"""For one mask by a lexer that nothing has warmed: those of places before, or of guesses, would have spared it much of
the work. More than ten times what a mask may cost else is the fault of the place itself."""
OUTSIDE = "the output is outside the grammar"

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Where requests start: only copies of the parser are used."""

    parser: LLMatcher
    bits: bytes | None = None
    """The mask there, if its parser could not work that out within its limits."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in threads of its own: whoever decodes does not wait for them."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_size: int) -> None:
        """`tokenizer` is called before the first grammar is compiled; its tokens beyond the size cannot be drawn."""
        self.vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._replays = ThreadPoolExecutor(1, "grammars anew")  # which take longer

    @classmethod
    def of(cls, model: str, vocabulary_size: int) -> GrammarCompiler:
        """`model`: by name, see `paceline.model_names`."""
        return cls(lambda: Tokenizer.load(model), vocabulary_size)

    def start(self, grammar: str, stop_token_ids: Iterable[int], output: Sequence[int]) -> GrammarState:
        """A request whose output begins like this; see `GrammarState.ready`."""
        stops = [token for token in stop_token_ids if token < self.vocabulary_size]
        return GrammarState(self, grammar, stops, list(output), self._begun(grammar))

    def replay(self, grammar: str, output: Sequence[int], worn: Future[CompiledGrammar]) -> Future[CompiledGrammar]:
        """One that shares nothing with others, after this output. Nobody shall begin with `worn` any more."""
        if self._compiled.get(grammar) is worn:
            del self._compiled[grammar]
        return self._replays.submit(self._replay, grammar, tuple(output))

    def _begun(self, grammar: str) -> Future[CompiledGrammar]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._begin, grammar)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _begin(self, grammar: str) -> CompiledGrammar:
        return CompiledGrammar(self._compile(grammar, LIMITS))

    def _replay(self, grammar: str, output: Sequence[int]) -> CompiledGrammar:
        parser = self._after(grammar, output, REPLAY_LIMITS)
        parser.compute_bitmask()
        if not parser.is_error():
            return CompiledGrammar(parser)
        patient = self._after(grammar, output, PATIENT_LIMITS)
        bits = patient.compute_bitmask()
        if patient.is_error():
            return CompiledGrammar(patient)
        return CompiledGrammar(self._after(grammar, output, REPLAY_LIMITS), bits)

    def _after(self, grammar: str, output: Sequence[int], limits: LLParserLimits) -> LLMatcher:
        parser = self._compile(grammar, limits)
        if not consume(parser, output):
            raise GrammarError(OUTSIDE)
        return parser

    def _compile(self, grammar: str, limits: LLParserLimits) -> LLMatcher:
        parser = LLMatcher(self._vocabulary, PREAMBLE + grammar, log_level=0, limits=limits)
        if error := parser.get_error():
            raise GrammarError(short_error(error))
        return parser

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Raises `GrammarError` if it is not known what the tokens say."""
        try:
            tokenizer = self._tokenizer()
            pieces = tokenizer.pieces[: self.vocabulary_size]
        except (ModelNotFoundError, ValueError) as error:
            raise GrammarError(f"this model cannot follow grammars: {error}") from error
        return LLTokenizer(TokenizerWrapper(_VocabularyAdapter(pieces, tokenizer.special_ids, self.vocabulary_size)))


class _VocabularyAdapter:
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

    _grammars: GrammarCompiler
    _grammar: str
    _stops: Sequence[int]
    _output: list[int]
    _compiled: Future[CompiledGrammar]
    """Compiled for all, or replayed for this request."""
    _replayed: int | None = None
    """The length of the output that it was replayed for."""
    _matchers: dict[Path, GrammarMatcher | None] = field(default_factory=dict)
    """By path; None: the grammar has been left, or the request is over."""

    @property
    def ready(self) -> bool:
        """Whether it is known what may come next, or why that cannot be: see `error`.

        Until then it is being compiled or replayed: ask for nothing but `allowed` and `permits`.
        """
        if not self._compiled.done():
            return False
        if self._compiled.exception() is not None or self.within_limits():
            return True
        self._compiled = self._grammars.replay(self._grammar, self._output, self._compiled)
        self._replayed = len(self._output)
        self._matchers.clear()
        return False

    def wait(self, timeout_s: float) -> None:
        """Until it is ready, but not longer."""
        futures.wait([self._compiled], timeout_s)

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Tokens [V] that may come next. None: whatever comes next will not be committed, or it is not ready."""
        if not self.ready:
            return None
        place = self._matcher(tuple(path))
        return place.allowed if place is not None and place.can_continue else None

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether the token is known to be one that may come after this path."""
        place = self._matcher(tuple(path)) if self.ready else None
        return place is not None and place.permits(token)

    def within_limits(self, path: Sequence[int] = ()) -> bool:
        """Whether a commit may go beyond this path. If not, commit the path, and see whether that is `ready`."""
        place = self._matcher(tuple(path))
        return place is None or not place.limit or self._replayed == len(self._output) + len(path)

    def finished(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow this path."""
        place = self._matcher(tuple(path))
        return place is None or not place.can_continue

    def error(self, path: Sequence[int] = ()) -> str:
        """What is wrong with the grammar, or with the end that the path has come to."""
        if failure := self._compiled.exception():
            return str(failure)
        place = self._matcher(tuple(path))
        return OUTSIDE if place is None else place.error

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        new = tuple(tokens)
        if self._matchers:  # otherwise it was not looked at yet
            place = self._matcher(new)
            self._matchers = {
                path[len(new) :]: each for path, each in self._matchers.items() if path[: len(new)] == new
            }
            self._matchers[()] = place
        self._output += new

    def _matcher(self, path: Path) -> GrammarMatcher | None:
        if path not in self._matchers:
            before = self._matcher(path[:-1]) if path else self._start()
            self._matchers[path] = before.advanced(path[-1]) if path and before is not None else before
        return self._matchers[path]

    def _start(self) -> GrammarMatcher | None:
        if self._compiled.exception() is not None:
            return None
        begun, since = self._compiled.result(), self._output[self._replayed or 0 :]
        parser = begun.parser.deep_copy()
        if not consume(parser, since):
            return None
        return GrammarMatcher(parser, self._grammars.vocabulary_size, self._stops, None if since else begun.bits)
