"""`RemoteDrafts` in a real vLLM: the tokens of plain decoding, whatever happens to the drafts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.service_processes import model_process_of
from tests.vllm.engines import PROMPTS, STEADY, draft, drafting, generate, vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
BATCH = [(prompt, GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return generate(BATCH)[0]


def test_greedy_tokens_are_those_of_plain_decoding(plain: list[list[int]]) -> None:
    with draft() as worker:
        outputs, (accepted, drafted) = generate(BATCH, **drafting(worker.address, lookups=["suffix"], **STEADY))
    assert outputs == plain
    assert 0.2 * drafted < accepted > 100


def test_a_rank_asks_for_all(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallel: the proposer exists in every rank."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with draft() as worker:
        engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        alone, _ = generate(BATCH, **engine)
        outputs, (accepted, _) = generate(BATCH, **engine, **drafting(worker.address, lookups=["suffix"], **STEADY))
    assert outputs == alone
    assert accepted > 30


@contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_draft_that_fails_costs_no_token(fault: str, plain: list[list[int]]) -> None:
    with (
        draft() as worker,
        vllm_engine([BATCH[:8], BATCH[8:]], **drafting(worker.address, lookups=["suffix"])) as engine,
    ):
        outputs = engine.outputs()
        computing = model_process_of("draft", worker.process.pid)
        if fault == "killed":
            os.kill(computing, signal.SIGKILL)
            engine.go_on()
            outputs += engine.outputs()
        else:
            with stopped(computing):
                engine.go_on()
                outputs += engine.outputs()
        accepted, _ = engine.accepted()
    assert outputs == plain
    assert accepted > 10


def test_a_draft_that_lies_costs_no_token(plain: list[list[int]]) -> None:
    """It is sure of its tokens, which are wrong. What it sends is compared with the draws before it gets rows."""
    liar = {"method": "custom_class", "model": "tests.vllm.lying_draft.lying_draft"}
    with draft(liar) as worker:
        outputs, (accepted, drafted) = generate(BATCH, **drafting(worker.address))
    assert outputs == plain
    assert accepted <= drafted < 100


def test_absent_drafts_cost_no_token(plain: list[list[int]]) -> None:
    outputs, (_, drafted) = generate(BATCH, **drafting("127.0.0.1:1"))
    assert outputs == plain
    assert drafted == 0
