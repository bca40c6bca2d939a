"""OpenAI's HTTP API as its clients see it, the official one first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from paceline.text import Tokenizer
from paceline_services.gateway.openai.prompt_encoding import LONG_TEXT
from tests.helpers.openai_stack import EOS, MODEL, TOKENIZER, Stack, counts, log_probs, open_stack, text_script

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "json.dumps → a str. Größe, 東京, 👩‍👧; that is all"
CHAT: Any = [{"role": "user", "content": "What does json.dumps do?"}]
OUTPUT = TOKENIZER.encode(TEXT)


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


async def events(stack: Stack, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream, parsed; the last must be [DONE], and is left out."""
    async with stack.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = (await response.aread()).decode()
    assert raw.endswith("\n\n")
    parts = raw.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


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
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(OUTPUT) + 1


async def test_the_official_client_gets_completions(speaking: Stack) -> None:
    answer = await speaking.client.completions.create(model=MODEL, prompt=["def f", "import"], max_tokens=5)
    assert [(c.index, c.finish_reason) for c in answer.choices] == [(0, "length"), (1, "length")]
    assert answer.choices[0].text == answer.choices[1].text == TOKENIZER.decode(OUTPUT[:5])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("def f")) + len(TOKENIZER.encode("import"))
    assert answer.usage.completion_tokens == 10


async def test_usage_counts_a_prompt_once_and_so_what_a_cache_held_of_it(counting: Stack) -> None:
    """The scripted target reports one cached token for every completion."""
    body = {"prompt": ["def f", "import"], "n": 4, "max_tokens": 5}
    whole = (await counting.http.post("/v1/completions", json=body)).json()["usage"]
    streamed = await events(counting, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert whole["prompt_tokens"] == len(TOKENIZER.encode("def f")) + len(TOKENIZER.encode("import"))
    assert whole["prompt_tokens_details"] == {"cached_tokens": 2}
    assert whole == streamed[-1]["usage"]


async def test_completions_default_to_16_tokens_and_chat_to_the_context(counting: Stack) -> None:
    completion = await counting.client.completions.create(model=MODEL, prompt="def f")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    chat = await counting.client.chat.completions.create(model=MODEL, messages=CHAT)
    assert chat.usage is not None
    assert chat.usage.total_tokens == 128


async def test_a_stream_never_shows_half_a_character_and_is_complete(speaking: Stack) -> None:
    chunks = await events(speaking, "/v1/completions", {"prompt": "x", "max_tokens": 100})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert len(texts) <= len(OUTPUT) / 3 + 2, "a delta of several tokens is one event"
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_usage_may_ride_on_every_chunk(speaking: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(speaking, "/v1/completions", {"prompt": "x", "max_tokens": 7, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 6, 7, 7, 7]
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "met"),
    [
        ("東京", "json.dumps → a str. Größe, ", "東京"),
        (["not there", "str. G", "a st"], "json.dumps → ", "a st"),
        ([" nowhere"], TEXT, None),
    ],
)
async def test_stop_strings_are_found_across_tokens(
    speaking: Stack, stop: str | list[str], shown: str, met: str | None, stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 100, "stop": stop, "return_token_ids": True}
    if stream:
        chunks = await events(speaking, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
    else:
        answer = (await speaking.http.post("/v1/completions", json=body)).json()
        choices, usage = answer["choices"], answer["usage"]
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    assert "".join(choice["text"] for choice in choices) == shown
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", met)
    assert usage["completion_tokens"] == len(tokens)
    if met:
        assert met in TOKENIZER.decode(tokens), "the token that completes the stop counts"
        assert met not in TOKENIZER.decode(tokens[:-1]), "no later one does"


async def test_a_stop_string_cancels_at_the_target(counting: Stack) -> None:
    text = TOKENIZER.decode(counts_for(counting, "x", 5)[:30])
    body = {"prompt": "x", "seed": 5, "max_tokens": 100, "stop": text[-6:]}
    counting.decoder.hold_after = 12
    answer = (await counting.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    await counting.decoder.cancelled.get()
    counting.decoder.gate.set()


def counts_for(stack: Stack, prompt: str, seed: int) -> list[int]:
    first = (seed + sum(TOKENIZER.encode(prompt))) % 1000
    return [300 + (first + 7 * index) % 3000 for index in range(100)]


async def test_the_stop_string_may_be_kept_and_min_tokens_comes_first(speaking: Stack) -> None:
    kept = await speaking.http.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 100, "stop": "str", "include_stop_str_in_output": True},
    )
    assert kept.json()["choices"][0]["text"] == "json.dumps → a str"
    text = TOKENIZER.decode(OUTPUT[:20])
    late = await speaking.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 20, "min_tokens": 20, "stop": "str"}
    )
    assert late.json()["choices"][0]["text"] == text


async def test_a_stop_token_ends_the_text_and_is_the_stop_reason(speaking: Stack) -> None:
    stop = OUTPUT[4]
    assert stop not in OUTPUT[:4]
    body = {"prompt": "x", "max_tokens": 100, "stop_token_ids": [stop]}
    choice = (await speaking.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == TOKENIZER.decode(OUTPUT[:4])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_n_choices_are_reproducible_and_the_first_has_the_seed(counting: Stack) -> None:
    async def texts(n: int) -> list[str]:
        answer = await counting.client.completions.create(model=MODEL, prompt="x", n=n, seed=11, max_tokens=8)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    alone, four, again = await texts(1), await texts(4), await texts(4)
    assert four == again
    assert four[:1] == alone
    assert len(set(four)) == 4


async def test_without_a_seed_each_request_gets_its_own(counting: Stack) -> None:
    counting.decoder.requests.clear()
    for _ in range(2):
        await counting.client.completions.create(model=MODEL, prompt=["x", "x"], max_tokens=1)
    assert len({request.sampling.seed for request in counting.decoder.requests}) == 4


async def test_streams_of_several_choices_join_to_the_whole_ones(counting: Stack) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "seed": 3, "max_tokens": 10}
    whole = (await counting.http.post("/v1/completions", json=body)).json()
    chunks = await events(counting, "/v1/completions", body)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


async def test_log_probs_of_chat_carry_bytes(speaking: Stack) -> None:
    answer = await speaking.client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, max_completion_tokens=30
    )
    log_probabilities = answer.choices[0].logprobs
    assert log_probabilities is not None
    entries = log_probabilities.content
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
    body = {"prompt": "x", "max_tokens": 40, "logprobs": 1}
    choice = (await speaking.http.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    pieces = [TOKENIZER.piece(token) for token in OUTPUT[:40]]
    assert logprobs["tokens"] == [piece.decode(errors="replace") for piece in pieces]
    assert logprobs["token_logprobs"] == [-0.5] * len(pieces)
    assert logprobs["text_offset"] == offsets(OUTPUT[:40])
    expected = log_probs(OUTPUT[0], 1).top[0]
    assert logprobs["top_logprobs"][0] == {pieces[0].decode(): expected[1]}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probs_end_where_a_stop_string_ends(speaking: Stack, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 100, "logprobs": 0, "stop": "str"}
    if stream:
        parts = [chunk["choices"][0] for chunk in await events(speaking, "/v1/completions", body)]
    else:
        parts = (await speaking.http.post("/v1/completions", json=body)).json()["choices"]
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    assert "".join(part["text"] for part in parts) == "json.dumps → a "
    assert "".join(tokens).endswith("str"), "up to the token that completes the stop, and no further"


@pytest.mark.parametrize("prompt", ["def f", [456, 281]])
async def test_echo_puts_the_prompt_first(speaking: Stack, prompt: str | list[int]) -> None:
    shown = prompt if isinstance(prompt, str) else TOKENIZER.decode(prompt)
    body = {"prompt": prompt, "echo": True, "max_tokens": 3}
    whole = (await speaking.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    chunks = await events(speaking, "/v1/completions", body)
    assert whole == "".join(chunk["choices"][0]["text"] for chunk in chunks) == shown + TOKENIZER.decode(OUTPUT[:3])


@pytest.mark.parametrize("stop", [None, "str"])
async def test_statistics_come_on_request(speaking: Stack, stop: str | None) -> None:
    body = {"messages": CHAT, "speculation_stats": True, "stop": stop}
    whole = (await speaking.http.post("/v1/chat/completions", json=body)).json()
    assert whole["speculation"] == {
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
    assert whole["timings"] == {"queue_s": 0.25, "compute_s": 0.5, "total_s": 1.0}
    plain = await events(speaking, "/v1/chat/completions", body)
    with_usage = await events(speaking, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    for chunks in (plain, with_usage):
        assert [chunk.get("speculation") for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["speculation"]]


async def test_no_statistics_without_a_request_for_them(speaking: Stack) -> None:
    answer = (await speaking.http.post("/v1/chat/completions", json={"messages": CHAT})).json()
    assert "speculation" not in answer


async def test_token_ids_come_on_request(speaking: Stack) -> None:
    body = {"messages": CHAT, "return_token_ids": True}
    answer = (await speaking.http.post("/v1/chat/completions", json=body)).json()
    chunks = await events(speaking, "/v1/chat/completions", body)
    assert answer["choices"][0]["token_ids"] == [*OUTPUT, EOS]
    assert [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])] == [*OUTPUT, EOS]
    assert answer["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


async def test_accepted_tokens_are_marked_on_request(speaking: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 7, "return_accepted": True}
    whole = (await speaking.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert whole["accepted"] == [False, True, True, False, True, True, False], "the script says so, three to a delta"
    assert whole["text_offset"] == offsets(OUTPUT[:7])
    parts = [chunk["choices"][0] for chunk in await events(speaking, "/v1/completions", body)]
    assert [each for part in parts for each in part.get("accepted", [])] == whole["accepted"]


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
        "prompt": [456, 281],
        "logit_bias": {"17": -100, "18": 2.5},
        "stop_token_ids": [5, 6],
        "bad_words": ["import"],
        "logprobs": 2,
        "speculative": {"num_speculative_tokens": 2, "max_tree_nodes": 4},
    }
    assert (await counting.http.post("/v1/completions", json=body)).status_code == 200
    request = counting.decoder.requests[0]
    sampling = request.sampling.model_dump()
    assert {name: sampling[name] for name in same} == same
    assert request.prompt == [456, 281]
    assert sampling["logit_bias"] == {17: -100.0, 18: 2.5}
    assert sampling["stop_token_ids"] == (5, 6, EOS)
    assert sampling["logprobs"] == 2
    assert tuple(TOKENIZER.encode("import")) in sampling["bad_words"]
    assert tuple(TOKENIZER.encode(" import")) in sampling["bad_words"]
    assert request.speculative.model_dump() == {
        "enabled": None,
        "num_speculative_tokens": 2,
        "max_tree_nodes": 4,
        "report": False,
    }


async def test_bad_words_are_encoded_once_for_all_prompts(counting: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: Counter[str] = Counter()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded[text] += 1
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    counting.decoder.requests.clear()
    body = {"prompt": ["a", "b", "c"], "bad_words": ["import"], "n": 2}
    assert (await counting.http.post("/v1/completions", json=body)).status_code == 200
    assert encoded == {"a": 1, "b": 1, "c": 1, "import": 1, " import": 1}
    assert len({request.sampling.bad_words for request in counting.decoder.requests}) == 1
    assert len({request.sampling.seed for request in counting.decoder.requests}) == 6


async def test_speculation_can_be_switched_off_and_the_end_token_ignored(counting: Stack) -> None:
    counting.decoder.requests.clear()
    body = {"messages": CHAT, "speculative": False, "ignore_eos": True, "max_tokens": 2}
    assert (await counting.http.post("/v1/chat/completions", json=body)).status_code == 200
    request = counting.decoder.requests[0]
    assert request.speculative.enabled is False
    assert request.sampling.stop_token_ids == ()


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
    models = [model async for model in speaking.client.models.list()]
    assert [model.id for model in models] == [MODEL]
    model = await speaking.client.models.retrieve(MODEL)
    assert (model.object, model.owned_by) == ("model", "paceline")
    assert model.model_extra == {"max_model_len": 128}
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        await speaking.client.models.retrieve("gpt-4")


async def test_tokenize_and_detokenize(speaking: Stack) -> None:
    content = (await speaking.http.post("/tokenize", json={"prompt": "def f", "return_token_strs": True})).json()
    assert content == {"count": 2, "max_model_len": 128, "tokens": [456, 281], "token_strs": ["def", "Ġf"]}
    text = (await speaking.http.post("/detokenize", json={"tokens": content["tokens"]})).json()
    assert text == {"prompt": "def f"}
    for token in (4096, 2**32, 2**64):
        refused = await speaking.http.post("/detokenize", json={"tokens": [456, token]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    long = {"prompt": " a" * LONG_TEXT, "return_token_strs": True}
    content = (await speaking.http.post("/tokenize", json=long)).json()
    assert len(content["token_strs"]) == content["count"] >= LONG_TEXT
    assert (await speaking.http.post("/detokenize", json={"tokens": content["tokens"]})).json() == {
        "prompt": long["prompt"]
    }
    chat = (await speaking.http.post("/tokenize", json={"messages": CHAT})).json()
    usage = (await speaking.client.chat.completions.create(model=MODEL, messages=CHAT)).usage
    assert usage is not None
    assert chat["count"] == usage.prompt_tokens


async def test_health_version_and_metrics(speaking: Stack) -> None:
    assert (await speaking.http.get("/health")).json() == {"status": "ok"}
    assert "version" in (await speaking.http.get("/version")).json()
    await speaking.client.completions.create(model=MODEL, prompt="x", max_tokens=5)
    metrics = (await speaking.http.get("/metrics")).text
    assert 'paceline_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert 'vllm:time_to_first_token_seconds_count{model_name="pydoc"}' in metrics
