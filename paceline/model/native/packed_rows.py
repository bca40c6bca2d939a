"""Rows as native code reads them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from paceline.model.native.native_library import Pointer
from paceline.model.rows import Row


class RowsSpec(ctypes.Structure):
    """`Rows` of rows.hpp."""

    _fields_ = (
        ("count", ctypes.c_int32),
        *((name, Pointer) for name in ("positions", "tables", "prefix_lengths", "branches", "branch_lengths")),
    )


class PackedRows:
    """Rows in one array of integers and one of addresses: passes are short, and this is quick.

    Valid while no lane gets more slots.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        tokens, positions, lanes, lengths, branches = zip(*rows, strict=True)
        sizes = [len(branch) for branch in branches]
        integers = array("i", tokens)
        for more in (positions, lengths, sizes, *branches):
            integers.extend(more)
        first, count, size = integers.buffer_info()[0], len(rows), integers.itemsize
        addresses = array("Q", [lane.address for lane in lanes])
        branch_at = first + 4 * count * size
        for length in sizes:
            addresses.append(branch_at)
            branch_at += length * size
        tables_at = addresses.buffer_info()[0]
        self._lent = integers, addresses, lanes
        self.tokens = first
        """Where the tokens are: int32 [rows]."""
        self.spec = RowsSpec(
            count,
            first + count * size,
            tables_at,
            first + 2 * count * size,
            tables_at + count * addresses.itemsize,
            first + 3 * count * size,
        )
