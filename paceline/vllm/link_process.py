"""`python -m paceline.vllm.link_process FD`: the links from a vLLM worker to its draft workers.

A process of its own, as in a target worker: an event loop beside a model gets its turn late, and gRPC does not survive
the forks of a vLLM worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from itertools import count
from pathlib import Path

from prometheus_client import CollectorRegistry

from paceline.ipc.model_process import PipeConnection
from paceline.state import open_store
from paceline.telemetry import logs
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.tls import Certificates
from paceline.vllm.remote_drafts_settings import LinkOptions
from paceline.wire.draft_pool import DraftPool, draft_discovery
from paceline.wire.draft_stream import DraftLinkConfig
from paceline.wire.draft_stream_messages import ConnectDrafts, SendDraftFrame

IDLE_S = 10.0
"""After this time without a message all requests are closed: vLLM does not tell a proposer that its last ones ended."""
CHECK_S = 1.0
OPTIONS_TIMEOUT_S = 60.0


class _Links:
    """The pool of links, made anew when the proposer has been idle."""

    def __init__(self, connection: PipeConnection) -> None:
        self._options: asyncio.Future[LinkOptions] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._pool: DraftPool | None = None
        self._used_at = 0.0
        connection.on(LinkOptions, self._options.set_result)
        connection.on(ConnectDrafts, self._connect)
        connection.on(SendDraftFrame, self._send)

    async def run(self) -> None:
        """Return when the pipe is closed."""
        options = await asyncio.wait_for(self._options, OPTIONS_TIMEOUT_S)
        tls = Certificates(*map(Path, options.tls_files)) if options.tls_files else None
        config = DraftLinkConfig(options.fingerprint, tls=tls, hidden_state_layers=options.hidden_state_layers)
        stream_ids = count(1)
        metrics = TargetMetrics(CollectorRegistry(), "vllm", slots=0)
        async with open_store(options.redis_url) as store:
            while not self._connection.lost.done():
                self._pool = DraftPool(config, self._connection.send, 0, metrics, stream_ids)
                self._connect(ConnectDrafts(options.addresses))
                async with draft_discovery(self._pool, store):
                    await self._idle_or_closed()

    def _connect(self, message: ConnectDrafts) -> None:
        if self._pool is not None:
            self._pool.connect(message)

    def _send(self, message: SendDraftFrame) -> None:
        self._used_at = asyncio.get_running_loop().time()
        if self._pool is not None:
            self._pool.send(message)

    async def _idle_or_closed(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._connection.lost.done():
            await asyncio.wait([self._connection.lost], timeout=CHECK_S)
            if self._used_at and clock() - self._used_at > IDLE_S:
                self._used_at = 0.0
                return


async def _serve(end: socket.socket) -> None:
    connection = await PipeConnection.open(end)
    await _Links(connection).run()
    await connection.lost


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its pipe
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # vLLM's workers are bound to the cores they compute on
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # else a message would preempt its sender
    logs.configure("paceline-links")
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
