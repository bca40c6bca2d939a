"""OpenAI's HTTP API as its clients see it, the official one first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from paceline.text import Tokenizer
from paceline_services.gateway.generation.bodies import ChatBody, CompletionBody
from paceline_services.gateway.generation.prompt_encoding import LONG_TEXT
from tests.helpers.openai_stack import EOS, MODEL, TOKENIZER, Stack, counts, log_probs, open_stack, text_script

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "json.dumps → a str. Größe, 東京, 👩‍👧; that is all"
CHAT: Any = [{"role": "user", "content": "What does json.dumps do?"}]
OUTPUT = TOKENIZER.encode(TEXT)
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speaking() -> AsyncIterator[Stack]:
    """A model whose output is always TEXT."""
    async with open_stack(text_script(TEXT)) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def counting() -> AsyncIterator[Stack]:
    """A model whose output depends on prompt and seed, and does not end by itself."""
    async with open_stack(counts) as stack:
        yield stack


async def whole(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def parts(stack: Stack, path: str, body: dict[str, Any], stream: bool) -> tuple[list[Any], Any]:
    """The choices of an answer, or of all chunks of a stream, and the usage."""
    if not stream:
        answer = await whole(stack, path, body)
        return answer["choices"], answer["usage"]
    *chunks, last = await stack.events(path, body | WITH_USAGE)
    return [choice for chunk in chunks for choice in chunk["choices"]], last["usage"]


async def test_the_official_client_gets_a_chat(speaking: Stack) -> None:
    answer = await speaking.client.chat.completions.create(model=MODEL, messages=CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(OUTPUT) + 1, "the end token counts"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_the_official_client_streams_a_chat(speaking: Stack) -> None:
    stream = await speaking.client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(OUTPUT) + 1


async def test_the_official_client_gets_completions(speaking: Stack) -> None:
    answer = await speaking.client.completions.create(model=MODEL, prompt=["def f", "import"], max_tokens=5)
    assert [(c.index, c.finish_reason) for c in answer.choices] == [(0, "length"), (1, "length")]
    assert answer.choices[0].text == answer.choices[1].text == TOKENIZER.decode(OUTPUT[:5])


async def test_usage_counts_a_prompt_once_and_each_choice(counting: Stack) -> None:
    """The scripted target reports one cached token for every completion."""
    body = {"prompt": ["def f", "import"], "n": 4, "max_tokens": 5}
    _, usage = await parts(counting, COMPLETIONS, body, stream=False)
    _, streamed = await parts(counting, COMPLETIONS, body, stream=True)
    assert usage["prompt_tokens"] == len(TOKENIZER.encode("def f")) + len(TOKENIZER.encode("import"))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens"] == 40
    assert usage == streamed


async def test_completions_default_to_16_tokens_and_chat_to_the_context(counting: Stack) -> None:
    completion = await whole(counting, COMPLETIONS, {"prompt": "def f"})
    chat = await whole(counting, CHATS, {"messages": CHAT})
    assert (completion["usage"]["completion_tokens"], chat["usage"]["total_tokens"]) == (16, 128)


async def test_a_stream_never_shows_half_a_character_and_is_complete(speaking: Stack) -> None:
    chunks = await speaking.events(COMPLETIONS, {"prompt": "x", "max_tokens": 100})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) <= len(OUTPUT) / 3 + 2, "a delta of several tokens is one event"
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(chunks[0]["id"], "text_completion")}


async def test_usage_may_ride_on_every_chunk(speaking: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await speaking.events(COMPLETIONS, {"prompt": "x", "max_tokens": 7, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 6, 7, 7, 7]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        ({"stop": "東京"}, "json.dumps → a str. Größe, ", "東京"),
        ({"stop": ["not there", "str. G", "a st"]}, "json.dumps → ", "a st"),
        ({"stop": [" nowhere"]}, TEXT, None),
        ({"stop": "str", "include_stop_str_in_output": True}, "json.dumps → a str", "str"),
        ({"stop": "str", "max_tokens": 20, "min_tokens": 20}, TOKENIZER.decode(OUTPUT[:20]), "length"),
        ({"stop_token_ids": [OUTPUT[4]]}, TOKENIZER.decode(OUTPUT[:4]), OUTPUT[4]),
    ],
    ids=["across tokens", "the first of several", "none", "kept", "after the minimum", "a token"],
)
async def test_a_stop_ends_the_text(
    speaking: Stack, stop: dict[str, Any], shown: str, met: str | int | None, stream: bool
) -> None:
    """Text, token ids, log-probabilities and usage end with the token that completes the stop."""
    body = {"prompt": "x", "max_tokens": 100, "return_token_ids": True, "logprobs": 0, **stop}
    choices, usage = await parts(speaking, COMPLETIONS, body, stream)
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    named = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert "".join(choice["text"] for choice in choices) == shown
    assert usage["completion_tokens"] == len(tokens) == len(named)
    reason = choices[-1]["finish_reason"], choices[-1]["stop_reason"]
    assert reason == (("length", None) if met == "length" else ("stop", met))
    if isinstance(met, str) and met != "length":
        assert met in TOKENIZER.decode(tokens)
        assert met not in TOKENIZER.decode(tokens[:-1])


async def test_a_stop_string_cancels_at_the_target(counting: Stack) -> None:
    text = await counting.text(seed=5, max_tokens=30)
    counting.decoder.hold_after = 12
    answer = await counting.complete(seed=5, max_tokens=100, stop=text[-6:])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    await counting.decoder.cancelled.get()
    counting.decoder.hold_after = None  # it may have been cancelled before its twelfth delta
    counting.decoder.gate.set()


async def test_n_choices_are_reproducible_and_the_first_has_the_seed(counting: Stack) -> None:
    body = {"prompt": "x", "seed": 11, "max_tokens": 8}
    alone, four, again = [(await whole(counting, COMPLETIONS, body | {"n": n}))["choices"] for n in (1, 4, 4)]
    assert four == again
    assert four[:1] == alone
    assert [choice["index"] for choice in four] == list(range(4))
    assert len({choice["text"] for choice in four}) == 4


async def test_without_a_seed_each_request_gets_its_own(counting: Stack) -> None:
    counting.decoder.requests.clear()
    for _ in range(2):
        await counting.text(["x", "x"], max_tokens=1)
    assert len({request.sampling.seed for request in counting.decoder.requests}) == 4


async def test_streams_of_several_choices_join_to_the_whole_ones(counting: Stack) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "seed": 3, "max_tokens": 10}
    expected, _ = await parts(counting, COMPLETIONS, body, stream=False)
    chunks, _ = await parts(counting, COMPLETIONS, body, stream=True)
    for choice in expected:
        mine = [part for part in chunks if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


async def test_log_probs_of_chat_carry_bytes(speaking: Stack) -> None:
    answer = await speaking.client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_completion_tokens=30
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert answer.usage is not None
    assert len(entries) == answer.usage.completion_tokens
    joined = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    assert [entry.logprob for entry in entries[0].top_logprobs] == [-0.5, -1.5]


def offsets(tokens: list[int]) -> list[int]:
    """Whole characters before each token."""
    pieces = [TOKENIZER.piece(token) for token in tokens]
    return [len(b"".join(pieces[:index]).decode(errors="ignore")) for index in range(len(pieces))]


async def test_log_probs_of_completions_carry_offsets(speaking: Stack) -> None:
    [choice], _ = await parts(speaking, COMPLETIONS, {"prompt": "x", "max_tokens": 40, "logprobs": 1}, stream=False)
    logprobs = choice["logprobs"]
    pieces = [TOKENIZER.piece(token) for token in OUTPUT[:40]]
    assert logprobs["tokens"] == [piece.decode(errors="replace") for piece in pieces]
    assert logprobs["token_logprobs"] == [-0.5] * len(pieces)
    assert logprobs["text_offset"] == offsets(OUTPUT[:40])
    assert logprobs["top_logprobs"][0] == {pieces[0].decode(): log_probs(OUTPUT[0], 1).top[0][1]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["def f", [456, 281]])
async def test_echo_puts_the_prompt_first(speaking: Stack, prompt: str | list[int], stream: bool) -> None:
    shown = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    choices, _ = await parts(speaking, COMPLETIONS, {"prompt": prompt, "echo": True, "max_tokens": 3}, stream)
    assert "".join(choice["text"] for choice in choices) == shown + TOKENIZER.decode(OUTPUT[:3])


@pytest.mark.parametrize("stop", [None, "str"])
async def test_statistics_come_on_request(speaking: Stack, stop: str | None) -> None:
    body = {"messages": CHAT, "stop": stop}
    assert "speculation" not in await whole(speaking, CHATS, body)
    body["speculation_stats"] = True
    answer = await whole(speaking, CHATS, body)
    assert answer["speculation"] == {
        "drafted_tokens": 9,
        "accepted_tokens": 4,
        "verifications": 4,
        "acceptance_length": 1.0,
        "drafted_by_depth": [4, 3],
        "accepted_by_depth": [3, 1],
        "steps": 5,
        "drafts": ["d"],
        "strategy": "coupled",
        "lossy": False,
        "drafter_invariant": True,
    }
    assert answer["timings"] == {"queue_s": 0.25, "compute_s": 0.5, "total_s": 1.0, "prefill_s": 0.125}
    for options in ({}, WITH_USAGE):
        chunks = await speaking.events(CHATS, body | options)
        assert [chunk.get("speculation") for chunk in chunks] == [None] * (len(chunks) - 1) + [answer["speculation"]]


async def test_token_ids_come_on_request(speaking: Stack) -> None:
    body = {"messages": CHAT, "return_token_ids": True}
    answer, chunks = await whole(speaking, CHATS, body), await speaking.events(CHATS, body)
    assert answer["choices"][0]["token_ids"] == [*OUTPUT, EOS]
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])] == [*OUTPUT, EOS]
    assert answer["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


async def test_accepted_tokens_are_marked_on_request(speaking: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 7, "return_accepted": True}
    [choice], _ = await parts(speaking, COMPLETIONS, body, stream=False)
    assert choice["accepted"] == [False, True, True, False, True, True, False], "the script says so, three to a delta"
    assert choice["text_offset"] == offsets(OUTPUT[:7])
    chunks, _ = await parts(speaking, COMPLETIONS, body, stream=True)
    assert [each for part in chunks for each in part.get("accepted", [])] == choice["accepted"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_verified_trees_come_on_request(speaking: Stack, path: str) -> None:
    """Each delta is one step; a whole answer has the trees of all steps."""
    asked: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": CHAT}
    body = asked | {"max_tokens": 7, "return_tree": True}
    [choice], _ = await parts(speaking, path, body, stream=False)
    first, _, last = choice["trees"]
    refused = {"parent": 0, "token_id": 17, "token": TOKENIZER.decode([17]), "accepted": False, "method": "ngram"}
    assert first[-1] == last[-1] == refused
    assert len(last) == 1, "the last of seven tokens is the target's own"
    assert [node["parent"] for node in first] == [0, 1, 0]
    assert [node["token_id"] for node in first[:-1]] == OUTPUT[1:3]
    assert "".join(node["token"] for node in first[:-1]) == TOKENIZER.decode(OUTPUT[1:3])
    assert {(node["accepted"], node["method"]) for node in first[:-1]} == {(True, "draft_model")}
    chunks, _ = await parts(speaking, path, body, stream=True)
    assert [tree for chunk in chunks for tree in chunk.get("trees", [])] == choice["trees"]
    plain, _ = await parts(speaking, path, asked | {"max_tokens": 7}, stream=False)
    assert "trees" not in plain[0]


async def test_every_parameter_reaches_the_target(counting: Stack) -> None:
    counting.decoder.requests.clear()
    same = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 3,
        "max_tokens": 9,
        "seed": 2**63 + 5,
    }
    body = same | {
        "logit_bias": {"17": -100, "18": 2.5},
        "stop_token_ids": [5, 6],
        "bad_words": ["import"],
        "logprobs": 2,
        "allowed_token_ids": [300, 456],
        "logprob_token_ids": [281, 5],
        "priority": -3,
        "speculative": {"num_speculative_tokens": 2, "max_tree_nodes": 4},
    }
    await counting.text([456, 281], **body)
    await whole(counting, CHATS, {"messages": CHAT, "speculative": False, "ignore_eos": True, "max_tokens": 2})
    request, plain = counting.decoder.requests
    sampling = request.sampling.model_dump()
    assert {name: sampling[name] for name in same} == same
    assert request.prompt == [456, 281]
    assert sampling["logit_bias"] == {17: -100.0, 18: 2.5}
    assert sampling["stop_token_ids"] == (5, 6, EOS)
    assert (sampling["logprobs"], sampling["logprob_token_ids"]) == (2, (281, 5))
    assert sampling["allowed_token_ids"] == (300, 456)
    assert (request.priority, plain.priority) == (-3, 0)
    assert {tuple(TOKENIZER.encode("import")), tuple(TOKENIZER.encode(" import"))} <= set(sampling["bad_words"])
    assert request.speculative.model_dump() == {
        "enabled": None,
        "num_speculative_tokens": 2,
        "max_tree_nodes": 4,
        "report": False,
    }
    assert plain.speculative.enabled is False
    assert plain.sampling.stop_token_ids == ()


async def test_bad_words_are_encoded_once_for_all_prompts(counting: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: Counter[str] = Counter()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded[text] += 1
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    counting.decoder.requests.clear()
    await counting.text(["a", "b", "c"], bad_words=["import"], n=2)
    assert encoded == {"a": 1, "b": 1, "c": 1, "import": 1, " import": 1}
    assert len({request.sampling.bad_words for request in counting.decoder.requests}) == 1
    assert len({request.sampling.seed for request in counting.decoder.requests}) == 6


async def test_fields_without_effect_here_are_accepted(speaking: Stack) -> None:
    answer = await speaking.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
    )
    assert answer.choices[0].message.content == TEXT


async def test_models_are_listed(speaking: Stack) -> None:
    assert [model.id async for model in speaking.client.models.list()] == [MODEL]
    model = await speaking.client.models.retrieve(MODEL)
    extra = {"max_model_len": 128, "sampling_defaults": {}}
    assert (model.object, model.owned_by, model.model_extra) == ("model", "paceline", extra)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        await speaking.client.models.retrieve("gpt-4")


async def test_tokenize_and_detokenize(speaking: Stack) -> None:
    content = await whole(speaking, "/tokenize", {"prompt": "def f", "return_token_strs": True})
    assert content == {"count": 2, "max_model_len": 128, "tokens": [456, 281], "token_strs": ["def", "Ġf"]}
    long = {"prompt": " a" * LONG_TEXT, "return_token_strs": True}
    content = await whole(speaking, "/tokenize", long)
    assert len(content["token_strs"]) == content["count"] >= LONG_TEXT
    assert await whole(speaking, "/detokenize", {"tokens": content["tokens"]}) == {"prompt": long["prompt"]}
    for token in (4096, 2**32, 2**64):
        refused = await speaking.http.post("/detokenize", json={"tokens": [456, token]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    chat = await whole(speaking, "/tokenize", {"messages": CHAT})
    assert chat["count"] == (await whole(speaking, CHATS, {"messages": CHAT}))["usage"]["prompt_tokens"]


async def test_health_version_and_metrics(speaking: Stack) -> None:
    assert (await speaking.http.get("/health")).json() == {"status": "ok"}
    assert "version" in (await speaking.http.get("/version")).json()
    await speaking.text(max_tokens=5)
    metrics = await speaking.metrics()
    assert 'paceline_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert 'vllm:time_to_first_token_seconds_count{model_name="pydoc"}' in metrics


async def test_the_api_s_description_matches_the_api(counting: Stack) -> None:
    answer = await counting.http.get("/openapi.json")
    schema = answer.json()
    known = schema["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) <= set(known)
    for path, body in {COMPLETIONS: CompletionBody, CHATS: ChatBody}.items():
        operation = schema["paths"][path]["post"]
        wanted = operation["requestBody"]["content"]["application/json"]["schema"]
        assert wanted == {"$ref": f"#/components/schemas/{body.__name__}"}
        assert set(known[body.__name__]["properties"]) >= {"model", "stream", "temperature", "structured_outputs"}
        assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert set(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert (await counting.http.get("/metrics")).headers["content-type"].startswith("text/plain")
    asked = {"prompt": "x", "max_tokens": 3}
    answered = await whole(counting, COMPLETIONS, asked)
    refused = (await counting.complete(5)).json()
    for name, each in (("CompletionBody", asked), ("Completion", answered), ("Error", refused)):
        described = {"$ref": f"#/components/schemas/{name}", "components": schema["components"]}
        assert validator_for(described, Draft202012Validator)(described).is_valid(each), name


async def test_the_page_of_the_api_needs_no_network(counting: Stack) -> None:
    page = await counting.http.get("/docs")
    assert page.status_code == 200
    assert "src=" not in page.text
    assert "http" not in page.text.replace("<!doctype html>", "").replace("openapi.json", "")
    for shown in ("POST /v1/completions", "GET /metrics", "structured_outputs", "prompt_cache_key"):
        assert shown in page.text
