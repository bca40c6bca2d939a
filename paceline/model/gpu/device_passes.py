"""What a network offers to who runs several of its passes as one graph: passes whose rows are tensors of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paceline.model.attention import KVCache, Pass
from paceline.model.gpu.pass_graphs import Capture
from paceline.model.gpu.paths import RowPaths

StartDevicePass = Callable[[Tensor, Tensor, Tensor, RowPaths, Tensor | None], Pass]
"""A pass over rows, from tokens, positions and slots, int64 [R] each, how the rows find their keys, and a plan for them
if there is one. Until it attends, earlier kernels may write what it is given."""


class DevicePasses(NamedTuple):
    """How passes over `cache` start, and how graphs of them are made."""

    cache: KVCache
    start: StartDevicePass
    plan: Callable[[RowPaths], Tensor]
    """Of a pass: one for longer paths in the same groups serves as well."""
    capture: Capture
