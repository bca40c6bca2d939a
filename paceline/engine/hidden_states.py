"""Hidden states of all computed positions, for drafts that read them.

They are kept by slot, like keys and values. After a prefix-cache hit, a move to another draft or a pause, the states of
positions that are not computed again are still there. A head without part of its context guesses far worse.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.model.rows import device_integers


class HiddenStates:
    """[slots + 1, layers, hidden size] in the model's dtype, allocated at the first `store`. Slot 0 is padding."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._states: Tensor | None = None

    def clear(self) -> None:
        """Forget all states, since other layers are kept from now on."""
        self._states = None

    def store(self, slots: Sequence[int], states: Tensor) -> None:
        """Store `states` [rows, layers, hidden size] by the rows' slots."""
        if self._states is None:
            self._states = states.new_empty(self._slots + 1, *states.shape[1:])
        self._states.index_copy_(0, device_integers(slots, states.device), states)

    def gather(self, slots: Sequence[int]) -> Tensor:
        """A copy [slots, layers, hidden size]. Raises LookupError if no states were stored yet."""
        if self._states is None:
            raise LookupError("no hidden states were stored yet")
        return self._states.index_select(0, device_integers(slots, self._states.device))
