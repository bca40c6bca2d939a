"""Counting what speculation did for a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import SpeculationStats


def test_counts_by_depth() -> None:
    stats = SpeculationStats()
    stats.record(4, reached=3, accepted=2)
    stats.record(0, reached=0, accepted=0)
    stats.record(2, reached=2, accepted=0)
    assert stats.steps == 3
    assert stats.verifications == 2
    assert stats.drafted_tokens == 6
    assert stats.drafted_by_depth == [2, 2, 1]
    assert stats.accepted_by_depth == [1, 1, 0]
    assert stats.accepted_tokens == 2
    assert stats.acceptance_length == 1.0


def test_nothing_verified_is_no_division_by_zero() -> None:
    assert SpeculationStats(steps=5).acceptance_length == 0.0


def test_a_snapshot_is_independent() -> None:
    stats = SpeculationStats(drafts=["a"])
    stats.record(1, reached=1, accepted=1)
    snapshot = stats.snapshot()
    stats.record(2, reached=2, accepted=2)
    stats.drafts.append("b")
    assert snapshot == SpeculationStats([1], [1], drafted_tokens=1, verifications=1, steps=1, drafts=["a"])


def test_an_accepted_node_without_a_row_is_not_counted() -> None:
    """A rule that tests chains accepts one more guess than it has rows for."""
    stats = SpeculationStats()
    stats.record(2, reached=2, accepted=3)
    assert stats.accepted_by_depth == [1, 1]


chains = st.integers(0, 5).flatmap(lambda deepest: st.tuples(st.just(deepest), st.integers(0, deepest)))


@given(st.lists(chains))
def test_counts_add_up(steps: list[tuple[int, int]]) -> None:
    stats = SpeculationStats()
    for deepest, accepted in steps:
        stats.record(deepest, deepest, accepted)
    assert stats.accepted_tokens == sum(accepted for _, accepted in steps)
    assert stats.drafted_tokens == sum(stats.drafted_by_depth)
    assert stats.steps == len(steps)
    assert len(stats.drafted_by_depth) == len(stats.accepted_by_depth)
    for drafted, accepted in zip(stats.drafted_by_depth, stats.accepted_by_depth, strict=True):
        assert accepted <= drafted <= stats.verifications
