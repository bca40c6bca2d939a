"""The pipe between a service and its compute."""

import asyncio
import time

import pytest

from paceline.ipc.model_process import ModelProcessDiedError, ModelProcessStartError, model_process
from paceline.ipc.pipe import MessageDecoder, PipeClosedError, pack
from tests.helpers.pipes import Note, joined, pipes


def test_messages_come_whole_however_their_bytes_do() -> None:
    messages = [Note("a"), Note("b" * 100_000), Note("")]
    stream = b"".join(map(pack, messages))
    for step in (1, 7, 4096, len(stream)):
        unpacker = MessageDecoder()
        got = [m for i in range(0, len(stream), step) for m in unpacker.feed(stream[i : i + step])]
        assert got == messages


def test_each_kind_goes_to_who_asked_for_it() -> None:
    with pipes() as (here, there):
        notes: list[Note] = []
        numbers: list[int] = []
        there.on(Note, notes.append)
        there.on(int, numbers.append)
        for message in (1, Note("x"), 2):
            here.send(message)
        there.receive(1.0)
        assert (notes, numbers) == ([Note("x")], [1, 2])


def test_receiving_waits_as_long_as_it_is_told() -> None:
    with pipes() as (here, there):
        there.receive(0.0)
        there.receive(0.01)
        here.send(Note("x"))
        assert there.receive_first(Note) == Note("x")


def test_both_ends_notice_the_end() -> None:
    with pipes() as (here, there):
        there.close()
        with pytest.raises(PipeClosedError):
            here.receive(None)
        with pytest.raises(PipeClosedError):
            here.send(Note("x"))


async def test_the_event_loop_never_waits_for_a_slow_reader() -> None:
    """Far more than a socket holds is sent before anybody reads; it all arrives, in order."""
    async with joined() as (connection, pipe):
        for i in range(64):
            connection.send(Note(str(i) * 100_000))
        got: list[Note] = []
        pipe.on(Note, got.append)
        deadline = time.monotonic() + 20
        while len(got) < 64 and time.monotonic() < deadline:
            await asyncio.to_thread(pipe.receive, 0.05)
        assert [note.text[:2] for note in got] == [(str(i) * 2)[:2] for i in range(64)]


async def test_what_is_sent_to_nobody_is_forgotten() -> None:
    async with joined() as (connection, pipe):
        pipe.close()
        await connection.lost
        connection.send(Note("x"))


async def test_a_message_that_cannot_be_handled_ends_the_connection_and_says_why() -> None:
    async with joined() as (connection, pipe):
        connection.on(Note, lambda note: 1 / len(note.text))
        pipe.send(Note(""))
        with pytest.raises(ZeroDivisionError):
            await connection.lost
        with pytest.raises(PipeClosedError):
            await asyncio.to_thread(pipe.receive, None)


async def test_a_process_whose_message_cannot_be_handled_is_not_blamed() -> None:
    async with model_process("tests.helpers.begins", "yes") as compute:
        await compute.ready()
        compute.connection.on(Note, lambda note: 1 / len(note.text))
        compute.connection.send(Note(""))
        with pytest.raises(ZeroDivisionError):
            await compute.exited


async def test_a_process_that_cannot_begin_says_why() -> None:
    async with model_process("tests.helpers.begins", "no") as compute:
        with pytest.raises(ModelProcessStartError, match="it said no"):
            await compute.ready()


async def test_a_process_that_ends_before_it_is_ready() -> None:
    async with model_process("tests.helpers.begins", "die") as compute:
        with pytest.raises(ModelProcessDiedError, match="exit code 3"):
            await compute.ready()


async def test_a_process_lives_as_long_as_it_is_needed() -> None:
    async with model_process("tests.helpers.begins", "yes") as compute:
        assert await compute.ready() == "about it"
        assert not compute.exited.done()
    assert compute.process.returncode == 0
