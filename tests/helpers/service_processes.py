"""Services as processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

READY = re.compile(r"ready on (\S+)")


class ServiceProcess:
    """`python -m paceline_services.KIND`. Its stderr is a pipe."""

    def __init__(self, kind: str, *arguments: str) -> None:
        self.arguments = arguments
        command = [sys.executable, "-m", f"paceline_services.{kind}", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.address = ""
        """Where it listens; set by `wait_ready`."""
        self.log = ""
        """Its stderr until it was ready."""

    def wait_ready(self) -> None:
        assert self.process.stderr is not None
        for line in iter(self.process.stderr.readline, ""):
            self.log += line
            if found := READY.search(line):
                self.address = found[1]
                return
        raise AssertionError(self.log)

    @property
    def metrics_url(self) -> str:
        [url] = re.findall(r"metrics on (\S+)", self.log)
        return str(url)

    def stop(self) -> None:
        """Kill it, and wait until its model process has ended too."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def service_process(kind: str, *arguments: str) -> Iterator[ServiceProcess]:
    """A service that is ready."""
    service = ServiceProcess(kind, *arguments)
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


def model_process_of(kind: str, parent: int | None = None) -> int:
    """Return the id of the model process whose service is the process `parent`; default: this process."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent or os.getpid())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    [line] = [line for line in lines if re.search(rf"{kind}\.(engine|speculator)_process", line)]
    return int(line.split()[0])
