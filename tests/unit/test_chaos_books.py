"""What chaos does follows from its seed, and its clients see every change."""

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
from loadtests.chaos.stream_response import StreamError, StreamResponse
from paceline_services.gateway.openai.bodies import CompletionBody

VICTIMS = ProcessNames(("gateway-1", "gateway-2"), ("target-1", "target-2", "target-3"), ("draft-1", "draft-2"))
WHOLE = StreamResponse(
    "1 2", [1, 2], [(-0.5, {"1": -0.5}), (-0.25, {})], "length", {"completion_tokens": 2}, complete=True
)
CASE = ChaosCase("greedy", {}, WHOLE)


def script(seed: int) -> list[Fault]:
    return list(random_faults(VICTIMS, seed, 2.0, 300.0))


def test_a_seed_repeats_a_schedule() -> None:
    assert script(3) == script(3)
    assert script(3) != script(4)


def test_everybody_is_struck_in_every_way_and_replicas_together() -> None:
    seen = Counter(blow.victims for seed in range(5) for blow in script(seed))
    single = [*VICTIMS.gateways, *VICTIMS.targets, *VICTIMS.drafts, REDIS]
    assert set(seen) == {(name,) for name in single} | {VICTIMS.targets, VICTIMS.drafts}
    ways = Counter((blow.victims[0].split("-")[0], blow.kind, blow.half) for blow in script(0))
    halves = [("kill", "service"), ("kill", "compute"), ("stop", "both"), ("stop", "compute"), ("terminate", "service")]
    assert {(kind, *half) for kind in ("target", "draft") for half in halves} <= set(ways)
    assert all(blow.lasts_s > 0 for blow in script(0) if blow.kind == "stop")


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
    tally = ChaosReport()
    tally.record_finished(CASE, WHOLE)
    assert tally.clean
    tally.record_finished(CASE, replace(WHOLE, **change))
    assert tally.changed_outputs == 1
    assert tally.lost_tokens == ("tokens" in change and len(change["tokens"]) == 1)
    assert not tally.clean


async def test_references_are_asked_without_speculation_and_answers_with_it() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(CompletionBody.model_validate_json(request.content))
        chunk = {"choices": [{"text": "1 2", "token_ids": [1, 2], "finish_reason": "length"}]}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        known = await cases(http, "http://gateway", ("1 2", "3"), 40, {"ignore_eos": True})
    assert {case.name for case in known} == {
        f"{law} {prompt}" for law in (*SAMPLING_CASES, "barred", "stop greedy", "stop sampled") for prompt in range(2)
    }
    assert len(asked) == len(known)
    for body in asked:
        assert body.speculative is not None
        assert body.speculative.enabled is False
        assert (body.max_tokens, body.ignore_eos) == (40, True)
    assert not any("speculative" in case.body for case in known)
    assert sum(body.structured_outputs is not None for body in asked) == 2
    assert [bool(body.logit_bias and body.bad_words and body.min_tokens == 39) for body in asked].count(True) == 2


def test_what_came_before_a_cut_has_to_be_right() -> None:
    tally = ChaosReport()
    tally.record_retry(CASE, StreamResponse("1", [1], WHOLE.log_probs[:1]))
    tally.record_retry(CASE, StreamResponse())
    assert tally.clean
    tally.record_retry(CASE, StreamResponse("2", [2]))
    assert (tally.retries, tally.changed_outputs, tally.requests) == (3, 1, 0)


def test_a_request_without_an_answer_loses_its_tokens() -> None:
    tally = ChaosReport()
    tally.record_error(CASE, StreamResponse("1", [1]), "no target")
    assert (tally.requests, tally.errors, tally.lost_tokens) == (1, 1, 1)
    assert not tally.clean


def test_an_error_in_a_stream_is_no_text() -> None:
    with pytest.raises(StreamError, match="the target failed"):
        StreamResponse().take('data: {"error": {"message": "the target failed"}}')
    with pytest.raises(StreamError, match="no event"):
        StreamResponse().take("<html>")
