"""Passes whose rows are on the device, by stand-ins of its kernels, for graphs on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.drafting import graphed_drafts
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.paged_pass import PagedPass
from paceline.model.gpu.pass_graphs import Outputs
from paceline.model.gpu.paths import RowPaths
from paceline.model.native.native_library import NativeLibrary
from paceline.model.rows import GROUP
from paceline.model.torch_attention import TorchAttention
from tests.helpers import device_draws, gpu_kernels
from tests.helpers.gpu_kernels import use_stand_ins


@dataclass
class CheckedPass(PagedPass):
    """Raises AssertionError unless the rows' paths are what a kernel may rely on."""

    def __post_init__(self) -> None:
        tables, table, committed, seen, branch, branches, groups = self.paths
        assert {each.dtype for each in self.paths} == {torch.int32}
        assert {each.dtype for each in (self.tokens, self.positions, self.slots)} == {torch.int64}
        assert len(self.tokens) % GROUP == 0
        real = seen > 0
        assert torch.equal(self.positions[real], seen[real].long() - 1)
        assert bool((self.slots[~real] == self.cache.padding_slot).all())
        own = (branch + self.positions - committed).clamp(0, len(branches) - 1)
        at_position = tables[table.long(), self.positions.clamp(max=tables.shape[1] - 1)]
        path_ends = torch.where(self.positions < committed, at_position, branches[own.long()])
        assert torch.equal(path_ends[real].long(), self.slots[real]), "a row's path ends with its own slot"
        assert (int(groups[0]), int(groups[-1])) == (0, len(self.tokens))
        for first, end in itertools.pairwise(groups.tolist()):
            assert 0 <= end - first <= GROUP
            members = slice(first, end)
            assert len(set(zip(table[members].tolist(), committed[members].tolist(), strict=True))) <= 1


class CheckedPasses(DevicePasses):
    """Those of `CheckedPass`."""

    def start(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, paths: RowPaths, plan: Tensor | None
    ) -> PagedPass:
        return CheckedPass(self.cache, self.kernels, tokens, positions, slots, paths, plan)


def run_again(run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """A `Capture` whose replay is a run."""

    def replay() -> None:
        run()

    return replay, run()


def use_torch(patch: pytest.MonkeyPatch) -> None:
    """In place of native code, which may have been loaded."""
    patch.setenv("PACELINE_NATIVE", "0")
    patch.setattr(NativeLibrary, "_instance", None)


def use_device_passes(patch: pytest.MonkeyPatch, *, recorded: bool = False) -> None:
    """For networks that are made meanwhile, on a CPU. `recorded`: a graph repeats the operators of its first run on the
    same memory, also of passes from the host, which share slot tables with it; else every run is Python's, and checks
    its passes."""
    use_torch(patch)
    patch.setattr(graphed_drafts, "draw_kernels", lambda: device_draws)
    if recorded:
        use_stand_ins(patch)
        return

    def device_passes(attention: TorchAttention) -> DevicePasses:
        return CheckedPasses(attention.cache, gpu_kernels, attention.tables, run_again)

    patch.setattr(TorchAttention, "device_passes", device_passes)
