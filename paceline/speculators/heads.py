"""From a head's checkpoint to the speculator that drafts with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.grammar.following import Grammars
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
from paceline.speculators.medusa import Medusa
from paceline.speculators.medusa_heads import load_medusa
from paceline.speculators.mlp_network import load_mlp_speculator
from paceline.speculators.mlp_speculator import MlpSpeculator
from paceline.speculators.mtp import load_mtp
from paceline.speculators.network import HeadNetwork
from paceline.speculators.peagle import PEagle


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a head is built from."""

    checkpoint: Checkpoint
    config: SpeculativeConfig
    slots: int
    lent: Lent


@dataclass(frozen=True, slots=True)
class _Kind:
    """How heads of one method are built, and which states of the target they are fed with."""

    build: Callable[[_Parts], Speculator]
    layers: Callable[[_Parts], Sequence[int]]


def build_head(config: SpeculativeConfig, engine: EngineConfig, lent: Lent) -> Speculator:
    """The head that `config` names. Raises `CheckpointError`, or `ModelNotFoundError`."""
    head = KINDS[config.method].build(_Parts(_checkpoint(config, lent), config, engine.slots, lent))
    head.grammars = Grammars.of(str(lent.folder), lent.vocabulary_size)
    return head


def layers_of_head(config: SpeculativeConfig, lent: Lent) -> Sequence[int]:
    """What it is fed with, without loading it. Raises as `build_head` does."""
    return KINDS[config.method].layers(_Parts(_checkpoint(config, lent), config, 0, lent))


def _checkpoint(config: SpeculativeConfig, lent: Lent) -> Checkpoint:
    """The head's own; without one the target's, which holds the layer of `mtp`."""
    return Checkpoint(lent.folder if config.model is None else resolve_model(config.model))


def _final(parts: _Parts) -> Sequence[int]:
    return (parts.lent.final,)


def _eagle3_layers(parts: _Parts) -> Sequence[int]:
    return Eagle3Kind.of(parts.checkpoint, parts.lent, parts.config.eagle_aux_hidden_state_layer_ids).layers


def _eagle3_network(parts: _Parts) -> Eagle3:
    said = parts.config
    layers, norm_output = said.eagle_aux_hidden_state_layer_ids, said.norm_output
    return Eagle3(parts.checkpoint, parts.lent, parts.slots, said.rope_theta, layers, norm_output)


def _eagle(parts: _Parts) -> Speculator:
    return _step_by_step(parts, Eagle(parts.checkpoint, parts.lent, parts.slots, parts.config.rope_theta))


def _eagle3(parts: _Parts) -> Speculator:
    return _step_by_step(parts, _eagle3_network(parts))


def _mtp(parts: _Parts) -> Speculator:
    return _step_by_step(parts, load_mtp(parts.checkpoint, parts.lent, parts.slots))


def _step_by_step(parts: _Parts, network: HeadNetwork) -> Speculator:
    """Every guess needs the one before."""
    config, lent = parts.config, parts.lent
    cost = row_cost(_Fed(network, lent), MOST_ROWS)
    least = config.least_path_probability
    return Head(config.method, network, lent.fingerprint, lent.vocabulary_size, config.tree_width, cost, least)


def _medusa(parts: _Parts) -> Speculator:
    heads, config = load_medusa(parts.checkpoint, parts.lent), parts.config
    return Medusa(heads, parts.lent, config.tree_width, config.least_path_probability)


def _mlp_speculator(parts: _Parts) -> Speculator:
    chain, config = load_mlp_speculator(parts.checkpoint, parts.lent), parts.config
    return MlpSpeculator(chain, parts.lent, config.tree_width, config.least_path_probability)


def _peagle(parts: _Parts) -> Speculator:
    network, config = _eagle3_network(parts), parts.config
    depth, width, least = config.num_speculative_tokens, config.tree_width, config.least_path_probability
    return PEagle(network, parts.checkpoint, parts.lent, depth, width, least)


def _dflash(parts: _Parts) -> Speculator:
    config = parts.config
    network = DFlashNetwork(parts.checkpoint, parts.lent, parts.slots, config.rope_theta)
    return DFlash(network, parts.lent, config.tree_width, config.least_path_probability)


def _dflash_layers(parts: _Parts) -> Sequence[int]:
    return layers_of(parts.checkpoint, parts.lent)


KINDS: Mapping[str, _Kind] = {
    "eagle": _Kind(_eagle, _final),
    "eagle3": _Kind(_eagle3, _eagle3_layers),
    "mtp": _Kind(_mtp, _final),
    "medusa": _Kind(_medusa, _final),
    "mlp_speculator": _Kind(_mlp_speculator, _final),
    "peagle": _Kind(_peagle, _eagle3_layers),
    "dflash": _Kind(_dflash, _dflash_layers),
}
"""By the names in `config.HEADS`."""


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
