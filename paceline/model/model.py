"""A loaded model: rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """`logits` [wanted rows, vocabulary], float32 or of the model's dtype; `hidden`, if asked for, [rows, layers,
    hidden size] of the model's dtype."""

    logits: Tensor
    hidden: Tensor | None = None


class Model(Protocol):
    """What the engine and the draft need of a model."""

    name: str
    vocabulary_size: int
    max_model_len: int
    layers: int
    """Hidden states are counted from 0, the embedding, to `layers` + 1, the final norm's output."""
    slots: int
    eos_token_ids: Sequence[int]
    fingerprint: str
    rows_invariant: bool
    numerics: str
    """One line that names all that its numbers depend on, beside its weights."""

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """One forward pass over `rows`. Logits are those of the rows indexed by `wanted`, in that order."""

    def target_weights(self) -> TargetWeights:
        """What heads in this process draft with. Raises ValueError if there is nothing to lend."""


class TransformersModel:
    """A transformers causal language model over its own KV cache. Its slots are 1 to `slots`; 0 is spare."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        *,
        vocabulary_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        fingerprint: str,
        numerics: str,
        folder: Path,
        config: Any,
    ) -> None:
        self.name = name
        self.vocabulary_size = vocabulary_size
        self.max_model_len = max_model_len
        self.layers = int(config.num_hidden_layers)
        self.slots = decoder.cache.slots - 1
        self.eos_token_ids: Sequence[int] = tuple(eos_token_ids)
        self.fingerprint = fingerprint
        self.numerics = numerics
        self.rows_invariant = False
        self._decoder, self._cache = decoder, decoder.cache
        self._folder, self._config = folder, config

    @property
    def device(self) -> torch.device:
        return self._cache.device

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.dtype

    @property
    def native(self) -> bool:
        """Whether its passes are native code. Then torch needs no threads of its own: what is left to it is small."""
        return self._decoder.native

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        return ModelOutput(*self._decoder(rows, wanted, hidden_layers))

    def target_weights(self) -> TargetWeights:
        return TargetWeights(
            embedding=self._decoder.embedding,
            output=self._decoder.output,
            folder=self._folder,
            config=self._config,
            dtype=self._cache.dtype,
            device=self._cache.device,
            vocabulary_size=self.vocabulary_size,
            max_model_len=self.max_model_len,
            fingerprint=self.fingerprint,
        )
