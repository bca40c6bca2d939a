"""A vLLM with two tensor-parallel ranks as a replica on Ray: started, killed, started again as a unit, drained."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.chaos.chaos_run import default_vllm_options
from paceline.cli.process_tree import process_and_descendants
from tests.failure.test_pool import READY, only, pool, tokens_at

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio]

COMPUTE = "\0-m\0paceline_services.target.vllm_process\0"


@pytest.fixture
def folder() -> Iterator[str]:
    """A short path for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


async def test_a_replica_starts_again_as_a_whole(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = ("--engine", "vllm", "--vllm-options", default_vllm_options().model_dump_json(), "--model", "pydoc")
    async with pool(folder, *options, "--tensor-parallel-size", "2") as running:
        before = await tokens_at((await running.wait_for(READY))["address"])
        assert len(before) == 20
        computing = only(COMPUTE, running.process.pid)
        ranks = set(process_and_descendants(computing))
        assert len(ranks) >= 3

        os.kill(computing, signal.SIGKILL)
        await running.wait_for(r"replica 1 ended .* and is started again")
        assert await tokens_at((await running.wait_for(READY))["address"]) == before
        assert not alive(ranks)

        await running.stop()


def alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
