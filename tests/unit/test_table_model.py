"""The model without weights: it reads its past through slots, and disagrees at a given rate."""

from __future__ import annotations

import random

import pytest

from paceline.model import SlotTable
from paceline.model.row_probe import is_row_invariant, measure_row_cost
from paceline.model.rows import TILE
from paceline_lab.fake_models.table_model import TableModel


def continuation(model: TableModel, tokens: list[int], slots: list[int]) -> list[int]:
    """The likeliest token after each of `tokens`."""
    slot_table = SlotTable()
    slot_table.slots = slots
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, range(len(rows))).logits.argmax(-1).tolist()


def test_the_last_tokens_decide_whatever_their_slots() -> None:
    model = TableModel(1000, 512, 512)
    tokens = random.Random(1).choices(range(1000), k=TILE + 20)
    there = continuation(model, tokens, list(range(1, len(tokens) + 1)))
    elsewhere = continuation(model, tokens, list(range(500, 500 - len(tokens), -1)))
    assert there == elsewhere
    assert len(set(there)) > 50


def test_the_last_tokens_count_across_a_tile_s_border() -> None:
    model = TableModel(1000, 512, 512)
    slots = list(range(1, TILE + 2))
    one, other = [5] * (TILE + 1), [5] * (TILE - 1) + [6, 5]
    assert continuation(model, one, slots)[-1] != continuation(model, other, slots)[-1]


def test_a_wrong_slot_gives_wrong_tokens() -> None:
    """Otherwise tests of the engine over this model would prove nothing."""
    model = TableModel(1000, 512, 512)
    slot_table = SlotTable()
    slot_table.slots = [1, 2, 3, 4]
    rows = [slot_table.row(token, i) for i, token in enumerate([10, 11, 12, 13])]
    right = model.run(rows, [3]).logits
    slot_table.slots = [1, 2, 9, 4]
    wrong = model.run([slot_table.row(13, 3)], [0]).logits
    assert right.argmax() != wrong.argmax()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_two_tables_disagree_by_the_given_share(share: float) -> None:
    tokens = random.Random(2).choices(range(1000), k=2000)
    slots = list(range(1, 2001))
    ours = continuation(TableModel(1000, 2000, 4000), tokens, slots)
    theirs = continuation(TableModel(1000, 2000, 4000, share), tokens, slots)
    differing = sum(a != b for a, b in zip(ours, theirs, strict=True)) / len(ours)
    assert differing == pytest.approx(share, abs=0.05)


def test_hidden_states_are_token_and_position() -> None:
    model = TableModel(100, 64, 64)
    slot_table = SlotTable()
    slot_table.slots = [5, 6]
    output = model.run([slot_table.row(70, 0), slot_table.row(80, 1)], [1], (0, 3, 7))
    assert output.hidden is not None
    assert output.hidden.tolist() == [[[70, 0]] * 3, [[80, 1]] * 3]


def test_it_passes_the_probes() -> None:
    model = TableModel(100, 512, 512)
    assert is_row_invariant(model)
    assert measure_row_cost(model, 64)(8) > 0


@pytest.mark.parametrize("positions", [2, 17, 512])
def test_the_probes_fit_into_any_model(positions: int) -> None:
    model = TableModel(100, 256, positions)
    assert is_row_invariant(model)
    assert measure_row_cost(model, 8)(1) > 0


def test_names() -> None:
    model = TableModel.parse("table:64:0.25", slots=300)
    assert (model.vocabulary_size, model.slots, model.max_model_len) == (64, 300, 8192)
    assert model.fingerprint == TableModel.parse("table:64", slots=9).fingerprint
    assert model.fingerprint != TableModel.parse("table:65", slots=9).fingerprint


@pytest.mark.parametrize(
    "name", ["table:", "table:x", "table:1", "table:-5", "table:64:2", "table:64:-1", "table:64:x"]
)
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not table:SIZE or table:SIZE:DISAGREEMENT"):
        TableModel.parse(name, slots=256)
