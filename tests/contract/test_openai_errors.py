"""Errors have OpenAI's shape, name the field, and disturb no other request."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from paceline.messages import GenerationRequest
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.generation.chat_prompt import RESERVED_VARIABLES
from tests.helpers.openai_stack import CONTEXT, MODEL, TOKENIZER, Stack, counts, open_stack
from tests.helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Any = [{"role": "user", "content": "hi"}]
BODY_LIMIT = 100_000


def nested(depth: int) -> str:
    """A schema as a string: JSON's own limits do not apply inside it."""
    return '{"enum": ' + "[" * depth + "]" * depth + "}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(counts, limits=AdmissionLimits(max_body_bytes=BODY_LIMIT)) as stack:
        yield stack


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


ANY_TEXT = {"type": "any_text"}


def tagged(content: Any, begin: str = "<a>") -> dict[str, Any]:
    """A tag as a structural format."""
    return {"type": "tag", "begin": begin, "content": content, "end": "</a>"}


COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["", [], [[]], ["a", ""], ["a", 1], [1, -1], [True], 7, [5000], [5] * 128, ["x"] * 1025],
    "max_tokens": [128, -1, "5", 1.5],
    "min_tokens": [-1, 200],
    "temperature": [-0.1, "hot", True],
    "top_p": [0, 1.1],
    "top_k": [-2],
    "min_p": [2],
    "repetition_penalty": [0],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "seed": [2**64],
    "n": [0, 129],
    "best_of": [0, 129],
    "stop": [["a"] * 17],
    "stop_token_ids": [[4096], [5] * 1025],
    "bad_words": [["x"] * 1025, ["x" * 1024] * 17],
    "logit_bias": [{"4096": 1}, {str(token): 1 for token in range(4097)}],
    "cache_salt": ["", "x" * 1025],
    "prompt_cache_key": ["x" * 1025],
    "logprobs": [21],
    "suffix": ["y"],
    "prompt_logprobs": [-1, 21, True],
    "allowed_token_ids": [[], [4096], [5] * 4097],
    "logprob_token_ids": [[5]],
    "truncate_prompt_tokens": [-2, 0, "5"],
    "priority": [2**31, "high"],
    "request_id": ["", "x" * 129, "a b", "\u6771"],
    "stream_interval": [0],
    "stream_options": [{"include_usage": True}],
    "temprature": [1],
    "speculative": ["no"],
}
"""Wrong values by field, of bodies that have a prompt."""
STRUCTURES: dict[str, list[Any]] = {
    "structured_outputs": [{}, {"regex": "a", "choice": ["b"]}],
    "structured_outputs.json": [{"json": nested(300)}, {"json": nested(3000)}, {"json": "{"}],
    "structured_outputs.regex": [{"regex": "a("}],
    "structured_outputs.choice": [{"choice": []}],
    "structured_outputs.grammar": [
        {"grammar": grammar} for grammar in ("start: b", "root ::= (", '%llguidance {}\nstart: "a"')
    ],
    "structured_outputs.structural_tag": [
        *({"structural_tag": value} for value in ("{}", "{", {"format": {"type": "any_text"}, "triggers": ["<"]})),
        {"structural_tag": {"format": tagged({"type": "json_schema", "json_schema": {"type": "strin"}})}},
        {
            "structural_tag": {
                "format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [tagged(ANY_TEXT, "<b")]}
            }
        },
    ],
    "structured_outputs.structural_tag.format": [{"structural_tag": {"format": {"type": "minimax_xml"}}}],
}
SCHEMAS = [
    {"type": "strin"},
    {"type": "string", "pattern": "a(?=b)"},
    {"type": "object", "dependentSchemas": {"a": False}},
]


def format_of(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def tag_of(content: object) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": content}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        *(({field: value}, field) for field, values in COMPLETIONS.items() for value in values),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"prompt": [5] * 129, "max_tokens": 0}, "prompt"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [4096]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids[1]"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x " * 200, "truncate_prompt_tokens": 128}, "prompt"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"bad_words": ["x" * 1025]}, "bad_words[0]"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"speculative": {"k": 3}}, "speculative.k"),
        ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ],
)
async def test_completions_name_the_wrong_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    stack.decoder.requests.clear()
    sent = {name: value for name, value in ({"prompt": "x"} | body).items() if value is not None}
    error = error_of(await stack.http.post("/v1/completions", json=sent), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert stack.decoder.requests == [], "nothing reaches a target"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_completion_tokens": 128}, "max_completion_tokens"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (tag_of({"type": "regex"}), "response_format.format.pattern"),
        (tag_of({"type": "nope"}), "response_format.format"),
        (tag_of({"type": "json_schema", "json_schema": 3}), "response_format.format.json_schema"),
        (tag_of({"type": "tag", "begin": "<", "end": 3, "content": ANY_TEXT}), "response_format.format.end"),
        ({"response_format": {"type": "text", "triggers": ["<"]}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": ANY_TEXT, "structures": []}},
            "response_format.structures",
        ),
        *((format_of(schema), "response_format.json_schema.schema") for schema in (*SCHEMAS, nested(300))),
        *(({"structured_outputs": value}, param) for param, values in STRUCTURES.items() for value in values),
        (format_of({"type": "integer"}) | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {"type": "integer"}}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": 4}, "temperature": -1}, "temperature"),
        *(({"chat_template_kwargs": {name: 3}}, f"chat_template_kwargs.{name}") for name in sorted(RESERVED_VARIABLES)),
    ],
)
async def test_chat_names_the_wrong_field(stack: Stack, body: dict[str, Any], param: str) -> None:
    sent = {name: value for name, value in ({"messages": CHAT} | body).items() if value is not None}
    assert error_of(await stack.http.post("/v1/chat/completions", json=sent), 400)["param"] == param


DEEP = b'{"prompt": "x", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[1]", b'"text"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', DEEP],
    ids=lambda content: repr(content[:20]),
)
async def test_broken_json_is_refused(stack: Stack, content: bytes) -> None:
    error = error_of(await stack.http.post("/v1/completions", content=content), 400)
    assert content != DEEP or error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param", "code"),
    [
        ("POST", "/v1/completions", {"prompt": "x" * BODY_LIMIT}, 413, None, "body_too_large"),
        ("GET", "/v1/nothing", None, 404, None, None),
        ("GET", "/v1/completions", None, 405, None, None),
        ("POST", "/tokenize", {"model": "gpt-4", "prompt": "x"}, 404, "model", "model_not_found"),
        ("POST", "/v1/completions", {"model": "gpt-4", "prompt": "x"}, 404, "model", "model_not_found"),
        ("POST", "/v1/chat/completions", {"model": "gpt-4", "messages": CHAT}, 404, "model", "model_not_found"),
        ("POST", "/v1/completions", {"prompt": "x", "top_p": 0, "stream": True}, 400, "top_p", None),
    ],
)
async def test_every_error_has_the_same_shape(
    stack: Stack, method: str, path: str, body: object, status: int, param: str | None, code: str | None
) -> None:
    """An error comes before the headers of a stream, too."""
    error = error_of(await stack.http.request(method, path, json=body), status)
    assert error["param"] == param
    assert code is None or error["code"] == code


async def test_allow_names_all_methods_of_a_path(stack: Stack) -> None:
    answer = await stack.http.put("/v1/responses/resp_1")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")


async def test_the_official_client_raises_its_own_exceptions(stack: Stack) -> None:
    create = stack.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model=MODEL, messages=CHAT, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="gpt-4", messages=CHAT)
    assert missing.value.code == "model_not_found"


async def test_a_failure_of_the_gateway_is_an_error_and_counted(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise KeyError("secret")

    monkeypatch.setattr(stack.models, "check_available", fails)
    answer = await stack.http.get("/health")
    assert "secret" not in error_of(answer, 500)["message"]
    assert 'endpoint="/health",status="500"} 1.0' in await stack.metrics()


async def test_an_upload_cut_short_is_no_failure(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    async with stack.connection() as (_, writer):
        writer.write(b"POST /tokenize HTTP/1.1\r\nhost: here\r\ncontent-length: 10\r\n\r\n{")
        await writer.drain()
    while 'endpoint="/tokenize",status="499"' not in await stack.metrics():
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_text_that_cannot_fit_is_not_encoded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 8 MB once took half a gigabyte and ten seconds, to be refused then."""
    assert TOKENIZER.longest_token is not None
    text = "ab" * (CONTEXT * TOKENIZER.longest_token // 2 + 1)
    monkeypatch.setattr(TOKENIZER.__class__, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    chat = {"messages": [{"role": "user", "content": text}]}
    for answer in (
        await stack.complete(text),
        await stack.complete(["x", text]),
        await stack.http.post("/v1/chat/completions", json=chat),
    ):
        assert error_of(answer, 400)["code"] == "context_length_exceeded"


async def test_without_a_target_responses_have_retry_after() -> None:
    async with open_stack() as empty:
        for response in (
            await empty.http.get("/health"),
            await empty.complete(),
            await empty.complete(stream=True),
        ):
            assert error_of(response, 503)["code"] == "no_target"
            assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            await empty.client.completions.create(model=MODEL, prompt="x")


async def test_too_many_requests_are_refused_at_once() -> None:
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=2)) as busy:
        busy.decoder.gate.clear()
        waiting = await busy.begin(n=2)
        await until(lambda: len(busy.decoder.requests) == 2)
        response = await busy.complete()
        assert error_of(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            await busy.client.completions.create(model=MODEL, prompt="x")
        busy.decoder.gate.set()
        assert (await waiting).status_code == 200
        assert (await busy.complete()).status_code == 200


async def test_more_choices_than_are_ever_generated_at_once_are_refused_for_good() -> None:
    """A past bug: they got 429 with Retry-After, for ever."""
    async with open_stack(counts, limits=AdmissionLimits(max_in_flight=4)) as stack:
        for prompt, n, param in (("x", 5, "n"), (["x"] * 3, 2, "n"), (["x"] * 5, 1, "prompt")):
            assert error_of(await stack.complete(prompt, n=n), 400)["param"] == param
        chat = {"messages": CHAT, "n": 5}
        assert error_of(await stack.http.post("/v1/chat/completions", json=chat), 400)["param"] == "n"
        assert (await stack.complete(n=4)).status_code == 200


async def test_a_request_that_a_target_cannot_serve_fails_alone() -> None:
    def script(request: GenerationRequest) -> Sequence[int]:
        if request.sampling.seed == 13:
            raise RuntimeError("out of slots")
        return counts(request)

    async with open_stack(script) as stack:
        assert error_of(await stack.complete(seed=13), 500)["message"] == "out of slots"
        assert (await stack.complete(seed=14)).status_code == 200
