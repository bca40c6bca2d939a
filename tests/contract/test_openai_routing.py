"""Routing and circuit breakers: a real gateway, and real links to scripted targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from paceline.messages import GenerationRequest
from paceline.state import AcceptanceCounts, WorkerRecord
from paceline.v1 import common_pb2, inference_pb2
from paceline_services.gateway.routing.circuit_breaker import FAILURES, FIRST_PAUSE_S, Breaker, BreakerState
from paceline_services.gateway.routing.draft_workers import draft_kind
from paceline_services.gateway.routing.target_connection import BLOCK
from paceline_services.gateway.routing.worker_selection import (
    PREFIX_TOKENS,
    prefix_key,
    rendezvous_worker,
    session_home,
)
from tests.helpers.openai_stack import (
    MODEL,
    FailsAfter,
    RunningTarget,
    Stack,
    counts,
    generated,
    open_stack,
    start_target,
    text_script,
)
from tests.helpers.waiting import until

PROMPT = [300 + index for index in range(3 * BLOCK + 8)]
TALK = {"X-Session-Id": "talk"}


async def completed(stack: Stack, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    answer = await stack.complete(prompt, headers, **{"max_tokens": 4, "seed": 1, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def expected_cached(stack: Stack) -> float:
    """The cached tokens that the router has counted on."""
    lines = (await stack.metrics()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("paceline_routed_cached_tokens_total{"))


def key(target: RunningTarget) -> str:
    return f"{target.record.worker_id}@{target.record.address}"


def breaker_of(stack: Stack, target: RunningTarget) -> Breaker:
    return stack.model.fleet.targets[key(target)].breaker


def session_at(stack: Stack, target: RunningTarget) -> dict[str, str]:
    """The header of a conversation whose home is this target."""
    keys = [key(each) for each in stack.targets]
    session = next(name for name in map(str, count()) if session_home(keys, name) == key(target))
    return {"X-Session-Id": session}


async def test_a_conversation_keeps_its_target_however_it_is_named() -> None:
    async with open_stack(counts, counts, counts) as stack, stack.inference() as stub:
        for number in range(8):
            prompt = [300 + number] * 70
            await completed(stack, prompt, TALK)
            await completed(stack, prompt, prompt_cache_key="talk")
            tokens = common_pb2.TokenSequence(token_ids=prompt)
            await generated(stub, inference_pb2.GenerateRequest(tokens=tokens), {"x-session-id": "talk"})
        assert sorted(stack.served) == [0, 0, 24]
        for number in range(24):
            await completed(stack, [300 + number] * 70)
        assert sorted(stack.served)[1] > 0
        assert 'paceline_routed_total{affinity="session",model_name="pydoc"} 24.0' in await stack.metrics()


async def test_a_prompt_returns_to_the_target_that_holds_most_of_it() -> None:
    """Its home is another target, but it was once sent elsewhere, and is cached there."""
    async with open_stack(counts, counts) as stack:
        by_key = {key(target): target for target in stack.targets}
        first = by_key[str(rendezvous_worker(list(by_key), prefix_key(PROMPT)))]
        [second] = [target for target in stack.targets if target is not first]
        first.decoder.gate.clear()
        blocking = [await stack.begin([*PROMPT[:PREFIX_TOKENS], 500 + i], max_tokens=4) for i in range(2)]
        await asyncio.wait(blocking, return_when=asyncio.FIRST_COMPLETED)  # the second one has nothing to do again
        await completed(stack, [*PROMPT, 1000])
        assert len(second.decoder.requests) > 0
        first.decoder.gate.set()
        await asyncio.gather(*blocking)
        served, before = second.decoder.requests.copy(), await expected_cached(stack)
        first.decoder.requests.clear()
        await completed(stack, [*PROMPT, 2000])
        assert (len(first.decoder.requests), len(second.decoder.requests)) == (0, len(served) + 1)
        assert await expected_cached(stack) - before == 3 * BLOCK


async def test_requests_that_begin_alike_go_to_one_target_and_load_spreads_the_rest() -> None:
    async with open_stack(counts, counts, counts) as stack:
        for _ in range(4):
            await stack.text("the same beginning", max_tokens=1)
        assert sorted(stack.served) == [0, 0, 4]
        for target in stack.targets:
            target.decoder.gate.clear()
            target.decoder.requests.clear()
        asking = await stack.begin("the same beginning", n=30, max_tokens=1)
        assert min(stack.served) >= 7
        for target in stack.targets:
            target.decoder.gate.set()
        await asking


async def test_prefixes_and_conversations_of_another_salt_do_not_route() -> None:
    """Neither its prefix nor its conversation of the same name: the target's cache is separate by salt, too."""
    async with open_stack(counts, counts, counts) as stack:
        for number in range(6):
            before = await expected_cached(stack)
            for again in range(2):
                await completed(stack, [*PROMPT, again], TALK, cache_salt=f"tenant {number}")
            assert await expected_cached(stack) - before == 3 * BLOCK
        assert sorted(stack.served)[1] > 0
        assert 'paceline_routed_total{affinity="session",model_name="pydoc"} 12.0' in await stack.metrics()


async def test_a_target_that_drains_by_its_heartbeat_gets_nothing_new() -> None:
    """Neither one that is connected, nor one that is not: the gateway does not connect to it."""
    async with open_stack(counts, counts) as stack:
        leaving = stack.targets[0]
        assert 'paceline_targets_up{model_name="pydoc"} 2.0' in await stack.metrics()
        await stack.store.registry.heartbeat(leaving.record, {"draining": 1.0})
        await until(lambda: stack.model.fleet.targets_up == 1)
        for number in range(6):
            await completed(stack, [300 + number])
        assert stack.served == [0, 6]
        assert 'paceline_targets_up{model_name="pydoc"} 1.0' in await stack.metrics()
        unknown = await start_target(counts, 1, "unknown")
        await stack.store.registry.heartbeat(unknown.record, {"draining": 1.0})
        await stack.add_target(counts)  # the gateway has seen a list with both of them
        assert not unknown.linked
        await unknown.die()


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


async def test_a_target_that_fails_repeatedly_is_paused_and_probed_without_failed_requests() -> None:
    fails = True

    def moody(request: GenerationRequest) -> Sequence[int]:
        if fails:
            raise RuntimeError("the accelerator is gone")
        return counts(request)

    async with open_stack(moody, counts, burst=1) as stack:
        breaker, now = breaker_of(stack, stack.targets[0]), 0.0
        breaker._clock = lambda: now
        numbers = iter(range(300, 3000))
        while breaker.state == BreakerState.CLOSED:
            await completed(stack, [next(numbers)])
        opened = f'kind="target",model_name="{MODEL}",worker="{key(stack.targets[0])}"}} 2.0'
        assert opened in await stack.metrics()
        for _ in range(3):
            await completed(stack, [next(numbers)])
        assert stack.served[0] == FAILURES
        now += FIRST_PAUSE_S
        while stack.served[0] == FAILURES:  # the probe
            await completed(stack, [next(numbers)])
        assert breaker.probe_in_s == 2 * FIRST_PAUSE_S
        fails = False
        now += 2 * FIRST_PAUSE_S
        while breaker.state != BreakerState.CLOSED:
            await completed(stack, [next(numbers)])
        assert stack.served[0] == FAILURES + 2


@pytest.mark.parametrize("output", [[], [300, 301]], ids=["at once", "after some tokens"])
async def test_a_request_that_fails_at_every_target_is_its_own_fault(output: list[int]) -> None:
    """A grammar may grow too large after any token, at every target: such requests must not open the breakers, whether
    the error comes alone, with the first tokens or later."""

    def script(request: GenerationRequest) -> Sequence[int]:
        if request.sampling.seed == 13:
            raise FailsAfter("too many states", output)
        return counts(request)

    async with open_stack(script, burst=1) as stack:
        await stack.add_target(script, burst=3)
        for number in range(2 * FAILURES):
            for target in stack.targets:
                answer = await stack.complete([300 + number], session_at(stack, target), seed=13)
                assert answer.status_code == 500
                assert "too many states" in answer.text
        assert stack.served == [2 * FAILURES * (1 if output else 2)] * 2, "a request without tokens is tried elsewhere"
        assert set(stack.model.fleet.breaker_states().values()) == {BreakerState.CLOSED}
        await completed(stack, "x")


@pytest.mark.parametrize("report", [True, False], ids=["with its statistics", "without"])
async def test_a_request_that_a_stop_string_ends_has_ended_well(report: bool) -> None:
    """Failures before it are forgiven, and what it cost is learned."""
    async with open_stack(text_script("hello world and more"), burst=1) as stack:
        breaker = breaker_of(stack, stack.targets[0])
        for _ in range(FAILURES):
            breaker.on_failure()
            answer = await completed(stack, "x", stop="world", max_tokens=50, speculation_stats=report)
            assert answer["choices"][0]["stop_reason"] == "world"
        assert breaker.state == BreakerState.CLOSED
        assert stack.model.fleet.request_cost.output_tokens.value < 50


async def test_a_client_that_leaves_is_neither_a_failure_nor_a_success() -> None:
    async with open_stack(counts, burst=1) as stack:
        breaker = breaker_of(stack, stack.targets[0])
        for _ in range(FAILURES - 1):
            breaker.on_failure()
        stack.decoder.hold_after = 2
        async with stack.streaming() as events:
            await anext(events)
        await stack.decoder.cancelled.get()
        await stack.idle()
        assert breaker.state == BreakerState.CLOSED
        breaker.on_failure()
        assert breaker.state == BreakerState.OPEN


async def test_a_target_that_refused_a_request_is_tried_again_when_the_other_one_is_lost() -> None:
    """There is no other target; its second refusal is final."""

    def refuses(request: GenerationRequest) -> Sequence[int]:
        raise RuntimeError("no grammar has this rule")

    async with open_stack(refuses) as stack:
        other = await stack.add_target(counts)
        other.decoder.gate.clear()
        asking = asyncio.create_task(stack.complete(headers=session_at(stack, stack.targets[0])))
        await until(lambda: other.decoder.requests)
        await other.die()
        answer = await asking
        assert (answer.status_code, stack.served[0]) == (500, 2)
        assert "no grammar has this rule" in answer.text


async def test_when_every_breaker_is_open_responses_have_retry_after() -> None:
    async with open_stack(counts) as stack:
        breaker = breaker_of(stack, stack.targets[0])
        for _ in range(FAILURES):
            breaker.on_failure()
        answer = await stack.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await stack.http.get("/health")).status_code == 503
        await until(lambda: breaker.state != BreakerState.OPEN)
        await completed(stack, "x")
        assert breaker.state == BreakerState.CLOSED


async def test_drafts_take_turns_until_the_acceptance_at_all_gateways_decides() -> None:
    """The scripted target reports the draft `d` for every request. A draft with another vocabulary is not offered."""
    async with open_stack(counts) as stack:
        known = (("d", "draft_model", stack.targets[0].record.fingerprint), ("e", "ngram", ""), ("f", "ngram", "other"))
        drafts = {name: WorkerRecord("draft", name, f"{name}:1", "", *kind, 0.0) for name, *kind in known}
        for draft in drafts.values():
            await stack.store.registry.register(draft)
        fleet, shared = stack.model.fleet, stack.store.acceptance
        await until(lambda: len(fleet.drafts.breakers) == 2)

        async def offered() -> Sequence[str]:
            await completed(stack, "x")
            return stack.decoder.requests[-1].draft_addresses

        assert sorted([await offered(), await offered()]) == [["d:1", "e:1"], ["e:1", "d:1"]]
        first, second = (draft_kind(drafts[name], greedy=False) for name in "de")
        while not (mine := await shared.acceptance(MODEL, first)).verifications:
            await asyncio.sleep(0.02)
        assert mine.acceptance_length == 1.0
        await shared.record(MODEL, second, AcceptanceCounts(200.0, [100.0], [90.0]))
        await shared.record(MODEL, first, AcceptanceCounts(100.0, [150.0], [45.0]))
        await until(lambda: {fleet.drafts.order(greedy=False)[0] for _ in range(4)} == {"e:1"})
        assert [await offered(), await offered()] == [["e:1", "d:1"]] * 2


async def test_several_models_behind_one_gateway() -> None:
    async with open_stack(counts, more_models=["other"], aliases={"short": MODEL, "long": "other"}) as stack:
        assert (await stack.complete(model="other")).status_code == 503
        other = await stack.add_target(counts, model="other")
        for name, model in {MODEL: MODEL, "short": MODEL, "other": "other", "long": "other"}.items():
            assert (await completed(stack, "x", model=name))["model"] == model
        assert stack.served == [2, 2]
        listed = (await stack.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, "other"]
        assert (await stack.http.get("/v1/models/long")).json()["id"] == "other"
        unknown = await stack.complete(model="nope")
        assert unknown.status_code == 404
        assert "'pydoc', 'other'" in unknown.text
        nameless = await stack.complete()
        assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
        async with stack.inference() as stub:
            models = await stub.ListModels(inference_pb2.ListModelsRequest())
            assert [model.id for model in models.models] == [MODEL, "other"]
            await generated(stub, inference_pb2.GenerateRequest(text="x", model="long"))
        assert stack.served == [2, 3]
        assert (
            'paceline_request_success_total{finished_reason="length",model_name="other"} 3.0' in await stack.metrics()
        )
        await other.die()
        await completed(stack, "x", model=MODEL)
        assert (await stack.http.get("/health")).status_code == 200
