"""Counts of the requests' outcomes."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadtests.chaos.chaos_cases import ChaosCase
from loadtests.chaos.faults import Fault
from loadtests.received_stream import ReceivedStream, is_prefix, same_answer

log = logging.getLogger(__name__)

MAX_LOGGED = 20
"""Most failed requests logged in full."""


@dataclass(slots=True)
class ChaosReport:
    """`errors`, `changed_outputs`, `lost_tokens`, `doubled_tokens` and `unsettled` must stay zero; the rest says how
    much was tried.

    A request ends once, whole or with an error. `retries` counts connections that broke with their gateway, `left`
    those that their client broke, `refused` responses 429 and 503, and streams that ended as unavailable: the client
    tries again after all of them. If its stream has ids, it resumes: `resumed` counts the streams that went on so,
    `restarts` those whose journal Redis had lost.
    """

    requests: int = 0
    errors: int = 0
    changed_outputs: int = 0
    lost_tokens: int = 0
    doubled_tokens: int = 0
    tokens: int = 0
    retries: int = 0
    left: int = 0
    resumed: int = 0
    restarts: int = 0
    refused: int = 0
    replays: int = 0
    """Requests that moved from one target to another, as last reported by each gateway process."""
    unsettled: int = 0
    """1 if at the end a worker did not come back, or still had a request after all clients had left."""
    faults: Counter[str] = field(default_factory=Counter)

    def record_finished(self, case: ChaosCase, got: ReceivedStream) -> None:
        """Count a stream that ended."""
        self.requests += 1
        self.tokens += len(got.tokens)
        self.lost_tokens += max(0, len(case.expected.tokens) - len(got.tokens))
        self.doubled_tokens += max(0, len(got.tokens) - len(case.expected.tokens))
        if not same_answer(got, case.expected):
            self.changed_outputs += 1
            self._log_failure(f"{case.name}: expected {case.expected}, got {got}")

    def record_retry(self, case: ChaosCase, got: ReceivedStream) -> None:
        """Count a stream that broke with its gateway; the client tries again. What it received must still be right."""
        self.retries += 1
        self._check_prefix(case, got)

    def record_restart(self, case: ChaosCase, got: ReceivedStream) -> None:
        """Count a stream that cannot be resumed; the client begins again."""
        self.restarts += 1
        self._check_prefix(case, got)

    def _check_prefix(self, case: ChaosCase, got: ReceivedStream) -> None:
        if not is_prefix(got, case.expected):
            self.changed_outputs += 1
            self._log_failure(f"{case.name}: expected {case.expected}, got a prefix {got}")

    def record_error(self, case: ChaosCase, got: ReceivedStream, reason: str) -> None:
        """Count a request without a whole answer. The missing tokens are lost."""
        self.requests += 1
        self.errors += 1
        self.lost_tokens += max(0, len(case.expected.tokens) - len(got.tokens))
        self._log_failure(f"{case.name}: {reason}, after {len(got.tokens)} tokens")

    def record_fault(self, fault: Fault, processes: int) -> None:
        """Count a fault that hit so many processes."""
        kind = fault.victims[0].split("-")[0]
        name = kind if len(fault.victims) == 1 else f"all {kind}s"
        self.faults[f"{fault.kind} {name}"] += processes

    @property
    def has_work(self) -> bool:
        """Whether there was a request and a fault."""
        return bool(self.requests and self.faults.total())

    @property
    def clean(self) -> bool:
        return not (self.errors or self.changed_outputs or self.lost_tokens or self.doubled_tokens or self.unsettled)

    def summary(self) -> dict[str, Any]:
        """For JSON. `kills`: processes ended by a signal; `stops`: processes halted; `blows`: faults by kind."""
        stops = sum(number for name, number in self.faults.items() if name.startswith("stop"))
        return {
            "requests": self.requests,
            "errors": self.errors,
            "changed_outputs": self.changed_outputs,
            "lost_tokens": self.lost_tokens,
            "doubled_tokens": self.doubled_tokens,
            "resumed": self.resumed,
            "kills": self.faults.total() - stops,
            "stops": stops,
            "unsettled": self.unsettled,
            "tokens": self.tokens,
            "gateway_retries": self.retries,
            "clients_left": self.left,
            "restarts": self.restarts,
            "refused": self.refused,
            "replays": self.replays,
            "blows": dict(sorted(self.faults.items())),
        }

    def _log_failure(self, text: str) -> None:
        if self.errors + self.changed_outputs <= MAX_LOGGED:
            log.error("%s", text)
