"""Streams that survive: a client that reconnects with `Last-Event-ID`, at any gateway, gets the rest, byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import Message

from loadtests.chaos.chaos_cases import opened
from loadtests.received_stream import ReceivedStream
from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.messages import GenerationRequest
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import REASONING_FORMATS
from paceline.state import RecordLimits, WorkerRecord, open_store
from paceline.state.embedded_redis import EmbeddedRedis
from paceline.text.chat_template import ChatTemplate
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.auth import ANONYMOUS
from paceline_services.gateway.generation import journal
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.journal import Journals
from paceline_services.gateway.generation.resumption import check, resumable
from paceline_services.gateway.http.event_stream import EventStream, ServerSentEvent
from paceline_services.gateway.server import running
from paceline_services.gateway.settings import GatewaySettings
from tests.contract.anthropic_stack import MESSAGES, TEMPLATE, THINKING, USER, WEATHER
from tests.helpers.openai_stack import EOS, MODEL, TOKENIZER, FailsAfter, Stack, another_gateway, counts, open_stack
from tests.helpers.targets import target_worker
from tests.helpers.waiting import eventually, until

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SPOKEN = 'I think\nso.</think>\nHi.<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
FUNCTION = {"name": "weather", "parameters": WEATHER["input_schema"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream_options": {"include_usage": True}}),
    "log-probabilities": (
        COMPLETIONS,
        {"prompt": "x y z", "max_tokens": 8, "logprobs": 2, "echo": True, "return_token_ids": True, "seed": 3},
    ),
    "statistics": (
        COMPLETIONS,
        {"prompt": "x", "max_tokens": 9, "speculation_stats": True, "return_accepted": True, "return_tree": True},
    ),
    "bundles": (COMPLETIONS, {"prompt": "x", "max_tokens": 12, "stream_interval": 5}),
    "chat": (
        CHAT,
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": FUNCTION}],
            "chat_template_kwargs": {"enable_thinking": True},
            "logprobs": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "messages": (
        MESSAGES,
        {"model": MODEL, "max_tokens": 90, "messages": [USER], "tools": [WEATHER], "thinking": THINKING},
    ),
    "responses": (
        RESPONSES,
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "chat_template_kwargs": {"enable_thinking": True},
            "include": ["message.output_text.logprobs"],
        },
    ),
}
"""Streams of every API. Those of chats think and call."""


def script(request: GenerationRequest) -> Sequence[int]:
    """Chats think and call, completions count."""
    if "[user]" not in TOKENIZER.decode(request.prompt):
        return counts(request)
    return [*TOKENIZER.encode(SPOKEN, add_special_tokens=False), EOS]


@dataclass
class Pair:
    """Two gateways with one Redis and one target."""

    first: Stack
    second: Stack
    redis: EmbeddedRedis


@asynccontextmanager
async def open_pair(**settings: Any) -> AsyncIterator[Pair]:
    with EmbeddedRedis() as redis:
        async with (
            open_stack(script, redis_url=redis.url, context=512, burst=2, **settings) as first,
            another_gateway(first, redis.url, **settings) as second,
        ):
            for stack in (first, second):
                stack.model.tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
                stack.model.output_format = OutputFormat(REASONING_FORMATS["qwen3"], HERMES)
            yield Pair(first, second, redis)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    async with open_pair() as pair:
        yield pair


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def stream(stack: Stack, path: str, body: dict[str, Any] | None, last: str = "", **headers: str) -> list[str]:
    """The events of a whole stream, as text. `last`: the id after which it is resumed."""
    headers |= {"last-event-id": last} if last else {}
    async with stack.http.stream("POST", path, json=body and body | {"stream": True}, headers=headers) as response:
        text = (await response.aread()).decode()
        assert response.status_code == 200, text
    return events_in(text)


def events_in(text: str) -> list[str]:
    return [f"{each}\n\n" for each in text.split("\n\n") if each]


def id_of(event: str) -> str:
    [found] = re.findall(r"^id: (.*)$", event, re.MULTILINE)
    return str(found)


def comparable(events: Sequence[str]) -> str:
    """The stream without what is new in every request: ids, and the second in which it began or ended."""
    text = re.sub(r"[0-9a-f]{32}|call_[0-9a-f]{24}", "ID", "".join(events))
    return re.sub(r'("signature":)"ID"|("(?:created|created_at|completed_at)":)\d+', r"\1\2", text)


@asynccontextmanager
async def held(stack: Stack, path: str, body: dict[str, Any], deltas: int) -> AsyncIterator[list[str]]:
    """The events of a stream whose target hangs after so many deltas; the client leaves with the context."""
    stack.decoder.hold_after = deltas
    parts: list[str] = []

    async def read() -> None:
        async with stack.http.stream("POST", path, json=body | {"stream": True}) as response:
            async for part in response.aiter_text():
                parts.append(part)

    reading = asyncio.create_task(read())
    await until(lambda: not stack.decoder.gate.is_set() or reading.done())
    length = -1
    while length != len(parts):  # what was on its way
        length = len(parts)
        await asyncio.sleep(0.03)
    try:
        yield events_in("".join(parts))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: not stack.decoder._tasks)
    stack.decoder.hold_after = None
    stack.decoder.gate.set()


async def journal_length(pair: Pair, request_id: str, length: int) -> bool:
    return len(await pair.second.store.records.load("", request_id)) == length


@pytest.mark.parametrize("name", BODIES)
async def test_a_finished_stream_is_repeated_from_any_event_on(name: str, pair: Pair) -> None:
    """Byte for byte, at the other gateway, without a target."""
    path, body = BODIES[name]
    events = await stream(pair.first, path, body)
    assert len(events) > 4
    pair.first.decoder.requests.clear()
    numbered = [each for each in events if "[DONE]" not in each]
    assert [int(id_of(each).split(":")[1]) for each in numbered] == list(range(1, len(numbered) + 1))
    for count in range(1, len(numbered) + 1):
        assert await stream(pair.second, path, None, id_of(events[count - 1])) == events[count:], count
    assert pair.first.decoder.requests == []


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_that_breaks_anywhere_continues_at_the_other_gateway(name: str, pair: Pair) -> None:
    """What the client has and what it gets add up to the undisturbed stream."""
    path, body = BODIES[name]
    body = {"seed": 5, **body}
    whole = await stream(pair.first, path, body)
    resumed = 0
    for count in itertools.count(1):
        async with held(pair.first, path, body, count) as events:
            pass
        if comparable(events) == comparable(whole):
            break
        if not events:  # the target has not come to the first token
            continue
        pair.first.decoder.requests.clear()
        rest = await stream(pair.second, path, None, id_of(events[-1]))
        assert comparable([*events, *rest]) == comparable(whole)
        [request] = pair.first.decoder.requests
        resumed += bool(request.committed)
    assert resumed > 2


async def test_a_stream_is_resumed_while_its_first_client_still_reads(pair: Pair) -> None:
    """A gateway that takes over fences the earlier owner, which cancels the request at its target. No token is doubled,
    however often it goes to and fro."""
    path, body = BODIES["completions"]
    body = {**body, "max_tokens": 60, "seed": 8}
    whole = await stream(pair.first, path, body)
    decoder = pair.first.decoder
    decoder.cancelled = asyncio.Queue()
    decoder.requests.clear()
    decoder.hold_after = 3
    first = asyncio.create_task(stream(pair.first, path, body))
    await until(lambda: not decoder.gate.is_set())
    request_id = decoder.requests[0].group
    await eventually(lambda: journal_length(pair, request_id, 4))
    second = asyncio.create_task(stream(pair.second, path, None, f"{request_id}:1"))
    await until(lambda: len(decoder.requests) == 2)
    decoder.hold_after = 8
    decoder.gate.set()
    fenced = await first
    await until(lambda: not decoder.gate.is_set())
    third = asyncio.create_task(stream(pair.first, path, None, f"{request_id}:1"))
    await until(lambda: len(decoder.requests) == 3)
    decoder.hold_after = 8
    decoder.gate.set()
    fenced_later = await second
    await until(lambda: decoder.cancelled.qsize() == 2)
    decoder.hold_after = None  # the third may not have come to its eighth delta
    decoder.gate.set()
    assert comparable([whole[0], *await third]) == comparable(whole)
    for earlier in (fenced[1:], fenced_later):
        *events, error, _ = earlier
        assert '"code":"resumed_elsewhere"' in error
        assert events == third.result()[: len(events)] != []
    ids = [request.request_id for request in decoder.requests]
    assert [await decoder.cancelled.get() for _ in range(2)] == ids[:2]
    assert len(set(ids)) == 3, "a target may still have an earlier attempt"


async def test_choices_of_a_broken_stream_keep_their_order_and_end(pair: Pair) -> None:
    """What came is repeated as it came; every choice ends with the tokens that it would have had."""
    path, body = COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "max_tokens": 12, "seed": 6, "return_token_ids": True}
    whole = await stream(pair.first, path, body)
    async with held(pair.first, path, body, 9) as events:
        pass
    rest = await stream(pair.second, path, None, id_of(events[2]))
    again = await stream(pair.first, path, None, id_of(events[0]))
    assert [*events[1:3], *rest] == again
    assert rest[: len(events) - 3] == events[3:]

    def tokens(events: Sequence[str]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for event in events:
            for index, ids in re.findall(r'"index":(\d+).*"token_ids":\[([^]]*)\]', event):
                found.setdefault(int(index), []).extend(map(int, ids.split(",")))
        return found

    assert tokens([*events[:3], *rest]) == tokens(whole)
    assert {index: len(ids) for index, ids in tokens(whole).items()} == dict.fromkeys(range(4), 12)


async def test_a_stream_without_a_seed_keeps_the_one_that_was_drawn(pair: Pair) -> None:
    """Each request draws another one."""
    path, body = BODIES["completions"]
    texts = set()
    for _ in range(3):
        async with held(pair.first, path, body, 2) as events:
            pass
        rest = await stream(pair.second, path, None, id_of(events[-1]))
        begun, resumed = pair.first.decoder.requests[-2:]
        assert begun.sampling == resumed.sampling
        assert list(resumed.committed) == list(counts(begun))[:4]
        texts.add(comparable([*events, *rest]))
    assert len(texts) == 3


async def test_an_error_of_the_request_is_its_end_everywhere(pair: Pair) -> None:
    """After the client reconnects, too: nothing is tried again."""

    def failing(request: GenerationRequest) -> Sequence[int]:
        raise FailsAfter("the cache is on fire", counts(request)[:6])

    async with open_stack(failing, redis_url=pair.redis.url, burst=2) as stack:
        path, body = BODIES["completions"]
        *events, error, _ = await stream(stack, path, body)
        assert "the cache is on fire" in error
        assert "id:" not in error
        stack.decoder.requests.clear()
        assert (await stream(stack, path, None, id_of(events[0])))[: len(events)] == [*events[1:], error]
        refused = await stack.http.post(path, headers={"last-event-id": id_of(events[-1])})
        assert (refused.status_code, refused.json()["error"]["message"]) == (500, "the cache is on fire")
        assert stack.decoder.requests == []


async def test_an_aborted_stream_stays_aborted(pair: Pair) -> None:
    path, body = BODIES["chat"]
    async with held(pair.first, path, body, 3) as events:
        request_id = pair.first.decoder.requests[-1].group
        aborted = await pair.first.http.post("/abort_requests", json={"request_ids": [request_id]})
        assert aborted.json() == {"aborted": [request_id]}
        await pair.first.idle()
    rest = await stream(pair.second, path, None, id_of(events[-1]))
    assert '"finish_reason":"abort"' in rest[0]


async def test_a_stream_that_is_repeated_notices_that_its_client_has_left(pair: Pair) -> None:
    """A past bug: every event was written to the lost connection."""
    path, body = BODIES["completions"]
    await stream(pair.first, path, body | {"max_tokens": 200})
    [request] = pair.first.decoder.requests[-1:]
    found = await Journals(pair.second.store, enabled=True).find("", request.group)
    assert found is not None
    sent = 0

    async def send(message: Message) -> None:
        nonlocal sent
        sent += 1

    async def receive() -> Message:
        while sent < 3:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def events() -> AsyncGenerator[ServerSentEvent]:
        again = CompletionRequest(request.request_id, request.prompt, request.sampling)
        output = resumable(found, pair.second.model, [again], ANONYMOUS, streamed=True)
        async with aclosing(output) as deltas:
            async for _ in deltas:
                yield ServerSentEvent("x")

    await EventStream(events())({"type": "http", "path": path}, receive, send)
    assert 3 <= sent < 20


async def test_a_stream_that_outlasts_its_gateway_s_drain_ends_with_an_error_and_goes_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A past bug: the connection was cut, and the log had a traceback."""
    path, body = COMPLETIONS, {"prompt": "x", "max_tokens": 9, "seed": 1}
    with EmbeddedRedis() as redis:
        async with open_stack(script, redis_url=redis.url, burst=2) as first:
            expected = comparable(await stream(first, path, body))
            async with another_gateway(first, redis.url, drain_s=0.1) as second:
                first.decoder.gate.clear()
                url = f"http://{second.addresses.http}{path}"
                reading = asyncio.create_task(first.http.post(url, json=body | {"stream": True}))
                whole = asyncio.create_task(first.http.post(url, json=body))
                await until(lambda: len(first.decoder.requests) == 3)
                first.decoder.hold_after = 2  # in turns, so one delta of each
                first.decoder.gate.set()
                await until(lambda: not first.decoder.gate.is_set())
                await second.all_received()
            first.decoder.gate.set()
            *events, error, done = events_in((await reading).text)
            assert ('"type":"service_unavailable"' in error, done) == (True, "data: [DONE]\n\n")
            assert (await whole).status_code == 503
            rest = await stream(first, path, None, id_of(events[-1]))
            assert comparable([*events, *rest]) == expected
    assert "Exception in ASGI application" not in caplog.text


async def test_what_cannot_be_resumed(pair: Pair) -> None:
    """Each answer is 404, and says why."""
    path, body = BODIES["completions"]
    event_id = id_of((await stream(pair.first, path, body))[0])
    whole = (await pair.first.complete(max_tokens=3)).json()["id"].removeprefix("cmpl-")
    for at, last in (
        (path, "nonsense"),
        (path, f"{'0' * 32}:1"),
        (path, f"{event_id}x"),
        (CHAT, event_id),  # another API's
        (path, f"{whole}:1"),  # not streamed
        (path, f"{event_id.partition(':')[0]}:99"),  # beyond the stream's end
    ):
        refused = await pair.second.http.post(at, headers={"last-event-id": last})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found")


async def test_a_prompt_that_has_changed_is_refused(pair: Pair) -> None:
    """A template may write the time: its prompt cannot be had again."""
    path, body = BODIES["chat"]
    async with held(pair.first, path, body, 3) as events:
        pass
    before, pair.second.model.tokenizer.chat_template = (
        pair.second.model.tokenizer.chat_template,
        ChatTemplate("12:00" + TEMPLATE, {}),
    )
    try:
        refused = await pair.second.http.post(path, headers={"last-event-id": id_of(events[-1])})
    finally:
        pair.second.model.tokenizer.chat_template = before
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "stream_changed")


@pytest.mark.parametrize("added", [0, 1])
async def test_a_parameter_that_only_one_build_knows_changes_nothing_while_it_is_unset(pair: Pair, added: int) -> None:
    """Gateways of two builds continue each other's streams during an upgrade."""

    class NewerParams(SamplingParams):
        added: int = 0

    path, body = BODIES["completions"]
    async with held(pair.first, path, body, 3) as events:
        pass
    kept = await journal.Journals(pair.second.store, enabled=True).find("", id_of(events[-1]).partition(":")[0])
    assert kept is not None
    request = pair.first.decoder.requests[-1]
    newer = NewerParams(**dict(request.sampling), added=added)
    with pytest.raises(InvalidRequestError) if added else nullcontext():
        check(kept, [CompletionRequest("", request.prompt, newer)])


async def test_a_client_resumes_its_own_streams_only(tmp_path: Path) -> None:
    names = ("alice", "bob")
    write(tmp_path / "keys.json", KeyFile(keys=tuple(ApiKey(name=name, sha256=digest(name)) for name in names)))
    alice, bob = ({"authorization": f"Bearer {name}"} for name in names)
    async with open_pair(api_keys=tmp_path / "keys.json") as pair:
        path, body = BODIES["completions"]
        events = await stream(pair.first, path, body, **alice)
        refused = await pair.second.http.post(path, headers={"last-event-id": id_of(events[0]), **bob})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found")
        assert await stream(pair.second, path, None, id_of(events[0]), **alice) == events[1:]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_redis_goes_amid_a_stream_and_the_stream_goes_on(end: signal.Signals) -> None:
    """From there on its events tell clients to forget the id that they have; resumption says that it takes Redis."""
    path, body = BODIES["completions"]
    body = {**body, "seed": 4}
    async with open_pair() as pair:
        whole = await stream(pair.first, path, body)
        pair.first.decoder.hold_after = 2
        streaming = asyncio.create_task(stream(pair.first, path, body))
        await until(lambda: not pair.first.decoder.gate.is_set())
        await eventually(lambda: journal_length(pair, pair.first.decoder.requests[-1].group, 3))
        assert pair.redis.pid is not None
        os.kill(pair.redis.pid, end)
        pair.first.decoder.gate.set()
        events = await streaming
        ids = [id_of(each) for each in events[:-1]]
        assert [bool(each) for each in ids] == [True, True, *[False] * (len(ids) - 2)]
        without_ids = [re.sub("^id: .*\n", "", each) for each in events]
        assert comparable(without_ids) == comparable([re.sub("^id: .*\n", "", each) for each in whole])
        await until(lambda: pair.second.store.presence.unavailable)
        refused = await pair.second.http.post(path, headers={"last-event-id": ids[0]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "resumption_unavailable")
        assert "id:" not in "".join(await stream(pair.second, path, body))
        if end is signal.SIGSTOP:
            os.kill(pair.redis.pid, signal.SIGCONT)
        else:
            pair.redis.start()
        await until(lambda: not pair.second.store.presence.unavailable)
        assert id_of((await stream(pair.second, path, body))[0])


async def test_streams_expire_and_their_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    path, body = BODIES["completions"]
    async with open_pair(records=RecordLimits(resumable_s=0.3)) as pair:
        event_id = id_of((await stream(pair.first, path, body))[0])

        async def expired() -> bool:
            return (await pair.second.http.post(path, headers={"last-event-id": event_id})).status_code == 404

        await eventually(expired)
    async with open_pair(records=RecordLimits(max_bytes=3000)) as pair:
        ids = [id_of((await stream(pair.first, path, body))[0]) for _ in range(12)]
        answers = [(await pair.second.http.post(path, headers={"last-event-id": each})).status_code for each in ids]
        assert answers == sorted(answers, reverse=True)
        assert {answers[0], answers[-1]} == {404, 200}
    async with open_pair(records=RecordLimits(resumable_s=0)) as pair:
        assert "id:" not in "".join(await stream(pair.first, path, body))
        refused = await pair.first.http.post(path, headers={"last-event-id": f"{'0' * 32}:1"})
        assert "keeps no streams" in refused.json()["error"]["message"]


async def test_a_journal_that_grows_too_long_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on, and its events tell clients to forget the id that they have."""
    monkeypatch.setattr(journal, "MAX_JOURNAL_BYTES", 600)
    path, body = BODIES["completions"]
    events = await stream(pair.first, path, {**body, "max_tokens": 30})
    kept = [bool(id_of(each)) for each in events[:-1]]
    assert kept == sorted(kept, reverse=True)
    assert {kept[0], kept[-1]} == {True, False}
    refused = await pair.second.http.post(path, headers={"last-event-id": id_of(events[0])})
    assert refused.status_code == 404


async def test_a_resumed_stream_prefers_a_target_with_the_same_numerics() -> None:
    """However busy it is: another one may draw other tokens."""
    path, body = BODIES["completions"]
    with EmbeddedRedis() as redis:
        async with open_stack(redis_url=redis.url) as first:
            drew = await first.add_target(counts, burst=2, numerics="one", worker_id="one")
            drew.decoder.hold_after = 2
            leaving = asyncio.create_task(stream(first, path, body))
            await until(lambda: not drew.decoder.gate.is_set())
            request_id = drew.decoder.requests[0].group
            other = await first.add_target(counts, burst=2, numerics="other", worker_id="other")
            async with another_gateway(first, redis.url) as second:
                await eventually(lambda: journal_length(Pair(first, second, redis), request_id, 3))
                busy = [asyncio.create_task(second.complete(max_tokens=90)) for _ in range(6)]
                await until(lambda: len(drew.decoder.requests) > 1 and other.decoder.requests)
                await until(lambda: not other.decoder._tasks)
                resuming = asyncio.create_task(stream(second, path, None, f"{request_id}:1"))
                await until(lambda: any(each.committed for target in first.targets for each in target.decoder.requests))
                assert not any(request.committed for request in other.decoder.requests)
                drew.decoder.gate.set()
                await asyncio.gather(leaving, resuming, *busy)


async def test_tokens_that_depend_on_guesses_are_repeated_as_they_were_drawn() -> None:
    """With `residual` another draw has other tokens; what a client saw stays, and the rest follows it once."""
    model = "timed:vocabulary=512,step_ms=1"
    config = TimedModelConfig.parse(model)
    speculation = SpeculativeConfig(method="ngram", rejection_sampling_strategy="residual")
    body = {"prompt": "1 2 3 1 2 3", "max_tokens": 200, "temperature": 0.9, "return_token_ids": True, "stream": True}
    with EmbeddedRedis() as redis:
        async with (
            target_worker(speculation, TimedModel(model, config, 2**15, 4096)) as target,
            open_store(redis.url, ttl_s=3600.0) as store,
            AsyncExitStack() as gateways,
            httpx.AsyncClient(timeout=20.0) as http,
        ):
            record = WorkerRecord("target", "t", target.address, "tested", "", config.fingerprint, time.time())
            await store.registry.register(record)
            urls = []
            for _ in range(2):
                settings = GatewaySettings({"tested": model}, port=0, drain_s=1.0)
                models, addresses = await gateways.enter_async_context(running(settings, store))
                assert await models.first.fleet.wait_for_target(20.0)
                urls.append(f"http://{addresses.http}")
            got, turn = ReceivedStream(), 0
            while not got.complete:  # the client leaves after a few tokens each time
                before = len(got.tokens)
                async with opened(http, urls[turn % 2], body, got.last_id) as lines:
                    async for line in lines:
                        got.feed(line)
                        if len(got.tokens) > before + 40:
                            break
                turn += 1
            again = ReceivedStream()
            async with opened(http, urls[1], body, f"{got.last_id.partition(':')[0]}:0") as lines:
                async for line in lines:
                    again.feed(line)
    assert turn > 3
    assert len(got.tokens) == 200
    assert (again.tokens, again.text, again.finish_reason) == (got.tokens, got.text, got.finish_reason)
