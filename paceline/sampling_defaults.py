"""Sampling parameters that a model's publisher names in generation_config.json: defaults, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.config.sampling_params import GenerationConfig
from paceline.config.validation_messages import first_error
from paceline.model_names import BrokenFileError, json_object, resolve_model

FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""Keys of generation_config.json that are read, and their fields of `SamplingParams`."""


def sampling_defaults(model: str, generation_config: GenerationConfig = "auto") -> Mapping[str, Any]:
    """Fields of `SamplingParams` that a model's file names, by the model's name; a GGUF file has none.

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
