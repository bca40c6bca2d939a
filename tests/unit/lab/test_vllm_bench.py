"""`paceline bench vllm` with processes that only count. `make test-vllm` has the real ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from paceline_lab.bench import vllm_comparison
from paceline_lab.bench.vllm_comparison import (
    COUPLED,
    DEAD,
    DRAFT_MODEL_POOL_THREADS,
    POOL,
    POOL_SUFFIX,
    SYNCHRONOUS,
    USELESS,
    VllmBenchOptions,
)
from paceline_lab.bench.workloads import Workload

SECONDS = {
    "plain": {1: 4.0, 2: 2.0},
    POOL: {1: 1.0, 2: 3.0},
    "ngram": {2: 1.6},
    POOL_SUFFIX: {1: 0.8},
    USELESS: {2: 2.5},
}


class FakeVllm:
    started: ClassVar[dict[tuple[str, int], Mapping[str, Any]]] = {}
    drafts: ClassVar[dict[str, str | None]] = {}

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.environment = environment
        self.threads = int(environment["OMP_NUM_THREADS"])

    def start(self, setup: Mapping[str, Any]) -> None:
        [method] = setup["methods"]
        assert setup["threads"] == self.threads
        self.started[method, self.threads] = setup
        self.drafts[method] = self.environment.get("PACELINE_DRAFTS")

    def generate(self, request: Mapping[str, Any]) -> tuple[list[list[int]], float]:
        tokens = [[7] * request["max_tokens"] for _ in request["prompts"]]
        return tokens, SECONDS[request["method"]][self.threads]

    def figures(self) -> Mapping[str, float]:
        return {"propose_ms": 0.25}

    def close(self) -> None:
        pass


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VllmBenchOptions:
    @contextmanager
    def draft_worker(target: str, draft: str, folder: Path) -> Iterator[str]:
        yield f"{draft}:1"

    monkeypatch.setattr(FakeVllm, "started", {})
    monkeypatch.setattr(FakeVllm, "drafts", {})
    monkeypatch.setattr(vllm_comparison, "PeerProcess", FakeVllm)
    monkeypatch.setattr(vllm_comparison, "draft_worker", draft_worker)
    monkeypatch.setattr(vllm_comparison, "useless", lambda draft: "wrong")
    monkeypatch.setattr(vllm_comparison, "models", lambda size, folder: {"target": size, "draft": "d", "head": "h"})
    monkeypatch.setattr(vllm_comparison, "prompts_of", lambda workload: [[1, 2], [3, 4]])
    monkeypatch.setattr(vllm_comparison, "workloads", lambda: [Workload("code completion", "", [])])
    monkeypatch.setattr(vllm_comparison, "repetitive_workloads", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    (tmp_path / "python").touch()
    return VllmBenchOptions(
        tmp_path / "python",
        sizes=["shipped"],
        loads=["code"],
        methods=["ngram", POOL, POOL_SUFFIX, USELESS],
        repeats=1,
        folder=tmp_path,
    )


def test_plain_decoding_and_the_pools_have_the_threads_that_are_best_for_them(options: VllmBenchOptions) -> None:
    found = vllm_comparison.run(Console(quiet=True), options)
    assert found["threads"] == {"vllm, shipped, plain": 2, "vllm, shipped, pool": 1}
    assert set(FakeVllm.started) == {
        ("plain", 1), ("plain", 2), ("ngram", 2), (POOL, 1), (POOL, 2), (POOL_SUFFIX, 1), (USELESS, 2),
    }  # fmt: skip
    ratios = found["ratios"]["shipped"]
    assert ratios["best pool / vllm best, code, batch 1"] == 2.0
    assert ratios["best pool / plain, code, batch 8"] == 2.5
    assert ratios["useless pool / plain, code, batch 1"] == 0.8
    assert found["propose_ms"]["shipped"][POOL] == 0.25


def test_pools_are_told_their_draft_worker_and_keep_no_finished_requests(options: VllmBenchOptions) -> None:
    vllm_comparison.run(Console(quiet=True), options)
    assert FakeVllm.drafts == {"plain": None, "ngram": None, POOL: "d:1", POOL_SUFFIX: "d:1", USELESS: "wrong:1"}
    suffix = {"lookups": ["suffix"], "lookup_settings": {"suffix_decoding_max_cached_requests": 0}}
    arguments = {method: setup["engine_args"] for (method, _), setup in FakeVllm.started.items()}
    assert arguments.pop(POOL_SUFFIX) == {"additional_config": {"paceline": suffix}}
    assert arguments == {"plain": {}, "ngram": {}, POOL: {}, USELESS: {}}, "vLLM compiles anew for other arguments"


def test_other_pools_are_measured_without_the_first(options: VllmBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, COUPLED, {1: 1.0, 2: 0.5})
    monkeypatch.setitem(SECONDS, DEAD, {2: 2.0})
    object.__setattr__(options, "methods", [COUPLED, DEAD])
    found = vllm_comparison.run(Console(quiet=True), options)
    assert found["threads"] == {"vllm, shipped, plain": 2, "vllm, shipped, pool": 2}
    worker = "paceline.vllm.coupled_worker.CoupledWorker"
    assert FakeVllm.started[COUPLED, 2]["engine_args"]["worker_cls"] == worker
    assert found["ratios"]["shipped"]["dead pool / plain, code, batch 1"] == 1.0


def test_what_pools_lack_is_measured_apart(options: VllmBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, DRAFT_MODEL_POOL_THREADS, {1: 1.25})
    monkeypatch.setitem(SECONDS, SYNCHRONOUS, {2: 2.5})
    object.__setattr__(options, "methods", [POOL, DRAFT_MODEL_POOL_THREADS, SYNCHRONOUS])
    ratios = vllm_comparison.run(Console(quiet=True), options)["ratios"]["shipped"]
    assert ratios["pool / draft_model with pool threads, code, batch 1"] == 1.25
    assert ratios["synchronous plain / plain, code, batch 1"] == 0.8
    draft_model, synchronous = FakeVllm.started[DRAFT_MODEL_POOL_THREADS, 1], FakeVllm.started[SYNCHRONOUS, 2]
    assert (draft_model["vllm_method"], draft_model["engine_args"]) == ("draft_model", {})
    assert (synchronous["vllm_method"], synchronous["engine_args"]) == ("plain", {"async_scheduling": False})
