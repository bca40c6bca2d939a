"""Quantised checkpoints, dequantised when they are read: FP8, INT8, AWQ, GPTQ, compressed-tensors.

Integers, or floats of 8 or 4 bits, with scales become weights in the model's dtype. Activations are not quantised.
Formats: DeepSeek's and Qwen's FP8 blocks (`weight_scale_inv`), ModelOpt's FP8 (`weight_scale`), compressed-tensors'
float-, int-, naive-, mxfp8-, pack- and mxfp4-pack-quantized, AutoAWQ's gemm, AutoGPTQ's and GPTQModel's gptq and
gptq_v2, which auto-round writes under names of its own.

Shapes: a weight is [out, in]; scales are one number, [out], [out, 1], [out, groups] or [row blocks, column blocks].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.packed_integers import (
    AUTO_ROUND_PACKINGS,
    PACKED_BITS,
    MissingTensorError,
    PackedShapeError,
    ReadTensor,
    Settings,
    integer_numbers,
    needed,
    weight_groups,
)

SCALES = ("weight_scale", "weight_scale_inv")
QUANTIZED_SUFFIXES = frozenset(
    {
        *(*SCALES, "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("qweight", "qzeros", "scales", "g_idx"),
        *("input_scale", "input_global_scale", "input_zero_point", "output_scale", "activation_scale"),
    }
)
"""Last parts of the names of a quantised weight's tensors."""
COMPRESSED = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized"),
)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by its lower three bits (OCP Microscaling Formats 1.0); the fourth is the sign."""


def is_dequantized_at_load(settings: Settings) -> bool:
    """Whether this module dequantises checkpoints of this method. Others are left to transformers."""
    return settings.get("quant_method") in METHODS


def dequantized_weights(checkpoint: Checkpoint, settings: Settings, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint whose method `is_dequantized_at_load`, by their unquantised names.

    Raises `CheckpointError` for an unknown format, and for a module that lacks a tensor.
    """
    check_format(checkpoint, settings)
    modules = quantized_modules(checkpoint.names)
    weights = {name: checkpoint.tensor(name, dtype) for name in plain_names(checkpoint.names)}
    for module in modules:
        weights[f"{module}.weight"] = dequantized_module(checkpoint, module, settings).to(dtype)
    return weights


def check_format(checkpoint: Checkpoint, settings: Settings) -> None:
    """Raises `CheckpointError` for an unknown format of a method that `is_dequantized_at_load`."""
    method = str(settings["quant_method"])
    if (unknown := METHODS[method][0](settings)) is not None:
        raise CheckpointError(
            f"{checkpoint} is quantised by {method} as {unknown}, which is not read here: take one in bfloat16, "
            "FP8, INT8, or in 4 or 8 bits by AWQ, GPTQ or compressed-tensors"
        )


def quantized_modules(names: Collection[str]) -> list[str]:
    """The modules that have tensors of a quantised weight."""
    return sorted({module for name in names for module, part in (_split(name),) if part in QUANTIZED_SUFFIXES})


def plain_names(names: Collection[str]) -> set[str]:
    """The tensors that are not part of a quantised weight."""
    modules = quantized_modules(names)
    return set(names) - {f"{module}.{part}" for module in modules for part in (*QUANTIZED_SUFFIXES, "weight")}


def dequantized_module(checkpoint: Checkpoint, module: str, settings: Settings) -> Tensor:
    """A module's weight, float32. Raises `CheckpointError` if it lacks a tensor."""
    with reading_module(checkpoint, module) as part:
        return METHODS[str(settings["quant_method"])][1](part, settings)


@contextmanager
def reading_module(checkpoint: Checkpoint, module: str) -> Iterator[ReadTensor]:
    """Reads a module's tensors. Raises `CheckpointError` if the body needs one that it lacks."""

    def part(of: str) -> Tensor | None:
        name = f"{module}.{of}"
        return checkpoint.tensor(name) if name in checkpoint.names else None

    try:
        yield part
    except MissingTensorError as error:
        raise CheckpointError(f"{checkpoint} lacks {module}.{error}: download it again") from error
    except PackedShapeError as error:
        raise CheckpointError(f"{checkpoint}: {module} {error}: download it again") from error


def _split(name: str) -> tuple[str, str]:
    module, _, part = name.rpartition(".")
    return module, part


def _scaled(part: ReadTensor, settings: Settings) -> Tensor:
    """FP8 or INT8 with one scale, or scales per row, group or block. A module without a scale is not quantised: it
    has a scale for activations only."""
    weight = needed(part, "weight").float()
    scale = scale_of(part)
    if scale is None:
        return weight
    block = block_of(settings)
    zero = part("weight_zero_point")
    if zero is not None:
        weight = weight - spread_scales(zero.float(), weight.shape, block)
    return weight * spread_scales(scale, weight.shape, block)


def scale_of(part: ReadTensor) -> Tensor | None:
    """A weight's scales, float32; None if it has none. Bytes are e8m0 (OCP Microscaling Formats 1.0)."""
    scale = next((found for name in SCALES if (found := part(name)) is not None), None)
    if scale is None:
        return None
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def block_of(settings: Settings) -> Sequence[int] | None:
    """Rows and columns of a weight that share a scale; None: see `spread_scales`."""
    blocks = [group["block_structure"] for group in weight_groups(settings) if group.get("block_structure")]
    return settings.get("weight_block_size") or next(iter(blocks), None)


def spread_scales(scale: Tensor, shape: Sequence[int], block: Sequence[int] | None) -> Tensor:
    """Expand scales to a weight's shape [out, in]. `block`: the sides of blocks; None, or another number of scales than
    such blocks have: equal blocks, one per scale."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if block is not None:
        blocks = [math.ceil(size / side) for size, side in zip(shape, block, strict=True)]
        block = block if blocks == list(scale.shape) else None  # it is of other modules
    for axis, size in enumerate(shape):
        side = block[axis] if block is not None else math.ceil(size / scale.shape[axis])
        scale = scale.repeat_interleave(side, axis).narrow(axis, 0, size)
    return scale


def _compressed(part: ReadTensor, settings: Settings) -> Tensor:
    packed = part("weight_packed")
    if packed is None:
        return _scaled(part, settings)
    if packed.dtype == torch.uint8:
        return _mxfp4(part, packed)
    return integer_numbers(part, settings)


def _mxfp4(part: ReadTensor, packed: Tensor) -> Tensor:
    """`packed`: [out, in / 2], of two neighbours the first in the lower half."""
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    numbers = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()]
    scale = scale_of(part)
    if scale is None:
        raise MissingTensorError("weight_scale")
    return numbers * spread_scales(scale, numbers.shape, None)


def _check_modelopt(settings: Settings) -> str | None:
    algorithm = str(settings.get("quant_algo"))
    return None if algorithm == "FP8" else algorithm


def _check_compressed(settings: Settings) -> str | None:
    groups = settings.get("config_groups", {})
    formats = {str(each.get("format") or settings.get("format")) for each in groups.values() if each.get("weights")}
    if unknown := sorted(formats - set(COMPRESSED)):
        return unknown[0]
    weights = weight_groups(settings)
    if unread := sorted({int(each["num_bits"]) for each in weights}.difference(PACKED_BITS)):
        return f"weights of {unread[0]} bits"
    blocks = {tuple(each.get("block_structure") or ()) for each in weights} - {()}
    if len(blocks) > 1:
        return f"weights with scales for blocks of {' and of '.join(str(list(each)) for each in sorted(blocks))}"
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    return None if sparsity == "dense" else str(sparsity)


def _check_awq(settings: Settings) -> str | None:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", 4)
    return None if (version, bits) == ("gemm", 4) else f"{version} of {bits} bits"


def _check_gptq(settings: Settings) -> str | None:
    form, bits = settings.get("checkpoint_format", "gptq"), settings.get("bits")
    return None if form in ("gptq", "gptq_v2") and bits in (2, 4, 8) else f"{form} of {bits} bits"


def _check_auto_round(settings: Settings) -> str | None:
    packing, bits, kind = settings.get("packing_format"), settings.get("bits"), settings.get("data_type", "int")
    known = packing in AUTO_ROUND_PACKINGS and kind == "int" and bits in ((4,) if "awq" in str(packing) else (2, 4, 8))
    return None if known else f"{packing} of {bits} bits, {kind}"


METHODS: Mapping[str, tuple[Callable[[Settings], str | None], Callable[[ReadTensor, Settings], Tensor]]] = {
    "fp8": (lambda settings: None, _scaled),
    "modelopt": (_check_modelopt, _scaled),
    "compressed-tensors": (_check_compressed, _compressed),
    "awq": (_check_awq, integer_numbers),
    "gptq": (_check_gptq, integer_numbers),
    "auto-round": (_check_auto_round, integer_numbers),
}
"""By `quant_method`: a check that names an unknown format, and a function that returns a module's weight, float32."""
