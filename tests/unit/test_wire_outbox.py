"""What waits on a link leaves as one frame."""

import asyncio

import pytest

from paceline.v1 import target_pb2
from paceline.wire.errors import Congested, WireError
from paceline.wire.outbox import Outbox

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
    assert outbox.taken == 2


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
