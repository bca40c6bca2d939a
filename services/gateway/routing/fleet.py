"""The workers that this gateway reaches: a link to every target, and the addresses of the drafts.

The registry lists workers; whether a target is up depends on its link alone. So connected targets stay in use while
the registry is away or empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from paceline.messages import GenerationRequest, TargetDescription
from paceline.state.acceptance_recorder import AcceptanceRecorder
from paceline.state.periodic_task import PeriodicTask
from paceline.state.state_store import StateStore
from paceline.state.worker_registry import RegisteredWorker, WorkerRecord
from paceline.state.worker_watcher import WorkerWatcher
from paceline.tls import Certificates
from paceline.wire.link_errors import LinkError
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.routing.circuit_breaker import Breaker
from paceline_services.gateway.routing.draft_workers import DraftAcceptanceRefresh, DraftWorkers
from paceline_services.gateway.routing.target_connection import RequestCostModel, TargetConnection
from paceline_services.gateway.routing.worker_selection import TargetCandidate, best_target, session_home

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 0.25
"""How often the list of workers is read, and a lost target is tried again."""
WAITING_INTERVAL_S = 0.05


class Fleet:
    """Connects to targets as they appear, and chooses among them."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        drafts: DraftWorkers | None = None,
        others: Collection[str] = (),
        tls: Certificates | None = None,
    ) -> None:
        """Uses workers with this vocabulary `fingerprint`, and targets that serve `model`.

        `others`: models whose targets other fleets use. Targets of any further model are logged as errors.
        """
        self._model = model
        self._fingerprint = fingerprint
        self._other_models = others
        self._tls = tls
        self.targets: dict[str, TargetConnection] = {}
        """Connected targets, by worker id and address."""
        self.drafts = drafts or DraftWorkers()
        self.request_cost = RequestCostModel()
        self._registered_loads: dict[str, Mapping[str, float]] = {}
        self._breakers: dict[str, Breaker] = {}
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    def has_target(self, needed: frozenset[str] = frozenset()) -> bool:
        """Whether a request for a target with these capabilities can be sent now."""
        return bool(self._usable(needed))

    def has_capable_target(self, needed: frozenset[str]) -> bool:
        """Whether a target that is up has these capabilities, be it one that takes no requests just now."""
        return self.description(needed) is not None

    @property
    def targets_up(self) -> int:
        """Targets that are connected and accept requests, be it after their breaker's pause."""
        return len(self._up())

    @property
    def unreached(self) -> list[str]:
        """Listed targets without a link, by worker id and address."""
        return sorted(self._registered_loads.keys() - self.targets.keys())

    @property
    def in_flight(self) -> int:
        return sum(len(target.requests) for target in self.targets.values())

    @property
    def waiting(self) -> int:
        """Requests of all gateways without a first token, as far as known here."""
        return round(sum(target.waiting for target in self.targets.values()))

    def description(self, needed: frozenset[str] = frozenset()) -> TargetDescription | None:
        """Of the targets that are up and have these capabilities, the one with the shortest context; None: of none."""
        descriptions = [target.link.description for target in self._up() if needed.issubset(target.capabilities)]
        return min(descriptions, key=lambda description: description.max_model_len, default=None)

    def breaker_states(self) -> dict[tuple[str, str], int]:
        """The breaker of every listed worker, by kind and id or address."""
        targets = {("target", key): breaker.state.value for key, breaker in self._breakers.items()}
        return targets | {("draft", address): each.state.value for address, each in self.drafts.breakers.items()}

    def retry_after_s(self) -> int:
        """Seconds until a refused request may succeed: until the waiting requests have started."""
        if not self.has_target():
            return max(1, round(min((target.breaker.probe_in_s for target in self._up()), default=0.0)))
        ahead = sum(target.rows_before_first_token for target in self.targets.values())
        return self.request_cost.retry_after_s(ahead)

    def choose(
        self,
        request: GenerationRequest,
        blocks: Sequence[int],
        needed: frozenset[str] = frozenset(),
        session: str = "",
        refused_by: TargetConnection | None = None,
        numerics: str | None = None,
    ) -> tuple[TargetConnection, TargetCandidate] | None:
        """The target for a request, and what was known of it; None if there is none to choose from now.

        `blocks`: the block hashes of the request's tokens. `needed`: capabilities. `session`: the request's
        conversation. Preferred, however busy, are first targets whose context holds the whole request, which another
        target's may have allowed, then targets other than `refused_by`, then those with `numerics`, which are those of
        the target that drew the request's latest token.
        """
        usable = self._usable(needed)
        home = session_home(list(usable), session, request.cache_salt)
        longest = len(request.prompt) + request.sampling.max_tokens
        # Each of these lines only prefers, the first most. `numerics` None: of no target, so all stay.
        usable = {key: each for key, each in usable.items() if each.link.description.max_model_len >= longest} or usable
        usable = {key: target for key, target in usable.items() if target is not refused_by} or usable
        usable = {key: target for key, target in usable.items() if target.numerics == numerics} or usable
        candidates = {
            key: target.candidate(blocks, self.request_cost, session=key == home) for key, target in usable.items()
        }
        best = best_target(candidates, request.tokens, request.cache_salt)
        return None if best is None else (usable[best], candidates[best])

    def has_other_than(self, target: TargetConnection | None, needed: frozenset[str]) -> bool:
        """Whether a request for a target with these capabilities could be sent elsewhere now."""
        return any(each is not target for each in self._usable(needed).values())

    async def wait_for_target(self, timeout_s: float, needed: frozenset[str] = frozenset()) -> bool:
        """Wait until a request for a target with these capabilities can be sent; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.has_target(needed))
        except TimeoutError:
            return False
        return True

    async def refresh(self, targets: Sequence[RegisteredWorker], drafts: Sequence[RegisteredWorker]) -> None:
        """Take the registry's current list, and measure the throughput."""
        self.update_workers(targets, drafts)
        self.request_cost.measure_throughput(time.monotonic(), busy=bool(self.in_flight))
        async with self._changed:  # breakers may have closed
            self._changed.notify_all()

    def update_workers(self, targets: Sequence[RegisteredWorker], drafts: Sequence[RegisteredWorker]) -> None:
        """Keep links to the listed targets; drop those that are neither listed nor connected."""
        self.drafts.update_workers([each for each in drafts if each.record.fingerprint in ("", self._fingerprint)])
        listed = {_key(worker.record): worker for worker in targets if worker.record.model not in self._other_models}
        self._registered_loads = {key: worker.load for key, worker in listed.items()}
        for key, target in self.targets.items():
            target.update_registered_load(self._registered_loads.get(key, target.registered_load))
        for key, worker in listed.items():
            if key not in self._link_tasks and not worker.load.get("draining"):
                self._breakers.setdefault(key, Breaker())
                self._link_tasks[key] = asyncio.create_task(self._keep_link(worker.record))
        for key in self._link_tasks.keys() - listed.keys() - self.targets.keys():
            self._link_tasks.pop(key).cancel()
            self._breakers.pop(key, None)

    async def close(self) -> None:
        """Close every link, which cancels its requests."""
        tasks = list(self._link_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _up(self) -> list[TargetConnection]:
        return [target for target in self.targets.values() if target.up]

    def _usable(self, needed: frozenset[str]) -> dict[str, TargetConnection]:
        return {
            key: target
            for key, target in self.targets.items()
            if target.usable and needed.issubset(target.capabilities)
        }

    async def _keep_link(self, record: WorkerRecord) -> None:
        """Connect to one target, again and again, until cancelled.

        A target that cannot be used is checked again after its link is lost: it may restart with other settings.
        """
        logged = None
        while True:
            link = TargetLink(record.address, self._tls)
            try:
                description = await link.connect()
                mismatch = self._mismatch(description)
                if mismatch is None:
                    await self._use_until_lost(record, link)
                else:
                    if mismatch != logged:
                        log.error("target %s is not used: %s", _key(record), mismatch)
                    await link.wait_lost()
                logged = mismatch
            except LinkError as error:
                log.debug("%s", error)
            finally:
                await link.close()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _use_until_lost(self, record: WorkerRecord, link: TargetLink) -> None:
        """Let requests use a connected target until its link is lost."""
        key = _key(record)
        target = TargetConnection(
            record, link, self._breakers[key], registered_load=self._registered_loads.get(key, {})
        )
        log.info("target %s is up", key)
        async with self._changed:
            self.targets[key] = target
            self._changed.notify_all()
        try:
            await link.wait_lost()
            if not (link.draining or target.registered_load.get("draining")):
                self.record_failure(target)  # once, however many requests it served
        finally:
            del self.targets[key]

    def record_failure(self, target: TargetConnection) -> None:
        """The target has failed, and no request is to blame."""
        if target.breaker.on_failure():
            log.warning(
                "target %s fails repeatedly: no requests for %.0f s", _key(target.record), target.breaker.probe_in_s
            )

    def _mismatch(self, description: TargetDescription) -> str | None:
        if description.model != self._model:
            return f"it serves {description.model!r}; this gateway has {self._model!r}"
        if description.vocabulary_fingerprint != self._fingerprint:
            return "its vocabulary differs from this gateway's: start both with the same --model"
        return None


def _key(record: WorkerRecord) -> str:
    """A restarted worker may keep its id, at another address."""
    return f"{record.worker_id}@{record.address}"


class FleetRefresh(PeriodicTask):
    """Refreshes a fleet from the registry; more often while there is no target, since requests wait for the first."""

    def __init__(self, fleet: Fleet, targets: WorkerWatcher, drafts: WorkerWatcher) -> None:
        self._fleet = fleet
        self._targets = targets
        self._drafts = drafts

    async def run_once(self) -> None:
        await self._fleet.refresh(self._targets.workers, self._drafts.workers)
        self.interval_s = self._targets.interval_s = REFRESH_INTERVAL_S if self._targets.workers else WAITING_INTERVAL_S


@asynccontextmanager
async def open_fleet(
    store: StateStore,
    recorder: AcceptanceRecorder,
    model: str,
    fingerprint: str,
    others: Collection[str] = (),
    tls: Certificates | None = None,
) -> AsyncIterator[Fleet]:
    """A fleet that follows the registry; closed with the context. `recorder` counts the acceptance of its drafts."""
    async with store.watcher("target") as targets, store.watcher("draft") as drafts:
        drafts_of_model = DraftWorkers(partial(recorder.count, model))
        fleet = Fleet(model, fingerprint, drafts_of_model, others, tls)
        try:
            async with DraftAcceptanceRefresh(drafts_of_model, model, store), FleetRefresh(fleet, targets, drafts):
                yield fleet
        finally:
            await fleet.close()
