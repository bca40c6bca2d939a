"""The tensors of a GGUF file under transformers' names, dequantised or as the file has them.

The package `gguf` dequantises blocks to float32, a few rows at a time: beside the result little memory is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.gguf.gguf_config import transformers_config
from paceline.gguf.gguf_file import GgufFile, GgufTensor
from paceline.gguf.gguf_names import Change, Source, grouped_rows, tensor_sources, unpermuted_rows
from paceline.model.layer_weights import QuantizedWeight, Weight

PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats that torch has, too."""
CHUNK = 4 << 20
"""Numbers that are dequantised at a time."""
OF_VALUES = frozenset({Change.VALUE_ROWS, Change.VALUE_COLUMNS, Change.VALUE_CONVOLUTION, Change.VALUE_DECAY})
"""Changes of the order of value heads, among others."""
EXACT = frozenset({Change.MINUS_ONE, Change.DECAY, Change.VALUE_DECAY})
"""Changes of numbers, which come before they are rounded."""


def gguf_dtype(config: Mapping[str, Any], device: str) -> torch.dtype:
    """Of what is computed in floats: bfloat16 where the device computes in it, float32 of a file in float32."""
    dtype: torch.dtype = getattr(torch, config["dtype"])
    return dtype if computes_in_bfloat16(device) else torch.float32


def computes_in_bfloat16(device: str) -> bool:
    """Whether the device has products of bfloat16."""
    return torch.device(device).type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class GgufWeights:
    """Reads one model. Methods raise `GgufError`."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile.open(path)
        self.config: Mapping[str, Any] = transformers_config(self._file)
        self.names = list(self.sources)

    @cached_property
    def sources(self) -> Mapping[str, Source]:
        """By transformers' name."""
        return tensor_sources(self._file, self.config)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of transformers."""
        source = self.sources[name]
        *leading, last = self._file.tensor(source.names[0]).shape
        match source.change:
            case Change.ONE_ROW:
                return 1, last
            case Change.CONCATENATED:
                return leading[0], 2 * leading[1], last
            case Change.TRANSPOSED if len(leading) == 2:
                return leading[0], last, leading[1]
            case Change.INTERLEAVED:
                return (leading[0], last, 2 * leading[1]) if len(leading) == 2 else (leading[0], 2 * last)
            case Change.CONVOLUTION | Change.VALUE_CONVOLUTION if leading:
                return leading[0], 1, last
            case Change.FLAT | Change.DECAY:
                return (leading[0] * last,)
        return *leading, last

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of transformers. `dtype` None: the stored one, or the configuration's for blocks."""
        source = self.sources[name]
        stored = self._file.tensor(source.names[0]).type.name
        dtype = dtype or PLAIN.get(stored, getattr(torch, self.config["dtype"]))
        exact = torch.float32 if source.change in EXACT else dtype
        parts = [dequantized(self._file.tensor(each), exact) for each in source.names]
        return self._changed(source.change, parts).to(dtype)

    def stored(self, name: str) -> Tensor:
        """A vector, or what is small, as the file has it, float32: of Gemma's norms what rows are multiplied by."""
        [stored] = self.sources[name].names
        return dequantized(self._file.tensor(stored), torch.float32)

    def matrix(self, name: str, dtype: torch.dtype) -> Weight:
        """A matrix of transformers, with value heads in the file's order: in the file's blocks, or in `dtype` if the
        file has it in floats."""
        source = self.sources[name]
        tensor, in_order = self._file.tensor(source.names[0]), source.change in (Change.NONE, *OF_VALUES)
        if not tensor.type.is_packed:
            return dequantized(tensor, dtype) if in_order else self.tensor(name, dtype)
        data = tensor.data if in_order else tensor.data[self._row_order(source.change)]
        return QuantizedWeight(tensor.type.number, (tensor.shape[0], tensor.shape[1]), data)

    def _row_order(self, change: Change) -> npt.NDArray[np.intp]:
        """Of queries or keys, see `unpermuted_rows`."""
        heads = {Change.QUERY_ROWS: "num_attention_heads", Change.KEY_ROWS: "num_key_value_heads"}[change]
        return unpermuted_rows(self.config[heads], self.config["head_dim"])

    def _changed(self, change: Change, parts: list[Tensor]) -> Tensor:
        tensor = parts[0]
        match change:
            case Change.QUERY_ROWS | Change.KEY_ROWS:
                return tensor[torch.from_numpy(self._row_order(change))]
            case Change.MINUS_ONE:
                return tensor - 1
            case Change.ONE_ROW:
                return tensor.reshape(1, -1)
            case Change.CONCATENATED:
                return torch.cat(parts, dim=1)
            case Change.TRANSPOSED:
                return tensor.mT.contiguous() if tensor.ndim == 3 else tensor
            case Change.INTERLEAVED:
                columns = [part.mT if part.ndim == 3 else part for part in parts]
                return torch.stack(columns, dim=-1).flatten(-2)
            case Change.FLAT:
                return tensor.flatten()
            case Change.CONVOLUTION:
                return tensor[:, None] if tensor.ndim == 2 else tensor
            case Change.DECAY:
                return tensor.neg().log().flatten()
            case Change.VALUE_ROWS:
                return self._grouped(tensor)
            case Change.VALUE_COLUMNS:
                return self._grouped(tensor.mT).mT.contiguous()
            case Change.VALUE_CONVOLUTION:
                return self._grouped(tensor)[:, None]
            case Change.VALUE_DECAY:
                return self._grouped(tensor).neg().log()
        return tensor

    def _grouped(self, tensor: Tensor) -> Tensor:
        return tensor[torch.from_numpy(grouped_rows(len(tensor), self.config))]


def dequantized(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the file as it is there."""
    width = tensor.shape[-1]
    rows, step = math.prod(tensor.shape[:-1]), max(1, CHUNK // width)
    result = torch.empty(rows, width, dtype=dtype)
    for start in range(0, rows, step):
        result[start : start + step] = _floats(tensor, tensor.data[start : start + step])
    return result.reshape(tensor.shape)


def _floats(tensor: GgufTensor, data: np.ndarray[Any, Any]) -> Tensor:
    """Rows of blocks as numbers."""
    if tensor.type.name in PLAIN:
        return torch.from_numpy(data.copy()).view(PLAIN[tensor.type.name])
    from gguf import GGMLQuantizationType  # only a file that is dequantised takes the package
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(data, GGMLQuantizationType[tensor.type.name]))
