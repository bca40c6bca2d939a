"""MLP speculators (Wertheimer et al. 2024, IBM) and Arctic's relatives: a chain of states, one step per guess.

    state  = gelu(norm_i(project_i(state) + ratio * embed_i(token)))
    logits = output_i(state)

The first state is the target's own, the first token the root. Arctic's `sum_lstm` has a cell beside the state:

    forget, input, out, candidate = project_i(state) + ratio * embed(token), four times
    cell  = cell * sigmoid(forget) + gelu(cell_norm(candidate)) * sigmoid(input)
    state = gelu(state_norm(cell)) * sigmoid(out)

Steps that are tied share all but the projection of the first, since the target's state may be wider than theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear
from paceline.model.target_weights import TargetWeights

Product = Callable[[Tensor], Tensor]
Part = TypeVar("Part")

EPS = 1e-6
ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel",
    "ArcticMLPSpeculatorPreTrainedModel",
    "ArcticLSTMSpeculatorPreTrainedModel",
}
NESTED = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(weight|bias)")
"""Arctic's `sum_rnn` has room for several layers where IBM has one."""


@dataclass(frozen=True, slots=True)
class ShiftedNorm:
    """RMS norm with a shift; published as "LayerNorm", but no mean is subtracted."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS) + self.bias


def scaled_input(states: Tensor) -> Tensor:
    """The target's states [..., H] where `scale_input` asks for it."""
    return F.rms_norm(states, states.shape[-1:], None, EPS) / math.sqrt(2)


def embedding_ratio(n_predict: int, inner: int) -> float:
    """How a token's embedding weighs against the state, by the number of steps *trained* and their width."""
    state_weight = math.pow(0.5, 0.5 / n_predict)
    return math.sqrt((1 - state_weight**2) * inner / 2) / state_weight


def mlp_step(projected: Tensor, embedded: Tensor, ratio: float, norm: Product) -> Tensor:
    """The next state; all are [..., inner]."""
    return F.gelu(norm(torch.add(projected, embedded, alpha=ratio)))


def lstm_step(
    projected: Tensor, embedded: Tensor, cell: Tensor, ratio: float, cell_norm: Product, state_norm: Product
) -> tuple[Tensor, Tensor]:
    """The next state and cell, [..., inner] as `embedded` and `cell`; `projected` is [..., 4 * inner]."""
    gates = projected.unflatten(-1, (4, -1)) + ratio * embedded.unsqueeze(-2)
    forget, into, out, candidate = gates.unbind(-2)
    cell = cell * forget.sigmoid() + F.gelu(cell_norm(candidate)) * into.sigmoid()
    return F.gelu(state_norm(cell)) * out.sigmoid(), cell


class MlpChainNetwork(Protocol):
    """Weights of a chain of `steps`."""

    model: str
    steps: int
    vocabulary_limit: int
    """Tokens that it can be fed with are below this."""
    ids: Tensor | None
    """int64 [columns]: the token of each logit; None: column n is token n."""

    def begin(self, states: Tensor) -> Tensor:
        """What the target's final norm gave, [n, H], as what step 0 is fed with."""

    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, columns] after `tokens` int64 [n], and what the next step is fed with, [n, any]."""


class MlpNetwork:
    """Plain steps."""

    def __init__(self, model: str, parts: _MlpWeights) -> None:
        self.model, self.steps, self.ids = model, parts.steps, parts.ids
        self._parts = parts
        self._norms = parts.each(lambda i: parts.norm(f"ln.{i}"))
        self._projections = parts.projections("proj", parts.inner)
        self._embeddings = parts.each(lambda i: parts.embedding(f"emb.{i}.weight"))
        self.vocabulary_limit = min(map(len, self._embeddings))

    def begin(self, states: Tensor) -> Tensor:
        return self._parts.scaled(states)

    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(tokens, self._embeddings[index])
        state = mlp_step(self._projections[index](states), embedded, self._parts.ratio, self._norms[index])
        return self._parts.outputs[index](state), state


class LstmNetwork:
    """Arctic's `sum_lstm`. What a step is fed with is the state and, after it, the cell."""

    def __init__(self, model: str, parts: _MlpWeights) -> None:
        self.model, self.steps, self.ids = model, parts.steps, parts.ids
        self._parts = parts
        self._cell_norm, self._state_norm = parts.norm("cell_ln.0"), parts.norm("state_ln.0")
        self._projections = parts.projections("projs", 4 * parts.inner)
        self._embedding = parts.embedding("forget_emb.0.weight")
        self.vocabulary_limit = len(self._embedding)

    def begin(self, states: Tensor) -> Tensor:
        return F.pad(self._parts.scaled(states), (0, self._parts.inner))

    def step(self, index: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        inner = self._parts.inner
        projected = self._projections[index](states[:, :-inner])
        embedded = F.embedding(tokens, self._embedding)
        state, cell = lstm_step(
            projected, embedded, states[:, -inner:], self._parts.ratio, self._cell_norm, self._state_norm
        )
        return self._parts.outputs[index](state), torch.cat((state, cell), -1)


def is_mlp_speculator(checkpoint: Checkpoint) -> bool:
    """By its configuration: the tensors have names that others have, too."""
    config = checkpoint.config
    return (
        not ARCHITECTURES.isdisjoint(config.get("architectures") or ())
        or config.get("model_type") == "mlp_speculator"
        or config.get("method") in ("sum_rnn", "sum_lstm")
    )


def load_mlp_speculator(checkpoint: Checkpoint, lent: TargetWeights) -> MlpChainNetwork:
    """Raises `CheckpointError` if this is none for this target, or of a kind that is not known here."""
    weights = HeadWeights(checkpoint, lent, normalised_name)
    if "forget_emb.0.weight" in weights:
        if "input_emb.0.weight" in weights:
            raise CheckpointError(
                f"{checkpoint} has an embedding for each gate: train it with tie_lstm_embs, as Arctic runs it"
            )
        return LstmNetwork(
            checkpoint.folder.name, _MlpWeights(checkpoint, weights, lent, "state_ln.0.weight", tied=True)
        )
    several = sorted(
        name for name in map(normalised_name, checkpoint.names) if re.match(r"(emb|proj|ln)\.\d+\.\d+\.", name)
    )
    if several:
        raise CheckpointError(
            f"{checkpoint} has several layers in one step ({several[0]}): "
            "choose a speculator with one emb_dim, one proj_dim and one inner_dim"
        )
    tied = bool(checkpoint.config.get("tie_weights", False))
    return MlpNetwork(checkpoint.folder.name, _MlpWeights(checkpoint, weights, lent, "ln.0.weight", tied=tied))


def normalised_name(name: str) -> str:
    """A tensor's name as IBM's own code has it."""
    name = name.removeprefix("speculator.")
    nested = NESTED.fullmatch(name)
    return f"{nested[1]}.{nested[2]}.{nested[3]}" if nested else name


class _MlpWeights:
    """What both kinds of step are put together from."""

    def __init__(
        self, checkpoint: Checkpoint, weights: HeadWeights, lent: TargetWeights, norm: str, *, tied: bool
    ) -> None:
        """`norm`: a tensor that is as wide as the steps."""
        self._checkpoint, self._weights, self._lent, self._tied = checkpoint, weights, lent, tied
        self._scale = bool(checkpoint.config.get("scale_input", False))
        trained = self._trained()
        self.inner = weights.shape(norm)[0]
        self.steps = max(1, int(checkpoint.config.get("num_lookahead_tokens", trained))) if tied else trained
        self.ratio = embedding_ratio(trained, self.inner)
        columns = self._rows("head.0.weight")
        self.ids = None if columns == lent.vocabulary_size else torch.arange(columns, device=lent.device)
        self.outputs = self.each(lambda i: Linear(weights.take(f"head.{i}.weight", columns, self.inner)))

    def each(self, part: Callable[[int], Part]) -> Sequence[Part]:
        """A part of every step, read once where they are tied."""
        return [part(0)] * self.steps if self._tied else [part(i) for i in range(self.steps)]

    def projections(self, name: str, width: int) -> Sequence[Product]:
        sizes = [self._lent.hidden_size, *[self.inner] * (self.steps - 1)]
        if self._tied:
            first, *rest = [self._projection(f"{name}.{i}.weight", width, n) for i, n in enumerate(sizes[:2])]
            return [first, *rest * (self.steps - 1)]
        return [self._projection(f"{name}.{i}.weight", width, n) for i, n in enumerate(sizes)]

    def embedding(self, name: str) -> Tensor:
        return self._weights.take(name, self._rows(name), self.inner)

    def norm(self, name: str) -> ShiftedNorm:
        return ShiftedNorm(
            self._weights.take(f"{name}.weight", self.inner), self._weights.take(f"{name}.bias", self.inner)
        )

    def scaled(self, states: Tensor) -> Tensor:
        return scaled_input(states) if self._scale else states

    def _projection(self, name: str, out: int, into: int) -> Linear:
        return Linear(self._weights.take(name, out, into))

    def _trained(self) -> int:
        """n_predict. Raises `CheckpointError` without one: the weights were trained for just that."""
        trained = self._checkpoint.config.get("n_predict")
        if not isinstance(trained, int) or trained < 1:
            raise CheckpointError(
                f"{self._checkpoint}/config.json lacks n_predict, the number of steps it was trained for: add it"
            )
        return trained

    def _rows(self, name: str) -> int:
        rows = self._weights.shape(name)[0]
        if rows > self._lent.vocabulary_size:
            raise CheckpointError(
                f"{self._checkpoint} was trained for {rows} tokens, {self._lent.name} has "
                f"{self._lent.vocabulary_size}: choose a speculator that was trained for this model"
            )
        return rows
