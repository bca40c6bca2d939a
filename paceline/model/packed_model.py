"""Llama layers from packed weights, of a GGUF file or a folder: by native code, or on a GPU by kernels. Native code has
variants of them, too."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.model.attention import Heads, KVCache
from paceline.model.decoder import Reference, check_logits, checked_tokens, state_cache
from paceline.model.gpu.memory import triton_compiles
from paceline.model.gpu.packed_matrix import on_device
from paceline.model.layer_weights import (
    HEAD_NORMS,
    LLAMA,
    MATRICES,
    NORMS,
    AnyLayerWeights,
    DeltaShape,
    LayerVariant,
    LayerWeights,
    Matrix,
    QuantizedWeight,
    RotaryTables,
    Weight,
)
from paceline.model.layers import TorchNetwork, look_up, use_whole_sums
from paceline.model.loading import end_tokens, positions_of, settings_of
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.native_library import dequantize
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.network_factory import Network, make_network
from paceline.model.rows import Row, SlotTable
from paceline.model.states.native_states import DeltaStates
from paceline.model.torch_attention import TorchAttention, file_digest
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

    def layer(self, n: int, heads: Heads, network: PackedNetwork) -> AnyLayerWeights:
        """Of layer `n`."""
        layer = f"model.layers.{n}"
        fields: dict[str, Any] = self._matrices(layer, heads)
        fields |= {f"{field}_bias": self.vector(f"{layer}.{name}.bias") for field, name in MATRICES.items()}
        fields |= {field: self.vector(f"{layer}.{name}.weight") for field, name in network.norms.items()}
        return LayerWeights(**fields, rotary=network.rotaries[n], window=network.windows[n])

    def _matrices(self, layer: str, heads: Heads) -> dict[str, Weight]:
        """Each a tensor of its own, or its rows of a stacked one."""
        keys = heads.kv_heads * heads.head_size
        sizes = {"query": keys * heads.queries_per_kv, "key": keys, "value": keys}
        matrices: dict[str, Weight] = {}
        for stack, parts in STACKED.items():
            if (name := f"{layer}.{stack}.weight") in self.names:
                whole, start = self.matrix(name), 0
                for field in parts:
                    end = start + sizes.get(field, len(whole) // len(parts))
                    matrices[field], start = whole[start:end], end
        single = {field: name for field, name in MATRICES.items() if field not in matrices}
        return matrices | {field: self.matrix(f"{layer}.{name}.weight") for field, name in single.items()}


class PackedLayers(Sequence[AnyLayerWeights]):
    """A model's layers for native code, each read when it is asked for, and not kept."""

    def __init__(self, weights: PackedWeights, heads: Heads, network: PackedNetwork, count: int) -> None:
        self._weights, self._heads, self._network, self._layers = weights, heads, network, range(count)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, n: int) -> AnyLayerWeights:  # type: ignore[override] # nothing slices it
        layer = self._weights.layer(self._layers[n], self._heads, self._network)
        attends = isinstance(layer, LayerWeights)
        if attends and self._heads.head_size % HEAD_UNIT and isinstance(layer.output, QuantizedWeight):
            return replace(layer, output=dequantize(layer.output).to(self._weights.dtype))
        return layer


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
    delta: DeltaShape | None = None
    """Of layers that keep a state, by native code only."""
    attending: int | None = None
    """Layers that attend; None: all."""


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
        **settings_of(engine),
    )


def product_numerics(device: torch.device) -> str:
    """What numbers of packed products depend on, beside the native code or the GPU."""
    if device.type == "cpu":
        return ""
    from paceline.model.gpu import packed_formats, packed_products  # torch's builds for a CPU come without Triton

    sources = file_digest(packed_formats.__file__, packed_products.__file__)
    return f", products by Triton {importlib.metadata.version('triton')}, kernels {sources}"


def packs_on(device: str) -> bool:
    """Whether packed weights are multiplied as they are: by native code, or on an NVIDIA GPU by Triton's kernels."""
    kind = torch.device(device).type
    return kind == "cpu" or (kind == "cuda" and triton_compiles())


class PackedModel(TransformersModel):
    """Layers by native code, or on a GPU Llama's by kernels."""

    def __init__(
        self, info: ModelInfo, config: Any, weights: PackedWeights, network: PackedNetwork, device: torch.device
    ) -> None:
        """`config`: of the model, as transformers has it. Raises what reading weights raises, and
        `NativeUnavailableError` if the device computes none of it."""
        heads = Heads.of(config)
        self.native = self.has_native_attention = device.type == "cpu"
        self._parts = network
        options = {"hidden": config.hidden_size, "eps": network.eps, "scale": network.scale}
        make = self._by_native_code if self.native else partial(self._on_gpu, device)
        self._network, cache = make(info, heads, weights, options)
        super().__init__(info, cache, config)

    def _by_native_code(
        self, info: ModelInfo, heads: Heads, weights: PackedWeights, options: dict[str, Any]
    ) -> tuple[Network, KVCache]:
        network, cpu = self._parts, torch.device("cpu")
        attending = info.layers if network.attending is None else network.attending
        cache = KVCache(attending, info.slots, heads, weights.dtype, cpu, head_width(heads), info.kv_cache_dtype)
        self._states: DeltaStates | None = None
        if network.delta is not None:
            info.states = state_cache(info, network.delta.taps - 1, cpu, native=True)
            self._states = DeltaStates(info.states, network.delta, weights.dtype)
        self._embedding: Weight | Matrix = weights.matrix(EMBEDDING)
        made = NativeNetwork(
            PackedLayers(weights, heads, network, info.layers),
            heads,
            cache,
            network.rotaries[0],
            embedding=self._embedding,
            norm=weights.vector(NORM),
            head=weights.matrix(HEAD) if HEAD in weights.names else self._embedding,
            variant=network.variant,
            layer_packed=network.layer_packed,
            states=self._states,
            **options,
        )
        network.layer_packed()
        return made, cache

    def _on_gpu(
        self, device: torch.device, info: ModelInfo, heads: Heads, weights: PackedWeights, options: dict[str, Any]
    ) -> tuple[Network, KVCache]:
        """Beside the packed weights there is one layer in main memory, and one product's weights on the device."""
        use_whole_sums(device)
        network, dtype = self._parts, weights.dtype
        assert network.variant == LLAMA, "kernels have Llama's layers alone"
        assert network.norms == NORMS, "kernels have Llama's layers alone"

        def placed(name: str) -> Matrix:
            [matrix] = on_device([weights.matrix(name)], device, dtype)
            return matrix

        self._embedding = placed(EMBEDDING)
        head = placed(HEAD) if HEAD in weights.names else self._embedding
        layers = []
        for n in range(info.layers):
            layer = weights.layer(n, heads, network)
            assert isinstance(layer, LayerWeights), "kernels have Llama's layers alone"
            layers.append(_layer_on_device(layer, device, dtype))
            network.layer_packed()
        norm = weights.vector(NORM)
        final: dict[str, Any] = {"embedding": self._embedding, "head": head}
        final["norm"] = None if norm is None else norm.to(device, dtype)
        tokens = checked_tokens(info.vocabulary_size, info.max_model_len, info.slots)
        plain = TorchAttention(KVCache(info.layers, len(tokens), heads, dtype, device), len(tokens))
        by_torch = TorchNetwork(layers, heads, plain, network.rotaries[0], **final, **options)
        check = partial(check_attention, tokens, by_torch)
        options |= {**final, "positions": info.max_model_len}
        made = make_network(layers, heads, info.slots, network.rotaries[0], check, **options)
        network.layer_packed()
        return made

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        logits, hidden = self._network.run(rows, wanted, hidden_layers)
        return ModelOutput(self._limited(logits), hidden)

    def embedding(self) -> Tensor:
        weight, scale = self._embedding, self._parts.variant.embedding_scale
        if isinstance(weight, QuantizedWeight):
            whole = dequantize(weight).to(self.dtype)
        else:
            whole = look_up(torch.arange(len(weight), device=self.device), weight)
        return whole if scale == 1.0 else whole * scale

    def output(self, final: Tensor) -> Tensor:
        return self._limited(self._network.output(final))

    def _limited(self, logits: Tensor) -> Tensor:
        scale, cap = self._parts.logit_scale, self._parts.logit_cap
        scaled = logits if scale == 1.0 else logits * scale
        return scaled if cap is None else cap * torch.tanh(scaled / cap)


@torch.inference_mode()
def check_attention(tokens: Sequence[int], by_torch: TorchNetwork, made: Network) -> None:
    """Raises ValueError unless `made` computes what torch's attention does over the same packed weights."""
    path = SlotTable(range(1, len(tokens) + 1))
    rows = [path.row(token, position) for position, token in enumerate(tokens)]
    logits, _ = by_torch.run(rows, range(len(rows)))
    check_logits(lambda rows, wanted: made.run(rows, wanted)[0], tokens, Reference(logits.float()), logits.dtype)


def _layer_on_device(layer: LayerWeights[Weight], device: torch.device, dtype: torch.dtype) -> LayerWeights[Any]:
    """Matrices that are multiplied together are placed together."""
    vectors = {field.name: getattr(layer, field.name) for field in fields(layer)}
    placed: dict[str, Any] = {
        name: each.to(device, dtype) for name, each in vectors.items() if isinstance(each, Tensor)
    }
    for names in (*STACKED.values(), ("output",), ("down",)):
        placed |= zip(names, on_device([getattr(layer, name) for name in names], device, dtype), strict=True)
    return replace(layer, rotary=None, **placed)
