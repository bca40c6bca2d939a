"""The target's outputs for the training text, computed once and kept in memory as far as it reaches.

A head learns the same rows in every epoch, and the target's pass takes as long as the head's training step or longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline_lab.training.family.token_corpus import Ids, Stream, windows
from paceline_lab.training.heads.target_reader import TargetOutputs, TargetReader

Kept = tuple[Tensor, Tensor, Tensor]
"""One row on the CPU: states [L, S, H], likeliest tokens [L, K], their log-probabilities [L, K]."""


class TargetOutputCache:
    """Rows of the documents, of any length, and the target's outputs for as many rows as fit into `free_bytes`."""

    def __init__(self, reader: TargetReader, documents: Sequence[Ids], free_bytes: int) -> None:
        self._reader = reader
        self._documents = documents
        self._free_bytes = free_bytes
        self._rows: dict[int, Tensor] = {}
        self._kept: dict[tuple[int, int], Kept] = {}

    def stream(self, seed: int) -> Stream:
        """Batches of row names, each a length and a number: int64 [rows, 2]."""

        def cut(length: int, epoch_seed: int) -> Tensor:
            count = len(self._batch_of(length))
            numbers = torch.randperm(count, generator=torch.Generator().manual_seed(epoch_seed))
            return torch.stack((torch.full_like(numbers, length), numbers), 1)

        return Stream(cut, seed)

    def read(self, names: Tensor) -> TargetOutputs:
        """The target's outputs for a batch of rows of one length; each row has one token more."""
        length, numbers = int(names[0, 0]), names[:, 1].tolist()
        rows = self._batch_of(length)[numbers]
        known = [self._kept.get((length, number)) for number in numbers]
        if all(known):
            states, likely, log_shares = (torch.stack(each) for each in zip(*filter(None, known), strict=True))
            return self._reader.from_stored(rows, states, likely, log_shares)
        reading = self._reader.read(rows)
        each = (reading.states_BLSH, reading.likely_BLK, reading.log_shares_BLK)
        for number, *outputs in zip(numbers, *each, strict=True):
            self._keep((length, number), outputs)
        return reading

    def _batch_of(self, length: int) -> Tensor:
        if length not in self._rows:
            self._rows[length] = windows(self._documents, length, seed=0)
        return self._rows[length]

    def _keep(self, name: tuple[int, int], outputs: Sequence[Tensor]) -> None:
        size = sum(each.nbytes for each in outputs)
        if name not in self._kept and size <= self._free_bytes:
            states, likely, log_shares = (each.to("cpu", copy=True) for each in outputs)
            self._kept[name] = (states, likely, log_shares)
            self._free_bytes -= size
