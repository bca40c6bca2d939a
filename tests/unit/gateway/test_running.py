"""A request is ended by its client at any moment, and nothing else of its task is cancelled."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline_services.gateway.generation.running import RunningRequest, RunningRequests

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


async def numbers(gate: asyncio.Event) -> AsyncGenerator[int]:
    yield 1
    await gate.wait()
    yield 2


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "while its response is sent"])
async def test_an_abort_ends_the_wait_and_not_the_sending(waiting: bool) -> None:
    running, gate, sending = RunningRequests(), asyncio.Event(), asyncio.Event()
    sent: list[int] = []

    async def serve() -> None:
        with running.track("alice", "a", "") as request:
            items = numbers(gate)
            while (item := await request.next(items)) is not None:
                await sending.wait()
                sent.append(item)

    serving = asyncio.create_task(serve())
    if waiting:
        sending.set()
    await settled()
    assert sent == ([1] if waiting else [])
    assert running.abort("alice", "a")
    assert running.abort("alice", "a"), "the second time changes nothing"
    sending.set()
    await serving
    assert (sent, serving.cancelling()) == ([1], 0)
    assert not running.abort("alice", "a")


async def test_a_task_that_is_cancelled_by_others_too_stays_cancelled() -> None:
    running, gate = RunningRequests(), asyncio.Event()

    async def serve() -> None:
        with running.track("", "a") as request:
            items = numbers(gate)
            while await request.next(items) is not None:
                pass

    for abort_first in (True, False):
        serving = asyncio.create_task(serve())
        await settled()
        for step in (running.abort, serving.cancel)[:: 1 if abort_first else -1]:
            step("", "a") if step == running.abort else step()
        with pytest.raises(asyncio.CancelledError):
            await serving


@pytest.mark.parametrize(
    ("id_", "found"),
    [
        ("chosen-1", True),
        ("0" * 32, True),
        ("resp_" + "0" * 32, True),
        ("chatcmpl-" + "0" * 32, True),
        ("1", False),
        ("resp_chosen-1", True),
        ("resp_1", False),
        ("", False),
    ],
)
def test_a_request_has_the_name_that_its_client_chose_and_the_id_of_its_response(id_: str, found: bool) -> None:
    running = RunningRequests()
    with running.track("alice", "0" * 32, "chosen-1"):
        assert running.abort("alice", id_) == found
        assert not running.abort("bob", id_)
        assert not running.abort("", id_)


async def test_requests_of_one_name_end_together() -> None:
    running = RunningRequests()
    with running.track("", "same") as first, running.track("", "same", "other") as second:
        assert running.abort("", "other")
        assert (first.aborted, second.aborted) == (False, True)
        assert running.abort("", "same")
        assert first.aborted


def test_the_documentation_of_security_lists_what_is_kept_of_a_request() -> None:
    listed = re.search(r"^Redis keeps of a request (.*?), while it runs", SECURITY.read_text(), re.M | re.S)
    assert listed is not None
    request = RunningRequest("m", "r")
    assert request.report() is None, "no completion has begun"
    request.runs.append(SimpleNamespace(tokens=0, targets=[], replays=0, stats=[]))  # type: ignore[arg-type]
    report = request.report()
    assert report is not None
    kept = json.loads(report).keys() - {"object"}
    assert set(re.findall(r"`(\w+)`", listed[1])) == kept


async def test_a_request_that_goes_on_at_another_gateway_is_reported_there() -> None:
    running = RunningRequests("m")
    with running.track("alice", "r", "mine") as request:
        request.runs.append(SimpleNamespace(tokens=3, targets=["t"], replays=0, stats=[]))  # type: ignore[arg-type]
        assert '"completion_tokens":3' in (await running.report("alice", "mine") or "")
        running.leave("bob", "r")
        assert await running.report("alice", "mine") is not None
        running.leave("alice", "r")
        assert await running.report("alice", "mine") is None
    assert await running.report("alice", "r") is None
