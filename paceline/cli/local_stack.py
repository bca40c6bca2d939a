"""A running deployment: Redis, drafts, targets and gateway under one supervisor."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.cli.cpu_affinity import affinity_restored, move_off_cores
from paceline.cli.deployment import Deployment
from paceline.cli.supervised_process import SupervisedProcess
from paceline.cli.supervisor import Supervisor
from paceline.launcher import KILL_DRAFT
from paceline.state import StateError, StateStore, WorkerWatcher, open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.state.periodic_task import PeriodicTask

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often workers and gateway are checked for readiness."""
GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class LocalStack:
    """Await `ready` first; after that, a service that dies is started again."""

    deployment: Deployment
    supervisor: Supervisor
    redis_url: str
    store: StateStore
    began: float = field(default_factory=time.monotonic)

    async def ready(
        self, missing: Callable[[Collection[str]], None] = lambda _: None, *, without_drafts: bool = False
    ) -> None:
        """Return when all services are ready. Raises `StartError` if one cannot start.

        `missing` is called with the names of the services that are not ready, whenever they change. `without_drafts`:
        drafts that cannot start are no error.
        """
        names = tuple(self.deployment.drafts) if without_drafts else ()
        spared = [each for each in self.supervisor.children if each.startswith(names)]  # with the ranks of a draft
        await self.supervisor.until(self._all_ready(missing), spared)
        move_off_cores(self.deployment.target_cores)  # not earlier: all services use all cores while they load

    async def _all_ready(self, missing: Callable[[Collection[str]], None]) -> None:
        async with self.store.watcher("target", POLL_S) as targets, self.store.watcher("draft", POLL_S) as drafts:
            waits = {id_: _registered(targets, id_) for id_ in self.deployment.targets}
            waits |= {id_: self._registered_or_ended(drafts, id_) for id_ in self.deployment.drafts}
            waits[GATEWAY] = _healthy(self.deployment.url)
            pending = list(waits)

            async def arrival(name: str) -> None:
                await waits[name]
                pending.remove(name)
                missing(pending)
                if not self.supervisor.task(name).done():
                    log.info("%s is ready after %.1f s", name, time.monotonic() - self.began)

            missing(pending)
            await asyncio.gather(*map(arrival, waits))

    async def _registered_or_ended(self, drafts: WorkerWatcher, worker_id: str) -> None:
        registered = asyncio.ensure_future(_registered(drafts, worker_id))
        await asyncio.wait([registered, self.supervisor.task(worker_id)], return_when=asyncio.FIRST_COMPLETED)
        registered.cancel()


@asynccontextmanager
async def running_stack(
    deployment: Deployment, log_line: Callable[[str], None], redis_url: str | None = None
) -> AsyncIterator[LocalStack]:
    """Run everything while the context lasts, then stop it in order: the gateway first, Redis last.

    `redis_url` None: an embedded Redis. `log_line` is called with each line that a service logs. Enter it on the main
    thread: the kernel ends the services with the thread that started them. Raises `StateError`.
    """
    async with _redis(redis_url) as url, AsyncExitStack() as demo:
        drafts: list[SupervisedProcess] = []
        socket = await demo.enter_async_context(open_draft_killer(drafts)) if deployment.demo_page else None
        async with Supervisor(deployment.programs(url, socket), log_line) as supervisor, open_store(url) as store:
            drafts += [supervisor.children[name] for name in deployment.drafts]
            with affinity_restored():  # for what this process starts next
                yield LocalStack(deployment, supervisor, url, store)


@asynccontextmanager
async def _redis(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        async with open_store(url):  # raises before a service starts
            yield url
        return
    with EmbeddedRedis() as redis:
        async with RedisSupervisor(redis):
            yield redis.url


class RedisSupervisor(PeriodicTask):
    """Starts the embedded Redis again when it dies. It comes back empty; workers and gateways survive that."""

    interval_s = 0.5

    def __init__(self, redis: EmbeddedRedis) -> None:
        self._redis = redis

    async def run_once(self) -> None:
        if self._redis.running:
            return
        log.warning("the embedded Redis died and is started again")
        try:
            self._redis.start()  # blocks for a tenth of a second: it must run on this thread, see `EmbeddedRedis`
        except StateError as error:
            log.error("%s", error)  # the next call tries again


async def _registered(workers: WorkerWatcher, worker_id: str) -> None:
    await workers.wait_for(lambda known: any(worker.record.worker_id == worker_id for worker in known))


async def _healthy(url: str) -> None:
    """Wait until the gateway has a target."""
    import httpx

    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            with suppress(httpx.TransportError):  # it does not listen yet
                if (await client.get("/health")).is_success:
                    return
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_draft_killer(workers: Sequence[SupervisedProcess]) -> AsyncIterator[Path]:
    """Listen while the context lasts at a socket to which only this user can connect; yields its path.

    For a line `KILL_DRAFT`, kill the first of `workers` that runs, and reply with its name; "" if none runs.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await reader.readline() == KILL_DRAFT:
                killed = next((worker.program.name for worker in workers if worker.crash()), "")
                writer.write(f"{killed}\n".encode())
                await writer.drain()
        finally:
            writer.close()

    with TemporaryDirectory(prefix="paceline-page-") as folder:  # readable by this user alone
        path = Path(folder, "launcher")
        server = await asyncio.start_unix_server(serve, path)
        try:
            yield path
        finally:
            server.close()
