"""All levels of a draft as one function of memory on the device, which a CUDA graph repeats.

The first level extends the requests' paths by the tokens that were committed since; each other level expands the
likeliest nodes of the one before, as many of each request, and chooses them on the device (EAGLE-2, Li et al. 2024).
What is known before, positions and slots for instance, comes with one upload; nodes come back with one read.

Shapes: E rows that extend, N requests, W nodes of a request that a level expands, K children of each, D levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.model.attention import Pass
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.gpu.paths import RowPaths

Fields = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Type and shape of named tensors."""
WORD = 8
"""Bytes to which tensors in one piece of memory are aligned."""


class GraphedNetwork(Protocol):
    """A `RowNetwork` whose parts run over passes that are on the device."""

    ids: Tensor | None
    device_passes: DevicePasses | None
    """None: it has none here."""

    def encode(self, states: Tensor) -> Tensor:
        """See `RowNetwork`."""

    def forward(self, this: Pass, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What `logits` takes, [R, h], and the inputs of the rows' children, [R, h], of heads."""

    def logits(self, final: Tensor) -> Tensor:
        """[R, columns]"""


class DraftShape(NamedTuple):
    """What a graph is made for. The largest of each is for the most rows."""

    rows: int
    requests: int
    depth: int
    """Levels: as deep are the nodes."""


class PackedMemory:
    """Named tensors in one piece of memory of a device, and in one of the host that is copied to it."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        sizes = [-(-_bytes(*field) // WORD) * WORD for field in fields.values()]
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        start = 0
        for (name, (dtype, shape)), size in zip(fields.items(), sizes, strict=True):
            part = slice(start, start + _bytes(dtype, shape))
            self.host[name] = self._host[part].view(dtype).view(*shape).numpy()
            self.device[name] = self._device[part].view(dtype).view(*shape)
            start += size

    def upload(self) -> None:
        """Waits for nothing. The host's memory must not change before the copy is done."""
        self._device.copy_(self._host, non_blocking=True)

    def download(self) -> None:
        """Waits until all that was started is done."""
        self._host.copy_(self._device)


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


class Draws(Protocol):
    """What follows the network in a level: see `paceline.drafting.draw_kernels`. A graph can hold it."""

    def predict(
        self,
        logits_RV: Tensor,
        keys_R2: Tensor,
        params_5R: Tensor,
        ids_V: Tensor | None,
        tokens_RK: Tensor,
        log_probs_RK: Tensor,
    ) -> None: ...

    def choose(
        self,
        path_log_probs: Tensor,
        tokens: Tensor,
        log_probs: Tensor,
        branches: Tensor,
        slots: Tensor,
        level: int,
        features: Tensor | None,
        chosen: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...


class DraftGraph:
    """The levels of one shape. Who fills `inputs` calls `run`, then reads `outputs`.

    inputs:
    tokens, positions, slots int64 [E]; table, seen, committed int32 [E]: the rows that extend, see `RowPaths`.
    groups int32 [E + 1]. writes int32 [E, 3]: see `DeviceTables`.
    roots int64 [N * W]: the row of each request's root, W times.
    level_positions, level_slots int64, level_seen int32 [D - 1, N * W]: the nodes that later levels expand.
    level_table, level_committed int32 [N * W].
    keys int64 [D, N * W, 2]: see `draw_kernels.predict`.
    params float64 [5, N * W]: see `draw_params`.

    outputs:
    tokens int64, log_probs float32 [D, N, W, K]. The first level expands a root W times; the first one counts.
    chosen int64 [D, N, W]: which of the W * K children of a level the next one expands.

    states [E, layers, H]: of the rows that extend, if the network is a head; None else.
    """

    def __init__(
        self,
        network: GraphedNetwork,
        passes: DevicePasses,
        draws: Draws,
        shape: DraftShape,
        width: int,
        children: int,
        states: Tensor | None,
    ) -> None:
        """`width`: W. `children`: K."""
        self._network, self._passes, self._draws = network, passes, draws
        self.shape, self.width, self._children, self.states = shape, width, children, states
        rows, requests, depth = shape
        nodes, device = requests * width, passes.cache.device
        integers, small = torch.int64, torch.int32
        self.inputs = PackedMemory(
            {
                **dict.fromkeys(("tokens", "positions", "slots"), (integers, (rows,))),
                **dict.fromkeys(("table", "seen", "committed"), (small, (rows,))),
                "groups": (small, (rows + 1,)),
                "writes": (small, (rows, 3)),
                "roots": (integers, (nodes,)),
                **dict.fromkeys(("level_positions", "level_slots"), (integers, (depth - 1, nodes))),
                "level_seen": (small, (depth - 1, nodes)),
                **dict.fromkeys(("level_table", "level_committed"), (small, (nodes,))),
                "keys": (integers, (depth, nodes, 2)),
                "params": (torch.float64, (5, nodes)),
            },
            device,
        )
        candidates = (depth, requests, width, children)
        self.outputs = PackedMemory(
            {
                "tokens": (integers, candidates),
                "log_probs": (torch.float32, candidates),
                "chosen": (integers, (depth, requests, width)),
            },
            device,
        )
        self._first_branch = torch.zeros(rows, dtype=small, device=device)
        self._no_branches = torch.zeros(nodes, depth - 1, dtype=small, device=device)
        self._branch = torch.arange(nodes, dtype=small, device=device) * (depth - 1)
        self._level_groups = torch.arange(requests + 1, dtype=small, device=device) * width
        self._root_log_probs = torch.full((requests, width), -torch.inf, device=device)
        self._root_log_probs[:, 0] = 0.0

    def run(self) -> list[Tensor]:
        """Device code alone: no length, no number and no branch of it depends on what is in memory."""
        network, inputs = self._network, self.inputs.device
        tokens, log_probs, chosen = self.outputs.device.values()
        features = None if self.states is None else network.encode(self.states)
        final, features = self._extend(inputs, features)
        path_log_probs, branches = self._root_log_probs, self._no_branches
        plan = self._plan(inputs) if self.shape.depth > 1 else None
        for level in range(self.shape.depth):
            below = tokens[level].flatten(0, 1), log_probs[level].flatten(0, 1)
            self._draws.predict(network.logits(final), inputs["keys"][level], inputs["params"], network.ids, *below)
            if level < self.shape.depth - 1:
                path_log_probs, next_tokens, branches, features = self._draws.choose(
                    path_log_probs,
                    tokens[level],
                    log_probs[level],
                    branches,
                    inputs["level_slots"][level],
                    level,
                    features,
                    chosen[level],
                )
                final, features = network.forward(self._level(inputs, level, next_tokens, branches, plan), features)
        return [tokens, log_probs, chosen]

    def _extend(self, inputs: Mapping[str, Tensor], features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The first pass: its results for each node that is expanded, the roots."""
        table, positions, slots = inputs["table"], inputs["positions"], inputs["slots"]
        tables = self._passes.tables.data
        self._passes.kernels.write_tables(tables, inputs["writes"])
        paths = RowPaths(
            tables,
            table,
            inputs["committed"],
            inputs["seen"],
            self._first_branch,
            self._first_branch,  # no row sees a branch
            inputs["groups"],
        )
        this = self._passes.start(inputs["tokens"], positions, slots, paths, None)
        final, features = self._network.forward(this, features)
        roots = inputs["roots"]
        return final.index_select(0, roots), None if features is None else features.index_select(0, roots)

    def _plan(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Of all levels: the last one's paths are the longest, but of requests that end before it."""
        return self._passes.kernels.plan(self._level_paths(inputs, inputs["level_seen"].amax(0), self._no_branches))

    def _level(
        self, inputs: Mapping[str, Tensor], level: int, tokens: Tensor, branches: Tensor, plan: Tensor | None
    ) -> Pass:
        """The pass over the nodes that `level` has chosen."""
        paths = self._level_paths(inputs, inputs["level_seen"][level], branches)
        return self._passes.start(tokens, inputs["level_positions"][level], inputs["level_slots"][level], paths, plan)

    def _level_paths(self, inputs: Mapping[str, Tensor], seen: Tensor, branches: Tensor) -> RowPaths:
        return RowPaths(
            self._passes.tables.data,
            inputs["level_table"],
            inputs["level_committed"],
            seen,
            self._branch,
            branches.flatten(),
            self._level_groups,
        )
