"""A draft sends as much as it can: the target's memory hardly grows, the link is closed, and no token changes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import draft_pb2
from tests.failure.test_draft_links import Liar, lying, packed
from tests.helpers.service_processes import service_process
from tests.helpers.targets import collect, link_to, submission

pytestmark = pytest.mark.alone

MODEL = "table:1000"
DRAFTED = '{"method": "draft_model", "model": "table:1000", "row_budget": false}'
TOKENS = 1500
MEGABYTE = 10**6
MARGIN_MB = 150
"""How much a target's process may grow: a few frames in flight, and decoding them."""


class Heavy:
    """A frame with so many more bytes, in an unknown field."""

    def __init__(self, frame: draft_pb2.GrowthFrame, size: int) -> None:
        self._bytes = frame.SerializeToString() + b"\x7a" + _varint(size) + bytes(size)

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self._bytes


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


class Flood(Liar):
    """Answers the first frame with an endless stream of frames of this size, each with one node."""

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
async def test_a_flood_of_large_frames(size: int, all_mb: int) -> None:
    """Below the size limit of a frame, and far above it."""
    flood = Flood(size)
    with service_process("target", "--model", MODEL, "--speculative-config", DRAFTED) as running:
        async with link_to(running.address) as link, lying(flood) as draft:
            expected, _ = await collect(link, submission("plain", max_tokens=TOKENS, plain=True))
            before = peaks(running.process.pid)
            number = 0
            async with asyncio.timeout(100):
                while flood.sent < all_mb * MEGABYTE or not flood.closed:
                    number += 1
                    tokens, _ = await collect(link, submission(str(number), max_tokens=TOKENS, drafts=[draft]))
                    assert tokens == expected
            grown = [(now - then) / MEGABYTE for then, now in zip(before, peaks(running.process.pid), strict=True)]
            assert max(grown) < MARGIN_MB, f"{flood.sent / MEGABYTE:.0f} MB were sent over {flood.links} links"


def peaks(pid: int) -> list[int]:
    """Return the peak memory of the target's two processes, in bytes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [_peak(each) for each in (pid, *map(int, children))]


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
