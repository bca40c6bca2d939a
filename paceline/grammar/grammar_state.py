"""Follows grammars through the output of requests, and through the draft tokens in their trees.

A mask is part of the distribution that a token is drawn from, so it must be a function of grammar and tokens alone. A
parser of llguidance that was rolled back may differ from a new one (1.9.1: in where white space may come), so no parser
is rolled back: each node of a tree has a copy of its parent's parser. A copy takes about 10 µs, and 30 µs more per
1,000 tokens of output; a mask takes 10 to 100 µs. Both are made on first use, and kept while the node can be reached.

All copies of a parser share one lexer (llguidance's `deep_clone` without sharing is not available in Python). The
lexer's states only grow and have a limit, so draft tokens or another request can exhaust what this request needs.
Therefore the first limit hit decides nothing: the grammar is compiled again for this request alone and replays its
output. Only if the replay hits a limit too is it the request's own, and then every target that decodes the request
finds the same. The replay takes as long as compiling (1 ms, or a second for a hostile grammar) and some µs per token,
in the compiler's thread: only this request waits. Its own lexer takes up to 40 MB.

A grammar may begin only behind a model's reasoning (`ReasoningGate`). Then parsers see only the tokens behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from llguidance import LLMatcher, LLParserLimits

from paceline.config import SamplingParams
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.grammar.json_schema import GrammarError
from paceline.grammar.lark import LIMITS, PREAMBLE, limits, short_error
from paceline.grammar.matcher import GrammarMatcher, Mask, Matcher, consume
from paceline.grammar.reasoning_matcher import ALWAYS, OpeningMatcher, ReasoningGate, ReasoningMatcher, reasoning_mask

CACHED_GRAMMARS = 16
"""Compiled grammars kept. A hostile one takes up to 100 MB, a usual one some megabytes."""
REPLAY_LIMITS = limits(initial_lexer_fuel=100_000_000)
"""All tokens of an output share the fuel that compiling leaves. Each used at most a mask's fuel before."""
PATIENT_LIMITS = limits(initial_lexer_fuel=100_000_000, step_lexer_fuel=1_000_000)
"""For one mask by a new lexer, which lacks the states that earlier masks left in the shared one. A mask that needs more
than ten times the usual limit is the grammar's fault."""
OUTSIDE = "the output is outside the grammar"


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The parser that requests copy; it is never advanced itself."""

    parser: LLMatcher
    end: int
    """See `GrammarMatcher`."""
    bits: bytes | None = None
    """The mask, if the parser cannot compute it within its limits."""

    def matcher(self, size: int, stops: Sequence[int], since: Sequence[int] = ()) -> GrammarMatcher | None:
        """The state after these tokens; None if the grammar does not allow them. For the rest see `GrammarMatcher`."""
        parser = self.parser.deep_copy()
        bits = None if since else self.bits
        return GrammarMatcher(parser, size, self.end, stops, bits) if consume(parser, since) else None


class GrammarCompiler:
    """Compiles grammars for one vocabulary in its own threads, so that decoding does not wait."""

    def __init__(self, vocabulary: GrammarVocabulary, vocabulary_size: int) -> None:
        """`vocabulary_size`: of the model. The vocabulary's tokens beyond it are never drawn."""
        self.vocabulary_size = vocabulary_size
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._replays = ThreadPoolExecutor(1, "grammars anew")  # they take longer

    @classmethod
    def of(cls, model: str, vocabulary_size: int) -> GrammarCompiler:
        """`model`: a name, see `paceline.model_names`."""
        return cls(GrammarVocabulary.of(model), vocabulary_size)

    def prepare(self) -> None:
        """Begin to make the vocabulary."""
        _ = self._vocabulary.made

    def start(
        self, grammar: str, stop_token_ids: Iterable[int], output: Sequence[int], gate: ReasoningGate = ALWAYS
    ) -> GrammarState:
        """The state of a request whose output begins with `output`; see `GrammarState.ready`."""
        stops = [token for token in stop_token_ids if token < self.vocabulary_size]
        return GrammarState(self, grammar, stops, list(output), self._compiled_or_started(grammar), gate)

    def start_request(self, params: SamplingParams, output: Sequence[int]) -> GrammarState | None:
        """The state of a request with these parameters; None: it has no grammar."""
        if not params.grammar:
            return None
        gate = ReasoningGate(params.grammar_begins_after, params.grammar_waits_if)
        return self.start(params.grammar, params.stop_token_ids, output, gate)

    def replay(
        self, grammar: str, output: Sequence[int], exhausted: Future[CompiledGrammar]
    ) -> Future[CompiledGrammar]:
        """A new parser after this output that shares nothing. `output`: without reasoning. No other request will start
        from `exhausted`."""
        if self._compiled.get(grammar) is exhausted:
            del self._compiled[grammar]
        return self._replays.submit(self._replay, grammar, tuple(output))

    def _compiled_or_started(self, grammar: str) -> Future[CompiledGrammar]:
        if grammar not in self._compiled:
            self._compiled[grammar] = self._thread.submit(self._begin, grammar)
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def _begin(self, grammar: str) -> CompiledGrammar:
        return self._compiled_grammar(self._compile(grammar, LIMITS))

    def _replay(self, grammar: str, output: Sequence[int]) -> CompiledGrammar:
        parser = self._after(grammar, output, REPLAY_LIMITS)
        parser.compute_bitmask()
        if not parser.is_error():
            return self._compiled_grammar(parser)
        patient = self._after(grammar, output, PATIENT_LIMITS)
        bits = patient.compute_bitmask()
        if patient.is_error():
            return self._compiled_grammar(patient)
        return self._compiled_grammar(self._after(grammar, output, REPLAY_LIMITS), bits)

    def _compiled_grammar(self, parser: LLMatcher, bits: bytes | None = None) -> CompiledGrammar:
        return CompiledGrammar(parser, self._vocabulary.end, bits)

    def _after(self, grammar: str, output: Sequence[int], limits: LLParserLimits) -> LLMatcher:
        parser = self._compile(grammar, limits)
        if not consume(parser, output):
            raise GrammarError(OUTSIDE)
        return parser

    def _compile(self, grammar: str, limits: LLParserLimits) -> LLMatcher:
        parser = LLMatcher(self._vocabulary.made.result(), PREAMBLE + grammar, log_level=0, limits=limits)
        if error := parser.get_error():
            raise GrammarError(short_error(error))
        return parser


@dataclass(slots=True)
class GrammarState:
    """The state of one request in its grammar. A `path` is a sequence of tokens after the committed ones."""

    _grammars: GrammarCompiler
    _grammar: str
    _stops: Sequence[int]
    _output: list[int]
    _compiled: Future[CompiledGrammar]
    """Shared by requests, or replayed for this one."""
    _gate: ReasoningGate
    _replayed: int | None = None
    """The size of the output when its grammar was replayed; None: no replay."""
    _current: Matcher | None = None
    """After the output, once `_begun`; None: the output is outside the grammar, or the request has ended."""
    _begun: bool = False
    """Whether `_current` is known."""

    @property
    def ready(self) -> bool:
        """False while the grammar is being compiled or replayed: then only `allowed` and `permits` may be used.

        True does not mean success: see `error`.
        """
        if not self._compiled.done():
            return False
        if self._compiled.exception() is not None or self.within_limits():
            return True
        start = self._gate.grammar_start(self._output)
        assert start is not None, "reasoning has no limits"
        self._compiled = self._grammars.replay(self._grammar, self._output[start:], self._compiled)
        self._replayed = len(self._output)
        self._begun = False
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait until the compiler is done, at most `timeout_s` seconds."""
        futures.wait([self._compiled], timeout_s)

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Tokens [V] that may come next; None: the state is not ready, or no token after this path can be committed."""
        if not self.ready:
            return None
        matcher = self._matcher(path)
        return matcher.allowed if matcher is not None and matcher.can_continue else None

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Whether the token may follow this path; False while not ready."""
        matcher = self._matcher(path) if self.ready else None
        return matcher is not None and matcher.permits(token)

    def within_limits(self, path: Sequence[int] = ()) -> bool:
        """Whether a commit may go beyond this path. If not, commit the path, and check `ready` again."""
        matcher = self._matcher(path)
        return matcher is None or not matcher.limit or self._replayed == len(self._output) + len(path)

    def finished(self, path: Sequence[int]) -> bool:
        """Whether no token can follow this path."""
        matcher = self._matcher(path)
        return matcher is None or not matcher.can_continue

    def error(self, path: Sequence[int] = ()) -> str:
        """Why the grammar cannot be used, or why no token follows the path; empty: no error."""
        if failure := self._compiled.exception():
            return str(failure)
        matcher = self._matcher(path)
        return OUTSIDE if matcher is None else matcher.error

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        if self._begun:
            self._current = self._matcher(tokens)
        self._output += tokens

    def _matcher(self, path: Sequence[int]) -> Matcher | None:
        """The state after this path; None: the path is outside the grammar, or the request has ended."""
        if not self._begun:
            self._current, self._begun = self._start(), True
        matcher = self._current
        for token in path:
            if matcher is None:
                return None
            matcher = matcher.after(token)
        return matcher

    def _start(self) -> Matcher | None:
        """The state after the output."""
        if self._compiled.exception() is not None:
            return None
        gate, start = self._gate, self._gate.grammar_start(self._output)
        if start is None:
            return self._reasoning(gate.last_tokens(self._output))
        since = self._output[max(start, self._replayed or 0) :]
        grammar = self._compiled.result().matcher(self._grammars.vocabulary_size, self._stops, since)
        if grammar is not None and (opening := gate.next_opening(self._output)) is not None:
            return OpeningMatcher(opening, grammar, self._reasoning())
        return grammar

    def _reasoning(self, last: tuple[int, ...] = ()) -> ReasoningMatcher:
        size, stops = self._grammars.vocabulary_size, self._stops
        begin = partial(self._compiled.result().matcher, size, stops)  # without this object, which would be a cycle
        return ReasoningMatcher(self._gate.closing, reasoning_mask(size, stops), begin, last)
