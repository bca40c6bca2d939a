"""The draft workers of a model: who they are, how busy, how well their kind drafts, and which of them fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from paceline.core.messages import SpeculationStats
from paceline.state.acceptance import AcceptanceCounts
from paceline.state.periodic_task import PeriodicTask
from paceline.state.state_store import StateStore
from paceline.state.worker_registry import RegisteredWorker, WorkerRecord
from paceline_services.gateway.routing.circuit_breaker import Breaker, BreakerState
from paceline_services.gateway.routing.worker_selection import DraftCandidate, draft_order

log = logging.getLogger(__name__)

MIN_VERIFICATIONS = 50.0
"""Verifications after which a kind of draft is judged by its acceptance. What is stored fades, so it is tried anew."""
REFRESH_S = 2.0

RecordAcceptance = Callable[[str, AcceptanceCounts], None]


def draft_kind(record: WorkerRecord, *, greedy: bool) -> str:
    """Drafts that are worth the same to such a request: the name under which their acceptance is stored.

    Greedy and sampled requests are told apart: a draft foresees the one better than the other.
    """
    return f"{record.method} {record.model} {'greedy' if greedy else 'sampled'}"


class DraftWorkers:
    """Belongs to the event loop."""

    def __init__(self, tell: RecordAcceptance = lambda kind, acceptance: None) -> None:
        """`tell` hears what requests tell about a kind of draft."""
        self._tell = tell
        self.breakers: dict[str, Breaker] = {}
        """By address."""
        self._workers: dict[str, RegisteredWorker] = {}
        self._known: dict[str, AcceptanceCounts] = {}
        self._turn = count()

    def update_workers(self, workers: Sequence[RegisteredWorker]) -> None:
        """The present list."""
        self._workers = {worker.record.address: worker for worker in workers}
        self.breakers = {address: self.breakers.get(address, Breaker()) for address in self._workers}

    def update_acceptance(self, kind: str, acceptance: AcceptanceCounts) -> None:
        """What is known everywhere about a kind of draft."""
        self._known[kind] = acceptance

    def kinds(self) -> set[str]:
        """All that could be asked for."""
        records = [worker.record for worker in self._workers.values()]
        return {draft_kind(record, greedy=greedy) for record in records for greedy in (True, False)}

    def order(self, *, greedy: bool) -> list[str]:
        """Addresses in the order in which one request shall try them. `finished` must be told what came of it."""
        candidates = {address: self._candidate(address, greedy=greedy) for address in self._workers}
        order = draft_order(candidates, next(self._turn))
        if order:
            self.breakers[order[0]].on_sent()
        return order

    def record_request(self, offered: Sequence[str], stats: SpeculationStats | None, *, greedy: bool) -> None:
        """A request that was offered these drafts has ended; None: nothing is known of how it was drafted for.

        Those that drafted and lost it have failed, and those that its target passed over; the last one has not. Only a
        request with a single draft says what that one is worth.
        """
        addresses = {worker.record.worker_id: address for address, worker in self._workers.items()}
        served = [addresses[name] for name in stats.drafts if name in addresses] if stats else []
        if not served:
            if offered and (breaker := self.breakers.get(offered[0])):
                breaker.on_abandoned()
            return
        passed_over = offered[: offered.index(served[0])] if served[0] in offered else []
        for address in {*passed_over, *served[:-1]} - {served[-1]}:
            self._fail(address)
        self.breakers[served[-1]].on_success()
        if stats and len(served) == 1 and stats.verifications:
            self._tell(draft_kind(self._workers[served[0]].record, greedy=greedy), AcceptanceCounts.of(stats))

    def _candidate(self, address: str, *, greedy: bool) -> DraftCandidate:
        worker = self._workers[address]
        known = self._known.get(draft_kind(worker.record, greedy=greedy), AcceptanceCounts())
        accepted = known.acceptance_length if known.verifications >= MIN_VERIFICATIONS else None
        trusted = self.breakers[address].allows
        return DraftCandidate(worker.load.get("requests", 0.0), accepted, known.verifications, trusted)

    def _fail(self, address: str) -> None:
        if (breaker := self.breakers.get(address)) is None:
            return
        before = breaker.state
        breaker.on_failure()
        if breaker.state == BreakerState.OPEN != before:
            log.warning("draft %s fails repeatedly: it is asked last for %.0f s", address, breaker.opens_in_s)


class DraftAcceptanceRefresh(PeriodicTask):
    """Keeps `DraftWorkers` informed of what all gateways have learned, for as long as the context lasts."""

    interval_s = REFRESH_S

    def __init__(self, drafts: DraftWorkers, model: str, store: StateStore) -> None:
        self._drafts = drafts
        self._model = model
        self._store = store

    async def run_once(self) -> None:
        await self._store.presence.attempt(self._ask())

    async def _ask(self) -> None:
        for kind in self._drafts.kinds():
            self._drafts.update_acceptance(kind, await self._store.acceptance.acceptance(self._model, kind))
