"""Drafting with Medusa heads (Cai et al. 2024): head i predicts the token i + 1 positions after the root.

    z = state;  z = z + silu(W z + b) for each layer;  logits = output(z)

All heads read one hidden state, and neither the root nor each other's draft tokens. So one pass gives the distributions
of all depths. Medusa verifies a fixed set of paths by the ranks of their tokens (`medusa_choices`), which was searched
on sample text; here the tree gets the most probable paths of the current distributions.

Every published format is read: the original's first version (`{head}.{layer}.linear.*`, and `{head}.{layers}.weight`
for the head's own output), its second (without: all heads use the target's output), a model merged with its heads (the
same names below `medusa_head.`), and vLLM's conversion (`blocks`, `lm_heads`, `token_map`). The tensors tell the number
of heads: published configurations say 2 where there are 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.drafting.block import Blocks, ContextSpans, DraftBlock, PathScorer, RequestedPasses
from paceline.drafting.heads.head_network import RootStateNetwork
from paceline.drafting.heads.head_weights import HeadWeights, normalised_name
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layers import Linear
from paceline.model.target_weights import TargetWeights

Projection = Callable[[Tensor], Tensor]

ORIGINAL_OUTPUT = r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.weight$"
RENAMES = (
    (r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3"),
    (ORIGINAL_OUTPUT, r"lm_heads.\1.weight"),
    (r"^medusa_heads\.", ""),
)
"""To the names of vLLM's conversion."""
LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


class MedusaHeads(RootStateNetwork):
    """All heads of one checkpoint."""

    scratch_slots = 0
    sees_paths = True
    scorer: PathScorer | None = None

    def __init__(
        self,
        target: TargetWeights,
        model: str,
        layers: Sequence[Sequence[Projection]],
        outputs: Sequence[Projection],
        ids: Tensor | None,
    ) -> None:
        """`layers` and `outputs` by head. `ids`: see `DraftNetwork`."""
        super().__init__(target, "medusa", model, ids)
        self.tokens_per_pass = len(outputs)
        self._heads = list(zip(layers, outputs, strict=True))

    def __call__(self, states: Tensor) -> Tensor:
        """Outputs of the target's final norm [n, H] → logits [n, heads, columns]."""
        logits = []
        for layers, output in self._heads:
            z = states
            for layer in layers:
                z = z + F.silu(layer(z))
            logits.append(output(z))
        return torch.stack(logits, 1)

    def run(self, context: ContextSpans, requested: RequestedPasses, free: Sequence[int]) -> Sequence[DraftBlock]:
        return list(map(DraftBlock, self(self.root_states([request for request, _ in requested]))))


def build(inputs: MethodInputs) -> Speculator:
    return NetworkSpeculator(Blocks(load_medusa(inputs.checkpoint, inputs.target), inputs.limits))


def matches(checkpoint: Checkpoint) -> bool:
    """By the names of the tensors, or by the configuration."""
    layers = (LAYER.fullmatch(normalised_name(name, RENAMES)) for name in checkpoint.names)
    return "medusa_num_heads" in checkpoint.config or any(layers)


def load_medusa(checkpoint: Checkpoint, target: TargetWeights) -> MedusaHeads:
    """Raises `CheckpointError` if the checkpoint has no Medusa heads for this target."""
    weights = HeadWeights(checkpoint, target, RENAMES)
    found = [match for match in map(LAYER.fullmatch, weights.names) if match]
    if not found:
        raise CheckpointError(
            f"{checkpoint} has no Medusa heads, no tensor like 0.0.linear.weight: "
            "choose a folder with medusa_lm_head.pt or medusa_lm_head.safetensors"
        )
    heads = 1 + max(int(match[1]) for match in found)
    stored = 1 + max(int(match[2]) for match in found)
    depth = _depth(checkpoint, stored)
    layers = [[_layer(weights, head, min(n, stored - 1), target) for n in range(depth)] for head in range(heads)]
    outputs, ids = _outputs(checkpoint, weights, heads, target)
    return MedusaHeads(target, checkpoint.folder.name, layers, outputs, ids)


def _depth(checkpoint: Checkpoint, stored: int) -> int:
    """Layers per head. The original repeats one layer under several names, and a file may keep only the first."""
    outputs = [match for match in map(re.compile(ORIGINAL_OUTPUT).match, checkpoint.names) if match]
    if outputs:
        return int(outputs[0][2])
    return max(stored, int(checkpoint.config.get("medusa_num_layers", 1)))


def _layer(weights: HeadWeights, head: int, layer: int, target: TargetWeights) -> Linear:
    name, h = f"blocks.{head}.layers.{layer}", target.hidden_size
    return Linear.of_parts((weights.take(f"{name}.weight", h, h), weights.take_optional(f"{name}.bias", h)))


def _outputs(
    checkpoint: Checkpoint, weights: HeadWeights, heads: int, target: TargetWeights
) -> tuple[Sequence[Projection], Tensor | None]:
    """The output of each head, and `ids` of their columns. A copy of the target's matrix is not read."""
    ids = _token_map(checkpoint, weights, target)
    has_own = any(name.startswith("lm_heads.") for name in weights.names)
    if has_own and not checkpoint.config.get("original_lm_head"):
        return _own_outputs(checkpoint, weights, heads, ids, target)
    if ids is None:
        return [target.output] * heads, None
    tokens = ids
    return [lambda states: target.output(states).index_select(-1, tokens)] * heads, tokens


def _own_outputs(
    checkpoint: Checkpoint, weights: HeadWeights, heads: int, ids: Tensor | None, target: TargetWeights
) -> tuple[Sequence[Projection], Tensor | None]:
    """With a token map, a head's matrix has a row for each token of the map, or for each of the target's tokens."""
    rows, size = weights.shape("lm_heads.0.weight")[0], target.vocabulary_size
    if rows > size:
        raise CheckpointError(
            f"{checkpoint} guesses {rows} tokens, {target.name} has {size}: "
            "choose heads that were trained for this model"
        )
    if ids is not None and rows not in (len(ids), size):
        raise CheckpointError(
            f"{checkpoint} guesses {rows} tokens, and its token_map names {len(ids)}: "
            "choose one where each has a row, or where all of the model's have"
        )
    matrices = (weights.take(f"lm_heads.{head}.weight", rows, target.hidden_size) for head in range(heads))
    if ids is not None and rows != len(ids):
        selected = ids
        matrices = (matrix.index_select(0, selected) for matrix in matrices)
    if ids is None and rows != size:  # a padded target has more tokens than the heads know
        ids = torch.arange(rows, device=target.device)
    return [Linear(matrix) for matrix in matrices], ids


def _token_map(checkpoint: Checkpoint, weights: HeadWeights, target: TargetWeights) -> Tensor | None:
    """vLLM's `token_map`: the tokens that the heads predict; None: all. Raises `CheckpointError`."""
    if "token_map" not in weights:
        return None
    ids = weights.take("token_map", *weights.shape("token_map")).to(torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocabulary_size:
        raise CheckpointError(
            f"token_map in {checkpoint} names token {int(ids.max())}, {target.name} has {target.vocabulary_size}: "
            "choose heads that were trained for this model"
        )
    return ids
