"""Frames that wait are merged into one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.v1 import target_pb2
from paceline.wire.link_errors import Congested, WireError
from paceline.wire.outbox import RESUME_DIVISOR, Outbox

Frame = target_pb2.DeltaFrame


def frame(name: str, **load: int) -> Frame:
    return Frame(deltas=[Frame.Delta(request_id=name)], load=Frame.Load(**load))


def names(frame: Frame) -> list[str]:
    return [delta.request_id for delta in frame.deltas]


async def test_waiting_frames_are_merged_in_order() -> None:
    """A newer load replaces an older one, also by its zeros, which MergeFrom ignores. Arguments stay as they are."""
    outbox = Outbox(Frame, 1000)
    waiting = asyncio.ensure_future(anext(outbox))
    await asyncio.sleep(0)
    assert not waiting.done()
    first = frame("a", running=7, waiting=2)
    outbox.put(first)
    outbox.put(frame("b", running=0, waiting=3))
    merged = await waiting
    assert names(merged) == ["a", "b"]
    assert (merged.load.running, merged.load.waiting) == (0, 3)
    assert names(first) == ["a"]
    outbox.put(frame("c"))
    assert names(await anext(outbox)) == ["c"]


async def test_a_peer_that_does_not_read_congests_the_link() -> None:
    outbox = Outbox(Frame, 20)
    outbox.put(frame("a"))
    with pytest.raises(Congested, match="over 20 bytes"):
        outbox.put(frame("b" * 20))


async def test_closing_sends_the_waiting_frame() -> None:
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a"))
    outbox.close()
    outbox.put(frame("too late"))
    assert [names(each) async for each in outbox] == [["a"]]


async def test_an_error_discards_the_waiting_frame() -> None:
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a"))
    outbox.close(WireError("broken"))
    outbox.close()
    with pytest.raises(WireError, match="broken"):
        await anext(outbox)


@pytest.mark.parametrize("closed", [False, True], ids=["read", "closed"])
async def test_an_outbox_has_capacity_again(closed: bool) -> None:
    outbox = Outbox(Frame, 50 * RESUME_DIVISOR)
    outbox.put(frame("a" * 20))
    await outbox.wait_for_capacity()
    outbox.put(frame("a" * 30))
    waiting = [asyncio.create_task(outbox.wait_for_capacity()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    if closed:
        outbox.close()
    else:
        await anext(outbox)
    await asyncio.gather(*waiting, outbox.wait_for_capacity())


async def test_replaced_messages_do_not_count() -> None:
    outbox = Outbox(Frame, 100)
    for running in range(100):
        outbox.put(Frame(load=Frame.Load(running=running)))
    assert (await anext(outbox)).load.running == 99


async def test_the_waiting_frame_is_not_measured_at_each_put() -> None:
    """That would take quadratic time."""
    measured = 0

    class Counted:
        """A frame of this size, or of the sum of the merged ones."""

        def __init__(self, size: int = 0) -> None:
            self._size = size

        def ListFields(self) -> list[Any]:  # noqa: N802
            return []

        def MergeFrom(self, other: Counted) -> None:  # noqa: N802
            self._size += other._size

        def ByteSize(self) -> int:  # noqa: N802
            nonlocal measured
            measured += self._size
            return self._size

    outbox: Any = Outbox(Counted, 10_000)  # type: ignore[type-var]
    for _ in range(100):
        outbox.put(Counted(100))
    assert measured == 10_000
