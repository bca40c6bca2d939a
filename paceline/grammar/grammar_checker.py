"""Compiles a grammar in a process with limits, before a target compiles it. Needs no torch.

llguidance's own limits do not bound the cost of compiling: a schema of sixty bytes, `"multipleOf": 999983`, takes 8 s
and 370 MB. So the gateway compiles each grammar in a process that ends when it exceeds its time or memory, with a
vocabulary of single bytes: the cost hardly depends on the vocabulary. Ids of special tokens become ids of single bytes.
The process is a fork of one that has imported everything, which takes milliseconds.

    checker = GrammarChecker()
    left_out = await checker.check(grammar)

`python -m paceline.grammar.grammar_checker SECONDS BYTES` is the process that forks: it reads a grammar as JSON on each
line, and writes as JSON its error, empty if it has none, and the keywords that are left out of its schemas.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TypeAlias

from llguidance import LLMatcher, LLTokenizer

from paceline.grammar.json_schema import GrammarError, unknown_keywords
from paceline.grammar.lark import LIMITS, PREAMBLE, faulty_part, limit_of, short_error, with_ids_below
from paceline.launcher import die_with_parent

TIME_MS = 250
"""CPU time of one grammar. Usual ones take some milliseconds."""
MEMORY_BYTES = 128 * 2**20
"""Address space of one grammar."""
PROCESSES = 2
LONGEST_LINE = 2**20
BYTES = 256
Findings: TypeAlias = tuple[str, list[str]]
"""The error of a grammar, empty if it has none, and the keywords that are left out of its schemas."""


class GrammarChecker:
    """A pool of such processes, started on first use. Use it from one event loop."""

    def __init__(self, time_s: float = TIME_MS / 1e3, memory_bytes: int = MEMORY_BYTES) -> None:
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._processes = [_Process(time_s, memory_bytes) for _ in range(PROCESSES)]
        for each in self._processes:
            self._idle.put_nowait(each)

    async def check(self, grammar: str) -> list[str]:
        """The keywords that are left out of schemas with `strict: false`.

        Raises `GrammarError` if the grammar cannot be compiled, costs too much, or allows no text.
        """
        process = await self._idle.get()
        try:
            error, left_out = await process.check(grammar)
        finally:
            self._idle.put_nowait(process)
        if error:
            raise GrammarError(error)
        return left_out

    async def close(self) -> None:
        """End the processes. Calls of `check` that still wait are not finished."""
        for each in self._processes:
            await each.end()


class _Process:
    def __init__(self, time_s: float, memory_bytes: int) -> None:
        self._time_s, self._memory_bytes = time_s, memory_bytes
        self._process: Process | None = None

    async def check(self, grammar: str) -> Findings:
        try:
            if self._process is None:
                limits = str(self._time_s), str(self._memory_bytes)
                command = die_with_parent([sys.executable, "-m", "paceline.grammar.grammar_checker", *limits])
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE
                )
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(grammar).encode() + b"\n")
            if line := await stdout.readline():
                error, left_out = json.loads(line)
                return str(error), left_out
        except asyncio.CancelledError:
            await self.end()
            raise
        await self.end()
        return "the process that compiles grammars has ended: try again", []

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.communicate()


def complaint(grammar: str) -> str:
    """The error of a grammar; empty: none."""
    return examined(grammar)[0]


def examined(grammar: str) -> Findings:
    parser = LLMatcher(_VOCABULARY, PREAMBLE + with_ids_below(BYTES, grammar), log_level=0, limits=LIMITS)
    if error := parser.get_error():
        part = faulty_part(error, grammar)
        return f"{part}: {short_error(error)}" if part else short_error(error), []
    mask = parser.compute_bitmask()
    if limit := limit_of(parser):
        return limit, []
    if not any(mask[: BYTES // 8]):
        return "only the empty text fits it" if parser.is_accepting() else "no text fits it", []
    return "", sorted({each for warning in parser.get_grammar_warnings() for each in unknown_keywords(warning)})


def main() -> None:
    """Check grammars until the input ends."""
    time_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    slow = f"compiling it takes more than {1e3 * time_s:.0f} ms: make it simpler"
    large = f"compiling it takes more than {memory_bytes >> 20} MB: make it simpler"
    for line in sys.stdin:
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            _limit(time_s, memory_bytes)
            os.write(theirs, json.dumps(examined(json.loads(line))).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            result = pipe.read().decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            result = json.dumps((slow if code == -signal.SIGPROF else large, []))
        sys.stdout.write(result + "\n")
        sys.stdout.flush()


def _limit(time_s: float, memory_bytes: int) -> None:
    """Limit this process: a signal ends it after `time_s` of CPU time, and further memory is refused."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, time_s)


_VOCABULARY = LLTokenizer("byte")

if __name__ == "__main__":
    main()
