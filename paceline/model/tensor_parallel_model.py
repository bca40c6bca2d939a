"""A model that several ranks share: rank 0 broadcasts the rows of a pass, and every rank runs its part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.parallel.rendezvous import RankGroup
from paceline.model.parallel.row_codec import RowDecoder, RowEncoder
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights, load_target_weights


class TensorParallelModel(ModelInfo):
    """A `paceline.model.Model` on rank 0; all ranks run every pass."""

    def __init__(self, shard: TransformersModel, group: RankGroup) -> None:
        super().__init__(**{field.name: getattr(shard, field.name) for field in fields(ModelInfo)})
        self.asynchronous = False  # `run` waits for the other ranks
        self.numerics = f"{shard.numerics}; {group.ranks.size} ranks"
        self._shard, self._group = shard, group
        self._encoder = RowEncoder()

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """Raises `RankLostError`. After any exception the group is aborted: the ranks may be in different passes."""
        try:
            self._group.ranks.broadcast_rows(self._encoder.encode(rows, wanted))
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
    decoder = RowDecoder()
    while (rows := ranks.receive_rows()).numel():
        ranks.wait_for(shard.run(*decoder.decode(rows)).logits)
