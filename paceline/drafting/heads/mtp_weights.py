"""A multi-token-prediction layer's parameters from a checkpoint, which may store experts singly or be quantised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafting.heads.mtp_layouts import MtpLayout
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.quantization import spread_scales

FUSED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)$")
ALWAYS_FLOAT32 = "e_score_correction_bias"
"""Added to router scores by DeepSeek and GLM; transformers keeps it in float32."""
DEFAULT_FP8_BLOCK = (128, 128)
"""Rows and columns that share a scale, if the configuration does not name them."""


class MtpWeights:
    """Tensors under the layer's prefix. No other tensor is read."""

    def __init__(self, checkpoint: Checkpoint, layout: MtpLayout, layers: int) -> None:
        """`layers`: the number of the target's. Raises `CheckpointError` if the checkpoint has no such layer."""
        self._checkpoint, self._layout, self._layers = checkpoint, layout, layers
        prefix = layout.prefix.format(layers=layers)
        self._names = {name for name in checkpoint.names if name.startswith(prefix)}
        projection = layout.name("projection.weight", layers)
        if projection not in self._names:
            raise CheckpointError(
                f"{checkpoint} has no multi-token-prediction layer: looked for {projection}; "
                "download the whole model, or choose another method"
            )

    @property
    def sparse(self) -> bool:
        """Whether the layer has experts."""
        return any(".mlp.experts." in name for name in self._names)

    def of(self, layer: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Values of `layer`'s parameters. Raises `CheckpointError` if one is missing or has another shape."""
        parameters = {}
        for part, empty in layer.state_dict().items():
            wanted = torch.float32 if part.endswith(ALWAYS_FLOAT32) else dtype
            parameters[part] = self._parameter(part, tuple(empty.shape), wanted).to(device)
        return parameters

    def _parameter(self, part: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        name = self._layout.name(part, self._layers)
        fused = FUSED_EXPERTS.match(name)
        if fused and name not in self._names:
            return self._experts(fused[1], fused[2], shape, dtype)
        return self._tensor(name, shape).to(dtype)

    def _experts(self, prefix: str, projection: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[experts, out, in] from tensors [out, in] of each expert; its gate and up projections are stacked."""
        parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        each = (shape[1] // len(parts), shape[2])
        experts = torch.empty(*shape, dtype=dtype)  # filled expert by expert, to keep one copy in memory
        for expert in range(shape[0]):
            experts[expert] = torch.cat([self._tensor(f"{prefix}{expert}.{part}.weight", each) for part in parts])
        return experts

    def _tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self._names:
            raise CheckpointError(
                f"{self._checkpoint} lacks {name} of its multi-token-prediction layer: download it again"
            )
        if (found := self._checkpoint.shape(name)) != tuple(shape):
            raise CheckpointError(
                f"{name} in {self._checkpoint} has the shape {list(found)}, where the target's configuration "
                f"asks for {list(shape)}: choose the layer of this target"
            )
        tensor = self._checkpoint.tensor(name)
        scale = f"{name}_scale_inv"
        return self._scaled(tensor, self._checkpoint.tensor(scale)) if scale in self._names else tensor

    def _scaled(self, weight: Tensor, scale: Tensor) -> Tensor:
        """DeepSeek's fp8 weights [out, in] times one scale per block → float32."""
        quantisation: Mapping[str, Any] = self._checkpoint.config.get("quantization_config") or {}
        block = quantisation.get("weight_block_size") or DEFAULT_FP8_BLOCK
        return weight.float() * spread_scales(scale.float(), weight.shape, block)
