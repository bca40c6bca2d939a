"""A folder with Llama layers as a model whose matrices are packed, layer by layer, and multiplied as they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.config.engine_config import Quantization
from paceline.gguf.gguf_file import is_gguf
from paceline.model.block_quantization import BROADEST, TYPES, packed_bytes, quantized
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.decoder import window_of
from paceline.model.gpu.packed_matrix import packed_row_bytes
from paceline.model.layer_weights import RotaryTables, Weight
from paceline.model.loading import dtype_of, is_harmless, outline, positions_of
from paceline.model.native.build import NativeUnavailableError
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of, quantization_of
from paceline.model.packed_floats import float8_group, floats
from paceline.model.packed_integers import UNIT, Settings, are_integers, integers
from paceline.model.packed_model import (
    EMBEDDING,
    HEAD,
    PackedModel,
    PackedNetwork,
    PackedWeights,
    packed_info,
    packs_on,
    product_numerics,
)
from paceline.model.quantization import (
    SCALES,
    check_format,
    dequantized_module,
    is_dequantized_at_load,
    plain_names,
    quantized_modules,
    reading_module,
)
from paceline.model.rope import fix_rope_frequencies
from paceline.model_names import resolve_model
from paceline.telemetry.logs import load_phase

PACKED_FOLDERS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""transformers' model types whose folders can be packed: all their layers are Llama's."""
WEIGHT = ".weight"


def load_packed_checkpoint(name: str, engine: EngineConfig) -> PackedModel | None:
    """The model called `name` with packed matrices; None if neither it nor `engine` asks for any.

    Raises ValueError if `engine.quantization` cannot be had, and for a checkpoint that cannot be read.
    """
    path = Path(resolve_model(name))
    if (packing := packing_of(path, engine)) is None:
        return None
    network = outline(name, engine)
    settings: Any = network.config
    weights = CheckpointWeights(Checkpoint(path), network, dtype_of(settings, engine), packing)
    info, parts = packed_info(name, path, settings, engine), packed_network(network, name, engine)
    device = torch.device(engine.device)
    try:
        with load_phase("weights packed"):
            model = PackedModel(info, settings, weights, parts, device)
    except NativeUnavailableError as error:
        if isinstance(packing, StoredPacking):
            log_once(f"no packed pass, {path.name} is dequantised: {error}")
            return None
        raise ValueError(f"quantization takes native code, or Triton on a GPU: {error}") from error
    model.numerics = numerics_of(model, f" packed{packing.numerics(settings)}{product_numerics(device)}")
    return model


class ChosenPacking:
    """Matrices of floats become `EngineConfig.quantization`."""

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        self._quantization, self._device = quantization, device

    def numerics(self, config: Any) -> str:
        """What replay compares. `config`: transformers'."""
        return f" as {self._quantization}"

    def names(self, checkpoint: Checkpoint) -> Collection[str]:
        """Of weights, as if nothing were quantised."""
        return checkpoint.names

    def matrix(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Weight:
        """In `dtype` if it is not packed. Raises `CheckpointError` or ValueError."""
        return quantized(checkpoint.tensor(name, dtype), self._layout(name), name)

    def bytes(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Of a matrix in memory."""
        layout, (rows, width) = self._layout(name), shape
        if self._device.type == "cpu":
            return rows * packed_bytes(width, layout)
        return rows * packed_row_bytes(TYPES[layout].number, width)

    def _layout(self, name: str) -> Quantization:
        return BROADEST if name in (EMBEDDING, HEAD) else self._quantization


class StoredPacking:
    """Integers, and floats of 8 and 4 bits, stay what they are; the checkpoint's other matrices are not packed.

    Methods: see `ChosenPacking`.
    """

    def __init__(self, settings: Settings) -> None:
        """`settings`: `quantization_config`."""
        self._settings = settings

    def numerics(self, config: Any) -> str:
        return quantization_of(config)

    def names(self, checkpoint: Checkpoint) -> Collection[str]:
        check_format(checkpoint, self._settings)
        modules = quantized_modules(checkpoint.names)
        return plain_names(checkpoint.names) | {f"{module}{WEIGHT}" for module in modules}

    def matrix(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Weight:
        module = name.removesuffix(WEIGHT)
        if module not in quantized_modules(_of_module(checkpoint, module)):
            return checkpoint.tensor(name, dtype)
        with reading_module(checkpoint, module) as part:
            found = integers(part, self._settings)
            found = floats(part, self._settings) if found is None else found
        return dequantized_module(checkpoint, module, self._settings).to(dtype) if found is None else found

    def bytes(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        module = name.removesuffix(WEIGHT)
        stored = [part for part in _of_module(checkpoint, module) if part != f"{module}.bias"]
        if stored == [name]:
            return math.prod(shape) * dtype.itemsize
        if are_integers(
            {part.removeprefix(f"{module}.") for part in stored}, self._settings
        ):  # scales count as float32
            return sum(math.prod(checkpoint.shape(part)) * (1 if part == name else 4) for part in stored)
        rows, width = shape
        if name not in stored:
            return rows * packed_bytes(width, "mxfp4")
        groups = [
            float8_group(checkpoint.shape(part), width, self._settings) for part in stored if part.endswith(SCALES)
        ]
        return math.prod(shape) * dtype.itemsize if None in groups else rows * (width + 4 * -(-width // UNIT))


def _of_module(checkpoint: Checkpoint, module: str) -> list[str]:
    """A module's tensors."""
    return [name for name in checkpoint.names if name.startswith(f"{module}.")]


Packing = ChosenPacking | StoredPacking


def packing_of(path: Path, engine: EngineConfig) -> Packing | None:
    """How the model's matrices are packed; None: not at all. Raises ValueError if they ought to be, and cannot."""
    if is_gguf(path):
        _stays(path, engine)
        return None
    config = _config(path)
    settings = config.get("quantization_config")
    if settings is None and engine.quantization is None:
        return None
    if settings is not None and not isinstance(settings, Mapping):
        raise CheckpointError(f"{path}: quantization_config is {settings!r}, and has to be an object")
    refusal = _refusal(path, config, engine)
    if settings is not None:
        _stays(path, engine)
        return StoredPacking(settings) if refusal is None and is_dequantized_at_load(settings) else None
    if refusal is not None:
        raise ValueError(f"{refusal}: take quantization {engine.quantization} out")
    return None if engine.quantization is None else ChosenPacking(engine.quantization, torch.device(engine.device))


def _config(path: Path) -> Mapping[str, Any]:
    """config.json; empty if it cannot be read, which transformers says when it loads the model."""
    try:
        return Checkpoint(path).config
    except CheckpointError:
        return {}


def _stays(path: Path, engine: EngineConfig) -> None:
    if engine.quantization is not None:
        log_once(f"{path.name} is quantised already, and stays as it is")


def _refusal(path: Path, config: Mapping[str, Any], engine: EngineConfig) -> str | None:
    """Why the model's matrices cannot be packed; None if they can."""
    if not packs_on(engine.device) or engine.tensor_parallel_size > 1:
        return "packed weights are for one process on a CPU, or on an NVIDIA GPU with Triton"
    kind = config.get("model_type")
    if kind not in PACKED_FOLDERS or config.get("hidden_act", "silu") != "silu":
        return f"{path} is of the kind {kind}, and packed are {', '.join(sorted(PACKED_FOLDERS))}"
    return None


class CheckpointWeights(PackedWeights):
    """The weights of a folder. Raises `CheckpointError`, or ValueError for a matrix that cannot be packed."""

    def __init__(self, checkpoint: Checkpoint, network: nn.Module, dtype: torch.dtype, packing: Packing) -> None:
        """`network`: its outline. `dtype`: of keys, and of what is not packed."""
        super().__init__(dtype)
        self._checkpoint, self._packing = checkpoint, packing
        self._shapes = shapes_of(network)
        self.names = self._shapes.keys()
        check_names(checkpoint, self.names, packing.names(checkpoint), network)

    def matrix(self, name: str) -> Weight:
        matrix = self._packing.matrix(self._checkpoint, name, self.dtype)
        self._check_shape(name, tuple(matrix.shape))
        return matrix

    def vector(self, name: str) -> Tensor | None:
        if name not in self.names:
            return None
        tensor = self._checkpoint.tensor(name, torch.float32)
        self._check_shape(name, tuple(tensor.shape))
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint}: {name} has the shape {list(shape)}, and not {list(self._shapes[name])}"
            )


def shapes_of(network: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Of an outline's weights; without an output matrix that is tied to the embedding."""
    return {name: tuple(each.shape) for name, each in network.named_parameters()}


def packed_weight_bytes(path: Path, network: nn.Module, engine: EngineConfig) -> int | None:
    """Of an outline's weights when they are packed; None if they are not.

    An embedding that is the output matrix, too, is kept twice by native code, which has the output matrix in its own
    order.
    """
    if (packing := packing_of(path, engine)) is None:
        return None
    shapes, checkpoint = shapes_of(network), Checkpoint(path)
    dtype = dtype_of(network.config, engine)
    matrices = {name: packing.bytes(checkpoint, name, each, dtype) for name, each in shapes.items() if len(each) == 2}
    vectors = sum(math.prod(each) for each in shapes.values() if len(each) == 1) * torch.float32.itemsize
    is_twice = HEAD not in shapes and torch.device(engine.device).type == "cpu"
    return sum(matrices.values()) + vectors + (matrices[EMBEDDING] if is_twice else 0)


def check_names(checkpoint: Checkpoint, names: Collection[str], stored: Collection[str], network: nn.Module) -> None:
    """Raises `CheckpointError` if a weight is missing, or the network has no use for one."""
    if missing := sorted(set(names) - set(stored)):
        raise CheckpointError(f"{checkpoint} lacks {missing[0]}: download it again")
    settings: Any = network.config
    extra = sorted(set(stored) - set(names) - {HEAD})  # an output matrix that is tied may be stored, too
    if unknown := [name for name in extra if not is_harmless(name, settings, tower=False)]:
        raise CheckpointError(
            f"{checkpoint} has {unknown[0]}, which {type(network).__name__} does not have: its format is not supported"
        )


def packed_network(network: nn.Module, name: str, engine: EngineConfig) -> PackedNetwork:
    """Of an outline."""
    base: Any = network.base_model
    config: Any = network.config
    positions = positions_of(config, name, engine.max_model_len)
    with torch.device("cpu"):
        rotary: nn.Module = type(base.rotary_emb)(config=config)
    fix_rope_frequencies(rotary, engine.max_model_len or positions)
    return PackedNetwork(
        [RotaryTables.of(rotary, positions)] * len(base.layers),
        float(base.norm.variance_epsilon),
        float(base.layers[0].self_attn.scaling),
        [window_of(layer) for layer in base.layers],
    )
