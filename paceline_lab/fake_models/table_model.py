"""A model without compute: the next token's logits are a hash of the last few tokens of a row's path.

It exists to measure the control plane (`paceline bench control-plane`) and to test the engine at full speed. Like
a real model it reads its past through slots, so a wrong slot gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights

MAX_POSITIONS = 8192
"""Positions of a model without a limit of its own."""
CONTEXT_TOKENS = 3
"""Number of path tokens that determine the next one."""


class TableModel:
    """`table:SIZE[:DISAGREEMENT]`: two tables of one size agree except for that share of contexts (0 to 1).

    Every table is the same function, apart from the disagreement, so a table as draft predicts a table as target
    with a known agreement.
    """

    SCHEME = "table:"

    def __init__(self, vocabulary_size: int, slots: int, max_model_len: int, disagreement: float = 0.0) -> None:
        self.name = f"{self.SCHEME}{vocabulary_size}"
        self.vocabulary_size = vocabulary_size
        self.max_model_len = max_model_len
        self.layers = 2
        self.slots = slots
        self.eos_token_ids: Sequence[int] = ()
        self.fingerprint = self.name
        self.numerics = "no weights"
        self.asynchronous = False
        self.states = None
        self.rows_invariant = True
        self._disagreement = disagreement
        self._tokens = [0] * (slots + 1)

    @classmethod
    def parse(cls, name: str, slots: int, max_model_len: int | None = None) -> TableModel:
        """Raises ValueError if `name` is not as above."""
        size, _, disagreement = name.removeprefix(cls.SCHEME).partition(":")
        try:
            vocabulary_size, share = int(size), float(disagreement or 0)
        except ValueError:
            vocabulary_size, share = 0, 0.0
        if vocabulary_size < 2 or not 0 <= share <= 1:
            raise ValueError(
                f"{name!r} is not table:SIZE or table:SIZE:DISAGREEMENT: SIZE is 2 or more, DISAGREEMENT from 0 to 1"
            )
        return cls(vocabulary_size, slots, max_model_len or MAX_POSITIONS, share)

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """Hidden states are the row's token and position, as float32 [rows, layers, 2]."""
        for row in rows:
            self._tokens[row.slot] = row.token
        logits = torch.full((len(wanted), self.vocabulary_size), -8.0)
        for i, r in enumerate(wanted):
            for rank, token in enumerate(self._top_tokens(rows[r])):
                logits[i, token] = 4.0 - rank
        return ModelOutput(logits, token_position_states(rows, hidden_layers) if hidden_layers else None)

    def target_weights(self) -> TargetWeights:
        raise ValueError(f"{self.name} has no weights: a head cannot draft for it")

    def _top_tokens(self, row: Row) -> list[int]:
        """The most probable next tokens, best first."""
        past = row.path(max(0, row.position + 1 - CONTEXT_TOKENS))
        state = 0
        for slot in past:
            state = (state * 1_000_003 + self._tokens[slot] + 1) & 0xFFFFFFFF
        state = (state ^ (state >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
        best = [(state >> shift) % self.vocabulary_size for shift in (3, 7, 11)]
        disagrees = (state >> 16) % 1000 < self._disagreement * 1000
        return best[1:] + best[:1] if disagrees else best


def token_position_states(rows: Sequence[Row], layers: Sequence[int]) -> torch.Tensor:
    """Hidden states of a model that has none: each row's token and position, float32 [rows, layers, 2]."""
    facts = torch.tensor([[row.token, row.position] for row in rows], dtype=torch.float32)
    return facts.unsqueeze(1).expand(-1, len(layers), -1).contiguous()
