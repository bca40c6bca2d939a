"""What rank 0 tells the other ranks of a pass is what it runs itself."""

from __future__ import annotations

import dataclasses

import torch

from paceline.model.model import padded
from paceline.model.packing import packed, unpacked
from paceline.model.rows import TILE, Lane, lay_out

CPU = torch.device("cpu")


def test_a_pass_arrives_as_it_was_laid_out() -> None:
    """Three prefixes, two branches, and a request without any."""
    lanes = [Lane() for _ in range(3)]
    for n, lane in enumerate(lanes):
        lane.slots = list(range(1 + 300 * n, 1 + 300 * n + (TILE + 3, 2 * TILE, 5)[n]))
    rows = [lanes[0].row(7, TILE + 1), lanes[0].row(8, TILE + 2), lanes[2].row(9, 4)]
    rows += [lanes[1].branch_row(3, [901]), lanes[1].branch_row(4, [902]), lanes[1].branch_row(5, [901, 903])]
    batch, places = lay_out(rows, CPU), padded([1, 2, 5], CPU)
    again, wanted = unpacked(packed(batch, places), CPU)
    assert torch.equal(wanted, places)
    assert len(again.segments) == len(batch.segments) == 2
    for field in dataclasses.fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(again, field.name)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs), field.name
    assert again.count == batch.count == 6
    for a, b in zip(again.segments, batch.segments, strict=True):
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.slots, b.slots)


def test_a_pass_without_prefixes() -> None:
    lane = Lane()
    lane.slots = [5]
    batch, places = lay_out([lane.row(1, 0)], CPU), padded([], CPU)
    again, wanted = unpacked(packed(batch, places), CPU)
    assert again.segments == []
    assert torch.equal(again.tiles, batch.tiles)
    assert torch.equal(wanted, places)
