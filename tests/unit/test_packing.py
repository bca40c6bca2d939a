"""What rank 0 tells the other ranks of a pass is what it runs itself."""

from __future__ import annotations

from paceline.model.parallel.row_codec import decode_rows, encode_rows
from paceline.model.rows import TILE, SlotTable


def test_rows_arrive_as_they_were() -> None:
    """Three tables, one of which two rows share, and branches."""
    lanes = [SlotTable(range(1 + 300 * n, 1 + 300 * n + length)) for n, length in enumerate((TILE + 3, 2 * TILE, 5))]
    rows = [lanes[0].row(7, TILE + 1), lanes[0].row(8, TILE + 2), lanes[2].row(9, 4)]
    rows += [lanes[1].branch_row(3, [901]), lanes[1].branch_row(4, [902]), lanes[1].branch_row(5, [901, 903])]
    again, wanted = decode_rows(encode_rows(rows, [1, 2, 5]))
    assert wanted == [1, 2, 5]
    for ours, theirs in zip(rows, again, strict=True):
        assert (ours.token, ours.position, ours.length) == (theirs.token, theirs.position, theirs.length)
        assert ours.path() == theirs.path()
    assert again[0].slot_table is again[1].slot_table
    assert len({id(row.slot_table) for row in again}) == 3


def test_a_pass_of_which_nothing_is_wanted() -> None:
    again, wanted = decode_rows(encode_rows([SlotTable([5]).row(1, 0)], []))
    assert wanted == []
    assert again[0].path() == [5]
