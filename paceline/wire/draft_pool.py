"""A target's links to its draft workers, on the event loop: one per address, connected again whenever it breaks.

The engine runs in another process and knows links by the ids of their streams; see `draft_stream_messages`, and
`remote_draft_client` for the engine's end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc

from paceline.config import MAPPING_HINT
from paceline.drafting.speculator import DraftDescription
from paceline.launcher import Backoff
from paceline.state import RegisteredWorker, StateStore, WorkerWatcher
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.v1 import draft_pb2 as pb
from paceline.v1 import draft_pb2_grpc
from paceline.wire.channels import DRAFT, GROWTH_FRAME_BYTES, open_channel
from paceline.wire.draft_codec import decode_draft_description
from paceline.wire.draft_stream import DraftLinkConfig, DraftStream
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame, StreamDown, StreamEventHandler, StreamUp
from paceline.wire.link_errors import LinkError

log = logging.getLogger(__name__)


class IncompatibleWorkerError(LinkError):
    """This target cannot use the worker."""


class DraftPool:
    """`on_event` gets the events of all streams; `metrics` counts their traffic."""

    def __init__(
        self,
        config: DraftLinkConfig,
        on_event: StreamEventHandler,
        layers: int,
        metrics: TargetMetrics,
        stream_ids: Iterator[int] | None = None,
    ) -> None:
        """`layers`: the number of layers of the target. `stream_ids`: shared by pools of one `on_event`."""
        self._config = config
        self._on_event = on_event
        self._layers = layers
        self._metrics = metrics
        self._links: dict[str, asyncio.Task[None]] = {}
        """By address, for as long as the pool tries to reach it."""
        self._streams: dict[int, DraftStream] = {}
        self._stream_ids = stream_ids or itertools.count(1)

    def connect(self, request: ConnectDrafts) -> None:
        """Start to connect to these addresses, so that the workers are up when a request names them."""
        for address in request.addresses:
            if address not in self._links:
                link = asyncio.create_task(self._keep_connected(address), name=f"link to draft {address}")
                self._links[address] = link
                link.add_done_callback(lambda _, address=address: self._links.pop(address))  # type: ignore[misc]

    @property
    def connected(self) -> list[str]:
        """Addresses of the workers that are up. Any thread."""
        return [stream.up.address for stream in list(self._streams.values())]

    def send(self, message: SendDraftFrame) -> None:
        """Send a frame on its stream, or discard it if the stream has ended."""
        if stream := self._streams.get(message.stream_id):
            stream.send(pb.DraftFrame.FromString(message.frame))

    async def stop(self) -> None:
        """End every link. The workers close their requests."""
        links = list(self._links.values())
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def _keep_connected(self, address: str) -> None:
        """Connect again and again, with exponential backoff. Returns after `forget_after_s` without a stream."""
        config = self._config
        clock = asyncio.get_running_loop().time
        last_up_at, last_error = clock(), ""
        backoff = Backoff(config.min_backoff_s, config.max_backoff_s, healthy_s=config.progress_timeout_s)
        while clock() - last_up_at < config.forget_after_s:
            started_at = clock()
            was_up, error = await self._run_link(address)
            if was_up:
                last_up_at, last_error = clock(), ""
            if error != last_error:  # once, not after every attempt
                log.warning("draft %s: %s", address, error)
                last_error = error
            lived_s = clock() - started_at if was_up else 0.0
            await asyncio.sleep(backoff.after(lived_s) * random.uniform(0.5, 1.0))
        log.info("draft %s: given up after %g s", address, config.forget_after_s)

    async def _run_link(self, address: str) -> tuple[bool, str]:
        """Connect once and run the stream. Returns whether there was one, and why the link ended."""
        was_up, reason = False, "it ended the link"
        channel = open_channel(address, receive_bytes=GROWTH_FRAME_BYTES, tls=self._config.tls, peer=DRAFT)
        try:
            async with channel:
                stub = draft_pb2_grpc.DraftServiceStub(channel)
                request = pb.DraftServiceDescribeRequest()
                worker = decode_draft_description(await stub.Describe(request, timeout=self._config.connect_timeout_s))
                self._check(worker)
                was_up = True
                await self._run_stream(address, worker, stub)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except LinkError as error:
            reason = str(error)
        return was_up, reason

    async def _run_stream(self, address: str, worker: DraftDescription, stub: draft_pb2_grpc.DraftServiceStub) -> None:
        log.info("draft %s at %s is up: %s %s", worker.worker_id, address, worker.method, worker.model)
        up = StreamUp(next(self._stream_ids), address, worker.worker_id, worker.hidden_state_layers)
        stream = self._streams[up.stream_id] = DraftStream(up, self._config, self._on_event, self._metrics)
        self._on_event(up)
        try:
            await stream.run(stub)
        finally:
            del self._streams[up.stream_id]
            self._on_event(StreamDown(up.stream_id))

    def _check(self, worker: DraftDescription) -> None:
        """Raises `IncompatibleWorkerError`.

        The target computes one set of hidden states for all workers: the layers that the first stream asks for, until
        no stream that needs hidden states is left.
        """
        expected = self._config.vocabulary_fingerprint
        if worker.vocabulary_fingerprint not in ("", expected):
            raise IncompatibleWorkerError(
                f"its vocabulary {worker.vocabulary_fingerprint} is not the target's {expected}: "
                f"start it with a draft model that shares the target's tokenizer, {MAPPING_HINT}"
            )
        layers, sent = worker.hidden_state_layers, self._config.hidden_state_layers
        if layers and sent is not None and tuple(layers) != tuple(sent):
            raise IncompatibleWorkerError(
                f"its method {worker.method} reads hidden states of layers {list(layers)}, and this target sends "
                f"{f'those of {list(sent)}' if sent else 'none'}"
            )
        last = self._layers + 1  # the output of the final norm
        if sent is None and (len(set(layers)) < len(layers) or max(layers, default=0) > last):
            raise IncompatibleWorkerError(f"it asks for hidden states of layers {layers}, this target has 0 to {last}")
        for up in [stream.up for stream in self._streams.values()]:
            if layers and up.hidden_state_layers and up.hidden_state_layers != layers:
                raise IncompatibleWorkerError(
                    f"it asks for hidden states of layers {layers}, and draft {up.address} for those of "
                    f"{up.hidden_state_layers}: all drafts of a target must ask for the same layers"
                )


RECONNECT_S = 5.0
"""A registered worker that the pool has given up is tried again after this time."""


@asynccontextmanager
async def draft_discovery(pool: DraftPool, store: StateStore) -> AsyncIterator[None]:
    """Connect to every worker that registers, for as long as the context lasts; then end all links."""
    async with store.watcher("draft") as workers:
        task = asyncio.create_task(_connect_registered(workers, pool), name="draft discovery")
        try:
            yield
        finally:
            task.cancel()
            await pool.stop()


async def _connect_registered(workers: WorkerWatcher, pool: DraftPool) -> None:
    known: set[str] = set()

    def has_changed(registered: Sequence[RegisteredWorker]) -> bool:
        return known != {worker.record.address for worker in registered}

    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(RECONNECT_S):
                known = {worker.record.address for worker in await workers.wait_for(has_changed)}
        pool.connect(ConnectDrafts(tuple(known)))
