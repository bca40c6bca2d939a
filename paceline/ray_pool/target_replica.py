"""One replica of a target: a placement group, actors in its bundles, and a process for each actor.

When one process ends, the replica ends the others, removes the placement group, and starts again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.host_port import HostPort
from paceline.launcher import COULD_NOT_START, Backoff, StartError
from paceline.ray_pool.rank_actor import RankActor


class PortAllocator:
    """The first process on a node gets port `first`, the second one the next port, and so on."""

    def __init__(self, first: int) -> None:
        """`first` 0: the system chooses all ports."""
        self._first = first
        self._taken: set[tuple[str, int]] = set()

    @contextmanager
    def reserve(self, address: str) -> Iterator[int]:
        """The lowest free port on the node, for as long as the context lasts."""
        if not self._first:
            yield 0
            return
        port = next(port for port in count(self._first) if (address, port) not in self._taken)
        self._taken.add((address, port))
        try:
            yield port
        finally:
            self._taken.remove((address, port))


log = logging.getLogger(__name__)

Placement = Literal["pack", "spread"]
RANK_EXIT_TIMEOUT_S = 5.0
"""How long the other ranks may take to end after the first one has."""
LOG_INTERVAL_S = 30.0
"""Between log lines about a step that Ray has not finished."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica needs."""

    bundles: int
    """In its placement group."""
    bundle: dict[str, float]
    """Ray resources of one bundle."""
    placement: Placement
    processes: int
    """Ranks that are processes of ours, in the first bundles. vLLM places its ranks in the bundles itself."""
    process: dict[str, float]
    """Ray resources of one process, out of its bundle."""
    rank_zero_command: Callable[[HostPort], AbstractContextManager[Sequence[str]]]
    """Rank 0's arguments of Python, given the rendezvous. The context lasts until rank 0 has ended."""
    stop_s: float
    """How long rank 0 may take to finish running requests."""


@dataclass(slots=True)
class TargetReplica:
    """Runs a replica, and starts it again whenever it ends, until `stop`."""

    name: str
    spec: ReplicaSpec
    backoff: Backoff = field(default_factory=Backoff)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _rank_zero: Any = None
    """Rank 0's actor while its process runs."""

    async def run(self) -> None:
        """Return after `stop`. Raises `StartError` if the first start fails for a reason that will not go away."""
        running = asyncio.create_task(self._keep_running(), name=self.name)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            if self._rank_zero is not None and not running.done():
                self._rank_zero.stop.remote()  # rank 0 then lets the other ranks go
                await asyncio.wait([running], timeout=self.spec.stop_s + RANK_EXIT_TIMEOUT_S)
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.wait([running])
        if not running.cancelled():
            running.result()

    def stop(self) -> None:
        """Let running requests finish, then end. `run` returns when the ranks have ended."""
        self._stopping.set()

    async def _keep_running(self) -> None:
        for starts in count(1):
            born = time.monotonic()
            try:
                code = await self._run_once()
            except ray.exceptions.RayError as error:  # a node or an actor is gone
                log.warning("%s lost its actors: %s", self.name, str(error).splitlines()[0])
                code = None
            if self._stopping.is_set():
                return
            if code == COULD_NOT_START and starts == 1:
                raise StartError(f"{self.name} could not start: its last line in the log says why")
            wait_s = self.backoff.after(time.monotonic() - born)
            log.warning("%s ended (exit code %s) and is started again in %.1f s", self.name, code, wait_s)
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> int:
        """From placing the ranks to the end of all of them. Returns `COULD_NOT_START` if a rank ended with that exit
        code, else one of the ranks' exit codes."""
        spec = self.spec
        with ExitStack() as stack:
            group = placement_group([spec.bundle] * spec.bundles, strategy=spec.placement.upper())
            stack.callback(remove_placement_group, group)
            await self._result(group.ready(), f"{spec.bundles} × {spec.bundle} in the cluster")
            actors = [self._start_actor(group, rank) for rank in range(spec.processes)]
            for actor in actors:
                stack.callback(ray.kill, actor)  # kills its process, too
            rendezvous: HostPort = await self._result(actors[0].rendezvous_address.remote(), "its first actor")
            log.info("%s starts, its ranks meet at %s", self.name, rendezvous)
            commands = [stack.enter_context(spec.rank_zero_command(rendezvous))]
            for rank in range(1, spec.processes):
                commands.append(("-m", "paceline_services.rank", "--rendezvous", str(rendezvous), "--rank", str(rank)))
            runs = [
                asyncio.ensure_future(actor.run.remote(command))
                for actor, command in zip(actors, commands, strict=True)
            ]
            self._rank_zero = actors[0]
            try:
                await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait(runs, timeout=RANK_EXIT_TIMEOUT_S)
            finally:
                self._rank_zero = None
                for run in runs:
                    run.cancel()
            codes = [run.result() for run in runs if run.done() and not run.cancelled()]
            return COULD_NOT_START if COULD_NOT_START in codes else codes[0]

    async def _result(self, reference: Awaitable[Any], what: str) -> Any:
        """Wait for a result of Ray's, with a log line now and then."""
        pending = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait([pending], timeout=LOG_INTERVAL_S))[0]:
                log.warning("%s waits for %s", self.name, what)
            return pending.result()
        finally:
            pending.cancel()

    def _start_actor(self, group: Any, rank: int) -> Any:
        """The actor in a bundle; it reserves the resources of its process."""
        resources = self.spec.process
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
        )
