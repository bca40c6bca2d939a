"""A model of which every rank holds a part: rank 0 leads, the others follow."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.model.model import ModelOutput, TransformersModel
from paceline.model.parallel.rendezvous import RankGroup
from paceline.model.parallel.row_codec import decode_rows, encode_rows
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights, load_target_weights


class TensorParallelModel:
    """A `paceline.model.Model` on rank 0: every pass is one of all ranks."""

    def __init__(self, part: TransformersModel, replica: RankGroup) -> None:
        self.name = part.name
        self.vocabulary_size = part.vocabulary_size
        self.max_model_len = part.max_model_len
        self.layers = part.layers
        self.slots = part.slots
        self.eos_token_ids = part.eos_token_ids
        self.fingerprint = part.fingerprint
        self.numerics = f"{part.numerics}; {replica.ranks.size} ranks"
        self.rows_invariant = False
        self._part, self._replica = part, replica

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """Raises `RankLostError`. After any exception it is the last: some ranks may be in a pass that others left."""
        try:
            self._replica.ranks.broadcast_rows(encode_rows(rows, wanted))
            return self._part.run(rows, wanted, hidden_layers)
        except BaseException:
            self._replica.abort()
            raise

    def target_weights(self) -> TargetWeights:
        """Read from the checkpoint: what the ranks share can be used by all of them at once only."""
        return load_target_weights(self.name, self._part.dtype, str(self._part.device), self.max_model_len)


def run_rank(part: TransformersModel, ranks: TensorParallelGroup) -> None:
    """Run every pass that rank 0 runs, until it has no more. Raises `RankLostError`."""
    while (order := ranks.receive_rows()).numel():
        part.run(*decode_rows(order))
