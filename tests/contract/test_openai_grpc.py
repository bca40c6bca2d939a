"""`InferenceService`: the same answers as over HTTP, and errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config import SamplingParams
from paceline.messages import GenerationRequest
from paceline.v1 import common_pb2, inference_pb2
from paceline_services.gateway.generation.admission import AdmissionLimits
from paceline_services.gateway.grpc import servicer
from tests.helpers.openai_stack import (
    EOS,
    MODEL,
    TOKENIZER,
    Stack,
    counts,
    generated,
    open_stack,
    refusal,
    text_script,
)
from tests.helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "json.dumps → a str"
Request = inference_pb2.GenerateRequest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with open_stack(text_script(TEXT)) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(stack: Stack) -> AsyncIterator[Any]:
    async with stack.inference() as stub:
        yield stub


PROMPTS = [
    Request(text="def f"),
    Request(tokens=common_pb2.TokenSequence(token_ids=[456, 281])),
    Request(chat=Request.Chat(messages=[Request.Chat.Message(role="user", content="hi")])),
]


@pytest.mark.parametrize("request_", PROMPTS, ids=["text", "tokens", "chat"])
async def test_every_kind_of_prompt_is_answered(stub: Any, request_: Any) -> None:
    request_.sampling.max_tokens = 60
    responses = await generated(stub, request_)
    assert "".join(response.text for response in responses) == TEXT
    tokens = [token for response in responses for token in response.token_ids]
    assert tokens == [*TOKENIZER.encode(TEXT), EOS]
    last = responses[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_STOP
    assert last.completion_tokens == len(tokens)
    assert last.prompt_tokens > 0
    assert last.timings.total_s == 1.0


TAG = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-c]+"}}'


@pytest.mark.parametrize(
    ("structure", "field", "broken"),
    [
        ({"json_schema": '{"type": "integer"}'}, {"json": {"type": "integer"}}, {"json_schema": "("}),
        ({"regex": "[a-c]+"}, {"regex": "[a-c]+"}, {"regex": "("}),
        ({"grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}, {"grammar": "("}),
        ({"json_object": True}, {"json_object": True}, {"json_object": False}),
        ({"choice": {"texts": ["a", "b"]}}, {"choice": ["a", "b"]}, {"choice": {}}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}, {"structural_tag": "("}),
    ],
    ids=str,
)
async def test_structure_reaches_the_target(
    stack: Stack, stub: Any, structure: dict[str, Any], field: dict[str, Any], broken: dict[str, Any]
) -> None:
    """As over HTTP."""
    stack.decoder.requests.clear()
    await generated(stub, Request(text="x", **structure))
    await stack.complete("x", structured_outputs=field)
    ours, theirs = [request.sampling.grammar for request in stack.decoder.requests]
    assert "start" in ours
    assert ours == theirs
    refused = await refusal(stub, Request(text="x", **broken))
    assert (refused.code(), "structured_outputs" in (refused.details() or "")) == (StatusCode.INVALID_ARGUMENT, True)


async def test_parameters_reach_the_target(stack: Stack, stub: Any) -> None:
    stack.decoder.requests.clear()
    request = Request(
        model=MODEL,
        text="x",
        stop=["str"],
        sampling=Request.Sampling(temperature=0.0, seed=5, top_k=3, logit_bias={7: 1.5}, max_tokens=50),
        speculative=common_pb2.SpeculativeOptions(enabled=False, report=True),
    )
    responses = await generated(stub, request)
    request = stack.decoder.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k, sampling.max_tokens) == (0.0, 5, 3, 50)
    assert sampling.logit_bias == {7: 1.5}
    assert request.speculative.enabled is False
    assert "".join(response.text for response in responses) == "json.dumps → a "
    assert responses[-1].speculation.accepted_tokens == 4


async def test_the_gate_s_average_is_not_for_clients(stack: Stack, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets send it for the next target."""
    last = stack.decoder._last

    def with_average(*arguments: Any) -> Any:
        delta = last(*arguments)
        delta.speculation.accepted_average = 0.5
        return delta

    monkeypatch.setattr(stack.decoder, "_last", with_average)
    report = common_pb2.SpeculativeOptions(report=True)
    responses = await generated(stub, Request(model=MODEL, text="x", speculative=report))
    assert responses[-1].speculation.accepted_tokens == 4
    assert not responses[-1].speculation.HasField("accepted_average")


NESTED = '{"enum": ' + "[" * 3000 + "]" * 3000 + "}"


@pytest.mark.parametrize(
    ("request_", "status", "named"),
    [
        (Request(), StatusCode.INVALID_ARGUMENT, "text, tokens and chat"),
        (Request(text=""), StatusCode.INVALID_ARGUMENT, "prompt"),
        (Request(text="x", model="gpt-4"), StatusCode.NOT_FOUND, "gpt-4"),
        (Request(text="x", sampling={"temperature": -1}), StatusCode.INVALID_ARGUMENT, "temperature"),
        (Request(text="x", sampling={"max_tokens": 1000}), StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (Request(text="x", sampling={"logprobs": 21}), StatusCode.INVALID_ARGUMENT, "logprobs"),
        (Request(text="x", n=129), StatusCode.INVALID_ARGUMENT, "n:"),
        (Request(text="x", sampling={"logprob_token_ids": [5]}), StatusCode.INVALID_ARGUMENT, "logprob_token_ids"),
        (Request(text="x", truncate_prompt_tokens=0), StatusCode.INVALID_ARGUMENT, "truncate_prompt_tokens"),
        (Request(chat=PROMPTS[2].chat, echo=True), StatusCode.INVALID_ARGUMENT, "echo"),
        (Request(text="x", json_schema=NESTED), StatusCode.INVALID_ARGUMENT, "structured_outputs.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_errors_are_status_codes_that_name_the_field(
    stub: Any, request_: Any, status: StatusCode, named: str
) -> None:
    error = await refusal(stub, request_)
    assert error.code() == status
    assert named in (error.details() or "")


WORDS = TOKENIZER.encode("def read(path):\n    return open(path)")
COUNTED = counts(GenerationRequest("", WORDS, SamplingParams(seed=5)))
PIECES = [TOKENIZER.decode([token]) for token in COUNTED[:9]]
"""What the target says to `WORDS` with seed 5."""
SHARED = {"seed": 5, "temperature": 0.5, "allowed_token_ids": [300, 301], "bad_words": ["import"], "min_tokens": 2}


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({}, {}),
        ({"n": 3}, {"logprobs": 2}),
        ({"n": 2, "echo": True}, {"logprobs": 1}),
        ({"n": 2}, {"prompt_logprobs": 3, "logprobs": 0}),
        ({"echo": True, "truncate_prompt_tokens": 3}, {}),
        ({"echo": True, "truncate_prompt_tokens": -1}, {"logprobs": 0, "max_tokens": 0, "min_tokens": 0}),
        ({"return_tree": True, "n": 2}, {}),
        ({"stop": [PIECES[3]]}, {}),
        ({"stop": [PIECES[3]], "include_stop_str_in_output": True, "skip_special_tokens": False}, {}),
        ({}, {"stop_token_ids": [COUNTED[4]]}),
        ({"stream_interval": 4, "priority": -2, "request_id": "a/b"}, {"logprobs": 1, "logprob_token_ids": [7, 8]}),
    ],
    ids=str,
)
async def test_a_call_gives_what_http_gives(more: dict[str, Any], fields: dict[str, Any]) -> None:
    """The same requests reach the target, and the same choices come back."""
    fields = {"max_tokens": 9, **SHARED, **fields}
    async with open_stack(counts) as stack, stack.inference() as stub:
        request = Request(tokens={"token_ids": WORDS}, sampling=fields, **more)
        choices = joined(await generated(stub, request))
        answer = await stack.complete(WORDS, return_token_ids=True, return_accepted=True, **fields, **more)
        assert answer.status_code == 200, answer.text
        ours, theirs = (
            [(r.prompt, r.sampling, r.priority, r.return_tree) for r in requests]
            for requests in zip(*[iter(stack.decoder.requests)] * more.get("n", 1), strict=True)
        )
    assert ours == theirs
    for choice, expected in zip(choices, answer.json()["choices"], strict=True):
        assert choice["text"] == expected["text"]
        assert choice["token_ids"] == expected["token_ids"]
        assert choice["accepted"] == expected["accepted"]
        assert choice["trees"] == [
            [(node["parent"], node["token_id"], node["accepted"], node["method"]) for node in tree]
            for tree in expected.get("trees", ())
        ]
        assert choice["stop_reason"] == expected["stop_reason"]
        assert choice["prompt_token_ids"] == (expected["prompt_token_ids"] if more.get("echo") else [])
        if "logprobs" in fields:
            values: list[float | None] = [each.log_prob for each in choice["log_probs"]]
            if more.get("echo"):
                values = [None, *(each.log_prob for each in choices[0]["prompt_log_probs"]), *values]
            assert values == expected["logprobs"]["token_logprobs"]
        if "prompt_logprobs" in fields:
            for token, score, known in zip(
                WORDS[1:], choices[0]["prompt_log_probs"], expected["prompt_logprobs"][1:], strict=True
            ):
                assert known[str(token)]["logprob"] == score.log_prob
                assert known[str(token)]["rank"] == score.rank
                assert {str(token), *(str(each.token_id) for each in score.top)} == set(known)


def joined(responses: list[Any]) -> list[dict[str, Any]]:
    """What the responses to a call add up to, by choice. Parts of a prompt follow one another."""
    choices: dict[int, dict[str, Any]] = {}
    for response in responses:
        names = ("token_ids", "log_probs", "accepted", "trees", "prompt_log_probs", "prompt_token_ids")
        choice = choices.setdefault(response.index, {"text": ""} | {name: [] for name in names})
        assert "ended" not in choice
        choice["text"] += response.text
        for name in ("token_ids", "log_probs", "accepted", "prompt_token_ids"):
            choice[name] += getattr(response, name)
        for tree in response.trees:
            choice["trees"].append(list(zip(tree.parents, tree.token_ids, tree.accepted, tree.methods, strict=True)))
        for part in response.prompt_log_probs:
            assert (response.index, part.start) == (0, 1 + len(choice["prompt_log_probs"]))
            assert not choice["token_ids"]
            choice["prompt_log_probs"] += part.entries
        stop = response.WhichOneof("stop_reason")
        choice["stop_reason"] = getattr(response, stop) if stop else None
        if response.finish_reason:
            choice["ended"] = True
    return [choices[index] for index in sorted(choices)]


async def test_log_probabilities_of_a_chat(stub: Any) -> None:
    request = Request(chat=PROMPTS[2].chat, sampling={"logprobs": 2, "max_tokens": 60, "prompt_logprobs": 0})
    [choice] = joined(await generated(stub, request))
    assert [each.log_prob for each in choice["log_probs"]] == [-0.5] * len(choice["token_ids"])
    assert [top.log_prob for top in choice["log_probs"][0].top] == [-0.5, -1.5]
    assert len(choice["prompt_log_probs"]) > 3


@pytest.mark.parametrize(("interval", "sizes"), [(None, [1] * 9), (4, [1, 4, 4])])
async def test_responses_wait_for_so_many_tokens(interval: int | None, sizes: list[int]) -> None:
    async with open_stack(counts, burst=1) as stack, stack.inference() as stub:
        request = Request(text="x", stream_interval=interval, sampling={"max_tokens": 9})
        assert [len(response.token_ids) for response in await generated(stub, request)] == sizes


async def test_tokenize_and_detokenize(stack: Stack, stub: Any) -> None:
    for text in ("def f", "größer, 東京", ""):
        for special in (None, True, False):
            found = await stub.Tokenize(inference_pb2.TokenizeRequest(text=text, add_special_tokens=special))
            body = {"prompt": text} | ({} if special is None else {"add_special_tokens": special})
            assert list(found.token_ids) == (await stack.http.post("/tokenize", json=body)).json()["tokens"]
            assert found.max_model_len == 128
        back = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=TOKENIZER.encode(text)))
        assert back.text == text
    chat = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=PROMPTS[2].chat))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert list(chat.token_ids) == (await stack.http.post("/tokenize", json=body)).json()["tokens"]
    for call, named in (
        (stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[4096])), "4096"),
        (stub.Tokenize(inference_pb2.TokenizeRequest()), "text and chat"),
        (stub.Tokenize(inference_pb2.TokenizeRequest(chat={})), "messages"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=named) as error:
            await call
        assert error.value.code() == StatusCode.INVALID_ARGUMENT


async def test_a_call_is_aborted_by_its_id() -> None:
    """Both calls that have it; another one goes on. Once they have ended, nothing is left to abort."""
    async with open_stack(counts, burst=1) as stack, stack.inference() as stub:
        aborting = inference_pb2.AbortRequest(request_id="mine")
        assert not (await stub.Abort(aborting)).aborted
        stack.decoder.gate.clear()
        calls = [
            stub.Generate(Request(text="x", request_id=request_id, sampling={"max_tokens": 60}))
            for request_id in ("mine", "mine", "other", "")
        ]
        await until(lambda: len(stack.decoder.requests) == len(calls))
        assert (await stub.Abort(aborting)).aborted
        for call in calls[:2]:
            assert [each.finish_reason async for each in call] == [common_pb2.FINISH_REASON_CANCELLED]
            await stack.decoder.cancelled.get()
        assert not (await stub.Abort(aborting)).aborted
        stack.decoder.gate.set()
        for call in calls[2:]:
            assert len([response async for response in call]) == 60
        await stack.idle()


async def test_a_call_that_its_client_cancels_is_counted() -> None:
    async with open_stack(counts, burst=1) as stack, stack.inference() as stub:
        stack.decoder.gate.clear()
        call = stub.Generate(Request(text="x"))
        await until(lambda: stack.decoder.requests)
        call.cancel()
        await stack.decoder.cancelled.get()
        await stack.idle()
        assert 'paceline_requests_total{endpoint="Generate",status="CANCELLED"} 1.0' in await stack.metrics()


async def test_models_and_health(stack: Stack, stub: Any) -> None:
    listed = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.id, model.max_model_len) for model in listed.models] == [(MODEL, 128)]
    request = health_pb2.HealthCheckRequest(service="paceline.v1.InferenceService")
    async with grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(request)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("full", "status"), [(True, StatusCode.RESOURCE_EXHAUSTED), (False, StatusCode.UNAVAILABLE)])
async def test_a_call_that_may_succeed_later_has_a_retry_delay(full: bool, status: StatusCode) -> None:
    """In the trailing metadata that gRPC's own retries use."""
    scripts = [counts] if full else []
    async with open_stack(*scripts, limits=AdmissionLimits(max_queue=1)) as stack, stack.inference() as stub:
        if full:
            stack.decoder.gate.clear()
            waiting = await stack.begin()
        error = await refusal(stub, Request(text="x"))
        assert error.code() == status
        assert dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms") == "1000"
        if full:
            stack.decoder.gate.set()
            assert (await waiting).status_code == 200


async def test_a_bug_is_counted_with_the_status_that_the_client_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(servicer, "build_requests", fails)
    async with open_stack(counts) as stack, stack.inference() as stub:
        assert (await refusal(stub, Request(text="x"))).code() == StatusCode.INTERNAL
        assert 'paceline_requests_total{endpoint="Generate",status="INTERNAL"} 1.0' in await stack.metrics()


async def test_cancelling_the_call_cancels_at_the_target() -> None:
    async with open_stack(counts, burst=1) as stack, stack.inference() as stub:
        stack.decoder.hold_after = 2
        call = stub.Generate(Request(text="x", sampling=Request.Sampling(max_tokens=60)))
        await call.read()
        call.cancel()
        await stack.decoder.cancelled.get()
        await stack.idle()
