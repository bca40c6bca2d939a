"""From a request's deltas to its text, and to the events that its parser finds there.

Stop strings are decided here, for the gateway and for `paceline.LLM` alike.
"""

from __future__ import annotations

from paceline.messages import Delta, FinishReason, GenerationRequest, Usage
from paceline.text import Detokenizer, StopStrings, Tokenizer


class OutputProcessor:
    """Adds text and events to one request's deltas, and ends the request at its first stop string.

    At the end text, tokens, log-probabilities and finish reason agree: the tokens end with the one that completes the
    stop string. The outcome does not depend on how the tokens are cut into deltas.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=request.shown_tokens
        )
        self._stops = StopStrings(request.stop)
        self._parser = request.parser() if request.parser else None
        self._characters = 0
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the request, so that it takes no further deltas."""
        return self._stops.found is not None

    def process(self, delta: Delta) -> None:
        """Fill in text, events, offsets and stop reason. Cut the delta after the token that completes a stop string."""
        tokens, ending = delta.tokens, ""
        hidden = len(tokens) - 1 if delta.stop_token is not None and not self._request.include_stop else -1
        for index, token in enumerate(tokens):
            delta.offsets.append(self._characters)
            if index != hidden:
                self._add(delta, self._shown(self._detokenizer.feed((token,))))
            self._tokens += 1
            delta.reasoning_tokens += self._parser is not None and self._parser.in_reasoning
            if self.stopped:
                count = index + 1
                delta.tokens, delta.accepted = tokens[:count], delta.accepted[:count]
                delta.log_probs = delta.log_probs[:count]
                delta.stop_token = None  # it may be among those that are cut off
                break
        if not self.stopped and delta.finish_reason is not None:
            ending = self._shown(self._detokenizer.flush())
        if self.stopped:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._stops.found
            ending += self._stops.found if self._request.include_stop and self._stops.found else ""
        elif delta.finish_reason is not None:
            ending += self._stops.flush()
            delta.stop_reason = None if delta.stop_token in self._request.eos_token_ids else delta.stop_token
        if delta.finish_reason is not None:
            self._add(delta, ending, last=True)
            cached = delta.usage.cached_tokens if delta.usage else 0
            delta.usage = Usage(len(self._request.prompt), self._tokens, cached)

    def _shown(self, text: str) -> str:
        """What of the next text can be shown. No stop string may end the request before `min_tokens`."""
        self._characters += len(text)
        return text if self._tokens < self._request.sampling.min_tokens else self._stops.feed(text)

    def _add(self, delta: Delta, text: str, *, last: bool = False) -> None:
        """Append text that can be shown, and what the parser finds in it. `last`: no more will come."""
        delta.text += text
        if self._parser is not None and (text or last):
            delta.events += self._parser.feed(text, last=last)
