"""A vLLM whose two ranks are on two nodes of Ray, as a replica: started, killed, started again as a unit, drained."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtests.chaos.chaos_run import default_vllm_options
from paceline.cli.process_tree import process_and_descendants
from paceline.host_port import HostPort, free_address
from tests.failure.test_pool import READY, Pool, command_of, node, pool, tokens_at
from tests.helpers.ranks import LOOPBACK
from tests.helpers.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio]

DRIVER, RANK = "\0-m\0paceline_services.target.vllm_process\0", "ray::RayWorkerProc"
"""In the commands of vLLM's processes."""
PLATFORM = Path(__file__).with_name("ray_platform")
"""vLLM's Ray executor refuses CPUs. With this plugin its ranks are on CPUs that it takes for Ray's GPUs."""
TOKENS = 20


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A short path for Ray's sockets."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(PLATFORM), os.environ.get("PYTHONPATH")))))
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


@asynccontextmanager
async def two_nodes(folder: str) -> AsyncIterator[tuple[str, Pool, Pool]]:
    """A cluster's address, and its nodes, each with room for one rank."""
    address = str(free_address(LOOPBACK))
    head = ("--head", f"--port={HostPort.parse(address).port}", "--include-dashboard=false", "--num-gpus=1")
    async with node(folder, *head) as first, node(folder, f"--address={address}", "--num-gpus=1") as second:
        yield address, first, second


def replica(**arguments: Any) -> list[str]:
    """Options of `paceline target`. `arguments` are vLLM's."""
    size, vllm = arguments.pop("tensor_parallel_size", 1), default_vllm_options()
    options = vllm.model_copy(update={"engine_args": {**vllm.engine_args, **arguments}})
    return [
        *("--engine", "vllm", "--model", "pydoc", "--engine-config", '{"device": "cuda"}'),
        *("--vllm-options", options.model_dump_json(), "--tensor-parallel-size", str(size), "--placement", "spread"),
    ]


async def test_ranks_that_share_layers_start_again_as_a_unit(folder: str) -> None:
    await survives_a_kill(folder, RANK, "a rank of vLLM is gone", replica(tensor_parallel_size=2))


async def test_ranks_one_behind_the_other_start_again_as_a_unit(folder: str) -> None:
    """vLLM makes the buffers between them when it warms up. On CPUs it does so with a compiler only."""
    compiler = {"mode": 2, "backend": "eager"}
    options = replica(pipeline_parallel_size=2, enforce_eager=False, compilation_config=compiler)
    await survives_a_kill(folder, DRIVER, "the model process ended with exit code -9", options)


async def survives_a_kill(folder: str, victim: str, logged: str, options: list[str]) -> None:
    async with two_nodes(folder) as (address, *nodes):
        async with pool(folder, *options, ray=address) as running:
            before = await tokens_at((await running.wait_for(READY))["address"])
            assert len(before) == TOKENS
            first = [processes(each, RANK) for each in nodes]
            assert [len(each) for each in first] == [1, 1]

            os.kill([pid for each in nodes for pid in processes(each, victim)][-1], signal.SIGKILL)
            await running.wait_for(r"replica 1 ended .* and is started again")
            await running.wait_for(r"replica 1 starts")
            assert await tokens_at((await running.wait_for(READY))["address"]) == before
            assert logged in "".join(running.log)
            second = [processes(each, RANK) for each in nodes]
            assert [len(each) for each in second] == [1, 1]
            assert not {pid for each in first for pid in each} & {pid for each in second for pid in each}

            await running.stop()
        await until(lambda: not any(processes(each, kind) for each in nodes for kind in (DRIVER, RANK)))


def processes(of: Pool, kind: str) -> list[int]:
    """Of a node: those of this kind."""
    return [pid for pid in process_and_descendants(of.process.pid) if kind in command_of(pid)]
