"""The draft workers of a model: how busy they are, how well their kind drafts, and which of them fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count

from paceline.messages import SpeculationStats
from paceline.state.acceptance import AcceptanceCounts
from paceline.state.periodic_task import PeriodicTask
from paceline.state.state_store import StateStore
from paceline.state.worker_registry import RegisteredWorker, WorkerRecord
from paceline_services.gateway.routing.circuit_breaker import Breaker
from paceline_services.gateway.routing.worker_selection import DraftCandidate, draft_order

log = logging.getLogger(__name__)

MIN_VERIFICATIONS = 50.0
"""Verifications after which a kind's acceptance counts. Stored counts fade, so every kind is tried again in time."""
REFRESH_S = 2.0

RecordAcceptance = Callable[[str, AcceptanceCounts], None]


def draft_kind(record: WorkerRecord, *, greedy: bool) -> str:
    """The kind of a draft, under which its acceptance is stored: method, model, and greedy or sampled requests.

    A draft predicts greedy and sampled requests differently well.
    """
    return f"{record.method} {record.model} {'greedy' if greedy else 'sampled'}"


class DraftWorkers:
    """Use it from one event loop."""

    def __init__(self, record_acceptance: RecordAcceptance = lambda kind, acceptance: None) -> None:
        """`record_acceptance` is called with what each request measured of a kind of draft."""
        self._record_acceptance = record_acceptance
        self.breakers: dict[str, Breaker] = {}
        """By address."""
        self._workers: dict[str, RegisteredWorker] = {}
        self._known: dict[str, AcceptanceCounts] = {}
        self._turn = count()

    @property
    def workers(self) -> Sequence[RegisteredWorker]:
        """As the registry lists them."""
        return list(self._workers.values())

    def acceptance(self, kind: str) -> AcceptanceCounts:
        """What all gateways have measured of a kind of draft, as of the last `update_acceptance`."""
        return self._known.get(kind, AcceptanceCounts())

    def update_workers(self, workers: Sequence[RegisteredWorker]) -> None:
        """Take the registry's current list."""
        self._workers = {worker.record.address: worker for worker in workers}
        self.breakers = {address: self.breakers.get(address, Breaker()) for address in self._workers}

    def update_acceptance(self, kind: str, acceptance: AcceptanceCounts) -> None:
        """Take what all gateways have measured of a kind of draft."""
        self._known[kind] = acceptance

    def kinds(self) -> set[str]:
        """The kinds of all drafts."""
        records = [worker.record for worker in self._workers.values()]
        return {draft_kind(record, greedy=greedy) for record in records for greedy in (True, False)}

    def order(self, *, greedy: bool) -> list[str]:
        """Addresses in the order in which one request tries them. `record_request` must follow."""
        candidates = {address: self._candidate(address, greedy=greedy) for address in self._workers}
        order = draft_order(candidates, next(self._turn))
        if order:
            self.breakers[order[0]].on_sent(order)
        return order

    def record_request(self, offered: Sequence[str], stats: SpeculationStats | None, *, greedy: bool) -> None:
        """The request that `order` gave these drafts has ended, with these statistics if there are any.

        A draft worker that lost the request has failed, and so has one that its target passed over; the worker that
        served it last has not. The acceptance of a request counts for a kind only if a single draft worker served it.
        """
        addresses = {worker.record.worker_id: address for address, worker in self._workers.items()}
        served = [addresses[name] for name in stats.drafts if name in addresses] if stats else []
        if not served:
            if offered and (breaker := self.breakers.get(offered[0])):
                breaker.on_abandoned(offered)
            return
        passed_over = offered[: offered.index(served[0])] if served[0] in offered else []
        for address in {*passed_over, *served[:-1]} - {served[-1]}:
            if (breaker := self.breakers.get(address)) is not None and breaker.on_failure():
                log.warning("draft %s fails repeatedly: it is tried last for %.0f s", address, breaker.probe_in_s)
        self.breakers[served[-1]].on_success()
        if stats and len(served) == 1 and stats.verifications:
            self._record_acceptance(
                draft_kind(self._workers[served[0]].record, greedy=greedy), AcceptanceCounts.of(stats)
            )

    def _candidate(self, address: str, *, greedy: bool) -> DraftCandidate:
        worker = self._workers[address]
        known = self.acceptance(draft_kind(worker.record, greedy=greedy))
        accepted = known.acceptance_length if known.verifications >= MIN_VERIFICATIONS else None
        healthy = self.breakers[address].allows
        return DraftCandidate(worker.load.get("requests", 0.0), accepted, known.verifications, healthy)


class DraftAcceptanceRefresh(PeriodicTask):
    """Reads the acceptance of each kind of draft from the state store."""

    interval_s = REFRESH_S

    def __init__(self, drafts: DraftWorkers, model: str, store: StateStore) -> None:
        self._drafts = drafts
        self._model = model
        self._store = store

    async def run_once(self) -> None:
        for kind in self._drafts.kinds():
            if not await self._store.presence.attempt(self._read(kind)):
                return

    async def _read(self, kind: str) -> None:
        self._drafts.update_acceptance(kind, await self._store.acceptance.acceptance(self._model, kind))
