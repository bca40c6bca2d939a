"""From a server's command to its first token over HTTP, and the most memory that its largest process takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from paceline.cli.deployment import free_ports
from paceline.cli.process_tree import process_and_descendants
from paceline.launcher import die_with_parent
from paceline_lab.peers.peer_process import START_S, PeerError

HOST = "127.0.0.1"
NAME = "measured"
"""What clients call the model."""
POLL_S = 0.02


class Start(NamedTuple):
    """One start of a server."""

    first_token_s: float
    peak_bytes: int
    """Of the process that took most, since it began."""


def our_start(model: Path, threads: int, slots: int) -> Start:
    """Of `paceline serve`. Raises `PeerError`."""
    engine = f'{{"threads": {threads}, "slots": {slots}}}'
    argv = [
        sys.executable,
        "-c",
        "from paceline.cli import main; main()",
        "serve",
        str(model),
        "--served-model-name",
        NAME,
    ]
    return _measured([*argv, "--engine-config", engine])


def llama_server_start(program: Path, model: Path, threads: int, slots: int) -> Start:
    """Of llama.cpp's server, with its defaults. Raises `PeerError`."""
    argv = [str(program), "--model", str(model), "--alias", NAME, "--host", HOST, "--no-webui"]
    return _measured([*argv, "--threads", str(threads), "--ctx-size", str(slots)])


def _measured(argv: Sequence[str]) -> Start:
    port, _ = free_ports(HOST, 0, 0)
    began = time.perf_counter()
    process = subprocess.Popen(
        die_with_parent([*argv, "--port", str(port)]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _first_token(port, process, began + START_S)
        seconds = time.perf_counter() - began
        return Start(seconds, max(map(_peak_bytes, process_and_descendants(process.pid))))
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()


def _first_token(port: int, process: subprocess.Popen[bytes], ends: float) -> None:
    body = {"model": NAME, "prompt": "def area(", "max_tokens": 1, "temperature": 0}
    with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=START_S) as client:
        while time.perf_counter() < ends and process.poll() is None:
            try:
                if client.post("/v1/completions", json=body).is_success:
                    return
            except httpx.TransportError:  # it does not listen yet
                pass
            time.sleep(POLL_S)
    raise PeerError(f"{' '.join(map(str, process.args[-8:]))} gave no token")  # type: ignore[index]


def _peak_bytes(pid: int) -> int:
    """VmHWM; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
