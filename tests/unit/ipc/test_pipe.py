"""The pipe between a service and its model process, and that process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import NamedTuple

import pytest

from paceline.ipc import gc_heap
from paceline.ipc import model_process as model_processes
from paceline.ipc.model_process import ModelProcessDiedError, model_process
from paceline.ipc.pipe import MessageDecoder, PipeClosedError, pack
from paceline.launcher import StartError
from tests.helpers.pipes import Note, joined, pipes

MODULE = "tests.unit.ipc.fake_model_process"


@pytest.mark.parametrize("chunk", [1, 7, 4096, 2**20])
def test_messages_are_decoded_from_chunks_of_any_size(chunk: int) -> None:
    messages = [Note("a"), Note("b" * 100_000), Note("")]
    stream = b"".join(map(pack, messages))
    decoder = MessageDecoder()
    assert [m for i in range(0, len(stream), chunk) for m in decoder.feed(stream[i : i + chunk])] == messages


def test_messages_are_dispatched_by_type() -> None:
    with pipes() as (here, there):
        here.send(Note("first"))
        assert there.receive_first(Note) == Note("first")
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


def test_one_receive_dispatches_all_that_has_arrived() -> None:
    """However much that is: more here than one read of a socket returns."""
    with pipes() as (here, there):
        notes = [Note(letter * 30_000) for letter in "abcd"]
        for note in notes:
            here.send(note)
        received: list[Note] = []
        there.on(Note, received.append)
        there.receive(0.0)
        assert received == notes


def test_named_tuples_travel_as_plain_ones_behind_their_names() -> None:
    """So no class is looked up by import, and two kinds may have the same fields."""

    class Left(NamedTuple):  # pickle itself refuses a class of a function
        number: int

    class Right(NamedTuple):
        number: int

    [plain] = MessageDecoder().feed(pack(Left(1)))
    assert (type(plain), plain) == (tuple, ("Left", 1))
    with pipes() as (here, there):
        lefts: list[Left] = []
        rights: list[Right] = []
        there.on(Left, lefts.append)
        there.on(Right, rights.append)
        for message in (Right(1), Left(2), Right(3)):
            here.send(message)
        there.receive(1.0)
        assert ([each.number for each in lefts], [each.number for each in rights]) == ([2], [1, 3])


def test_both_ends_detect_a_closed_pipe() -> None:
    with pipes() as (here, there):
        there.close()
        with pytest.raises(PipeClosedError):
            here.receive(None)
        with pytest.raises(PipeClosedError):
            here.send(Note("x"))


async def test_the_event_loop_does_not_wait_for_a_slow_reader() -> None:
    """It sends far more than a socket buffers before the other end reads. Everything arrives in order."""
    async with asyncio.timeout(20.0), joined() as (connection, pipe):
        for i in range(64):
            connection.send(Note(str(i) * 100_000))
        received: list[Note] = []
        pipe.on(Note, received.append)
        while len(received) < 64:
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
        assert await process.ready == "facts"
        assert not process.exited.done()
        process.connection.on(Note, lambda note: 1 / len(note.text))
        process.connection.send(Note(""))
        with pytest.raises(ZeroDivisionError):
            await process.exited
    assert process.process.returncode == 0


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_process_that_hangs_at_its_end_was_not_killed_by_others(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hangs:
        monkeypatch.setattr(model_processes, "EXIT_TIMEOUT_S", 0.1)
    async with model_process(MODULE, "hang" if hangs else "echo") as process:
        await process.ready
        if not hangs:
            process.process.kill()
        with pytest.raises(ModelProcessDiedError, match=f"exit code -{6 if hangs else 9}") as error:
            await process.exited
    assert error.value.killed == (not hangs)


async def test_a_process_that_an_abort_does_not_end_is_killed_and_not_by_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_processes, "EXIT_TIMEOUT_S", 0.1)
    async with asyncio.timeout(30.0), model_process(MODULE, "deaf") as process:
        await process.ready
        process.abort()
        with pytest.raises(ModelProcessDiedError, match="exit code -9") as error:
            await process.exited
    assert not error.value.killed


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [("fail", StartError, "no such model"), ("exit", ModelProcessDiedError, "exit code 3")],
)
async def test_a_process_that_does_not_become_ready(options: str, error: type[Exception], text: str) -> None:
    async with model_process(MODULE, options) as process:
        with pytest.raises(error, match=text):
            await process.ready


@pytest.mark.parametrize(("first", "collects", "freezes"), [("", True, False), ("freeze_gc_heap()", False, True)])
def test_the_objects_of_a_step_cause_no_collection(first: str, collects: bool, freezes: bool) -> None:
    program = f"""
import gc
from paceline.ipc.gc_heap import freeze_gc_heap

{first}
ran = []
gc.callbacks.append(lambda phase, info: ran.append(phase))
kept = [[] for _ in range({gc_heap.GEN0_THRESHOLD // 2})]
print(len(ran), gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    ran, frozen = map(int, done.stdout.split())
    assert (ran > 0, frozen > 0) == (collects, freezes)
