"""EAGLE-3 heads (Li et al. 2025): a decoder layer over the target's hidden states of three layers.

    g      = fc([states of three layers]) for a token that the target has computed, else the x of the parent's row
    x      = g + attention([norm(embedding of token i + 1); norm(g)])
    x      = x + mlp(norm(x))
    logits = norm(x) times the head's own output matrix, over a vocabulary of its own

The tensors and the configuration tell which published variant a checkpoint is (`Eagle3Network`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.config.engine_config import Quantization
from paceline.drafting.best_first import RowOutput
from paceline.drafting.heads.head_config import head_config, require_hidden_size, require_layers
from paceline.drafting.heads.head_network import build_head_speculator
from paceline.drafting.heads.head_weights import HeadWeights, normalised_name
from paceline.drafting.heads.llama_head import LlamaHead, llama_layers
from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Speculator
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.layer_weights import StateFusion
from paceline.model.layers import Linear, RMSNorm
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights

RENAMES = ((r"^model\.", ""), (r"^midlayer\.", "layers.0."))
"""To one name for what conversions name differently."""
AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""SGLang's former names of `fc_norm.0` to `fc_norm.2`."""


class Eagle3Network(LlamaHead):
    """Features are outputs of `fc` or of the last layer, [n, h]."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetWeights,
        slots: int,
        rope_theta: float | None = None,
        layers: Sequence[int] | None = None,
        norm_output: bool | None = None,
        quantization: Quantization | None = None,
        method: str = "eagle3",
    ) -> None:
        """`layers` (of the target, as `hidden_state_layers`) and `norm_output`: the user's choice; it overrides
        config.json. `quantization`: see `LlamaHead`.

        Raises `CheckpointError` if the checkpoint is not an EAGLE-3 head for this target.
        """
        config = head_config(checkpoint, rope_theta)
        weights = HeadWeights(checkpoint, target, RENAMES)
        keys = checkpoint.config
        layers = _target_layers(checkpoint, target, layers)
        h, eps = int(config.hidden_size), float(config.rms_norm_eps)
        require_hidden_size(checkpoint, target, int(keys.get("target_hidden_size") or h))
        ids = weights.target_ids()
        fusion = StateFusion(
            token_norm=weights.take("layers.0.input_layernorm.weight", h),
            state_norm=weights.take("layers.0.hidden_norm.weight", h),
            # The library always writes this key. Where its files lack it, vLLM reads it as true.
            norms_residual=bool(keys.get("norm_before_residual", keys.get("speculators_model_type") == "eagle3")),
        )
        super().__init__(
            target,
            method,
            checkpoint.folder.name,
            slots,
            llama_layers(weights, config, 2 * h),
            config,
            fusion=fusion,
            embedding=weights.embedding(h),
            norm=weights.take("norm.weight", h),
            output=weights.output(h, ids),
            hidden_state_layers=layers,
            ids=ids,
            feeds_back_normed=bool(keys.get("norm_output")) if norm_output is None else norm_output,
            quantization=quantization,
        )
        self._scale = float(keys.get("logit_scale", 1.0))
        self._encoder = _StateEncoder(checkpoint, weights, len(layers), target.hidden_size, h, eps)
        weights.refuse_unused("EAGLE-3 heads", but=("t2d", "mask_hidden"))  # `peagle` reads mask_hidden

    def encode(self, states: Tensor) -> Tensor:
        return self._encoder(self.to_device(states))

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        output = super().run(rows, features, wanted)
        return output if self._scale == 1.0 else RowOutput(output.logits * self._scale, output.features)

    def logits(self, final: Tensor) -> Tensor:
        logits = super().logits(final)
        return logits if self._scale == 1.0 else logits * self._scale


class _StateEncoder:
    """Hidden states [n, layers, H] as one vector [n, h]: `fc`, after one norm of all states or one norm of each."""

    def __init__(
        self, checkpoint: Checkpoint, weights: HeadWeights, layers: int, width: int, h: int, eps: float
    ) -> None:
        """`width`: the target's hidden size. Raises `CheckpointError` if a tensor is missing or does not fit."""
        joint = weights.take_optional("input_norm.weight", layers * width)
        self._joint_norm = None if joint is None else RMSNorm(joint, eps)
        candidates = [f"fc_norm.{i}.weight" for i in range(layers)], [f"{name}.weight" for name in AUX_NORMS[:layers]]
        names = next((names for names in candidates if any(name in weights for name in names)), [])
        self._norms = [RMSNorm(weights.take(name, width), eps) for name in names]
        for key, found in (("norm_before_fc", joint is not None), ("fc_norm", bool(names))):
            if checkpoint.config.get(key) and not found:
                raise CheckpointError(f"{checkpoint} has {key} and no tensor of such a norm: it is incomplete")
        has_fc = "fc.weight" in weights or layers > 1 or width != h
        self._fc = Linear(weights.take("fc.weight", h, layers * width)) if has_fc else None

    def __call__(self, states: Tensor) -> Tensor:
        if self._norms:
            states = torch.stack([norm(states[:, i]) for i, norm in enumerate(self._norms)], 1)
        joined = states.flatten(1)
        joined = joined if self._joint_norm is None else self._joint_norm(joined)
        return joined if self._fc is None else self._fc(joined)


def matches(checkpoint: Checkpoint) -> bool:
    """By the tensors: a norm of the features in the first layer, or that layer's original name."""
    return any(
        normalised_name(name, RENAMES) == "layers.0.hidden_norm.weight" or "midlayer." in name
        for name in checkpoint.names
    )


def _target_layers(checkpoint: Checkpoint, target: TargetWeights, wanted: Sequence[int] | None) -> Sequence[int]:
    """The layers whose hidden states the head needs: the user's choice, else the configuration's."""
    layers = list(wanted) if wanted else _configured_layers(checkpoint, target)
    if layers != [target.final_layer]:
        advice = "name others with eagle_aux_hidden_state_layer_ids, or choose a head for this model"
        require_layers(checkpoint, target, layers, advice)
    return tuple(layers)


def _configured_layers(checkpoint: Checkpoint, target: TargetWeights) -> list[int]:
    """SGLang's nested field counts outputs of layers, vLLM's field of the same name inputs."""
    config = checkpoint.config
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    try:
        if nested.get("use_aux_hidden_state", True) is False:
            return [target.final_layer]
        outputs, inputs = nested.get(key), config.get(key)
        if outputs:
            return [int(n) + 1 for n in outputs]
        if inputs or nested.get("layer_ids"):
            return sorted({int(n) for n in inputs or nested["layer_ids"]})
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json in {checkpoint} has an invalid eagle_config or {key}: {error}") from error
    return [2, target.layers // 2, target.layers - 3]


def build(inputs: MethodInputs) -> Speculator:
    return build_head_speculator(inputs, load_eagle3(inputs))


def load_eagle3(inputs: MethodInputs, method: str = "eagle3") -> Eagle3Network:
    config, engine = inputs.config, inputs.engine
    layers, norm_output = config.eagle_aux_hidden_state_layer_ids, config.norm_output
    return Eagle3Network(
        inputs.checkpoint,
        inputs.target,
        engine.slot_count,
        config.rope_theta,
        layers,
        norm_output,
        engine.quantization,
        method,
    )


def target_layers(inputs: MethodInputs) -> Sequence[int]:
    return _target_layers(inputs.checkpoint, inputs.target, inputs.config.eagle_aux_hidden_state_layer_ids)
