"""`InferenceService`: the same answers as over HTTP, and errors as status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import common_pb2, inference_pb2
from paceline_services.gateway.admission import AdmissionLimits
from paceline_services.gateway.grpc import inference_servicer
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


@pytest.mark.parametrize(
    "structure", [{"json_schema": '{"type": "integer"}'}, {"regex": "[a-c]+"}, {"grammar": 'root ::= "x"'}], ids=str
)
async def test_structure_reaches_the_target(stack: Stack, stub: Any, structure: dict[str, str]) -> None:
    stack.decoder.requests.clear()
    await generated(stub, Request(text="x", **structure))
    assert "start" in stack.decoder.requests[0].sampling.grammar
    broken = await refusal(stub, Request(text="x", **dict.fromkeys(structure, "(")))
    assert "structured_outputs" in (broken.details() or "")


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


NESTED = '{"enum": ' + "[" * 3000 + "]" * 3000 + "}"


@pytest.mark.parametrize(
    ("request_", "status", "named"),
    [
        (Request(), StatusCode.INVALID_ARGUMENT, "text, tokens and chat"),
        (Request(text=""), StatusCode.INVALID_ARGUMENT, "prompt"),
        (Request(text="x", model="gpt-4"), StatusCode.NOT_FOUND, "gpt-4"),
        (Request(text="x", sampling={"temperature": -1}), StatusCode.INVALID_ARGUMENT, "temperature"),
        (Request(text="x", sampling={"max_tokens": 1000}), StatusCode.INVALID_ARGUMENT, "max_tokens"),
        (Request(text="x", sampling={"logprobs": 1}), StatusCode.INVALID_ARGUMENT, "logprobs"),
        (Request(text="x", json_schema=NESTED), StatusCode.INVALID_ARGUMENT, "structured_outputs.json"),
    ],
    ids=["no prompt", "empty", "model", "temperature", "max_tokens", "logprobs", "schema"],
)
async def test_errors_are_status_codes_that_name_the_field(
    stub: Any, request_: Any, status: StatusCode, named: str
) -> None:
    error = await refusal(stub, request_)
    assert error.code() == status
    assert named in (error.details() or "")


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

    monkeypatch.setattr(inference_servicer, "build_requests", fails)
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
