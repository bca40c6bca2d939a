"""vLLM engines and draft workers as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline import family
from tests.helpers.service_processes import ServiceProcess, service_process

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TARGET = str(family.path("pydoc"))
CORE = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
"""Where vLLM computes. Two files of tests run side by side: vLLM binds its threads, so they would share a core."""
DEPTH = 5
STEADY = {"row_budget": False}
"""Drafts neither pause nor shrink where they do not pay, as on a busy machine."""
COUPLED = {"worker_cls": "paceline.vllm.coupled_worker.CoupledWorker", "async_scheduling": False}

Batch = Sequence[tuple[str, Mapping[str, Any]]]
"""Prompts, each with vLLM's sampling parameters."""

STARTS = ("def read_lines(path):\n", "class Stack:\n    def push(self, item):\n", "import os\n\ndef main():\n", "def ")
NAMES = ("load", "parse", "copy_tree", "sort_items", "Reader", "count_words")
PROMPTS = [f"# {name}\n{start}" for name in NAMES for start in STARTS]


def drafting(*addresses: str, **settings: Any) -> dict[str, Any]:
    """Arguments of an engine that drafts from these workers."""
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": "paceline.vllm.RemoteDrafts",
            "num_speculative_tokens": DEPTH,
        },
        "additional_config": {"paceline": {"drafts": addresses, **settings}},
    }


@contextmanager
def draft(config: Mapping[str, Any] | None = None) -> Iterator[ServiceProcess]:
    """A draft worker of ours."""
    chosen = config or {"method": "draft_model", "model": "pydoc-draft"}
    with service_process("draft", "--target-model", "pydoc", "--speculative-config", json.dumps(chosen)) as running:
        yield running


class VllmProcess:
    """A vLLM engine in a process of its own."""

    def __init__(self, batches: Sequence[Batch], **engine: Any) -> None:
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("batch_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"VLLM_CPU_OMP_THREADS_BIND": CORE, **os.environ},
        )
        self._tell(json.dumps({"engine": {"model": TARGET, **engine}, "batches": batches}))

    def outputs(self) -> list[list[int]]:
        """The tokens of the next batch."""
        outputs: list[list[int]] = self._read()["outputs"]
        return outputs

    def go_on(self) -> None:
        """Let it begin with the next batch."""
        self._tell("")

    def accepted(self) -> tuple[int, int]:
        """After the last batch: how many draft tokens vLLM has accepted, of how many."""
        metrics = self._read()["metrics"]
        return (
            metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
            metrics.get("vllm:spec_decode_num_draft_tokens", 0),
        )

    def close(self) -> None:
        """vLLM's own processes outlive the first one if that is killed alone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes its pipes
            pass

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def vllm_engine(batches: Sequence[Batch], **engine: Any) -> Iterator[VllmProcess]:
    running = VllmProcess(batches, **engine)
    try:
        yield running
    finally:
        running.close()


def generate(batch: Batch, **engine: Any) -> tuple[list[list[int]], tuple[int, int]]:
    """The outputs of one batch; draft tokens accepted, of how many."""
    with vllm_engine([batch], **engine) as running:
        return running.outputs(), running.accepted()
