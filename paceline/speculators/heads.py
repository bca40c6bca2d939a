"""From a head's checkpoint to the speculator that drafts with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.model.checkpoint import Checkpoint
from paceline.model.lending import Lent
from paceline.model.probe import row_cost
from paceline.model.rows import Row
from paceline.models import resolve_model
from paceline.speculators.base import Speculator
from paceline.speculators.best_first import MOST_ROWS
from paceline.speculators.eagle import Eagle
from paceline.speculators.eagle3 import Eagle3, Eagle3Kind
from paceline.speculators.head import Head
from paceline.speculators.network import HeadNetwork


def build_head(model: str, config: SpeculativeConfig, engine: EngineConfig, lent: Lent) -> Speculator:
    """The head in the folder `model`. Raises `CheckpointError`, or `ModelNotFoundError`."""
    network = _network(Checkpoint(resolve_model(model)), config, engine, lent)
    return Head(
        config.method,
        network,
        lent.fingerprint,
        lent.vocabulary_size,
        config.tree_width,
        row_cost(_Fed(network, lent), MOST_ROWS),
        config.least_path_probability,
    )


def layers_of_head(model: str, config: SpeculativeConfig, lent: Lent) -> Sequence[int]:
    """What it is fed with, without loading it. Raises as `build_head` does."""
    if config.method == "eagle3":
        checkpoint = Checkpoint(resolve_model(model))
        return Eagle3Kind.of(checkpoint, lent, config.eagle_aux_hidden_state_layer_ids).layers
    return (lent.final,)


def _network(checkpoint: Checkpoint, config: SpeculativeConfig, engine: EngineConfig, lent: Lent) -> HeadNetwork:
    if config.method == "eagle3":
        return Eagle3(checkpoint, lent, engine.slots, config.rope_theta, config.eagle_aux_hidden_state_layer_ids)
    return Eagle(checkpoint, lent, engine.slots, config.rope_theta)


class _Fed:
    """A head fed with nothing, to see how long its passes take."""

    def __init__(self, network: HeadNetwork, lent: Lent) -> None:
        self.slots, self.max_model_len = network.slots, network.position_limit
        self._network = network
        states = torch.zeros(
            1, len(network.hidden_state_layers), lent.hidden_size, dtype=lent.dtype, device=lent.device
        )
        self._feature = network.encode(states)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> object:
        return self._network.run(rows, self._feature.expand(len(rows), -1), wanted)
