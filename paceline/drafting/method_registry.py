"""From a head's checkpoint to the speculator that drafts with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.drafting.best_first import MAX_ROWS
from paceline.drafting.heads.dflash_config import target_layers
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.head_speculator import HeadSpeculator
from paceline.drafting.heads.medusa_heads import load_medusa
from paceline.drafting.heads.mlp_network import load_mlp_speculator
from paceline.drafting.methods.dflash import DFlashNetwork, DFlashSpeculator
from paceline.drafting.methods.eagle import EagleNetwork
from paceline.drafting.methods.eagle3 import Eagle3Config, Eagle3Network
from paceline.drafting.methods.medusa import MedusaSpeculator
from paceline.drafting.methods.mlp_speculator import MlpSpeculator
from paceline.drafting.methods.mtp import load_mtp
from paceline.drafting.methods.peagle import PEagleSpeculator
from paceline.drafting.speculator import Speculator
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.model.checkpoint import Checkpoint
from paceline.model.row_probe import measure_row_cost
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights
from paceline.model_names import resolve_model


@dataclass(frozen=True, slots=True)
class _HeadInputs:
    """What a head is built from."""

    checkpoint: Checkpoint
    config: SpeculativeConfig
    slots: int
    lent: TargetWeights


@dataclass(frozen=True, slots=True)
class _HeadMethod:
    """How heads of one method are built, and which states of the target they are fed with."""

    build: Callable[[_HeadInputs], Speculator]
    layers: Callable[[_HeadInputs], Sequence[int]]


def build_head(config: SpeculativeConfig, engine: EngineConfig, lent: TargetWeights) -> Speculator:
    """The head that `config` names. Raises `CheckpointError`, or `ModelNotFoundError`."""
    head = HEAD_METHODS[config.method].build(_HeadInputs(_checkpoint(config, lent), config, engine.slots, lent))
    head.grammars = GrammarCompiler.of(str(lent.folder), lent.vocabulary_size)
    return head


def head_hidden_state_layers(config: SpeculativeConfig, lent: TargetWeights) -> Sequence[int]:
    """What it is fed with, without loading it. Raises as `build_head` does."""
    return HEAD_METHODS[config.method].layers(_HeadInputs(_checkpoint(config, lent), config, 0, lent))


def _checkpoint(config: SpeculativeConfig, lent: TargetWeights) -> Checkpoint:
    """The head's own; without one the target's, which holds the layer of `mtp`."""
    return Checkpoint(lent.folder if config.model is None else resolve_model(config.model))


def _final(parts: _HeadInputs) -> Sequence[int]:
    return (parts.lent.final_layer,)


def _eagle3_layers(parts: _HeadInputs) -> Sequence[int]:
    return Eagle3Config.of(parts.checkpoint, parts.lent, parts.config.eagle_aux_hidden_state_layer_ids).layers


def _eagle3_network(parts: _HeadInputs) -> Eagle3Network:
    said = parts.config
    layers, norm_output = said.eagle_aux_hidden_state_layer_ids, said.norm_output
    return Eagle3Network(parts.checkpoint, parts.lent, parts.slots, said.rope_theta, layers, norm_output)


def _eagle(parts: _HeadInputs) -> Speculator:
    return _autoregressive_head(parts, EagleNetwork(parts.checkpoint, parts.lent, parts.slots, parts.config.rope_theta))


def _eagle3(parts: _HeadInputs) -> Speculator:
    return _autoregressive_head(parts, _eagle3_network(parts))


def _mtp(parts: _HeadInputs) -> Speculator:
    return _autoregressive_head(parts, load_mtp(parts.checkpoint, parts.lent, parts.slots))


def _autoregressive_head(parts: _HeadInputs, network: HeadNetwork) -> Speculator:
    """Every guess needs the one before."""
    config, lent = parts.config, parts.lent
    cost = measure_row_cost(_HeadProbe(network, lent), MAX_ROWS)
    least = config.least_path_probability
    return HeadSpeculator(
        config.method, network, lent.fingerprint, lent.vocabulary_size, config.tree_width, cost, least
    )


def _medusa(parts: _HeadInputs) -> Speculator:
    heads, config = load_medusa(parts.checkpoint, parts.lent), parts.config
    return MedusaSpeculator(heads, parts.lent, config.tree_width, config.least_path_probability)


def _mlp_speculator(parts: _HeadInputs) -> Speculator:
    chain, config = load_mlp_speculator(parts.checkpoint, parts.lent), parts.config
    return MlpSpeculator(chain, parts.lent, config.tree_width, config.least_path_probability)


def _peagle(parts: _HeadInputs) -> Speculator:
    network, config = _eagle3_network(parts), parts.config
    depth, width, least = config.num_speculative_tokens, config.tree_width, config.least_path_probability
    return PEagleSpeculator(network, parts.checkpoint, parts.lent, depth, width, least)


def _dflash(parts: _HeadInputs) -> Speculator:
    config = parts.config
    network = DFlashNetwork(parts.checkpoint, parts.lent, parts.slots, config.rope_theta)
    return DFlashSpeculator(network, parts.lent, config.tree_width, config.least_path_probability)


def _dflash_layers(parts: _HeadInputs) -> Sequence[int]:
    return target_layers(parts.checkpoint, parts.lent)


HEAD_METHODS: Mapping[str, _HeadMethod] = {
    "eagle": _HeadMethod(_eagle, _final),
    "eagle3": _HeadMethod(_eagle3, _eagle3_layers),
    "mtp": _HeadMethod(_mtp, _final),
    "medusa": _HeadMethod(_medusa, _final),
    "mlp_speculator": _HeadMethod(_mlp_speculator, _final),
    "peagle": _HeadMethod(_peagle, _eagle3_layers),
    "dflash": _HeadMethod(_dflash, _dflash_layers),
}
"""By the names in `config.HEADS`."""


class _HeadProbe:
    """A head fed with nothing, to see how long its passes take."""

    def __init__(self, network: HeadNetwork, lent: TargetWeights) -> None:
        self.slots, self.max_model_len = network.slots, network.position_limit
        self._network = network
        states = torch.zeros(
            1, len(network.hidden_state_layers), lent.hidden_size, dtype=lent.dtype, device=lent.device
        )
        self._feature = network.encode(states)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int]) -> object:
        return self._network.run(rows, self._feature.expand(len(rows), -1), wanted)
