"""What Ray runs on a node: starts one rank's process there, and tells how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import ray

from paceline.launcher import die_with_parent
from paceline.model.parallel.host_port import HostPort


class RankActor:
    """An actor, for one life of one process. The process ends with it, however that comes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def rendezvous_address(self) -> HostPort:
        """This node's address, and a port that is free there."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with HostPort(address, 0).listen() as listener:
            return HostPort(address, int(listener.getsockname()[1]))

    async def run(self, arguments: Sequence[str]) -> int:
        """Run `python ...` here until it ends; its exit code."""
        command = die_with_parent([sys.executable, *arguments])
        self._process = subprocess.Popen(command, start_new_session=True)  # noqa: ASYNC220 - a few milliseconds
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """Ask it to end in order."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
