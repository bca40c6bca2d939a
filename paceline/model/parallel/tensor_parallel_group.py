"""Communication between the ranks of one model, within a pass and between passes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.model.parallel import RankLostError, RendezvousError

NO_TIMEOUT = timedelta(days=365)
"""Passes may be hours apart. `rank_monitor` notices a lost rank 0."""
NUMERICS_BYTES = 1024
"""Length of the numerics line that ranks compare."""
POLL_S = 2e-5
"""How long to sleep before a GPU is asked again whether it has computed a pass."""

gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch has renamed it in 2.13."""


@dataclass(slots=True)
class TensorParallelGroup:
    """Rank `rank` of the `size` ranks of a model: this process."""

    rank: int
    size: int
    _cpu_group: Any
    """For CPU tensors. Ranks wait for rank 0 without a timeout."""
    _device_group: Any
    """For tensors on the model's device. Ranks are in the same pass and wait at most the pass timeout."""
    _pass_timeout_s: float
    lost: bool = False
    """Whether a rank is lost, or in another pass than the others."""

    @classmethod
    def of(cls, device: torch.device, pass_timeout_s: float) -> TensorParallelGroup:
        """All processes of torch's default group. A rank that is late by more than the timeout within a pass is lost.

        A broadcast waits until the other ranks receive it, so rank 0 has the timeout between passes, too.
        """
        timeout = timedelta(seconds=pass_timeout_s)
        if device.type == "cuda":  # else its watchdog ends this process once a rank is late: `wait_for` notices that
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        passes = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        rows = dist.new_group(backend="gloo", timeout=timeout if dist.get_rank() == 0 else NO_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), rows, passes, pass_timeout_s)

    def barrier(self, numerics: str) -> None:
        """Wait until all ranks have loaded, up to the default group's timeout.

        `numerics`: what this rank's numbers depend on. Raises `RendezvousError` unless it is the same on all ranks, and
        `RankLostError` if a rank is lost.

        Every rank computes norms and chooses experts itself. Ranks whose bits differ may choose different experts for a
        row, and then add parts of different experts. Native code and torch's operators also sum different numbers of
        rows at once, so such ranks cannot exchange sums.
        """
        own = torch.zeros(NUMERICS_BYTES, dtype=torch.uint8)
        line = torch.frombuffer(bytearray(numerics.encode()[:NUMERICS_BYTES]), dtype=torch.uint8)
        own[: len(line)] = line
        parts = own.new_empty(self.size, NUMERICS_BYTES)
        try:
            dist.all_gather(list(parts), own)
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(f"rank {self.rank} lost its replica before all had loaded: {error}") from error
        first, *others = (bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise RendezvousError(
                    f"ranks must compute alike, but rank 0 has ({first}) and rank {rank} ({other}): "
                    "start all of them on equal machines and environments"
                )

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, with the same bits on every rank, in the same dtype.

        torch's all-reduce may add in an order that depends on an element's index in the buffer: a ring sums each chunk
        from another rank on, and the number of rows decides where chunks end. A row's result would then depend on the
        other rows. So the parts are gathered, and added in rank order, in float32.
        """
        parts = self._gathered(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def all_gather(self, columns: Tensor, width: int) -> Tensor:
        """Complete rows [..., `width`] of each rank's columns; the last ranks may have fewer columns than the first."""
        most = -(-width // self.size)
        parts = self._gathered(F.pad(columns, (0, most - columns.shape[-1])))
        return torch.cat(parts.unbind(), -1)[..., :width]

    def local_columns(self, columns: Tensor) -> Tensor:
        """This rank's columns of complete rows, the inverse of `all_gather`."""
        most = -(-columns.shape[-1] // self.size)
        return columns[..., self.rank * most : (self.rank + 1) * most].contiguous()

    def broadcast_rows(self, rows: Tensor) -> None:
        """On rank 0, send encoded rows, int64 [n] on the CPU, to all other ranks; empty ones end them.

        Raises `RankLostError`, at once if a rank is lost already.
        """
        if self.lost:
            raise RankLostError("rank 0 has lost its replica already: load the model again")
        self._broadcast(torch.tensor([rows.numel()]))
        if rows.numel():
            self._broadcast(rows)

    def receive_rows(self) -> Tensor:
        """On other ranks, wait for the next encoded rows. Raises `RankLostError`."""
        length = torch.empty(1, dtype=torch.int64)
        self._broadcast(length)
        rows = torch.empty(int(length), dtype=torch.int64)
        if rows.numel():
            self._broadcast(rows)
        return rows

    def _broadcast(self, numbers: Tensor) -> None:
        try:
            dist.broadcast(numbers, 0, group=self._cpu_group)
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(f"rank {self.rank} lost its replica between two passes: {error}") from error

    def _gathered(self, part: Tensor) -> Tensor:
        """Each rank's tensor, [ranks, ...]."""
        parts = part.new_empty(self.size, *part.shape)
        try:
            gather(parts.view(-1), part.contiguous().view(-1), group=self._device_group)
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(f"rank {self.rank} lost its replica in the middle of a pass: {error}") from error
        return parts

    def wait_for(self, outputs: Tensor) -> None:
        """Wait until a pass's outputs are computed. Raises `RankLostError` if another rank is late.

        gloo waits, and raises, in each collective. nccl only starts collectives there: the GPU waits for the other
        ranks, without a timeout.
        """
        if outputs.is_cpu:
            return
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(outputs.device))
        deadline = time.monotonic() + self._pass_timeout_s
        while not computed.query():
            if time.monotonic() > deadline:
                self.lost = True
                raise RankLostError(
                    f"rank {self.rank} lost its replica in the middle of a pass: "
                    f"another rank is late by {self._pass_timeout_s:.0f} s"
                )
            time.sleep(POLL_S)

    def abort(self) -> None:
        """End what waits for the other ranks on a GPU, which this process could not leave. They are lost."""
        self.lost = True
        self._device_group.abort()
