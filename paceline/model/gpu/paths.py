"""How the rows of a pass find their keys in a GPU's memory: tables of slots that stay there, and branches of guesses."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowPaths(NamedTuple):
    """The paths of a pass' R rows, int32, in a GPU's memory. Kernels read them when they run, so earlier kernels of the
    same graph may write them.

    Row r sees the positions 0 to seen[r] - 1. The slot of position p is tables[table[r], p] below committed[r], and
    branches[branch[r] + p - committed[r]] from there on.

    tables [T, N]: the slots of requests' paths, by position.
    table, committed, seen, branch [R]. A padding row has seen 0. For others seen is the row's position + 1.
    branches [B]: slots of guesses.
    groups [G + 1]: group g has the rows groups[g] to groups[g + 1] - 1: at most GROUP adjacent rows with one table and
    the same `committed`, or with no branches at all. Groups that are left are empty.
    """

    tables: Tensor
    table: Tensor
    committed: Tensor
    seen: Tensor
    branch: Tensor
    branches: Tensor
    groups: Tensor
