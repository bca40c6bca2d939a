"""Medusa's heads: a few residual layers each, and an output matrix of their own, or else the target's.

    z = state;  z = z + silu(W z + b) for each layer;  logits = output(z)

Read from all that was published: the original's first version (`{head}.{layer}.linear.*`, and `{head}.{layers}.weight`
for the head's own output), its second (without: the target's output serves all heads), a model merged with its heads
(the same below `medusa_head.`), and vLLM's conversion (`blocks`, `lm_heads`, `token_map`). How many heads there are is
counted: published configurations say 2 where there are 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear
from paceline.model.target_weights import TargetWeights

Product = Callable[[Tensor], Tensor]

LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
ORIGINAL_LAYER = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
ORIGINAL_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight")


def residual(states: Tensor, layers: Sequence[Product]) -> Tensor:
    """One head's layers over states [..., H]."""
    for layer in layers:
        states = states + F.silu(layer(states))
    return states


class MedusaHeads:
    """All heads of one checkpoint. `ids`: int64 [columns], the token of each logit; None: column n is token n."""

    def __init__(
        self, model: str, layers: Sequence[Sequence[Product]], outputs: Sequence[Product], ids: Tensor | None
    ) -> None:
        """`layers` and `outputs` by head."""
        self.model = model
        self.ids = ids
        self._heads = list(zip(layers, outputs, strict=True))

    def __len__(self) -> int:
        return len(self._heads)

    def __call__(self, states: Tensor) -> Tensor:
        """What the target's final norm gave, [n, H] → logits [n, heads, columns]."""
        return torch.stack([output(residual(states, layers)) for layers, output in self._heads], 1)


def is_medusa(checkpoint: Checkpoint) -> bool:
    """By the names of its tensors, or by its configuration."""
    layers = (LAYER.fullmatch(normalised_name(name)) for name in checkpoint.names)
    return "medusa_num_heads" in checkpoint.config or any(layers)


def load_medusa(checkpoint: Checkpoint, lent: TargetWeights) -> MedusaHeads:
    """Raises `CheckpointError` if these are no Medusa heads for this target."""
    weights = HeadWeights(checkpoint, lent, normalised_name)
    found = [match for match in map(LAYER.fullmatch, map(normalised_name, checkpoint.names)) if match]
    if not found:
        raise CheckpointError(
            f"{checkpoint} has no Medusa heads, no tensor like 0.0.linear.weight: "
            "choose a folder with medusa_lm_head.pt or medusa_lm_head.safetensors"
        )
    heads = 1 + max(int(match[1]) for match in found)
    stored = 1 + max(int(match[2]) for match in found)
    depth = _depth(checkpoint, stored)
    layers = [[_layer(weights, head, min(n, stored - 1), lent) for n in range(depth)] for head in range(heads)]
    outputs, ids = _outputs(checkpoint, weights, heads, lent)
    return MedusaHeads(checkpoint.folder.name, layers, outputs, ids)


def normalised_name(name: str) -> str:
    """A tensor's name in vLLM's conversion."""
    if layer := ORIGINAL_LAYER.fullmatch(name):
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if output := ORIGINAL_OUTPUT.fullmatch(name):
        return f"lm_heads.{output[1]}.weight"
    return name.removeprefix("medusa_heads.")


def _depth(checkpoint: Checkpoint, stored: int) -> int:
    """Layers per head. The original repeats one layer under several names, of which a file may keep only the first."""
    outputs = [match for match in map(ORIGINAL_OUTPUT.fullmatch, checkpoint.names) if match]
    if outputs:
        return int(outputs[0][2])
    return max(stored, int(checkpoint.config.get("medusa_num_layers", 1)))


def _layer(weights: HeadWeights, head: int, layer: int, lent: TargetWeights) -> Linear:
    name, h = f"blocks.{head}.layers.{layer}", lent.hidden_size
    weight, bias = weights.take(f"{name}.weight", h, h), weights.take_optional(f"{name}.bias", h)
    return Linear(weight, biases=() if bias is None else [bias])


def _outputs(
    checkpoint: Checkpoint, weights: HeadWeights, heads: int, lent: TargetWeights
) -> tuple[Sequence[Product], Tensor | None]:
    """Each head's output, and the tokens of their columns. What is the target's own is not read again."""
    ids = _token_map(checkpoint, weights, lent)
    own = any(name.startswith("lm_heads.") for name in map(normalised_name, checkpoint.names))
    if own and not checkpoint.config.get("original_lm_head"):
        rows = weights.shape("lm_heads.0.weight")[0]
        _check_rows(checkpoint, rows, ids, lent)
        matrices = (weights.take(f"lm_heads.{head}.weight", rows, lent.hidden_size) for head in range(heads))
        outputs = [Linear(_selected_rows(matrix, ids)) for matrix in matrices]
        return outputs, _columns(rows, lent) if ids is None else ids
    if ids is None:
        return [lent.output] * heads, None
    tokens = ids
    return [lambda states: lent.output(states).index_select(-1, tokens)] * heads, tokens


def _check_rows(checkpoint: Checkpoint, rows: int, ids: Tensor | None, lent: TargetWeights) -> None:
    """With a token map, a head's matrix has a row for each token that it names, or for all of the target's."""
    if rows > lent.vocabulary_size:
        raise CheckpointError(
            f"{checkpoint} guesses {rows} tokens, {lent.name} has {lent.vocabulary_size}: "
            "choose heads that were trained for this model"
        )
    if ids is not None and rows not in (len(ids), lent.vocabulary_size):
        raise CheckpointError(
            f"{checkpoint} guesses {rows} tokens, and its token_map names {len(ids)}: "
            "choose one where each has a row, or where all of the model's have"
        )


def _token_map(checkpoint: Checkpoint, weights: HeadWeights, lent: TargetWeights) -> Tensor | None:
    """vLLM's `token_map`: the tokens that the heads guess, if these are not all. Raises `CheckpointError`."""
    if "token_map" not in weights:
        return None
    ids = weights.take("token_map", *weights.shape("token_map")).to(torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < lent.vocabulary_size:
        raise CheckpointError(
            f"token_map in {checkpoint} names token {int(ids.max())}, {lent.name} has {lent.vocabulary_size}: "
            "choose heads that were trained for this model"
        )
    return ids


def _selected_rows(matrix: Tensor, ids: Tensor | None) -> Tensor:
    """Rows of the tokens that are guessed, where there are others."""
    return matrix if ids is None or len(matrix) == len(ids) else matrix.index_select(0, ids)


def _columns(columns: int, lent: TargetWeights) -> Tensor | None:
    """Targets are padded to more tokens than heads may know."""
    return None if columns == lent.vocabulary_size else torch.arange(columns, device=lent.device)
