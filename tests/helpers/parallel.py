"""Drafts that predict several tokens in one pass, for the peaked Llama: random weights by their published names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafting.methods.dflash import DFlashNetwork, DFlashSpeculator
from paceline.drafting.methods.eagle3 import Eagle3Network
from paceline.drafting.methods.pard import PardSpeculator
from paceline.drafting.methods.peagle import PEagleSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model import Model
from paceline.model.checkpoint import Checkpoint
from tests.helpers.dense import HEADS, HIDDEN, INNER, KV_HEADS, SIZE, layer_tensors, random
from tests.helpers.feeding import Feeding, Guess
from tests.helpers.head_checkpoints import save_head
from tests.helpers.llamas import VOCABULARY
from tests.helpers.seen import nodes_of

BLOCK = 5
MASK = 60
DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}
DFLASH: dict[str, Any] = {
    **DECODER,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}
"""As in z-lab's checkpoints."""
DFLASH_OF_THE_LIBRARY: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": {**DECODER, "model_type": "qwen3"},
    "draft_vocab_size": VOCABULARY,
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": [0, 2],
    "mask_token_id": MASK,
}
PEAGLE: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "transformer_layer_config": {**DECODER, "model_type": "llama"},
    "draft_vocab_size": VOCABULARY,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "mask_token_id": MASK,
}


def dflash_tensors(states: int = 2) -> dict[str, Tensor]:
    """Two layers over this number of target states."""
    torch.manual_seed(5)
    named = {
        "fc.weight": random(HIDDEN, states * HIDDEN),
        "hidden_norm.weight": random(HIDDEN),
        "norm.weight": random(HIDDEN),
    }
    for n in range(2):
        named |= layer_tensors(f"layers.{n}", head_norms=True)
    return named


def peagle_tensors() -> dict[str, Tensor]:
    """Two layers, and an embedding of its own."""
    torch.manual_seed(6)
    named = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "norm.weight": random(HIDDEN),
        "lm_head.weight": 2 * random(VOCABULARY, HIDDEN),
        "embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "mask_hidden": torch.randn(1, 1, 3 * HIDDEN),
        "layers.0.hidden_norm.weight": random(HIDDEN),
    }
    return named | layer_tensors("layers.0", 2 * HIDDEN) | layer_tensors("layers.1")


def reduced_vocabulary(step: int) -> tuple[dict[str, Tensor], list[int]]:
    """Every `step`-th token: an output matrix, `d2t` and `t2d`; and the tokens."""
    ids = list(range(1, VOCABULARY, step))
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids] = True
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    return {"lm_head.weight": random(len(ids), HIDDEN), "d2t": offsets, "t2d": known}, ids


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Checkpoint:
    return Checkpoint(save_head(folder, weights, dict(config)))


def check_guesses(
    request: Feeding, guesses: Sequence[Guess], expected: Tensor, ids: Sequence[int] | None = None
) -> None:
    """Each guess has its depth's log-probability in `expected` [depths, columns], and the likeliest path is there.

    `ids`: the token of each column; None: all tokens.
    """
    columns = {token: column for column, token in enumerate(ids or range(VOCABULARY))}
    assert guesses
    for path, log_prob in guesses:
        assert log_prob == pytest.approx(float(expected[len(path) - 1, columns[path[-1]]]), abs=2e-3)
    best = [int(distribution.argmax()) for distribution in expected]
    likeliest = [ids[column] if ids else column for column in best]
    assert len(request.tree.match(likeliest)) == len(likeliest)


def check_rounds(
    request: Feeding, speculator: Any, distributions: Callable[[], Tensor], ids: Sequence[int] | None = None
) -> None:
    """Twelve rounds with random commits between them: of guesses, of misses, of both."""
    rng = Random(3)
    request.tell()
    for _ in range(12):
        check_guesses(request, request.grow(), distributions(), ids)
        speculator.check_integrity()
        chosen = rng.choice(list(nodes_of(request.tree))).path()
        request.commit([*(node.token for node in chosen), *rng.choices(range(VOCABULARY), k=rng.randrange(2))])


def drafting_for(target: Model, method: str, folder: Path, ahead: int = 4, width: int = 3) -> Speculator:
    """A draft of this method. The model of `pard` is the target, so its first guess is right."""
    if method == "pard":
        return PardSpeculator(target, MASK, ahead, width, 0.0)
    if method == "dflash":
        network = DFlashNetwork(save(folder, DFLASH, dflash_tensors()), target.target_weights(), target.slots)
        return DFlashSpeculator(network, target.target_weights(), width, 0.0)
    checkpoint = save(folder, PEAGLE, peagle_tensors())
    return PEagleSpeculator(
        Eagle3Network(checkpoint, target.target_weights(), target.slots),
        checkpoint,
        target.target_weights(),
        ahead,
        width,
        0.0,
    )
