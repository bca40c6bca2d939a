"""Hidden states of the positions that a vLLM worker has computed, for drafts that read them.

They are kept on the host by the slot of vLLM's KV cache, as in our own engine: after a hit in the prefix cache, or when
another draft takes over, the states of positions that are not computed again are still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.hidden_states import HiddenStates


class KvHiddenStates:
    """The hidden states of one model runner's requests."""

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's V1 model runner."""
        self._runner = runner
        self._states: HiddenStates | None = None

    def store(self, states: Sequence[Tensor], count: int) -> None:
        """Keep the states of a step's `count` tokens. `states`: of each layer, [tokens or more, hidden size]."""
        if self._states is None:
            self._states = HiddenStates(self._runner.kv_cache_config.num_blocks * self._table.block_size)
        slots = self._table.slot_mapping.gpu[:count].tolist()
        self._states.store(slots, torch.stack([each[:count] for each in states], dim=1).cpu())

    def gather(self, row: int, start: int, stop: int) -> Tensor:
        """Of positions of a row of the batch: [positions, layers, hidden size]. Raises LookupError before any step."""
        if self._states is None:
            raise LookupError("no hidden states were stored yet")
        blocks, offsets = np.divmod(np.arange(start, stop), self._table.block_size)
        slots = self._table.block_table.np[row, blocks] * self._table.block_size + offsets
        return self._states.gather(slots.tolist())

    @property
    def _table(self) -> Any:
        """Where the keys and values of the first group of layers are: of each position in one slot."""
        return self._runner.input_batch.block_table[0]
