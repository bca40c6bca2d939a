"""Usage and speculation statistics of a request: sums over its completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest

from paceline.messages import SpeculationStats, Timings
from paceline.output_processor import TextDelta
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.http.json_body import Json


class RequestUsage:
    """Sums over all completions of one request. A prompt and its cached tokens count once, whatever `n` is."""

    def __init__(self, requests: Sequence[CompletionRequest], choices: int) -> None:
        """`choices`: completions for each prompt."""
        self.running = len(requests)
        """Completions that have not ended."""
        self._choices = choices
        self._prompt_tokens = sum(len(request.prompt) for request in requests[::choices])
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._counts_reasoning = any(request.output.parser for request in requests)
        self._cached_tokens = [0] * (len(requests) // choices)
        self._stats: list[SpeculationStats] = []
        self._timings: list[Timings] = []

    def add(self, index: int, delta: TextDelta) -> None:
        """Count a delta of the index-th completion."""
        self._completion_tokens += len(delta.tokens)
        self._reasoning_tokens += delta.reasoning_tokens
        if delta.finish_reason is not None:
            self.running -= 1
            prompt = index // self._choices
            if delta.usage is not None:
                self._cached_tokens[prompt] = max(self._cached_tokens[prompt], delta.usage.cached_tokens)
            self._timings.append(delta.timings)
            self._stats += [delta.speculation] if delta.speculation else []

    def usage(self) -> Json:
        details = {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
            **(details if self._counts_reasoning else {}),
        }

    def speculation(self) -> Json:
        return speculation_json(self._stats)

    def timings(self) -> Json:
        """Seconds by the target's clock, of the completion that took longest."""
        return asdict(max(self._timings, key=lambda timings: timings.total_s, default=Timings()))


def speculation_json(parts: Sequence[SpeculationStats]) -> Json:
    """The sum. The acceptance length is accepted tokens per verification, without the bonus token."""
    total = SpeculationStats(
        drafted_by_depth=_summed(stats.drafted_by_depth for stats in parts),
        accepted_by_depth=_summed(stats.accepted_by_depth for stats in parts),
        drafted_tokens=sum(stats.drafted_tokens for stats in parts),
        verifications=sum(stats.verifications for stats in parts),
        steps=sum(stats.steps for stats in parts),
        drafts=list(dict.fromkeys(draft for stats in parts for draft in stats.drafts)),
        strategy=", ".join(dict.fromkeys(stats.strategy for stats in parts)),
        lossy=any(stats.lossy for stats in parts),
        drafter_invariant=all(stats.drafter_invariant for stats in parts),
    )
    fields = asdict(total) | {"accepted_tokens": total.accepted_tokens, "acceptance_length": total.acceptance_length}
    del fields["accepted_average"]  # of one completion at one target
    return fields


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
