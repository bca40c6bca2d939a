"""Rows in the layout of native code."""

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
    """Rows in one array of integers and one of addresses, which is fast to build.

    Valid until a slot table gets more slots.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        tokens, positions, tables, lengths, branches = zip(*rows, strict=True)
        sizes = [len(branch) for branch in branches]
        integers = array("i", tokens)
        for more in (positions, lengths, sizes, *branches):
            integers.extend(more)
        first, count, size = integers.buffer_info()[0], len(rows), integers.itemsize
        addresses = array("Q", [table.address for table in tables])
        branch_address = first + 4 * count * size
        for length in sizes:
            addresses.append(branch_address)
            branch_address += length * size
        tables_address = addresses.buffer_info()[0]
        self._kept_alive = integers, addresses, tables
        self.tokens = first
        """The address of the tokens: int32 [rows]."""
        self.spec = RowsSpec(
            count,
            first + count * size,
            tables_address,
            first + 2 * count * size,
            tables_address + count * addresses.itemsize,
            first + 3 * count * size,
        )
