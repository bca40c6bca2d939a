"""What a request's choices have come to: usage, and what speculation did for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from paceline.core.messages import SpeculationStats, Timings
from paceline_services.gateway.generation import GenerationRequest, OutputChunk

Json = dict[str, Any]


class RequestUsage:
    """Sums over all choices of one request."""

    def __init__(self, choices: Sequence[GenerationRequest], per_prompt: int) -> None:
        """`per_prompt`: choices that share a prompt; it counts once, and so does what a cache held of it."""
        self.open_choices = len(choices)
        self._per_prompt = per_prompt
        self._prompt_tokens = sum(len(choice.prompt) for choice in choices[::per_prompt])
        self._completion_tokens = 0
        self._cached_tokens = [0] * (len(choices) // per_prompt)
        self._stats: list[SpeculationStats] = []
        self._timings: list[Timings] = []

    def add(self, index: int, piece: OutputChunk) -> None:
        """A piece of the index-th choice."""
        self._completion_tokens += len(piece.tokens)
        if piece.finish_reason is not None:
            self.open_choices -= 1
            prompt = index // self._per_prompt
            self._cached_tokens[prompt] = max(self._cached_tokens[prompt], piece.cached_tokens)
            self._timings.append(piece.timings)
            self._stats += [piece.speculation] if piece.speculation else []

    def usage(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }

    def speculation(self) -> Json:
        """Acceptance length is accepted tokens per verification, without the bonus token."""
        total = SpeculationStats(
            drafted_by_depth=_summed(stats.drafted_by_depth for stats in self._stats),
            accepted_by_depth=_summed(stats.accepted_by_depth for stats in self._stats),
            drafted_tokens=sum(stats.drafted_tokens for stats in self._stats),
            verifications=sum(stats.verifications for stats in self._stats),
            steps=sum(stats.steps for stats in self._stats),
            drafts=list(dict.fromkeys(draft for stats in self._stats for draft in stats.drafts)),
            strategy=", ".join(dict.fromkeys(stats.strategy for stats in self._stats)),
            lossy=any(stats.lossy for stats in self._stats),
            drafter_invariant=all(stats.drafter_invariant for stats in self._stats),
        )
        derived = {"accepted_tokens": total.accepted_tokens, "acceptance_length": total.acceptance_length}
        return asdict(total) | derived

    def timings(self) -> Json:
        """The targets' own clocks, in seconds: of the choice that took longest."""
        return asdict(max(self._timings, key=lambda timings: timings.total_s, default=Timings()))


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
