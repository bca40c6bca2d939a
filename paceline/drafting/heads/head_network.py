"""The network of a head that drafts token by token, and the speculator over it.

See `paceline.drafting.best_first` for its rows and features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.drafting.best_first import BestFirst, RowOutput
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.graphed_drafts import fastest_way
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import NetworkRequest, NetworkSpeculator
from paceline.drafting.speculator import DraftDescription, Speculator
from paceline.model.kept_row_cost import kept_row_cost, weight_bytes
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


class HeadNetwork(ABC):
    """A head's weights, with a KV cache of its own in slots 1 to `slots`. Positions go as far as the target's."""

    first_row = 1
    mapping = layer_states = None

    def __init__(
        self,
        target: TargetWeights,
        method: str,
        model: str,
        slots: int,
        hidden_state_layers: Sequence[int] | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """`model`: its name. `hidden_state_layers`: None: the output of the final norm alone. `ids`: see
        `DraftNetwork`."""
        self.description = head_description(method, model, target, hidden_state_layers, target.max_model_len)
        self.slots, self.ids, self.state_size = slots, ids, target.hidden_size
        self._dtype, self._device = target.dtype, target.device

    def encode(self, states: Tensor) -> Tensor:
        """The target's hidden states [n, layers, H] as features [n, h]: the first layer's state as it is."""
        return self.to_device(states)[:, 0]

    def to_device(self, states: Tensor) -> Tensor:
        """Hidden states in the head's dtype and on its device; they may have come over a network."""
        return states.to(self._device, self._dtype)

    @abstractmethod
    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        """See `RowNetwork`. There are always features."""


class RootStateNetwork:
    """A head without a KV cache, which reads the state that the root was drawn from, and no position before."""

    slots = first_row = 0
    mapping = layer_states = None

    def __init__(self, target: TargetWeights, method: str, model: str, ids: Tensor | None) -> None:
        """See `HeadNetwork`."""
        self.description = head_description(method, model, target)
        self.ids, self.state_size = ids, target.hidden_size
        self._dtype, self._device = target.dtype, target.device

    def root_states(self, requests: Iterable[NetworkRequest]) -> Tensor:
        """[requests, H], which have arrived."""
        states = [request.states.last[0] for request in requests if request.states is not None]
        return torch.stack(states).to(self._device, self._dtype)


def head_description(
    method: str,
    model: str,
    target: TargetWeights,
    hidden_state_layers: Sequence[int] | None = None,
    position_limit: int = 0,
) -> DraftDescription:
    """Of a head over the target's vocabulary. `hidden_state_layers`: see `HeadNetwork`."""
    layers = tuple(hidden_state_layers or (target.final_layer,))
    return DraftDescription(method, model, target.fingerprint, target.vocabulary_size, layers, position_limit)


def build_head_speculator(inputs: MethodInputs, network: HeadNetwork) -> Speculator:
    """The speculator of a head that drafts one token after another, with its measured cost per row."""
    config, target, engine = inputs.config, inputs.target, inputs.engine
    weights = weight_bytes(inputs.checkpoint.folder), engine.quantization
    facts = (config.method, target.dtype, target.hidden_size, target.vocabulary_size, *weights)
    cost = kept_row_cost(_HeadProbe(network, target), MAX_ROWS, engine.threads, facts, target.device)
    return NetworkSpeculator(fastest_way(BestFirst(network, inputs.limits, cost)))


class _HeadProbe:
    """Runs a head over one zero state, to measure its passes."""

    def __init__(self, network: HeadNetwork, target: TargetWeights) -> None:
        self.slots, self.max_model_len = network.slots, network.description.position_limit
        self._network = network
        layers = len(network.description.hidden_state_layers)
        states = torch.zeros(1, layers, target.hidden_size, dtype=target.dtype, device=target.device)
        self._feature = network.encode(states)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> RowOutput:
        return self._network.run(rows, self._feature.expand(len(rows), -1), wanted)
