"""The operators' routes: probes, load, what is served, and the end of running requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

import paceline
from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline.messages import SpeculationStats
from paceline.state.acceptance import REQUEST_TTL_S
from paceline.state.embedded_redis import EmbeddedRedis
from tests.helpers.openai_stack import MODEL, Stack, another_gateway, counts, open_stack
from tests.helpers.waiting import eventually, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 60},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**CHAT, "model": MODEL, "max_tokens": 60},
}
NAMES = ("alice", "bob")
ALICE, BOB = ({"authorization": f"Bearer {name}"} for name in NAMES)


async def held(
    stack: Stack, path: str, headers: dict[str, str] | None = None, *, begun: bool = True, **fields: Any
) -> asyncio.Task[httpx.Response]:
    """A request that its target holds, after some tokens or before any."""
    decoder, choices = stack.decoder, fields.get("n", 1)
    there = len(decoder.requests) + choices
    decoder.gate.clear()
    asking = asyncio.create_task(stack.http.post(path, json=BODIES[path] | fields, headers=headers))
    await until(lambda: len(decoder.requests) == there)
    if begun:  # the choices take turns
        decoder.hold_after = 4 * choices
        decoder.gate.set()
        await until(lambda: not decoder.gate.is_set())
        await stack.all_received()
    return asking


async def abort(stack: Stack, *ids: str, headers: dict[str, str] | None = None) -> list[str]:
    """The ids of requests that were ended."""
    answer = await stack.http.post("/abort_requests", json={"request_ids": list(ids)}, headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["aborted"])


async def test_probes() -> None:
    """A gateway lives without a target, but is not ready."""
    async with open_stack() as stack:
        assert (await stack.http.get("/live")).status_code == 200
        assert (await stack.http.get("/ready")).status_code == 503
        await stack.add_target(counts)
        assert (await stack.http.get("/ready")).json() == {"status": "ok"}


async def test_probes_without_a_body() -> None:
    """Load balancers ask with HEAD."""
    async with open_stack() as stack:
        answers = [await stack.http.head(path) for path in ("/live", "/ready", "/health")]
        assert [(each.status_code, each.content) for each in answers] == [(200, b""), (503, b""), (503, b"")]
        await stack.add_target(counts)
        assert (await stack.http.head("/health")).status_code == 200


async def test_load_counts_what_runs_and_what_waits() -> None:
    async with open_stack(counts, burst=1) as stack:
        assert (await stack.http.get("/load")).json() == {"server_load": 0, "num_waiting_reqs": 0}
        asking = await held(stack, "/v1/completions", begun=False, n=3)
        await until(lambda: len(stack.decoder.requests) == 3)
        assert (await stack.http.get("/load")).json() == {"server_load": 3, "num_waiting_reqs": 3}
        stack.decoder.gate.set()
        assert (await asking).status_code == 200
        assert (await stack.http.get("/load")).json()["server_load"] == 0


async def test_server_info_has_options_and_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret-place" / "keys.json"
    file.parent.mkdir()
    write(file, KeyFile(keys=(ApiKey(name="alice", sha256=digest("alice")),)))
    async with open_stack(
        counts, api_keys=file, aliases={"small": MODEL}, tool_call_parser="hermes", reasoning_parser="none"
    ) as stack:
        answer = await stack.http.get("/server_info", headers=ALICE)
        info = answer.json()
        assert info["version"] == paceline.__version__
        [model] = info["models"]
        assert (model["id"], model["aliases"], model["max_model_len"], model["targets_up"]) == (
            MODEL,
            ["small"],
            128,
            1,
        )
        assert (model["tool_call_parser"], model["reasoning_parser"]) == ("hermes", None)
        assert (info["options"]["api_keys"], info["options"]["tls"]) == (True, False)
        assert info["options"]["max_in_flight"] == 1024
        for secret in ("secret-place", digest("alice")):
            assert secret not in answer.text


@pytest.mark.parametrize("begun", [True, False], ids=["with tokens", "before the first token"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_ends_early_by_the_name_that_its_client_chose(path: str, begun: bool) -> None:
    """Its own response has what was generated; the target is told; everything is freed."""
    async with open_stack(counts, burst=1) as stack:
        asking = await held(stack, path, {"x-request-id": "job-7"}, begun=begun)
        assert await abort(stack, "job-8", "job-7") == ["job-7"]
        answer = await asking
        assert answer.status_code == 200
        assert await stack.decoder.cancelled.get()
        await stack.idle()
        usage = answer.json()["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) in (range(1, 5) if begun else [0])
        assert await abort(stack, "job-7") == [], "it runs no more"


async def test_all_choices_end_and_say_why() -> None:
    async with open_stack(counts, burst=1) as stack:
        asking = await held(stack, "/v1/completions", {"x-request-id": "a"}, begun=False, n=2)
        await abort(stack, "a")
        choices = (await asking).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


async def test_a_stream_ends_early_by_the_id_of_its_response() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 2
        async with stack.streaming(max_tokens=60) as events:
            first = await anext(events)
            await until(lambda: not stack.decoder.gate.is_set())
            assert await abort(stack, first["id"]) == [first["id"]]
            *_, last = [event async for event in events]
        assert last["choices"][0]["finish_reason"] == "abort"
        await stack.decoder.cancelled.get()
        await stack.idle()


async def test_a_client_ends_its_own_requests_only(tmp_path: Path) -> None:
    write(tmp_path / "keys.json", KeyFile(keys=tuple(ApiKey(name=name, sha256=digest(name)) for name in NAMES)))
    async with open_stack(counts, burst=1, api_keys=tmp_path / "keys.json") as stack:
        asking = await held(stack, "/v1/completions", ALICE | {"x-request-id": "a"})
        group = stack.decoder.requests[-1].group
        for id_ in ("a", group, f"cmpl-{group}"):
            assert await abort(stack, id_, headers=BOB) == []
        assert await abort(stack, group, headers=ALICE) == [group]
        assert (await asking).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_client_that_leaves_at_the_moment_of_the_abort_frees_everything() -> None:
    async with open_stack(counts, burst=1) as stack:
        for _ in range(5):
            asking = await held(stack, "/v1/completions", {"x-request-id": "a"})
            aborting = asyncio.create_task(abort(stack, "a"))
            asking.cancel()
            await aborting
            await stack.decoder.cancelled.get()
            await stack.idle()
            stack.decoder.gate.set()


@pytest.mark.parametrize("body", [{}, {"request_ids": []}, {"request_ids": [""]}, {"request_ids": "a"}, {"ids": ["a"]}])
async def test_an_abort_without_ids_is_refused(body: dict[str, Any]) -> None:
    """vLLM ends everything then; here other clients' requests run, too."""
    async with open_stack(counts) as stack:
        assert (await stack.http.post("/abort_requests", json=body)).status_code == 400


async def known(stack: Stack, id_: str, headers: dict[str, str] | None = None) -> dict[str, Any] | None:
    """What the gateway knows of a request; None: 404."""
    answer = await stack.http.get(f"/v1/requests/{id_}", headers=headers)
    if answer.status_code == 404:
        assert answer.json()["error"]["code"] == "request_not_found"
        return None
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


STATS = SpeculationStats([2, 1], [2, 0], drafted_tokens=5, verifications=2, steps=3, drafts=["d"])


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_known_of_a_request_while_it_runs_and_after_its_end(
    path: str,
) -> None:
    """At any gateway, for a while."""
    with EmbeddedRedis() as redis:
        async with (
            open_stack(counts, burst=1, redis_url=redis.url) as stack,
            another_gateway(stack, redis.url) as other,
        ):
            stack.decoder.running_stats = STATS
            asking = await held(stack, path, {"x-request-id": "7"})
            here = await known(stack, "7")
            assert here is not None
            assert (here["object"], here["model"], here["state"]) == ("request", MODEL, "running")
            assert (here["completion_tokens"], here["replays"], len(here["targets"])) == (4, 0, 1)
            counted = here["speculation"]
            assert (counted["drafted_by_depth"], counted["accepted_by_depth"]) == ([2, 1], [2, 0])
            assert (counted["drafted_tokens"], counted["drafts"]) == (5, ["d"])

            async def written() -> bool:
                return await known(other, "7") == here

            await eventually(written)
            stack.decoder.gate.set()
            answer = (await asking).json()
            ended = await known(stack, "7")
            assert ended is not None
            assert (ended["state"], ended["speculation"]["drafted_tokens"]) == ("finished", 9)

            async def ended_there() -> bool:
                return await known(other, answer["id"]) == ended

            await eventually(ended_there)
            async with Redis.from_url(redis.url) as client:
                for key in await client.keys("paceline:request:*"):
                    assert 0 < await client.ttl(key) <= REQUEST_TTL_S
                    await client.pexpire(key, 1)

            async def expired() -> bool:
                return await known(other, "7") is None and await known(stack, answer["id"]) is None

            await eventually(expired)


async def test_what_is_known_of_a_request_is_for_its_key_only(tmp_path: Path) -> None:
    write(tmp_path / "keys.json", KeyFile(keys=tuple(ApiKey(name=name, sha256=digest(name)) for name in NAMES)))
    with EmbeddedRedis() as redis:
        async with open_stack(counts, burst=1, redis_url=redis.url, api_keys=tmp_path / "keys.json") as stack:
            asking = await held(stack, "/v1/completions", {"x-request-id": "a", **ALICE})
            assert await known(stack, "a", ALICE)
            assert await known(stack, "a", BOB) is None
            assert (await stack.http.get("/v1/requests/a")).status_code == 401
            stack.decoder.gate.set()
            await asking

            async def written() -> bool:
                return "finished" in (await stack.store.acceptance.request(("alice", "a")) or "")

            await eventually(written)
            assert await known(stack, "a", ALICE)
            assert await known(stack, "a", BOB) is None


async def test_without_redis_a_gateway_knows_what_it_runs() -> None:
    """Ids may have slashes."""
    async with open_stack(counts, burst=1) as stack:
        asking = await held(stack, "/v1/completions", {"x-request-id": "a/1"}, n=2)
        report = await known(stack, "a/1")
        assert report is not None
        assert report["state"] == "running"
        assert 0 < report["completion_tokens"] < 10, "of both choices"
        assert await known(stack, "b") is None
        stack.decoder.gate.set()
        await asking

        async def forgotten() -> bool:
            return await known(stack, "a/1") is None

        await eventually(forgotten)


async def test_a_gateway_says_so_if_redis_does_not_answer() -> None:
    with EmbeddedRedis() as redis:
        async with open_stack(counts, burst=1, redis_url=redis.url) as stack:
            asking = await held(stack, "/v1/completions", {"x-request-id": "a"})
            redis.kill()
            assert await known(stack, "a"), "it runs here"
            assert (await stack.http.get("/v1/requests/b")).status_code == 503
            stack.decoder.gate.set()
            assert (await asking).status_code == 200


async def test_a_replay_is_drafted_as_before_and_what_is_known_adds_up() -> None:
    """The next target gets the average that the lost one had."""
    async with open_stack(counts, burst=1) as stack:
        first = stack.targets[0]
        stack.decoder.running_stats = replace(STATS, accepted_average=0.75)
        asking = await held(stack, "/v1/completions", {"x-request-id": "a"})
        second = await stack.add_target(counts, burst=1, worker_id="second")
        second.decoder.running_stats, second.decoder.hold_after = STATS, 3
        await first.decoder.hand_over()
        await until(lambda: not second.decoder.gate.is_set())
        await stack.all_received()
        assert [each.accepted_average for each in (*first.decoder.requests, *second.decoder.requests)] == [None, 0.75]
        report = await known(stack, "a")
        assert report is not None
        assert (report["completion_tokens"], report["replays"], report["targets"][1:]) == (7, 1, ["second"])
        assert report["speculation"]["accepted_by_depth"] == [4, 0]
        assert "accepted_average" not in report["speculation"]
        second.decoder.gate.set()
        assert (await asking).json()["usage"]["completion_tokens"] == 60
