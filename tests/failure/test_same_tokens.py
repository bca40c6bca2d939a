"""Equality over the real wire: real processes, real gRPC; the same tokens with every draft, or none, or a dying one.

Two targets (fp32 and bf16) of one tiny random Llama with so few slots that requests preempt one another, and three
drafts: two of a model that mostly agrees, and n-gram lookup. The reference are the target's own tokens without
speculation, one request at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, GenerationRequest
from paceline.wire.target_link import TargetLink
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.service_processes import ServiceProcess
from tests.helpers.targets import link_to

pytestmark = pytest.mark.alone

SLOTS = 384
TIMEOUT_S = 120.0


def save_model(folder: Path, noise: float) -> str:
    peaked_llama(noise).save_pretrained(folder)
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, "0")).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServiceProcess]]:
    folder = tmp_path_factory.mktemp("models")
    target, draft = save_model(folder / "target", 0.0), save_model(folder / "draft", 0.02)
    by_model = json.dumps({"method": "draft_model", "model": draft, "num_speculative_tokens": 8, "tree_width": 3})
    by_lookup = json.dumps({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    drafts = {"model-1": by_model, "model-2": by_model, "lookup": by_lookup}
    slots = ("--engine-config", '{"slots": 4096}')
    pool = {
        name: ServiceProcess("draft", "--worker-id", name, "--speculative-config", config, *slots)
        for name, config in drafts.items()
    }
    always = json.dumps({**json.loads(by_model), "row_budget": False})  # also where speculation does not pay
    for dtype in ("float32", "bfloat16"):
        engine = json.dumps({"dtype": dtype, "slots": SLOTS, "max_num_batched_rows": 48})
        arguments = ("--model", target, "--speculative-config", always, "--engine-config", engine)
        pool[dtype] = ServiceProcess("target", *arguments)
    try:
        for worker in pool.values():
            worker.wait_ready()
        yield pool
    finally:
        for worker in pool.values():
            worker.stop()


@pytest.fixture(params=["float32", "bfloat16"])
async def target(workers: dict[str, ServiceProcess], request: pytest.FixtureRequest) -> AsyncIterator[TargetLink]:
    async with link_to(workers[request.param].address) as link:
        yield link


ONE_TOKEN = SamplingParams(temperature=0.0, logit_bias={5: 100}, max_tokens=160)  # any draft predicts it
PLAIN = SpeculativeOptions(enabled=False)


def submissions(options: SpeculativeOptions, drafts: Sequence[str] = ()) -> list[GenerationRequest]:
    rng = random.Random(4)
    loop = rng.choices(range(VOCABULARY), k=5) * 20  # for n-gram lookup
    prompts = [rng.choices(range(VOCABULARY), k=n) for n in (1, 3, 63, 64, 65, 130)] + [loop, loop[:77], [3]]
    return [
        GenerationRequest(f"{i}", prompt, sampling, options, drafts=drafts)
        for i, (prompt, sampling) in enumerate(zip(prompts, [*LAWS, ONE_TOKEN], strict=True))
    ]


async def run(link: TargetLink, submission: GenerationRequest) -> Delta:
    whole = Delta(submission.request_id)
    async with aclosing(link.submit(submission)) as deltas:
        async for delta in deltas:
            whole.tokens += delta.tokens
            whole.log_probs += delta.log_probs
            whole.finish_reason, whole.error = delta.finish_reason, delta.error
            whole.speculation = delta.speculation
    return whole


async def alone(link: TargetLink, requests: Sequence[GenerationRequest]) -> list[Delta]:
    """Run the requests one at a time, without speculation."""
    return [await run(link, replace(request, speculative=PLAIN)) for request in requests]


@pytest.fixture(scope="module")
def references() -> dict[str, list[object]]:
    """The results of `submissions` for `expected`, by the target's address: each target runs them once."""
    return {}


@pytest.fixture
async def expected(target: TargetLink, references: dict[str, list[object]]) -> list[object]:
    if target.address not in references:
        references[target.address] = results(await alone(target, submissions(PLAIN)))
    return references[target.address]


def results(responses: Sequence[Delta]) -> list[object]:
    assert not [answer.error for answer in responses if answer.error]
    return [(answer.tokens, answer.log_probs, answer.finish_reason) for answer in responses]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("depth", "nodes"),
    [pytest.param(1, 1, marks=SLOW), pytest.param(4, 4, marks=SLOW), (8, 30)],
    ids=["one guess", "chain or tree of 4", "tree of 30"],
)
@pytest.mark.parametrize("draft", ["model-1", pytest.param("lookup", marks=SLOW)])
async def test_every_draft_and_tree(
    workers: dict[str, ServiceProcess], target: TargetLink, expected: list[object], draft: str, depth: int, nodes: int
) -> None:
    """A few of the cases of `exactness/test_engine.py`, between processes."""
    await drafted_by(target, workers[draft].address)
    options = SpeculativeOptions(num_speculative_tokens=depth, max_tree_nodes=nodes, report=True)
    requests = submissions(options, [workers[draft].address])
    accepted = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not accepted:  # on a busy machine growth may come too late
            mixed = await asyncio.gather(*(run(target, request) for request in requests))
            assert results(mixed) == expected
            accepted = sum(answer.speculation.accepted_tokens for answer in mixed if answer.speculation)


@pytest.mark.parametrize("target", ["bfloat16", pytest.param("float32", marks=SLOW)], indirect=True)
async def test_mixed_with_plain_requests_and_cancelled_ones(
    workers: dict[str, ServiceProcess], target: TargetLink, expected: list[object]
) -> None:
    speculative = submissions(SpeculativeOptions(), [workers["model-1"].address])
    plain = [replace(s, request_id=f"plain {s.request_id}") for s in submissions(PLAIN)]
    doomed = [replace(s, request_id=f"doomed {s.request_id}") for s in speculative]

    async def abandon(submission: GenerationRequest) -> None:
        async with aclosing(target.submit(submission)) as deltas:
            await anext(deltas)

    together = asyncio.gather(*(run(target, s) for pair in zip(speculative, plain, strict=True) for s in pair))
    await asyncio.gather(*(abandon(s) for s in doomed))
    responses = await together
    assert results(responses[0::2]) == expected
    assert results(responses[1::2]) == expected


@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=SLOW)], indirect=True)
async def test_a_draft_killed_halfway(workers: dict[str, ServiceProcess], target: TargetLink) -> None:
    """SIGKILL: no error, the same tokens, and the requests continue on the next draft."""
    victim = ServiceProcess("draft", *workers["model-1"].arguments, "--worker-id", "victim")
    victim.wait_ready()
    addresses = [victim.address, workers["model-2"].address]
    sampled = SamplingParams(temperature=0.8, seed=6, max_tokens=400)
    requests = [
        GenerationRequest("greedy", [5, 9, 11], sampled.model_copy(update={"temperature": 0.0}), drafts=addresses),
        GenerationRequest("sampled", [5, 9, 11], sampled, drafts=addresses),
    ]
    for address in addresses:  # until the target is connected to both
        await drafted_by(target, address)

    responses = {request.request_id: Delta(request.request_id) for request in requests}

    async def consume(submission: GenerationRequest) -> None:
        whole = responses[submission.request_id]
        async with aclosing(target.submit(submission)) as deltas:
            async for delta in deltas:
                whole.tokens += delta.tokens
                whole.finish_reason, whole.error = delta.finish_reason, delta.error
                whole.speculation = delta.speculation
                if len(whole.tokens) > 100 and victim.process.poll() is None:
                    victim.process.send_signal(signal.SIGKILL)
                    victim.process.wait()

    try:
        await asyncio.gather(*(consume(request) for request in requests))
    finally:
        victim.stop()
    assert results(list(responses.values())) == results(await alone(target, requests))
    for answer in responses.values():
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.speculation is not None
        assert answer.speculation.drafts == ["victim", "model-2"]


async def drafted_by(link: TargetLink, address: str) -> None:
    """Submit requests until this draft serves one."""
    async with asyncio.timeout(TIMEOUT_S):
        sampling = SamplingParams(temperature=0.0, max_tokens=8)
        while True:
            answer = await run(link, GenerationRequest("hello", [1, 2, 3], sampling, drafts=[address]))
            if answer.speculation is not None and answer.speculation.drafts:
                return
