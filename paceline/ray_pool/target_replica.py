"""One replica of a target: a placement group, an actor in each of its bundles, and a process for each actor.

When one of the processes ends, the others are ended, the bundles are given back, and all of it is done again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cli.supervised_process import COULD_NOT_START, Backoff, StartError
from paceline.model.parallel.host_port import HostPort
from paceline.ray_pool.rank_actor import RankActor

log = logging.getLogger(__name__)

Placement = Literal["pack", "spread"]
RANK_EXIT_TIMEOUT_S = 5.0
"""How long the other ranks get to end by themselves, once one has."""
LOG_INTERVAL_S = 30.0
"""Between two words about what Ray has not done yet."""


class _StoppedError(Exception):
    """`stop` was called before there was anything that it could be passed on to."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What all ranks of a replica need."""

    size: int
    bundle: dict[str, float]
    """What one rank needs of its node, in Ray's words."""
    placement: Placement
    rank_zero_command: Callable[[HostPort], AbstractContextManager[Sequence[str]]]
    """Rank 0's arguments of Python, given where the ranks meet. The context lasts as long as rank 0 does."""
    stop_s: float
    """How long rank 0 may take to finish what runs."""


@dataclass(slots=True)
class TargetReplica:
    """Kept running until it is stopped."""

    name: str
    spec: ReplicaSpec
    backoff: Backoff = field(default_factory=Backoff)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Return after `stop`. Raises `ServiceStartError` if the first life ends for a reason that will not go away."""
        lives = 0
        while not self._stopping.is_set():
            lives += 1
            born = time.monotonic()
            try:
                code = await self._live()
            except _StoppedError:
                return
            except ray.exceptions.RayError as error:  # a node or an actor is gone
                log.warning("%s lost what it ran on: %s", self.name, str(error).splitlines()[0])
                code = None
            if self._stopping.is_set():
                return
            if code == COULD_NOT_START and lives == 1:
                raise StartError(f"{self.name} could not start: its last line in the log says why")
            wait_s = self.backoff.after(time.monotonic() - born)
            log.warning("%s ended (exit code %s) and is started again in %.1f s", self.name, code, wait_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    def stop(self) -> None:
        """Ask it to finish what runs, and not to start again. `run` returns when it has."""
        self._stopping.set()

    async def _live(self) -> int:
        """From placing the ranks to the end of them all. The exit code of the one that ended first."""
        ranks = self.spec
        with ExitStack() as stack:
            group = placement_group([ranks.bundle] * ranks.size, strategy=ranks.placement.upper())
            stack.callback(remove_placement_group, group)
            await self._unless_stopped(group.ready(), f"{ranks.size} × {ranks.bundle} in the cluster")
            hosts = [self._host(group, rank) for rank in range(ranks.size)]
            for host in hosts:
                stack.callback(ray.kill, host)  # and with it its process
            place: HostPort = await self._unless_stopped(hosts[0].place.remote(), "its first actor")
            log.info("%s starts, its ranks meet at %s", self.name, place)
            commands = [stack.enter_context(ranks.rank_zero_command(place))]
            for rank in range(1, ranks.size):
                commands.append(("-m", "paceline_services.rank", "--rendezvous", str(place), "--rank", str(rank)))
            runs = [_future(host.run.remote(command)) for host, command in zip(hosts, commands, strict=True)]
            return await self._until_one_ends(hosts[0], runs)

    async def _unless_stopped(self, result: Awaitable[Any], what: str) -> Any:
        """Wait for it, and now and then say so. Raises `_StoppedError`."""
        coming, stopping = _future(result), asyncio.ensure_future(self._stopping.wait())
        try:
            while not (await asyncio.wait([coming, stopping], timeout=LOG_INTERVAL_S, return_when=FIRST))[0]:
                log.warning("%s waits for %s", self.name, what)
            if not coming.done():
                raise _StoppedError
            return coming.result()
        finally:
            coming.cancel()
            stopping.cancel()

    async def _until_one_ends(self, first: Any, runs: Sequence[asyncio.Future[int]]) -> int:
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([*runs, stopping], return_when=FIRST)
            if stopping.done():
                first.stop.remote()  # its answer may never come, its end in time
                await asyncio.wait(runs[:1], timeout=self.spec.stop_s)  # it lets the others go
            await asyncio.wait(runs, timeout=RANK_EXIT_TIMEOUT_S)
            codes = [run.result() for run in runs if run.done()]
            return max(codes, default=0, key=lambda code: code == COULD_NOT_START)  # that one is the reason
        finally:
            for waiting in (stopping, *runs):
                waiting.cancel()

    def _host(self, group: Any, rank: int) -> Any:
        """The actor in a bundle; it takes all that its process needs."""
        bundle = dict(self.spec.bundle)
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
        )


FIRST = asyncio.FIRST_COMPLETED


def _future(reference: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(_awaited(reference))


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference
