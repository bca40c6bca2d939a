"""Other ranks decode the rows that rank 0 encodes."""

from __future__ import annotations

from paceline.model.parallel.row_codec import decode_rows, encode_rows
from paceline.model.rows import TILE, SlotTable


def test_decoded_rows_equal_the_encoded_ones() -> None:
    """Three tables, one of which two rows share, and branches."""
    tables = [SlotTable(range(1 + 300 * n, 1 + 300 * n + length)) for n, length in enumerate((TILE + 3, 2 * TILE, 5))]
    rows = [tables[0].row(7, TILE + 1), tables[0].row(8, TILE + 2), tables[2].row(9, 4)]
    rows += [tables[1].branch_row(3, [901]), tables[1].branch_row(4, [902]), tables[1].branch_row(5, [901, 903])]
    decoded, wanted = decode_rows(encode_rows(rows, [1, 2, 5]))
    assert wanted == [1, 2, 5]
    for ours, theirs in zip(rows, decoded, strict=True):
        assert (ours.token, ours.position, ours.length) == (theirs.token, theirs.position, theirs.length)
        assert ours.path() == theirs.path()
    assert decoded[0].slot_table is decoded[1].slot_table
    assert len({id(row.slot_table) for row in decoded}) == 3


def test_a_pass_without_wanted_rows() -> None:
    decoded, wanted = decode_rows(encode_rows([SlotTable([5]).row(1, 0)], []))
    assert wanted == []
    assert decoded[0].path() == [5]
