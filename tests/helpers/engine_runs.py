"""Requests that an engine decodes to their end, and what happened meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.engine import Engine
from paceline.messages import Delta, GenerationRequest
from paceline.telemetry.step_stats import StepStats


def run(
    engine: Engine, requests: Sequence[GenerationRequest], together: int = 100, steps: list[StepStats] | None = None
) -> dict[str, Delta]:
    """Serve all requests, `together` at a time; the whole answers by request. `steps` gets every step's numbers."""
    results = {request.request_id: Delta(request.request_id) for request in requests}
    queue, live = list(requests), 0
    while queue or engine.busy:
        while queue and live < together:
            engine.submit(queue.pop(0))
            live += 1
        for delta in engine.step():
            result = results[delta.request_id]
            assert not (result.tokens and delta.prompt_log_probs), "a prompt is scored before its output"
            result.extend(delta)
            live -= delta.finish_reason is not None
        if steps is not None:
            steps.append(engine.last_step)
        engine.check_integrity()
    return results


@dataclass
class EngineRun:
    """`outputs`: tokens, log-probabilities and finish reason by request, in the order of arrival."""

    outputs: dict[str, Delta] = field(default_factory=dict)
    accepted_by_depth: list[int] = field(default_factory=lambda: [0] * 8)
    verifications: int = 0
    cached: int = 0
    preemptions: int = 0

    def run(self, engine: Engine, *requests: GenerationRequest) -> EngineRun:
        steps: list[StepStats] = []
        new = run(engine, requests, steps=steps)
        for key, each in new.items():
            self.outputs[key] = Delta(key, each.tokens, log_probs=each.log_probs, finish_reason=each.finish_reason)
        self.cached += sum(each.usage.cached_tokens for each in new.values() if each.usage)
        for step in steps:
            self.verifications += step.speculation.verifications
            self.preemptions += step.preemptions
            for depth, count in enumerate(step.speculation.accepted_by_depth):
                self.accepted_by_depth[depth] += count
        return self

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def tokens(self) -> list[list[int]]:
        return [output.tokens for output in self.outputs.values()]
