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
from paceline.speculators.dflash import DFlash, DFlashNetwork
from paceline.speculators.dflash_kind import layers_of
from paceline.speculators.eagle import Eagle
from paceline.speculators.eagle3 import Eagle3, Eagle3Kind
from paceline.speculators.head import Head
from paceline.speculators.network import HeadNetwork
from paceline.speculators.peagle import PEagle

EAGLE3 = ("eagle3", "peagle")
"""Methods with an EAGLE-3 network."""


def build_head(model: str, config: SpeculativeConfig, engine: EngineConfig, lent: Lent) -> Speculator:
    """The head in the folder `model`. Raises `CheckpointError`, or `ModelNotFoundError`."""
    checkpoint = Checkpoint(resolve_model(model))
    least = config.least_path_probability
    if config.method == "dflash":
        draft = DFlashNetwork(checkpoint, lent, engine.slots, config.rope_theta)
        return DFlash(draft, lent, config.tree_width, least)
    network = _network(checkpoint, config, engine, lent)
    if config.method == "peagle":
        return PEagle(network, checkpoint, lent, config.num_speculative_tokens, config.tree_width, least)
    return Head(
        config.method,
        network,
        lent.fingerprint,
        lent.vocabulary_size,
        config.tree_width,
        row_cost(_Fed(network, lent), MOST_ROWS),
        least,
    )


def layers_of_head(model: str, config: SpeculativeConfig, lent: Lent) -> Sequence[int]:
    """What it is fed with, without loading it. Raises as `build_head` does."""
    checkpoint = Checkpoint(resolve_model(model))
    if config.method == "dflash":
        return layers_of(checkpoint, lent)
    if config.method in EAGLE3:
        return Eagle3Kind.of(checkpoint, lent, config.eagle_aux_hidden_state_layer_ids).layers
    return (lent.final,)


def _network(checkpoint: Checkpoint, config: SpeculativeConfig, engine: EngineConfig, lent: Lent) -> HeadNetwork:
    if config.method in EAGLE3:
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
