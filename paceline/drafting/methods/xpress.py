"""XPress: DFlash whose logits a small causal network corrects by all guesses before in the block.

After speculators 0.9.0 (`models/xpress`). With e_p the embedding of the token before position p, h_p the position's
normed state, g the mean of all states of the block, and L a lower triangle per channel:

    a_p = in [down_h h_p; down_g g; e_p]
    x_p = a_p + sum over q up to p of L_(p,q) a_q
    x_p = x_p + mlp(x_p);  logits + readout x_p

The package guesses a whole block, and then again from the guesses before, `num_jacobi_passes` times. With as many
passes as positions that ends with each guess chosen after those before it. Here guesses are chosen so.
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
from paceline.model.checkpoint import Checkpoint
from paceline.model.layers import Linear, SwiGLU

__all__ = ["Refiner", "build", "complete", "matches", "target_layers"]


class Refiner:
    """A `PathScorer`."""

    def __init__(self, checkpoint: Checkpoint, weights: HeadWeights, network: DFlashNetwork) -> None:
        """Raises `CheckpointError` if the weights do not fit."""
        rank, h, block = size_setting(checkpoint, "xpress_rank"), network.width, network.config.block

        def matrix(name: str, *shape: int) -> Tensor:
            return weights.take(f"refiner_head.{name}.weight", *shape)

        inner = weights.shape("refiner_head.mlp_up.weight")[0]
        vocabulary = network.description.vocabulary_size
        self._embedding = weights.take_padded("refiner_head.token_embed.weight", vocabulary, rank)
        self._readout = Linear(weights.take_padded("refiner_head.readout.weight", network.columns, rank))
        self._state, self._mean = (Linear(matrix(f"down_{name}", rank, h)) for name in "hg")
        self._input = Linear(matrix("in_proj", rank, 3 * rank))
        self._mix = weights.take("refiner_head.mix_l", rank, block, block)
        gate_up = Linear(matrix("mlp_gate", inner, rank), matrix("mlp_up", inner, rank))
        self._mlp = SwiGLU(gate_up, Linear(matrix("mlp_down", rank, inner)))
        self._first = network.config.first_offset

    def __call__(self, blocks: Sequence[DraftBlock], paths: Sequence[Path]) -> Tensor:
        position = self._first + len(paths[0])
        before = [[*block.tokens[1 - self._first :], *path] for block, path in zip(blocks, paths, strict=True)]
        states = torch.stack([block.states for block in blocks])
        mean = self._mean(states.mean(1)).unsqueeze(1).expand(-1, position + 1, -1)
        own = self._state(states[:, : position + 1].flatten(0, 1)).view_as(mean)
        embedded = self._embedding[torch.tensor(before, device=states.device)]
        a = self._input(torch.cat((own, mean, embedded), -1).flatten(0, 1)).view_as(mean)
        x = a[:, -1] + torch.einsum("rq,nqr->nr", self._mix[:, position, : position + 1], a)
        return logits_of_pass(blocks, paths) + self._readout(x + self._mlp(x))


def build(inputs: MethodInputs) -> Speculator:
    return build_block_draft(inputs, Refiner)


def matches(checkpoint: Checkpoint) -> bool:
    return relative_of(checkpoint) == "xpress"
