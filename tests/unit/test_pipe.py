"""The pipe between a service and its model process."""

import asyncio
import time

import pytest

from paceline.ipc.model_process import ModelProcessDiedError, model_process
from paceline.ipc.pipe import MessageDecoder, PipeClosedError, pack
from paceline.launcher import StartError
from tests.helpers.pipes import Note, joined, pipes

MODULE = "tests.helpers.fake_model_process"


@pytest.mark.parametrize("chunk", [1, 7, 4096, 2**20])
def test_messages_are_decoded_from_chunks_of_any_size(chunk: int) -> None:
    messages = [Note("a"), Note("b" * 100_000), Note("")]
    stream = b"".join(map(pack, messages))
    decoder = MessageDecoder()
    assert [m for i in range(0, len(stream), chunk) for m in decoder.feed(stream[i : i + chunk])] == messages


def test_messages_are_dispatched_by_type() -> None:
    with pipes() as (here, there):
        notes: list[Note] = []
        numbers: list[int] = []
        there.on(Note, notes.append)
        there.on(int, numbers.append)
        there.receive(0.0)
        there.receive(0.01)
        for message in (1, Note("x"), 2):
            here.send(message)
        there.receive(1.0)
        assert (notes, numbers) == ([Note("x")], [1, 2])


def test_the_first_message_is_awaited() -> None:
    with pipes() as (here, there):
        here.send(Note("x"))
        assert there.receive_first(Note) == Note("x")


def test_both_ends_detect_a_closed_pipe() -> None:
    with pipes() as (here, there):
        there.close()
        with pytest.raises(PipeClosedError):
            here.receive(None)
        with pytest.raises(PipeClosedError):
            here.send(Note("x"))


async def test_the_event_loop_does_not_wait_for_a_slow_reader() -> None:
    """It sends far more than a socket buffers before the other end reads. Everything arrives in order."""
    async with joined() as (connection, pipe):
        for i in range(64):
            connection.send(Note(str(i) * 100_000))
        received: list[Note] = []
        pipe.on(Note, received.append)
        deadline = time.monotonic() + 20
        while len(received) < 64 and time.monotonic() < deadline:
            await asyncio.to_thread(pipe.receive, 0.05)
        assert [note.text[:2] for note in received] == [(str(i) * 2)[:2] for i in range(64)]


async def test_messages_to_a_closed_pipe_are_discarded() -> None:
    async with joined() as (connection, pipe):
        pipe.close()
        await connection.lost
        connection.send(Note("x"))


async def test_an_error_in_a_handler_closes_the_pipe() -> None:
    async with joined() as (connection, pipe):
        connection.on(Note, lambda note: 1 / len(note.text))
        pipe.send(Note(""))
        with pytest.raises(ZeroDivisionError):
            await connection.lost
        with pytest.raises(PipeClosedError):
            await asyncio.to_thread(pipe.receive, None)


async def test_an_error_in_a_handler_is_not_reported_as_the_death_of_the_process() -> None:
    async with model_process(MODULE, "echo") as process:
        await process.ready
        process.connection.on(Note, lambda note: 1 / len(note.text))
        process.connection.send(Note(""))
        with pytest.raises(ZeroDivisionError):
            await process.exited


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [("fail", StartError, "no such model"), ("exit", ModelProcessDiedError, "exit code 3")],
)
async def test_a_process_that_does_not_become_ready(options: str, error: type[Exception], text: str) -> None:
    async with model_process(MODULE, options) as process:
        with pytest.raises(error, match=text):
            await process.ready


async def test_a_process_exits_at_the_end_of_its_context() -> None:
    async with model_process(MODULE, "echo") as process:
        assert await process.ready == "facts"
        assert not process.exited.done()
    assert process.process.returncode == 0
