"""A GGUF file as a model, without transformers: its blocks stay packed. Native code or a GPU's kernels multiply.

For kinds with Llama's layers, on a CPU for variants of them, too. Others are dequantised and run by transformers' code
(`paceline.model.loading`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.gguf.gguf_config import GgufSettings, is_packed_kind, transformers_config
from paceline.gguf.gguf_file import GgufFile, is_gguf
from paceline.model import qwen35
from paceline.model.attention import Heads
from paceline.model.decoder import LLAMA_KIND
from paceline.model.gguf_weights import GgufWeights, dequantized
from paceline.model.layer_weights import (
    MATRICES,
    NORMS,
    AnyLayerWeights,
    DeltaLayerWeights,
    DeltaWeights,
    LayerVariant,
    LayerWeights,
    RotaryTables,
    Weight,
    rotary_frequencies,
)
from paceline.model.loading import dtype_of
from paceline.model.native.build import NativeUnavailableError
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.packed_model import (
    FOUR_NORMS,
    PackedModel,
    PackedNetwork,
    PackedWeights,
    packed_info,
    packs_on,
    product_numerics,
)
from paceline.telemetry.logs import load_phase

GEMMA = ("gemma2", "gemma3_text")


class GgufPackedWeights(PackedWeights):
    """The weights of a file. Raises `GgufError` if one is missing, unknown, or of a wrong shape."""

    def __init__(self, file: GgufFile, dtype: torch.dtype) -> None:
        """`dtype`: of matrices that are not quantised."""
        super().__init__(dtype)
        self._weights = GgufWeights(file.path)
        self.names = frozenset(self._weights.names)

    def matrix(self, name: str) -> Weight:
        return self._weights.matrix(name, self.dtype)

    def vector(self, name: str) -> Tensor | None:
        return self._weights.stored(name) if name in self.names else None

    def layer(self, n: int, heads: Heads, network: PackedNetwork) -> AnyLayerWeights:
        """Of Qwen3.5 value heads are in the file's order: see `DeltaShape.tiled`."""
        prefix = f"model.layers.{n}"
        if f"{prefix}.linear_attn.A_log" in self.names:
            return self._delta_layer(prefix)
        layer = super().layer(n, heads, network)
        if network.delta is None or not isinstance(layer, LayerWeights):
            return layer
        query, gate = qwen35.split_gate(layer.query, heads.head_size)
        return replace(layer, query=query, output_gate=gate)

    def _delta_layer(self, prefix: str) -> DeltaLayerWeights[Weight]:
        own = f"{prefix}.linear_attn"
        norms = {field: f"{prefix}.{NORMS[field]}" for field in ("input_norm", "inner_norm")}
        mlp = {field: f"{prefix}.{MATRICES[field]}" for field in ("gate", "up", "down")}
        delta: dict[str, Any] = self._matrices_called(
            {field: f"{own}.{name}" for field, name in qwen35.DELTA_MATRICES.items()}
        )
        delta |= {field: self._weights.stored(f"{own}.{name}") for field, name in qwen35.DELTA_VECTORS.items()}
        parts: dict[str, Any] = self._matrices_called({**mlp, "output": f"{own}.out_proj"})
        parts |= {field: self._weights.stored(f"{name}.weight") for field, name in norms.items()}
        return DeltaLayerWeights(DeltaWeights(**delta), **parts)

    def _matrices_called(self, names: Mapping[str, str]) -> dict[str, Weight]:
        return {field: self.matrix(f"{name}.weight") for field, name in names.items()}


def packed_network(file: GgufFile, config: GgufSettings, positions: int) -> PackedNetwork:
    """What a file's model is made of, apart from its weights, for contexts of so many positions."""
    return PackedNetwork(
        rotaries=layer_rotaries(file, config, positions),
        eps=config.rms_norm_eps,
        scale=score_scale(config),
        windows=[_window(config, layer) for layer in range(config.num_hidden_layers)],
        norms=FOUR_NORMS if config.model_type in GEMMA else NORMS,
        variant=variant_of(config),
        logit_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        layer_packed=file.release_pages,
        delta=qwen35.delta_shape(config)._replace(tiled=True) if qwen35.runs_natively(config) else None,
        attending=qwen35.attending_layers(config),
    )


def _window(config: GgufSettings, layer: int) -> int:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return 0
    return int(getattr(config, "sliding_window", None) or 0)


def variant_of(config: GgufSettings) -> LayerVariant:
    """What a kind does otherwise than Llama."""
    if config.model_type in GEMMA:
        cap = config.attn_logit_softcapping or 0.0
        return LayerVariant("gelu_tanh", embedding_scale=config.hidden_size**0.5, softcap=cap)
    return LayerVariant(
        embedding_scale=getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
    )


def score_scale(config: GgufSettings) -> float:
    """What attention's scores are multiplied by."""
    if config.model_type in GEMMA:
        return 1.0 / math.sqrt(config.query_pre_attn_scalar)
    return float(getattr(config, "attention_multiplier", config.head_dim**-0.5))


def layer_rotaries(file: GgufFile, config: GgufSettings, positions: int) -> list[RotaryTables]:
    """Of each layer; layers of one kind share theirs."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    ropes = config.rope_parameters
    tables = {kind: rotary_tables(file, config, ropes.get(kind, ropes), positions) for kind in dict.fromkeys(kinds)}
    return [tables[kind] for kind in kinds]


def rotary_tables(file: GgufFile, config: GgufSettings, rope: Mapping[str, Any], positions: int) -> RotaryTables:
    """Cosines and sines by transformers' formulas; with the factors of `rope_freqs.weight`, where a file has them."""
    size, scale = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)), 1.0
    frequencies = rotary_frequencies(float(rope["rope_theta"]), size)
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1
        frequencies = frequencies / dequantized(file.tensor("rope_freqs.weight"), torch.float32)
    elif rope["rope_type"] == "linear":
        frequencies = frequencies / float(rope["factor"])
    elif rope["rope_type"] != "default":
        frequencies, scale = _scaled_frequencies(config, rope["rope_type"], positions)
    return RotaryTables.at(frequencies, positions, scale)


def _scaled_frequencies(config: GgufSettings, kind: str, positions: int) -> tuple[Tensor, float]:
    """YaRN's and LongRoPE's, and what tables are multiplied by: transformers' own."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = AutoConfig.for_model(**config.to_dict())
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"), seq_len=positions)
    return frequencies, float(scale)


def packed_config(path: str, engine: EngineConfig) -> GgufSettings | None:
    """The configuration of a GGUF file whose matrices stay packed; None for any other model. Raises `GgufError`."""
    if not is_gguf(path) or not packs_on(engine.device) or engine.tensor_parallel_size > 1:
        return None
    config = transformers_config(GgufFile.open(path))
    on_cpu = torch.device(engine.device).type == "cpu"
    stays = is_packed_kind(config) if on_cpu else config["model_type"] in LLAMA_KIND
    return GgufSettings(**config) if stays else None


def load_packed(path: str, name: str, engine: EngineConfig) -> PackedModel | None:
    """The model in a GGUF file; None if it does not stay packed, or the device computes none of it.

    Raises `GgufError`, or ValueError if the engine's settings do not fit.
    """
    if (config := packed_config(path, engine)) is None:
        return None
    file, device = GgufFile.open(path), torch.device(engine.device)
    try:
        with load_phase("weights packed"):
            info = packed_info(name, file.path, config, engine)
            weights = GgufPackedWeights(file, dtype_of(config, engine))
            model = PackedModel(info, config, weights, packed_network(file, config, info.max_model_len), device)
    except NativeUnavailableError as error:
        log_once(f"no packed pass, {file.path.name} is dequantised: {error}")
        return None
    model.numerics = numerics_of(model, f" gguf{product_numerics(device)}")
    return model
