"""Passes by stand-ins of a GPU's kernels beside passes by torch's operators, and what a CUDA graph reads."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from paceline.config import EngineConfig
from paceline.model import torch_attention
from paceline.model.attention import AttentionOptions, Heads, KVCache, Pass, TorchPass
from paceline.model.decoder import layer_of
from paceline.model.gpu.memory import GRAPH_ROWS, MOST_TABLES
from paceline.model.gpu.paged_pass import PagedPass, PassInput
from paceline.model.gpu.pass_graphs import Outputs, PassGraphs
from paceline.model.gpu.paths import DeviceTables, grouped
from paceline.model.layer_weights import LayerWeights, RotaryTables
from paceline.model.layers import TorchNetwork
from paceline.model.loading import build
from paceline.model.native.native_library import NativeLibrary
from paceline.model.network_factory import make_network
from paceline.model.rows import GROUP, TILE, Row, SlotTable
from paceline.model.torch_attention import TorchAttention, attend_once, find_kernels
from tests.exactness.test_rows import network
from tests.helpers import gpu_kernels
from tests.helpers.counted_kernels import Counting, FusedKernels
from tests.helpers.gpu_kernels import capture, use_stand_ins
from tests.helpers.row_paths import random_rows

HEADS = Heads(2, 3, 16)
SLOTS = 2000
WINDOWS = (0, 1, 20, TILE, 100)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cache() -> KVCache:
    """With keys and values in every slot."""
    cache = KVCache(1, SLOTS, HEADS, torch.float32, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(1)))
    cache.data[:, [0, cache.padding_slot]] = torch.nan  # nothing may read them into a row
    return cache


@pytest.fixture
def tables() -> DeviceTables:
    return DeviceTables(12, 3 * TILE, CPU)


def rows_of(seed: int, most: int = 64) -> list[Row]:
    return random_rows(random.Random(seed), SLOTS, most)


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
def test_both_attend_alike(
    window: int, sinks: torch.Tensor | None, softcap: float, cache: KVCache, tables: DeviceTables
) -> None:
    """Tables of earlier passes are in the way of later ones."""
    cache.data[:, [0, cache.padding_slot]] = 0.0  # torch's operators read them behind a mask
    options = AttentionOptions(0.2, window, softcap, sinks)
    for seed in range(12):
        rows = rows_of(seed)
        expected = attended(TorchPass.of(cache, rows), len(rows), options)
        this = PassInput.of(tables, gpu_kernels, rows, cache.padding_slot).start(cache, gpu_kernels)
        torch.testing.assert_close(attended(this, len(rows), options), expected, rtol=1e-4, atol=1e-5)


def test_the_memory_of_a_graph_keeps_nothing_of_earlier_passes(cache: KVCache, tables: DeviceTables) -> None:
    memory = {size: PassInput(tables, size, 8, 32 * size) for size in GRAPH_ROWS}
    for seed in range(40):
        size = random.Random(seed).choice(GRAPH_ROWS[1:6])
        rows = rows_of(seed, size)
        memory[size].load(rows, gpu_kernels, cache.padding_slot)
        this = memory[size].start(cache, gpu_kernels)
        fresh = PassInput.of(DeviceTables(12, 3 * TILE, CPU), gpu_kernels, whole(rows), cache.padding_slot)
        for window in WINDOWS:
            options = AttentionOptions(0.2, window)
            expected = attended(fresh.start(cache, gpu_kernels), len(rows), options)
            assert not expected.isnan().any()
            torch.testing.assert_close(attended(this, len(rows), options), expected, rtol=1e-5, atol=1e-6)
        for name in ("tokens", "positions", "slots"):
            assert getattr(memory[size], name)[: len(rows)].tolist() == getattr(fresh, name)[: len(rows)].tolist()


def whole(rows: list[Row]) -> list[Row]:
    """The same rows of tables that were sent nowhere."""
    copies = {row.slot_table: SlotTable(row.slot_table.slots) for row in rows}
    return [row._replace(slot_table=copies[row.slot_table]) for row in rows]


def test_rows_are_padded_to_the_next_graph(cache: KVCache) -> None:
    sizes: list[int] = []

    def forward(this: PagedPass) -> list[torch.Tensor]:
        sizes.append(len(this.tokens))
        return [this.tokens * 2]

    graphs = PassGraphs(forward, cache, gpu_kernels, DeviceTables(MOST_TABLES, 9, CPU), capture)
    assert sizes == sorted(GRAPH_ROWS, reverse=True)
    for count, size in ((1, 8), (8, 8), (9, 16), (17, 24), (33, 48), (64, 64), (65, 96), (256, 256)):
        [doubled] = graphs.run([SlotTable([n + 1]).row(n, 0) for n in range(count)]) or []
        assert doubled.tolist() == [2 * n for n in range(count)] + [0] * (size - count)
    assert graphs.run([SlotTable([n + 1]).row(n, 0) for n in range(257)]) is None
    assert len(sizes) == len(GRAPH_ROWS), "a replay calls no Python"


def test_a_pass_without_a_graph_has_the_rows_of_one(cache: KVCache) -> None:
    """Products are probed with these numbers of rows. Longer passes have whole groups."""
    tables = DeviceTables(MOST_TABLES, 9, CPU)
    for count, size in ((1, 8), (9, 16), (33, 48), (65, 96), (129, 192), (256, 256), (257, 264)):
        rows = [SlotTable([n + 1]).row(n, 0) for n in range(count)]
        assert len(PassInput.of(tables, gpu_kernels, rows, cache.padding_slot).tokens) == size


def test_branches_that_are_too_long_for_a_small_graph_take_a_larger_one(cache: KVCache) -> None:
    graphs = PassGraphs(lambda this: [this.tokens], cache, gpu_kernels, DeviceTables(2, 9, CPU), capture)
    table, branch = SlotTable([1, 2]), range(3, 3 + 100)
    [tokens] = graphs.run([table.branch_row(5, branch[: n + 93]) for n in range(8)]) or []
    assert tokens.tolist() == [5] * 8 + [0] * 24
    assert graphs.run([table.branch_row(5, range(3, 3 + 40 * 256))] * 8) is None


class TestTables:
    def test_only_what_has_changed_is_written(self, tables: DeviceTables) -> None:
        table = SlotTable(range(10, 30))

        def written() -> list[list[int]]:
            return tables.assign([table])[1].tolist()  # type: ignore[no-any-return]

        assert written() == [[0, n, 10 + n] for n in range(20)]
        assert written() == []
        table.slots.extend([7, 8])
        assert written() == [[0, 20, 7], [0, 21, 8]]
        table.truncate(15)
        table.slots.append(9)
        assert written() == [[0, 15, 9]]
        table.slots = [3, 4]  # type: ignore[assignment]
        assert written() == [[0, 0, 3], [0, 1, 4]]

    def test_the_table_that_was_used_longest_ago_makes_room(self) -> None:
        tables = DeviceTables(2, 9, CPU)
        first, second, third = (SlotTable([n]) for n in (1, 2, 3))
        assert tables.assign([first, second])[0] == {first: 0, second: 1}
        assert tables.assign([first, third])[0] == {first: 0, third: 1}
        indices, writes = tables.assign([second])
        assert (indices, writes.tolist()) == ({second: 0}, [[0, 0, 2]])
        with pytest.raises(ValueError, match="a pass of 3 requests"):
            tables.assign([first, second, third])

    def test_a_pass_of_a_long_prompt_sends_what_is_new(self, cache: KVCache) -> None:
        """A prompt of 32 k in chunks: bytes that are sent grow with its length, not with its square."""
        sent = 0
        tables, table = DeviceTables(1, 1 << 15, CPU), SlotTable()
        for start in range(0, 1 << 15, 256):
            table.slots.extend([1 + n % SLOTS for n in range(start, start + 256)])
            sent += len(tables.assign([table])[1])
        assert sent == len(table)


def test_groups_have_one_table_and_one_border() -> None:
    table, other = SlotTable(range(1, 9)), SlotTable([9])
    chunk = [table.row(0, n) for n in range(8)]
    guesses = [table.branch_row(0, [20 + n]) for n in range(3)]
    assert grouped([]) == [0]
    assert grouped([*chunk, *guesses]) == [0, 8, 11]
    assert grouped([*chunk[5:], *guesses]) == [0, 3, 6], "a chunk, and guesses below its last row"
    assert grouped([chunk[7], *guesses]) == [0, 4]
    assert grouped([chunk[7], other.row(0, 0), *guesses]) == [0, 1, 2, 5]
    assert grouped([*guesses * 3]) == [0, GROUP, 9]


class _NoTriton(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError("no C compiler")


@contextmanager
def an_h100(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setattr(torch_attention, "attend_once", lambda kernels, *_: kernels.plan)
    yield


def test_kernels_are_taken_where_they_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    half = torch.bfloat16
    with an_h100(monkeypatch):
        assert find_kernels(HEADS, half, CUDA) is sys.modules["paceline.model.gpu.triton_kernels"]
        assert find_kernels(Heads(2, 2, 264), half, CUDA) is None
        assert find_kernels(HEADS, half, CPU) is None


def test_kernels_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    with an_h100(monkeypatch):
        monkeypatch.setitem(sys.modules, "paceline.model.gpu.triton_kernels", _NoTriton("triton_kernels"))
        assert find_kernels(HEADS, torch.bfloat16, CUDA) is None
    assert "left out: no C compiler" in caplog.text


def test_the_first_call_of_kernels_is_one_that_passes_make() -> None:
    attend_once(gpu_kernels, HEADS, torch.float32, CPU)


def test_variables_leave_ways_out(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    assert ways(cache) == [(True, True), (True, False), (False, False)]
    monkeypatch.setenv("PACELINE_CUDA_GRAPHS", "0")
    assert ways(cache) == [(True, False), (False, False)]
    monkeypatch.setenv("PACELINE_ATTENTION", "torch")
    monkeypatch.delenv("PACELINE_CUDA_GRAPHS")
    assert ways(cache) == [(False, False)]


def ways(cache: KVCache) -> list[tuple[bool, bool]]:
    """Of what is tried, one after another: whether kernels compute, and whether graphs do."""
    found = list(TorchAttention.ways(cache, 100))
    rows = [SlotTable([1]).row(7, 0)]
    for each in found:
        assert isinstance(each(rows), PagedPass if each.kernels else TorchPass)
        assert (each.capture(_tokens) is not None) == each.graphs == ("CUDA graphs" in each.name)
        assert bool(each.name) == (each.kernels is not None)
    return [(each.kernels is not None, each.graphs) for each in found]


def _tokens(this: PagedPass) -> Outputs:
    return [this.tokens]


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
        name = make().attention_name
        assert (bool(name), "CUDA graphs" in name) == [(True, True), (True, False), (False, False)][broken]


@pytest.mark.parametrize("broken", [False, True])
def test_transformers_forward_is_captured_where_that_computes_the_same(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stand_ins(monkeypatch)
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    if broken:  # as where a graph keeps a number that Python has read
        monkeypatch.setattr(PassGraphs, "run", lambda graphs, rows: [0 * each for each in graphs._graphs[64][1]])
    model = build(network("olmo2", torch.float32), "olmo2", EngineConfig(slots=512), "", [])
    assert ("CUDA graphs" in model.cache.attention_name) == (not broken)
    if broken:
        return
    forwards = Mock(wraps=model._forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "_forward", forwards)
    table = SlotTable(range(1, 101))
    rows = [table.row(7, n) for n in range(100)]
    output = model.run(rows, range(30, 90), [0, 2])
    assert output.logits.shape == (60, model.vocabulary_size)
    assert output.hidden is not None
    assert output.hidden.shape == (100, 2, 128)
    again = model.run(rows[:50], range(8))
    assert not torch.equal(output.logits[:8], again.logits), "the pass before keeps its logits"
    forwards.assert_not_called()
    everything = model.run(rows, range(90)).logits
    forwards.assert_called_once()  # a graph computes fewer logits
    torch.testing.assert_close(everything[30:], output.logits)


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_slot_tables_are_as_long_as_the_longest_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has 256 positions, and rotary tables of them all."""
    use_stand_ins(monkeypatch)
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    made = Mock(wraps=DeviceTables)
    monkeypatch.setattr(torch_attention, "DeviceTables", made)
    build(network(kind, torch.float32), kind, EngineConfig(slots=512, max_model_len=100), "", [])
    made.assert_called_once_with(MOST_TABLES, 100, CPU)


def test_graphs_of_ranks_have_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank replays the exchanges that it captured."""
    use_stand_ins(monkeypatch)
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    monkeypatch.setattr(NativeLibrary, "_instance", None)
    made = network("llama", torch.float32)
    layers = [layer_of(layer) for layer in made.base_model.layers]
    rotary = RotaryTables.of(made.base_model.rotary_emb, 64)
    options = {"hidden": 128, "eps": 1e-5, "scale": 0.1, "embedding": made.base_model.embed_tokens.weight}
    states = []
    for graphs in (True, False):
        cache = KVCache(len(layers), 50, Heads(2, 2, 32), torch.float32, CPU)
        attention = TorchAttention(cache, 64, gpu_kernels, graphs)
        by = TorchNetwork(layers, Heads(2, 2, 32), attention, rotary, sums=lambda part: 2.0 * part, **options)
        rows = [SlotTable(range(1, 9)).row(n, n) for n in range(8)]
        for start in (0, 4):
            _, tapped = by.run(rows[start : start + 4], [], [len(layers)])
        states.append(tapped)
    torch.testing.assert_close(*states)


def test_a_layer_is_ten_kernels() -> None:
    """Two norms, four products, rotary embedding and store, attention and its merge, and the activation. On tensors
    without numbers, so nothing waits for one."""
    meta = torch.device("meta")

    def kernels_of(count: int) -> int:
        matrix, half, norm = (torch.zeros(*shape, device=meta) for shape in ((128, 128), (64, 128), (128,)))
        weights = LayerWeights(matrix, half, half, *[matrix] * 4, input_norm=norm, inner_norm=norm)
        cache = KVCache(count, 50, Heads(2, 2, 32), torch.float32, meta)
        attention = TorchAttention(cache, 64, FusedKernels)
        rotary = RotaryTables(*torch.zeros(2, 64, 16, device=meta))
        options = {"hidden": 128, "eps": 1e-5, "scale": 0.1, "embedding": matrix, "norm": norm}
        network = TorchNetwork([weights] * count, cache.heads, attention, rotary, **options)
        this = PassInput(DeviceTables(1, 64, meta), 8, 0, 1).start(cache, FusedKernels)
        with torch.inference_mode(), Counting() as counting:
            outputs = network.forward(this)
        assert len(outputs) == count + 2
        return counting.kernels

    assert kernels_of(3) - kernels_of(2) == 10
