"""A draft sends as much as it can: a real target's memory stays as it was, its link is closed, no token changes."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import draft_pb2
from paceline.wire.target_link import TargetLink
from tests.failure.test_draft_links import Liar, lying, packed
from tests.helpers.targets import collect, submission

pytestmark = pytest.mark.alone

MODEL = "table:1000"
DRAFTED = '{"method": "draft_model", "model": "table:1000", "row_budget": false}'
TOKENS = 1500
MEGABYTE = 10**6
ROOM_MB = 150
"""What a target's process may take beyond what it took before: some frames on their way, and their decoding."""


class Heavy:
    """A frame that carries so many bytes beyond what it says, in a field that nobody knows."""

    def __init__(self, frame: draft_pb2.GrowthFrame, size: int) -> None:
        self._bytes = frame.SerializeToString() + b"\x7a" + _varint(size) + bytes(size)

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._bytes


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


class Flood(Liar):
    """Answers the first frame with frames of this size without end, each with one node of the first request."""

    def __init__(self, size: int) -> None:
        super().__init__(lambda frame: draft_pb2.GrowthFrame())
        self._size = size
        self.sent = 0
        self.links = 0
        self.closed = 0

    async def Describe(self, request: Any, context: Any) -> draft_pb2.DraftServiceDescribeResponse:  # noqa: N802
        return draft_pb2.DraftServiceDescribeResponse(worker_id="flood", method="draft_model", model="flood")

    async def Grow(self, incoming: AsyncIterator[draft_pb2.DraftFrame], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.links += 1
        try:
            frame = await anext(incoming)
            growth = draft_pb2.GrowthFrame.Growth(
                request_id=frame.opens[0].request_id, base_position=0, first_node_id=1, nodes=packed([7], [0])
            )
            heavy = Heavy(draft_pb2.GrowthFrame(growths=[growth], applied=1), self._size)
            while True:
                self.sent += self._size
                yield heavy
        finally:
            self.closed += 1


@pytest.mark.parametrize(
    ("size", "all_mb"),
    [pytest.param(10**6, 1000, marks=pytest.mark.slow), (48 * 10**6, 200)],
    ids=["endless", "huge"],
)
async def test_gigabytes(size: int, all_mb: int, target: tuple[str, int]) -> None:
    """Below the limit of a frame, and far above it."""
    address, pid = target
    flood = Flood(size)
    link = TargetLink(address)
    await link.connect()
    expected, _ = await collect(link, submission("plain", max_tokens=TOKENS, plain=True))
    before = peaks(pid)
    async with lying(flood) as draft:
        number = 0
        async with asyncio.timeout(100):
            while flood.sent < all_mb * MEGABYTE or not flood.closed:
                number += 1
                tokens, _ = await collect(link, submission(str(number), max_tokens=TOKENS, drafts=[draft]))
                assert tokens == expected
    await link.close()
    grown = [(now - then) / MEGABYTE for then, now in zip(before, peaks(pid), strict=True)]
    assert max(grown) < ROOM_MB, f"{flood.sent / MEGABYTE:.0f} MB were sent over {flood.links} links"


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[str, int]]:
    """Its address and process id."""
    command = (sys.executable, "-m", "paceline_services.target", "--model", MODEL, "--speculative-config", DRAFTED)
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        while not (found := re.search(rb"ready on (\S+)", line := process.stderr.readline())):
            assert line, "the target ended before it was ready"
        yield found[1].decode(), process.pid
    finally:
        process.kill()
        process.communicate()


def peaks(pid: int) -> list[int]:
    """The most memory that the target's two processes ever took, in bytes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [_peak(each) for each in (pid, *map(int, children))]


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
