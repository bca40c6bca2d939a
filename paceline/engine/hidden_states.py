"""Hidden states of everything that is computed, for drafts that are fed with them.

They are kept by slot, as keys and values are: whoever shares a prefix, moves to another draft or looks back finds those
of every position that need not be computed again. A head that never saw a part of its context guesses far worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenStates:
    """[slots + 1, layers, hidden size] in the model's dtype, made when the first ones come; 0 is the spare slot."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._states: Tensor | None = None

    def clear(self) -> None:
        """Other layers are kept from now on."""
        self._states = None

    def store(self, slots: Sequence[int], states: Tensor) -> None:
        """`states` [rows, layers, hidden size] of the rows that were written to these slots."""
        if self._states is None:
            self._states = states.new_empty(self._slots + 1, *states.shape[1:])
        self._states.index_copy_(0, torch.tensor(slots, device=states.device), states)

    def gather(self, slots: Sequence[int]) -> Tensor:
        """A copy: [slots, layers, hidden size]."""
        if self._states is None:
            raise LookupError("no hidden states were kept yet")
        return self._states.index_select(0, torch.tensor(slots, device=self._states.device))
