"""What is known about acceptance: of one request while it runs, and of each (model, speculator) over time.

Depth counts from 1, so entry 0 of a sequence by depth belongs to depth 1. The bonus token is counted nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from paceline.core.messages import SpeculationStats
from paceline.core.policy.calibration import Calibration

REQUEST_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class RequestState:
    """Everything needed to resume a request on another target, but its prompt, which the gateway holds.

    `committed` is the output so far. `moving_average` is of accepted tokens per step, the latest steps weighing
    most. `drafts` are the workers that drafted for it, in order. `updated_at`: seconds since the epoch.
    """

    request_id: str
    model: str
    speculator: str
    seed: int
    prompt_length: int
    committed: tuple[int, ...]
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    moving_average: float = 0.0
    drafts: tuple[str, ...] = ()
    updated_at: float = 0.0

    @property
    def committed_length(self) -> int:
        return len(self.committed)


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts of guesses and of hits; they add up. Floats, because stored totals fade (`AcceptanceStore`).

    `drafted` counts verified nodes, several per depth in a tree. `drafted_by_depth[i]` counts verifications
    in which some node at depth i + 1 was verified, `accepted_by_depth[i]` those in which it was accepted.
    `cell_drafted` counts guesses by the cells of `Calibration`, in its order, `cell_accepted` those of them
    that the target drew, among those whose parent was accepted.
    """

    drafted: float = 0.0
    drafted_by_depth: Sequence[float] = ()
    accepted_by_depth: Sequence[float] = ()
    cell_drafted: Sequence[float] = ()
    cell_accepted: Sequence[float] = ()

    @classmethod
    def of(cls, stats: SpeculationStats) -> AcceptanceCounts:
        return cls(stats.drafted_tokens, tuple(stats.drafted_by_depth), tuple(stats.accepted_by_depth))

    @property
    def accepted(self) -> float:
        return sum(self.accepted_by_depth)

    @property
    def verifications(self) -> float:
        """Steps that verified something: all of them verified depth 1."""
        return self.drafted_by_depth[0] if self.drafted_by_depth else 0.0

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return self.accepted / self.verifications if self.verifications else 0.0

    def rates(self) -> list[float]:
        """Entry i: how often depth i + 1 was accepted, given that everything above it was.

        Where trees differ in depth this is a lower bound: one that ended above counts as a miss.
        """
        return conditional_rates(self.drafted_by_depth, self.accepted_by_depth)

    def calibration(self) -> list[float | None]:
        """Share drawn of the guesses to which the speculator gave a probability in each bin of `Calibration`;
        None for bins without a guess."""
        drafted, accepted = Calibration.by_bin(self.cell_drafted), Calibration.by_bin(self.cell_accepted)
        return [a / d if d else None for d, a in zip(drafted, accepted, strict=True)]

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.drafted + other.drafted,
            _sum(self.drafted_by_depth, other.drafted_by_depth),
            _sum(self.accepted_by_depth, other.accepted_by_depth),
            _sum(self.cell_drafted, other.cell_drafted),
            _sum(self.cell_accepted, other.cell_accepted),
        )

    def __mul__(self, factor: float) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.drafted * factor,
            *(
                tuple(count * factor for count in counts)
                for counts in (
                    self.drafted_by_depth,
                    self.accepted_by_depth,
                    self.cell_drafted,
                    self.cell_accepted,
                )
            ),
        )


def conditional_rates(drafted_by_depth: Sequence[float], accepted_by_depth: Sequence[float]) -> list[float]:
    """How often each depth was accepted, given that everything above it was (see `AcceptanceCounts.rates`)."""
    rates = []
    above = float("inf")
    for drafted, accepted in zip(drafted_by_depth, accepted_by_depth, strict=True):
        tried = min(drafted, above)
        rates.append(accepted / tried if tried else 0.0)
        above = accepted
    return rates


class AcceptanceStore(Protocol):
    """Acceptance shared by all services. Every call may raise `StateUnavailableError`."""

    half_life_s: float
    """Stored totals of (model, speculator) halve over this time, so that they follow the traffic."""

    async def save_requests(self, states: Iterable[RequestState], finished: Iterable[str] = ()) -> None:
        """Keep these states for an hour and forget the requests that finished, in one round trip."""

    async def save_request(self, state: RequestState) -> None: ...

    async def load_request(self, request_id: str) -> RequestState | None: ...

    async def delete_request(self, request_id: str) -> None: ...

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Let the totals fade by their age, then add `counts`; atomic.

        After `StateUnavailableError` they may have been added or not; a caller that repeats may count twice.
        """

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        """Totals as of the last `record`; all zero for a pair never seen."""


def _sum(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0.0))
