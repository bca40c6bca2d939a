"""python -m services.target.pool: replicas of a target on a Ray cluster, each of one rank or several.

Everything that this does not know itself goes to each replica's rank 0, `python -m services.target`. It ends as
services do, see `services.process`: SIGTERM lets running requests finish.
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

from paceline.cli.child import StartError as CannotStartError
from paceline.config import EngineConfig
from paceline.pool.ports import Ports
from paceline.pool.replica import Ranks, Replica
from paceline.telemetry import logs
from paceline.tensor_parallel.place import Place
from services.process import StartError, positive, run
from services.target.__main__ import parse as target_options

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How much longer than a target's drain its end may take."""


def main() -> int:
    options, rest = parse(sys.argv[1:])
    logs.configure("pool", options.ray)
    return run(lambda stop: serve(options, rest, stop))


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and what is for the targets. Exits if they would not take it."""
    known = argparse.ArgumentParser(
        prog="paceline target",
        description="Replicas of a target on a Ray cluster. Takes all options of a single target, too.",
        allow_abbrev=False,
    )
    known.add_argument(
        "--ray", required=True, metavar="auto|local|ADDRESS", help="a cluster that runs, a new one here, or one by name"
    )
    known.add_argument("--replicas", type=positive, default=1, help="targets, each with the whole model")
    known.add_argument("--tensor-parallel-size", type=positive, help="processes that share the model of a replica")
    known.add_argument("--placement", choices=("pack", "spread"), default="pack", help="ranks on few nodes, or on many")
    options, rest = known.parse_known_args(arguments)
    options.target = target_options(rest)
    for name in ("--worker-id", "--advertise", "--host"):
        if any(each.partition("=")[0] == name for each in rest):
            known.error(f"{name} cannot be one for all: each replica has its own, on the node where it runs")
    return options, rest


async def serve(options: argparse.Namespace, rest: Sequence[str], stop: asyncio.Event) -> None:
    """From joining the cluster until all replicas have stopped."""
    join(options.ray)
    for number in (signal.SIGTERM, signal.SIGINT):  # which Ray took
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        ranks = ranks_of(options, rest)
        await keep_running([Replica(f"replica {n}", ranks) for n in range(1, options.replicas + 1)], stop)
    finally:
        await asyncio.to_thread(ray.shutdown)
    log.info("pool stopped")


async def keep_running(replicas: Sequence[Replica], stop: asyncio.Event) -> None:
    """Until asked to stop. One that cannot start leaves the others alone; raises `StartError` when none is left."""
    running = {asyncio.create_task(replica.run(), name=replica.name) for replica in replicas}
    stopped = asyncio.create_task(stop.wait())
    try:
        while not stopped.done():
            await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in running if each.done()]:
                running.remove(task)
                _gave_up(task, len(running))
    finally:
        stopped.cancel()
        for replica in replicas:
            replica.stop()
        if running:
            await asyncio.wait(running)


def _gave_up(task: asyncio.Task[None], others: int) -> None:
    try:
        task.result()
    except CannotStartError as error:
        if not others:
            raise StartError(str(error)) from error
        log.critical("%s; %d others go on", error, others)


def join(where: str) -> None:
    """Ray as it runs here, a Ray of our own, or that at an address. Raises `StartError`."""
    try:
        ray.init(address=where, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        why = str(error).splitlines()[-1]  # the others are where in Ray it came from
        raise StartError(f"--ray {where}: no cluster there ({why}); start one, or say local") from error


def ranks_of(options: argparse.Namespace, rest: Sequence[str]) -> Ranks:
    """What each replica is made of."""
    engine: EngineConfig = options.target.engine_config
    size = options.tensor_parallel_size or engine.tensor_parallel_size
    ports = Ports(options.target.port)
    metrics = None if options.target.metrics_port is None else Ports(options.target.metrics_port)

    @contextmanager
    def leading(place: Place) -> Iterator[list[str]]:
        shared = engine.model_copy(
            update={"tensor_parallel_size": size, "rendezvous": str(place) if size > 1 else None}
        )
        own = ["--host", place.host, "--engine-config", shared.model_dump_json()]
        with ports.at(place.host) as port, nullcontext() if metrics is None else metrics.at(place.host) as metrics_port:
            own += ["--port", str(port)]
            own += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
            yield ["-m", "services.target", *rest, *own]

    bundle = {"CPU": float(engine.threads)}
    if engine.device.startswith("cuda"):
        bundle["GPU"] = 1.0  # of which the rank then sees no other
    return Ranks(size, bundle, options.placement, leading, options.target.drain_s + GRACE_S)


if __name__ == "__main__":
    sys.exit(main())
