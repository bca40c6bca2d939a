"""What rank 0 sends the other ranks of a pass, and what they make of it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from paceline.model.parallel.row_codec import HEADER, PER_ROW, PER_TABLE, RowDecoder, RowEncoder
from paceline.model.rows import Row, SlotTable

PLENTY = 32_768


def plain(rows: Iterable[Row]) -> list[tuple[int, int, list[int]]]:
    """What a row is, whatever table it has."""
    return [(row.token, row.position, row.path()) for row in rows]


def test_a_rank_s_second_pass_builds_nothing() -> None:
    """All slots of all requests were once sent in every pass, and each rank built new tables of them."""
    encoder, decoder, table = RowEncoder(), RowDecoder(), SlotTable(range(1, PLENTY + 1))
    first, _ = decoder.decode(encoder.encode([table.row(5, PLENTY - 1)], [0]))
    again = encoder.encode([table.row(5, PLENTY - 1)], [0])
    assert len(again) == HEADER + PER_ROW + 1
    second, _ = decoder.decode(again)
    assert second[0].slot_table is first[0].slot_table
    table.slots.append(PLENTY + 7)
    grown = encoder.encode([table.row(6, PLENTY)], [0])
    assert len(grown) == len(again) + PER_TABLE + 1, "one changed table, and its new slot"
    third, _ = decoder.decode(grown)
    assert third[0].slot_table is first[0].slot_table
    assert plain(third) == plain([table.row(6, PLENTY)])


def test_ranks_have_the_rows_of_any_history() -> None:
    """Tables grow, lose their ends, are filled anew, and end; some take no part in a pass."""
    draws = random.Random(3)
    encoder, decoder = RowEncoder(), RowDecoder()
    tables: list[SlotTable] = []
    for _ in range(400):
        tables += [SlotTable() for _ in range(max(0, 5 - len(tables)))]
        if draws.random() < 0.1:
            del tables[draws.randrange(len(tables))]
        rows: list[Row] = []
        for table in draws.sample(tables, 3):
            if draws.random() < 0.2:
                table.truncate(draws.randint(0, len(table)))
            if draws.random() < 0.05:
                table.slots = draws.sample(range(1, 999), draws.randint(0, 200))
            table.slots.extend(draws.sample(range(1, 999), draws.choice((0, 1, 1, 3, 90))))
            rows += [table.row(draws.randrange(99), i) for i in range(max(0, len(table) - 2), len(table))]
            rows += [table.branch_row(draws.randrange(99), draws.sample(range(1, 999), n)) for n in (1, 2)]
        wanted = sorted(draws.sample(range(len(rows)), 3))
        decoded, chosen = decoder.decode(encoder.encode(rows, wanted))
        assert plain(decoded) == plain(rows)
        assert chosen == wanted
        assert len({id(row.slot_table) for row in decoded}) == len({id(row.slot_table) for row in rows})


def test_ranks_forget_the_tables_of_requests_that_ended() -> None:
    encoder, decoder = RowEncoder(), RowDecoder()
    for n in range(20):
        table = SlotTable(range(1, n + 2))
        decoder.decode(encoder.encode([table.row(5, n), SlotTable().branch_row(5, [900])], [0]))
        del table
    assert len(decoder._tables) <= 4
