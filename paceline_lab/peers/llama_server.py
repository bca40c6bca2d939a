"""llama.cpp's server as a process of the benchmark, stopped except while it responds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from paceline.cli.deployment import free_ports
from paceline.launcher import die_with_parent
from paceline_lab.peers.peer_process import ANSWER_S, START_S, PeerError

HOST = "127.0.0.1"


class LlamaServer:
    """`llama-server` with one model and one way to draft. Prompts are token ids, and nothing of them is reused."""

    def __init__(
        self,
        programs: Path,
        model: Path,
        log: Path,
        threads: int,
        slots: int,
        context: int,
        options: Sequence[str] = (),
    ) -> None:
        """`slots`: requests at once; `context`: positions of each. `options`: more of the server's own."""
        self.name = f"llama-server {' '.join(options)}".strip()
        self._log, self._slots = log, slots
        port, _ = free_ports(HOST, 0, 0)
        argv = [str(programs / "llama-server"), "--model", str(model), "--host", HOST, "--port", str(port), *options]
        argv += ["--threads", str(threads), "--threads-batch", str(threads)]
        argv += ["--parallel", str(slots), "--ctx-size", str(slots * context), "--no-webui", "--no-warmup"]
        argv += ["--cache-ram", "0"]  # else it copies the last prompt's keys and values within the next request
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                die_with_parent(argv), stdout=output, stderr=output, start_new_session=True
            )
        self._client = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=ANSWER_S, trust_env=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Wait until it serves, and stop it. Raises `PeerError`."""
        ends = time.monotonic() + START_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise PeerError(f"{self.name} did not start: see {os.path.relpath(self._log)}")
            time.sleep(0.05)
        self._signal(signal.SIGSTOP)

    def generate(self, request: Mapping[str, Any]) -> tuple[list[list[int]], float]:
        """New tokens of each prompt, and seconds. Raises `PeerError`."""
        prompts = request["prompts"]
        if len(prompts) > self._slots:
            raise PeerError(f"{self.name} takes {self._slots} at once")
        bodies = [self._body(request, prompt) for prompt in prompts]
        self._signal(signal.SIGCONT)
        try:
            with ThreadPoolExecutor(len(bodies)) as pool:
                began = time.perf_counter()
                tokens = list(pool.map(self._complete, bodies))
                seconds = time.perf_counter() - began
        except httpx.HTTPError as error:
            raise PeerError(f"{self.name}: {error}") from error
        finally:
            self._signal(signal.SIGSTOP)
        return tokens, seconds

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._client.close()

    def _body(self, request: Mapping[str, Any], prompt: Sequence[int]) -> dict[str, Any]:
        """Draws as ours do: temperature alone."""
        temperature = request["temperature"]
        samplers = {"samplers": ["temperature"]} if temperature else {}
        return {
            **{"prompt": list(prompt), "n_predict": request["max_tokens"], "seed": request["seed"]},
            **{"temperature": temperature, **samplers, "ignore_eos": True},
            **{"cache_prompt": False, "return_tokens": True},
        }

    def _complete(self, body: Mapping[str, Any]) -> list[int]:
        response = self._client.post("/completion", json=body)
        response.raise_for_status()
        return [int(token) for token in response.json()["tokens"]]

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health").is_success
        except httpx.TransportError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing once it has ended
