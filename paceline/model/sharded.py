"""A model of which every rank holds a part: rank 0 leads, the others follow."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.model.lending import Lent, borrow
from paceline.model.model import Output, TransformersModel
from paceline.model.packing import packed, unpacked
from paceline.model.rows import Row
from paceline.tensor_parallel.meeting import Replica
from paceline.tensor_parallel.ranks import Ranks


class LeadingModel:
    """A `paceline.model.Model` on rank 0: every pass is one of all ranks."""

    def __init__(self, part: TransformersModel, replica: Replica) -> None:
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

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> Output:
        """Raises `RankLostError`. After any exception it is the last: some ranks may be in a pass that others left."""
        try:
            self._replica.ranks.send(packed(rows, wanted))
            return self._part.run(rows, wanted, hidden_layers)
        except BaseException:
            self._replica.abandon()
            raise

    def lend(self) -> Lent:
        """Read from the checkpoint: what the ranks share can be used by all of them at once only."""
        return borrow(self.name, self._part.dtype, str(self._part.device), self.max_model_len)


def follow(part: TransformersModel, ranks: Ranks) -> None:
    """Run every pass that rank 0 runs, until it has no more. Raises `RankLostError`."""
    while (order := ranks.receive()).numel():
        part.run(*unpacked(order))
