"""A GGUF file as a model, without transformers: its blocks stay packed, and native code multiplies them.

For kinds with Llama's layers. Others are dequantised and run by transformers' code (`paceline.model.gguf_loading`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.gguf.gguf_config import GgufSettings, is_packed_kind, transformers_config
from paceline.gguf.gguf_file import GgufFile, is_gguf
from paceline.model.attention import Heads, KVCache
from paceline.model.gguf_weights import GgufWeights, dequantized
from paceline.model.layer_weights import LayerWeights, QuantizedWeight, RotaryTables, Weight
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.native.native_product import dequantize
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.rows import Row
from paceline.telemetry.load_phases import load_phase
from paceline.text import vocabulary_fingerprint
from paceline.text.gguf_tokenizer import eos_token_ids

MATRICES = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
}
"""Matrices of a layer, and transformers' names for them."""
NORMS = {
    **{"input_norm": "input_layernorm", "inner_norm": "post_attention_layernorm"},
    **{"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"},
}
HEAD_UNIT = 32
"""Heads whose size is a multiple of it have no padding in the cache, so quantised weights need none."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class GgufModel(TransformersModel):
    """Llama layers from a GGUF file, by native code."""

    native = has_native_attention = True

    def __init__(self, info: ModelInfo, file: GgufFile, config: GgufSettings, dtype: torch.dtype) -> None:
        """`config`: of the file. `dtype`: of keys, values, and matrices that are not quantised.

        Raises `GgufError` for a tensor that is missing, unknown or of a wrong shape, and `NativeUnavailableError`.
        """
        weights, heads = _PackedWeights(file, dtype), Heads.of(config)
        cache = KVCache(info.layers, info.slots, heads, dtype, torch.device("cpu"), head_width(heads))
        self._embedding = weights.matrix(EMBEDDING)
        self._network = NativeNetwork(
            [weights.layer(n, heads) for n in range(info.layers)],
            heads,
            cache,
            rotary_tables(file, config, info.max_model_len),
            hidden=config.hidden_size,
            eps=config.rms_norm_eps,
            scale=heads.head_size**-0.5,
            embedding=self._embedding,
            norm=weights.vector("model.norm.weight"),
            head=weights.matrix(HEAD if HEAD in weights.names else EMBEDDING),
            layer_packed=file.release_pages,
        )
        file.release_pages()
        super().__init__(info, cache, config)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        return ModelOutput(*self._network.run(rows, wanted, hidden_layers))

    def embedding(self) -> Tensor:
        weight = self._embedding
        return weight if isinstance(weight, Tensor) else dequantize(weight).to(self.dtype)

    def output(self, final: Tensor) -> Tensor:
        return self._network.output(final)


class _PackedWeights:
    """The weights of Llama layers in a file. Raises `GgufError` if there are others, or one is missing."""

    def __init__(self, file: GgufFile, dtype: torch.dtype) -> None:
        self._weights, self._dtype = GgufWeights(file.path), dtype
        self.names = frozenset(self._weights.names)

    def layer(self, n: int, heads: Heads) -> LayerWeights[Weight]:
        layer = f"model.layers.{n}"
        fields: dict[str, Any] = {field: self.matrix(f"{layer}.{name}.weight") for field, name in MATRICES.items()}
        fields |= {f"{field}_bias": self.vector(f"{layer}.{name}.bias") for field, name in MATRICES.items()}
        fields |= {field: self.vector(f"{layer}.{name}.weight") for field, name in NORMS.items()}
        if heads.head_size % HEAD_UNIT and isinstance(fields["output"], QuantizedWeight):
            fields["output"] = dequantize(fields["output"]).to(self._dtype)
        return LayerWeights(**fields)

    def matrix(self, name: str) -> Weight:
        packed = self._weights.quantized(name)
        return self._weights.tensor(name, self._dtype) if packed is None else packed

    def vector(self, name: str) -> Tensor | None:
        """A norm or a bias, float32; None if the model has none."""
        return self._weights.tensor(name, torch.float32) if name in self.names else None


def rotary_tables(file: GgufFile, config: GgufSettings, positions: int) -> RotaryTables:
    """Cosines and sines by transformers' formulas; with the factors of `rope_freqs.weight`, where a file has them."""
    rope, size = config.rope_parameters, config.head_dim
    frequencies = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, size, 2).float() / size)
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1
        frequencies = frequencies / dequantized(file.tensor("rope_freqs.weight"), torch.float32)
    elif rope["rope_type"] == "linear":
        frequencies = frequencies / float(rope["factor"])
    angles = torch.arange(positions).float()[:, None] * frequencies
    return RotaryTables(angles.cos(), angles.sin())


def packed_config(path: str, engine: EngineConfig) -> GgufSettings | None:
    """The configuration of a GGUF file whose matrices stay packed; None for any other model. Raises `GgufError`."""
    if not is_gguf(path) or torch.device(engine.device).type != "cpu" or engine.tensor_parallel_size > 1:
        return None
    config = transformers_config(GgufFile.open(path))
    return GgufSettings(**config) if is_packed_kind(config) else None


def packed_dtype(config: GgufSettings, engine: EngineConfig) -> torch.dtype:
    """Of keys, values and matrices of floats in a file whose other matrices stay packed. Raises ValueError."""
    if engine.dtype == "float16":
        raise ValueError("float16 takes a GPU: set dtype to bfloat16 or float32")
    dtype: torch.dtype = getattr(torch, config.dtype if engine.dtype == "auto" else engine.dtype)
    return dtype


def load_packed(path: str, name: str, engine: EngineConfig) -> GgufModel | None:
    """The model in a GGUF file; None if native code does not compute it.

    Raises `GgufError`, or ValueError if the engine's settings do not fit.
    """
    if (config := packed_config(path, engine)) is None:
        return None
    file = GgufFile.open(path)
    try:
        with load_phase("weights packed"):
            model = GgufModel(_info(file, name, config, engine), file, config, packed_dtype(config, engine))
    except NativeUnavailableError as error:
        log_once(f"no native pass, {file.path.name} is dequantised: {error}")
        return None
    model.numerics = numerics_of(model, " gguf")
    return model


def _info(file: GgufFile, name: str, config: GgufSettings, engine: EngineConfig) -> ModelInfo:
    longest = engine.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {longest} exceeds the {config.max_position_embeddings} positions of {name}: lower it"
        )
    return ModelInfo(
        name=name,
        vocabulary_size=config.vocab_size,
        max_model_len=longest,
        layers=config.num_hidden_layers,
        slots=engine.slot_count,
        eos_token_ids=tuple(eos_token_ids(file)),
        fingerprint=vocabulary_fingerprint(str(file.path)),
        folder=file.path,
        rows_invariant=True,
    )
