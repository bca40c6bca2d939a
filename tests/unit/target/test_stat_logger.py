"""Counts of what speculation did: of a request, and of a target's steps, from which another target starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.policy.calibration import Calibration
from paceline.engine.engine_loop import StepResult
from paceline.messages import (
    Delta,
    EngineLoad,
    FinishReason,
    SpeculationStats,
    TargetDescription,
    Timings,
    Usage,
)
from paceline.state import StateStore, open_store
from paceline.telemetry.step_stats import StatsTimer, StepStats
from paceline.telemetry.target_metrics import TargetMetrics
from paceline.telemetry.tracing import NO_TRACING
from paceline_services.target.__main__ import parse_options
from paceline_services.target.stat_logger import StatLogger
from paceline_services.target.target_worker import target_worker

DESCRIPTION = TargetDescription("t", "m", "f", 64, 512, 256, rows_invariant=True, eos_token_ids=(), method="ngram")


def test_statistics_are_due_once_in_an_interval() -> None:
    timer = StatsTimer()
    assert [timer.due(now) for now in (5.0, 5.25, 5.5, 5.75, 6.0)] == [True, False, True, False, True]


async def record(store: StateStore, steps: Sequence[StepStats]) -> None:
    async with store.recorder() as recorder:
        stats = StatLogger(DESCRIPTION, recorder, TargetMetrics(CollectorRegistry(), "m", 256))
        stats.observe(steps)
        await stats.run_once()


def step(*samples: tuple[int, bool]) -> StepStats:
    stats = SpeculationStats()
    stats.record(len(samples), 1, any(hit for _, hit in samples))
    return StepStats(0.01, 8, 1, 0, 256, speculation=stats, calibration_samples=samples)


async def test_the_load_of_a_step_without_deltas_counts() -> None:
    """A step that computed a part of a prompt has none."""
    on: dict[type, Callable[[StepResult], None]] = {}
    ready = asyncio.get_running_loop().create_future()
    ready.set_result(DESCRIPTION)
    connection = SimpleNamespace(on=on.__setitem__, send=lambda message: None)
    process = SimpleNamespace(connection=connection, ready=ready, abort=lambda: None)
    options = parse_options(["--model", "m", "--redis-url", "redis://unused"])
    async with (
        open_store(None) as store,
        target_worker(options, process, store, None, NO_TRACING) as worker,  # type: ignore[arg-type]
    ):
        on[StepResult](StepResult([], EngineLoad(running=1, waiting=5, free_slots=8, rows=1, step_s=0.1)))
        assert worker.load()["waiting"] == 5


async def test_calibration_is_restored_from_recorded_counts() -> None:
    first, second, known = Calibration(), Calibration(), -0.9
    cells = [
        (Calibration().cache[known, rank, depth][0], hit)
        for rank, depth, hit in [(0, 1, True), (1, 1, False), (0, 9, False)]
    ]
    for cell, hit in cells * 20:
        first.observe(cell, hit)
    async with open_store(None) as store:
        await record(store, [step(*cells)] * 20)
        totals = await store.acceptance.acceptance("m", "ngram")
    second.start_from(totals.cell_drafted, totals.cell_accepted)
    for rank, depth in [(0, 1), (1, 1), (0, 9), (2, 2)]:
        assert second.cache[known, rank, depth] == pytest.approx(first.cache[known, rank, depth])
    drafted, accepted = Calibration.by_bin(totals.cell_drafted), Calibration.by_bin(totals.cell_accepted)
    assert sum(accepted) / sum(drafted) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("timings", "counted"), [(Timings(0.5, 0.1, 2.0, prefill_s=0.25), 1), (Timings(0.5, 0.0, 0.5), 0)]
)
async def test_a_request_that_had_a_token_is_timed_at_its_end(timings: Timings, counted: int) -> None:
    registry = CollectorRegistry()
    async with open_store(None) as store, store.recorder() as recorder:
        stats = StatLogger(DESCRIPTION, recorder, TargetMetrics(registry, "m", 256))
        stats.committed(Delta("e", tokens=[5]))
        stats.committed(Delta("e", finish_reason=FinishReason.CANCELLED, usage=Usage(1, 1), timings=timings))
    for name in ("queue", "prefill", "decode", "inference"):
        assert registry.get_sample_value(f"vllm:request_{name}_time_seconds_count", {"model_name": "m"}) == counted


def test_counts_by_depth() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_length == 0.0
    stats.record(4, reached=3, accepted=2)
    stats.record(0, reached=0, accepted=0)
    stats.record(2, reached=2, accepted=0)
    assert stats == SpeculationStats([2, 2, 1], [1, 1, 0], drafted_tokens=6, verifications=2, steps=3)
    assert (stats.accepted_tokens, stats.acceptance_length) == (2, 1.0)
    stats.record(1, reached=1, accepted=2)  # a rule that tests chains accepts one more guess than it has rows for
    assert stats.accepted_by_depth == [2, 1, 0]
