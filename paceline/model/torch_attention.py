"""How passes attend where there is no native code: by kernels for NVIDIA GPUs, or by torch's operators."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch

from paceline.model.attention import AttentionOptions, Heads, KVCache, Pass, TorchPass
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.memory import LARGEST_HEAD, MOST_TABLES, TRITON, triton_compiles
from paceline.model.gpu.paged_pass import Kernels, PagedPass, PassInput
from paceline.model.gpu.pass_graphs import Capture, CudaCapture, Outputs, PassGraphs
from paceline.model.gpu.paths import DeviceTables
from paceline.model.rows import GROUP, Row, SlotTable

log = logging.getLogger(__name__)

TORCH = "torch"


def find_kernels(heads: Heads, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """None where it is no NVIDIA GPU, and where Triton, or the C compiler that it calls, is not there."""
    if device.type != "cuda" or heads.head_size > LARGEST_HEAD or not triton_compiles():
        return None
    try:
        kernels: Kernels = importlib.import_module("paceline.model.gpu.triton_kernels")
        attend_once(kernels, heads, dtype, device)
    except Exception as error:  # noqa: BLE001 - another Triton, or no compiler: it raises errors of many kinds
        log.warning("kernels in Triton are left out: %s", error)
        return None
    return kernels


@torch.inference_mode()
def attend_once(kernels: Kernels, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """One row that attends to itself."""
    cache, tables = KVCache(1, 1, heads, dtype, device), DeviceTables(1, 1, device)
    key = torch.zeros(GROUP, heads.kv_heads, heads.head_size, dtype=dtype, device=device)
    query = key.repeat_interleave(heads.queries_per_kv, 1)
    rows = PassInput.of(tables, kernels, [SlotTable([1]).row(0, 0)], cache.padding_slot)
    rows.start(cache, kernels).attend(query, key, key, 0, AttentionOptions(1.0))


@dataclass(frozen=True)
class TorchAttention:
    """Starts passes over a cache."""

    cache: KVCache
    positions: int
    """Of the longest path."""
    kernels: Kernels | None = None
    graphs: bool = False
    """Whether passes of Llama layers are captured as CUDA graphs. They need kernels: the shapes of torch's attention
    change with every pass."""

    @classmethod
    def ways(cls, cache: KVCache, positions: int) -> Iterator[TorchAttention]:
        """What is there, the best first. The last one is torch's operators.

        PACELINE_ATTENTION=torch leaves out our kernels, and PACELINE_CUDA_GRAPHS=0 graphs.
        """
        positions = min(positions, cache.slot_count)
        wanted = os.environ.get("PACELINE_ATTENTION") != TORCH
        kernels = find_kernels(cache.heads, cache.dtype, cache.device) if wanted else None
        if kernels is not None:
            if os.environ.get("PACELINE_CUDA_GRAPHS") != "0":
                yield cls(cache, positions, kernels, True)
            yield cls(cache, positions, kernels)
        yield cls(cache, positions)

    @property
    def name(self) -> str:
        """Results depend on it, bit for bit. Empty for torch's operators."""
        if self.kernels is None:
            return ""
        kernels = f"{TRITON} {importlib.metadata.version(TRITON)}, kernels {source_digest(self.kernels)}"
        return f"{kernels}{', CUDA graphs' if self.graphs else ''}"

    @cached_property
    def tables(self) -> DeviceTables:
        return DeviceTables(MOST_TABLES, self.positions, self.cache.device)

    @cached_property
    def _capture(self) -> Capture:
        return CudaCapture(self.cache.device)

    def __call__(self, rows: Sequence[Row]) -> Pass:
        if self.kernels is None:
            return TorchPass.of(self.cache, rows)
        this = PassInput.of(self.tables, self.kernels, rows, self.cache.padding_slot)
        return this.start(self.cache, self.kernels)

    def device_passes(self) -> DevicePasses | None:
        """For graphs of several passes; None without."""
        if self.kernels is None or not self.graphs:
            return None
        return DevicePasses(self.cache, self.kernels, self.tables, self._capture)

    def capture(self, forward: Callable[[PagedPass], Outputs]) -> PassGraphs | None:
        """CUDA graphs of `forward`, see `PassGraphs`; None without."""
        if self.kernels is None or not self.graphs:
            return None
        return PassGraphs(forward, self.cache, self.kernels, self.tables, self._capture)


def source_digest(kernels: Kernels) -> str:
    """A hash of the files that kernels are written in."""
    return file_digest(*{inspect.getsourcefile(each) or "" for each in (kernels.attend, kernels.add_norm)})


def file_digest(*files: str) -> str:
    """A hash of files."""
    return blake2b(b"".join(Path(file).read_bytes() for file in sorted(files)), digest_size=4).hexdigest()
