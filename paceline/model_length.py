"""How many positions a model has, by its configuration alone: without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.model_names import configuration, is_fake_model, resolve_model

KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def model_length(model: str) -> int | None:
    """Of a model by name, with the positions that YaRN adds; None if its configuration does not say.

    Raises `ModelNotFoundError`.
    """
    if is_fake_model(model):
        return None
    whole = configuration(resolve_model(model))
    config = whole.get("text_config", whole)
    try:
        positions = next((int(config[key]) for key in KEYS if config.get(key)), 0)
        return with_yarn(config.get("rope_parameters") or config.get("rope_scaling") or {}, positions) or None
    except (AttributeError, TypeError, ValueError):  # the target says what is wrong
        return None


def with_yarn(rope: Mapping[str, Any], positions: int) -> int:
    """Positions of a model that has `positions` without scaling, where YaRN may add some, as vLLM counts them."""
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return positions
    scaled = float(rope.get("factor") or 0) * int(rope.get("original_max_position_embeddings") or positions)
    return max(positions, int(scaled))
