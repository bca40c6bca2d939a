"""Requests that an engine decodes to their end, and what happened meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest


@dataclass
class EngineRun:
    """`outputs`: tokens, log-probabilities and finish reason by request, in the order of arrival."""

    outputs: dict[str, Delta] = field(default_factory=dict)
    accepted_by_depth: list[int] = field(default_factory=lambda: [0] * 8)
    verifications: int = 0
    cached: int = 0
    preemptions: int = 0

    def run(self, engine: Engine, *requests: GenerationRequest) -> EngineRun:
        for request in requests:
            self.outputs[request.request_id] = Delta(request.request_id)
            engine.submit(request)
        while engine.busy:
            for delta in engine.step():
                output = self.outputs[delta.request_id]
                output.tokens += delta.tokens
                output.log_probs += delta.log_probs
                output.finish_reason = delta.finish_reason
                self.cached += delta.usage.cached_tokens if delta.usage else 0
            step = engine.last_step
            self.verifications += step.speculation.verifications
            for depth, count in enumerate(step.speculation.accepted_by_depth):
                self.accepted_by_depth[depth] += count
            self.preemptions += step.preemptions
            engine.check_integrity()
        return self

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def tokens(self) -> list[list[int]]:
        return [output.tokens for output in self.outputs.values()]
