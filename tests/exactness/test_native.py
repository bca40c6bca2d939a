"""The native pass computes the formula for every kind of layer, and a row depends on its own path alone.

test_rows.py has transformers' architectures. This file has layers that no architecture there has, odd sizes, and
threads; the reference is the formula in float64.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.engine_config import KVCacheDtype
from paceline.model import network_factory
from paceline.model.attention import Heads, KVCache
from paceline.model.layer_weights import DecoderLayerWeights, RotaryTables, StateFusion
from paceline.model.layers import TorchNetwork
from paceline.model.native import native_network as native
from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_library import NativeLibrary, NativeProduct
from paceline.model.rows import SlotTable
from paceline.model.torch_attention import TorchAttention

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")

VOCABULARY, LONGEST, SLOTS, EPS = 83, 256, 512, 1e-5
WINDOWS = (1, 8, 32, 63, 64, 65, 96)


@dataclass(frozen=True)
class Shape:
    """The sizes and options of a network of two layers."""

    hidden: int = 64
    inner: int = 96
    query_heads: int = 4
    key_heads: int = 2
    head_size: int = 32
    windows: tuple[int, int] = (0, 0)
    biases: bool = False
    head_norms: bool = False
    gated: bool = False
    fusion: str = ""
    """Names of the `StateFusion`'s parts; empty: no fusion."""

    @property
    def heads(self) -> Heads:
        return Heads(self.key_heads, self.query_heads // self.key_heads, self.head_size)


SHAPES = {
    "plain": Shape(),
    "one key head": Shape(query_heads=7, key_heads=1),
    "a key head each": Shape(query_heads=3, key_heads=3),
    "heads of 80": Shape(head_size=80),
    "heads of 96": Shape(head_size=96),
    "heads of 256": Shape(head_size=256, query_heads=2),
    "odd widths": Shape(hidden=100, inner=70, head_size=50),
    "biases": Shape(biases=True),
    "head norms": Shape(head_norms=True),
    "everything": Shape(100, 70, 6, 2, 48, (40, 0), biases=True, head_norms=True),
    "gated": Shape(gated=True),
    "gated, odd widths": Shape(100, 70, 6, 2, 50, head_norms=True, gated=True),
    "gated, with a projection": Shape(gated=True, fusion="token_norm state_norm projection"),
    "fusion": Shape(fusion="token_norm state_norm"),
    "fusion, odd widths": Shape(hidden=100, inner=70, head_size=50, fusion="token_norm state_norm norms_residual"),
    "fusion, plain": Shape(fusion="plain"),
    "projection": Shape(fusion="projection"),
    "projection, odd widths": Shape(
        hidden=100, inner=70, head_size=50, fusion="token_norm state_norm projection projection_bias"
    ),
    **{f"window {n}": Shape(windows=(n, 0)) for n in WINDOWS},
}
VARIED = ["everything", "gated, odd widths", "fusion, odd widths", "projection, odd widths"]


@dataclass
class Weights:
    shape: Shape
    dtype: torch.dtype
    kv_cache_dtype: KVCacheDtype = "auto"
    layers: list[DecoderLayerWeights] = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self.layers = [self._layer(n) for n in range(2)]
        self.fusion = self._fusion(self.shape.fusion.split()) if self.shape.fusion else None
        self.embedding = self._random(VOCABULARY, self.shape.hidden, scale=1.0)
        self.norm = self._random(self.shape.hidden, scale=1.0)
        self.head = self._random(VOCABULARY, self.shape.hidden)
        angles = torch.outer(torch.arange(LONGEST), 100.0 ** -torch.linspace(0, 1, self.shape.head_size // 2))
        self.rotary = RotaryTables(angles.cos(), angles.sin())

    def _random(self, *sizes: int, scale: float | None = None) -> Tensor:
        scale = sizes[-1] ** -0.5 if scale is None else scale
        return (torch.randn(*sizes, generator=self._generator) * scale).to(self.dtype)

    def _fusion(self, parts: list[str]) -> StateFusion:
        hidden = self.shape.hidden
        sizes = {"token_norm": (hidden,), "state_norm": (hidden,), "projection_bias": (hidden,)}
        tensors = {name: self._random(*size, scale=1.0) for name, size in sizes.items() if name in parts}
        if "projection" in parts:
            tensors["projection"] = self._random(hidden, 2 * hidden)
        return StateFusion(**tensors, norms_residual="norms_residual" in parts)

    def _layer(self, n: int) -> DecoderLayerWeights:
        s = self.shape
        width = 2 * s.hidden if n == 0 and s.fusion and "projection" not in s.fusion else s.hidden
        queries, keys = s.query_heads * s.head_size, s.key_heads * s.head_size
        sizes = {
            "query": (queries, width),
            "key": (keys, width),
            "value": (keys, width),
            "output": (s.hidden, queries),
            "gate": (s.inner, s.hidden),
            "up": (s.inner, s.hidden),
            "down": (s.hidden, s.inner),
        }
        tensors = {name: self._random(*size) for name, size in sizes.items()}
        if s.biases:
            tensors |= {f"{name}_bias": self._random(size[0], scale=0.3) for name, size in sizes.items()}
        if s.head_norms:
            tensors |= {name: self._random(s.head_size, scale=1.0) for name in ("query_norm", "key_norm")}
        if s.gated:
            tensors["output_gate"] = self._random(*sizes["query"], scale=1.0)
        tensors |= {name: self._random(s.hidden, scale=1.0) for name in ("input_norm", "inner_norm")}
        return DecoderLayerWeights(**tensors, window=s.windows[n])

    def network(self, kind: type = native.NativeNetwork, **options: Any) -> native.NativeNetwork:
        s = self.shape
        width = native.head_width(s.heads) if kind is native.NativeNetwork else None
        cache = KVCache(2, SLOTS, s.heads, self.dtype, torch.device("cpu"), width, self.kv_cache_dtype)
        options |= {"embedding": self.embedding, "norm": self.norm, "head": self.head, "fusion": self.fusion}
        over = cache if kind is native.NativeNetwork else TorchAttention(cache, len(self.rotary.cosines))
        made: native.NativeNetwork = kind(
            self.layers, s.heads, over, self.rotary, hidden=s.hidden, eps=EPS, scale=s.head_size**-0.5, **options
        )
        return made

    def given(self, count: int) -> Tensor | None:
        """States for tokens, [count, hidden]; None without a fusion."""
        if self.fusion is None:
            return None
        generator = torch.Generator().manual_seed(11)
        return torch.randn(count, self.shape.hidden, generator=generator).to(self.dtype) * 3

    def _first_inputs(self, embedded: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first layer's input, and the input of its attention."""
        if self.fusion is None or given is None:
            return embedded, _normed(embedded, self.layers[0].input_norm)
        f, state = self.fusion, given.double()
        parts = [(embedded, f.token_norm), (state, f.state_norm)]
        joined = torch.cat([x if norm is None else _normed(x, norm) for x, norm in parts], -1)
        if f.projection is None:
            return _normed(state, f.state_norm) if f.norms_residual else state, joined
        x = joined @ f.projection.double().T + (0 if f.projection_bias is None else f.projection_bias.double())
        return x, _normed(x, self.layers[0].input_norm)

    def formula(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits [tokens, vocabulary], and each layer's input, the last one's output and the final norm's; float64."""
        x, first = self._first_inputs(self.embedding.double()[tokens], self.given(len(tokens)))
        states = [x]
        for n, layer in enumerate(self.layers):
            x = x + self._attention(layer, first if n == 0 else _normed(x, layer.input_norm))
            y = _normed(x, layer.inner_norm)
            gate, up = (_product(y, layer, name) for name in ("gate", "up"))
            x = x + _product(F.silu(gate) * up, layer, "down")
            states.append(x)
        final = _normed(x, self.norm)
        return final @ self.head.double().T, [*states, final]

    def _attention(self, layer: DecoderLayerWeights, x: Tensor) -> Tensor:
        s, count = self.shape, len(x)
        query, key, value = (
            _product(x, layer, name).view(count, -1, s.head_size) for name in ("query", "key", "value")
        )
        if layer.query_norm is not None:
            query, key = _normed(query, layer.query_norm), _normed(key, layer.key_norm)
        query, key = (self._rotated(heads) for heads in (query, key))
        key, value = (heads.repeat_interleave(s.query_heads // s.key_heads, 1) for heads in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * s.head_size**-0.5
        distance = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (distance < 0) | (distance >= (layer.window or count))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        if layer.output_gate is not None:
            attended = attended * (x @ layer.output_gate.double().T).sigmoid()
        return _product(attended, layer, "output")

    def _rotated(self, heads: Tensor) -> Tensor:
        cosines, sines = (table[: len(heads), None].double() for table in (self.rotary.cosines, self.rotary.sines))
        a, b = heads.chunk(2, -1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _product(x: Tensor, layer: DecoderLayerWeights, name: str) -> Tensor:
    bias = getattr(layer, f"{name}_bias")
    y = x @ getattr(layer, name).double().T
    return y if bias is None else y + bias.double()


def tokens(count: int) -> list[int]:
    return random.Random(7).choices(range(VOCABULARY), k=count)


def one_by_one(network: native.NativeNetwork, sequence: list[int], given: Tensor | None = None) -> Tensor:
    table = SlotTable(range(SLOTS - 1, SLOTS - 1 - len(sequence), -1))
    states = [None if given is None else given[i : i + 1] for i in range(len(sequence))]
    return torch.cat([network.run([table.row(t, i)], [0], states=states[i])[0] for i, t in enumerate(sequence)])


def in_trees(network: native.NativeNetwork, sequence: list[int], given: Tensor | None = None) -> Tensor:
    """Run in steps of several rows: each verifies a part of the sequence as a branch among decoys, and commits it."""
    rng, table, logits = random.Random(3), SlotTable(), []
    free = list(range(1, SLOTS))
    while (done := len(table)) < len(sequence):
        rows, wanted, inputs = [], [], []
        branch: list[int] = []
        for i, token in enumerate(sequence[done : done + rng.randint(1, 20)], done):
            for slot in rng.sample(free, rng.randint(0, 2)):
                rows.append(table.branch_row(rng.randrange(VOCABULARY), [*branch, slot]))
                inputs.append(i)
            branch.append(free.pop(rng.randrange(len(free))))
            wanted.append(len(rows))
            rows.append(table.branch_row(token, branch))
            inputs.append(i)
        logits.append(network.run(rows, wanted, states=None if given is None else given[inputs])[0])
        table.slots.extend(branch)
    return torch.cat(logits)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


NUMBERS: dict[str, tuple[torch.dtype, KVCacheDtype, float]] = {
    "float32": (torch.float32, "auto", 1e-5),
    "bfloat16": (torch.bfloat16, "auto", 0.05),
    "int8 cache": (torch.float32, "int8", 0.02),
}
"""The dtypes of a network and of its cache, and how far its logits may be from the formula's, of the largest."""


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_formula_s_and_rows_do_not_depend_on_other_rows(shape: str, numbers: str) -> None:
    """With a cache in 8 bits logits are off by 0.0113 of the largest at most."""
    dtype, kv_cache_dtype, tolerance = NUMBERS[numbers]
    weights, sequence = Weights(SHAPES[shape], dtype, kv_cache_dtype), tokens(140)
    expected, _ = weights.formula(sequence)
    given = weights.given(len(sequence))
    alone = one_by_one(weights.network(), sequence, given)
    assert (alone - expected).abs().max() < tolerance * expected.abs().max()
    assert torch.equal(in_trees(weights.network(), sequence, given), alone)


def test_a_pair_with_a_large_bias_leaves_other_numbers_of_a_key_in_8_bits_exact() -> None:
    """Logits are off by 0.0117 of the largest; by 0.088 if the pair has the scale of its neighbours."""
    weights = {dtype: Weights(Shape(biases=True), torch.float32, dtype) for dtype in ("auto", "int8")}
    logits = []
    for each in weights.values():
        for layer in each.layers:
            assert layer.key_bias is not None
            layer.key_bias[[3, 19]] = torch.tensor([90.0, -60.0])
        logits.append(one_by_one(each.network(), tokens(140)))
    off = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
    assert off < 0.03


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A library with this number of threads and parts."""
    before = NativeLibrary.instance()
    NativeLibrary.set_instance(NativeLibrary(request.param))
    yield request.param
    NativeLibrary.set_instance(before)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", VARIED)
def test_rows_do_not_depend_on_the_number_of_threads(shape: str, threads: int, numbers: str) -> None:
    dtype, kv_cache_dtype, _ = NUMBERS[numbers]
    weights, sequence = Weights(SHAPES[shape], dtype, kv_cache_dtype), tokens(90)
    given = weights.given(len(sequence))
    ours = in_trees(weights.network(), sequence, given)
    NativeLibrary.set_instance(NativeLibrary(1))
    assert torch.equal(ours, one_by_one(weights.network(), sequence, given))


def test_networks_may_run_in_several_python_threads(threads: int) -> None:
    """A user may have an LLM in each thread. The pool cannot run two passes at once."""
    weights, sequence = Weights(SHAPES["plain"], torch.float32), tokens(60)
    alone = one_by_one(weights.network(), sequence)
    networks = [weights.network() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for logits in pool.map(lambda network: one_by_one(network, sequence), networks):
            assert torch.equal(logits, alone)


@pytest.mark.parametrize("shape", VARIED)
def test_states_of_layers_are_the_formula_s(shape: str, threads: int) -> None:
    weights, sequence = Weights(SHAPES[shape], torch.float32), tokens(50)
    _, expected = weights.formula(sequence)
    table = SlotTable(range(1, 51))
    rows = [table.row(token, i) for i, token in enumerate(sequence)]
    _, states = weights.network().run(rows, [49], [3, 0, 2, 1], states=weights.given(50))
    assert states is not None
    for got, n in zip(states.unbind(1), (3, 0, 2, 1), strict=True):
        assert (got - expected[n]).abs().max() < 1e-5 * expected[n].abs().max()


FUSED = [name for name, shape in SHAPES.items() if shape.fusion and not shape.gated]
TORCH_S = ["plain", "biases", "head norms", "window 8", *FUSED]


def test_no_network_leaves_a_gate_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_factory, "NativeNetwork", Mock(side_effect=NativeUnavailableError("switched off")))
    made = Weights(SHAPES["gated"], torch.float32)
    with pytest.raises(NativeUnavailableError, match="gate attention"):
        network_factory.make_network(made.layers, made.shape.heads, SLOTS, made.rotary)


@pytest.mark.parametrize("shape", TORCH_S)
def test_torch_s_operators_compute_the_same(shape: str) -> None:
    weights, sequence = Weights(SHAPES[shape], torch.float32), tokens(140)
    expected, _ = weights.formula(sequence)
    with torch.inference_mode():
        got = one_by_one(weights.network(TorchNetwork), sequence, weights.given(len(sequence)))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("out", "into"), [(1, 1), (16, 16), (83, 50), (300, 129)])
def test_a_product_is_the_formula_s(out: int, into: int, dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, bias, x = (torch.randn(*size, generator=generator) for size in ((out, into), (out,), (23, into)))
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    product = NativeProduct(weight, bias)
    together = product(x)
    expected = x.double() @ weight.double().T + bias.double()
    assert (together - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(together, torch.cat([product(row[None]) for row in x]))
    assert product(x[:0]).shape == (0, out)


def test_a_sum_over_ranks_that_fails_ends_the_pass_with_its_error() -> None:
    def lost(partial: Tensor) -> Tensor:
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        Weights(Shape(), torch.float32).network(sums=lost).run([SlotTable([1]).row(5, 0)], [0])


def test_the_largest_matrix_is_copied_before_the_layers() -> None:
    """It is in memory twice meanwhile: a load takes least when that is at its beginning."""
    weights = Weights(Shape(), torch.float32)
    network = weights.network(layer_packed=lambda: weights.head.fill_(torch.nan))
    assert network.run([SlotTable([1]).row(5, 0)], [0])[0].isfinite().all()


def test_memory_comes_back_when_a_network_is_dropped() -> None:
    big = Weights(Shape(hidden=512, inner=4096), torch.float32)
    size = sum(getattr(layer, name).nbytes for layer in big.layers for name in ("gate", "up", "down"))

    def resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * 4096

    big.network()
    before = resident()
    for _ in range(8):
        big.network()
    assert resident() - before < 2 * size
