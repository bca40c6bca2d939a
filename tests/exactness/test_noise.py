"""The noise: the integers it is made of, on any device, and how random they look where it matters."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import gumbel, noise_bits

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


class TestIntegers:
    def test_they_never_change(self) -> None:
        """A request replayed on another machine or by another release needs the same noise."""
        assert noise_bits([0, 42, 2**64 - 1], [0, 1000, 2**31], ids(3)).tolist() == [
            [reference_bits(seed, position, token) for token in range(3)]
            for seed, position in [(0, 0), (42, 1000), (2**64 - 1, 2**31)]
        ]
        assert noise_bits([42], [7], ids(4)).tolist() == [[1819841328, 1973732332, 793534097, 3101276097]]

    def test_they_equal_the_hash_in_plain_integers(self) -> None:
        rng = random.Random(0)
        seeds = [rng.randrange(2**64) for _ in range(50)]
        positions = [rng.randrange(2**32) for _ in range(50)]
        tokens = [rng.randrange(2**18) for _ in range(40)]
        bits = noise_bits(seeds, positions, torch.tensor(tokens))
        assert bits.tolist() == [
            [reference_bits(seed, position, token) for token in tokens]
            for seed, position in zip(seeds, positions, strict=True)
        ]

    def test_each_row_may_have_its_own_tokens(self) -> None:
        tokens = torch.tensor([[3, 1], [0, 7]])
        every = noise_bits([5, 6], [8, 9], ids(8))
        assert torch.equal(noise_bits([5, 6], [8, 9], tokens), every.gather(1, tokens))

    def test_tokens_of_a_row_never_share_an_integer(self) -> None:
        assert len(noise_bits([1], [1], ids(200_000))[0].unique()) == 200_000

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
    def test_a_gpu_gives_the_same(self) -> None:
        seeds, positions = list(range(64)), list(range(100, 164))
        on_gpu = noise_bits(seeds, positions, ids(4096).cuda())
        assert torch.equal(on_gpu.cpu(), noise_bits(seeds, positions, ids(4096)))


def bit_columns(bits: Tensor) -> Tensor:
    """[..., 32] of 0 and 1."""
    return (bits[..., None] >> torch.arange(32)) & 1


class TestRandomness:
    COUNT = 512

    def neighbours(self) -> dict[str, Tensor]:
        """Noise next to which other noise must look unrelated: [COUNT, COUNT] along the thing that counts up."""
        n = self.COUNT
        return {
            "tokens": noise_bits(range(n), [5] * n, ids(n)),
            "positions": noise_bits([5] * n, range(n), ids(n)).T.contiguous(),
            "seeds": noise_bits(range(n), [5] * n, ids(n)).T.contiguous(),
        }

    def test_every_bit_is_fair(self) -> None:
        for bits in self.neighbours().values():
            ones = bit_columns(bits).sum((0, 1)).double()
            assert ((ones - bits.numel() / 2).abs() / math.sqrt(bits.numel() / 4)).max() < SIX_SIGMA

    def test_every_bit_is_fair_along_every_line(self) -> None:
        """For one seed over all tokens, for one token over all positions, and so on: chi-square of the lines."""
        for bits in self.neighbours().values():
            lines, length = bits.shape
            ones = bit_columns(bits).sum(1).double()
            chi_square = ((ones - length / 2) ** 2 / (length / 4)).sum(0)
            assert ((chi_square - lines).abs() / math.sqrt(2 * lines)).max() < SIX_SIGMA

    def test_pairs_of_bits_of_neighbours_are_unrelated(self) -> None:
        for bits in self.neighbours().values():
            signs = bit_columns(bits).double() * 2 - 1
            left, right = signs[:, :-1].reshape(-1, 32), signs[:, 1:].reshape(-1, 32)
            correlation = left.T @ right / math.sqrt(len(left))
            assert correlation.abs().max() < SIX_SIGMA

    @pytest.mark.parametrize("distance", [1, 2, 3, 4, 8, 64])
    def test_uniforms_at_a_distance_are_uncorrelated(self, distance: int) -> None:
        for bits in self.neighbours().values():
            uniform = (bits.double() / 2**32 - 0.5) * math.sqrt(12)
            products = uniform[:, distance:] * uniform[:, :-distance]
            assert products.sum().abs() / math.sqrt(products.numel()) < SIX_SIGMA

    @pytest.mark.parametrize("what", ["seed", "position", "token"])
    def test_flipping_any_input_bit_flips_each_output_bit_half_the_time(self, what: str) -> None:
        rng, trials = random.Random(what), 2000
        widths = {"seed": 64, "position": 31, "token": 18}
        for bit in range(widths[what]):
            seeds = [rng.randrange(2**64) for _ in range(trials)]
            positions = [rng.randrange(2**31) for _ in range(trials)]
            tokens = torch.tensor([[rng.randrange(2**18)] for _ in range(trials)])
            before = noise_bits(seeds, positions, tokens)
            if what == "seed":
                seeds = [seed ^ 1 << bit for seed in seeds]
            elif what == "position":
                positions = [position ^ 1 << bit for position in positions]
            else:
                tokens = tokens ^ 1 << bit
            flips = bit_columns(before ^ noise_bits(seeds, positions, tokens)).sum((0, 1))
            assert ((flips - trials / 2).abs() / math.sqrt(trials / 4)).max() < SIX_SIGMA, bit


class TestGumbel:
    ENDS = (0, 1, 2, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1)

    def test_it_is_finite_for_every_integer(self) -> None:
        noise = gumbel(torch.tensor(self.ENDS))
        assert noise.dtype == torch.float32
        assert noise.isfinite().all()

    def test_it_follows_the_formula(self) -> None:
        """Closest where noise is large and decides draws; everywhere, no probability moves by more than 2^-24."""
        bits = torch.cat([torch.tensor(self.ENDS), noise_bits([1], [1], ids(100_000))[0], ids(1000)])
        u = (bits.double() + 0.5) / 2**32
        noise = gumbel(bits).double()
        exact = -(-(-u).log1p()).log()
        assert (noise - exact)[u < 0.5].abs().max() < 2e-6
        assert ((-(-noise).exp()).exp() - (1 - u)).abs().max() <= 2.0**-24

    def test_it_falls_as_the_integer_rises(self) -> None:
        bits = torch.cat([ids(10_000), torch.arange(0, 2**32, 99_991)]).sort().values
        assert (gumbel(bits).diff() <= 0).all()

    def test_its_distribution_is_gumbels(self) -> None:
        """The Kolmogorov-Smirnov distance over an even sweep of all integers: no more than the sweep's own step."""
        bits = torch.arange(2**11, 2**32, 2**12)
        noise = gumbel(bits).double().flip(0)
        rank = (torch.arange(len(noise)) + 0.5) / len(noise)
        assert ((-(-noise).exp()).exp() - rank).abs().max() < 1.0 / len(noise)

    def test_it_leaves_the_integers_alone(self) -> None:
        bits = ids(5)
        gumbel(bits)
        assert bits.tolist() == [0, 1, 2, 3, 4]
