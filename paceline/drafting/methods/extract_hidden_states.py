"""Method `extract_hidden_states`: drafts nothing, and writes the target's hidden states to files for training.

Each request that ends gives one file, `0000001.safetensors` and so on, in `hidden_states_path`:

    token_ids       int64 [n + 1]: prompt and output
    hidden_states   [n, layers, hidden size], the target's dtype: of every position whose next token is known

`layers` in the file's metadata are the layers, numbered as in `eagle_aux_hidden_state_layer_ids`: n is the output of
layer n, 0 the embedding, and the number of layers plus one the output of the final norm.
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
from paceline.core.tree import TokenTree
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Commit, Context, DraftDescription, Opening, Speculator, new_hidden_states
from paceline.drafting.tree_speculator import TreeRequest, TreeSpeculator


@dataclass(slots=True, eq=False)
class ExtractedRequest(TreeRequest):
    """A request's tokens, and the hidden states that have arrived."""

    tokens: list[int]
    states: list[Tensor] = field(default_factory=list)

    def add_states(self, position: int, states: Tensor) -> None:
        known = sum(map(len, self.states))
        self.states.append(new_hidden_states(known, position, states).cpu())


class ExtractHiddenStates(TreeSpeculator[ExtractedRequest]):
    """Method `extract_hidden_states`."""

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        """Creates `folder` if it does not exist; never overwrites a file."""
        super().__init__(DraftDescription("extract_hidden_states", hidden_state_layers=tuple(layers)))
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdigit()]
        self._numbers = itertools.count(max(taken, default=0) + 1)

    def new_request(self, opening: Opening, tree: TokenTree) -> ExtractedRequest:
        return ExtractedRequest(opening, tree, list(opening.tokens))

    def context(self, context: Context) -> None:
        if request := self._requests.get(context.request_id):
            request.add_states(context.base_position, context.hidden_states)

    def advance(self, request: ExtractedRequest, commit: Commit) -> None:
        request.tree.commit(commit.tokens)
        request.tokens += commit.tokens
        if commit.hidden_states is not None:
            request.add_states(commit.base_position, commit.hidden_states)

    def close(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.states:
            self._write(torch.cat(request.states), request.tokens)
        super().close(request_id)

    def grow(self) -> dict[int, Growth]:
        return {}

    def _write(self, states: Tensor, tokens: Sequence[int]) -> None:
        path = self._folder / f"{next(self._numbers):07d}.safetensors"
        partial = path.with_suffix(".partial")
        tensors = {"token_ids": torch.tensor(tokens[: len(states) + 1]), "hidden_states": states.contiguous()}
        save_file(tensors, partial, {"layers": json.dumps(self.description.hidden_state_layers)})
        partial.replace(path)


def build(inputs: MethodInputs) -> Speculator:
    assert inputs.config.hidden_states_path is not None, "SpeculativeConfig requires it"
    return ExtractHiddenStates(Path(inputs.config.hidden_states_path).expanduser(), target_layers(inputs))


def target_layers(inputs: MethodInputs) -> Sequence[int]:
    """The configured layers; by default those of EAGLE-3 heads, and the final state, which other heads use."""
    last = inputs.target.layers
    return inputs.config.eagle_aux_hidden_state_layer_ids or (2, last // 2, last - 3, inputs.target.final_layer)
