"""A laid-out pass as one tensor, to give it to the other ranks of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.rows import GROUP, RowBatch, Segment

FIXED = 6
"""Numbers at the beginning: rows, wanted places, padded rows, columns of all tails, groups, segments."""


def packed(batch: RowBatch, wanted: Tensor) -> Tensor:
    """int64 [n], on the CPU, as both arguments have to be. `wanted`: the rows whose logits are asked for."""
    segments = [part for segment in batch.segments for part in (segment.rows, segment.slots)]
    sizes = (
        batch.count,
        wanted.numel(),
        batch.tokens.numel(),
        batch.tiles.numel(),
        batch.groups.shape[0],
        len(batch.segments),
        *(part.numel() for part in segments),
    )
    rows = (batch.tokens, batch.positions, batch.slots)
    tails = (batch.tiles, batch.groups.flatten(), batch.reach.flatten())
    return torch.cat([torch.tensor(sizes), wanted, *rows, *tails, *segments])


def unpacked(order: Tensor, device: torch.device) -> tuple[RowBatch, Tensor]:
    """What was packed, on a device. One copy takes it there."""
    count, wanted, rows, columns, groups, segments = order[:FIXED].tolist()
    rest = order[FIXED : FIXED + 2 * segments].tolist()
    sizes = (wanted, rows, rows, rows, columns, groups * GROUP, groups * GROUP, *rest)
    parts = order[FIXED + 2 * segments :].to(device).split(sizes)
    batch = RowBatch(
        count=count,
        tokens=parts[1],
        positions=parts[2],
        slots=parts[3],
        tiles=parts[4],
        groups=parts[5].view(-1, GROUP),
        reach=parts[6].view(-1, GROUP),
        segments=[Segment(*parts[i : i + 2]) for i in range(7, len(parts), 2)],
    )
    return batch, parts[0]
