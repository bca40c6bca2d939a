"""Method `extract_hidden_states`: guesses nothing, and writes down what the target computed, for others to train on.

One file for each request that ends, `0000001.safetensors` and on, in `hidden_states_path`:

    token_ids       int64 [n + 1]: prompt and output
    hidden_states   [n, layers, hidden size], the target's dtype: of every position whose next token is known

`layers` in the file's metadata says which, as `eagle_aux_hidden_state_layer_ids` does: n is the output of layer n, 0
the embedding, and one more than there are layers the output of the final norm.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.growth import Growth
from paceline.drafting.speculator import Commit, Context, Opening, Speculator, new_hidden_states


@dataclass(slots=True)
class _RequestStates:
    """One request: its tokens, and the states of its positions as far as they have come."""

    tokens: list[int]
    states: list[Tensor] = field(default_factory=list)

    @property
    def known(self) -> int:
        return sum(map(len, self.states))

    def hear(self, position: int, states: Tensor) -> None:
        self.states.append(new_hidden_states(self.known, position, states).cpu())


class ExtractHiddenStates(Speculator):
    method = "extract_hidden_states"

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        """`folder` is made if need be; a file that is there is never written over."""
        self.hidden_state_layers = tuple(layers)
        self._folder = folder
        self._records: dict[int, _RequestStates] = {}
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdigit()]
        self._numbers = itertools.count(max(taken, default=0) + 1)

    def open(self, opening: Opening) -> None:
        self._records[opening.request_id] = _RequestStates(list(opening.tokens))

    def context(self, context: Context) -> None:
        if record := self._records.get(context.request_id):
            record.hear(context.base_position, context.hidden_states)

    def commit(self, commit: Commit) -> None:
        if record := self._records.get(commit.request_id):
            record.tokens += commit.tokens
            if commit.hidden_states is not None:
                record.hear(commit.base_position, commit.hidden_states)

    def close(self, request_id: int) -> None:
        record = self._records.pop(request_id, None)
        if record is not None and record.states:
            self._write(torch.cat(record.states), record.tokens)

    def grow(self) -> dict[int, Growth]:
        return {}

    def _write(self, states: Tensor, tokens: Sequence[int]) -> None:
        path = self._folder / f"{next(self._numbers):07d}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {"token_ids": torch.tensor(tokens[: len(states) + 1]), "hidden_states": states.contiguous()}
        save_file(tensors, partial, {"layers": json.dumps(self.hidden_state_layers)})
        partial.replace(path)
