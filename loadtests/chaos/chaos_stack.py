"""A deployment with replicas of everything, whose processes can be killed or stopped. Dead processes are restarted."""

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
from paceline.cli.supervised_process import Program, SupervisedProcess
from paceline.cli.supervisor import Supervisor
from paceline.launcher import Backoff
from paceline.state import StateStore, StateUnavailableError, open_store
from paceline.state.embedded_redis import EmbeddedRedis

POLL_S = 0.1
RESUME_S = 120.0
"""How long a gateway waits for a target: all may be down at once, and starting takes a while on a busy machine."""
GATEWAY_MODULE = "paceline_services.gateway"
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
RUNNING = ("paceline_num_requests_running", "paceline_num_requests_waiting", "paceline_draft_open_requests")
REPLAYS = "paceline_replays_total"
TARGETS_UP = "paceline_targets_up"

LogLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ChaosStack:
    """Made by `running`. Names are those of the programs, and `redis`."""

    deployment: Deployment
    urls: dict[str, str]
    """URLs of the gateways, by name."""
    supervisor: Supervisor
    redis: EmbeddedRedis
    store: StateStore
    http: httpx.AsyncClient
    faults_at: dict[str, list[float]] = field(default_factory=dict)
    """By gateway URL, the event loop's times of its faults."""

    @property
    def ports(self) -> dict[str, int]:
        """Ports of gateways and Redis, by name."""
        urls = {**self.urls, REDIS: self.redis.url}
        return {name: int(urlsplit(url).port or 0) for name, url in urls.items()}

    @property
    def victims(self) -> ProcessNames:
        return ProcessNames(tuple(self.urls), tuple(self.deployment.targets), tuple(self.deployment.drafts))

    def child(self, name: str) -> SupervisedProcess:
        return self.supervisor.children[name]

    def pids(self, name: str) -> list[int]:
        """Process ids of a worker's service and its compute, as far as they run now."""
        pid = self.redis.pid if name == REDIS else self.child(name).pid
        return [] if pid is None else list(process_and_descendants(pid))

    def send(self, name: str, number: signal.Signals, half: ProcessPart = "service") -> bool:
        """Signal one half of a worker, or both. False if neither runs now."""
        pids = self.pids(name)
        chosen = {"service": pids[:1], "compute": pids[1:], "both": pids}[half]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(chosen)

    def listens(self, name: str) -> bool:
        """Whether the process accepts connections; a stopped one still does."""
        ports = {**self.deployment.targets, **self.deployment.drafts, **self.ports}
        with suppress(OSError), socket.create_connection((LOOPBACK, ports[name]), timeout=1.0):
            return True
        return False

    def inject(self, fault: Fault) -> int:
        """Signal the victims that are up and return their number. Starting victims are spared: on a slow machine they
        would never come up."""
        hit = 0
        for name in filter(self.listens, fault.victims):
            if name in self.urls:
                self.faults_at.setdefault(self.urls[name], []).append(asyncio.get_running_loop().time())
            hit += self.send(name, SIGNALS[fault.kind], fault.half)
        return hit

    def resume(self, names: Sequence[str] = ()) -> None:
        """Continue these stopped processes; without names, all of them."""
        for name in names or (*self.supervisor.children, REDIS):
            self.send(name, signal.SIGCONT, "both")

    async def wait_ready(self) -> None:
        """Wait until every process is registered and serves, and every gateway reaches every target."""
        await asyncio.gather(
            self._wait_registered(), *map(self._wait_for_targets, self.urls.values()), *map(self.busy, self.workers)
        )

    @property
    def workers(self) -> list[str]:
        return [*self.deployment.targets, *self.deployment.drafts]

    async def requests(self) -> float:
        """Requests of all workers; one at a target and a draft counts twice."""
        return sum([await self.busy(name) for name in self.workers])

    async def idle(self) -> None:
        """Wait until no worker has a request."""
        while await self.requests():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_S)

    async def busy(self, name: str) -> float:
        """The number of a worker's requests, from its metrics. Waits until they can be read."""
        return await self.metric(f"http://{LOOPBACK}:{self.deployment.metrics[name]}", *RUNNING)

    async def metric(self, url: str, *names: str) -> float:
        """The sum of these series. Waits until they can be read."""
        while True:
            with suppress(httpx.HTTPError):
                text = (await self.http.get(f"{url}/metrics")).raise_for_status().text
                families = text_string_to_metric_families(text)
                return sum(each.value for family in families for each in family.samples if each.name in names)
            await asyncio.sleep(POLL_S)

    async def _wait_registered(self) -> None:
        wanted = set(self.workers)
        while True:
            with suppress(StateUnavailableError):
                known = [await self.store.registry.workers(kind) for kind in ("target", "draft")]
                if wanted <= {worker.record.worker_id for kind in known for worker in kind}:
                    return
            await asyncio.sleep(POLL_S)

    async def _wait_for_targets(self, url: str) -> None:
        while await self.metric(url, TARGETS_UP) < len(self.deployment.targets):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def running(
    options: DeploymentOptions, log_line: LogLine, gateways: int = 2, other_gateways: Sequence[str] = ()
) -> AsyncIterator[ChaosStack]:
    """The stack, ready, while the context lasts. Enter it on the main thread. Raises `StartError`, `StateError`.

    `other_gateways`: modules that run as one more gateway each.
    """
    deployment = plan_deployment(options)
    modules = [GATEWAY_MODULE] * gateways + [*other_gateways]
    first, others = free_ports(LOOPBACK, 0, len(modules) - 1)
    fronts = {f"gateway-{n}": replace(deployment, port=port) for n, port in enumerate([first, *others], 1)}
    with EmbeddedRedis() as redis:
        programs = list(_programs(deployment, fronts, redis.url, modules))
        async with (
            RedisSupervisor(redis),
            open_store(redis.url) as store,
            httpx.AsyncClient(timeout=5.0, trust_env=False) as http,
            Supervisor(programs, log_line, lambda: Backoff(longest_s=1.0)) as supervisor,
        ):
            urls = {name: front.url for name, front in fronts.items()}
            stack = ChaosStack(deployment, urls, supervisor, redis, store, http)
            await supervisor.until(stack.wait_ready())
            try:
                yield stack
            finally:
                stack.resume()  # a stopped process does not handle SIGTERM


def _programs(
    deployment: Deployment, fronts: dict[str, Deployment], redis_url: str, modules: Sequence[str]
) -> Iterator[list[Program]]:
    yield [
        _gateway(name, front.programs(redis_url)[0][0], module)
        for (name, front), module in zip(fronts.items(), modules, strict=True)
    ]
    yield from deployment.programs(redis_url)[1:]


def _gateway(name: str, program: Program, module: str) -> Program:
    argv = [module if part == GATEWAY_MODULE else part for part in program.argv]
    return replace(program, name=name, argv=(*argv, "--worker-id", name, "--resume-s", str(RESUME_S)))
