"""What a target said of a text, read once: epochs after the first are the head's alone, as far as memory reaches.

A head learns the same rows again and again, and reading them takes the target as long as learning does or longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline_lab.training.family.token_corpus import Ids, Stream, windows
from paceline_lab.training.heads.target_reader import TargetOutputs, TargetReader

Kept = tuple[Tensor, Tensor, Tensor]
"""Of one row, on the CPU: states [L, S, H], likeliest tokens [L, K], their log-probabilities [L, K]."""


class TargetOutputCache:
    """Rows of the documents, of any length, and readings of as many of them as `room` bytes hold."""

    def __init__(self, reader: TargetReader, documents: Sequence[Ids], room: int) -> None:
        self._reader = reader
        self._documents = documents
        self._room = room
        self._rows: dict[int, Tensor] = {}
        self._kept: dict[tuple[int, int], Kept] = {}

    def stream(self, seed: int) -> Stream:
        """Batches of rows to be read, each named by its length and its number: int64 [rows, 2]."""

        def cut(length: int, epoch_seed: int) -> Tensor:
            count = len(self._batch_of(length))
            numbers = torch.randperm(count, generator=torch.Generator().manual_seed(epoch_seed))
            return torch.stack((torch.full_like(numbers, length), numbers), 1)

        return Stream(cut, seed)

    def read(self, names: Tensor) -> TargetOutputs:
        """What the target says of a batch of rows of one length, each a token longer than that."""
        length, numbers = int(names[0, 0]), names[:, 1].tolist()
        rows = self._batch_of(length)[numbers]
        known = [self._kept.get((length, number)) for number in numbers]
        if all(known):
            states, likely, log_shares = (torch.stack(each) for each in zip(*filter(None, known), strict=True))
            return self._reader.from_stored(rows, states, likely, log_shares)
        reading = self._reader.read(rows)
        each = (reading.states_BLSH, reading.likely_BLK, reading.log_shares_BLK)
        for number, *said in zip(numbers, *each, strict=True):
            self._keep((length, number), said)
        return reading

    def _batch_of(self, length: int) -> Tensor:
        if length not in self._rows:
            self._rows[length] = windows(self._documents, length, seed=0)
        return self._rows[length]

    def _keep(self, name: tuple[int, int], said: Sequence[Tensor]) -> None:
        size = sum(each.nbytes for each in said)
        if name not in self._kept and size <= self._room:
            states, likely, log_shares = (each.to("cpu", copy=True) for each in said)
            self._kept[name] = (states, likely, log_shares)
            self._room -= size
