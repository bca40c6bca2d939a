"""What was measured of one way to draft, on somebody's prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from paceline.config import SpeculativeConfig
from paceline.core.messages import SpeculationStats


@dataclass(frozen=True, slots=True)
class MeasuredCompletion:
    """To one prompt. `accepted[i]`: its token i was guessed. `stats`: how its steps went."""

    prompt_tokens: int
    accepted: Sequence[bool]
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Of one way to draft, at one temperature. `answers`: one per prompt, each decoded alone."""

    temperature: float
    answers: Sequence[MeasuredCompletion]

    @property
    def steps(self) -> int:
        return sum(answer.stats.steps for answer in self.answers)

    @property
    def verifications(self) -> int:
        """Steps that verified any guess."""
        return sum(answer.stats.verifications for answer in self.answers)

    @property
    def nodes(self) -> int:
        """Guesses verified."""
        return sum(answer.stats.drafted_tokens for answer in self.answers)

    @property
    def length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return sum(self.accepted_by_depth) / max(1, self.verifications)

    @property
    def per_step(self) -> float:
        """Accepted tokens per step, whether it had any guesses or not."""
        return sum(self.accepted_by_depth) / max(1, self.steps)

    @property
    def by_depth(self) -> list[float]:
        """At d: the share of verifications that accepted more than d tokens."""
        return [count / max(1, self.verifications) for count in self.accepted_by_depth]

    @property
    def first(self) -> float:
        """The share of verifications that accepted anything."""
        return next(iter(self.by_depth), 0.0)

    @property
    def accepted_by_depth(self) -> list[int]:
        return _summed([answer.stats.accepted_by_depth for answer in self.answers])

    @property
    def drafted_by_depth(self) -> list[int]:
        """At d: verifications with a guess deeper than d."""
        return _summed([answer.stats.drafted_by_depth for answer in self.answers])


@dataclass(frozen=True, slots=True)
class Speed:
    """Of so many requests at once, in tokens per second of all together. `predicted`: None where nobody can say."""

    requests: int
    plain: float
    speculative: float
    predicted: float | None = None

    @property
    def speedup(self) -> float:
        return self.speculative / self.plain


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """What is known of a way to draft before anything is measured."""

    trained: bool = True
    """Whether it drafts with a checkpoint."""
    same_vocabulary: bool = True
    other_special_tokens: Sequence[str] = ()
    """Roles such as `bos_token` in which draft and target have different tokens."""
    bare_prompts: bool = False
    """Whether the model has a chat template that the prompts do not go through."""
    position_limit: int = 0
    """The draft guesses nothing beyond; 0: no limit is known."""


@dataclass(frozen=True, slots=True)
class MethodMeasurement:
    """One way to draft. `acceptances`: by temperature. `speeds`: by requests at once, at the first temperature."""

    name: str
    config: SpeculativeConfig
    acceptances: Sequence[MeasuredAcceptance]
    speeds: Sequence[Speed]
    identical: bool | None
    """Whether the output was plain decoding's; None: with this way to verify it need not be."""
    facts: MethodFacts = field(default_factory=MethodFacts)

    @property
    def speedup(self) -> float:
        """The geometric mean over all numbers of requests at once."""
        return math.exp(sum(math.log(speed.speedup) for speed in self.speeds) / max(1, len(self.speeds)))


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
