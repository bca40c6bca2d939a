"""The own parts of the load test and of the chaos test: schedules, stream checks, figures, requests, reports."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import httpx
import pytest

from loadtests.chaos.chaos_cases import SAMPLING_CASES, ChaosCase, cases
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.faults import REDIS, Fault, ProcessNames, random_faults
from loadtests.load_figures import REFUSED, LatencyGoal, figures, percentile, token_ms
from loadtests.load_profiles import TIMED, LoadRun
from loadtests.load_requests import Question, RecordedQuestions, TimedQuestions
from loadtests.load_shapes import SHAPES, rows, users_at
from loadtests.locust_process import checked_summary
from loadtests.received_stream import ReceivedStream, StreamError, parse_events
from loadtests.resource_usage import ResourceWatch, cores, memory
from loadtests.stream_check import StreamRecord, check_stream, check_unfinished
from paceline_services.gateway.generation.bodies import CompletionBody

GOAL = LatencyGoal(first_token_ms=500.0, token_ms=100.0)
QUESTION = Question("1 2", False, {"max_tokens": 4}, [7, 8, 9, 10], 2)
VICTIMS = ProcessNames(("gateway-1", "gateway-2"), ("target-1", "target-2", "target-3"), ("draft-1", "draft-2"))
WHOLE = ReceivedStream(
    text="1 2",
    tokens=[1, 2],
    log_probs=[(-0.5, {"1": -0.5}), (-0.25, {})],
    finish_reason="length",
    usage={"completion_tokens": 2},
    complete=True,
)
CASE = ChaosCase("greedy", {}, WHOLE)


def test_a_shape_fills_its_time_and_its_users_follow() -> None:
    for shape in SHAPES.values():
        stages = list(rows(shape, ramp_s=10, seconds=100, peak=40))
        assert stages[0].begins == 10
        assert stages[-1].ends == pytest.approx(110)
        assert max(row.users for row in stages) == 40
        assert all(a.ends == b.begins for a, b in pairwise(stages))
    spike = list(rows(SHAPES["spike"], ramp_s=10, seconds=100, peak=40))
    assert [users_at(t, spike) for t in (0, 39, 41, 59, 61, 109, 111)] == [8, 8, 40, 40, 8, 8, None]


def events(*chunks: object) -> list[tuple[float, bytes]]:
    """One event per second from 11.0 on, then the end mark."""
    encoded = [b"id: r:%d\ndata: %b\n\n" % (i, json.dumps(chunk).encode()) for i, chunk in enumerate(chunks, 1)]
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


def test_comments_between_events_are_skipped() -> None:
    first, *others = events(chunk(7), END)
    stream = parse_events([first, (11.5, b": ping\n\n"), *others])
    assert (stream.tokens, stream.last_id, stream.complete, stream.error) == ([7], "r:2", True, "")


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


def test_a_client_that_leaves_is_owed_what_came() -> None:
    broken = parse_events(events(chunk(7, 8))[:-1])
    assert check_stream("chat", 10.0, QUESTION, broken).fault == "the stream broke off"
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


RUN = LoadRun("http://a", "b:1", replace(TIMED, streams=50), "steps", True, RecordedQuestions([], [QUESTION], []))


@pytest.mark.parametrize(
    ("wrong", "good"),
    [({}, True), ({"errors": 1}, False), ({"changed_tokens": 1}, False), ({"figures": {"answers": 1}}, False)],
    ids=["right", "an error", "a changed token", "no speculation"],
)
def test_a_run_is_good_without_errors_and_with_speculation(wrong: dict[str, Any], good: bool) -> None:
    counts = dict.fromkeys(("errors", "lost_tokens", "changed_tokens"), 0)
    summary = {**counts, "window": (0.0, 1.0), "figures": {"answers": 1, "acceptance_length": 2.0}, **wrong}
    summary["figures"] = {"acceptance_length": 0.0, **summary["figures"]}
    assert checked_summary(summary, ResourceWatch({}), RUN)["good"] is good


def test_memory_is_compared_between_the_first_and_the_last_minute() -> None:
    found = memory([(float(t), 100.0 + t) for t in range(0, 400, 10)], 100.0, 300.0)
    assert found is not None
    assert (found.first_minute_mb, found.last_minute_mb) == (225.0, 365.0)
    assert found.growth == pytest.approx(365 / 225 - 1, abs=1e-4)
    assert memory([], 0.0, 10.0) is None


def test_cores_are_cpu_time_over_time() -> None:
    samples = [(0.0, {"a": 5.0}), (10.0, {"a": 7.0, "b": 1.0}), (20.0, {"a": 9.0, "b": 10.0})]
    assert cores(samples, 5.0, 25.0) == {"b": 0.9, "a": 0.2}


def schedule(seed: int) -> list[Fault]:
    return list(random_faults(VICTIMS, seed, 2.0, 300.0))


def test_a_seed_repeats_a_schedule_with_every_kind_of_fault_for_every_process() -> None:
    assert schedule(3) == schedule(3) != schedule(4)
    single = [*VICTIMS.gateways, *VICTIMS.targets, *VICTIMS.drafts, REDIS]
    seen = {fault.victims for seed in range(5) for fault in schedule(seed)}
    assert seen == {(name,) for name in single} | {VICTIMS.targets, VICTIMS.drafts}
    kinds = {(fault.victims[0].split("-")[0], fault.kind, fault.half) for fault in schedule(0)}
    halves = [("kill", "service"), ("kill", "compute"), ("stop", "both"), ("stop", "compute"), ("terminate", "service")]
    assert {(kind, *half) for kind in ("target", "draft") for half in halves} <= kinds
    assert all(fault.lasts_s > 0 for fault in schedule(0) if fault.kind == "stop")


async def test_only_references_are_requested_without_speculation() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(CompletionBody.model_validate_json(request.content))
        chunk = {"choices": [{"text": "1 2", "token_ids": [1, 2], "finish_reason": "length"}]}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        made = await cases(http, "http://gateway", ("1 2", "3"), 40, {"ignore_eos": True})
    assert {case.name for case in made} == {
        f"{name} {prompt}" for name in (*SAMPLING_CASES, "barred", "stop greedy", "stop sampled") for prompt in range(2)
    }
    assert len(bodies) == len(made)
    for body in bodies:
        assert body.speculative is not None
        assert body.speculative.enabled is False
        assert (body.max_tokens, body.ignore_eos) == (40, True)
    assert not any("speculative" in case.body for case in made)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "1 3"},
        {"tokens": [1, 3]},
        {"tokens": [1]},
        {"log_probs": [(-0.5, {"1": -0.5}), (-0.2500001, {})]},
        {"finish_reason": "stop"},
        {"usage": {"completion_tokens": 3}},
    ],
)
def test_a_changed_answer_is_counted(change: dict[str, Any]) -> None:
    report = ChaosReport()
    report.record_finished(CASE, WHOLE)
    assert report.clean
    report.record_finished(CASE, replace(WHOLE, **change))
    assert (report.changed_outputs, report.lost_tokens) == (1, change.get("tokens") == [1])
    assert not report.clean


def test_what_came_before_a_cut_must_be_right() -> None:
    report = ChaosReport()
    report.record_retry(CASE, ReceivedStream(text="1", tokens=[1], log_probs=WHOLE.log_probs[:1]))
    report.record_retry(CASE, ReceivedStream())
    assert report.clean
    report.record_retry(CASE, ReceivedStream(text="2", tokens=[2]))
    assert (report.retries, report.changed_outputs, report.requests) == (3, 1, 0)
    report.record_error(CASE, ReceivedStream(text="1", tokens=[1]), "no target")
    assert (report.requests, report.errors, report.lost_tokens) == (1, 1, 1)


@pytest.mark.parametrize(
    ("line", "error", "temporary"),
    [
        ('data: {"error": {"message": "the target failed", "type": "server_error"}}', "the target failed", False),
        ('data: {"error": {"message": "no target", "type": "service_unavailable"}}', "no target", True),
        ("<html>", "no event", False),
    ],
)
def test_an_error_in_a_stream_is_raised(line: str, error: str, temporary: bool) -> None:
    with pytest.raises(StreamError, match=error) as raised:
        ReceivedStream().feed(line)
    assert raised.value.temporary == temporary
