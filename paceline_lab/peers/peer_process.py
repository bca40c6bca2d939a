"""An engine's process as the benchmark sees it: asked by a line, stopped while others are asked.

Threads of a BLAS or an OpenMP runtime spin for a while after each call, in case there is another. So a process gets
SIGSTOP whenever it owes no answer: nothing but the engine that is measured uses a core.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.launcher import die_with_parent

START_S = 900.0
"""vLLM compiles for one or two minutes where it finds nothing in its cache."""
ANSWER_S = 600.0


class PeerError(Exception):
    """An engine did not start, did not answer, or said that it cannot."""


class PeerProcess:
    """One process that speaks as `paceline_lab.peers.peer_worker` does. It is stopped except in `start` and `ask`."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`argv[0]` is an absolute path. What the engine prints goes to `log`."""
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                die_with_parent(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is ours; signals reach what an engine starts, too
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, setup: Mapping[str, Any]) -> list[str]:
        """Load; the methods that it has. Raises `PeerError`."""
        methods: list[str] = self._exchange(setup, START_S)["ready"]
        return methods

    def generate(self, wish: Mapping[str, Any]) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and seconds. Raises `PeerError`."""
        answer = self._exchange(wish, ANSWER_S)
        return answer["tokens"], answer["seconds"]

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _exchange(self, line: Mapping[str, Any], most_s: float) -> dict[str, Any]:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answers is not None
        self._signal(signal.SIGCONT)
        try:
            asked.write(json.dumps(line).encode() + b"\n")
            asked.flush()
            if not select.select([answers], [], [], most_s)[0]:
                self._signal(signal.SIGKILL)  # its answer would be taken for that to the next question
                raise PeerError(f"{self.name} gave no answer in {most_s:.0f} s")
            answer = json.loads(answers.readline() or b"null")
        except OSError as error:
            raise PeerError(f"{self.name} is gone: see {self._log}") from error
        finally:
            self._signal(signal.SIGSTOP)
        if answer is None:
            raise PeerError(f"{self.name} is gone: see {self._log}")
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return dict(answer)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
