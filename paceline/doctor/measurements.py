"""Measurements of one method on a user's prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from paceline.config import SpeculativeConfig
from paceline.messages import SpeculationStats


@dataclass(frozen=True, slots=True)
class MeasuredCompletion:
    """The completion of one prompt. `accepted[i]`: output token i was a draft token. `stats`: of its steps."""

    prompt_tokens: int
    accepted: Sequence[bool]
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Acceptance of one method at one temperature. `completions`: one per prompt, each decoded alone."""

    temperature: float
    completions: Sequence[MeasuredCompletion]

    @property
    def steps(self) -> int:
        return sum(completion.stats.steps for completion in self.completions)

    @property
    def verifications(self) -> int:
        """Steps that verified any draft token."""
        return sum(completion.stats.verifications for completion in self.completions)

    @property
    def nodes(self) -> int:
        """Draft tokens verified."""
        return sum(completion.stats.drafted_tokens for completion in self.completions)

    @property
    def length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return sum(self.accepted_by_depth) / max(1, self.verifications)

    @property
    def per_step(self) -> float:
        """Accepted tokens per step, with or without draft tokens."""
        return sum(self.accepted_by_depth) / max(1, self.steps)

    @property
    def by_depth(self) -> list[float]:
        """Entry d: the share of verifications that accepted more than d tokens."""
        return [count / max(1, self.verifications) for count in self.accepted_by_depth]

    @property
    def first(self) -> float:
        """The share of verifications that accepted anything."""
        return next(iter(self.by_depth), 0.0)

    @property
    def accepted_by_depth(self) -> list[int]:
        return _summed([completion.stats.accepted_by_depth for completion in self.completions])

    @property
    def drafted_by_depth(self) -> list[int]:
        """Entry d: verifications with a draft token deeper than d."""
        return _summed([completion.stats.drafted_by_depth for completion in self.completions])


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of `requests` requests together. `predicted`: None if there is no forecast."""

    requests: int
    plain: float
    speculative: float
    predicted: float | None = None

    @property
    def speedup(self) -> float:
        return self.speculative / self.plain


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """What is known of a method before it is measured."""

    trained: bool = True
    """Whether it drafts with a checkpoint."""
    same_vocabulary: bool = True
    other_special_tokens: Sequence[str] = ()
    """Roles such as `bos_token` for which draft and target have different tokens."""
    bare_prompts: bool = False
    """Whether the model has a chat template that the prompts do not use."""
    position_limit: int = 0
    """Position from which the draft proposes nothing; 0: no limit is known."""


@dataclass(frozen=True, slots=True)
class MethodMeasurement:
    """One method. `acceptances`: by temperature. `speeds`: by requests at once, at the first temperature."""

    name: str
    config: SpeculativeConfig
    acceptances: Sequence[MeasuredAcceptance]
    speeds: Sequence[Speed]
    identical: bool | None
    """Whether the output equals plain decoding's; None: the verification strategy does not promise that."""
    facts: MethodFacts = field(default_factory=MethodFacts)

    @property
    def speedup(self) -> float:
        """The geometric mean over all numbers of requests at once."""
        return math.exp(sum(math.log(speed.speedup) for speed in self.speeds) / max(1, len(self.speeds)))


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
