"""DSpark: DFlash whose logits a small head corrects by the guesses before in the block.

After speculators 0.9.0 (`models/dspark`). With e the row of the guess before in w1 and h the position's normed state,
logits + w2 u, where by `markov_head_type`

    vanilla   u = e
    gated     u = sigmoid(gate [h; e]) * e
    rnn       [g; c; o] = joint [s; e; h];  u = tanh(o);  the next s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

s is 0 at the block's first position, whose guess before is the root. With `sample_from_anchor`, the default, position n
predicts token n + 1 of the block; else its own token, so the root is before the first two positions. `markov_rank` 0
means no such head. vLLM 0.32.0 computes `vanilla` whatever the type is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.drafting.block import DraftBlock, Path, logits_of_pass
from paceline.drafting.heads.dflash_config import relative_of, setting, size_setting
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.methods.dflash import DFlashNetwork, build_block_draft, complete, target_layers
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear

__all__ = ["MarkovHead", "build", "complete", "matches", "target_layers"]

PROJECTIONS = {"vanilla": "", "gated": "gate_proj", "rnn": "joint_proj"}
"""By type, the projection that reads more than the guess before."""


class MarkovHead:
    """A `PathScorer`."""

    def __init__(self, checkpoint: Checkpoint, weights: HeadWeights, network: DFlashNetwork) -> None:
        """Raises `CheckpointError` if the type is unknown or the weights do not fit."""
        self._type = str(setting(checkpoint, "markov_head_type", "vanilla"))
        if self._type not in PROJECTIONS:
            raise CheckpointError(
                f"{checkpoint} has markov_head_type {self._type!r}: known are {', '.join(PROJECTIONS)}"
            )
        rank, h, name = size_setting(checkpoint, "markov_rank"), network.width, "markov_head"
        self._before = weights.take_padded(f"{name}.markov_w1.weight", network.description.vocabulary_size, rank)
        self._output = Linear(weights.take_padded(f"{name}.markov_w2.weight", network.columns, rank))
        shape = {"gated": (rank, h + rank), "rnn": (3 * rank, 2 * rank + h)}.get(self._type)
        if shape is not None:
            part = f"{name}.{PROJECTIONS[self._type]}"
            biases = [weights.take(f"{part}.bias", shape[0])]
            self._projection = Linear(weights.take(f"{part}.weight", *shape), biases=biases)
        self._first = network.config.first_offset

    def __call__(self, blocks: Sequence[DraftBlock], paths: Sequence[Path]) -> Tensor:
        # Of every position of the block up to the one that predicts, the token before and the state.
        before = [[block.tokens[-1]] * (1 + self._first) + [*path] for block, path in zip(blocks, paths, strict=True)]
        embedded = self._before[torch.tensor(before, device=self._before.device)]
        states = torch.stack([block.states[: len(tokens)] for block, tokens in zip(blocks, before, strict=True)])
        return logits_of_pass(blocks, paths) + self._output(self._input(embedded, states))

    def _input(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[n, positions, rank] and [n, positions, h] → u of the last position, [n, rank]."""
        e, h = embedded[:, -1], states[:, -1]
        if self._type == "vanilla":
            return e
        if self._type == "gated":
            return torch.sigmoid(self._projection(torch.cat((h, e), -1))) * e
        s = out = torch.zeros_like(e)
        for e, h in zip(embedded.unbind(1), states.unbind(1), strict=True):
            gate, candidate, out = self._projection(torch.cat((s, e, h), -1)).chunk(3, -1)
            s = torch.lerp(torch.tanh(candidate), s, torch.sigmoid(gate))
        return torch.tanh(out)


def build(inputs: MethodInputs) -> Speculator:
    return build_block_draft(inputs, MarkovHead if setting(inputs.checkpoint, "markov_rank") else None)


def matches(checkpoint: Checkpoint) -> bool:
    return relative_of(checkpoint) == "dspark"
