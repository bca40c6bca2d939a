"""Passes by flash-attn's stand-in beside passes by torch's operators, and what a CUDA graph reads."""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from paceline.model import paged_attention
from paceline.model.attention import AttentionOptions, Heads, KVCache, Pass, TorchPass
from paceline.model.decoder import layer_of
from paceline.model.layer_weights import RotaryTables
from paceline.model.native.native_library import NativeLibrary
from paceline.model.network_factory import make_network
from paceline.model.paged_attention import (
    FLASH_ATTN,
    FLASH_ATTN_MODULE,
    TRITON,
    AttentionKernel,
    PagedPass,
    attend_once,
    find_kernels,
)
from paceline.model.pass_graphs import GRAPH_ROWS, PassGraphs
from paceline.model.rows import TILE, Row, SlotTable
from paceline.model.torch_attention import TorchAttention
from tests.exactness.test_rows import network
from tests.helpers.flash_attention import capture, flash_attn_with_kvcache, use_stand_ins

HEADS = Heads(2, 3, 16)
LONGEST = 3 * TILE
SLOTS = 2000
WINDOWS = (0, 1, 20, TILE, 100)


@pytest.fixture
def cache() -> KVCache:
    """With keys and values in every slot."""
    cache = KVCache(1, SLOTS, HEADS, torch.float32, torch.device("cpu"))
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    cache.data[:, [0, cache.padding_slot]] = torch.nan  # nothing may read them into a row
    return cache


def random_rows(seed: int, most: int) -> list[Row]:
    """Chunks, chains and branches of several requests, whose slots are scattered."""
    generator = random.Random(seed)
    slots = iter(generator.sample(range(1, SLOTS + 1), SLOTS))
    rows: list[Row] = []
    while len(rows) < most - 8 and (not rows or generator.random() < 0.8):
        length = generator.choice([1, TILE - 1, TILE, TILE + 1, 2 * TILE - 2, generator.randrange(1, LONGEST - 8)])
        table = SlotTable(next(slots) for _ in range(length))
        chunk = generator.randrange(0, min(4, length))
        rows += [table.row(7, position) for position in range(length - chunk, length)]
        branch: list[int] = []
        for _ in range(generator.randrange(5)):
            rows.append(table.branch_row(8, [*branch, next(slots)]))
            branch.append(next(slots))
            rows.append(table.branch_row(9, branch))
        rows = rows[:most]
    return rows


def attended(this: Pass, count: int, options: AttentionOptions, seed: int = 3) -> torch.Tensor:
    """The attention of the first rows, to keys that the pass stores."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(64, HEADS.kv_heads * HEADS.queries_per_kv, HEADS.head_size, generator=generator)
    key, value = torch.randn(2, 64, HEADS.kv_heads, HEADS.head_size, generator=generator)
    size = len(this.tokens)
    return this.attend(query[:size], key[:size], value[:size], 0, options)[:count]


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, 6)])
@pytest.mark.parametrize("window", WINDOWS)
def test_both_attend_alike(window: int, sinks: torch.Tensor | None, softcap: float, cache: KVCache) -> None:
    cache.data[:, [0, cache.padding_slot]] = 0.0  # torch's operators read them behind a mask
    options = AttentionOptions(0.2, window, softcap, sinks)
    for seed in range(12):
        rows = random_rows(seed, 64)
        expected = attended(TorchPass.of(cache, rows), len(rows), options)
        found = attended(PagedPass.of(cache, flash_attn_with_kvcache, rows), len(rows), options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_memory_of_a_graph_keeps_nothing_of_earlier_passes(cache: KVCache) -> None:
    memory = PagedPass.empty(cache, flash_attn_with_kvcache, GRAPH_ROWS[-1], LONGEST, WINDOWS)
    for seed in range(60):
        size = random.Random(seed).choice(GRAPH_ROWS)
        rows = random_rows(seed, size)
        this = PagedPass.of(cache, flash_attn_with_kvcache, rows, size)
        memory.first(size).load(this)
        for window in WINDOWS:
            options = AttentionOptions(0.2, window)
            expected = attended(this, len(rows), options)
            assert not expected.isnan().any()
            torch.testing.assert_close(attended(memory.first(size), len(rows), options), expected, rtol=1e-5, atol=1e-6)
        for name in ("tokens", "positions", "slots"):
            assert getattr(memory, name)[:size].tolist() == getattr(this, name).tolist()


def test_rows_are_padded_to_the_next_graph(cache: KVCache) -> None:
    sizes: list[int] = []

    def forward(this: PagedPass) -> list[torch.Tensor]:
        sizes.append(len(this.tokens))
        return [this.tokens * 2]

    graphs = PassGraphs(forward, cache, flash_attn_with_kvcache, LONGEST, [0], capture)
    assert sizes == sorted(GRAPH_ROWS, reverse=True)
    for count, size in ((1, 8), (8, 8), (9, 16), (17, 24), (33, 48), (64, 64)):
        [doubled] = graphs.run([SlotTable([n + 1]).row(n, 0) for n in range(count)]) or []
        assert doubled.tolist() == [2 * n for n in range(count)] + [0] * (size - count)
    assert graphs.run([SlotTable([n + 1]).row(n, 0) for n in range(65)]) is None
    assert len(sizes) == len(GRAPH_ROWS), "a replay calls no Python"


CUDA = torch.device("cuda")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn and Triton beside an H100, whose kernels compute nothing here."""
    for name in (FLASH_ATTN_MODULE, TRITON, OURS):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.flash_attn_with_kvcache = name  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(paged_attention, "attend_once", lambda *_: None)


OURS = "paceline.model.triton_attention"
FAULTS = [
    *(RuntimeError("no paged KV"), OSError("undefined symbol"), ImportError("no _C")),
    ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)"),
]
BY_FLASH, BY_TRITON = AttentionKernel(FLASH_ATTN, FLASH_ATTN_MODULE), AttentionKernel(TRITON, OURS)  # type: ignore[arg-type]


@pytest.mark.usefixtures("installed")
def test_kernels_are_taken_where_they_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    assert list(find_kernels(HEADS, half, CUDA)) == [BY_FLASH, BY_TRITON]
    assert list(find_kernels(HEADS, half, CUDA, FLASH_ATTN)) == [BY_FLASH]
    assert list(find_kernels(HEADS, half, CUDA, TRITON)) == [BY_TRITON]
    assert list(find_kernels(HEADS, torch.float32, CUDA)) == [BY_TRITON]
    assert list(find_kernels(Heads(2, 2, 36), half, CUDA)) == [BY_TRITON]
    assert list(find_kernels(Heads(2, 2, 264), half, CUDA)) == []
    assert list(find_kernels(HEADS, half, torch.device("cpu"))) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert list(find_kernels(HEADS, half, CUDA)) == [BY_TRITON]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("error", FAULTS)
def test_a_build_that_fails_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(kernel: object, *_: object) -> None:
        if kernel == FLASH_ATTN_MODULE:
            raise error

    monkeypatch.setattr(paged_attention, "attend_once", fails)
    assert list(find_kernels(HEADS, torch.bfloat16, CUDA)) == [BY_TRITON]
    assert f"{FLASH_ATTN} is left out: {error}" in caplog.text


def test_packages_that_are_not_installed_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert list(find_kernels(HEADS, torch.bfloat16, CUDA)) == []


def test_the_first_call_of_a_kernel_is_one_that_passes_make() -> None:
    attend_once(flash_attn_with_kvcache, HEADS, torch.float32, torch.device("cpu"))


def test_variables_leave_ways_out(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    assert [each.name for each in ways(cache)] == [*WITH_GRAPHS, ""]
    monkeypatch.setenv("PACELINE_CUDA_GRAPHS", "0")
    assert [each.name for each in ways(cache)] == [WITH_GRAPHS[1], ""]
    monkeypatch.setenv("PACELINE_ATTENTION", "torch")
    monkeypatch.delenv("PACELINE_CUDA_GRAPHS")
    assert [each.name for each in ways(cache)] == [""]


WITH_GRAPHS = [f"flash_attn_3 of an unknown version{graphs}" for graphs in (", CUDA graphs", "")]


def ways(cache: KVCache) -> list[TorchAttention]:
    """What is tried, one after another."""
    found = list(TorchAttention.ways(cache))
    rows = [SlotTable([1]).row(7, 0)]
    for each in found:
        assert isinstance(each.start_pass(rows), PagedPass if each.kernel else TorchPass)
        assert (each.capture(lambda this: [this.tokens], LONGEST, [0]) is not None) == each.graphs
    return found


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_what_computes_wrong_gives_way_to_what_is_simpler(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ways of a network compute something wrong. `broken` of three: if all do, the model is refused."""
    use_stand_ins(monkeypatch)
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    tried: list[object] = []

    def check(network: object) -> None:
        tried.append(network)
        if len(tried) <= broken:
            raise ValueError("its logits are off")

    def make() -> KVCache:
        made = network("llama", torch.float32)
        layers = [layer_of(layer) for layer in made.base_model.layers]
        rotary = RotaryTables(torch.ones(9, 16), torch.zeros(9, 16))
        options = {"hidden": 128, "eps": 1e-5, "scale": 0.1, "embedding": made.base_model.embed_tokens.weight}
        with torch.inference_mode():
            return make_network(layers, Heads(2, 2, 32), 50, rotary, check, **options)[1]

    if broken == 3:
        with pytest.raises(ValueError, match="its logits are off"):
            make()
    else:
        assert make().attention_name == [*WITH_GRAPHS, ""][broken]
