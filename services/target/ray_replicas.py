"""python -m paceline_services.target.ray_replicas: replicas of a target on a Ray cluster, each of one rank or several.

Unknown options are passed to each replica's rank 0, `python -m paceline_services.target`. Signals and exit codes: see
`paceline_services.service_entrypoint`.
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

from paceline.config import EngineConfig
from paceline.config.vllm_options import VllmOptions
from paceline.host_port import HostPort
from paceline.launcher import StartError
from paceline.ray_pool.target_replica import PortAllocator, ReplicaSpec, TargetReplica
from paceline.telemetry import logs
from paceline_services.service_entrypoint import positive_int, run_service
from paceline_services.target.__main__ import parse_options as target_options

log = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
"""Time beyond --drain-s for a target to stop."""


def main() -> int:
    options, rest = parse_pool_options(sys.argv[1:])
    logs.configure("pool", options.ray)
    return run_service(lambda stop: serve(options, rest, stop))


def parse_pool_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the pool, and the arguments for its targets. Exits if either are invalid."""
    parser = argparse.ArgumentParser(
        prog="paceline target",
        description="Replicas of a target on a Ray cluster. Takes all options of a single target, too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ray", required=True, metavar="auto|local|ADDRESS", help="a running cluster, a new local one, or an address"
    )
    parser.add_argument("--replicas", type=positive_int, default=1, help="number of targets, each with the whole model")
    parser.add_argument("--tensor-parallel-size", type=positive_int, help="processes per replica that share its model")
    parser.add_argument("--placement", choices=("pack", "spread"), default="pack", help="ranks on few nodes or on many")
    options, rest = parser.parse_known_args(arguments)
    options.target = target_options(rest)
    for name in ("--worker-id", "--advertise", "--host"):
        if any(each.partition("=")[0] == name for each in rest):
            parser.error(f"{name} cannot be the same for all replicas: each has its own, on its node")
    return options, rest


async def serve(options: argparse.Namespace, rest: Sequence[str], stop: asyncio.Event) -> None:
    """Join the cluster, and run the replicas until all have stopped."""
    connect_ray(options.ray)
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray replaced the handlers
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        spec = replica_spec(options, rest)
        await keep_running([TargetReplica(f"replica {n}", spec) for n in range(1, options.replicas + 1)], stop)
    finally:
        await asyncio.to_thread(ray.shutdown)
    log.info("pool stopped")


async def keep_running(replicas: Sequence[TargetReplica], stop: asyncio.Event) -> None:
    """Run the replicas until `stop` is set. Raises `StartError` once every replica has failed to start."""
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


def _report_failure(task: asyncio.Task[None], running: int) -> None:
    try:
        task.result()
    except StartError as error:
        if not running:
            raise
        log.critical("%s; %d others continue", error, running)


def connect_ray(address: str) -> None:
    """Connect to a running cluster, a new local one, or one at an address. Raises `StartError`."""
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).splitlines()[-1]  # the lines before are a traceback
        raise StartError(f"--ray {address}: no cluster there ({reason}); start one, or use local") from error


def replica_spec(options: argparse.Namespace, rest: Sequence[str]) -> ReplicaSpec:
    """Return the bundles and processes of each replica.

    Each rank has a bundle. Ranks of our engine are processes of ours. vLLM is one process of ours: its Ray executor
    starts the ranks. It has no Ray executor for CPUs, so there one bundle holds all ranks.
    """
    engine: EngineConfig = options.target.engine_config
    vllm: VllmOptions = options.target.vllm_options
    size = options.tensor_parallel_size or engine.tensor_parallel_size
    ranks = size * vllm.pipeline_parallel_size
    cuda, ours = engine.device.startswith("cuda"), options.target.engine == "paceline"
    by_ray = not ours and ranks > 1 and (vllm.executor or ("ray" if cuda else "mp")) == "ray"
    if by_ray:
        vllm = vllm.model_copy(update={"engine_args": {**vllm.engine_args, "distributed_executor_backend": "ray"}})
    ports = PortAllocator(options.target.port)
    metrics = None if options.target.metrics_port is None else PortAllocator(options.target.metrics_port)

    @contextmanager
    def rank0_command(rendezvous: HostPort) -> Iterator[list[str]]:
        meet = str(rendezvous) if ours and ranks > 1 else None
        shared = engine.model_copy(update={"tensor_parallel_size": size, "rendezvous": meet})
        own = ["--host", rendezvous.host, "--engine-config", shared.model_dump_json()]
        own += ["--vllm-options", vllm.model_dump_json()] if by_ray else []
        with (
            ports.reserve(rendezvous.host) as port,
            nullcontext() if metrics is None else metrics.reserve(rendezvous.host) as metrics_port,
        ):
            own += ["--port", str(port)]
            own += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
            yield ["-m", "paceline_services.target", *rest, *own]

    bundles = ranks if ours or by_ray else 1
    in_each = float(ranks // bundles)
    bundle = {"CPU": engine.threads * in_each, **({"GPU": in_each} if cuda else {})}
    return ReplicaSpec(
        bundles=bundles,
        bundle=bundle,
        placement=options.placement,
        processes=ranks if ours else 1,
        process={"CPU": bundle["CPU"]} if by_ray else bundle,  # vLLM's ranks take the GPUs
        rank_zero_command=rank0_command,
        stop_s=options.target.drain_s + STOP_GRACE_S,
    )


if __name__ == "__main__":
    sys.exit(main())
