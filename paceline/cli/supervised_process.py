"""Keeps one program running."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.launcher import COULD_NOT_START, Backoff, StartError, die_with_parent

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
OUTPUT_S = 1.0
CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Program:
    """`argv[0]` is an absolute path. `stop_s`: how long it may take to end after SIGTERM."""

    name: str
    argv: Sequence[str]
    stop_s: float = 10.0


class SupervisedProcess:
    """Starts a program, and starts it again whenever it ends, until `stop`.

    The program has a process group of its own, so Ctrl-C in a terminal does not reach it. `log_line` is called with
    each line that it writes.
    """

    def __init__(self, program: Program, log_line: Callable[[str], None], backoff: Backoff | None = None) -> None:
        self.program = program
        self.was_ready = False
        """Whether it was ready once. Only before that can its end make `run` fail."""
        self._log_line = log_line
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._last_line = ""

    @property
    def pid(self) -> int | None:
        """None: not running now."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> None:
        """Return after `stop`. Raises `StartError` if the program cannot start or ends too often before it is ready."""
        starts = 0
        while not self._stopping.is_set():
            starts += 1
            began = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            self._check_start(code, starts)
            wait_s = self._backoff.after(time.monotonic() - began)
            log.warning("started again in %.1f s: %s", wait_s, self._end(code))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    def stop(self) -> None:
        """Send SIGTERM, and do not start it again. `run` returns when it has ended."""
        self._stopping.set()
        if (pid := self.pid) is not None:
            _send(os.kill, pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill it now, with every process it started."""
        self._stopping.set()
        self.crash()

    def crash(self) -> bool:
        """Kill it now, with every process it started, and start it again. Return whether it was running."""
        if (pid := self.pid) is None:
            return False
        _send(os.killpg, pid, signal.SIGKILL)
        return True

    async def _run_once(self) -> int:
        """Run the program once, and return its exit code."""
        # A pipe of our own: asyncio's would make `wait` wait for grandchildren that hold the other end.
        ours, theirs = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(self.program.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        reading = asyncio.create_task(self._read_output(ours), name=f"output of {self.program.name}")
        if self._stopping.is_set():  # `stop` was called while it was being started
            self.stop()
        code = await self._process.wait()
        _send(os.killpg, self._process.pid, signal.SIGKILL)  # processes that it left behind
        await asyncio.wait([reading], timeout=OUTPUT_S)
        reading.cancel()
        return code

    async def _read_output(self, pipe: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb"))
        rest = b""
        try:
            while chunk := await reader.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take_line(line)
            if rest:
                self._take_line(rest)
        finally:
            transport.close()

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._last_line = text.strip() or self._last_line
        self._log_line(text)

    def _check_start(self, code: int, starts: int) -> None:
        """Raises `StartError` if starting it again would not help."""
        if self.was_ready:
            return
        if code == COULD_NOT_START:
            raise StartError(f"{self.program.name} could not start: {self._last_line}")
        if starts >= MAX_FAILED_STARTS:
            raise StartError(f"gave up after {starts} starts: {self._end(code)}")

    def _end(self, code: int) -> str:
        """Describes how the program ended."""
        if code < 0:
            return f"{self.program.name} was ended by {signal.Signals(-code).name}"
        return f"{self.program.name} ended with exit code {code}: {self._last_line}"


def _send(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        send(pid, number)
