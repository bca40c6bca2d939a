"""A loaded model: rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.config.engine_config import KVCacheDtype
from paceline.model.attention import KVCache
from paceline.model.rows import BLOCK_SIZE, Row
from paceline.model.states.state_cache import StateCache
from paceline.model.target_weights import TargetWeights


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """`logits` [wanted rows, vocabulary], float32 or the model's dtype; `hidden` [rows, layers, hidden size] in the
    model's dtype, if the caller asked for layers."""

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
    """One line that names everything the numbers depend on, apart from the weights."""
    asynchronous: bool
    """Whether `run` returns before the pass is computed, as on an accelerator. Who reads its output waits for it."""

    @property
    def states(self) -> StateCache | None:
        """Of layers that keep states by request; None: no layer does."""

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """One forward pass over `rows`. Returns the logits of the rows indexed by `wanted`, in that order, and the
        outputs of `hidden_layers` for all rows."""

    def target_weights(self) -> TargetWeights:
        """What heads in this process draft with. Raises ValueError if this model has no such weights."""


@dataclass(kw_only=True)
class ModelInfo:
    """The attributes of a `Model` with a checkpoint."""

    name: str
    vocabulary_size: int
    max_model_len: int
    layers: int
    slots: int
    eos_token_ids: Sequence[int]
    fingerprint: str
    folder: Path
    rows_invariant: bool = False
    numerics: str = ""
    kv_cache_dtype: KVCacheDtype = "auto"
    asynchronous: bool = False
    states: StateCache | None = None
    requests: int = 64
    """That run at once."""
    rows: int = 256
    """Of a pass."""
    snapshots: int = 0
    """Of states."""
    snapshot_interval: int = BLOCK_SIZE
    """Tokens between them."""


class TransformersModel(ModelInfo):
    """A transformers causal language model over its own KV cache. Its slots are 1 to `slots`; slot 0 is spare.

    `paceline.model.decoder` has the two ways to run one.
    """

    native = False
    """Whether passes are native code."""
    has_native_attention = False
    """Also of states, if it keeps some."""
    has_native_products = False
    leaves_little_to_torch = False
    """Whether torch multiplies hardly anything, and needs no threads."""

    def __init__(self, info: ModelInfo, cache: KVCache, config: Any) -> None:
        """`config`: transformers' configuration of the text model, or a GGUF file's."""
        super().__init__(**vars(info))
        self.asynchronous = cache.device.type != "cpu"
        self.cache = cache
        self._config = config

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def dtype(self) -> torch.dtype:
        return self.cache.dtype

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        """See `Model.run`."""
        raise NotImplementedError

    def embedding(self) -> Tensor:
        """The first layer's input for each token, [vocabulary, hidden size]."""
        raise NotImplementedError

    def output(self, final: Tensor) -> Tensor:
        """Logits [n, vocabulary] of outputs of the final norm, [n, hidden size]."""
        raise NotImplementedError

    def target_weights(self) -> TargetWeights:
        return TargetWeights(
            embedding=self.embedding,
            output=self.output,
            folder=self.folder,
            config=self._config,
            dtype=self.dtype,
            device=self.device,
            vocabulary_size=self.vocabulary_size,
            max_model_len=self.max_model_len,
            fingerprint=self.fingerprint,
        )
