"""Parameters of vLLM that change which prompt is sent, what comes back, and when. Over HTTP, by the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio

from paceline.messages import LogProbs
from tests.helpers.openai_stack import CONTEXT, MODEL, TOKENIZER, ScriptedDecoder, Stack, counts, open_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT: Any = [{"role": "user", "content": "What does json.dumps do?"}]
PROMPT = TOKENIZER.encode("def read_lines(path):\n    return open(path).read()")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(counts, burst=1) as stack:
        yield stack


async def answered(stack: Stack, path: str = COMPLETIONS, **body: Any) -> Any:
    body = {"prompt": PROMPT, **body} if path == COMPLETIONS else {"messages": CHAT, **body}
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 10_000}, None),
        ({"truncate_prompt_tokens": -1}, None),
    ],
)
async def test_a_prompt_keeps_its_end(stack: Stack, fields: dict[str, Any], kept: int | None) -> None:
    stack.decoder.requests.clear()
    expected = PROMPT if kept is None else PROMPT[-kept:]
    text = TOKENIZER.decode(PROMPT)
    for prompt in (PROMPT, text):
        answer = await answered(stack, prompt=prompt, max_tokens=2, echo=True, return_token_ids=True, **fields)
        [choice] = answer["choices"]
        assert choice["prompt_token_ids"] == expected
        assert choice["text"].startswith(TOKENIZER.decode(expected))
        assert answer["usage"]["prompt_tokens"] == len(expected)
    assert [list(request.prompt) for request in stack.decoder.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "left"),
    [({"max_tokens": 20}, 20), ({"max_tokens": 0}, 0), ({}, 1), ({"min_tokens": 7}, 7)],
    ids=str,
)
async def test_truncated_to_what_the_output_leaves_of_the_context(
    stack: Stack, fields: dict[str, Any], left: int
) -> None:
    """A text that cannot fit is encoded and cut, where it is refused otherwise."""
    text = "x = 1\n" * 20_000
    assert (await stack.complete(text, **fields)).status_code == 400
    answer = await answered(stack, prompt=text, truncate_prompt_tokens=-1, return_token_ids=True, **fields)
    tokens = answer["choices"][0]["prompt_token_ids"]
    assert tokens == TOKENIZER.encode(text)[-(CONTEXT - left) :]
    assert answer["usage"]["completion_tokens"] == left


async def test_a_conversation_is_truncated_as_well(stack: Stack) -> None:
    whole = await answered(stack, CHATS, max_tokens=1, return_token_ids=True)
    cut = await answered(stack, CHATS, max_tokens=1, return_token_ids=True, truncate_prompt_tokens=4)
    assert cut["prompt_token_ids"] == whole["prompt_token_ids"][-4:]


async def test_clients_see_the_id_that_they_choose(stack: Stack) -> None:
    """Requests at the same time may have the same one: at the targets they have others."""
    stack.decoder.requests.clear()
    for path, prefix in ((COMPLETIONS, "cmpl"), (CHATS, "chatcmpl")):
        body = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
        body |= {"max_tokens": 3, "request_id": "mine/7"}
        assert (await answered(stack, path, **body))["id"] == f"{prefix}-mine/7"
        assert {event["id"] for event in await stack.events(path, body)} == {f"{prefix}-mine/7"}
    assert len({request.request_id for request in stack.decoder.requests}) == 4
    assert not any("mine" in request.request_id for request in stack.decoder.requests)


async def test_the_best_of_several_come_back_best_first(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mean log-probability, whether the client sees log-probabilities or not. All of them are paid for."""
    monkeypatch.setattr(
        ScriptedDecoder, "log_probs_of", staticmethod(lambda token, top: LogProbs(-(token * 37 % 101) / 101))
    )
    body: dict[str, Any] = {"prompt": [PROMPT, PROMPT[:5]], "seed": 3, "max_tokens": 6, "return_token_ids": True}
    everything = await answered(stack, n=8, logprobs=0, **body)
    shown = await answered(stack, n=3, best_of=8, logprobs=0, **body)
    hidden = await answered(stack, n=3, best_of=8, **body)
    assert [choice["index"] for choice in shown["choices"]] == [*range(6)]
    for first in (0, 1):
        choices = everything["choices"][8 * first : 8 * first + 8]
        means = {fmean(choice["logprobs"]["token_logprobs"]): choice["token_ids"] for choice in choices}
        best = [means[mean] for mean in sorted(means, reverse=True)[:3]]
        for answer in (shown, hidden):
            assert [each["token_ids"] for each in answer["choices"][3 * first : 3 * first + 3]] == best
    assert all(choice["logprobs"] is None for choice in hidden["choices"])
    assert hidden["usage"] == shown["usage"] == everything["usage"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("interval", "sizes"), [(None, [1] * 12), (1, [1] * 12), (4, [1, 4, 4, 3]), (99, [1, 11])])
async def test_chunks_wait_for_so_many_tokens(stack: Stack, path: str, interval: int | None, sizes: list[int]) -> None:
    """The first token and the end do not wait."""
    body: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    body |= {"max_tokens": 12, "seed": 1, "return_token_ids": True, "stream_interval": interval}
    [whole] = (await answered(stack, path, **body))["choices"]
    events = await stack.events(path, body)
    parts = [choice["token_ids"] for event in events for choice in event["choices"] if "token_ids" in choice]
    assert [len(part) for part in parts] == sizes
    assert [token for part in parts for token in part] == whole["token_ids"]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) for e in events for choice in e["choices"]]
    assert "".join(text or "" for text in texts) == whole.get("text", whole.get("message", {}).get("content"))


async def test_tokens_may_be_named_by_id(stack: Stack) -> None:
    body: dict[str, Any] = {"max_tokens": 3, "seed": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = (await answered(stack, logprobs=2, echo=True, prompt_logprobs=0, **body))["choices"]
    names = [f"token_id:{token}" for token in [*PROMPT, *choice["token_ids"]]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names[1:], choice["logprobs"]["top_logprobs"][1:], strict=True))
    assert choice["prompt_logprobs"][1][str(PROMPT[1])]["decoded_token"] == TOKENIZER.decode([PROMPT[1]])
    chat = await stack.client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=1, max_tokens=3, extra_body=body
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    tokens = chat.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert [entry.token for entry in logprobs.content] == [f"token_id:{token}" for token in tokens]
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == TOKENIZER.decode(tokens)


async def test_special_tokens_have_no_spaces_here_whatever_is_asked(stack: Stack) -> None:
    for value in (None, True, False):
        await answered(stack, max_tokens=1, spaces_between_special_tokens=value)


async def test_a_suffix_is_refused_with_advice(stack: Stack) -> None:
    refused = await stack.complete(suffix="y")
    assert refused.json()["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in refused.json()["error"]["message"]
    assert (await stack.complete(suffix="", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [5]}, {"logprobs": 1, "logprob_token_ids": [5]}], ids=str)
async def test_an_older_target_is_not_asked_for_what_it_ignores(fields: dict[str, Any]) -> None:
    async with open_stack() as stack:
        await stack.add_target(counts, features=["prompt_logprobs"])
        refused = await stack.complete(**fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, list(fields)[-1])
        assert (await stack.complete(priority=3, max_tokens=1)).status_code == 200, "it only orders requests"
