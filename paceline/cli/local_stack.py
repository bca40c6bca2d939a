"""A deployment that runs: Redis, drafts, targets and gateway under one supervisor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
from rich.console import Console

from paceline.cli.cpu_affinity import affinity_restored, move_off_cores
from paceline.cli.deployment import Deployment
from paceline.cli.supervisor import Supervisor
from paceline.state import StateError, StateStore, WorkerWatcher, open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.state.periodic_task import PeriodicTask

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""How often workers and gateway are asked whether they are ready yet."""

GATEWAY = "gateway"
LAST_LINES = 40


@dataclass(frozen=True, slots=True)
class LocalStack:
    """Await `ready` first; after that, whatever dies is started again."""

    deployment: Deployment
    supervisor: Supervisor
    redis_url: str
    store: StateStore
    began: float = field(default_factory=time.monotonic)

    async def ready(self, missing: Callable[[Collection[str]], None] = lambda _: None) -> None:
        """Return once requests are served and drafted for. Raises `ServiceStartError` if it does not come to that.

        `missing` is told whom it still waits for, whenever that changes.
        """
        await self.supervisor.until(self._all_ready(missing))
        move_off_cores(self.deployment.target_cores)  # not before: until then all have much to load

    async def _all_ready(self, missing: Callable[[Collection[str]], None]) -> None:
        async with (
            self.store.watcher("target", LOOK_EVERY_S) as targets,
            self.store.watcher("draft", LOOK_EVERY_S) as drafts,
        ):
            waits = {id_: _registered(targets, id_) for id_ in self.deployment.targets}
            waits |= {id_: _registered(drafts, id_) for id_ in self.deployment.drafts}
            waits[GATEWAY] = _healthy(self.deployment.url)
            pending = list(waits)

            async def arrival(name: str) -> None:
                await waits[name]
                pending.remove(name)
                missing(pending)
                log.info("%s is ready after %.1f s", name, time.monotonic() - self.began)

            missing(pending)
            await asyncio.gather(*map(arrival, waits))


@asynccontextmanager
async def running_stack(
    deployment: Deployment, say: Callable[[str], None], redis_url: str | None = None
) -> AsyncIterator[LocalStack]:
    """Run everything for as long as the context lasts, then stop it in order: what serves first, Redis last.

    `redis_url` None: a Redis of our own. `say` gets what the services log, line by line. Enter it on the main
    thread: the kernel ends the services with the thread that started them. Raises `StateError`.
    """
    async with (
        _redis(redis_url) as url,
        open_store(url) as store,
        Supervisor(deployment.programs(url), say) as supervisor,
    ):
        with affinity_restored():  # for what this process starts next
            yield LocalStack(deployment, supervisor, url, store)


@asynccontextmanager
async def ready_stack(deployment: Deployment, console: Console) -> AsyncIterator[LocalStack]:
    """A stack to measure: ready, and silent. If something fails, the last lines of its log go to stderr.

    `console` shows who is still loading. Raises `ServiceStartError` or `StateError`.
    """
    said: deque[str] = deque(maxlen=LAST_LINES)
    try:
        async with running_stack(deployment, said.append) as stack:
            with console.status("starting") as status:
                await stack.ready(lambda missing: status.update(f"loading: {', '.join(missing)}"))
            yield stack
    except Exception:
        Console(stderr=True, highlight=False, markup=False).print(*said, sep="\n")
        raise


@asynccontextmanager
async def _redis(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    with EmbeddedRedis() as redis:
        async with RedisSupervisor(redis):
            yield redis.url


class RedisSupervisor(PeriodicTask):
    """Starts the embedded Redis again should it die: empty, which workers and gateways outlive."""

    interval_s = 0.5

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._redis = redis

    async def run_once(self) -> None:
        if self._redis.running:
            return
        log.warning("the embedded Redis died and is started again")
        try:
            self._redis.start()  # blocks for a tenth of a second; it must be this thread, see `EmbeddedRedis`
        except StateError as error:
            log.error("%s", error)  # and tried again in a moment


async def _registered(workers: WorkerWatcher, worker_id: str) -> None:
    await workers.wait_for(lambda known: any(worker.record.worker_id == worker_id for worker in known))


async def _healthy(url: str) -> None:
    """Wait until the gateway has a target."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            with suppress(httpx.TransportError):  # it does not listen yet
                if (await client.get("/health")).is_success:
                    return
            await asyncio.sleep(LOOK_EVERY_S)
