"""Equality over the real wire: real processes, real gRPC; the same tokens with every draft, or none, or a dying one.

Two targets (fp32 and bf16) of one tiny random Llama, short of slots so that requests preempt one another; a pool of
drafts: two of a model that mostly agrees, and n-gram lookup. What each target says alone, one request after the
other and without speculation, is the reference.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, Submission
from paceline.wire.target_link import TargetLink
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama

pytestmark = pytest.mark.alone

SLOTS = 384
READY = re.compile(r"ready on (\S+)")
START_S = 120.0
"""How long a process may take to be ready. Only a test that fails waits that long."""


@dataclass
class Worker:
    process: subprocess.Popen[str]
    address: str = ""

    def await_ready(self) -> None:
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if found := READY.search(line):
                self.address = found[1]
                return
        raise AssertionError("".join(seen))


def start(service: str, worker_id: str, *flags: str) -> Worker:
    command = [sys.executable, "-m", f"paceline_services.{service}", "--worker-id", worker_id, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Worker(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))


def save_model(folder: Path, noise: float) -> str:
    peaked_llama(noise).save_pretrained(folder)
    Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, "0")).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Worker]]:
    folder = tmp_path_factory.mktemp("models")
    target, draft = save_model(folder / "target", 0.0), save_model(folder / "draft", 0.02)
    by_model = json.dumps({"method": "draft_model", "model": draft, "num_speculative_tokens": 8, "tree_width": 3})
    by_lookup = json.dumps({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})
    pool = {
        name: start("draft", name, "--speculative-config", config, "--engine-config", '{"slots": 4096}')
        for name, config in (("model-1", by_model), ("model-2", by_model), ("lookup", by_lookup))
    }
    always = json.dumps(
        {**json.loads(by_model), "row_budget": False}
    )  # even where it does not pay, which it does not here
    for dtype in ("float32", "bfloat16"):
        engine = json.dumps({"dtype": dtype, "slots": SLOTS, "max_num_batched_rows": 48})
        pool[dtype] = start(
            "target", dtype, "--model", target, "--speculative-config", always, "--engine-config", engine
        )
    try:
        for worker in pool.values():
            worker.await_ready()
        yield pool
    finally:
        for worker in pool.values():
            worker.process.kill()
            worker.process.communicate()


@pytest.fixture(params=["float32", "bfloat16"])
async def target(workers: dict[str, Worker], request: pytest.FixtureRequest) -> AsyncIterator[TargetLink]:
    async with AsyncExitStack() as stack:
        link = TargetLink(workers[request.param].address)
        stack.push_async_callback(link.close)
        await link.connect()
        yield link


SAYS_ONE_THING = SamplingParams(temperature=0.0, logit_bias={5: 100}, max_tokens=160)  # any draft can guess it
PLAIN = SpeculativeOptions(enabled=False)


def submissions(options: SpeculativeOptions, drafts: Sequence[str] = ()) -> list[Submission]:
    rng = random.Random(4)
    loop = rng.choices(range(VOCABULARY), k=5) * 20  # something for n-grams to find
    prompts = [rng.choices(range(VOCABULARY), k=n) for n in (1, 3, 63, 64, 65, 130)] + [loop, loop[:77], [3]]
    return [
        Submission(f"{i}", prompt, law, options, drafts=drafts)
        for i, (prompt, law) in enumerate(zip(prompts, [*LAWS, SAYS_ONE_THING], strict=True))
    ]


async def run(link: TargetLink, submission: Submission) -> Delta:
    whole = Delta(submission.request_id)
    async with aclosing(link.submit(submission)) as deltas:
        async for delta in deltas:
            whole.tokens += delta.tokens
            whole.log_probs += delta.log_probs
            whole.finish_reason, whole.error = delta.finish_reason, delta.error
            whole.speculation = delta.speculation
    return whole


async def alone(link: TargetLink, requests: Sequence[Submission]) -> list[Delta]:
    """One after the other, without speculation."""
    return [await run(link, replace(request, speculative=PLAIN)) for request in requests]


@pytest.fixture(scope="module")
def references() -> dict[str, list[object]]:
    """What each target said alone to `submissions`, by its address: for `expected`, which asks once."""
    return {}


@pytest.fixture
async def expected(target: TargetLink, references: dict[str, list[object]]) -> list[object]:
    if target.address not in references:
        references[target.address] = said(await alone(target, submissions(PLAIN)))
    return references[target.address]


def said(answers: Sequence[Delta]) -> list[object]:
    assert not [answer.error for answer in answers if answer.error]
    return [(answer.tokens, answer.log_probs, answer.finish_reason) for answer in answers]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("depth", "nodes"),
    [pytest.param(1, 1, marks=SLOW), pytest.param(4, 4, marks=SLOW), (8, 30)],
    ids=["one guess", "chain or tree of 4", "tree of 30"],
)
@pytest.mark.parametrize("draft", ["model-1", pytest.param("lookup", marks=SLOW)])
async def test_every_draft_and_tree(
    workers: dict[str, Worker], target: TargetLink, expected: list[object], draft: str, depth: int, nodes: int
) -> None:
    """All of them in one process, and many more, are in `exactness/test_engine.py`."""
    await drafted_by(target, workers[draft].address)
    options = SpeculativeOptions(num_speculative_tokens=depth, max_tree_nodes=nodes, report=True)
    requests = submissions(options, [workers[draft].address])
    accepted = 0
    async with asyncio.timeout(START_S):
        while not accepted:  # a draft that the machine neglects guesses too late, and then nothing was tested
            mixed = await asyncio.gather(*(run(target, request) for request in requests))
            assert said(mixed) == expected
            accepted = sum(answer.speculation.accepted_tokens for answer in mixed if answer.speculation)


@pytest.mark.parametrize("target", ["bfloat16", pytest.param("float32", marks=SLOW)], indirect=True)
async def test_mixed_with_plain_requests_and_cancelled_ones(
    workers: dict[str, Worker], target: TargetLink, expected: list[object]
) -> None:
    speculative = submissions(SpeculativeOptions(), [workers["model-1"].address])
    plain = [replace(s, request_id=f"plain {s.request_id}") for s in submissions(PLAIN)]
    doomed = [replace(s, request_id=f"doomed {s.request_id}") for s in speculative]

    async def abandon(submission: Submission) -> None:
        async with aclosing(target.submit(submission)) as deltas:
            await anext(deltas)

    together = asyncio.gather(*(run(target, s) for pair in zip(speculative, plain, strict=True) for s in pair))
    await asyncio.gather(*(abandon(s) for s in doomed))
    answers = await together
    assert said(answers[0::2]) == expected
    assert said(answers[1::2]) == expected


@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=SLOW)], indirect=True)
async def test_a_draft_killed_halfway(workers: dict[str, Worker], target: TargetLink) -> None:
    """SIGKILL: no error, the same tokens, and the request is counted on the next draft."""
    victim = start("draft", "victim", *workers["model-1"].process.args[5:])  # type: ignore[index]
    victim.await_ready()
    addresses = [victim.address, workers["model-2"].address]
    sampled = SamplingParams(temperature=0.8, seed=6, max_tokens=400)
    requests = [
        Submission("greedy", [5, 9, 11], replace_law(sampled, temperature=0.0), drafts=addresses),
        Submission("sampled", [5, 9, 11], sampled, drafts=addresses),
    ]
    # A first answer makes sure that the target's links to both drafts are up.
    for address in addresses:
        await drafted_by(target, address)

    answers = {request.request_id: Delta(request.request_id) for request in requests}

    async def consume(submission: Submission) -> None:
        whole = answers[submission.request_id]
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
        victim.process.kill()
        victim.process.communicate()
    assert said(list(answers.values())) == said(await alone(target, requests))
    for answer in answers.values():
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.speculation is not None
        assert answer.speculation.drafts == ["victim", "model-2"]


def replace_law(law: SamplingParams, **changes: float) -> SamplingParams:
    return law.model_copy(update=changes)


async def drafted_by(link: TargetLink, address: str) -> None:
    """Ask until this draft serves a request."""
    async with asyncio.timeout(START_S):
        law = SamplingParams(temperature=0.0, max_tokens=8)
        while True:
            answer = await run(link, Submission("hello", [1, 2, 3], law, drafts=[address]))
            if answer.speculation is not None and answer.speculation.drafts:
                return
