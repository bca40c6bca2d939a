"""The actor that Ray runs on a node: it starts one rank's process there and returns its exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import ray

from paceline.host_port import HostPort, free_address
from paceline.launcher import die_with_parent
from paceline.ray_pool.placement import placement_variables


class RankActor:
    """Runs one process once. The process ends when the actor does, in whatever way."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def rendezvous_address(self) -> HostPort:
        """This node's address, and a free port on it."""
        return free_address(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]

    async def run(self, arguments: Sequence[str]) -> int:
        """Run `python ...` on this node until it ends. Returns its exit code."""
        command = die_with_parent([sys.executable, *arguments])
        environment = {**os.environ, **placement_variables()}
        self._process = subprocess.Popen(command, start_new_session=True, env=environment)  # noqa: ASYNC220 - a few ms
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """Send the process SIGTERM."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
