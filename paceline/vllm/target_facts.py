"""What drafts need to know of the model that vLLM serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.model_names import ModelNotFoundError
from paceline.text.tokenizer import vocabulary_fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """`vocabulary_size`: ids below it can be drawn. `is_first_rank`: of the tensor-parallel ranks."""

    fingerprint: str
    vocabulary_size: int
    max_model_len: int
    is_first_rank: bool


def read_target_facts(vllm_config: VllmConfig) -> TargetFacts:
    """Raises `ModelNotFoundError` if the model has no tokenizer.json."""
    from vllm.distributed import get_tensor_model_parallel_rank

    model = vllm_config.model_config
    return TargetFacts(
        vocabulary_fingerprint(str(tokenizer_folder(model))),
        model.get_vocab_size(),
        model.max_model_len,
        get_tensor_model_parallel_rank() == 0,
    )


def tokenizer_folder(model: ModelConfig) -> Path:
    """Where the tokenizer's files are: the model's own folder, or the cache of the model hub.

    Raises `ModelNotFoundError` if the model has no tokenizer.json.
    """
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(model.tokenizer, "tokenizer.json", revision=model.tokenizer_revision)
    except OSError as error:
        raise ModelNotFoundError(f"{model.tokenizer} has no tokenizer.json: {error}") from error
    return Path(str(found)).parent
