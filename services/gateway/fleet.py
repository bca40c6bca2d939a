"""The workers this gateway can reach: a link to every target, and the addresses of the drafts.

The registry introduces workers; whether a target is up is told by its link alone. So a registry that is away,
or that forgot everything, changes nothing for the targets that are there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from paceline.messages import TargetDescription
from paceline.state.registry import Registered, WorkerRecord
from paceline.state.store import Store
from paceline.wire.errors import LinkError
from paceline.wire.target_link import TargetLink
from services.gateway.routing import best_target, draft_order

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
"""How often the list of workers is looked at, and a target that does not answer is tried again."""


@dataclass(slots=True, eq=False)
class Target:
    """A connected target. `in_flight` counts this gateway's requests on it, exact at every moment."""

    record: WorkerRecord
    link: TargetLink
    in_flight: int = 0
    heartbeat: Mapping[str, float] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        return not (self.link.lost or self.link.draining)

    @property
    def load(self) -> float:
        """Requests it has, from everybody, as far as known here."""
        told = self.heartbeat.get("running", 0.0) + self.heartbeat.get("waiting", 0.0)
        return max(float(self.in_flight), told)


class Fleet:
    """Connects to targets as they appear, and chooses among them."""

    def __init__(self, model: str, fingerprint: str) -> None:
        """Only workers with this vocabulary are used, and of targets only those that serve `model`."""
        self._model = model
        self._fingerprint = fingerprint
        self.targets: dict[str, Target] = {}
        """Those that are connected."""
        self._drafts: dict[str, float] = {}
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._came = asyncio.Condition()
        self._turn = count()

    @property
    def up(self) -> bool:
        return bool(self._usable())

    @property
    def in_flight(self) -> int:
        return sum(target.in_flight for target in self.targets.values())

    @property
    def description(self) -> TargetDescription | None:
        """What the targets serve; where they differ, the shortest context. None if none is up."""
        told = [target.link.description for target in self._usable().values()]
        return min(told, key=lambda description: description.max_model_len, default=None)

    def choose(self, prompt: Sequence[int]) -> Target | None:
        """The target for a new request, None if none is up."""
        usable = self._usable()
        best = best_target({key: target.load for key, target in usable.items()}, prompt)
        return None if best is None else usable[best]

    def drafts(self) -> list[str]:
        """Addresses of draft workers, in the order in which one request shall try them."""
        return draft_order(self._drafts, next(self._turn))

    async def wait_for_target(self, timeout_s: float) -> bool:
        """Wait until a target is up; False if none came in time."""
        try:
            async with asyncio.timeout(timeout_s), self._came:
                await self._came.wait_for(lambda: self.up)
        except TimeoutError:
            return False
        return True

    def learn(self, targets: Sequence[Registered], drafts: Sequence[Registered]) -> None:
        """The registry's present list: tend links to these targets, and no others that are not up."""
        self._drafts = {
            worker.record.address: worker.load.get("requests", 0.0)
            for worker in drafts
            if worker.record.fingerprint in ("", self._fingerprint)
        }
        listed = {_key(worker.record): worker for worker in targets}
        for key, worker in listed.items():
            if key in self.targets:
                self.targets[key].heartbeat = worker.load
            elif key not in self._tending:
                self._tending[key] = asyncio.create_task(self._tend(worker.record))
        for key in self._tending.keys() - listed.keys() - self.targets.keys():
            self._tending.pop(key).cancel()

    async def close(self) -> None:
        """Close every link; what still runs on them is cancelled."""
        tasks = list(self._tending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _usable(self) -> dict[str, Target]:
        return {key: target for key, target in self.targets.items() if target.usable}

    async def _tend(self, record: WorkerRecord) -> None:
        """Keep a link to one target until it is no longer listed."""
        while True:
            link = TargetLink(record.address)
            try:
                description = await link.connect()
                if complaint := self._complaint(description):
                    log.error("target %s is not used: %s", _key(record), complaint)
                    return
                await self._serve_with(Target(record, link))
            except LinkError as error:
                log.debug("%s", error)
            finally:
                await link.close()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _serve_with(self, target: Target) -> None:
        """Offer a connected target until its link is lost."""
        key = _key(target.record)
        log.info("target %s is up", key)
        async with self._came:
            self.targets[key] = target
            self._came.notify_all()
        try:
            await target.link.wait_lost()
        finally:
            del self.targets[key]

    def _complaint(self, description: TargetDescription) -> str | None:
        if description.model != self._model:
            return f"it serves {description.model!r}; this gateway has {self._model!r}"
        if description.vocabulary_fingerprint != self._fingerprint:
            return "its vocabulary differs from this gateway's: start both with the same --model"
        return None


def _key(record: WorkerRecord) -> str:
    """A worker that was restarted may have kept its id, but listens elsewhere."""
    return f"{record.worker_id}@{record.address}"


@asynccontextmanager
async def open_fleet(store: Store, model: str, fingerprint: str) -> AsyncIterator[Fleet]:
    """A fleet that follows the registry for as long as the context lasts."""
    fleet = Fleet(model, fingerprint)
    async with store.watcher("target") as targets, store.watcher("draft") as drafts:

        async def follow() -> None:
            while True:
                fleet.learn(targets.workers, drafts.workers)
                await asyncio.sleep(LOOK_EVERY_S)

        following = asyncio.create_task(follow(), name="follow the registry")
        try:
            yield fleet
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
            await fleet.close()
