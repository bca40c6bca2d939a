"""The life of a target or draft worker around its model process. Its options and exit codes: `service_entrypoint`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import CollectorRegistry

from paceline.ipc.model_process import ModelProcess
from paceline.launcher import StartError
from paceline.state import StateStore, WorkerRecord, WorkerRegistration, open_store
from paceline.telemetry.instruments import serve_metrics
from paceline.telemetry.tracing import Tracing
from paceline.tls import Certificates
from paceline.wire.grpc_server import GrpcServer, Register
from paceline_services.service_entrypoint import open_tracing, service_certificates

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """What `serve_worker` serves: a target or draft worker whose model process is ready."""

    servicer: object
    register: Register
    service: ServiceDescriptor
    peer: str
    """The name that the certificates of its clients must have."""
    receive_bytes: int
    """Size of the largest message it accepts."""
    metrics: CollectorRegistry
    record: Callable[[str], WorkerRecord]
    """Its entry in the registry, by its address."""
    load: Callable[[], Mapping[str, float]]
    """Its load, for the registry."""
    drain: Callable[[WorkerRegistration], Awaitable[None]]
    """Ends its requests and streams. Called when its health is NOT_SERVING."""


BuildWorker: TypeAlias = Callable[
    [argparse.Namespace, ModelProcess, StateStore, Certificates | None, Tracing], AbstractAsyncContextManager[Worker]
]
"""Builds a worker around a model process that is ready, and closes it at the end of the context."""


async def serve_worker(
    kind: str, build: BuildWorker, process: ModelProcess, options: argparse.Namespace, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set or the model process ends; then drain.

    Raises `StartError`, `StateError`, `PortInUseError`, and `ModelProcessDiedError` if the model process ended.
    """
    tls = service_certificates(options)
    async with AsyncExitStack() as stack:
        tracing = stack.enter_context(open_tracing(kind, options.worker_id, options.otlp_traces_endpoint))
        store = await stack.enter_async_context(open_store(options.redis_url, tls=tls))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((process.ready, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not process.ready.done():
            return
        stopped.cancel()
        worker = await stack.enter_async_context(build(options, process, store, tls, tracing))
        server = GrpcServer(options.host, options.port, tls=tls, peer=worker.peer, receive_bytes=worker.receive_bytes)
        stack.enter_context(metrics_endpoint(worker.metrics, options, server))
        server.add(worker.register, worker.servicer, worker.service)
        stack.push_async_callback(server.stop)  # also after an error
        address = await server.start()
        record = worker.record(options.advertise or address)
        async with store.registration(record, worker.load) as registration:
            log.info("%s ready on %s", kind, address, extra={"numerics": record.numerics} if record.numerics else None)
            process.exited.add_done_callback(lambda _: stop.set())
            await stop.wait()
            await server.drain()
            await worker.drain(registration)
        await server.stop(grace_s=1.0)
        if process.exited.done():
            process.exited.result()  # raises
    log.info("%s stopped", kind)


@contextmanager
def metrics_endpoint(metrics: CollectorRegistry, options: argparse.Namespace, server: GrpcServer) -> Iterator[None]:
    """Serve metrics and the health of `server` over HTTP while the context lasts, if there is a --metrics-port."""
    if options.metrics_port is None:
        yield
        return
    try:
        with serve_metrics(metrics, options.host, options.metrics_port, lambda: server.serving) as port:
            log.info("metrics on http://%s:%d/metrics", options.host, port)
            yield
    except OSError as error:
        raise StartError(f"--metrics-port {options.metrics_port}: {error.strerror}; choose another one") from error
