"""Processes that are the other ranks of one model after another, for tests; the test's own process is rank 0."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config import EngineConfig
from paceline.host_port import free_address
from paceline.model.loading import load_shard
from paceline.model.model_loader import load
from paceline.model.parallel import rendezvous
from paceline.model.parallel.rendezvous import RankGroup, join_rank_group
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.tensor_parallel_model import TensorParallelModel, run_rank

LOOPBACK = "127.0.0.1"


def by_index(ranks: TensorParallelGroup, partial: Tensor) -> Tensor:
    """The sum of a ring: the buffer has one piece per rank, and each piece's sum starts with another rank."""
    parts = ranks._gathered(partial).float().view(ranks.size, -1)
    pieces = [
        sum((piece[(first + i) % ranks.size] for i in range(1, ranks.size)), piece[first])
        for first, piece in enumerate(parts.tensor_split(ranks.size, -1))
    ]
    return torch.cat(pieces).view_as(partial).to(partial.dtype)


def all_reduced(ranks: TensorParallelGroup, partial: Tensor) -> Tensor:
    """torch's own sum."""
    total = partial.contiguous()
    dist.all_reduce(total, group=ranks._device_group)
    return total


SUMS: dict[str, Callable[[TensorParallelGroup, Tensor], Tensor]] = {
    "ours": TensorParallelGroup.all_reduce,
    "by index": by_index,
    "all-reduce": all_reduced,
}


class RankProcesses:
    """Ranks 1 to `most`; they load the model that rank 0 loads, then the next one."""

    def __init__(self, most: int = 3) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once, in the server
        context.set_forkserver_preload([__name__])
        self._jobs: list[SimpleQueue[tuple[str, str]]] = [context.SimpleQueue() for _ in range(most)]
        self._processes: list[BaseProcess] = [
            context.Process(target=_serve_rank, args=(rank, jobs), daemon=True)
            for rank, jobs in enumerate(self._jobs, 1)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def exit_code(self, rank: int) -> int | None:
        """The exit code of a rank's process; None if it does not end in time."""
        self._processes[rank - 1].join(20)
        return self._processes[rank - 1].exitcode

    def pid(self, rank: int) -> int:
        pid = self._processes[rank - 1].pid
        assert pid is not None
        return pid

    @contextmanager
    def ready(self, size: int, sums: str = "ours", host: str = LOOPBACK) -> Iterator[str]:
        """The rendezvous at which these ranks wait for this process. `sums`: the sum that all ranks use."""
        address = str(free_address(host))
        for jobs in self._jobs[: size - 1]:
            jobs.put((address, sums))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorParallelGroup, "all_reduce", SUMS[sums])
            patch.setattr(rendezvous, "exit_process", lambda reason: None)  # a lost rank must not end pytest
            groups: list[RankGroup] = []
            patch.setattr(rendezvous, "RankGroup", lambda *parts: groups.append(RankGroup(*parts)) or groups[-1])
            try:
                yield address
            finally:
                for group in groups:
                    group.shutdown()

    @contextmanager
    def load(
        self, folder: Path, size: int, dtype: str = "float32", sums: str = "ours", host: str = LOOPBACK
    ) -> Iterator[TensorParallelModel]:
        """A model on these ranks."""
        with self.ready(size, sums, host) as rendezvous:
            config = {"dtype": dtype, "slots": 2048, "tensor_parallel_size": size, "rendezvous": rendezvous}
            model = load(str(folder), EngineConfig.model_validate(config))
            assert isinstance(model, TensorParallelModel)
            yield model


def _serve_rank(rank: int, jobs: SimpleQueue[tuple[str, str]]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        rendezvous, sums = jobs.get()
        TensorParallelGroup.all_reduce = SUMS[sums]  # type: ignore[method-assign]
        with join_rank_group(rendezvous, rank, None) as (ranks, config):
            run_rank(load_shard(config.model, config.engine, ranks), ranks)
