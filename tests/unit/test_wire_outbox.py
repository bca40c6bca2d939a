"""What waits on a link leaves as one frame."""

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


async def test_what_waits_is_merged_in_order() -> None:
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a"))
    outbox.put(frame("b"))
    assert names(await anext(outbox)) == ["a", "b"]
    outbox.put(frame("c"))
    assert names(await anext(outbox)) == ["c"]
    assert outbox.frames_sent == 2


async def test_the_newest_value_counts_even_if_it_is_zero() -> None:
    """Protobuf's own merge keeps an old 7 where the new message says 0."""
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a", running=7, waiting=2))
    outbox.put(frame("b", running=0, waiting=3))
    merged = await anext(outbox)
    assert (merged.load.running, merged.load.waiting) == (0, 3)


async def test_putting_does_not_change_what_was_put() -> None:
    outbox = Outbox(Frame, 1000)
    first = frame("a")
    outbox.put(first)
    outbox.put(frame("b"))
    assert names(first) == ["a"]


async def test_waits_for_something_to_send() -> None:
    outbox = Outbox(Frame, 1000)
    waiting = asyncio.ensure_future(anext(outbox))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(frame("a"))
    assert names(await waiting) == ["a"]


async def test_a_peer_that_does_not_read_is_noticed() -> None:
    outbox = Outbox(Frame, 20)
    outbox.put(frame("a"))
    with pytest.raises(Congested, match="over 20 bytes"):
        outbox.put(frame("b" * 20))


async def test_closing_sends_what_waits_first() -> None:
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a"))
    outbox.close()
    outbox.put(frame("too late"))
    assert [names(each) async for each in outbox] == [["a"]]


async def test_an_error_does_not_wait() -> None:
    outbox = Outbox(Frame, 1000)
    outbox.put(frame("a"))
    outbox.close(WireError("broken"))
    outbox.close()
    with pytest.raises(WireError, match="broken"):
        await anext(outbox)


async def test_there_is_room_until_a_part_of_a_frame_waits() -> None:
    outbox = Outbox(Frame, 50 * RESUME_DIVISOR)
    outbox.put(frame("a" * 20))
    await outbox.wait_for_capacity()
    outbox.put(frame("a" * 30))
    waiting = [asyncio.create_task(outbox.wait_for_capacity()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await anext(outbox)
    await asyncio.gather(*waiting)


async def test_nobody_waits_for_room_in_a_closed_outbox() -> None:
    outbox = Outbox(Frame, 50 * RESUME_DIVISOR)
    outbox.put(frame("a" * 60))
    waiting = asyncio.create_task(outbox.wait_for_capacity())
    await asyncio.sleep(0)
    outbox.close()
    await waiting
    await outbox.wait_for_capacity()


async def test_what_was_replaced_does_not_count() -> None:
    outbox = Outbox(Frame, 100)
    for running in range(100):
        outbox.put(Frame(load=Frame.Load(running=running)))
    assert (await anext(outbox)).load.running == 99


async def test_what_waits_is_not_measured_again() -> None:
    """A frame of many requests once took a time that grew with their square."""
    measured = 0

    class Counted:
        """A frame of a hundred bytes, or of as many as were put."""

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
