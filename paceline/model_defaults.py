"""What a model's files say about its requests, read without torch or transformers: their defaults, and their length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.config.sampling_params import GenerationConfig
from paceline.config.validation_messages import first_error
from paceline.model_names import BrokenFileError, configuration, is_fake_model, json_object, resolve_model

FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""Keys of generation_config.json that are read, and their fields of `SamplingParams`."""
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def sampling_defaults(model: str, generation_config: GenerationConfig = "auto") -> Mapping[str, Any]:
    """Fields of `SamplingParams` that generation_config.json of a model names, as in vLLM; a GGUF file has none.

    Raises `ModelNotFoundError`, and `BrokenFileError` for a file that is no JSON or has a value out of range.
    """
    path = Path(resolve_model(model)) / "generation_config.json"
    if generation_config == "none" or not path.is_file():
        return {}
    content = json_object(path)
    named = {field: content[key] for key, field in FIELDS.items() if content.get(key) is not None}
    if named.get("max_tokens") in (0, -1):  # no limit
        del named["max_tokens"]
    try:
        return SamplingParams.model_validate(named).model_dump(include=set(named))
    except ValidationError as error:
        raise BrokenFileError(f"{path}: {first_error(error).replace('max_tokens', 'max_new_tokens')}") from error


def model_length(model: str) -> int | None:
    """How many positions a model has, the ones that YaRN adds included; None if its configuration does not say.

    Raises `ModelNotFoundError`.
    """
    if is_fake_model(model):
        return None
    whole = configuration(resolve_model(model))
    config = whole.get("text_config", whole)
    try:
        positions = next((int(config[key]) for key in LENGTH_KEYS if config.get(key)), 0)
        return with_yarn(config.get("rope_parameters") or config.get("rope_scaling") or {}, positions) or None
    except (AttributeError, TypeError, ValueError):  # the target says what is wrong
        return None


def with_yarn(rope: Mapping[str, Any], positions: int) -> int:
    """Positions of a model that has `positions` without scaling, where YaRN may add some, as vLLM counts them."""
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return positions
    scaled = float(rope.get("factor") or 0) * int(rope.get("original_max_position_embeddings") or positions)
    return max(positions, int(scaled))
