"""A model that several ranks share: rank 0 lays a pass out, broadcasts its rows as one tensor, and every
rank runs its part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import torch
from torch import Tensor

from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.parallel.rendezvous import RankGroup
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import Row, SlotTable
from paceline.model.target_weights import TargetWeights, load_target_weights


class TensorParallelModel(ModelInfo):
    """A `paceline.model.Model` on rank 0; all ranks run every pass."""

    def __init__(self, shard: TransformersModel, group: RankGroup) -> None:
        super().__init__(**{field.name: getattr(shard, field.name) for field in fields(ModelInfo)})
        self.numerics = f"{shard.numerics}; {group.ranks.size} ranks"
        self._shard, self._group = shard, group

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """Raises `RankLostError`. After any exception the group is aborted: the ranks may be in different passes."""
        try:
            self._group.ranks.broadcast_rows(encode_rows(rows, wanted))
            output = self._shard.run(rows, wanted, hidden_layers)
            self._group.ranks.wait_for(output.logits)
            return output
        except BaseException:
            self._group.abort()
            raise

    def target_weights(self) -> TargetWeights:
        """Read from the checkpoint: a rank's own matrices are shards, which only all ranks together can use."""
        return load_target_weights(self.name, self._shard.dtype, str(self._shard.device), self.max_model_len)


def run_rank(shard: TransformersModel, ranks: TensorParallelGroup) -> None:
    """Run every pass that rank 0 broadcasts, until it broadcasts the last. Raises `RankLostError`."""
    while (rows := ranks.receive_rows()).numel():
        ranks.wait_for(shard.run(*decode_rows(rows)).logits)


FIXED = 3
"""Numbers in the header: rows, wanted rows, tables. Then come the tables' lengths, five numbers for each row (token,
position, table, length, branch length), the wanted rows, the slots of all tables, all branches."""
PER_ROW = 5


def encode_rows(rows: Sequence[Row], wanted: Sequence[int]) -> Tensor:
    """int64 [n]. `wanted`: the rows whose logits are computed."""
    tables = {id(row.slot_table): row.slot_table for row in rows}
    index = {key: i for i, key in enumerate(tables)}
    fields = ((r.token, r.position, index[id(r.slot_table)], r.length, len(r.branch)) for r in rows)
    numbers = [len(rows), len(wanted), len(tables)]
    numbers += map(len, tables.values())
    numbers += chain.from_iterable(fields)
    numbers += wanted
    for table in tables.values():
        numbers += table.slots
    for row in rows:
        numbers += row.branch
    return torch.tensor(numbers)


def decode_rows(encoded: Tensor) -> tuple[list[Row], list[int]]:
    """The encoded rows, and the wanted ones. Rows that shared a slot table share a new one."""
    numbers = iter(encoded.tolist())

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    row_count, wanted_count, table_count = take(FIXED)
    lengths = take(table_count)
    fields = [take(PER_ROW) for _ in range(row_count)]
    wanted = take(wanted_count)
    tables = [SlotTable(take(length)) for length in lengths]
    return [
        Row(token, position, tables[table], length, take(branch)) for token, position, table, length, branch in fields
    ], wanted
