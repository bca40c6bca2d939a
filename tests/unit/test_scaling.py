"""From measured costs to numbers of processes."""

from __future__ import annotations

import pytest

from paceline_lab.bench import scaling
from paceline_lab.bench.scaling import frames, measure_engine
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.simulation.scaling_model import FULL, Costs, CpuPerToken, OutOfReachError, process_counts

TARGET = TimedModelConfig(step_ms=30.0, knee_rows=100)
COSTS = Costs(
    [(1, 1e-3), (100, 10e-3), (1000, 100e-3)], service=CpuPerToken(20e-6, 0.0), gateway=CpuPerToken(60e-6, 1e-3)
)


def test_costs_are_interpolated() -> None:
    assert COSTS.engine_s(1) == 1e-3
    assert COSTS.engine_s(550) == pytest.approx(55e-3)
    assert COSTS.engine_s(5000) == pytest.approx(0.5)


def test_one_target_is_enough_while_its_step_is_short() -> None:
    found = process_counts(100, COSTS, TARGET, token_ms=45.0, answer_tokens=100)
    assert (found.targets, found.token_ms, found.tokens_per_s) == (1, 40.0, 2500)
    assert found.engine == 0.25
    assert found.service == 0.05
    assert found.gateway == pytest.approx(2500 * 70e-6, abs=1e-3)
    assert process_counts(100, COSTS, TARGET, token_ms=39.0, answer_tokens=100).targets == 2


def test_gateways_are_at_most_full() -> None:
    found = process_counts(10_000, COSTS, TARGET, token_ms=50.0, answer_tokens=100)
    assert found.token_ms <= 50.0
    assert found.gateway <= FULL
    assert found.gateways == pytest.approx(found.tokens_per_s * 70e-6 / FULL, abs=1)


def test_a_full_service_needs_another_target() -> None:
    slow = Costs(COSTS.engine, service=CpuPerToken(800e-6, 0.0), gateway=COSTS.gateway)
    found = process_counts(100, slow, TARGET, token_ms=1000.0, answer_tokens=100)
    assert found.targets > 1
    assert found.service <= FULL


def test_an_impossible_goal_is_refused() -> None:
    with pytest.raises(OutOfReachError, match=r"one request alone gets a token every 31\.0 ms"):
        process_counts(10, COSTS, TARGET, token_ms=20.0, answer_tokens=100)


def test_the_engine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "STREAMED", 8)
    found, beyond = measure_engine(8), measure_engine(9)
    assert found.tokens is not None
    assert found.streamed_ms is not None
    assert found.tokens > 1, "draft tokens are accepted"
    assert min(found.plain_ms, found.streamed_ms, beyond.plain_ms) > 0
    assert beyond.streamed_ms is None


def test_a_frame_carries_several_tokens_for_little_more_than_one() -> None:
    sizes = frames()
    assert sizes["delta_of_1_token"] < sizes["delta_of_4_tokens"] < 2 * sizes["delta_of_1_token"]
    assert min(sizes.values()) > 0
