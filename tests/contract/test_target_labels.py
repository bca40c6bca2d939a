"""Labels of targets: a header, the metadata of a gRPC call or an API key binds a request to targets that have them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from paceline.api_keys import ApiKey, KeyFile, digest, write
from paceline.cli.keys_command import keys
from paceline.launcher import COULD_NOT_START
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from paceline_services.target.__main__ import parse_options
from tests.helpers.openai_stack import Stack, counts, open_stack

PROMPT = [300, 301, 302]
LABELS = (["pool=long", "gpu=h100"], ["pool=short"])


async def add_targets(stack: Stack) -> None:
    for labels in LABELS:
        await stack.add_target(counts, labels=labels)


async def status(stack: Stack, headers: dict[str, str]) -> int:
    body = {"prompt": PROMPT, "max_tokens": 2}
    return (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code


def served(stack: Stack) -> list[int]:
    return [len(target.decoder.requests) for target in stack.targets]


async def test_a_request_runs_only_on_targets_with_all_its_labels() -> None:
    async with open_stack() as stack, grpc.aio.insecure_channel(stack.addresses.grpc) as channel:
        await add_targets(stack)
        for _ in range(3):
            assert await status(stack, {"X-Target-Labels": "gpu=h100, pool=long"}) == 200
        assert served(stack) == [3, 0]
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(tokens=common_pb2.TokenSequence(token_ids=PROMPT))
        async for _ in stub.Generate(request, metadata=[("x-target-labels", "pool=short")]):
            pass
        assert served(stack) == [3, 1]


async def test_the_context_is_that_of_the_targets_with_the_labels() -> None:
    async with open_stack() as stack:
        await stack.add_target(counts, labels=["pool=long"], context=200)
        await stack.add_target(counts, labels=["pool=short"], context=50)
        for pool, tokens in (("long", 200), ("short", 50)):
            body = {"prompt": PROMPT, "max_tokens": tokens - len(PROMPT)}
            headers = {"X-Target-Labels": f"pool={pool}"}
            assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            body["max_tokens"] += 1
            refused = await stack.http.post("/v1/completions", json=body, headers=headers)
            assert f"{tokens} tokens" in refused.json()["error"]["message"]


async def test_a_stream_goes_on_where_the_whole_request_fits() -> None:
    """Targets with a shorter context came after it was admitted."""
    async with open_stack() as stack:
        first = await stack.add_target(counts, context=200)
        first.decoder.gate.clear()
        asked = [await stack.begin([300 + i, 301, 302], max_tokens=100) for i in range(4)]
        for context in (50, 50, 200):
            await stack.add_target(counts, context=context)
        await first.die()
        for each in asked:
            answer = (await each).json()
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (100, "length")
        assert served(stack) == [4, 0, 0, 4]


async def test_a_key_s_labels_bind_its_requests_whatever_they_ask_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    write(keys, KeyFile(keys=(ApiKey(name="short", sha256=digest("secret"), target_labels="pool=short"),)))
    async with open_stack(api_keys=keys) as stack:
        await add_targets(stack)
        key = {"Authorization": "Bearer secret"}
        for _ in range(3):
            assert await status(stack, key) == 200
        assert served(stack) == [0, 3]
        assert await status(stack, {**key, "X-Target-Labels": "pool=long"}) == 503


async def test_without_such_a_target_a_request_is_refused_and_may_come_again() -> None:
    async with open_stack() as stack:
        await add_targets(stack)
        headers = {"X-Target-Labels": "pool=other"}
        answer = await stack.http.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "pool=other" in answer.json()["error"]["message"]
        assert 'reason="labels"' in (await stack.http.get("/metrics")).text
        await stack.add_target(counts, labels=["pool=other"])
        assert await status(stack, headers) == 200


async def test_a_lost_request_goes_on_only_at_a_target_with_its_labels() -> None:
    async with open_stack() as stack:
        await add_targets(stack)
        stack.decoder.hold_after = 4
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "seed": 3}
        async with stack.http.stream(
            "POST", "/v1/completions", json=body, headers={"X-Target-Labels": "pool=long"}
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await stack.targets[0].die()
            adding = asyncio.create_task(stack.add_target(counts, labels=["pool=long"]))
            rest = [line async for line in lines]
            await adding
        assert "data: [DONE]" in rest
        assert [count > 0 for count in served(stack)] == [True, False, True]


@pytest.mark.parametrize("labels", ["pool", "=long", "pool=long;gpu=a", ",".join(f"k{n}=v" for n in range(17))])
async def test_labels_that_are_none_are_refused(
    labels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_stack(counts) as stack:
        assert await status(stack, {"X-Target-Labels": labels}) == 400
    with pytest.raises(SystemExit):
        parse_options(["--model", "table:64", "--labels", labels])
    assert "KEY=VALUE" in capsys.readouterr().err
    added = CliRunner().invoke(keys, ["add", "a", "--file", str(tmp_path / "keys.json"), "--target-labels", labels])
    assert (added.exit_code, "KEY=VALUE" in added.stderr) == (COULD_NOT_START, True)


def test_a_target_s_labels_add_up() -> None:
    options = parse_options(["--model", "table:64", "--labels", "pool=long,gpu=a", "--labels", "zone=b"])
    assert options.labels == ["gpu=a", "pool=long", "zone=b"]
