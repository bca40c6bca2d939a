"""Acceptance of each request, and of each (model, speculator) over time.

Depth counts from 1: entry 0 of a sequence by depth belongs to depth 1. The bonus token is counted nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeAlias

from paceline.messages import SpeculationStats

RequestKey: TypeAlias = tuple[str, str]
"""The name of the client's API key, and an id of the request."""
REQUEST_TTL_S = 300


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts of draft tokens and of accepted ones. They are floats, because stored totals decay (`AcceptanceStore`).

    `drafted` counts verified nodes, several per depth in a tree. `drafted_by_depth[i]` counts verifications
    in which some node at depth i + 1 was verified, `accepted_by_depth[i]` those in which it was accepted.
    `cell_drafted` counts nodes whose parent was accepted, by the cells of `Calibration` in its order;
    `cell_accepted` counts the accepted ones among them.
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
        """Steps that verified any node: each of them verified depth 1."""
        return self.drafted_by_depth[0] if self.drafted_by_depth else 0.0

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return self.accepted / self.verifications if self.verifications else 0.0

    def rates(self) -> list[float]:
        """Entry i: how often depth i + 1 was accepted, given that all depths above it were.

        Where trees differ in depth this is a lower bound: a tree that ended above counts as a miss.
        """
        rates = []
        above = float("inf")
        for drafted, accepted in zip(self.drafted_by_depth, self.accepted_by_depth, strict=True):
            tried = min(drafted, above)
            rates.append(accepted / tried if tried else 0.0)
            above = accepted
        return rates

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.drafted + other.drafted,
            _sum(self.drafted_by_depth, other.drafted_by_depth),
            _sum(self.accepted_by_depth, other.accepted_by_depth),
            _sum(self.cell_drafted, other.cell_drafted),
            _sum(self.cell_accepted, other.cell_accepted),
        )


def _sum(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0.0))


class AcceptanceStore(Protocol):
    """Acceptance shared by all services. Every call may raise `StateUnavailableError`."""

    async def save_requests(self, reports: Mapping[RequestKey, str]) -> None:
        """Keep what is known of these requests, as JSON, for `REQUEST_TTL_S`."""

    async def request(self, key: RequestKey) -> str | None:
        """What is kept of a request; None: nothing, or nothing any more."""

    async def record(self, model: str, speculator: str, counts: AcceptanceCounts) -> None:
        """Add `counts` to the totals of (model, speculator), atomically. In Redis, the totals decay by their age first.

        After `StateUnavailableError` the counts may have been added or not: a caller that repeats may count twice.
        """

    async def acceptance(self, model: str, speculator: str) -> AcceptanceCounts:
        """Totals as of the last `record`; all zero for an unknown pair."""
