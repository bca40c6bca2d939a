"""One program that is kept running."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.launcher import die_with_parent

log = logging.getLogger(__name__)

COULD_NOT_START = 2
"""The exit code of a service that was told something impossible: starting it again would not help."""
MOST_FALSE_STARTS = 3
LAST_WORDS_S = 1.0
CHUNK = 2**16


class StartError(Exception):
    """Something cannot start; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Program:
    """`argv[0]` is an absolute path. `stop_s`: how long it may take to end once it was asked to."""

    name: str
    argv: Sequence[str]
    stop_s: float = 10.0


@dataclass(slots=True)
class Backoff:
    """How long to wait before starting a program again: doubling, until it has stayed up for a while."""

    shortest_s: float = 0.2
    longest_s: float = 10.0
    healthy_s: float = 30.0
    _next_s: float = 0.0

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s` seconds."""
        wait_s = self.shortest_s if lived_s >= self.healthy_s else max(self._next_s, self.shortest_s)
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s


class SupervisedProcess:
    """Starts a program, and starts it again whenever it ends, until `stop`.

    It lives in a process group of its own, so Ctrl-C in a terminal does not reach it. `say` gets its output,
    line by line.
    """

    def __init__(self, program: Program, say: Callable[[str], None], backoff: Backoff | None = None) -> None:
        self.program = program
        self.was_ready = False
        """Whether it was up once. Until then, an end may be a reason to give up; from then on it never is."""
        self._say = say
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._last_line = ""

    @property
    def pid(self) -> int | None:
        """None: not running just now."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> None:
        """Return after `stop`. Raises `ServiceStartError` if the program cannot be started or gets nowhere."""
        starts = 0
        while not self._stopping.is_set():
            starts += 1
            born = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                return
            self._give_up_if_hopeless(code, starts)
            wait_s = self._backoff.after(time.monotonic() - born)
            log.warning("started again in %.1f s: %s", wait_s, self._end(code))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)

    def stop(self) -> None:
        """Ask it to end, and do not start it again. `run` returns when it has."""
        self._stopping.set()
        if (pid := self.pid) is not None:
            _send(os.kill, pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with everything it started."""
        self._stopping.set()
        if (pid := self.pid) is not None:
            _send(os.killpg, pid, signal.SIGKILL)

    async def _run_once(self) -> int:
        """One life of the program, from start to exit code."""
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
        listening = asyncio.create_task(self._listen(ours), name=f"output of {self.program.name}")
        if self._stopping.is_set():  # asked to while it was being started
            self.stop()
        code = await self._process.wait()
        _send(os.killpg, self._process.pid, signal.SIGKILL)  # what it started and left behind
        await asyncio.wait([listening], timeout=LAST_WORDS_S)
        listening.cancel()
        return code

    async def _listen(self, pipe: int) -> None:
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
        self._say(text)

    def _give_up_if_hopeless(self, code: int, starts: int) -> None:
        if self.was_ready:
            return
        if code == COULD_NOT_START:
            raise StartError(f"{self.program.name} could not start: {self._last_line}")
        if starts >= MOST_FALSE_STARTS:
            raise StartError(f"gave up after {starts} starts: {self._end(code)}")

    def _end(self, code: int) -> str:
        """How a life ended."""
        if code < 0:
            return f"{self.program.name} was ended by {signal.Signals(-code).name}"
        return f"{self.program.name} ended with exit code {code}: {self._last_line}"


def _send(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it ended a moment ago
        send(pid, number)
