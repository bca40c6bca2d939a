"""A model that several ranks share: rank 0 lays a pass out, and every rank runs its part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.parallel.rendezvous import RankGroup
from paceline.model.parallel.row_codec import decode_rows, encode_rows
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import Row
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
            return self._shard.run(rows, wanted, hidden_layers)
        except BaseException:
            self._group.abort()
            raise

    def target_weights(self) -> TargetWeights:
        """Read from the checkpoint: a rank's own matrices are shards, which only all ranks together can use."""
        return load_target_weights(self.name, self._shard.dtype, str(self._shard.device), self.max_model_len)


def run_rank(shard: TransformersModel, ranks: TensorParallelGroup) -> None:
    """Run every pass that rank 0 broadcasts, until it broadcasts the last. Raises `RankLostError`."""
    while (rows := ranks.receive_rows()).numel():
        shard.run(*decode_rows(rows))
