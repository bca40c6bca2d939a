"""A deployment with several replicas of everything, whose processes can be struck. Whoever dies is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtests.chaos.faults import REDIS, Fault, ProcessNames, ProcessPart
from paceline.cli.deployment import LOOPBACK, Deployment, DeploymentOptions, free_ports, plan_deployment
from paceline.cli.local_stack import RedisSupervisor
from paceline.cli.process_tree import process_and_descendants
from paceline.cli.supervised_process import Backoff, Program, SupervisedProcess
from paceline.cli.supervisor import Supervisor
from paceline.state import StateStore, StateUnavailableError, open_store
from paceline.state.embedded_redis import EmbeddedRedis

LOOK_EVERY_S = 0.1
RESUME_S = 120.0
"""All targets may be gone at once, and on a busy machine one takes a while to start."""
GATEWAY_MODULE = "paceline_services.gateway"
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
RUNNING = ("paceline_num_requests_running", "paceline_num_requests_waiting", "paceline_draft_open_requests")
REPLAYS = "paceline_replays_total"
TARGETS_UP = "paceline_targets_up"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosStack:
    """Use with `running`. Names are those of the programs, and `redis`."""

    deployment: Deployment
    urls: dict[str, str]
    """Of the gateways, by name."""
    supervisor: Supervisor
    redis: EmbeddedRedis
    store: StateStore
    http: httpx.AsyncClient
    faults_at: dict[str, list[float]] = field(default_factory=dict)
    """When a gateway was last to lose its connections or refuse new ones, by URL: times of the event loop."""

    @property
    def ports(self) -> dict[str, int]:
        """Of gateways and Redis, by name."""
        urls = {**self.urls, REDIS: self.redis.url}
        return {name: int(urlsplit(url).port or 0) for name, url in urls.items()}

    @property
    def victims(self) -> ProcessNames:
        return ProcessNames(tuple(self.urls), tuple(self.deployment.targets), tuple(self.deployment.drafts))

    def child(self, name: str) -> SupervisedProcess:
        return self.supervisor.children[name]

    def pids(self, name: str) -> list[int]:
        """A worker's service and its compute, as far as they run just now."""
        pid = self.redis.pid if name == REDIS else self.child(name).pid
        return [] if pid is None else list(process_and_descendants(pid))

    def send(self, name: str, number: signal.Signals, half: ProcessPart = "service") -> bool:
        """Signal one half of a worker, or both. False: there is nobody to signal just now."""
        pids = self.pids(name)
        chosen = {"service": pids[:1], "compute": pids[1:], "both": pids}[half]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(chosen)

    def listens(self, name: str) -> bool:
        """Whether it has come up, since it was started last. One that is stopped still listens."""
        ports = {**self.deployment.targets, **self.deployment.drafts, **self.ports}
        with suppress(OSError), socket.create_connection((LOOPBACK, ports[name]), timeout=1.0):
            return True
        return False

    def inject(self, blow: Fault) -> int:
        """How many of its victims were up. The others are spared: on a slow machine nobody would ever come up again."""
        hit = 0
        for name in filter(self.listens, blow.victims):
            if name in self.urls:
                self.faults_at.setdefault(self.urls[name], []).append(asyncio.get_running_loop().time())
            hit += self.send(name, SIGNALS[blow.kind], blow.half)
        return hit

    def resume(self, names: Sequence[str] = ()) -> None:
        """Wake who was stopped; without names, everybody."""
        for name in names or (*self.supervisor.children, REDIS):
            self.send(name, signal.SIGCONT, "both")

    async def wait_ready(self) -> None:
        """Return when every process is there, registered, and serves, and every gateway reaches every target."""
        await asyncio.gather(self._registered(), *map(self._reaches, self.urls.values()), *map(self.busy, self.workers))

    @property
    def workers(self) -> list[str]:
        return [*self.deployment.targets, *self.deployment.drafts]

    async def requests(self) -> float:
        """How many the workers have, one at its target and its draft counted twice."""
        return sum([await self.busy(name) for name in self.workers])

    async def idle(self) -> None:
        """Return when no worker has a request any more."""
        while await self.requests():  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(LOOK_EVERY_S)

    async def busy(self, name: str) -> float:
        """The requests that a worker has, by its metrics. Waits until it tells."""
        return await self.metric(f"http://{LOOPBACK}:{self.deployment.metrics[name]}", *RUNNING)

    async def metric(self, url: str, *names: str) -> float:
        """The sum of these series. Waits until somebody tells."""
        while True:
            with suppress(httpx.HTTPError):
                text = (await self.http.get(f"{url}/metrics")).raise_for_status().text
                families = text_string_to_metric_families(text)
                return sum(each.value for family in families for each in family.samples if each.name in names)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _registered(self) -> None:
        wanted = set(self.workers)
        while True:
            with suppress(StateUnavailableError):
                known = [await self.store.registry.workers(kind) for kind in ("target", "draft")]
                if wanted <= {worker.record.worker_id for kind in known for worker in kind}:
                    return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _reaches(self, url: str) -> None:
        while await self.metric(url, TARGETS_UP) < len(self.deployment.targets):  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def running(
    wish: DeploymentOptions, say: Say, gateways: int = 2, other_gateways: Sequence[str] = ()
) -> AsyncIterator[ChaosStack]:
    """Everything up, for as long as the context lasts. Enter it on the main thread. Raises `ServiceStartError`,
    `StateError`.

    `other_gateways`: modules for `python -m` to run in the place of a gateway's, each once more.
    """
    deployment = plan_deployment(wish)
    modules = [GATEWAY_MODULE] * gateways + [*other_gateways]
    first, others = free_ports(LOOPBACK, 0, len(modules) - 1)
    fronts = {f"gateway-{n}": replace(deployment, port=port) for n, port in enumerate([first, *others], 1)}
    with EmbeddedRedis() as redis:
        programs = list(_programs(deployment, fronts, redis.url, modules))
        async with (
            RedisSupervisor(redis),
            open_store(redis.url) as store,
            httpx.AsyncClient(timeout=5.0, trust_env=False) as http,
            Supervisor(programs, say, lambda: Backoff(longest_s=1.0)) as supervisor,
        ):
            urls = {name: front.url for name, front in fronts.items()}
            stack = ChaosStack(deployment, urls, supervisor, redis, store, http)
            await supervisor.until(stack.wait_ready())
            try:
                yield stack
            finally:
                stack.resume()  # one that is stopped would not hear that it is to end


def _programs(
    deployment: Deployment, fronts: dict[str, Deployment], redis_url: str, modules: Sequence[str]
) -> Iterator[list[Program]]:
    yield [
        _gateway(name, front.programs(redis_url)[0][0], module)
        for (name, front), module in zip(fronts.items(), modules, strict=True)
    ]
    yield from deployment.programs(redis_url)[1:]


def _gateway(name: str, program: Program, module: str) -> Program:
    argv = [module if word == GATEWAY_MODULE else word for word in program.argv]
    return replace(program, name=name, argv=(*argv, "--worker-id", name, "--resume-s", str(RESUME_S)))
