"""From a request's deltas to its text, and to the events that its parser finds there.

Stop strings are decided here, for the gateway and for `paceline.LLM` alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Self

from paceline.messages import Delta, FinishReason, GenerationRequest, Usage
from paceline.parsing import Event, OutputParser
from paceline.text import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request's tokens become text. No target knows it."""

    stop: Sequence[str] = ()
    include_stop: bool = False
    """Whether the text shows the stop string or stop token that ended it."""
    skip_special_tokens: bool = True
    parser: Callable[[], OutputParser] | None = None
    """Makes the parser of the output; None: the output is plain text."""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that reach the parser as text, whatever `skip_special_tokens` is."""
    eos_token_ids: Sequence[int] = ()
    """Stop tokens that the model brought and the client did not name: `stop_reason` does not report them."""


@dataclass(slots=True)
class TextDelta(Delta):
    """A delta with its text."""

    text: str = ""
    """It may lag behind the tokens: a character may be incomplete, a stop string may have begun."""
    events: list[Event] = field(default_factory=list)
    """What the request's parser finds in the text. Empty if the request has none."""
    reasoning_tokens: int = 0
    """How many of the tokens are reasoning: those after which the latest event is reasoning."""
    offsets: list[int] = field(default_factory=list)
    """By token, the characters of the request's text before it."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the request, unless it is the model's own end of text."""
    numerics: str | None = None
    """Of the target that drew the tokens, as its description has them; None: no gateway has filled them in."""

    @classmethod
    def of(cls, delta: Delta) -> Self:
        """The delta, without text so far. It shares the delta's lists."""
        return cls(*attrgetter(*Delta.__match_args__)(delta))

    def extend(self, later: Self) -> None:
        Delta.extend(self, later)  # a dataclass with slots has no super()
        self.text += later.text
        self.events += later.events
        self.reasoning_tokens += later.reasoning_tokens
        self.offsets += later.offsets
        self.stop_reason, self.numerics = later.stop_reason, later.numerics


class OutputProcessor:
    """Adds text and events to one request's deltas, and ends the request at its first stop string.

    At the end text, tokens, log-probabilities and finish reason agree: the tokens end with the one that completes the
    stop string. The outcome does not depend on how the tokens are cut into deltas.
    """

    def __init__(self, request: GenerationRequest, options: OutputOptions, tokenizer: Tokenizer) -> None:
        self._request = request
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown_tokens
        )
        self._stops = StopStrings(options.stop)
        self._parser = options.parser() if options.parser else None
        self._characters = 0
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the request, so that it takes no further deltas."""
        return self._stops.found is not None

    def process(self, delta: Delta) -> TextDelta:
        """The delta with text, events, offsets and stop reason; cut after the token that completes a stop string."""
        output, ending = TextDelta.of(delta), ""
        hidden = len(delta.tokens) - 1 if delta.stop_token is not None and not self._options.include_stop else -1
        for index, token in enumerate(delta.tokens):
            output.offsets.append(self._characters)
            if index != hidden:
                self._add(output, self._shown(self._detokenizer.feed((token,))))
            self._tokens += 1
            output.reasoning_tokens += self._parser is not None and self._parser.in_reasoning
            if self.stopped:
                count = index + 1
                output.tokens, output.accepted = delta.tokens[:count], delta.accepted[:count]
                output.log_probs = delta.log_probs[:count]
                output.stop_token = None  # the stop token may be cut off, too
                break
        if not self.stopped and delta.finish_reason is not None:
            ending = self._shown(self._detokenizer.flush())
        if self.stopped:
            output.finish_reason, output.stop_reason = FinishReason.STOP, self._stops.found
            ending += self._stops.found if self._options.include_stop and self._stops.found else ""
        elif delta.finish_reason is not None:
            ending += self._stops.flush()
            output.stop_reason = None if delta.stop_token in self._options.eos_token_ids else delta.stop_token
        if output.finish_reason is not None:
            self._add(output, ending, last=True)
            cached = delta.usage.cached_tokens if delta.usage else 0
            output.usage = Usage(len(self._request.prompt), self._tokens, cached)
        return output

    def _shown(self, text: str) -> str:
        """What of the next text can be shown. No stop string may end the request before `min_tokens`."""
        self._characters += len(text)
        return text if self._tokens < self._request.sampling.min_tokens else self._stops.feed(text)

    def _add(self, output: TextDelta, text: str, *, last: bool = False) -> None:
        """Append text that can be shown, and what the parser finds in it. `last`: no more will come."""
        output.text += text
        if self._parser is not None and (text or last):
            output.events += self._parser.feed(text, last=last)
