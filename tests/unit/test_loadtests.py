"""The load tests' own parts: shapes, stream checks, figures, requests."""

from __future__ import annotations

import json
import pickle
import random
import time
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from loadtests.load_figures import REFUSED, LatencyGoal, figures, percentile, token_ms
from loadtests.load_profiles import TIMED, LoadRun
from loadtests.load_requests import Question, RecordedQuestions, TimedQuestions
from loadtests.load_shapes import SHAPES, rows, users_at
from loadtests.received_stream import ReceivedStream, parse_events
from loadtests.resource_usage import cores, memory
from loadtests.stream_check import StreamRecord, check_stream, check_unfinished

GOAL = LatencyGoal(first_token_ms=500.0, token_ms=100.0)
QUESTION = Question("1 2", False, {"max_tokens": 4}, [7, 8, 9, 10], 2)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_fills_its_time_and_reaches_its_peak(name: str) -> None:
    stages = list(rows(SHAPES[name], ramp_s=10, seconds=100, peak=40))
    assert stages[0].begins == 10
    assert stages[-1].ends == pytest.approx(110)
    assert max(row.users for row in stages) == 40
    assert all(a.ends == b.begins for a, b in pairwise(stages))


def test_users_follow_the_stages() -> None:
    stages = list(rows(SHAPES["spike"], ramp_s=10, seconds=100, peak=40))
    assert [users_at(t, stages) for t in (0, 39, 41, 59, 61, 109, 111)] == [8, 8, 40, 40, 8, 8, None]


def events(*chunks: object) -> list[tuple[float, bytes]]:
    """One event per second from 11.0 on, then the end mark."""
    encoded = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
    return [(11.0 + i, each) for i, each in enumerate([*encoded, b"data: [DONE]\n\n"])]


def chunk(*tokens: int, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"token_ids": list(tokens), "finish_reason": finish_reason}], "usage": None}


END = chunk(finish_reason="length")


def usage(completion_tokens: int, prompt_tokens: int = 2) -> dict[str, object]:
    stats = {"verifications": 2, "drafted_tokens": 5, "accepted_by_depth": [2, 1]}
    counts = {"completion_tokens": completion_tokens, "prompt_tokens": prompt_tokens}
    return {"choices": [], "usage": counts, "speculation": stats}


def checked(*chunks: object, left: bool = False) -> StreamRecord:
    return check_stream("chat", 10.0, QUESTION, parse_events(events(*chunks)), left=left)


def test_a_chunk_may_hold_several_tokens() -> None:
    record = checked(chunk(7), chunk(8, 9, 10), END, usage(4))
    assert (record.tokens, record.chunks, record.lost, record.changed, record.fault) == (4, 2, 0, 0, "")
    assert (record.first, record.ended, record.first_tokens) == (11.0, 12.0, 1)
    assert token_ms(record) == pytest.approx(1000 / 3)
    assert (record.verifications, record.drafted, record.accepted) == (2, 5, 3)


@pytest.mark.parametrize(
    ("chunks", "lost", "changed", "fault"),
    [
        ([chunk(7, 8, 9), END, usage(3)], 1, 0, ""),
        ([chunk(7, 8, 9, 11), END, usage(4)], 0, 1, ""),
        ([chunk(7, 8, 9, 10, 11), END, usage(5)], 0, 1, ""),
        ([chunk(7, 9, 10), END, usage(3)], 1, 2, ""),  # lost in the middle
        ([chunk(7, 8, 9, 10), END, usage(5)], 0, 0, "usage counts 5 tokens, 4 came"),
        ([chunk(7, 8, 9, 10), END, usage(4, prompt_tokens=3)], 0, 0, "usage counts 3 prompt tokens, 2 were sent"),
        ([chunk(7, 8, 9, 10), usage(4)], 0, 0, "no finish reason"),
        ([chunk(7), {"error": {"message": "the target is gone"}}], 3, 0, "the target is gone"),
    ],
)
def test_every_fault_of_a_stream_is_seen(chunks: list[object], lost: int, changed: int, fault: str) -> None:
    record = checked(*chunks)
    assert (record.lost, record.changed, record.fault) == (lost, changed, fault)


def test_a_stream_without_its_end_mark_broke_off() -> None:
    broken = parse_events(events(chunk(7, 8))[:-1])
    assert check_stream("chat", 10.0, QUESTION, broken).fault == "the stream broke off"


def test_a_client_that_leaves_is_owed_what_came() -> None:
    left = check_stream("abandoned", 10.0, QUESTION, parse_events(events(chunk(7), chunk(8))[:-1]), left=True)
    assert (left.lost, left.changed, left.fault) == (0, 0, "")
    assert checked(chunk(7), chunk(9), left=True).changed == 1
    assert check_stream("abandoned", 10.0, QUESTION, parse_events([]), left=True).tokens == 0


def test_a_stream_that_hangs_until_the_run_ends_is_a_fault() -> None:
    now = time.time()
    running = ReceivedStream(arrivals=[(now - 1.0, 1)])
    assert check_unfinished(now - 60.0, running, 30.0) is running
    assert check_unfinished(now - 1.0, ReceivedStream(), 30.0).error == ""
    for hung in (
        check_unfinished(now - 60.0, ReceivedStream(), 30.0),
        check_unfinished(0.0, ReceivedStream(arrivals=[(now - 60.0, 1)]), 30.0),
    ):
        assert "nothing came" in check_stream("chat", 10.0, QUESTION, hung, left=True).fault


def test_figures_count_the_records_of_the_window() -> None:
    fast = StreamRecord("chat", began=10.0, first=10.2, ended=11.2, tokens=11, chunks=6, first_tokens=1)
    slow = fast._replace(first=11.0, ended=14.0, verifications=4, accepted=6)
    others = [
        fast._replace(ended=9.0),  # before
        fast._replace(ended=20.0),  # after
        fast._replace(left=True),
        fast._replace(fault="status 500"),
        fast._replace(lost=2),
        StreamRecord(REFUSED, 12.0, 12.0, 12.0),
    ]
    found = figures([fast, slow, *others], 10.0, 20.0, GOAL)
    assert (found.answers, found.abandoned, found.refused, found.errors, found.lost_tokens) == (2, 1, 1, 1, 2)
    assert found.tokens_per_s == 2.2
    assert found.goodput == 1.1, "the slow one missed both goals"
    assert found.streams == pytest.approx((1.2 * 4 + 4.0 + 10.0) / 10, abs=0.05)
    assert found.acceptance_length == 1.5
    assert found.tokens_per_chunk == pytest.approx(22 / 12, abs=0.01)
    assert (found.first_token_ms_p50, found.first_token_ms_p99) == (600.0, 992.0)


def test_figures_without_records_are_zero() -> None:
    assert set(asdict(figures([], 0.0, 10.0, GOAL)).values()) == {0, 10.0}
    assert percentile([3.0], 99) == 3.0


def test_timed_questions_have_known_tokens() -> None:
    questions = TimedQuestions("timed:vocabulary=64", (3, 9), random.Random(1))
    first, second, long = questions.short(chat=True), questions.short(chat=True), questions.long()
    assert first.text != second.text, "each question is a new one"
    assert len(first.expected) == first.sampling["max_tokens"] in range(3, 10)
    assert len(first.text.split()) == first.prompt_tokens < len(long.text.split())
    assert first.path != long.path
    assert first.body(speculative=False)["speculative"] is False


def test_a_run_can_be_pickled() -> None:
    run = LoadRun("http://a", "b:1", replace(TIMED, streams=50), "steps", True, RecordedQuestions([], [QUESTION], []))
    copy: LoadRun = pickle.loads(pickle.dumps(run))
    assert (copy.url, copy.profile, copy.stages) == (run.url, run.profile, run.stages)
    assert copy.questions.short(chat=False) == QUESTION
    assert max(stage.users for stage in copy.stages) == 54


def test_memory_is_compared_between_the_first_and_the_last_minute() -> None:
    samples = [(float(t), 100.0 + t) for t in range(0, 400, 10)]
    found = memory(samples, 100.0, 300.0)
    assert found is not None
    assert (found.first_minute_mb, found.last_minute_mb) == (225.0, 365.0)
    assert found.growth == pytest.approx(365 / 225 - 1, abs=1e-4)
    assert memory([], 0.0, 10.0) is None


def test_cores_are_cpu_time_over_time() -> None:
    samples = [(0.0, {"a": 5.0}), (10.0, {"a": 7.0, "b": 1.0}), (20.0, {"a": 9.0, "b": 10.0})]
    assert cores(samples, 5.0, 25.0) == {"b": 0.9, "a": 0.2}
