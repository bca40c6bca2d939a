"""What a target saves of its steps, and that another one can start from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.messages import SpeculationStats, TargetDescription
from paceline.core.policy.calibration import Calibration
from paceline.state import StateStore, open_store
from paceline.telemetry.step_stats import StepStats
from paceline.telemetry.target_metrics import TargetMetrics
from paceline_services.target.stat_logger import StatLogger

DESCRIPTION = TargetDescription("t", "m", "f", 64, 512, 256, rows_invariant=True, eos_token_ids=(), method="ngram")


async def keep_books(store: StateStore, steps: Sequence[StepStats]) -> None:
    async with store.recorder() as recorder:
        books = StatLogger(DESCRIPTION, recorder, TargetMetrics(CollectorRegistry(), "m", 256))
        books.observe(steps)
        await books.run_once()


def step(*guesses: tuple[int, bool]) -> StepStats:
    stats = SpeculationStats()
    stats.record(len(guesses), 1, any(hit for _, hit in guesses))
    return StepStats(0.01, 8, 1, 0, 256, speculation=stats, calibration_samples=guesses)


async def test_another_target_starts_from_what_was_learned() -> None:
    first, second, known = Calibration(), Calibration(), -0.9
    cells = [
        (Calibration().cache[known, rank, depth][0], hit)
        for rank, depth, hit in [(0, 1, True), (1, 1, False), (0, 9, False)]
    ]
    for cell, hit in cells * 20:
        first.observe(cell, hit)
    async with open_store(None, half_life_s=1e9) as store:
        await keep_books(store, [step(*cells)] * 20)
        totals = await store.acceptance.acceptance("m", "ngram")
    second.seed(totals.cell_drafted, totals.cell_accepted)
    for rank, depth in [(0, 1), (1, 1), (0, 9), (2, 2)]:
        assert second.cache[known, rank, depth] == pytest.approx(first.cache[known, rank, depth])
    assert [share for share in totals.calibration() if share is not None] == pytest.approx([1 / 3])
