"""DFlash2: DFlash with convolutions along the block, which chooses among its candidates by the guess before.

After speculators 0.9.0 (`models/dflash2`). With c the candidates of a position, the `selector_top_k` largest logits; h
the position's normed state; a and b two matrices with a row per token:

    score(c | guess before) = logit(c) + sum(a[guess before] * (projection h) * b[c])

No other token can be guessed there. The layers' convolutions are `paceline.drafting.heads.block_convolution`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafting.block import DraftBlock, Path, logits_of_pass
from paceline.drafting.heads.dflash_config import relative_of, size_setting
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods.dflash import DFlashNetwork, build_block_draft, complete, target_layers
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear

__all__ = ["CandidateSelector", "build", "complete", "matches", "target_layers"]


class CandidateSelector:
    """A `PathScorer`."""

    def __init__(self, checkpoint: Checkpoint, weights: HeadWeights, network: DFlashNetwork) -> None:
        """Raises `CheckpointError` if the weights do not fit, or if the draft has a vocabulary of its own."""
        if network.ids is not None:
            raise CheckpointError(
                f"{checkpoint} guesses {network.columns} tokens: a dflash2 draft needs the whole vocabulary"
            )
        self._count = size_setting(checkpoint, "selector_top_k")
        rank = size_setting(checkpoint, "selector_rank")
        name, columns = "candidate_selector", network.columns
        self._before = weights.take_padded(f"{name}.predecessor_codebook", columns, rank)
        self._candidates = weights.take_padded(f"{name}.successor_codebook", columns, rank)
        self._projection = Linear(weights.take(f"{name}.hidden_projection.weight", rank, network.width))
        self._first = network.config.first_offset

    def __call__(self, blocks: Sequence[DraftBlock], paths: Sequence[Path]) -> Tensor:
        depth = len(paths[0])
        before = [path[-1] if path else block.tokens[-1] for block, path in zip(blocks, paths, strict=True)]
        states = torch.stack([block.states[self._first + depth] for block in blocks])
        logits = logits_of_pass(blocks, paths)
        largest, candidates = logits.topk(min(self._count, logits.shape[-1]))
        context = self._before[before] * self._projection(states)
        scores = largest + (self._candidates[candidates] @ context.unsqueeze(-1)).squeeze(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)


def build(inputs: MethodInputs) -> Speculator:
    return build_block_draft(inputs, CandidateSelector)


def matches(checkpoint: Checkpoint) -> bool:
    return relative_of(checkpoint) == "dflash2"
