"""The other ranks of a model for tests: processes that follow the test's own, which is rank 0, model after model."""

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
from paceline.model.loading import load, load_shard
from paceline.model.parallel import rendezvous
from paceline.model.parallel.host_port import HostPort
from paceline.model.parallel.rendezvous import RankGroup, join_rank_group
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.tensor_parallel_model import TensorParallelModel, run_rank

LOOPBACK = "127.0.0.1"


def free_place(host: str = LOOPBACK) -> HostPort:
    """Where ranks can meet."""
    with HostPort(host, 0).listen() as listener:
        return HostPort(host, int(listener.getsockname()[1]))


def by_place(ranks: TensorParallelGroup, partial: Tensor) -> Tensor:
    """As a ring adds: the buffer is cut in as many pieces as there are ranks, and each begins at another one."""
    parts = ranks._gathered(partial.contiguous()).float().view(ranks.size, -1)
    pieces = [
        sum((piece[(first + i) % ranks.size] for i in range(1, ranks.size)), piece[first])
        for first, piece in enumerate(parts.tensor_split(ranks.size, -1))
    ]
    return torch.cat(pieces).view_as(partial).to(partial.dtype)


def all_reduced(ranks: TensorParallelGroup, partial: Tensor) -> Tensor:
    """As everybody does."""
    total = partial.contiguous()
    dist.all_reduce(total, group=ranks._device_group)
    return total


SUMS: dict[str, Callable[[TensorParallelGroup, Tensor], Tensor]] = {
    "ours": TensorParallelGroup.all_reduce,
    "by place": by_place,
    "all-reduce": all_reduced,
}


class Followers:
    """Processes that can be ranks 1 to `most` of whatever model."""

    def __init__(self, most: int = 3) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders: list[SimpleQueue[tuple[str, str] | None]] = [context.SimpleQueue() for _ in range(most)]
        self._processes: list[BaseProcess] = [
            context.Process(target=_follow, args=(rank, orders), daemon=True)
            for rank, orders in enumerate(self._orders, 1)
        ]
        for process in self._processes:
            process.start()

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for process in self._processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def exit_code(self, rank: int) -> int | None:
        """Of the process that is this rank, once it has ended; None if it does not."""
        self._processes[rank - 1].join(20)
        return self._processes[rank - 1].exitcode

    def pid(self, rank: int) -> int:
        """Of the process that is this rank."""
        pid = self._processes[rank - 1].pid
        assert pid is not None
        return pid

    @contextmanager
    def ready(self, size: int, sums: str = "ours", host: str = LOOPBACK) -> Iterator[str]:
        """Where these ranks wait for a rank 0 of this process. `sums`: how all of them add."""
        address = str(free_place(host))
        for orders in self._orders[: size - 1]:
            orders.put((address, sums))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorParallelGroup, "all_reduce", SUMS[sums])
            patch.setattr(rendezvous, "exit_process", lambda why: None)  # a lost rank fails the test, not its process
            led: list[RankGroup] = []
            patch.setattr(rendezvous, "RankGroup", lambda *parts: led.append(RankGroup(*parts)) or led[-1])
            try:
                yield address
            finally:
                for replica in led:
                    replica.shutdown()

    @contextmanager
    def led(
        self, folder: Path, size: int, dtype: str = "float32", sums: str = "ours", host: str = LOOPBACK
    ) -> Iterator[TensorParallelModel]:
        """Rank 0 of a model with these ranks."""
        with self.ready(size, sums, host) as rendezvous:
            config = {"dtype": dtype, "slots": 2048, "tensor_parallel_size": size, "rendezvous": rendezvous}
            model = load(str(folder), EngineConfig.model_validate(config))
            assert isinstance(model, TensorParallelModel)
            yield model


def _follow(rank: int, orders: SimpleQueue[tuple[str, str] | None]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while (order := orders.get()) is not None:
        rendezvous, sums = order
        TensorParallelGroup.all_reduce = SUMS[sums]  # type: ignore[method-assign]
        with join_rank_group(rendezvous, rank, None) as (ranks, brief):
            run_rank(load_shard(brief.model, brief.engine, ranks), ranks)
