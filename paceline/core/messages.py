"""What a gateway and a target engine say to each other, as plain Python; `paceline.wire` puts it into frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

from paceline.config import SamplingParams, SpeculativeOptions


class FinishReason(StrEnum):
    """Why a request ended; `stop` and `length` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it reaches a target. `committed` is output that another target produced before it was lost."""

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    committed: Sequence[int] = ()
    drafts: Sequence[str] = ()
    cache_salt: str = ""
    """Requests share what was computed or learned of others only under the same salt; "" is one, too."""
    client: str = ""
    """Clients take turns; "" is one, too."""
    group: str = ""
    """Groups of one client take turns: the choices of one request are one. "": the request is alone in its own."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural-log probabilities of one drawn token, and of the most probable ones as (token, log-probability)."""

    log_prob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """The sender's own clock, in seconds."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    total_s: float = 0.0


def reduce_slots(message: Any) -> tuple[type[Any], tuple[object, ...]]:
    """`__reduce__` of a dataclass with slots that passes through pipes all the time: faster than its own."""
    kind = type(message)
    return kind, attrgetter(*kind.__slots__)(message)


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one request. Depth counts from 1; the bonus token is counted nowhere."""

    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_tokens: int = 0
    verifications: int = 0
    steps: int = 0
    drafts: list[str] = field(default_factory=list)
    strategy: str = "coupled"
    """How guesses were verified, and what that promises of the output: see `paceline.core.verify.Strategy`."""
    lossy: bool = False
    drafter_invariant: bool = True

    __reduce__ = reduce_slots

    def record(self, nodes: int, reached: int, accepted: int) -> None:
        """One target step verified so many nodes, the deepest at `reached`, and accepted this many along one path."""
        self.steps += 1
        if not nodes:
            return
        self.verifications += 1
        self.drafted_tokens += nodes
        lacks = [0] * (reached - len(self.drafted_by_depth))
        self.drafted_by_depth += lacks
        self.accepted_by_depth += lacks
        for depth in range(reached):
            self.drafted_by_depth[depth] += 1
        for depth in range(min(accepted, reached)):
            self.accepted_by_depth[depth] += 1

    def snapshot(self) -> SpeculationStats:
        """A copy that stays as it is."""
        return SpeculationStats(
            self.drafted_by_depth.copy(),
            self.accepted_by_depth.copy(),
            self.drafted_tokens,
            self.verifications,
            self.steps,
            self.drafts.copy(),
            self.strategy,
            self.lossy,
            self.drafter_invariant,
        )

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return self.accepted_tokens / self.verifications if self.verifications else 0.0


GRAMMAR_ERROR = "grammar: "
"""Begins the error of a request whose grammar is to blame: every target would say the same."""


@dataclass(slots=True)
class Delta:
    """New tokens of one request. `accepted[i]`: token i was guessed, and not the target's bonus."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    log_probs: list[LogProbs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    timings: Timings = Timings()
    error: str = ""

    __reduce__ = reduce_slots


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy a target is."""

    running: int
    waiting: int
    free_slots: int
    rows: int
    step_s: float


@dataclass(frozen=True, slots=True)
class TargetDescription:
    worker_id: str
    model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_model_len: int
    slots: int
    rows_invariant: bool
    eos_token_ids: Sequence[int]
    method: str
    numerics: str = ""
    """What its numbers depend on, see `paceline.model.Model`. Empty: an older worker, which does not say."""
