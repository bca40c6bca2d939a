"""Rotary embeddings that do not depend on the other sequences of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.model_defaults import with_yarn

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds whose frequencies transformers chooses in every pass by the longest sequence: LongRoPE (Ding et al. 2024) and
dynamic NTK scaling."""
FIXED = "default"


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """`rope_parameters` of a configuration: one for all layers, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, Mapping)]


def positions_in(config: Any) -> int:
    """The number of positions, the ones that YaRN adds included; 0 if transformers' configuration has none."""
    positions = int(getattr(config, "max_position_embeddings", None) or 0)
    return max((with_yarn(rope, positions) for rope in rope_settings(config)), default=positions)


def check_rope(config: Any) -> None:
    """Raises ValueError for a kind that transformers does not know."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = (FIXED, *ROPE_INIT_FUNCTIONS)
    for rope in rope_settings(config):
        if (kind := rope.get("rope_type", FIXED)) not in known:
            raise ValueError(f"rope_type is {kind!r}, which is not known here: {', '.join(dict.fromkeys(known))} are")


def fix_rope_frequencies(network: nn.Module, max_model_len: int) -> None:
    """Choose such frequencies once, in place, as for a sequence of `max_model_len` tokens, as vLLM does for LongRoPE.

    Otherwise a short request's numbers would depend on the other requests, and on its current length.
    """
    for module in network.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in LENGTH_DEPENDENT_ROPE:
            _fix_frequencies(module, kinds, max_model_len)
            module.rope_type = FIXED  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind in LENGTH_DEPENDENT_ROPE:
                    _fix_frequencies(module, kind, max_model_len, layer_type)
            module.rope_type = {name: FIXED if kind in LENGTH_DEPENDENT_ROPE else kind for name, kind in kinds.items()}  # type: ignore[assignment]


def _fix_frequencies(module: Any, kind: str, max_model_len: int, layer_type: str | None = None) -> None:
    """`layer_type`: the kind of layer, where kinds have different frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    device: torch.device = getattr(module, f"{prefix}inv_freq").device
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=max_model_len, **options)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
