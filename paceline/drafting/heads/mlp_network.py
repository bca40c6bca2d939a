"""MLP speculators (Wertheimer et al. 2024, IBM) and Arctic's variants: a chain of states, one step per draft token.

    state  = gelu(norm_i(project_i(state) + ratio * embed_i(token)))
    logits = output_i(state)

The first state is the target's, the first token the root. Arctic's `sum_lstm` has a cell beside the state:

    forget, input, out, candidate = project_i(state) + ratio * embed(token), four times
    cell  = cell * sigmoid(forget) + gelu(cell_norm(candidate)) * sigmoid(input)
    state = gelu(state_norm(cell)) * sigmoid(out)

Tied steps share everything but the first step's projection, whose input is the target's state and may be wider.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafting.heads.head_network import RootStateNetwork
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear
from paceline.model.target_weights import TargetWeights

Part = TypeVar("Part")

EPS = 1e-6
ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel",
    "ArcticMLPSpeculatorPreTrainedModel",
    "ArcticLSTMSpeculatorPreTrainedModel",
}
RENAMES = (
    (r"^speculator\.", ""),
    (r"^(emb|proj|ln)\.(\d+)\.0\.(weight|bias)$", r"\1.\2.\3"),
)
"""To IBM's names. Arctic's `sum_rnn` numbers the layers of a step, of which there is one."""


@dataclass(frozen=True, slots=True)
class ShiftedNorm:
    """RMS norm with a shift; published as "LayerNorm", but no mean is subtracted."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS) + self.bias


class MlpChainNetwork(RootStateNetwork, ABC):
    """A chain of `steps`. `vocabulary_limit`: input tokens are below this."""

    vocabulary_limit: int

    def __init__(
        self, checkpoint: Checkpoint, target: TargetWeights, weights: HeadWeights, norm: str, *, tied: bool
    ) -> None:
        """`norm`: a tensor [inner]. Raises `CheckpointError` if the weights are not for this target."""
        self._checkpoint, self._target, self._weights = checkpoint, target, weights
        self._tied = tied
        self._scales_input = bool(checkpoint.config.get("scale_input", False))
        trained = checkpoint.config.get("n_predict")
        if not isinstance(trained, int) or trained < 1:
            raise CheckpointError(
                f"{checkpoint}/config.json lacks n_predict, the number of steps it was trained for: add it"
            )
        self.steps = max(1, int(checkpoint.config.get("num_lookahead_tokens", trained))) if tied else trained
        self._inner = weights.shape(norm)[0]
        state_weight = math.pow(0.5, 0.5 / trained)
        self._ratio = math.sqrt((1 - state_weight**2) * self._inner / 2) / state_weight
        columns = self._rows("head.0.weight")
        ids = None if columns == target.vocabulary_size else torch.arange(columns, device=target.device)
        super().__init__(target, "mlp_speculator", checkpoint.folder.name, ids)
        self._outputs = self._each_step(lambda i: Linear(weights.take(f"head.{i}.weight", columns, self._inner)))

    def begin(self, states: Tensor) -> Tensor:
        """Outputs of the target's final norm [n, H] as the input of step 0."""
        return F.rms_norm(states, states.shape[-1:], None, EPS) / math.sqrt(2) if self._scales_input else states

    @abstractmethod
    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, columns] after `tokens` int64 [n], and the input of the next step, [n, any]."""

    def _each_step(self, part: Callable[[int], Part]) -> Sequence[Part]:
        """One part for each step; tied steps share one."""
        return [part(0)] * self.steps if self._tied else [part(i) for i in range(self.steps)]

    def _projections(self, name: str, width: int) -> Sequence[Linear]:
        """[width, H] in the first step, [width, inner] in the others, which share one if they are tied."""
        h, inner, steps = self._target.hidden_size, self._inner, self.steps
        stored = [Linear(self._weights.take(f"{name}.0.weight", width, h))]
        last = min(steps, 2) if self._tied else steps
        stored += [Linear(self._weights.take(f"{name}.{i}.weight", width, inner)) for i in range(1, last)]
        return stored + stored[1:] * (steps - last)

    def _embedding(self, name: str) -> Tensor:
        return self._weights.take(name, self._rows(name), self._inner)

    def _norm(self, name: str) -> ShiftedNorm:
        weight, bias = (self._weights.take(f"{name}.{each}", self._inner) for each in ("weight", "bias"))
        return ShiftedNorm(weight, bias)

    def _rows(self, name: str) -> int:
        rows, size = self._weights.shape(name)[0], self._target.vocabulary_size
        if rows > size:
            raise CheckpointError(
                f"{self._checkpoint} was trained for {rows} tokens, {self._target.name} has {size}: "
                "choose a speculator that was trained for this model"
            )
        return rows


class MlpNetwork(MlpChainNetwork):
    """IBM's steps, and Arctic's `sum_rnn`."""

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, weights: HeadWeights) -> None:
        tied = bool(checkpoint.config.get("tie_weights", False))
        super().__init__(checkpoint, target, weights, "ln.0.weight", tied=tied)
        self._norms = self._each_step(lambda i: self._norm(f"ln.{i}"))
        self._project = self._projections("proj", self._inner)
        self._embeddings = self._each_step(lambda i: self._embedding(f"emb.{i}.weight"))
        self.vocabulary_limit = min(map(len, self._embeddings))

    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(tokens, self._embeddings[index])
        summed = torch.add(self._project[index](states), embedded, alpha=self._ratio)
        state = F.gelu(self._norms[index](summed))
        return self._outputs[index](state), state


class LstmNetwork(MlpChainNetwork):
    """Arctic's `sum_lstm`. The input of a step is the state, followed by the cell."""

    def __init__(self, checkpoint: Checkpoint, target: TargetWeights, weights: HeadWeights) -> None:
        super().__init__(checkpoint, target, weights, "state_ln.0.weight", tied=True)
        self._cell_norm, self._state_norm = self._norm("cell_ln.0"), self._norm("state_ln.0")
        self._project = self._projections("projs", 4 * self._inner)
        self._tokens = self._embedding("forget_emb.0.weight")
        self.vocabulary_limit = len(self._tokens)

    def begin(self, states: Tensor) -> Tensor:
        return F.pad(super().begin(states), (0, self._inner))

    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, cell = states[:, : -self._inner], states[:, -self._inner :]
        embedded = F.embedding(tokens, self._tokens)
        gates = self._project[index](states).unflatten(-1, (4, -1)) + self._ratio * embedded.unsqueeze(-2)
        forget, into, out, candidate = gates.unbind(-2)
        cell = cell * forget.sigmoid() + F.gelu(self._cell_norm(candidate)) * into.sigmoid()
        state = F.gelu(self._state_norm(cell)) * out.sigmoid()
        return self._outputs[index](state), torch.cat((state, cell), -1)


def is_mlp_speculator(checkpoint: Checkpoint) -> bool:
    """By the configuration: other methods have tensors of the same names."""
    config = checkpoint.config
    return (
        not ARCHITECTURES.isdisjoint(config.get("architectures") or ())
        or config.get("model_type") == "mlp_speculator"
        or config.get("method") in ("sum_rnn", "sum_lstm")
    )


def load_mlp_speculator(checkpoint: Checkpoint, target: TargetWeights) -> MlpChainNetwork:
    """Raises `CheckpointError` if the speculator is not for this target, or of an unknown kind."""
    weights = HeadWeights(checkpoint, target, RENAMES)
    if "forget_emb.0.weight" in weights:
        if "input_emb.0.weight" in weights:
            raise CheckpointError(
                f"{checkpoint} has an embedding for each gate: train it with tie_lstm_embs, as Arctic runs it"
            )
        return LstmNetwork(checkpoint, target, weights)
    several = sorted(name for name in weights.names if re.match(r"(emb|proj|ln)\.\d+\.\d+\.", name))
    if several:
        raise CheckpointError(
            f"{checkpoint} has several layers in one step ({several[0]}): "
            "choose a speculator with one emb_dim, one proj_dim and one inner_dim"
        )
    return MlpNetwork(checkpoint, target, weights)
