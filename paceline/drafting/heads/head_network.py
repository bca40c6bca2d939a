"""The network of a head that drafts token by token: rows of tokens and features in, logits and features out.

A head (EAGLE, MTP) drafts from what the target has already computed. The row of the token at position i + 1 has
position i. Its feature comes from the target's hidden state of position i, and it predicts the token at i + 2. A draft
token has no hidden state of the target yet: its row takes the feature that the head computed in its parent's row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.drafting.draw_prediction import NetworkFacts
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """`logits` [wanted rows, columns]; `features` [wanted rows, h], the inputs of these rows' children."""

    logits: Tensor
    features: Tensor


class HeadNetwork(ABC):
    """A head's weights, with a KV cache of its own in slots 1 to `slots`. Positions go as far as the target's.

    `ids`: int64 [columns], the target's token of each logit; None: column n is token n.
    """

    def __init__(
        self,
        target: TargetWeights,
        model: str,
        slots: int,
        hidden_state_layers: Sequence[int] | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """`model`: its name. `hidden_state_layers`: as in `Speculator`; None: the output of the final norm alone."""
        self.model, self.slots, self.ids = model, slots, ids
        self.hidden_state_layers = hidden_state_layers or (target.final_layer,)
        self.position_limit = target.max_model_len
        self._dtype, self._device = target.dtype, target.device

    def encode(self, states: Tensor) -> Tensor:
        """The target's hidden states [n, layers, H] as features [n, h]: the first layer's state as it is."""
        return self.to_device(states)[:, 0]

    def to_device(self, states: Tensor) -> Tensor:
        """Hidden states in the head's dtype and on its device; they may have come over a network."""
        return states.to(self._device, self._dtype)

    @abstractmethod
    def run(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        """One pass over `rows` with `features` [rows, h]. The output has one row for each index in `wanted`."""


def head_facts(network: HeadNetwork, fingerprint: str, vocabulary_size: int) -> NetworkFacts:
    """The facts of a head over the target's vocabulary."""
    return NetworkFacts(
        network.model,
        fingerprint,
        vocabulary_size,
        vocabulary_size if network.ids is None else len(network.ids),
        network.slots,
        network.position_limit,
        network.hidden_state_layers,
    )
