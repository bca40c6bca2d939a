"""A GGUF file as a model, without transformers: its blocks stay packed, and native code multiplies them.

For kinds with Llama's layers. Others are dequantised and run by transformers' code (`paceline.model.gguf_loading`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.gguf.gguf_config import is_packed_kind, transformers_config
from paceline.gguf.gguf_file import GgufError, GgufFile, GgufTensor
from paceline.gguf.gguf_names import tensor_sources, unpermuted_rows
from paceline.model.attention import Heads, KVCache
from paceline.model.layer_weights import LayerWeights, QuantizedWeight, RotaryTables, Weight
from paceline.model.model import ModelInfo, ModelOutput, TransformersModel
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_network import NativeNetwork, head_width
from paceline.model.native.native_product import dequantize
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.rows import Row
from paceline.text import vocabulary_fingerprint
from paceline.text.gguf_tokenizer import eos_token_ids

MATRICES = {
    **{"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"},
    **{"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"},
}
"""Matrices of a layer, and their names in a file: `blk.N.NAME.weight`, `blk.N.NAME.bias`."""
NORMS = {"input_norm": "attn_norm", "inner_norm": "ffn_norm", "query_norm": "attn_q_norm", "key_norm": "attn_k_norm"}
HEAD_NORMS = ("query_norm", "key_norm")
PERMUTED_KINDS = ("llama", "mistral3")
"""`general.architecture` whose files have the rows of q and k in the order of rotation by neighbouring pairs."""
HEAD_UNIT = 32
"""Heads whose size is a multiple of it have no padding in the cache, so quantised weights need none."""
NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16}


class GgufModel(TransformersModel):
    """Llama layers from a GGUF file, by native code."""

    native = has_native_attention = True

    def __init__(self, info: ModelInfo, file: GgufFile, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """`config`: in transformers' terms. `dtype`: of keys, values, and weights that are not quantised.

        Raises `GgufError` for a tensor that is missing or of a wrong shape, and `NativeUnavailableError`.
        """
        weights = _FileWeights(file, config, dtype)
        cache = KVCache(info.layers, info.slots, weights.heads, dtype, torch.device("cpu"), head_width(weights.heads))
        self._file, self._embedding = file, weights.embedding()
        self._network = NativeNetwork(
            [weights.layer(n) for n in range(info.layers)],
            weights.heads,
            cache,
            rotary_tables(file, config, info.max_model_len),
            hidden=int(config["hidden_size"]),
            eps=float(config["rms_norm_eps"]),
            scale=weights.heads.head_size**-0.5,
            embedding=self._embedding,
            norm=weights.vector("output_norm.weight", int(config["hidden_size"])),
            head=weights.head(),
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


class _FileWeights:
    """The weights of Llama layers in a file, with their shapes checked."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._file, self._dtype = file, dtype
        self._permuted = file.metadata["general.architecture"] in PERMUTED_KINDS
        self._hidden, self._inner = int(config["hidden_size"]), int(config["intermediate_size"])
        self._window = int(config.get("sliding_window") or 0)
        queries = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or queries)
        self.heads = Heads(kv_heads, queries // kv_heads, int(config.get("head_dim") or self._hidden // queries))
        self._vocabulary = file.tensor("token_embd.weight").shape[0]
        attended, keys = queries * self.heads.head_size, kv_heads * self.heads.head_size
        self._shapes = {
            "query": (attended, self._hidden),
            "key": (keys, self._hidden),
            "value": (keys, self._hidden),
            "output": (self._hidden, attended),
            "gate": (self._inner, self._hidden),
            "up": (self._inner, self._hidden),
            "down": (self._hidden, self._inner),
        }

    def embedding(self) -> Weight:
        return self._matrix("token_embd.weight", (self._vocabulary, self._hidden))

    def head(self) -> Weight:
        name = "output.weight" if "output.weight" in self._file.tensors else "token_embd.weight"
        return self._matrix(name, (self._vocabulary, self._hidden))

    def layer(self, n: int) -> LayerWeights[Weight]:
        fields: dict[str, Any] = {"window": self._window}
        for field, name in MATRICES.items():
            heads = self._permuted_heads(field)
            fields[field] = self._matrix(f"blk.{n}.{name}.weight", self._shapes[field], heads)
            fields[f"{field}_bias"] = self._optional(f"blk.{n}.{name}.bias", self._shapes[field][0], heads)
        for field, name in NORMS.items():
            size = self.heads.head_size if field in HEAD_NORMS else self._hidden
            fields[field] = self._optional(f"blk.{n}.{name}.weight", size)
        if fields["input_norm"] is None or fields["inner_norm"] is None:
            raise GgufError(
                f"{self._file.path} has no norms in layer {n} (blk.{n}.attn_norm.weight, blk.{n}.ffn_norm.weight)"
            )
        if self.heads.head_size % HEAD_UNIT and isinstance(fields["output"], QuantizedWeight):
            fields["output"] = dequantize(fields["output"]).to(self._dtype)
        return LayerWeights(**fields)

    def vector(self, name: str, size: int, permuted_heads: int = 0) -> Tensor:
        """A norm or a bias, float32."""
        numbers = _numbers(self._shaped(name, (size,))).float()
        return numbers[self._order(permuted_heads)] if permuted_heads else numbers

    def _optional(self, name: str, size: int, permuted_heads: int = 0) -> Tensor | None:
        return self.vector(name, size, permuted_heads) if name in self._file.tensors else None

    def _matrix(self, name: str, shape: tuple[int, int], permuted_heads: int = 0) -> Weight:
        tensor = self._shaped(name, shape)
        if permuted_heads:
            tensor = tensor._replace(data=tensor.data[self._order(permuted_heads)])
        if tensor.type.is_packed:
            return QuantizedWeight(tensor.type.number, shape, tensor.data)
        return _numbers(tensor).to(self._dtype)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._file.tensor(name)
        if tensor.shape != shape:
            raise GgufError(f"{self._file.path}: the tensor {name} has the shape {tensor.shape}, and not {shape}")
        return tensor

    def _permuted_heads(self, field: str) -> int:
        """How many heads' rows this matrix has in another order; 0: none."""
        if not self._permuted:
            return 0
        queries = self.heads.kv_heads * self.heads.queries_per_kv
        return {"query": queries, "key": self.heads.kv_heads}.get(field, 0)

    def _order(self, heads: int) -> Any:
        return unpermuted_rows(heads, self.heads.head_size)


def _numbers(tensor: GgufTensor) -> Tensor:
    """A tensor that is not quantised, in a copy."""
    if tensor.type.name == "BF16":
        return torch.from_numpy(tensor.data.view(np.int16).reshape(tensor.shape).copy()).view(torch.bfloat16)
    dtype = NUMPY_DTYPES.get(tensor.type.name)
    if dtype is None:
        raise GgufError(f"the tensor {tensor.name} is of the type {tensor.type.name}, and not of floating point")
    return torch.from_numpy(tensor.data.view(dtype).reshape(tensor.shape).copy())


def rotary_tables(file: GgufFile, config: Mapping[str, Any], positions: int) -> RotaryTables:
    """Cosines and sines by transformers' formulas; with the factors of `rope_freqs.weight`, where a file has them."""
    rope = config["rope_parameters"]
    frequencies = 1.0 / _powers(config, float(rope["rope_theta"]))
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1
        frequencies = frequencies / _numbers(file.tensor("rope_freqs.weight"))
    elif rope["rope_type"] == "linear":
        frequencies = frequencies / float(rope["factor"])
    angles = torch.arange(positions).float()[:, None] * frequencies
    return RotaryTables(angles.cos(), angles.sin())


def _powers(config: Mapping[str, Any], base: float) -> Tensor:
    size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    powers: Tensor = base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    return powers


def load_packed(path: Path, name: str, config: EngineConfig) -> GgufModel | None:
    """The model in a GGUF file; None if native code does not compute it, which one line of the log says.

    Raises `GgufError`, or ValueError if the configuration asks for what a packed model cannot do.
    """
    file = GgufFile.open(path)
    settings = transformers_config(file)
    if not is_packed_kind(settings) or config.device != "cpu":
        return None
    tensor_sources(file, settings)  # no tensor is missing, of another shape, or unknown
    if config.tensor_parallel_size > 1:
        raise ValueError("the weights of a GGUF file cannot be shared by ranks yet: set tensor_parallel_size to 1")
    try:
        model = GgufModel(_info(file, name, settings, config), file, settings, _dtype(settings, config))
    except NativeUnavailableError as error:
        log_once(f"no native pass, {path.name} is dequantised: {error}")
        return None
    model.numerics = numerics_of(model, " gguf")
    return model


def _info(file: GgufFile, name: str, settings: Mapping[str, Any], config: EngineConfig) -> ModelInfo:
    positions = int(settings["max_position_embeddings"])
    longest = config.max_model_len or positions
    if longest > positions:
        raise ValueError(f"max_model_len {longest} exceeds the {positions} positions of {name}: lower it")
    return ModelInfo(
        name=name,
        vocabulary_size=file.tensor("token_embd.weight").shape[0],
        max_model_len=longest,
        layers=int(settings["num_hidden_layers"]),
        slots=config.slot_count,
        eos_token_ids=tuple(eos_token_ids(file)),
        fingerprint=vocabulary_fingerprint(str(file.path)),
        folder=file.path,
        rows_invariant=True,
    )


def _dtype(settings: Mapping[str, Any], config: EngineConfig) -> torch.dtype:
    """Of keys, values, and matrices that are not quantised."""
    if config.dtype == "float16":
        raise ValueError("float16 takes a GPU: set dtype to bfloat16 or float32")
    dtype: torch.dtype = getattr(torch, settings["dtype"] if config.dtype == "auto" else config.dtype)
    return dtype
