"""Ranks that share a model on GPUs. Stand-ins take the place of nccl, which only starts what it is asked to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.model.model import ModelOutput
from paceline.model.parallel import RankLostError, tensor_parallel_group
from paceline.model.parallel.rendezvous import RankGroup
from paceline.model.parallel.row_codec import RowEncoder
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import Row, SlotTable
from paceline.model.tensor_parallel_model import TensorParallelModel, run_rank

TIMEOUT_S = 60.0
TABLE = SlotTable([1, 2, 3])


class Nccl:
    """A GPU that computes a pass `late_s` after it was started, by a clock that only waiting moves."""

    def __init__(self, late_s: float, patch: pytest.MonkeyPatch) -> None:
        self.late_s, self.now, self.started = late_s, 0.0, 0.0
        self.calls: list[str] = []
        patch.setattr(tensor_parallel_group, "time", self)
        patch.setattr(torch.cuda, "Event", lambda: self)
        patch.setattr(torch.cuda, "current_stream", lambda device: device)
        patch.setattr(dist, "broadcast", lambda numbers, source, group: None)
        patch.setattr(dist, "destroy_process_group", lambda: self.calls.append("destroyed"))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)

    def record(self, stream: torch.device) -> None:
        assert stream == torch.device("cuda:1")
        self.started = self.now

    def query(self) -> bool:
        return self.now >= self.started + self.late_s

    def abort(self) -> None:
        self.calls.append("nccl aborted")


class Monitor:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def abort(self) -> None:
        self._calls.append("others told")

    def close(self) -> None:
        self._calls.append("others ended")


class Shard:
    """A rank's part of a model. A pass is started, no more."""

    numerics = name = "shard"
    asynchronous = True
    passes = 0

    def __getattr__(self, name: str) -> int:
        return 0

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.passes += 1
        with FakeTensorMode():
            return ModelOutput(torch.empty(len(wanted), 8, device="cuda:1"))


def ranks_by(nccl: Nccl) -> TensorParallelGroup:
    return TensorParallelGroup(0, 2, None, nccl, TIMEOUT_S)


def shared(nccl: Nccl) -> TensorParallelModel:
    return TensorParallelModel(Shard(), RankGroup(ranks_by(nccl), Monitor(nccl.calls)))  # type: ignore[arg-type]


def test_a_late_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl's watchdog once ended the process, before anything was told to anybody."""
    nccl = Nccl(TIMEOUT_S + 5, monkeypatch)
    model = shared(nccl)
    with pytest.raises(RankLostError, match=r"rank 0 lost its replica in the middle of a pass: .* late by 60 s"):
        model.run([TABLE.row(5, 2)], [0])
    assert nccl.calls == ["others told", "nccl aborted", "destroyed"]
    with pytest.raises(RankLostError, match="has lost its replica already"):
        model.run([TABLE.row(5, 2)], [0])


def test_a_rank_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(TIMEOUT_S - 5, monkeypatch)
    model = shared(nccl)
    for _ in range(2):
        before = nccl.now
        model.run([TABLE.row(5, 2)], [0])
        assert nccl.now >= before + TIMEOUT_S - 5, "outputs are read afterwards"
    model._group.shutdown()
    assert nccl.calls == ["others ended", "destroyed"]


def test_a_pass_that_is_waited_for_is_not_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a rank's own pass is: `Engine.overlapped_step` has nothing to hide a delivery behind."""
    model = shared(Nccl(0.0, monkeypatch))
    assert not model.asynchronous
    model._group.shutdown()


def test_other_ranks_do_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(TIMEOUT_S + 5, monkeypatch)
    sent = [RowEncoder().encode([TABLE.row(5, 2)], [0])]
    monkeypatch.setattr(TensorParallelGroup, "receive_rows", lambda ranks: sent.pop())
    shard = Shard()
    with pytest.raises(RankLostError):
        run_rank(shard, ranks_by(nccl))  # type: ignore[arg-type]
    assert shard.passes == 1


def test_the_watchdog_leaves_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its variable when a group is made."""
    made: list[tuple[str, str | None]] = []

    def new_group(backend: str, timeout: object) -> None:
        made.append((backend, os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")))

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    TensorParallelGroup.of(torch.device("cpu"), TIMEOUT_S)
    assert made == [("gloo", "3"), ("gloo", "3")]
    TensorParallelGroup.of(torch.device("cuda:1"), TIMEOUT_S)
    assert made[2] == ("nccl", "0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_gathered_into_one_tensor_and_added_in_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gather(output: Tensor, part: Tensor, group: Any) -> None:
        assert output.shape == (4 * part.numel(),)
        assert part.is_contiguous()
        output.copy_(parts.flatten())

    monkeypatch.setattr(tensor_parallel_group, "gather", gather)
    own = parts[1].T.contiguous().T  # as a product may leave it
    total = TensorParallelGroup(1, 4, None, None, TIMEOUT_S).all_reduce(own)
    a, b, c, d = parts.float()
    assert torch.equal(total, (((a + b) + c) + d).to(dtype))
