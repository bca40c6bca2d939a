"""One completion: what is to be generated, and what comes of it, piece by piece.

HTTP and gRPC both turn a request into choices, one per prompt and each of `n`, and pieces into an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, LogProbs, SpeculationStats, Timings, Usage
from paceline.text import Detokenizer, StopStrings, Tokenizer
from paceline_services.gateway.auth import ANONYMOUS, ApiClient


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A completion to generate. `eos_token_ids`: those of `sampling.stop_token_ids` that the model brought.

    `session`: names the conversation that it belongs to, if any. `pays_prompt`: the first of those that share a prompt.
    `group`: the same for all choices of one request.
    """

    prompt: Sequence[int]
    sampling: SamplingParams
    speculative: SpeculativeOptions
    eos_token_ids: Sequence[int] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    client: ApiClient = ANONYMOUS
    cache_salt: str = ""
    session: str = ""
    counts_prompt: bool = True
    group: str = ""


@dataclass(slots=True)
class OutputChunk:
    """What one delta added. `accepted[i]`: token i was guessed. `offsets[i]`: characters of text before token i.

    Text may lag behind the tokens: a character may be incomplete, a stop string may have begun.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    log_probs: list[LogProbs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    speculation: SpeculationStats | None = None
    timings: Timings = field(default_factory=Timings)


def concatenate_chunks(pieces: Sequence[OutputChunk]) -> OutputChunk:
    """A choice's pieces as one. The last one holds what is known at the end only."""
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        offsets=[offset for piece in pieces for offset in piece.offsets],
        accepted=[each for piece in pieces for each in piece.accepted],
        log_probs=[each for piece in pieces for each in piece.log_probs],
    )


class OutputProcessor:
    """Turns a choice's deltas into pieces: decodes, looks for stop strings, ends where the first one ends.

    At the end text, tokens, log-probabilities and finish reason agree: tokens up to and with the one that
    completes a stop string count, later ones of the same delta were never seen.
    """

    def __init__(self, choice: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=choice.skip_special_tokens)
        self._stops = StopStrings(choice.stop)
        self._include_stop = choice.include_stop
        self._eos = choice.eos_token_ids
        self._min_tokens_left = choice.sampling.min_tokens  # a stop string may not end the text before
        self._length = 0
        self._tokens = 0

    def usage(self, prompt_tokens: int, last: OutputChunk) -> Usage:
        """What the choice has cost, once its last piece is there."""
        return Usage(prompt_tokens, self._tokens, last.cached_tokens)

    def process(self, delta: Delta) -> OutputChunk:
        piece = OutputChunk(finish_reason=delta.finish_reason, speculation=delta.speculation, timings=delta.timings)
        if delta.usage is not None:
            piece.cached_tokens = delta.usage.cached_tokens
        silent = len(delta.tokens) - 1 if delta.stop_token is not None and not self._include_stop else -1
        for index, token in enumerate(delta.tokens):
            piece.tokens.append(token)
            piece.offsets.append(self._length)
            if index != silent:
                piece.text += self._append_text(self._detokenizer.feed((token,)))
            self._min_tokens_left -= 1
            if self._stops.found is not None:
                break
        self._tokens += len(piece.tokens)
        self._end(piece, delta)
        piece.log_probs = delta.log_probs[: len(piece.tokens)]
        piece.accepted = delta.accepted[: len(piece.tokens)]
        return piece

    def _append_text(self, text: str) -> str:
        self._length += len(text)
        return text if self._min_tokens_left > 0 else self._stops.feed(text)

    def _end(self, piece: OutputChunk, delta: Delta) -> None:
        if self._stops.found is None and delta.finish_reason is not None:
            piece.text += self._append_text(self._detokenizer.flush())
        if self._stops.found is not None:
            piece.finish_reason, piece.stop_reason = FinishReason.STOP, self._stops.found
            piece.text += self._stops.found if self._include_stop else ""
        elif delta.finish_reason is not None:
            piece.text += self._stops.flush()
            piece.stop_reason = None if delta.stop_token in self._eos else delta.stop_token
