"""From a request's deltas to its text. Stop strings are decided here, for the gateway and for `paceline.LLM` alike."""

from __future__ import annotations

from paceline.core.messages import Delta, FinishReason, GenerationRequest, Usage
from paceline.text import Detokenizer, StopStrings, Tokenizer


class OutputProcessor:
    """Adds the text to one request's deltas, and ends the request at its first stop string.

    At the end text, tokens, log-probabilities and finish reason agree: the tokens end with the one that completes the
    stop string. The outcome does not depend on how the tokens are cut into deltas.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=request.skip_special_tokens)
        self._stops = StopStrings(request.stop)
        self._characters = 0
        self._tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the request, so that it takes no further deltas."""
        return self._stops.found is not None

    def process(self, delta: Delta) -> None:
        """Fill in text, offsets and stop reason, and cut the delta after the token that completes a stop string."""
        tokens = delta.tokens
        hidden = len(tokens) - 1 if delta.stop_token is not None and not self._request.include_stop else -1
        for index, token in enumerate(tokens):
            delta.offsets.append(self._characters)
            if index != hidden:
                delta.text += self._shown(self._detokenizer.feed((token,)))
            self._tokens += 1
            if self.stopped:
                count = index + 1
                delta.tokens, delta.accepted = tokens[:count], delta.accepted[:count]
                delta.log_probs = delta.log_probs[:count]
                break
        if not self.stopped and delta.finish_reason is not None:
            delta.text += self._shown(self._detokenizer.flush())
        if self.stopped:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, self._stops.found
            delta.text += self._stops.found if self._request.include_stop and self._stops.found else ""
        elif delta.finish_reason is not None:
            delta.text += self._stops.flush()
            delta.stop_reason = None if delta.stop_token in self._request.eos_token_ids else delta.stop_token
        if delta.finish_reason is not None:
            cached = delta.usage.cached_tokens if delta.usage else 0
            delta.usage = Usage(len(self._request.prompt), self._tokens, cached)

    def _shown(self, text: str) -> str:
        """What of the next text can be shown. No stop string may end the request before `min_tokens`."""
        self._characters += len(text)
        return text if self._tokens < self._request.sampling.min_tokens else self._stops.feed(text)
