"""Our own engine on an NVIDIA GPU. Skipped where there is none: `make gpu` runs these tests where there is one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from paceline import family
from paceline.config import EngineConfig, SamplingParams
from paceline.llm import LLM
from paceline.model.attention import AttentionOptions, Heads, KVCache, TorchPass
from paceline.model.gpu.paged_pass import PassInput
from paceline.model.gpu.paths import DeviceTables
from paceline.model.model import Model
from paceline.model.model_loader import load
from paceline.model.row_probe import PROBED_COUNTS, is_row_invariant
from paceline.model.rows import TILE, Row, SlotTable
from paceline.model.torch_attention import TORCH, find_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
TARGET, DRAFT = family.NAMES
GPU = "cuda:0"
ENGINE = {"device": GPU, "slots": 4096}


WAYS = {
    "graphs": {},
    "kernels": {"PACELINE_CUDA_GRAPHS": "0"},
    TORCH: {"PACELINE_ATTENTION": TORCH},
}
"""Environments."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By kernels, with and without CUDA graphs, and by torch's operators."""
    for name, value in WAYS[request.param].items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.fixture
def way_of_a_kernel(way: str) -> str:
    if way == TORCH:
        pytest.skip("torch's products depend on the number of rows")
    return way


def model(device: str = GPU, **settings: Any) -> Model:
    return load(TARGET, EngineConfig(**{"slots": 4096, "threads": 1, **settings, "device": device}))


def rows_of(start: int, count: int, first_slot: int) -> list[Row]:
    table = SlotTable(range(first_slot, first_slot + start + count))
    return [table.row((7 * n + 3) % 500, n) for n in range(start, start + count)]


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, 40), AttentionOptions(0.1, 0, 5.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float32, 1e-4)])
def test_kernels_attend_as_torch_does(
    dtype: torch.dtype, tolerance: float, options: AttentionOptions, size: int
) -> None:
    """A chunk, siblings, and a chain of guesses over a tile's border, after more than a split."""
    heads, device = Heads(2, 4, size), torch.device(GPU)
    cache = KVCache(1, 3000, heads, dtype, device)
    cache.data.normal_(generator=torch.Generator(GPU).manual_seed(1))
    kernels = find_kernels(heads, dtype, device)
    assert kernels is not None
    trunk, chain = SlotTable(range(1, 20 * TILE - 3)), range(2500, 2516)
    rows = [*rows_of(TILE + 3, 5, 2000), *(trunk.branch_row(5, [2600 + n]) for n in range(6))]
    rows += [trunk.branch_row(5, chain[: n + 1]) for n in range(len(chain))]
    given = [torch.randn(32, n, size, device=device, dtype=dtype) for n in (8, 2, 2)]
    this = PassInput.of(DeviceTables(4, 3000, device), kernels, rows, cache.padding_slot).start(cache, kernels)
    expected = TorchPass.of(cache, rows).attend(*given, 0, options)[: len(rows)]
    ours = this.attend(*given, 0, options)[: len(rows)]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_a_gpu_computes_what_the_cpu_computes(way: str) -> None:
    rows = rows_of(0, 150, 1)
    ours = model().run(rows, range(150)).logits.float().cpu()
    expected = model("cpu").run(rows, range(150)).logits.float()
    errors = (ours - expected).abs().amax(-1) / expected.abs().max()
    assert float(errors.median()) < 0.02, way


def test_rows_do_not_depend_on_other_rows(way_of_a_kernel: str) -> None:
    assert is_row_invariant(model(), PROBED_COUNTS), way_of_a_kernel


def test_a_graph_computes_what_its_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = model()
    monkeypatch.setenv("PACELINE_CUDA_GRAPHS", "0")
    kernels = model()
    for count in (1, 8, 13, 48, 64, 90, 256):  # which are padded alike with and without a graph
        for start in (0, 10, TILE - 1, 3 * TILE):
            outputs = []
            for each in (graphs, kernels):
                each.run(rows_of(0, max(1, start), 1), [])
                outputs.append(each.run(rows_of(start, count, 1), range(count)).logits)
            assert torch.equal(*outputs), (start, count)


def test_a_pass_does_not_wait_for_the_gpu(way: str) -> None:
    this, rows = model(), rows_of(2 * TILE, 8, 1)
    this.run(rows_of(0, 2 * TILE, 1), [])
    this.run(rows, [0, 7])
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        this.run(rows, [0, 7], [1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", [{"method": "ngram"}, {"method": "draft_model", "model": DRAFT}])
def test_drafts_change_no_token(method: dict[str, Any], temperature: float, way_of_a_kernel: str) -> None:
    llm = LLM(TARGET, engine_config=ENGINE, speculative_config={**method, "draft_placement": "target"})
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=96)
    prompts = ["def add(a, b):\n", "class Stack:\n    def push(self, item):\n"]
    plain = llm.generate(prompts, sampling, speculative=False)
    drafted = llm.generate(prompts, sampling)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain], way_of_a_kernel
    assert sum(sum(each.speculation.accepted_by_depth) for each in drafted) > 0
