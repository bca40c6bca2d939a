"""The chaos test's own parts: a schedule per seed, and a report that counts every change."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

from loadtests.chaos.chaos_cases import SAMPLING_CASES, ChaosCase, cases
from loadtests.chaos.chaos_report import ChaosReport
from loadtests.chaos.faults import REDIS, Fault, ProcessNames, random_faults
from loadtests.received_stream import ReceivedStream, StreamError
from paceline_services.gateway.openai.bodies import CompletionBody

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


def schedule(seed: int) -> list[Fault]:
    return list(random_faults(VICTIMS, seed, 2.0, 300.0))


def test_a_seed_repeats_a_schedule() -> None:
    assert schedule(3) == schedule(3)
    assert schedule(3) != schedule(4)


def test_a_schedule_has_every_kind_of_fault_for_every_process() -> None:
    seen = Counter(fault.victims for seed in range(5) for fault in schedule(seed))
    single = [*VICTIMS.gateways, *VICTIMS.targets, *VICTIMS.drafts, REDIS]
    assert set(seen) == {(name,) for name in single} | {VICTIMS.targets, VICTIMS.drafts}
    kinds = Counter((fault.victims[0].split("-")[0], fault.kind, fault.half) for fault in schedule(0))
    halves = [("kill", "service"), ("kill", "compute"), ("stop", "both"), ("stop", "compute"), ("terminate", "service")]
    assert {(kind, *half) for kind in ("target", "draft") for half in halves} <= set(kinds)
    assert all(fault.lasts_s > 0 for fault in schedule(0) if fault.kind == "stop")


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
def test_a_change_is_counted(change: dict[str, Any]) -> None:
    report = ChaosReport()
    report.record_finished(CASE, WHOLE)
    assert report.clean
    report.record_finished(CASE, replace(WHOLE, **change))
    assert report.changed_outputs == 1
    assert report.lost_tokens == ("tokens" in change and len(change["tokens"]) == 1)
    assert not report.clean


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
    assert sum(body.structured_outputs is not None for body in bodies) == 2
    assert [bool(body.logit_bias and body.bad_words and body.min_tokens == 39) for body in bodies].count(True) == 2


def test_what_came_before_a_cut_must_be_right() -> None:
    report = ChaosReport()
    report.record_retry(CASE, ReceivedStream(text="1", tokens=[1], log_probs=WHOLE.log_probs[:1]))
    report.record_retry(CASE, ReceivedStream())
    assert report.clean
    report.record_retry(CASE, ReceivedStream(text="2", tokens=[2]))
    assert (report.retries, report.changed_outputs, report.requests) == (3, 1, 0)


def test_a_request_without_an_answer_loses_its_tokens() -> None:
    report = ChaosReport()
    report.record_error(CASE, ReceivedStream(text="1", tokens=[1]), "no target")
    assert (report.requests, report.errors, report.lost_tokens) == (1, 1, 1)
    assert not report.clean


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(StreamError, match="the target failed"):
        ReceivedStream().feed('data: {"error": {"message": "the target failed"}}')
    with pytest.raises(StreamError, match="no event"):
        ReceivedStream().feed("<html>")
