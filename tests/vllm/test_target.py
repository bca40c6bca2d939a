"""vLLM as a target's engine, behind our gateway: what clients ask for, and a stream whose vLLM is killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from loadtests.chaos.chaos_cases import ChaosCase
from loadtests.chaos.chaos_run import chaos_deployment_options, default_vllm_options, references
from loadtests.chaos.chaos_stack import REPLAYS, ChaosStack, running
from tests.helpers.streams import PATIENCE_S, client, streaming
from tests.helpers.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 100
ACCEPTED = "paceline_spec_decode_num_accepted_tokens_total"
PROMPT = "def read_lines(path):\n"
CHAT: Any = [{"role": "user", "content": "def area(width, height):"}]


class Shape(BaseModel, extra="forbid"):
    kind: Literal["square", "circle", "line"]
    sides: int = Field(ge=0, le=99)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[ChaosStack]:
    """Two vLLMs and a draft."""
    options = chaos_deployment_options("pydoc", targets=2, drafts=1, vllm=default_vllm_options())
    lines: list[str] = []
    try:
        async with running(options, lines.append, 1) as stack:
            yield stack
    except BaseException:
        print(*lines[-100:], sep="\n")
        raise


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client() as http:
        yield http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(stack: ChaosStack, http: httpx.AsyncClient) -> list[ChaosCase]:
    return await references(stack, http, TOKENS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_client(stack: ChaosStack) -> AsyncIterator[openai.AsyncOpenAI]:
    url = stack.urls["gateway-1"]
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S, http_client=http
        ) as each,
    ):
        yield each


async def test_choices_are_those_of_their_own_requests(openai_client: openai.AsyncOpenAI) -> None:
    """With and without drafts, streamed and whole; the log-probabilities differ in their last bits at most."""
    asked: Any = {"model": "pydoc", "prompt": PROMPT, "n": 3, "seed": 5, "max_tokens": 40, "logprobs": 2}
    whole = (await openai_client.completions.create(**asked, extra_body={"speculation_stats": True})).choices
    plain = (await openai_client.completions.create(**asked, extra_body={"speculative": False})).choices
    assert [choice.text for choice in whole] == [choice.text for choice in plain]
    assert len({choice.text for choice in whole}) > 1
    for one, other in zip(whole, plain, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
        assert all(len(top) >= 2 for top in one.logprobs.top_logprobs or ())
    texts = ["", "", ""]
    async for chunk in await openai_client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole]


async def test_a_stop_string_ends_a_request(openai_client: openai.AsyncOpenAI, stack: ChaosStack) -> None:
    asked: Any = {"model": "pydoc", "prompt": "class Stack:\n", "seed": 3, "max_tokens": 60}
    asked["extra_body"] = {"ignore_eos": True}
    text = (await openai_client.completions.create(**asked)).choices[0].text
    stop = text[20:23]
    ended = (await openai_client.completions.create(**asked, stop=stop)).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.text == text[: text.index(stop)]
    await asyncio.wait_for(stack.idle(), PATIENCE_S)


async def test_a_grammar_binds_with_drafts(openai_client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "pydoc", "messages": CHAT, "response_format": Shape, "seed": 1}
    answer = (await openai_client.chat.completions.parse(**asked)).choices[0]
    assert isinstance(answer.message.parsed, Shape)
    assert answer.finish_reason == "stop"
    plain = await openai_client.chat.completions.parse(**asked, extra_body={"speculative": False})
    assert plain.choices[0].message.content == answer.message.content


async def test_a_grammar_ends_a_request_without_an_end_token(openai_client: openai.AsyncOpenAI) -> None:
    """The client ignores the model's end of text, by which vLLM ends a grammar. And no rule leaves no token."""
    rules = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True, "logprobs": 1}
    for more in ({}, {"min_tokens": 20}, {"bad_words": ["yes", "no"]}):
        answer = await openai_client.completions.create(
            model="pydoc", prompt=PROMPT, max_tokens=30, seed=2, extra_body=rules | more
        )
        assert (answer.choices[0].text in ("yes", "no"), answer.choices[0].finish_reason) == (True, "stop"), more


async def test_prompts_are_scored(openai_client: openai.AsyncOpenAI) -> None:
    """With output and without. What vLLM cannot do is refused by name."""
    asked: Any = {"model": "pydoc", "prompt": [PROMPT, PROMPT], "logprobs": 1, "echo": True, "temperature": 0}
    alone = (await openai_client.completions.create(**asked, max_tokens=0)).choices
    more = (await openai_client.completions.create(**asked, max_tokens=3)).choices
    for short, long in zip(alone, more, strict=True):
        assert short.logprobs is not None
        assert long.logprobs is not None
        assert (short.text, short.finish_reason) == (PROMPT, "length")
        scores = short.logprobs.token_logprobs
        assert scores is not None
        assert scores[0] is None
        assert scores[1:] == pytest.approx((long.logprobs.token_logprobs or [])[1 : len(scores)], abs=1e-4)
        assert len(long.logprobs.tokens or ()) == len(scores) + 3
    with pytest.raises(openai.BadRequestError, match="logprob_token_ids"):
        await openai_client.completions.create(**asked, extra_body={"logprob_token_ids": [5]})


async def test_what_vllm_refuses_is_served_or_an_error(openai_client: openai.AsyncOpenAI, stack: ChaosStack) -> None:
    """vLLM takes no temperature above 2, and no prompt longer than its own limit; no request ends a target."""
    url = stack.urls["gateway-1"]
    replays = await stack.metric(url, REPLAYS)
    hot = await openai_client.completions.create(model="pydoc", prompt=PROMPT, temperature=50, max_tokens=5)
    assert hot.usage is not None
    assert hot.usage.completion_tokens <= 5
    with pytest.raises(openai.BadRequestError):
        await openai_client.completions.create(model="pydoc", prompt=[5] * 2000, max_tokens=5)
    assert await stack.metric(url, REPLAYS) == replays


async def test_drafts_change_no_token(stack: ChaosStack, http: httpx.AsyncClient, known: list[ChaosCase]) -> None:
    accepted = await total(stack, ACCEPTED)
    plain = [ChaosCase(case.name, case.body | {"speculative": False}, case.expected) for case in known]
    for cases in (known, plain):
        async with streaming(http, cases, stack.urls["gateway-1"]) as streams:
            pass
        for stream in streams:
            stream.check()
    assert await total(stack, ACCEPTED) > accepted + 10  # a busy machine gates drafts


async def test_a_killed_vllm_loses_no_token(stack: ChaosStack, http: httpx.AsyncClient, known: list[ChaosCase]) -> None:
    """Its streams go on at the other one, under every sampling rule and grammar."""
    url = stack.urls["gateway-1"]
    replays = await stack.metric(url, REPLAYS)
    while await stack.metric(url, REPLAYS) <= replays + 3:  # a target that is ahead may be done before its end
        async with streaming(http, known, url) as streams:
            await until(lambda: any(len(stream.got.tokens) > TOKENS // 4 for stream in streams))
            victim = next(iter(stack.deployment.targets))
            assert stack.send(victim, signal.SIGKILL, "compute")
        for stream in streams:
            stream.check()
        await asyncio.wait_for(stack.wait_ready(), PATIENCE_S)


async def test_what_cannot_work_is_said_before_it_starts() -> None:
    """`paceline target` ends with exit code 2 and one line."""
    options = default_vllm_options().model_copy(update={"engine_args": {"no_such_argument": 1}})
    command = [sys.executable, "-m", "paceline_services.target", "--engine", "vllm", "--model", "pydoc"]
    process = await asyncio.create_subprocess_exec(
        *command, "--vllm-options", options.model_dump_json(), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"no_such_argument" in errors


async def total(stack: ChaosStack, name: str) -> float:
    """The sum of this series over the targets."""
    ports = [stack.deployment.metrics[target] for target in stack.deployment.targets]
    return sum([await stack.metric(f"http://127.0.0.1:{port}", name) for port in ports])
