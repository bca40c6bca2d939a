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
from typing import Any

import torch
from torch import Tensor

from paceline.model.checkpoint import Checkpoint, CheckpointError

ReadTensor = Callable[[str], Tensor | None]
"""Reads a module's tensor by the last part of its name; None if there is none."""
Settings = Mapping[str, Any]
"""`quantization_config` of config.json."""

SCALES = ("weight_scale", "weight_scale_inv")
QUANTIZED_SUFFIXES = frozenset(
    {
        *SCALES,
        "g_idx",
        "input_scale",
        "input_global_scale",
        "output_scale",
        "input_zero_point",
        "qweight",
        "qzeros",
        "scales",
        "weight_g_idx",
        "weight_packed",
        "weight_shape",
        "weight_zero_point",
        "activation_scale",
    }
)
"""Last parts of the names of a quantised weight's tensors."""
COMPRESSED = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized"),
)
GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AUTO_ROUND_PACKINGS: Mapping[str, Settings] = {
    "auto_round": GPTQ_V2,
    "auto_round:gptqmodel": GPTQ_V2,
    "auto_round:auto_gptq": {"quant_method": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq"},
}
"""By `packing_format`, settings with the same tensors."""
PACKED_BITS = (1, 2, 4, 8)
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index within a 32-bit word of each of eight neighbouring columns."""
INT32_BITS = 32
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


class MissingTensorError(Exception):
    """A module lacks a tensor."""


class PackedShapeError(Exception):
    """A module's tensors do not fit each other."""


def _split(name: str) -> tuple[str, str]:
    module, _, part = name.rpartition(".")
    return module, part


def needed(part: ReadTensor, name: str) -> Tensor:
    """Raises `MissingTensorError` if there is none."""
    tensor = part(name)
    if tensor is None:
        raise MissingTensorError(name)
    return tensor


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
    rows, columns = (int(size) for size in needed(part, "weight_shape").tolist())
    bits = packed_bits(packed, columns)
    weight = _signed(packed, bits, 1)[:rows, :columns]
    scale = needed(part, "weight_scale").float()
    zero = part("weight_zero_point")
    groups = part("weight_g_idx")
    each = (lambda x: spread_scales(x, (rows, columns), None)) if groups is None else (lambda x: x[:, groups.long()])
    if zero is not None:
        weight = weight - each(_signed(zero, bits, 0)[:rows] if zero.dtype == torch.int32 else zero.float())
    return weight * each(scale)


def _mxfp4(part: ReadTensor, packed: Tensor) -> Tensor:
    """`packed`: [out, in / 2], of two neighbours the first in the lower half."""
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    numbers = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()]
    scale = scale_of(part)
    if scale is None:
        raise MissingTensorError("weight_scale")
    return numbers * spread_scales(scale, numbers.shape, None)


def _signed(packed: Tensor, bits: int, axis: int) -> Tensor:
    """Signed numbers, which are stored with an offset."""
    numbers: Tensor = unpacked(packed, bits, axis).float() - 2 ** (bits - 1)
    return numbers


def _awq(part: ReadTensor, settings: Settings) -> Tensor:
    bits, columns = packed_bits(needed(part, "qzeros"), needed(part, "scales").shape[1]), torch.tensor(AWQ_COLUMNS)

    def ordered(name: str) -> Tensor:
        numbers = unpacked(needed(part, name), bits, 1).unflatten(1, (-1, len(columns)))
        result: Tensor = numbers[:, :, columns].flatten(1).float()
        return result

    weight, zeros, scales = ordered("qweight"), ordered("qzeros"), needed(part, "scales").float()
    group = len(weight) // len(scales)
    return ((weight - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)).T.contiguous()


def _gptq(part: ReadTensor, settings: Settings) -> Tensor:
    scales, packed_zeros = needed(part, "scales").float(), needed(part, "qzeros")
    bits = packed_bits(packed_zeros, scales.shape[1])
    weight = unpacked(needed(part, "qweight"), bits, 0).float()
    zeros = gptq_zeros(packed_zeros, bits, settings)
    groups = part("g_idx")
    if groups is None:
        groups = torch.arange(len(weight)) // (len(weight) // len(scales))
    groups = groups.long()
    return ((weight - zeros.float()[groups]) * scales[groups]).T.contiguous()


def gptq_zeros(packed: Tensor, bits: int, settings: Settings) -> Tensor:
    """int32 [groups, out]. All but GPTQModel's second format store them less 1."""
    zeros = unpacked(packed, bits, 1)
    return zeros if settings.get("checkpoint_format", "gptq") == "gptq_v2" else (zeros + 1) & (2**bits - 1)


def packed_bits(packed: Tensor, numbers: int) -> int:
    """Of a number, where int32 words along the last axis hold so many: modules of a checkpoint may differ.

    Raises `PackedShapeError`.
    """
    words = packed.shape[-1]
    if fitting := [bits for bits in PACKED_BITS if math.ceil(numbers * bits / INT32_BITS) == words]:
        return fitting[-1]
    raise PackedShapeError(f"has {numbers} numbers in {words} words of 32 bits")


def unpacked(packed: Tensor, bits: int, axis: int) -> Tensor:
    """The numbers packed in int32 words, lowest bits first: int32, `INT32_BITS / bits` times as many along `axis`."""
    shifts = torch.arange(0, INT32_BITS, bits, dtype=torch.int32)
    numbers = (packed.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (packed.dim() - 1 - axis))) & (2**bits - 1)
    joined: Tensor = numbers.flatten(axis, axis + 1)
    return joined


def weight_groups(settings: Settings) -> list[Mapping[str, Any]]:
    """compressed-tensors' settings for weights, of its groups of modules. Some groups are of activations alone."""
    return [group["weights"] for group in settings.get("config_groups", {}).values() if group.get("weights")]


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


def _auto_round(part: ReadTensor, settings: Settings) -> Tensor:
    equal = auto_round_equal(settings)
    return METHODS[equal["quant_method"]][1](part, equal)


def auto_round_equal(settings: Settings) -> Settings:
    """The settings of AWQ or GPTQ whose tensors are the same. auto-round's own packing is GPTQ's second format."""
    return AUTO_ROUND_PACKINGS[settings["packing_format"]]


def _check_auto_round(settings: Settings) -> str | None:
    packing, bits, kind = settings.get("packing_format"), settings.get("bits"), settings.get("data_type", "int")
    known = packing in AUTO_ROUND_PACKINGS and kind == "int" and bits in ((4,) if "awq" in str(packing) else (2, 4, 8))
    return None if known else f"{packing} of {bits} bits, {kind}"


METHODS: Mapping[str, tuple[Callable[[Settings], str | None], Callable[[ReadTensor, Settings], Tensor]]] = {
    "fp8": (lambda settings: None, _scaled),
    "modelopt": (_check_modelopt, _scaled),
    "compressed-tensors": (_check_compressed, _compressed),
    "awq": (_check_awq, _awq),
    "gptq": (_check_gptq, _gptq),
    "auto-round": (_check_auto_round, _auto_round),
}
"""By `quant_method`: a check that names an unknown format, and a function that returns a module's weight, float32."""
