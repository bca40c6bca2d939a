"""What evaluation harnesses send: log-probabilities of prompts, and prompts without output. Over HTTP.

A scripted target scores position i with -4 - i, so that a shift shows (`prompt_score`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from paceline.target_features import VLLM_LACKS, all_features
from paceline_services.gateway.generation.request_builder import MAX_PROMPT_LOG_PROBS
from tests.helpers.openai_stack import (
    CONTEXT,
    EOS,
    MODEL,
    TOKENIZER,
    Stack,
    counts,
    open_stack,
    prompt_score,
    text_script,
)
from tests.helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TEXT = "Größe, 東京 x"
OUTPUT = TOKENIZER.encode(TEXT)
PROMPT = TOKENIZER.encode("def read(path):\n    # 東京, größer\n    return open(path)")
OTHER = PROMPT[:7]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(text_script(TEXT)) as stack:
        yield stack


def spelled(token: int) -> str:
    return TOKENIZER.piece(token).decode(errors="replace")


def scores(prompt: list[int]) -> list[float | None]:
    """Of the tokens of a prompt, as the scripted target has them."""
    return [None, *(prompt_score(at, token, 0).log_prob for at, token in enumerate(prompt) if at)]


def check_lists(choice: Any, prompt: list[int], output: list[int]) -> None:
    """Parallel lists over prompt and output; each token's part of the text begins at its offset."""
    lists = choice["logprobs"]
    tokens = [*prompt, *output]
    assert lists["tokens"] == [spelled(token) for token in tokens]
    assert lists["token_logprobs"] == [*scores(prompt), *([-0.5] * len(output))]
    assert lists["top_logprobs"][0] is None
    for token, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert top is None or top[token] in (value, max(top.values()))
    ends = [*lists["text_offset"][1:], len(choice["text"])]
    assert lists["text_offset"][0] == 0
    for token, start, end in zip(tokens, lists["text_offset"], ends, strict=True):
        piece = TOKENIZER.visible_pieces[token]
        if piece.isascii():
            assert choice["text"][start:end] == piece.decode()


@pytest.mark.parametrize("length", [0, 1, 3])
async def test_loglikelihoods_as_lm_eval_asks_for_them(stack: Stack, length: int) -> None:
    """`local-completions`: token ids, several prompts, greedy, echo with one alternative."""
    answer = await stack.client.completions.create(
        model=MODEL, prompt=[PROMPT, OTHER], max_tokens=length, logprobs=1, echo=True, temperature=0, seed=1234
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * length
    for choice, prompt in zip(answer.choices, (PROMPT, OTHER), strict=True):
        check_lists(choice.model_dump(), prompt, OUTPUT[:length])
        assert choice.finish_reason == "length"
        assert choice.text == TOKENIZER.decode(prompt) + TOKENIZER.decode(OUTPUT[:length])
        assert choice.logprobs is not None
        # As lm-eval reads it: a continuation is the greedy one if each of its tokens is the most probable.
        values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert values is not None
        assert tops is not None
        assert all(value != max(top.values()) for value, top in zip(values[3:6], tops[3:6], strict=True))


async def test_a_prompt_alone_may_fill_the_context(stack: Stack) -> None:
    full = [5] * CONTEXT
    for fields in ({}, {"logprobs": 2, "echo": True}, {"prompt_logprobs": 0}, {"stream": False, "n": 2}):
        answer = await stack.complete(full, max_tokens=0, **fields)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "length"
            assert choice["text"] == (TOKENIZER.decode(full) if "echo" in fields else "")
        assert answer.json()["usage"]["completion_tokens"] == 0


async def test_a_full_prompt_goes_where_no_token_is_drawn_or_is_refused() -> None:
    """vLLM draws a token after every prompt."""
    script = text_script(TEXT)
    async with open_stack(script, features=all_features(without=VLLM_LACKS)) as stack:
        assert (await stack.complete([5] * (CONTEXT - 1), max_tokens=0)).status_code == 200
        refused = await stack.complete([[6], [5] * CONTEXT], max_tokens=0)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert "room for one token more" in error["message"]
        await stack.add_target(script)
        assert (await stack.complete([5] * CONTEXT, max_tokens=0)).status_code == 200
        assert stack.served == [1, 1]


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"return_token_ids": True}])
async def test_a_stream_without_output_has_all_fields(stack: Stack, asked: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, **asked}
    [whole] = (await stack.http.post(COMPLETIONS, json=body)).json()["choices"]
    chunks = [choice for event in await stack.events(COMPLETIONS, body) for choice in event["choices"]]
    for name in ("logprobs", "token_ids"):
        found = [chunk[name] for chunk in chunks if chunk.get(name) is not None]
        assert found == ([whole[name]] if whole.get(name) is not None else [])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [0, 4])
async def test_a_stream_joins_to_the_whole_response(stack: Stack, n: int, length: int) -> None:
    body = {"prompt": [PROMPT, OTHER], "echo": True, "logprobs": 2, "max_tokens": length, "n": n, "seed": 7}
    whole = (await stack.http.post(COMPLETIONS, json=body)).json()["choices"]
    chunks = [choice for event in await stack.events(COMPLETIONS, body) for choice in event["choices"]]
    assert len(whole) == 2 * n
    for choice in whole:
        check_lists(choice, [PROMPT, OTHER][choice["index"] // n], OUTPUT[:length])
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        parts = [chunk["logprobs"] for chunk in mine if chunk["logprobs"]]
        assert {name: [each for part in parts for each in part[name]] for name in parts[0]} == choice["logprobs"]


async def test_only_the_first_choice_is_scored(stack: Stack) -> None:
    stack.decoder.requests.clear()
    answer = await stack.complete([PROMPT, OTHER], n=2, prompt_logprobs=1, max_tokens=1)
    assert [request.sampling.prompt_logprobs for request in stack.decoder.requests] == [1, None, 1, None]
    for choice in answer.json()["choices"]:
        check_by_id(choice["prompt_logprobs"], [PROMPT, OTHER][choice["index"] // 2], 1)


def check_by_id(found: Any, prompt: list[int], top: int) -> None:
    """vLLM's shape: by position the token and the most probable ones, by id."""
    assert len(found) == len(prompt)
    assert found[0] is None
    for at, token in list(enumerate(prompt))[1:]:
        score = prompt_score(at, token, top)
        known = {str(token): {"logprob": score.log_prob, "rank": score.rank, "decoded_token": spelled(token)}}
        for rank, (other, value) in enumerate(score.top, 1):
            known[str(other)] = {"logprob": value, "rank": rank, "decoded_token": spelled(other)}
        assert found[at] == known


@pytest.mark.parametrize("top", [0, 2])
async def test_prompt_logprobs_are_by_token_id(stack: Stack, top: int) -> None:
    """In each choice of completions, and once in a chat."""
    body = {"prompt_logprobs": top, "max_tokens": 2}
    answer = await stack.complete(PROMPT, **body)
    [choice] = answer.json()["choices"]
    check_by_id(choice["prompt_logprobs"], PROMPT, top)
    chat = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "n": 2, **body}
    answer = (await stack.http.post(CHATS, json=chat)).json()
    check_by_id(answer["prompt_logprobs"], answer["prompt_token_ids"], top)
    assert "prompt_logprobs" not in (await stack.complete(PROMPT)).json()["choices"][0]


async def test_echo_and_prompt_logprobs_each_show_their_own_number(stack: Stack) -> None:
    body = {"prompt_logprobs": 4, "logprobs": 1, "echo": True, "max_tokens": 1, "return_tokens_as_token_ids": True}
    [choice] = (await stack.complete(PROMPT, **body)).json()["choices"]
    check_by_id(choice["prompt_logprobs"], PROMPT, 4)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:-1]] == [2] * (len(PROMPT) - 1)


async def test_a_prompt_of_one_token_has_nothing_to_score(stack: Stack) -> None:
    for length in (0, 2):
        [choice] = (await stack.complete([5], prompt_logprobs=1, echo=True, logprobs=1, max_tokens=length)).json()[
            "choices"
        ]
        assert choice["prompt_logprobs"] == [None]
        check_lists(choice, [5], OUTPUT[:length])


async def test_too_many_log_probabilities_are_refused(stack: Stack) -> None:
    prompts = MAX_PROMPT_LOG_PROBS // (21 * 100) + 1
    for fields, param in (({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")):
        refused = await stack.complete([[5] * 100] * prompts, max_tokens=0, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_lost_target_repeats_no_position() -> None:
    """It is lost in the middle of the prompt. The other one begins with the first position again."""
    body: dict[str, Any] = {"prompt_logprobs": 2, "echo": True, "logprobs": 1, "seed": 7, "max_tokens": 9}
    async with open_stack(counts, burst=2) as stack:
        expected = (await stack.complete(PROMPT, **body)).json()["choices"]
        stack.decoder.hold_after = 4
        asking = await stack.begin(PROMPT, **body)
        await until(lambda: not stack.decoder.gate.is_set())
        second = await stack.add_target(counts, burst=3)
        await stack.targets[0].die()
        assert (await asking).json()["choices"] == expected
        [resumed] = second.decoder.requests
        assert (resumed.sampling.prompt_logprobs, list(resumed.committed)) == (2, [])
        check_by_id(expected[0]["prompt_logprobs"], PROMPT, 2)


async def test_a_scored_prompt_is_not_scored_again() -> None:
    """After its first token a request goes on without; the target may use what it has cached."""
    async with open_stack(counts, burst=2) as stack:
        body: dict[str, Any] = {"prompt_logprobs": 1, "seed": 7, "max_tokens": 9}
        expected = (await stack.complete(PROMPT, **body)).json()["choices"]
        stack.decoder.hold_after = len(PROMPT) // 2 + 2
        asking = await stack.begin(PROMPT, **body)
        await until(lambda: not stack.decoder.gate.is_set())
        second = await stack.add_target(counts)
        await stack.targets[0].die()
        assert (await asking).json()["choices"] == expected
        [resumed] = second.decoder.requests
        assert resumed.sampling.prompt_logprobs is None
        assert len(resumed.committed) >= 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_an_older_target_would_ignore_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """And goes to a newer one as soon as there is one."""
    async with open_stack() as stack:
        await stack.add_target(counts, features=())
        assert (await stack.complete(PROMPT, echo=True)).status_code == 200
        refused = await stack.complete(PROMPT, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        newer = await stack.add_target(counts)
        for _ in range(3):
            assert (await stack.complete(PROMPT, **fields)).status_code == 200
        assert len(newer.decoder.requests) == 3


async def test_routing_does_not_count_on_cached_tokens_of_a_scored_prompt() -> None:
    prompt = [7] * 96
    async with open_stack(counts) as stack:
        for fields, cached in (({}, False), ({}, True), ({"prompt_logprobs": 0}, False), ({}, True)):
            before = await routed_by_prefix(stack)
            assert (await stack.complete(prompt, max_tokens=2, **fields)).status_code == 200
            await stack.idle()
            assert (await routed_by_prefix(stack) > before) == cached


async def routed_by_prefix(stack: Stack) -> float:
    name = 'paceline_routed_total{affinity="prefix",model_name="pydoc"} '
    return float(next((line.removeprefix(name) for line in (await stack.metrics()).split("\n") if name in line), 0))


async def test_a_prompt_without_output_is_indexed_as_cached() -> None:
    prompt = [7] * 96
    async with open_stack(counts) as stack:
        assert (await stack.complete(prompt, max_tokens=0)).status_code == 200
        await stack.idle()
        before = await routed_by_prefix(stack)
        assert (await stack.complete(prompt, max_tokens=2)).status_code == 200
        assert await routed_by_prefix(stack) == before + 1


async def test_a_stop_string_in_the_prompt_ends_nothing(stack: Stack) -> None:
    """Only the output is searched."""
    [choice] = (await stack.complete(PROMPT, stop=["def"], echo=True, logprobs=0, max_tokens=99)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    check_lists(choice, PROMPT, [*OUTPUT, EOS])


async def test_a_client_that_leaves_while_its_prompt_is_scored_frees_everything() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 3
        asking = await stack.begin(PROMPT, prompt_logprobs=1, max_tokens=4)
        await until(lambda: not stack.decoder.gate.is_set())
        asking.cancel()
        await asyncio.wait([asking])
        await stack.decoder.cancelled.get()
        await stack.idle()


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
async def test_an_aborted_request_has_null_for_tokens_that_are_not_scored(fields: dict[str, Any], n: int) -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 3
        asking = await stack.begin(PROMPT, request_id="a", n=n, max_tokens=4, **fields)
        await until(lambda: not stack.decoder.gate.is_set())
        assert stack.models.abort("", "a")
        answer = await asking
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert choice["finish_reason"] == "abort"
            known = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else choice["prompt_logprobs"]
            missing = [score is None for score in known[1 : len(PROMPT)]]
            assert len(missing) == len(PROMPT) - 1
            assert missing == sorted(missing), "null from some token on"
            assert missing[-1]


async def test_a_stream_that_is_aborted_while_its_prompt_is_scored_says_why_it_ends() -> None:
    async with open_stack(counts, burst=1) as stack:
        stack.decoder.hold_after = 3
        options = {"include_usage": True}
        fields: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2, "stream": True, "stream_options": options}
        asking = await stack.begin(PROMPT, request_id="a", max_tokens=4, **fields)
        await until(lambda: not stack.decoder.gate.is_set())
        assert stack.models.abort("", "a")
        chunks = [json.loads(line[6:]) for line in (await asking).text.splitlines() if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        for index in range(2):
            first, *_, last = [choice for choice in choices if choice["index"] == index]
            assert (len(first["logprobs"]["tokens"]), last["finish_reason"]) == (len(PROMPT), "abort")
        assert chunks[-1]["usage"]
