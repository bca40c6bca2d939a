"""The workers this gateway can reach: a link to every target, and the addresses of the drafts.

The registry introduces workers; whether a target is up is told by its link alone. So a registry that is away,
or that forgot everything, changes nothing for the targets that are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from paceline.core.messages import TargetDescription
from paceline.state.periodic_task import PeriodicTask
from paceline.state.state_store import StateStore
from paceline.state.worker_registry import RegisteredWorker, WorkerRecord
from paceline.state.worker_watcher import WorkerWatcher
from paceline.tls import Certificates
from paceline.wire.link_errors import LinkError
from paceline.wire.target_link import TargetLink
from paceline_services.gateway.routing.circuit_breaker import Breaker, BreakerState
from paceline_services.gateway.routing.cost_model import FleetThroughput, RequestCostModel, retry_after_s
from paceline_services.gateway.routing.draft_workers import DraftAcceptanceRefresh, DraftWorkers
from paceline_services.gateway.routing.session_affinity import SessionAffinity
from paceline_services.gateway.routing.target_worker import RoutingPrompt, Target
from paceline_services.gateway.routing.worker_selection import TargetCandidate, best_target

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 0.25
"""How often the list of workers is looked at, and a target that does not answer is tried again."""


@dataclass(frozen=True, slots=True)
class RoutedTarget:
    """A target, and what spoke for it."""

    target: Target
    candidate: TargetCandidate


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
        """Only workers with this vocabulary are used, and of targets only those that serve `model`.

        `others`: models whose targets are somebody else's business. Any further target is complained about.
        """
        self._model = model
        self._fingerprint = fingerprint
        self._other_models = others
        self._tls = tls
        self.targets: dict[str, Target] = {}
        """Those that are connected."""
        self.drafts = drafts or DraftWorkers()
        self.request_cost = RequestCostModel()
        self.throughput = FleetThroughput()
        self._heartbeats: dict[str, Mapping[str, float]] = {}
        self._breakers: dict[str, Breaker] = {}
        self._sessions = SessionAffinity()
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    @property
    def available(self) -> bool:
        """Whether a request can be sent now."""
        return bool(self._usable())

    @property
    def has_targets(self) -> bool:
        """Whether there is any target that takes requests, if only after a pause."""
        return self.targets_up > 0

    @property
    def targets_up(self) -> int:
        """Those that are reached and take requests, if only after a pause."""
        return len(self._up())

    @property
    def in_flight(self) -> int:
        return sum(target.in_flight for target in self.targets.values())

    @property
    def waiting(self) -> int:
        """Requests, from everybody, that wait for their first token, as far as known here."""
        return round(sum(target.waiting for target in self.targets.values()))

    @property
    def description(self) -> TargetDescription | None:
        """What the targets serve; where they differ, the shortest context. None if none is up."""
        told = [target.link.description for target in self.targets.values() if target.up]
        return min(told, key=lambda description: description.max_model_len, default=None)

    def breaker_states(self) -> dict[tuple[str, str], int]:
        """Of every worker that is listed, by its kind and its id or address."""
        targets = {("target", key): breaker.state.value for key, breaker in self._breakers.items()}
        return targets | {("draft", address): each.state.value for address, each in self.drafts.breakers.items()}

    def retry_after_s(self) -> int:
        """When to come back if there is no room now: once those that wait have had their turn."""
        if not self.available:
            return max(1, round(min((target.breaker.opens_in_s for target in self._up()), default=0.0)))
        ahead = sum(target.rows_before_first_token for target in self.targets.values())
        return retry_after_s(max(ahead, self.request_cost.rows.value), self.throughput.rows_per_s)

    def choose(
        self, text: RoutingPrompt, session: str = "", but: Collection[Target] = (), numerics: str | None = None
    ) -> RoutedTarget | None:
        """The target for a request, none of `but`; None if there is none to choose from now.

        `numerics`: of the target that drew the request's tokens so far. Targets with the same, however busy, are
        preferred to all others.
        """
        usable = {key: target for key, target in self._usable().items() if target not in but}
        usable = {key: target for key, target in usable.items() if target.numerics == numerics} or usable
        place = self._sessions.target_of(session)
        candidates = {
            key: target.candidate(text.blocks, self.request_cost, session=key == place)
            for key, target in usable.items()
        }
        best = best_target(candidates, text.tokens, session, text.salt)
        if best is None:
            return None
        self._sessions.assign(session, best)
        return RoutedTarget(usable[best], candidates[best])

    def has_other_than(self, target: Target | None) -> bool:
        """Whether a request could be sent elsewhere now."""
        return any(each is not target for each in self._usable().values())

    async def wait_for_target(self, timeout_s: float) -> bool:
        """Wait until a request can be sent; False if that was not so in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.available)
        except TimeoutError:
            return False
        return True

    async def refresh(self, targets: Sequence[RegisteredWorker], drafts: Sequence[RegisteredWorker]) -> None:
        """Take in the registry's present list, and how time has gone on."""
        self.update_workers(targets, drafts)
        self.throughput.tick(time.monotonic(), busy=bool(self.in_flight))
        async with self._changed:  # pauses may have ended
            self._changed.notify_all()

    def update_workers(self, targets: Sequence[RegisteredWorker], drafts: Sequence[RegisteredWorker]) -> None:
        """The registry's present list: tend links to these targets, and no others that are not up."""
        self.drafts.update_workers([each for each in drafts if each.record.fingerprint in ("", self._fingerprint)])
        listed = {_key(worker.record): worker for worker in targets if worker.record.model not in self._other_models}
        self._heartbeats = {key: worker.load for key, worker in listed.items()}
        for key, target in self.targets.items():
            target.update_heartbeat(self._heartbeats.get(key, target.heartbeat))
        for key, worker in listed.items():
            if key not in self._link_tasks and not worker.load.get("draining"):
                self._breakers.setdefault(key, Breaker())
                self._link_tasks[key] = asyncio.create_task(self._keep_link(worker.record))
        for key in self._link_tasks.keys() - listed.keys() - self.targets.keys():
            self._link_tasks.pop(key).cancel()
            self._breakers.pop(key, None)

    async def close(self) -> None:
        """Close every link; what still runs on them is cancelled."""
        tasks = list(self._link_tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _up(self) -> list[Target]:
        return [target for target in self.targets.values() if target.up]

    def _usable(self) -> dict[str, Target]:
        return {key: target for key, target in self.targets.items() if target.usable}

    async def _keep_link(self, record: WorkerRecord) -> None:
        """Keep a link to one target until it is no longer listed.

        One that cannot be used is looked at again when the link is lost: it may be started anew as it should be.
        """
        told = None
        while True:
            link = TargetLink(record.address, self._tls)
            try:
                description = await link.connect()
                complaint = self._mismatch(description)
                if complaint is None:
                    await self._offer(record, link)
                else:
                    if complaint != told:
                        log.error("target %s is not used: %s", _key(record), complaint)
                    await link.wait_lost()
                told = complaint
            except LinkError as error:
                log.debug("%s", error)
            finally:
                await link.close()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    async def _offer(self, record: WorkerRecord, link: TargetLink) -> None:
        """Offer a connected target until its link is lost."""
        key = _key(record)
        target = Target(record, link, self._breakers[key], heartbeat=self._heartbeats.get(key, {}))
        log.info("target %s is up", key)
        async with self._changed:
            self.targets[key] = target
            self._changed.notify_all()
        try:
            await link.wait_lost()
            if not (link.draining or target.heartbeat.get("draining")):
                self.record_failure(target)  # once, however many requests were on it
        finally:
            del self.targets[key]

    def record_failure(self, target: Target) -> None:
        """It has failed, by nobody else's fault."""
        before = target.breaker.state
        target.breaker.on_failure()
        if target.breaker.state == BreakerState.OPEN != before:
            log.warning(
                "target %s fails repeatedly: no requests for %.0f s", _key(target.record), target.breaker.opens_in_s
            )

    def _mismatch(self, description: TargetDescription) -> str | None:
        if description.model != self._model:
            return f"it serves {description.model!r}; this gateway has {self._model!r}"
        if description.vocabulary_fingerprint != self._fingerprint:
            return "its vocabulary differs from this gateway's: start both with the same --model"
        return None


def _key(record: WorkerRecord) -> str:
    """A worker that was restarted may have kept its id, but listens elsewhere."""
    return f"{record.worker_id}@{record.address}"


class FleetRefresh(PeriodicTask):
    """Shows a fleet what the registry lists, for as long as the context lasts."""

    interval_s = REFRESH_INTERVAL_S

    def __init__(self, fleet: Fleet, targets: WorkerWatcher, drafts: WorkerWatcher) -> None:
        self._fleet = fleet
        self._targets = targets
        self._drafts = drafts

    async def run_once(self) -> None:
        await self._fleet.refresh(self._targets.workers, self._drafts.workers)


@asynccontextmanager
async def open_fleet(
    store: StateStore, model: str, fingerprint: str, others: Collection[str] = (), tls: Certificates | None = None
) -> AsyncIterator[Fleet]:
    """A fleet that follows the registry for as long as the context lasts."""
    async with store.watcher("target") as targets, store.watcher("draft") as drafts, store.recorder() as recorder:
        kept = DraftWorkers(tell=partial(recorder.count, model))
        fleet = Fleet(model, fingerprint, kept, others, tls)
        try:
            async with DraftAcceptanceRefresh(kept, model, store), FleetRefresh(fleet, targets, drafts):
                yield fleet
        finally:
            await fleet.close()
