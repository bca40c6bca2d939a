"""Heads whose decoder layers are of the Llama kind, and the weights of such layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.config.engine_config import Quantization
from paceline.drafting.best_first import RowOutput
from paceline.drafting.heads.head_config import head_rotary, windows
from paceline.drafting.heads.head_network import HeadNetwork
from paceline.drafting.heads.head_weights import HeadWeights, OutputProjection
from paceline.model.attention import Heads, KVCache, Pass
from paceline.model.block_quantization import BROADEST, quantized
from paceline.model.gpu.device_passes import DevicePasses
from paceline.model.layer_weights import MATRICES, DecoderLayerWeights, LayerWeights, RotaryTables, StateFusion, Weight
from paceline.model.layers import TorchNetwork
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.network_factory import Network, log_once, make_network
from paceline.model.packed_model import HEAD_UNIT
from paceline.model.rows import Row
from paceline.model.target_weights import TargetWeights


class LlamaHead(HeadNetwork):
    """State fusion, decoder layers, a norm if there is one, and an output projection: one pass of one network."""

    def __init__(
        self,
        target: TargetWeights,
        method: str,
        model: str,
        slots: int,
        layers: Sequence[DecoderLayerWeights],
        config: Any,
        *,
        fusion: StateFusion,
        embedding: Tensor,
        norm: Tensor | None,
        output: OutputProjection,
        hidden_state_layers: Sequence[int] | None = None,
        ids: Tensor | None = None,
        rotary: RotaryTables | None = None,
        feeds_back_normed: bool = False,
        quantization: Quantization | None = None,
    ) -> None:
        """`rotary`: None: Llama's. `feeds_back_normed`: the feature of a draft token is the
        output of `norm`, not of the last layer. `quantization`: of the matrices that are the head's own, see
        `EngineConfig`.

        The rotary tables cover the target's positions, however many `config` names. Raises ValueError if
        `quantization` cannot be had, and `NativeUnavailableError` as `make_network` does.
        """
        super().__init__(target, method, model, slots, hidden_state_layers, ids)
        heads = Heads.of(config)
        own_output = output if isinstance(output, Tensor) else None
        tables = rotary or head_rotary(config, target.max_model_len, target.device)
        options = {
            "hidden": int(config.hidden_size),
            "eps": float(config.rms_norm_eps),
            "scale": heads.head_size**-0.5,
            "embedding": embedding,
            "norm": norm,
            "head": own_output,
            "fusion": fusion,
        }
        self._network: Network
        if quantization is not None and embedding.device.type != "cpu":
            log_once("heads stay as they are stored on a GPU: quantization is for its target")
            quantization = None
        if quantization is None:
            self._network, _ = make_network(layers, heads, slots, tables, **options)
        else:
            self._network = _packed_network(layers, heads, slots, tables, quantization, **options)
        self._target_output = None if isinstance(output, Tensor) else output
        fed_back, normed = len(layers) + feeds_back_normed, len(layers) + 1
        self._taps = (fed_back,) if self._target_output is None else (fed_back, normed)

    def run(self, rows: Sequence[Row], features: Tensor | None, wanted: Sequence[int]) -> RowOutput:
        logits, outputs = self._network.run(rows, wanted, self._taps, states=features)
        assert outputs is not None
        if list(wanted) != list(range(len(rows))):
            outputs = outputs[list(wanted)]
        if self._target_output is not None:
            logits = self._target_output(outputs[:, 1])
        return RowOutput(logits, outputs[:, 0])

    @property
    def device_passes(self) -> DevicePasses | None:
        """See `GraphedNetwork`."""
        return self._network.device_passes if isinstance(self._network, TorchNetwork) else None

    def forward(self, this: Pass, features: Tensor | None) -> tuple[Tensor, Tensor]:
        assert isinstance(self._network, TorchNetwork)
        outputs = self._network.forward(this, features)
        return outputs[-1], outputs[self._taps[0]]

    def logits(self, final: Tensor) -> Tensor:
        output = self._target_output or self._network.output
        return output(final)


def _packed_network(
    layers: Sequence[DecoderLayerWeights],
    heads: Heads,
    slots: int,
    rotary: RotaryTables,
    quantization: Quantization,
    *,
    embedding: Tensor,
    head: Tensor | None,
    fusion: StateFusion,
    **options: Any,
) -> NativeNetwork:
    """A network whose matrices are packed. Raises ValueError where there is no native code for it."""

    def packed(matrix: Weight | None, name: str) -> Weight | None:
        return quantized(matrix, quantization, name) if isinstance(matrix, Tensor) else matrix

    def packed_layer(n: int, layer: DecoderLayerWeights) -> LayerWeights[Any]:
        matrices: dict[str, Any] = {
            part: packed(getattr(layer, part), f"layers.{n}.{name}.weight")
            for part, name in MATRICES.items()
            if part != "output" or heads.head_size % HEAD_UNIT == 0  # else it is padded like the heads
        }
        if layer.output_gate is not None:  # with queries one matrix
            matrices["output_gate"] = packed(layer.output_gate, f"layers.{n}.{MATRICES['query']}.weight")
        return replace(layer, **matrices)

    try:
        return NativeNetwork(
            [packed_layer(n, layer) for n, layer in enumerate(layers)],
            heads,
            KVCache(len(layers), slots, heads, embedding.dtype, embedding.device, head_width(heads)),
            rotary,
            embedding=embedding,
            head=None if head is None else quantized(head, BROADEST, "lm_head.weight"),
            fusion=replace(fusion, projection=packed(fusion.projection, "fc.weight")),
            **options,
        )
    except NativeUnavailableError as error:
        raise ValueError(f"quantization takes native code: {error}") from error


def llama_layers(
    weights: HeadWeights, config: Any, first_width: int, *, first_norm_optional: bool = False
) -> list[DecoderLayerWeights]:
    """The decoder layers of `config`, under the names of a Llama's tensors.

    `first_width`: input width of the first layer's attention. If it is not the hidden size, the first layer has no
    input norm. Attention biases, and norms of queries and keys, are used if the checkpoint has them.
    Raises `CheckpointError` if a tensor is missing or has another shape.
    """
    heads, h, inner = Heads.of(config), int(config.hidden_size), int(config.intermediate_size)
    keys = heads.kv_heads * heads.head_size
    queries = keys * heads.queries_per_kv
    layers = []
    for index, window in enumerate(windows(config)):
        name, attention = f"layers.{index}", f"layers.{index}.self_attn"
        width = h if index else first_width
        biased = any(f"{attention}.{each}_proj.bias" in weights for each in "qkv")
        tensors: dict[str, Any] = {}
        for part, size in {"query": queries, "key": keys, "value": keys}.items():
            tensors[part] = weights.take(f"{attention}.{part[0]}_proj.weight", size, width)
            if biased:
                tensors[f"{part}_bias"] = weights.take(f"{attention}.{part[0]}_proj.bias", size)
        query_norm = weights.take_optional(f"{attention}.q_norm.weight", heads.head_size)
        take_norm = weights.take_optional if first_norm_optional and index == 0 else weights.take
        layers.append(
            DecoderLayerWeights(
                **tensors,
                output=weights.take(f"{attention}.o_proj.weight", h, queries),
                output_bias=weights.take_optional(f"{attention}.o_proj.bias", h),
                query_norm=query_norm,
                key_norm=None if query_norm is None else weights.take(f"{attention}.k_norm.weight", heads.head_size),
                input_norm=take_norm(f"{name}.input_layernorm.weight", h) if width == h else None,
                inner_norm=weights.take(f"{name}.post_attention_layernorm.weight", h),
                gate=weights.take(f"{name}.mlp.gate_proj.weight", inner, h),
                up=weights.take(f"{name}.mlp.up_proj.weight", inner, h),
                down=weights.take(f"{name}.mlp.down_proj.weight", h, inner),
                window=window,
            )
        )
    return layers
