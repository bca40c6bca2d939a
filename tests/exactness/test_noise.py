"""The noise: the integers it is made of, on any device, and how random they look where it matters."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from paceline.core.noise import gumbel, noise_bits

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1
SIX_SIGMA = 6.0
"""Every statistic here is one fixed number, not a fresh sample: it passes for ever, or the hash was changed."""


def ids(count: int) -> Tensor:
    return torch.arange(count)


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def reference_bits(seed: int, position: int, token: int) -> int:
    """The hash once more, in integers that cannot overflow."""
    key = splitmix64((splitmix64(seed) + position * 0x9E3779B97F4A7C15) & MASK_64)
    x = token ^ (key >> 32)
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK_32
    x ^= (x >> 15) ^ (key & MASK_32)
    x = (x * 0x735A2D97) & MASK_32
    return x ^ (x >> 15)


def test_the_integers_never_change() -> None:
    """A request replayed on another machine or by another release needs the same noise."""
    assert noise_bits([42], [7], ids(4)).tolist() == [[1819841328, 1973732332, 793534097, 3101276097]]
    rng = random.Random(0)
    seeds = [0, 42, 2**64 - 1, *(rng.randrange(2**64) for _ in range(50))]
    positions = [0, 1000, 2**31, *(rng.randrange(2**32) for _ in range(50))]
    tokens = [0, 1, 2, *(rng.randrange(2**18) for _ in range(40))]
    assert noise_bits(seeds, positions, torch.tensor(tokens)).tolist() == [
        [reference_bits(seed, position, token) for token in tokens]
        for seed, position in zip(seeds, positions, strict=True)
    ]


def test_each_row_may_have_its_own_tokens() -> None:
    tokens = torch.tensor([[3, 1], [0, 7]])
    assert torch.equal(noise_bits([5, 6], [8, 9], tokens), noise_bits([5, 6], [8, 9], ids(8)).gather(1, tokens))


def test_tokens_of_a_row_never_share_an_integer() -> None:
    assert len(noise_bits([1], [1], ids(200_000))[0].unique()) == 200_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_gives_the_same_integers() -> None:
    seeds, positions = list(range(64)), list(range(100, 164))
    on_gpu = noise_bits(seeds, positions, ids(4096).cuda())
    assert torch.equal(on_gpu.cpu(), noise_bits(seeds, positions, ids(4096)))


def bit_columns(bits: Tensor) -> Tensor:
    """[..., 32] of 0 and 1."""
    return (bits[..., None] >> torch.arange(32)) & 1


COUNT = 512
NEIGHBOURS = {
    "tokens": noise_bits(range(COUNT), [5] * COUNT, ids(COUNT)),
    "positions": noise_bits([5] * COUNT, range(COUNT), ids(COUNT)).T.contiguous(),
    "seeds": noise_bits(range(COUNT), [5] * COUNT, ids(COUNT)).T.contiguous(),
}
"""Noise next to which other noise must look unrelated: [COUNT, COUNT] along the thing that counts up."""


@pytest.mark.parametrize("along", NEIGHBOURS)
def test_neighbours_are_unrelated(along: str) -> None:
    bits = NEIGHBOURS[along]
    columns = bit_columns(bits)
    ones = columns.sum((0, 1)).double()
    assert ((ones - bits.numel() / 2).abs() / math.sqrt(bits.numel() / 4)).max() < SIX_SIGMA, "every bit is fair"
    chi_square = ((columns.sum(1).double() - COUNT / 2) ** 2 / (COUNT / 4)).sum(0)
    assert ((chi_square - COUNT).abs() / math.sqrt(2 * COUNT)).max() < SIX_SIGMA, "every bit is fair along every line"
    signs = columns.double() * 2 - 1
    left, right = signs[:, :-1].reshape(-1, 32), signs[:, 1:].reshape(-1, 32)
    assert (left.T @ right / math.sqrt(len(left))).abs().max() < SIX_SIGMA, "pairs of bits of neighbours are unrelated"
    uniform = (bits.double() / 2**32 - 0.5) * math.sqrt(12)
    for distance in (1, 2, 3, 4, 8, 64):
        products = uniform[:, distance:] * uniform[:, :-distance]
        assert products.sum().abs() / math.sqrt(products.numel()) < SIX_SIGMA, f"uncorrelated at {distance}"


@pytest.mark.parametrize(("what", "width"), [("seed", 64), ("position", 31), ("token", 18)])
def test_flipping_any_input_bit_flips_each_output_bit_half_the_time(what: str, width: int) -> None:
    rng, trials = random.Random(what), 2000
    for bit in range(width):
        seeds = [rng.randrange(2**64) for _ in range(trials)]
        positions = [rng.randrange(2**31) for _ in range(trials)]
        tokens = torch.tensor([[rng.randrange(2**18)] for _ in range(trials)])
        before = noise_bits(seeds, positions, tokens)
        flip = {what: 1 << bit}
        after = noise_bits(
            [seed ^ flip.get("seed", 0) for seed in seeds],
            [position ^ flip.get("position", 0) for position in positions],
            tokens ^ flip.get("token", 0),
        )
        flips = bit_columns(before ^ after).sum((0, 1))
        assert ((flips - trials / 2).abs() / math.sqrt(trials / 4)).max() < SIX_SIGMA, bit


ENDS = (0, 1, 2, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1)


def test_gumbel_noise_follows_the_formula() -> None:
    """Closest where noise is large and decides draws; everywhere, no probability moves by more than 2^-24."""
    bits = torch.cat([torch.tensor(ENDS), noise_bits([1], [1], ids(100_000))[0], ids(1000)])
    given, noise = bits.clone(), gumbel(bits)
    assert torch.equal(bits, given)
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    u, noise = (bits.double() + 0.5) / 2**32, noise.double()
    exact = -(-(-u).log1p()).log()
    assert (noise - exact)[u < 0.5].abs().max() < 2e-6
    assert ((-(-noise).exp()).exp() - (1 - u)).abs().max() <= 2.0**-24


def test_gumbel_noise_falls_as_the_integer_rises() -> None:
    bits = torch.cat([ids(10_000), torch.arange(0, 2**32, 99_991)]).sort().values
    assert (gumbel(bits).diff() <= 0).all()
