"""Compiles a grammar where it can be stopped, to learn whether it may be compiled elsewhere. Needs no torch.

llguidance's own limits do not bound what compiling costs: a schema of sixty bytes, `"multipleOf": 999983`, takes 8 s
and 370 MB. So who lets grammars in compiles each in a process that ends when it has used up its time or its memory,
with a vocabulary of single bytes: what costs much does so whatever the vocabulary.

    checker = Checker()
    await checker.check(grammar)

`python -m paceline.grammar.checker SECONDS BYTES` is that process: a line is a grammar as JSON, and its answer what is
wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from paceline.grammar.writing import LIMITS, PREAMBLE, GrammarError, limit_of, plainly
from paceline.launcher import dependent

TIME_MS = 500
"""CPU time of one grammar. Those that say what an answer must be take some milliseconds."""
MEMORY_BYTES = 128 * 2**20
"""Of one grammar, address space."""
PROCESSES = 2
LONGEST_LINE = 2**20
BYTE_MASK = 256 // 8


class Checker:
    """Some such processes, started when they are needed. Use it from one event loop."""

    def __init__(self, time_s: float = TIME_MS / 1e3, memory_bytes: int = MEMORY_BYTES) -> None:
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._processes = [_Process(time_s, memory_bytes) for _ in range(PROCESSES)]
        for each in self._processes:
            self._idle.put_nowait(each)

    async def check(self, grammar: str) -> None:
        """Raises `GrammarError` if it cannot be compiled, costs too much, or leaves nothing to say."""
        process = await self._idle.get()
        try:
            error = await process.ask(grammar)
        finally:
            self._idle.put_nowait(process)
        if error:
            raise GrammarError(error)

    async def close(self) -> None:
        """Whoever still waits gets no answer."""
        for each in self._processes:
            await each.end()


class _Process:
    def __init__(self, time_s: float, memory_bytes: int) -> None:
        self._time_s, self._memory_bytes = time_s, memory_bytes
        self._process: Process | None = None

    async def ask(self, grammar: str) -> str:
        """What is wrong with it; empty: nothing."""
        try:
            if self._process is None:
                limits = str(self._time_s), str(self._memory_bytes)
                command = dependent([sys.executable, "-m", "paceline.grammar.checker", *limits])
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE
                )
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(grammar).encode() + b"\n")
            if answer := await stdout.readline():
                return str(json.loads(answer))
        except asyncio.CancelledError:
            await self.end()
            raise
        code = await self._end()
        if code == -signal.SIGPROF:
            return f"compiling it takes more than {self._time_s:g} s: make it simpler"
        return f"compiling it takes more than {self._memory_bytes >> 20} MB: make it simpler"

    async def end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._process is not None:
            await self._end()

    async def _end(self) -> int:
        """Of a process that has ended, or is about to: its exit code."""
        process, self._process = self._process, None
        assert process is not None
        await process.communicate()
        assert process.returncode is not None
        return process.returncode


def complaint(grammar: str) -> str:
    """What is wrong with a grammar; empty: nothing."""
    parser = LLMatcher(_BYTES, PREAMBLE + grammar, log_level=0, limits=LIMITS)
    if error := parser.get_error():
        return plainly(error)
    mask = parser.compute_bitmask()
    if limit := limit_of(parser):
        return limit
    if any(mask[:BYTE_MASK]):
        return ""
    return "only the empty text fits it" if parser.is_accepting() else "no text fits it"


def main() -> None:
    """Ends with its input."""
    time_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, time_s)  # whoever does not stop it in time is ended by its signal
        answer = complaint(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


_BYTES = LLTokenizer("byte")

if __name__ == "__main__":
    main()
