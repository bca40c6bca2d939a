"""Our own engine on an NVIDIA GPU. Skipped where there is none: `make gpu` runs these tests where there is one."""

from __future__ import annotations

import warnings
from pathlib import Path
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
from tests.helpers.head_methods import NETWORK
from tests.unit.drafting.drafting_formulas import prompt_of
from tests.unit.drafting.feeding import Feeding
from tests.unit.drafting.test_graphed_drafts import (
    LAWS,
    METHODS,
    TOLERANCES,
    build_drafts,
    draft_as_deep_as_allowed,
    rounds,
)

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


def test_kernels_of_layers_compute_what_torchs_operators_do() -> None:
    from tests.unit.model import triton_cases

    with torch.device(GPU):
        for case in triton_cases.layer_cases():
            assert case["error"] < 1e-4, case


def test_kernels_predict_and_choose_as_torchs_operators_do() -> None:
    from tests.unit.drafting import draw_cases

    with torch.device(GPU):
        assert [case["case"] for case in draw_cases.compared_cases() if not case["same"]] == []


@pytest.mark.parametrize("sampling", LAWS)
@pytest.mark.parametrize("method", METHODS)
def test_graphs_guess_what_drafting_from_the_host_does(
    method: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In float32, for two requests: the second one replays the first one's graphs."""
    config = EngineConfig(slots=1024, device=GPU, dtype="float32")
    graphs = build_drafts(method, tmp_path / "graphs", config)
    draft_as_deep_as_allowed(graphs)
    monkeypatch.setenv("PACELINE_CUDA_GRAPHS", "0")
    host = build_drafts(method, tmp_path / "host", config)
    counts = []
    for key in (1, 2):
        ours, theirs = (
            Feeding(each, NETWORK, prompt_of(20), key=key, sampling=sampling, depth=4) for each in (graphs, host)
        )
        for _ in rounds(ours, theirs):
            assert ours.guesses() == pytest.approx(theirs.guesses(), abs=TOLERANCES.get(method, 1e-3))
        graphs.check_integrity()  # type: ignore[attr-defined]
        counts.append(len(graphs._way._graphs))  # type: ignore[attr-defined]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "method",
    [
        {"method": "ngram"},
        {"method": "draft_model", "model": DRAFT},
        {"method": "eagle3", "model": family.HEADS["eagle3"]},
    ],
    ids=lambda method: method["method"],
)
def test_drafts_change_no_token(method: dict[str, Any], temperature: float, way_of_a_kernel: str) -> None:
    llm = LLM(TARGET, engine_config=ENGINE, speculative_config={**method, "draft_placement": "target"})
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=96)
    prompts = ["def add(a, b):\n", "class Stack:\n    def push(self, item):\n"]
    plain = llm.generate(prompts, sampling, speculative=False)
    drafted = llm.generate(prompts, sampling)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain], way_of_a_kernel
    accepted = [sum(each) for each in zip(*(each.speculation.accepted_by_depth for each in drafted), strict=False)]
    assert accepted[0] > 0
    assert method["method"] != "eagle3" or accepted[1] > 0, "the head's own features feed the second level"
