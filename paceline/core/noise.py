"""Noise: Gumbel noise for draws, and numbers for decisions, each a hash of a request's seed and a place in its output.

It comes from no generator that could be ahead or behind, so it is the same on every device and machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Integers = TypeVar("Integers", Tensor, npt.NDArray[np.uint32])

_32_BITS = 0xFFFF_FFFF
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN_GAMMA = 0x9E37_79B9_7F4A_7C15


class NoisePurpose(IntEnum):
    """Uses of noise other than the target's draws. Noise for different purposes is independent."""

    GUESS = 1
    """A draft samples a token from its own distribution."""
    ACCEPT = 2
    """The target accepts a draft token with some probability."""
    REPLACE = 3
    """The target draws a recovered or bonus token in rejection sampling."""
    SYNTHETIC = 4
    """A synthetic acceptance."""


def noise_key(seed: int, purpose: NoisePurpose, *parts: int) -> int:
    """64 bits, the same on every machine. `parts`: numbers from 0 that distinguish noise of one purpose."""
    key = _splitmix64(seed) ^ purpose
    for part in parts:
        key = _splitmix64(key) ^ part
    return _splitmix64(key)


def uniform(key: int) -> float:
    """A number of [0, 1) from 53 bits of a key."""
    return (key >> 11) * 2.0**-53


def noise_bits(seeds: Sequence[int], positions: Sequence[int], tokens: Tensor) -> Tensor:
    """Uniform 32-bit integers, int64 [R, V]: the same on every device and machine.

    Row i is keyed by `seeds[i]` (below 2^64) and `positions[i]`. `tokens`: ids, int64 [V] for all rows or [R, V];
    different ids in a row get different integers.
    """
    keys = [divmod(position_key(seed, position), 2**32) for seed, position in zip(seeds, positions, strict=True)]
    first_R1, second_R1 = uploaded(keys, tokens.device)[:, None].unbind(-1)
    return mix(tokens ^ first_R1, second_R1)


def uploaded(values: Any, device: torch.device) -> Tensor:
    """Numbers, lists of them, or a tensor of the CPU, as a tensor there.

    Waits for no GPU, as `torch.tensor` with a device does, and a list as an index.
    """
    tensor = torch.as_tensor(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise from `noise_bits`, float32, finite for every value of the bits.

    It is -log(E) with E = -log(1 - u) exponential and u = (bits + 1/2) / 2^32. Large noise, which wins draws, has u
    near 0, where float32 is finest; at the other end u is clamped below 1.
    """
    exponential = bits.to(torch.float32).add_(0.5).mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1).log1p_().neg_()
    return exponential.log_().neg_()


def gumbel_choice(weights_RV: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Sample a token of each row, int64 [R], in proportion to weights that are not negative and not all 0.

    The noise is keyed by `seeds` and `positions`, as in a draw. Overwrites the weights.
    """
    tokens = torch.arange(weights_RV.shape[-1], device=weights_RV.device)
    return weights_RV.log_().add_(gumbel(noise_bits(seeds, positions, tokens))).argmax(-1)


def position_key(seed: int, position: int) -> int:
    """64 bits for one position: that element of the splitmix64 stream which begins at the hashed seed."""
    return _splitmix64(_splitmix64(seed) + position * _GOLDEN_GAMMA)


def mix(x: Integers, second: Integers) -> Integers:
    """The mixer lowbias32 (16, 21f0aaad, 15, 735a2d97, 15) with a key before each round; `x` includes the first key.

    Overwrites `x`: int64, or unsigned 32 bits. Both factors are below 2^31, so that no product overflows int64.
    """
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _32_BITS
    x ^= x >> 15
    x ^= second
    x *= 0x735A2D97
    x &= _32_BITS
    x ^= x >> 15
    return x


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN_GAMMA) & _64_BITS
    z = (z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9 & _64_BITS
    z = (z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB & _64_BITS
    return z ^ (z >> 31)
