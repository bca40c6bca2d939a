"""The log-probabilities of one request's prompt, from whatever targets serve it."""

from __future__ import annotations

from dataclasses import replace

from paceline.messages import Delta, FinishReason, GenerationRequest, PromptLogProbs
from paceline_services.gateway.api_errors import GenerationError
from paceline_services.gateway.generation.completion_request import CompletionRequest

COMPLETED = (FinishReason.STOP, FinishReason.LENGTH)


class ScoredPrompt:
    """Lets every position of the prompt pass once: a target that takes over begins with the first one again."""

    def __init__(self, request: GenerationRequest) -> None:
        wanted = request.sampling.prompt_logprobs is not None
        self._end = len(request.prompt) if wanted else 1
        self._next = 1
        """The first position that has not come."""

    @property
    def complete(self) -> bool:
        """Whether all positions have come, or none are wanted."""
        return self._next >= self._end

    def left_of(self, request: CompletionRequest) -> CompletionRequest:
        """The request without what has come."""
        if not self.complete or request.sampling.prompt_logprobs is None:
            return request
        return replace(request, sampling=request.sampling.model_copy(update={"prompt_logprobs": None}))

    def take(self, delta: Delta) -> None:
        """Cut what has come before from a delta. Raises `GenerationError` if its target has left out a position."""
        parts = []
        for part in delta.prompt_log_probs:
            known, end = self._next - part.start, part.start + len(part.entries)
            if known < 0 or end > self._end:
                raise GenerationError(f"the target sent log-probabilities from position {part.start} of the prompt on")
            if end > self._next:
                parts.append(PromptLogProbs(self._next, part.entries[known:]))
                self._next = end
        delta.prompt_log_probs = parts
        if (delta.tokens or delta.finish_reason in COMPLETED) and not self.complete:
            raise GenerationError(f"the target sent no log-probability of the prompt's token {self._next}")
