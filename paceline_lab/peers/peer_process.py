"""An engine's process for the benchmark: one line per request, and stopped between requests.

Threads of a BLAS or OpenMP runtime spin for a while after each call. So a process gets SIGSTOP whenever it has no
request: only the measured engine uses a core. Its children go on: a stopped link to a draft worker is cut after five
seconds, and the next request would begin without drafts.
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
    """An engine did not start, did not respond, or refused a request."""


class PeerProcess:
    """A process with the protocol of `paceline_lab.peers.peer_worker`, stopped except while it responds."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`argv[0]` is an absolute path. The engine's output goes to `log`."""
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                die_with_parent(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C does not reach it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, setup: Mapping[str, Any]) -> list[str]:
        """Load the models; returns the available methods. Raises `PeerError`."""
        methods: list[str] = self._exchange(setup, START_S)["ready"]
        return methods

    def generate(self, request: Mapping[str, Any]) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and seconds. Raises `PeerError`."""
        response = self._exchange(request, ANSWER_S)
        return response["tokens"], response["seconds"]

    def figures(self) -> dict[str, float]:
        """What else the engine has measured, by name. Raises `PeerError`."""
        return dict(self._exchange({"figures": True}, ANSWER_S)["figures"])

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _exchange(self, line: Mapping[str, Any], most_s: float) -> dict[str, Any]:
        requests, responses = self._process.stdin, self._process.stdout
        assert requests is not None
        assert responses is not None
        self._signal(signal.SIGCONT)
        try:
            requests.write(json.dumps(line).encode() + b"\n")
            requests.flush()
            if not select.select([responses], [], [], most_s)[0]:
                self._kill()  # a late response would be taken for the next request's
                raise PeerError(f"{self.name} gave no answer in {most_s:.0f} s")
            response = json.loads(responses.readline() or b"null")
        except OSError as error:
            raise PeerError(f"{self.name} is gone: see {os.path.relpath(self._log)}") from error
        finally:
            self._signal(signal.SIGSTOP)
        if response is None:
            raise PeerError(f"{self.name} is gone: see {os.path.relpath(self._log)}")
        if "error" in response:
            raise PeerError(f"{self.name}: {response['error']}")
        return dict(response)

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing once it has ended

    def _kill(self) -> None:
        """Its children, too."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
