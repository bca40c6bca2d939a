"""python -m paceline_services.target.ray_replicas: replicas of a target on a Ray cluster, each of one rank or several.

Everything that this does not know itself goes to each replica's rank 0, `python -m paceline_services.target`. It ends
as services do, see `paceline_services.service_entrypoint`: SIGTERM lets running requests finish.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import ray

from paceline.cli.supervised_process import StartError as CannotStartError
from paceline.config import EngineConfig
from paceline.model.parallel.host_port import HostPort
from paceline.ray_pool.port_allocator import PortAllocator
from paceline.ray_pool.target_replica import ReplicaSpec, TargetReplica
from paceline.telemetry import logs
from paceline_services.service_entrypoint import ServiceStartError, positive_int, run_service
from paceline_services.target.__main__ import parse_options as target_options

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""How much longer than a target's drain its end may take."""


def main() -> int:
    options, rest = parse_pool_options(sys.argv[1:])
    logs.configure("pool", options.ray)
    return run_service(lambda stop: serve(options, rest, stop))


def parse_pool_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what is for the targets. Exits if they would not take it."""
    known = argparse.ArgumentParser(
        prog="paceline target",
        description="Replicas of a target on a Ray cluster. Takes all options of a single target, too.",
        allow_abbrev=False,
    )
    known.add_argument(
        "--ray", required=True, metavar="auto|local|ADDRESS", help="a cluster that runs, a new one here, or one by name"
    )
    known.add_argument("--replicas", type=positive_int, default=1, help="targets, each with the whole model")
    known.add_argument("--tensor-parallel-size", type=positive_int, help="processes that share the model of a replica")
    known.add_argument("--placement", choices=("pack", "spread"), default="pack", help="ranks on few nodes, or on many")
    options, rest = known.parse_known_args(arguments)
    options.target = target_options(rest)
    for name in ("--worker-id", "--advertise", "--host"):
        if any(each.partition("=")[0] == name for each in rest):
            known.error(f"{name} cannot be one for all: each replica has its own, on the node where it runs")
    return options, rest


async def serve(options: argparse.Namespace, rest: Sequence[str], stop: asyncio.Event) -> None:
    """From joining the cluster until all replicas have stopped."""
    connect_ray(options.ray)
    for number in (signal.SIGTERM, signal.SIGINT):  # which Ray took
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        ranks = replica_ranks(options, rest)
        await keep_running([TargetReplica(f"replica {n}", ranks) for n in range(1, options.replicas + 1)], stop)
    finally:
        await asyncio.to_thread(ray.shutdown)
    log.info("pool stopped")


async def keep_running(replicas: Sequence[TargetReplica], stop: asyncio.Event) -> None:
    """Until asked to stop. One that cannot start leaves the others alone; raises `ServiceStartError` when none is
    left."""
    running = {asyncio.create_task(replica.run(), name=replica.name) for replica in replicas}
    stopped = asyncio.create_task(stop.wait())
    try:
        while not stopped.done():
            await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in running if each.done()]:
                running.remove(task)
                _report_failure(task, len(running))
    finally:
        stopped.cancel()
        for replica in replicas:
            replica.stop()
        if running:
            await asyncio.wait(running)


def _report_failure(task: asyncio.Task[None], others: int) -> None:
    try:
        task.result()
    except CannotStartError as error:
        if not others:
            raise ServiceStartError(str(error)) from error
        log.critical("%s; %d others go on", error, others)


def connect_ray(where: str) -> None:
    """Ray as it runs here, a Ray of our own, or that at an address. Raises `ServiceStartError`."""
    try:
        ray.init(address=where, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        why = str(error).splitlines()[-1]  # the others are where in Ray it came from
        raise ServiceStartError(f"--ray {where}: no cluster there ({why}); start one, or say local") from error


def replica_ranks(options: argparse.Namespace, rest: Sequence[str]) -> ReplicaSpec:
    """What each replica is made of."""
    engine: EngineConfig = options.target.engine_config
    size = options.tensor_parallel_size or engine.tensor_parallel_size
    ports = PortAllocator(options.target.port)
    metrics = None if options.target.metrics_port is None else PortAllocator(options.target.metrics_port)

    @contextmanager
    def leading(place: HostPort) -> Iterator[list[str]]:
        shared = engine.model_copy(
            update={"tensor_parallel_size": size, "rendezvous": str(place) if size > 1 else None}
        )
        own = ["--host", place.host, "--engine-config", shared.model_dump_json()]
        with (
            ports.reserve(place.host) as port,
            nullcontext() if metrics is None else metrics.reserve(place.host) as metrics_port,
        ):
            own += ["--port", str(port)]
            own += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
            yield ["-m", "paceline_services.target", *rest, *own]

    bundle = {"CPU": float(engine.threads)}
    if engine.device.startswith("cuda"):
        bundle["GPU"] = 1.0  # of which the rank then sees no other
    return ReplicaSpec(size, bundle, options.placement, leading, options.target.drain_s + STOP_GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
