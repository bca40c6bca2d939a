"""Llama layers by native code from the packed weights of a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from paceline.model.attention import Heads, KVCache
from paceline.model.gguf_model import EMBEDDING, HEAD, HEAD_UNIT, MATRICES, NORMS
from paceline.model.layer_weights import LayerWeights, QuantizedWeight, RotaryTables, Weight
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.native.native_product import dequantize
from paceline.model.rows import Row

NORM = "model.norm.weight"


class PackedWeights(ABC):
    """The weights of a model with Llama layers, under transformers' names, read when they are asked for."""

    names: Collection[str]

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of matrices that are not quantised."""
        self.dtype = dtype

    @abstractmethod
    def matrix(self, name: str) -> Weight:
        """Quantised, or in `dtype`."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Not quantised, in `dtype`."""

    def vector(self, name: str) -> Tensor | None:
        """A norm or a bias, float32; None if the model has none."""
        return self.tensor(name, torch.float32) if name in self.names else None

    def layer(self, n: int, heads: Heads, window: int = 0) -> LayerWeights[Weight]:
        """Of layer `n`, which sees `window` positions, or all."""
        layer = f"model.layers.{n}"
        fields: dict[str, Any] = {field: self.matrix(f"{layer}.{name}.weight") for field, name in MATRICES.items()}
        fields |= {f"{field}_bias": self.vector(f"{layer}.{name}.bias") for field, name in MATRICES.items()}
        fields |= {field: self.vector(f"{layer}.{name}.weight") for field, name in NORMS.items()}
        if heads.head_size % HEAD_UNIT and isinstance(fields["output"], QuantizedWeight):
            fields["output"] = dequantize(fields["output"]).to(self.dtype)
        return LayerWeights(**fields, window=window)


class PackedLayers(Sequence[LayerWeights[Weight]]):
    """A model's layers, each read when it is asked for, and not kept."""

    def __init__(self, weights: PackedWeights, heads: Heads, windows: Sequence[int]) -> None:
        """`windows`: of each layer, 0 for one that sees all positions."""
        self._weights, self._heads, self._windows = weights, heads, windows

    def __len__(self) -> int:
        return len(self._windows)

    @overload
    def __getitem__(self, n: int) -> LayerWeights[Weight]: ...
    @overload
    def __getitem__(self, n: slice) -> Sequence[LayerWeights[Weight]]: ...
    def __getitem__(self, n: int | slice) -> LayerWeights[Weight] | Sequence[LayerWeights[Weight]]:
        if isinstance(n, slice):
            return PackedLayers(self._weights, self._heads, self._windows[n])
        return self._weights.layer(range(len(self))[n], self._heads, self._windows[n])


@dataclass(frozen=True, slots=True)
class PackedNetwork:
    """What a network is made of, apart from its weights."""

    rotary: RotaryTables
    eps: float
    scale: float
    """Of scores."""
    windows: Sequence[int]
    """Positions that each layer sees; 0: all."""
    layer_packed: Callable[[], None] = lambda: None
    """Called when a layer's weights have been copied."""


class PackedModel(TransformersModel):
    """Llama layers by native code."""

    native = has_native_attention = True

    def __init__(self, info: ModelInfo, config: Any, weights: PackedWeights, network: PackedNetwork) -> None:
        """`config`: of the model, as transformers has it. Raises what reading weights raises, and
        `NativeUnavailableError`."""
        heads = Heads.of(config)
        cache = KVCache(info.layers, info.slots, heads, weights.dtype, torch.device("cpu"), head_width(heads))
        self._embedding = weights.matrix(EMBEDDING)
        self._network = NativeNetwork(
            PackedLayers(weights, heads, network.windows),
            heads,
            cache,
            network.rotary,
            hidden=config.hidden_size,
            eps=network.eps,
            scale=network.scale,
            embedding=self._embedding,
            norm=weights.vector(NORM),
            head=weights.matrix(HEAD) if HEAD in weights.names else self._embedding,
            layer_packed=network.layer_packed,
        )
        network.layer_packed()
        super().__init__(info, cache, config)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        return ModelOutput(*self._network.run(rows, wanted, hidden_layers))

    def embedding(self) -> Tensor:
        weight = self._embedding
        return weight if isinstance(weight, Tensor) else dequantize(weight).to(self.dtype)

    def output(self, final: Tensor) -> Tensor:
        return self._network.output(final)
