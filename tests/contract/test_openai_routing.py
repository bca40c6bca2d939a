"""Routing and circuit breakers: a real gateway, and real links to scripted targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import grpc
import pytest

from paceline.core.messages import GenerationRequest
from paceline.state import AcceptanceCounts, WorkerRecord
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from paceline_services.gateway.routing.circuit_breaker import FAILURES, FIRST_PAUSE_S, BreakerState
from paceline_services.gateway.routing.draft_workers import draft_kind
from paceline_services.gateway.routing.prefix_index import BLOCK
from paceline_services.gateway.routing.worker_selection import (
    PREFIX_TOKENS,
    prefix_key,
    rendezvous_worker,
    session_home,
)
from tests.helpers.openai_stack import MODEL, FailsAfter, RunningTarget, Stack, counts, open_stack, text_script

PROMPT = [300 + index for index in range(3 * BLOCK + 8)]


async def completed(stack: Stack, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "seed": 1, **fields}
    answer = await stack.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def metrics(stack: Stack) -> str:
    return (await stack.http.get("/metrics")).text


def expected_cached(text: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith("paceline_routed_cached_tokens_total{")]
    return float(line.split()[-1])


def served(stack: Stack) -> list[int]:
    return [len(target.decoder.requests) for target in stack.targets]


def key(target: RunningTarget) -> str:
    return f"{target.record.worker_id}@{target.record.address}"


def session_at(stack: Stack, target: RunningTarget) -> dict[str, str]:
    """The header of a conversation whose home is this target."""
    keys = [key(each) for each in stack.targets]
    session = next(name for name in map(str, count()) if session_home(keys, name) == key(target))
    return {"X-Session-Id": session}


async def test_a_conversation_keeps_its_target_however_it_is_named() -> None:
    async with open_stack(counts, counts, counts) as stack, grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in range(8):
            prompt = [300 + number] * 70
            await completed(stack, prompt, headers={"X-Session-Id": "talk"})
            await completed(stack, prompt, prompt_cache_key="talk")
            request = inference_pb2.GenerateRequest(tokens=common_pb2.TokenSequence(token_ids=prompt))
            async for _ in stub.Generate(request, metadata=[("x-session-id", "talk")]):
                pass
        assert sorted(served(stack)) == [0, 0, 24]
        for number in range(24):
            await completed(stack, [300 + number] * 70)
        assert sorted(served(stack))[1] > 0
        assert 'paceline_routed_total{affinity="session",model_name="pydoc"} 24.0' in await metrics(stack)


async def test_a_prompt_returns_to_the_target_that_holds_most_of_it() -> None:
    """Its home is another target, but it was once sent elsewhere, and is cached there."""
    async with open_stack(counts, counts) as stack:
        by_key = {key(target): target for target in stack.targets}
        first = by_key[str(rendezvous_worker(list(by_key), prefix_key(PROMPT)))]
        [second] = [target for target in stack.targets if target is not first]
        first.decoder.gate.clear()
        blocking = [asyncio.create_task(completed(stack, [*PROMPT[:PREFIX_TOKENS], 500 + i])) for i in range(2)]
        while len(first.decoder.requests) + len(second.decoder.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.wait(blocking, return_when=asyncio.FIRST_COMPLETED)  # the second one has nothing to do again
        await completed(stack, [*PROMPT, 1000])
        assert len(second.decoder.requests) > 0
        first.decoder.gate.set()
        await asyncio.gather(*blocking)
        for target in stack.targets:
            target.decoder.requests.clear()
        before = expected_cached(await metrics(stack))
        await completed(stack, [*PROMPT, 2000])
        assert (len(first.decoder.requests), len(second.decoder.requests)) == (0, 1)
        assert expected_cached(await metrics(stack)) - before == 3 * BLOCK


async def test_prefixes_and_conversations_of_another_salt_do_not_route() -> None:
    """Neither its prefix nor its conversation of the same name: the target's cache is separate by salt, too."""
    async with open_stack(counts, counts, counts) as stack:
        for number in range(6):
            before = expected_cached(await metrics(stack)) if number else 0.0
            for again in range(2):
                await completed(stack, [*PROMPT, again], {"X-Session-Id": "talk"}, cache_salt=f"tenant {number}")
            assert expected_cached(await metrics(stack)) - before == 3 * BLOCK
        assert sorted(served(stack))[1] > 0
        assert 'paceline_routed_total{affinity="session",model_name="pydoc"} 12.0' in await metrics(stack)


async def test_a_target_that_drains_by_its_heartbeat_gets_nothing_new() -> None:
    """Neither one that is connected, nor one that is not: there is no attempt."""
    async with open_stack(counts, counts) as stack:
        leaving = stack.targets[0]
        assert 'paceline_targets_up{model_name="pydoc"} 2.0' in await metrics(stack)
        await stack.store.registry.heartbeat(leaving.record, {"draining": 1.0})
        while sum(target.up for target in stack.model.fleet.targets.values()) > 1:
            await asyncio.sleep(0.01)
        for number in range(6):
            await completed(stack, [300 + number])
        assert served(stack) == [0, 6]
        assert 'paceline_targets_up{model_name="pydoc"} 1.0' in await metrics(stack)
        unknown = WorkerRecord("target", "new", "127.0.0.1:1", MODEL, "", leaving.record.fingerprint, 0.0)
        await stack.store.registry.heartbeat(unknown, {"draining": 1.0})
        while len(await stack.store.registry.workers("target")) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # several looks at the list
        assert not any("new@" in tended for tended in stack.model.fleet._link_tasks)


async def test_a_look_at_the_registry_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_stack(counts) as stack:
        failed = asyncio.Event()

        def fails(*lists: object) -> None:
            failed.set()
            raise RuntimeError("cannot be learned")

        with monkeypatch.context() as patched:
            patched.setattr(stack.model.fleet, "update_workers", fails)
            await failed.wait()
        await stack.add_target(counts)
        assert len(stack.model.fleet.targets) == 2
        assert "cannot be learned" in caplog.text


class Moody:
    """A script that fails until its mood changes."""

    fails = True

    def __call__(self, request: GenerationRequest) -> Sequence[int]:
        if self.fails:
            raise RuntimeError("the accelerator is gone")
        return counts(request)


async def test_a_target_that_fails_repeatedly_is_paused_and_probed_without_failed_requests() -> None:
    moody = Moody()
    async with open_stack(moody, counts, burst=1) as stack:
        breaker, now = stack.model.fleet._breakers[key(stack.targets[0])], 0.0
        breaker._clock = lambda: now
        numbers = iter(range(300, 3000))
        while breaker.state == BreakerState.CLOSED:
            await completed(stack, [next(numbers)])
        assert served(stack)[0] == FAILURES
        assert f'kind="target",model_name="{MODEL}",worker="{key(stack.targets[0])}"}} 2.0' in await metrics(stack)
        for _ in range(3):
            await completed(stack, [next(numbers)])
        assert served(stack)[0] == FAILURES
        now += FIRST_PAUSE_S
        while served(stack)[0] == FAILURES:  # the probe
            await completed(stack, [next(numbers)])
        assert breaker.opens_in_s == 2 * FIRST_PAUSE_S
        moody.fails = False
        now += 2 * FIRST_PAUSE_S
        while breaker.state != BreakerState.CLOSED:
            await completed(stack, [next(numbers)])
        assert served(stack)[0] == FAILURES + 2


async def test_a_request_that_every_target_refuses_is_its_own_fault() -> None:
    def script(request: GenerationRequest) -> Sequence[int]:
        if request.sampling.seed == 13:
            raise RuntimeError("no grammar has this rule")
        return counts(request)

    async with open_stack(script, script) as stack:
        for number in range(2 * FAILURES):
            answer = await stack.http.post("/v1/completions", json={"prompt": [300 + number], "seed": 13})
            assert answer.status_code == 500
            assert "no grammar has this rule" in answer.text
        assert served(stack) == [2 * FAILURES, 2 * FAILURES]
        assert set(stack.model.fleet.breaker_states().values()) == {BreakerState.CLOSED}


async def test_a_request_that_cannot_go_on_is_its_own_fault_however_much_came_at_once() -> None:
    """A grammar may grow too large after any token, at every target: such requests must not open the breakers, whether
    the error comes with the first tokens or later."""

    def script(request: GenerationRequest) -> Sequence[int]:
        if request.sampling.seed == 13:
            raise FailsAfter("too many states", output=[300, 301])
        return counts(request)

    async with open_stack(script, burst=1) as stack:
        await stack.add_target(script, burst=3)
        for number in range(2 * FAILURES):
            for target in stack.targets:
                body = {"prompt": [300 + number], "seed": 13}
                answer = await stack.http.post("/v1/completions", json=body, headers=session_at(stack, target))
                assert answer.status_code == 500
                assert "too many states" in answer.text
        assert served(stack) == [2 * FAILURES, 2 * FAILURES]
        assert set(stack.model.fleet.breaker_states().values()) == {BreakerState.CLOSED}
        await completed(stack, "x")


@pytest.mark.parametrize("report", [True, False], ids=["with its statistics", "without"])
async def test_a_request_that_a_stop_string_ends_has_ended_well(report: bool) -> None:
    """Failures before it are forgiven, and what it cost is learned."""
    async with open_stack(text_script("hello world and more"), burst=1) as stack:
        breaker = stack.model.fleet._breakers[key(stack.targets[0])]
        for _ in range(FAILURES):
            breaker.on_failure()
            answer = await completed(stack, "x", stop="world", max_tokens=50, speculation_stats=report)
            assert answer["choices"][0]["stop_reason"] == "world"
        assert breaker.state == BreakerState.CLOSED
        assert stack.model.fleet.request_cost.output_tokens.value < 50


async def test_a_client_that_leaves_is_neither_a_failure_nor_a_success() -> None:
    async with open_stack(counts, burst=1) as stack:
        breaker = stack.model.fleet._breakers[key(stack.targets[0])]
        for _ in range(FAILURES - 1):
            breaker.on_failure()
        stack.decoder.hold_after = 2
        async with stack.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            await anext(answer.aiter_lines())
        await stack.decoder.cancelled.get()
        while stack.model.fleet.in_flight:
            await asyncio.sleep(0.01)
        assert breaker.state == BreakerState.CLOSED
        breaker.on_failure()
        assert breaker.state == BreakerState.OPEN


async def test_a_target_that_refused_a_request_is_tried_again_when_the_other_one_is_lost() -> None:
    """There is no other target; its second refusal is final."""
    refused = []

    def refuses(request: GenerationRequest) -> Sequence[int]:
        refused.append(request)
        raise RuntimeError("no grammar has this rule")

    async with open_stack(refuses) as stack:
        other = await stack.add_target(counts)
        other.decoder.gate.clear()
        asking = asyncio.create_task(
            stack.http.post("/v1/completions", json={"prompt": "x"}, headers=session_at(stack, stack.targets[0]))
        )
        while not other.decoder.requests:
            await asyncio.sleep(0.01)
        await other.die()
        answer = await asking
        assert (answer.status_code, len(refused)) == (500, 2)
        assert "no grammar has this rule" in answer.text


async def test_when_every_breaker_is_open_responses_have_retry_after() -> None:
    async with open_stack(counts) as stack:
        breaker = stack.model.fleet._breakers[key(stack.targets[0])]
        for _ in range(FAILURES):
            breaker.on_failure()
        answer = await stack.http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await stack.http.get("/health")).status_code == 503
        while breaker.state == BreakerState.OPEN:
            await asyncio.sleep(0.05)
        await completed(stack, "x")
        assert breaker.state == BreakerState.CLOSED


async def test_the_acceptance_at_all_gateways_decides_which_draft_is_first() -> None:
    """The scripted target reports the draft `d` for every request."""
    async with open_stack(counts) as stack:
        record = stack.targets[0].record
        names = {"d": "draft_model", "e": "ngram"}
        drafts = [
            type(record)("draft", name, f"{name}:1", "", method, record.fingerprint, 0.0)
            for name, method in names.items()
        ]
        for draft in drafts:
            await stack.store.registry.register(draft)
        while len(stack.model.fleet.drafts.kinds()) < 4:
            await asyncio.sleep(0.01)
        kinds = {draft.worker_id: draft_kind(draft, greedy=False) for draft in drafts}
        await completed(stack, "x")
        while not (mine := await stack.store.acceptance.acceptance(MODEL, kinds["d"])).verifications:
            await asyncio.sleep(0.05)
        assert (mine.verifications, mine.acceptance_length) == (4, 1.0)
        better = AcceptanceCounts(200.0, [100.0], [90.0])
        await stack.store.acceptance.record(MODEL, kinds["e"], better)
        await stack.store.acceptance.record(MODEL, kinds["d"], AcceptanceCounts(100.0, [150.0], [45.0]))
        known = stack.model.fleet.drafts._known
        while known[kinds["d"]].verifications < 100 or known[kinds["e"]].verifications < 100:
            await asyncio.sleep(0.05)
        for _ in range(2):
            await completed(stack, "x")
            assert stack.decoder.requests[-1].drafts == ["e:1", "d:1"]


async def test_several_models_behind_one_gateway() -> None:
    async with open_stack(counts, more_models=["other"], aliases={"short": MODEL, "long": "other"}) as stack:
        with_channel = grpc.aio.insecure_channel(stack.addresses.grpc)
        assert (await stack.http.post("/v1/completions", json={"model": "other", "prompt": "x"})).status_code == 503
        other = await stack.add_target(counts, model="other")
        for name, model in {MODEL: MODEL, "short": MODEL, "other": "other", "long": "other"}.items():
            assert (await completed(stack, "x", model=name))["model"] == model
        assert served(stack) == [2, 2]
        listed = (await stack.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, "other"]
        assert (await stack.http.get("/v1/models/long")).json()["id"] == "other"
        unknown = await stack.http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
        assert unknown.status_code == 404
        assert "'pydoc', 'other'" in unknown.text
        nameless = await stack.http.post("/v1/completions", json={"prompt": "x"})
        assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
        async with with_channel as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            models = await stub.ListModels(inference_pb2.ListModelsRequest())
            assert [model.id for model in models.models] == [MODEL, "other"]
            async for _ in stub.Generate(inference_pb2.GenerateRequest(text="x", model="long")):
                pass
        assert served(stack) == [2, 3]
        text = await metrics(stack)
        assert 'paceline_request_success_total{finished_reason="length",model_name="other"} 3.0' in text
        await other.die()
        await completed(stack, "x", model=MODEL)
        assert (await stack.http.get("/health")).status_code == 200
