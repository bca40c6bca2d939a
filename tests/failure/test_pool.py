"""A target of two ranks on a real Ray of this machine: placed, killed, started again, stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.cli.processes import tree
from paceline.state.embedded import EmbeddedRedis
from paceline.wire.target_link import TargetLink
from tests.checkpoints import save_checkpoint
from tests.targets import collect, submission

PACELINE = (sys.executable, "-c", "from paceline.cli import main; main()")
PATIENCE_S = 240.0
"""Ray takes its time."""


class Pool:
    """A running `paceline target --ray local`."""

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

    def pid(self, module: str) -> int:
        """Of the one process of this kind that the pool has started."""
        [found] = [pid for pid in tree(self.process.pid) if f"\0-m\0{module}\0" in _command(pid)]
        return found


@asynccontextmanager
async def pool(*arguments: str) -> AsyncIterator[Pool]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need a short path
        process = await asyncio.create_subprocess_exec(
            *(*PACELINE, "target", "--ray", "local", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
            limit=2**20,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield Pool(process)
        finally:
            if process.returncode is None:
                for pid in list(tree(process.pid)):
                    os.kill(pid, signal.SIGKILL)
            await process.wait()


@pytest.mark.timeout(PATIENCE_S + 60)
async def test_a_replica_on_ray_outlives_its_ranks(tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path))
    with EmbeddedRedis() as redis:
        wish = ("--model", folder, "--tensor-parallel-size", "2", "--placement", "pack", "--redis-url", redis.url)
        async with pool(*wish) as running:
            before = await tokens_at((await running.wait_for(r"target ready on (\S+)"))[1])
            assert len(before) == 20

            os.kill(running.pid("services.rank"), signal.SIGKILL)
            await running.wait_for(r"rank 1 is gone: the replica ends as a whole")
            await running.wait_for(r"replica 1 ended .* and is started again")
            assert await tokens_at((await running.wait_for(r"target ready on (\S+)"))[1]) == before

            running.process.terminate()
            await running.wait_for(r"pool stopped")
            assert await running.process.wait() == 0


async def tokens_at(address: str) -> list[int]:
    link = TargetLink(address)
    try:
        await link.connect()
        tokens, _ = await collect(link, submission(max_tokens=20))
    finally:
        await link.close()
    return tokens


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""
