"""A vLLM worker's way to its draft workers: a process with the links, and the client at the other end of its pipe."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

from paceline.engine.draft_client import DraftClient, NoDraftClient
from paceline.ipc.pipe import Pipe
from paceline.launcher import die_with_parent
from paceline.vllm.remote_drafts_settings import LinkOptions
from paceline.wire.remote_draft_client import RemoteDraftClient

SEND_TIMEOUT_S = 2
"""A process of links that reads nothing for so long counts as lost."""
MODULE = "paceline.vllm.link_process"


class PoolLinks:
    """See `DraftLinks`. Without addresses and registry there is no process: lookups alone draft."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options
        self._drafting: RemoteDraftClient | None = None
        self._pipe: Pipe | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> DraftClient:
        if not (self._options.addresses or self._options.redis_url):
            return NoDraftClient()
        ours, theirs = socket.socketpair()
        with theirs:
            command = die_with_parent([sys.executable, "-m", MODULE, str(theirs.fileno())])
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        self._pipe = Pipe(ours)
        self._pipe.send(self._options)
        self._drafting = RemoteDraftClient(self._pipe)
        return self._drafting

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._pipe = self._drafting = self._process = None

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    def addresses(self) -> Sequence[str]:
        """Connected workers, the least busy one first, then all others that are named: the links try them again."""
        connected = self._drafting.connected() if self._drafting else []
        return [*connected, *(each for each in self._options.addresses if each not in connected)]
