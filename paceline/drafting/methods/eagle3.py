"""EAGLE-3 heads (Li et al. 2025): a decoder layer over the target's states of three depths.

    g      = fc([states of three layers]) in rows whose token the target has computed, else the x of the row before
    x      = g + attention([norm(embedding of token i + 1); norm(g)])
    x      = x + mlp(norm(x))
    logits = the head's own output matrix, over a vocabulary of its own choice, of norm(x)

Which of the variants that have been published a checkpoint is, its tensors and configuration say (`Eagle3Config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.drafting.heads.head_config import head_config
from paceline.drafting.heads.head_layers import HeadLayers, llama_layers
from paceline.drafting.heads.head_network import HeadOutput
from paceline.drafting.heads.head_vocabulary import draft_to_target_ids, head_embedding, head_output
from paceline.drafting.heads.head_weights import HeadWeights
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layer_weights import StateFusion
from paceline.model.layers import Linear, RMSNorm
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights

AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""What SGLang called `fc_norm.0` to `fc_norm.2`."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What distinguishes one checkpoint from another. `layers`: of the target, as `hidden_state_layers`."""

    layers: Sequence[int]
    norm_before_residual: bool
    norm_output: bool
    logit_scale: float

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        lent: TargetWeights,
        layers: Sequence[int] | None = None,
        norm_output: bool | None = None,
    ) -> Eagle3Config:
        """`layers`, `norm_output`: what the user says instead of the configuration. Raises `CheckpointError`."""
        said = checkpoint.config
        # Without the key vLLM reads the library's files as if it were true; the library itself always writes it.
        residual = said.get("speculators_model_type") == "eagle3"
        return cls(
            _layers(checkpoint, lent, layers),
            bool(said.get("norm_before_residual", residual)),
            bool(said.get("norm_output")) if norm_output is None else norm_output,
            float(said.get("logit_scale", 1.0)),
        )


class Eagle3Network:
    """A `HeadNetwork` over keys and values of its own."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        lent: TargetWeights,
        slots: int,
        rope_theta: float | None = None,
        layers: Sequence[int] | None = None,
        norm_output: bool | None = None,
    ) -> None:
        """`layers`, `norm_output`: see `Eagle3Config`. Raises `CheckpointError` if it is no such head for this
        target."""
        config = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, lent, normalised_name)
        kind = Eagle3Config.of(checkpoint, lent, layers, norm_output)
        h, eps = int(config.hidden_size), float(config.rms_norm_eps)
        _refuse_other_sizes(checkpoint, lent, h)
        self.model = checkpoint.folder.name
        self.hidden_state_layers: Sequence[int] = kind.layers
        self.slots, self.position_limit = slots, lent.max_model_len
        self.ids = draft_to_target_ids(weights, checkpoint, lent)
        self._scale = kind.logit_scale
        self._encode = _StateEncoder(weights, len(kind.layers), lent.hidden_size, h, eps)
        fusion = StateFusion(
            token_norm=weights.take("layers.0.input_layernorm.weight", h),
            state_norm=weights.take("layers.0.hidden_norm.weight", h),
            norms_residual=kind.norm_before_residual,
        )
        self._layers = HeadLayers(
            llama_layers(weights, config, 2 * h),
            config,
            slots,
            lent,
            fusion=fusion,
            embedding=head_embedding(weights, lent, h),
            norm=weights.take("norm.weight", h),
            output=head_output(weights, lent, h, self.ids),
            feeds_back_normed=kind.norm_output,
        )
        weights.refuse_unused("EAGLE-3 heads", but=("t2d", "mask_hidden"))  # P-EAGLE's, see there

    def encode(self, states: Tensor) -> Tensor:
        return self._encode(self._layers.to_device(states))

    def run(self, rows: Sequence[Row], features: Tensor, wanted: Sequence[int]) -> HeadOutput:
        output = self._layers(rows, features, wanted)
        return output if self._scale == 1.0 else replace(output, logits=output.logits * self._scale)


class _StateEncoder:
    """States of some layers as one vector: `fc`, with a norm before it or one for each layer, if there are any."""

    def __init__(self, weights: HeadWeights, layers: int, width: int, h: int, eps: float) -> None:
        whole = weights.take_optional("input_norm.weight", layers * width)
        self._whole = None if whole is None else RMSNorm(whole, eps)
        named = [f"fc_norm.{i}.weight" for i in range(layers)], [f"{name}.weight" for name in AUX_NORMS[:layers]]
        names = next((names for names in named if any(name in weights for name in names)), [])
        self._each = [RMSNorm(weights.take(name, width), eps) for name in names]
        has_fc = "fc.weight" in weights or layers > 1 or width != h
        self._fc = Linear(weights.take("fc.weight", h, layers * width)) if has_fc else None

    def __call__(self, states: Tensor) -> Tensor:
        if self._each:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self._each)], 1)
        joined = states.flatten(1)
        joined = joined if self._whole is None else self._whole(joined)
        return joined if self._fc is None else self._fc(joined)


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """By its tensors: a norm for what its first layer is fed with beside tokens, or that layer's original name."""
    return any(
        normalised_name(name) == "layers.0.hidden_norm.weight" or "midlayer." in name for name in checkpoint.names
    )


def normalised_name(name: str) -> str:
    """The name of a tensor without what conversions put before it."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _layers(checkpoint: Checkpoint, lent: TargetWeights, wanted: Sequence[int] | None) -> Sequence[int]:
    """Which states of the target a head is fed with: what is wanted, or what its configuration says."""
    layers = list(wanted) if wanted else _configured_layers(checkpoint, lent)
    if layers != [lent.final_layer] and any(not 0 <= layer <= lent.layers for layer in layers):
        raise CheckpointError(
            f"{checkpoint} wants the states of layers {layers}, {lent.name} has {lent.layers}: "
            "name others with eagle_aux_hidden_state_layer_ids, or choose a head for this model"
        )
    return tuple(layers)


def _configured_layers(checkpoint: Checkpoint, lent: TargetWeights) -> list[int]:
    """Two fields of the same name count layers differently."""
    said = checkpoint.config
    nested: Mapping[str, Any] = said.get("eagle_config") or {}
    try:
        if nested.get("use_aux_hidden_state", True) is False:
            return [lent.final_layer]
        outputs, entering = nested.get("eagle_aux_hidden_state_layer_ids"), said.get("eagle_aux_hidden_state_layer_ids")
        if outputs:
            return [int(n) + 1 for n in outputs]
        if entering or nested.get("layer_ids"):
            return sorted({int(n) for n in entering or nested["layer_ids"]})
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json in {checkpoint} has an eagle_config or eagle_aux_hidden_state_layer_ids that is none: {error}"
        ) from error
    return [2, lent.layers // 2, lent.layers - 3]


def _refuse_other_sizes(checkpoint: Checkpoint, lent: TargetWeights, h: int) -> None:
    wanted = int(checkpoint.config.get("target_hidden_size") or h)
    if wanted != lent.hidden_size:
        raise CheckpointError(
            f"{checkpoint} is a head for hidden size {wanted}, {lent.name} has {lent.hidden_size}: choose one for it"
        )
