"""What the ranks of one model do together, in the middle of a pass and between passes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.model.parallel.rank_errors import RankLostError, RendezvousError

NO_TIMEOUT = timedelta(days=365)
"""Between two orders may lie a quiet night. That rank 0 is gone is known otherwise, see `lifeline`."""
HEADER_INTS = 1
"""Numbers that go ahead of an order."""
NUMERICS_BYTES = 512
"""What ranks compare of what their numbers depend on."""


@dataclass(slots=True)
class TensorParallelGroup:
    """This process among the `size` ranks of a model; it is number `rank`."""

    rank: int
    size: int
    _cpu_group: Any
    """A group for CPU tensors, whose members wait for rank 0 for as long as it takes."""
    _device_group: Any
    """A group for the model's device, whose members are in the same pass and never wait long."""
    lost: bool = False
    """Whether one of them is known to be, or to be out of step."""

    @classmethod
    def of(cls, device: torch.device, pass_timeout_s: float) -> TensorParallelGroup:
        """All processes of torch's default group. One that is late by more than the timeout, within a pass, is lost.

        To send is to wait until the others take it, so rank 0 is not patient between passes either.
        """
        timeout = timedelta(seconds=pass_timeout_s)
        passes = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        orders = dist.new_group(backend="gloo", timeout=timeout if dist.get_rank() == 0 else NO_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), orders, passes)

    def barrier(self, numerics: str) -> None:
        """Until all ranks are here: as long as they may take to load, which the default group's timeout says.

        `numerics`: what this rank's numbers depend on. Raises `RendezvousError` unless it is the same on all ranks.

        Every rank computes norms and chooses experts for itself. Ranks whose bits differ may choose different experts
        for a row, and then add parts that do not belong together. Native code and torch's operators also differ in how
        many rows they add up at once: such ranks cannot exchange their sums.
        """
        own = torch.zeros(NUMERICS_BYTES, dtype=torch.uint8)
        said = torch.frombuffer(bytearray(numerics.encode()[:NUMERICS_BYTES]), dtype=torch.uint8)
        own[: len(said)] = said
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
                    "start all of them on machines and environments of one kind"
                )

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks give, the same bits on every rank, in the dtype given.

        An all-reduce may add in an order that depends on an element's place in the buffer: a ring sums each chunk
        starting from another rank, and where the chunks end follows from how many rows there are. Then a row's result
        would depend on its company. So the parts are gathered, and added in the order of ranks, in float32.
        """
        parts = self._gathered(partial.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(partial.dtype)

    def all_gather(self, columns: Tensor, width: int) -> Tensor:
        """Whole rows, [..., `width`], of each rank's columns: as many as the first one's, or fewer at the end."""
        most = -(-width // self.size)
        parts = self._gathered(F.pad(columns, (0, most - columns.shape[-1])))
        return torch.cat(parts.unbind(), -1)[..., :width]

    def local_columns(self, columns: Tensor) -> Tensor:
        """This rank's columns of whole rows, as `gather` takes them."""
        most = -(-columns.shape[-1] // self.size)
        return columns[..., self.rank * most : (self.rank + 1) * most].contiguous()

    def broadcast_rows(self, order: Tensor) -> None:
        """Rank 0 only: give all others an order, int64 [n] on the CPU; an empty one is the last.

        Raises `RankLostError`, at once if that is known.
        """
        if self.lost:
            raise RankLostError("rank 0 has lost its replica already: load the model again")
        self._broadcast(torch.tensor([order.numel()]))
        if order.numel():
            self._broadcast(order)

    def receive_rows(self) -> Tensor:
        """The others only: wait for the next order. Raises `RankLostError`."""
        length = torch.empty(HEADER_INTS, dtype=torch.int64)
        self._broadcast(length)
        order = torch.empty(int(length), dtype=torch.int64)
        if order.numel():
            self._broadcast(order)
        return order

    def _broadcast(self, numbers: Tensor) -> None:
        try:
            dist.broadcast(numbers, 0, group=self._cpu_group)
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(f"rank {self.rank} lost its replica between two passes: {error}") from error

    def _gathered(self, part: Tensor) -> Tensor:
        """What each rank gave, [ranks, ...]."""
        parts = part.new_empty(self.size, *part.shape)
        try:
            dist.all_gather(list(parts), part, group=self._device_group)
        except RuntimeError as error:
            self.lost = True
            raise RankLostError(f"rank {self.rank} lost its replica in the middle of a pass: {error}") from error
        return parts
