"""Llama layers, and variants of them, by native code from packed weights: of a GGUF file or a folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.model.attention import Heads, KVCache
from paceline.model.layer_weights import (
    HEAD_NORMS,
    LLAMA,
    MATRICES,
    NORMS,
    LayerVariant,
    LayerWeights,
    QuantizedWeight,
    RotaryTables,
    Weight,
)
from paceline.model.loading import end_tokens, positions_of
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.native_library import dequantize
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.rows import Row
from paceline.text import vocabulary_fingerprint

STACKED: Mapping[str, Sequence[str]] = {
    "self_attn.qkv_proj": ("query", "key", "value"),
    "mlp.gate_up_proj": ("gate", "up"),
}
"""Matrices that some kinds have as rows of one, in this order."""
FOUR_NORMS: Mapping[str, str] = {
    **{"input_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm"},
    **{"inner_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    **HEAD_NORMS,
}
"""Of a layer that norms what it adds."""
HEAD_UNIT = 32
"""Heads whose size is a multiple of it have no padding in the cache, so quantised weights need none."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    def vector(self, name: str) -> Tensor | None:
        """A norm or a bias, float32; None if the model has none."""

    def layer(self, n: int, heads: Heads, network: PackedNetwork) -> LayerWeights[Weight]:
        """Of layer `n`."""
        layer = f"model.layers.{n}"
        fields: dict[str, Any] = self._matrices(layer, heads)
        fields |= {f"{field}_bias": self.vector(f"{layer}.{name}.bias") for field, name in MATRICES.items()}
        fields |= {field: self.vector(f"{layer}.{name}.weight") for field, name in network.norms.items()}
        if heads.head_size % HEAD_UNIT and isinstance(fields["output"], QuantizedWeight):
            fields["output"] = dequantize(fields["output"]).to(self.dtype)
        return LayerWeights(**fields, rotary=network.rotaries[n], window=network.windows[n])

    def _matrices(self, layer: str, heads: Heads) -> dict[str, Weight]:
        """Each a tensor of its own, or its rows of a stacked one."""
        keys = heads.kv_heads * heads.head_size
        sizes = {"query": keys * heads.queries_per_kv, "key": keys, "value": keys}
        matrices: dict[str, Weight] = {}
        for stack, fields in STACKED.items():
            if (name := f"{layer}.{stack}.weight") in self.names:
                whole, start = self.matrix(name), 0
                for field in fields:
                    end = start + sizes.get(field, len(whole) // len(fields))
                    matrices[field], start = whole[start:end], end
        single = {field: name for field, name in MATRICES.items() if field not in matrices}
        return matrices | {field: self.matrix(f"{layer}.{name}.weight") for field, name in single.items()}


class PackedLayers(Sequence[LayerWeights[Weight]]):
    """A model's layers, each read when it is asked for, and not kept."""

    def __init__(self, weights: PackedWeights, heads: Heads, network: PackedNetwork, count: int) -> None:
        self._weights, self._heads, self._network, self._layers = weights, heads, network, range(count)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, n: int) -> LayerWeights[Weight]:  # type: ignore[override] # nothing slices it
        return self._weights.layer(self._layers[n], self._heads, self._network)


@dataclass(frozen=True, slots=True)
class PackedNetwork:
    """What a network is made of, apart from its weights."""

    rotaries: Sequence[RotaryTables]
    """Of each layer."""
    eps: float
    scale: float
    """Of scores."""
    windows: Sequence[int]
    """Positions that each layer sees; 0: all."""
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    """Of a layer, and transformers' names for them."""
    variant: LayerVariant = LLAMA
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Limit of logits, by tanh."""
    layer_packed: Callable[[], None] = lambda: None
    """Called when a layer's weights have been copied."""


def packed_info(name: str, path: Path, config: Any, engine: EngineConfig) -> ModelInfo:
    """Of the model in a folder or a file. Raises ValueError if it has fewer positions than `engine` asks for, and what
    reading the vocabulary raises."""
    positions = positions_of(config, name, engine.max_model_len)
    return ModelInfo(
        name=name,
        vocabulary_size=int(config.vocab_size),
        max_model_len=engine.max_model_len or positions,
        layers=int(config.num_hidden_layers),
        slots=engine.slot_count,
        eos_token_ids=tuple(end_tokens(path, config)),
        fingerprint=vocabulary_fingerprint(str(path)),
        folder=path,
        rows_invariant=True,
        kv_cache_dtype=engine.kv_cache_dtype,
    )


class PackedModel(TransformersModel):
    """Llama layers by native code."""

    native = has_native_attention = True

    def __init__(self, info: ModelInfo, config: Any, weights: PackedWeights, network: PackedNetwork) -> None:
        """`config`: of the model, as transformers has it. Raises what reading weights raises, and
        `NativeUnavailableError`."""
        heads = Heads.of(config)
        cache = KVCache(
            *(info.layers, info.slots, heads, weights.dtype, torch.device("cpu"), head_width(heads)),
            info.kv_cache_dtype,
        )
        self._parts, self._embedding = network, weights.matrix(EMBEDDING)
        self._network = NativeNetwork(
            PackedLayers(weights, heads, network, info.layers),
            heads,
            cache,
            network.rotaries[0],
            hidden=config.hidden_size,
            eps=network.eps,
            scale=network.scale,
            embedding=self._embedding,
            norm=weights.vector(NORM),
            head=weights.matrix(HEAD) if HEAD in weights.names else self._embedding,
            variant=network.variant,
            layer_packed=network.layer_packed,
        )
        network.layer_packed()
        super().__init__(info, cache, config)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        logits, hidden = self._network.run(rows, wanted, hidden_layers)
        return ModelOutput(self._limited(logits), hidden)

    def embedding(self) -> Tensor:
        weight, scale = self._embedding, self._parts.variant.embedding_scale
        whole = weight if isinstance(weight, Tensor) else dequantize(weight).to(self.dtype)
        return whole if scale == 1.0 else whole * scale

    def output(self, final: Tensor) -> Tensor:
        return self._limited(self._network.output(final))

    def _limited(self, logits: Tensor) -> Tensor:
        scale, cap = self._parts.logit_scale, self._parts.logit_cap
        scaled = logits if scale == 1.0 else logits * scale
        return scaled if cap is None else cap * torch.tanh(scaled / cap)
