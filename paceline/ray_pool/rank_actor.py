"""The actor that Ray runs on a node: it starts one rank's process there and returns its exit code.

vLLM places its ranks in the actor's placement group itself: the process joins it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup

from paceline.host_port import HostPort, free_address
from paceline.launcher import die_with_parent

ADDRESS_VARIABLE = "RAY_ADDRESS"
GROUP_VARIABLE = "PACELINE_PLACEMENT_GROUP"


def placement_variables() -> Mapping[str, str]:
    """Environment variables for a process of this actor: the cluster's address, and the id of the placement group."""
    group = ray.util.get_current_placement_group()
    assert group is not None
    return {ADDRESS_VARIABLE: ray.get_runtime_context().gcs_address, GROUP_VARIABLE: group.id.hex()}


def join_placement_group() -> PlacementGroup | None:
    """Connect this process to the cluster, as a driver. Returns None if no actor of a replica has started it.

    Actors that it starts run in this process's Python, on all nodes. They end with this process or with the group.
    """
    if GROUP_VARIABLE not in os.environ:
        return None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(address=os.environ[ADDRESS_VARIABLE], runtime_env={"py_executable": sys.executable})
    for number, handler in handlers.items():  # Ray replaced them
        signal.signal(number, handler)
    return PlacementGroup(ray.PlacementGroupID.from_hex(os.environ[GROUP_VARIABLE]))


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
