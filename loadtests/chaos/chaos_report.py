"""What became of the requests, counted."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadtests.chaos.chaos_cases import ChaosCase
from loadtests.chaos.faults import Fault
from loadtests.chaos.stream_response import StreamResponse

log = logging.getLogger(__name__)

MAX_LOGGED_COMPLAINTS = 20
"""So many complaints are logged in full."""


@dataclass(slots=True)
class ChaosReport:
    """`errors`, `changed_outputs`, `lost_tokens` and `unsettled` have to stay zero, the rest says how much was tried.

    A request ends once, whole or with an error; `retries` are connections that went with a gateway that was struck,
    `refused` answers 429 and 503 while nobody could serve, both tried again by the client.
    """

    requests: int = 0
    errors: int = 0
    changed_outputs: int = 0
    lost_tokens: int = 0
    tokens: int = 0
    retries: int = 0
    refused: int = 0
    replays: int = 0
    """Requests that moved from one target to another, as far as the gateways lived to tell."""
    unsettled: int = 0
    """1: in the end some worker did not come back, or still had a request when all clients were gone."""
    faults: Counter[str] = field(default_factory=Counter)

    def record_finished(self, case: ChaosCase, got: StreamResponse) -> None:
        """A stream that came to its end."""
        self.requests += 1
        self.tokens += len(got.tokens)
        self.lost_tokens += max(0, len(case.expected.tokens) - len(got.tokens))
        if not got.equals(case.expected):
            self.changed_outputs += 1
            self._complain(f"{case.name}: expected {case.expected}, got {got}")

    def record_retry(self, case: ChaosCase, got: StreamResponse) -> None:
        """A stream that went with its gateway; the client tries again. What came has to be right all the same."""
        self.retries += 1
        if not got.is_prefix_of(case.expected):
            self.changed_outputs += 1
            self._complain(f"{case.name}: expected {case.expected}, got the beginning {got}")

    def record_error(self, case: ChaosCase, got: StreamResponse, reason: str) -> None:
        """A request without an answer. What had not come by then is lost."""
        self.requests += 1
        self.errors += 1
        self.lost_tokens += max(0, len(case.expected.tokens) - len(got.tokens))
        self._complain(f"{case.name}: {reason}, after {len(got.tokens)} tokens")

    def record_fault(self, blow: Fault, processes: int) -> None:
        kind = blow.victims[0].split("-")[0] if len(blow.victims) == 1 else "all " + blow.victims[0].split("-")[0] + "s"
        self.faults[f"{blow.kind} {kind}"] += processes

    @property
    def has_work(self) -> bool:
        """Whether anything was asked, and anybody struck."""
        return bool(self.requests and self.faults.total())

    @property
    def clean(self) -> bool:
        return not (self.errors or self.changed_outputs or self.lost_tokens or self.unsettled)

    def summary(self) -> dict[str, Any]:
        """One JSON object. `kills` are processes that a signal ended, `stops` those that it halted for a while."""
        stops = sum(number for name, number in self.faults.items() if name.startswith("stop"))
        return {
            "requests": self.requests,
            "errors": self.errors,
            "changed_outputs": self.changed_outputs,
            "lost_tokens": self.lost_tokens,
            "kills": self.faults.total() - stops,
            "stops": stops,
            "unsettled": self.unsettled,
            "tokens": self.tokens,
            "gateway_retries": self.retries,
            "refused": self.refused,
            "replays": self.replays,
            "blows": dict(sorted(self.faults.items())),
        }

    def _complain(self, text: str) -> None:
        if self.errors + self.changed_outputs <= MAX_LOGGED_COMPLAINTS:
            log.error("%s", text)
