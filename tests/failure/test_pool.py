"""Targets on a real Ray on this machine: placed, killed, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from paceline.cli.process_tree import process_and_descendants
from paceline.host_port import HostPort, free_address
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.ranks import LOOPBACK
from tests.helpers.served import PACELINE
from tests.helpers.targets import collect, generation_request, link_to

PATIENCE_S = 240.0
"""Ray is slow to start."""
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 60)]
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the user's home
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
READY = r"(pid=(?P<actor>\d+).*)?target ready on (?P<address>\S+)"
"""A target's log line, after Ray's prefix with the actor's process id."""
KINDS = TARGET, RANK = ("\0-m\0paceline_services.target\0", "\0-m\0paceline_services.rank\0")
"""In the command of rank 0, and in that of any other rank."""


class Pool:
    """A running `paceline target --ray ...`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []

    async def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the log up to a line in which `pattern` is found."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.log.append(line.decode(errors="replace"))
            if found := re.search(pattern, self.log[-1]):
                return found
        raise AssertionError(f"{pattern!r} was never logged:\n{''.join(self.log)}")

    async def stop(self) -> None:
        """Send SIGTERM, and wait for exit code 0."""
        self.process.terminate()
        await self.wait_for(r"pool stopped")
        assert await self.process.wait() == 0


@pytest.fixture
def folder() -> Iterator[str]:
    """A short path for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


@asynccontextmanager
async def started(folder: str, *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process, which is killed with its descendants at the end of the context."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | RAY | {"RAY_TMPDIR": folder},
        limit=2**20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            for pid in list(process_and_descendants(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await process.wait()


@asynccontextmanager
async def pool(folder: str, *arguments: str, ray: str = "local") -> AsyncIterator[Pool]:
    async with (
        asyncio.timeout(PATIENCE_S),
        started(folder, *PACELINE, "target", "--ray", ray, *arguments) as process,
    ):
        yield Pool(process)


@asynccontextmanager
async def node(folder: str, *arguments: str) -> AsyncIterator[Pool]:
    """A node of two cores in a cluster, once it is up."""
    own = ("--num-cpus=2", f"--object-store-memory={2**27}", "--node-ip-address=127.0.0.1", "--block")
    async with (
        asyncio.timeout(PATIENCE_S),
        started(folder, sys.executable, "-m", "ray.scripts.scripts", "start", *own, *arguments) as process,
    ):
        running = Pool(process)
        await running.wait_for("Ray runtime started")
        yield running


async def test_a_replica_on_ray_outlives_its_ranks(tmp_path: Path, folder: str) -> None:
    model = str(save_checkpoint(tmp_path))
    with EmbeddedRedis() as redis:
        options = ("--model", model, "--tensor-parallel-size", "2", "--placement", "pack", "--redis-url", redis.url)
        async with pool(folder, *options) as running:
            before = await tokens_at((await running.wait_for(READY))["address"])
            assert len(before) == 20

            os.kill(only(RANK, running.process.pid), signal.SIGKILL)
            await running.wait_for(r"rank 1 is gone: the replica ends as a whole")
            await running.wait_for(r"replica 1 ended .* and is started again")
            assert await tokens_at((await running.wait_for(READY))["address"]) == before

            await running.stop()


async def test_a_replica_that_dies_leaves_the_other_alone(folder: str) -> None:
    """Both run on one node, on different ports."""
    port = first_of(4)
    metrics = port + 2
    options = ("--model", "table:64", "--replicas", "2", "--port", str(port), "--metrics-port", str(metrics))
    async with pool(folder, *options) as running:
        first, second = await running.wait_for(READY), await running.wait_for(READY)
        log = "".join(running.log)
        assert {int(each["address"].rpartition(":")[2]) for each in (first, second)} == {port, port + 1}
        assert {int(found) for found in re.findall(r"metrics on http://\S+:(\d+)/", log)} == {metrics, metrics + 1}
        before = await tokens_at(first["address"])
        assert len(before) == 20
        assert await tokens_at(second["address"]) == before

        os.kill(only(TARGET, int(first["actor"])), signal.SIGKILL)
        await running.wait_for(r"replica \d ended .* and is started again")
        assert await tokens_at(second["address"]) == before
        assert await tokens_at((await running.wait_for(READY))["address"]) == before

        await running.stop()


async def test_ranks_spread_over_a_cluster_that_runs(tmp_path: Path, folder: str) -> None:
    """Each of the two nodes has cores for both ranks."""
    model, address = str(save_checkpoint(tmp_path)), str(free_address(LOOPBACK))
    options = ("--model", model, "--tensor-parallel-size", "2", "--placement", "spread")
    async with (
        node(folder, "--head", f"--port={HostPort.parse(address).port}", "--include-dashboard=false") as head,
        node(folder, f"--address={address}") as other,
    ):
        async with pool(folder, *options, ray=address) as running:
            assert len(await tokens_at((await running.wait_for(READY))["address"])) == 20
            commands = ["\n".join(map(command_of, process_and_descendants(at.process.pid))) for at in (head, other)]
            ranks = [[each for each in KINDS if each in found] for found in commands]
            assert sorted(ranks) == sorted([kind] for kind in KINDS)
            await running.stop()
        assert head.process.returncode is other.process.returncode is None


def first_of(count: int) -> int:
    """The first of `count` free ports in a row, outside the range that the system allocates from."""
    for port in range(20_000, 30_000, count):
        with suppress(OSError), ExitStack() as stack:
            for each in range(port, port + count):
                stack.enter_context(HostPort("0.0.0.0", each).listen())
            return port
    raise AssertionError(f"no {count} ports in a row are free")


async def tokens_at(address: str) -> list[int]:
    async with link_to(address) as link:
        tokens, _ = await collect(link, generation_request(max_tokens=20))
    return tokens


def only(kind: str, root: int) -> int:
    """The only process of this kind among a process and its descendants."""
    [found] = [pid for pid in process_and_descendants(root) if kind in command_of(pid)]
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""
