"""A folder with Llama layers as a model whose matrices are packed, layer by layer, and multiplied by native code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import EngineConfig
from paceline.config.engine_config import Quantization
from paceline.gguf.gguf_config import PACKED_MODEL_TYPES
from paceline.gguf.gguf_file import is_gguf
from paceline.model.block_quantization import BROADEST, packed_bytes, quantized
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.decoder import window_of
from paceline.model.gguf_loading import model_config
from paceline.model.layer_weights import RotaryTables, Weight
from paceline.model.loading import dtype_of, end_tokens, is_harmless, outline, positions_of
from paceline.model.model import ModelInfo
from paceline.model.native.build import NativeUnavailableError
from paceline.model.network_factory import log_once
from paceline.model.numerics import numerics_of
from paceline.model.packed_model import EMBEDDING, HEAD, PackedModel, PackedNetwork, PackedWeights
from paceline.model.rope import fix_rope_frequencies
from paceline.model_names import resolve_model
from paceline.telemetry.load_phases import load_phase
from paceline.text import vocabulary_fingerprint


def load_packed_checkpoint(name: str, engine: EngineConfig) -> PackedModel | None:
    """The model called `name` with packed matrices; None if neither it nor `engine` asks for any.

    Raises ValueError if `engine.quantization` cannot be had, and for a checkpoint that cannot be read.
    """
    path = Path(resolve_model(name))
    if (quantization := quantization_for(path, engine)) is None:
        return None
    network = outline(name, engine)
    settings: Any = network.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    weights = CheckpointWeights(Checkpoint(path), network, dtype_of(settings, engine), quantization)
    try:
        with load_phase("weights packed"):
            model = PackedModel(
                _info(name, path, network, engine), settings, weights, packed_network(network, name, engine)
            )
    except NativeUnavailableError as error:
        raise ValueError(f"quantization takes native code: {error}") from error
    model.numerics = numerics_of(model, f" packed as {quantization}")
    return model


def quantization_for(path: Path, engine: EngineConfig) -> Quantization | None:
    """What to pack the model's matrices into; None: nothing. Raises ValueError if they cannot be packed."""
    if engine.quantization is None:
        return None
    if _is_quantized(path, engine):
        log_once(f"{path.name} is quantised already, and stays as it is")
        return None
    config = model_config(path, engine.device, trust_remote_code=engine.trust_remote_code)
    if torch.device(engine.device).type != "cpu" or engine.tensor_parallel_size > 1:
        raise ValueError(f"quantization {engine.quantization} is for one process on a CPU: take it out")
    if config.model_type not in PACKED_MODEL_TYPES or config.hidden_act != "silu":
        kinds = ", ".join(sorted(PACKED_MODEL_TYPES))
        raise ValueError(
            f"{path} is of the kind {config.model_type}, and quantization {engine.quantization} packs {kinds}: "
            "take it out"
        )
    return engine.quantization


def _is_quantized(path: Path, engine: EngineConfig) -> bool:
    return is_gguf(path) or hasattr(
        model_config(path, engine.device, trust_remote_code=engine.trust_remote_code), "quantization_config"
    )


class CheckpointWeights(PackedWeights):
    """The weights of a folder. Raises `CheckpointError`, or ValueError for a matrix that cannot be packed."""

    def __init__(
        self, checkpoint: Checkpoint, network: nn.Module, dtype: torch.dtype, quantization: Quantization
    ) -> None:
        """`network`: its outline. `dtype`: of keys, and of what is not packed."""
        super().__init__(dtype)
        self._checkpoint, self._quantization = checkpoint, quantization
        self._shapes = shapes_of(network)
        self.names = self._shapes.keys()
        check_names(checkpoint, self.names, set(checkpoint.names), network)

    def matrix(self, name: str) -> Weight:
        return quantized(self.tensor(name, self.dtype), layout_of(name, self._quantization), name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._checkpoint.tensor(name, dtype)
        if tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(
                f"{self._checkpoint}: {name} has the shape {list(tensor.shape)}, and not {list(self._shapes[name])}"
            )
        return tensor


def layout_of(name: str, quantization: Quantization) -> Quantization:
    """Of a matrix."""
    return BROADEST if name in (EMBEDDING, HEAD) else quantization


def shapes_of(network: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Of an outline's weights; without an output matrix that is tied to the embedding."""
    return {name: tuple(each.shape) for name, each in network.named_parameters()}


def packed_weight_bytes(path: Path, network: nn.Module, engine: EngineConfig) -> int | None:
    """Of an outline's weights when they are packed; None if they are not.

    An embedding that is the output matrix, too, is kept twice: native code has the output matrix in its own order.
    """
    if (quantization := quantization_for(path, engine)) is None:
        return None
    shapes = shapes_of(network)
    copies = {EMBEDDING: 1 if HEAD in shapes else 2}
    return sum(copies.get(name, 1) * _bytes(name, shape, quantization) for name, shape in shapes.items())


def _bytes(name: str, shape: tuple[int, ...], quantization: Quantization) -> int:
    rows, *width = shape
    return rows * (packed_bytes(width[0], layout_of(name, quantization)) if width else torch.float32.itemsize)


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
        RotaryTables.of(rotary, positions),
        float(base.norm.variance_epsilon),
        float(base.layers[0].self_attn.scaling),
        [window_of(layer) for layer in base.layers],
    )


def _info(name: str, path: Path, network: nn.Module, engine: EngineConfig) -> ModelInfo:
    config: Any = network.config
    return ModelInfo(
        name=name,
        vocabulary_size=int(config.vocab_size),
        max_model_len=engine.max_model_len or positions_of(config, name, None),
        layers=int(config.num_hidden_layers),
        slots=engine.slot_count,
        eos_token_ids=tuple(end_tokens(path, network)),
        fingerprint=vocabulary_fingerprint(str(path)),
        folder=path,
        rows_invariant=True,
    )
