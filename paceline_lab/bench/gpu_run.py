"""`paceline bench gpu`: the tests and figures that take a GPU, within a budget of seconds.

- `micro`      copies, launches, and the products of an 8B pass: their time and their bits
- `attention`  one layer's attention after 120 to 131,072 positions
- `tests`      the tests marked `gpu`
- `probe`      logits by the number of rows of a pass: the same bits?
- `8B`         memory while loading, passes by rows and context, a long prompt, INT4
- `heads`      drafting methods compared, and a round of EAGLE-3 by its parts
- `batch`      1, 8 and 64 requests in one process, and how long the GPU idles
- `stack`      1, 8 and 64 streams through the gateway, the draft in a process of its own
- `load`       a 14B model with as many slots as planned

A step is a process group with a share of what is left of the budget, by its seconds in `steps`; what it does not use,
later steps have. GRACE_S before the end of its share it is interrupted, as by Ctrl-C; at the end it is killed. A step
that fails or is killed loses only the figures that it has not printed. The report is written again after each step.
Nothing is installed or downloaded.

The report has, by step, `exit_code`, `seconds`, `limit_s`, `killed`, `figures` (each module of `paceline_lab.bench.gpu`
says what they are) and `last_lines`; and on a GPU `goals`: figures beside what they should be, None where nothing was
measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from rich.console import Console

from paceline.launcher import StartError, die_with_parent
from paceline_lab.bench.bench_measurement import check_names

CHECKOUT = Path(__file__).parents[2]
GRACE_S = 5.0
"""Between the interrupt and the end of a step's share."""
LAST_LINES = 20
MACHINE = """
import json, torch
device = torch.device({device!r})
torch.zeros(1, device=device)
name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
print(json.dumps({{"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}}))
"""


@dataclass(frozen=True, slots=True)
class Step:
    """`seconds`: of a run of 570 s."""

    seconds: float
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should be: at most, or at least, `bound`. `figure`: where it is among the steps' figures, divided
    by the figure at `over`, if there is one."""

    title: str
    figure: tuple[str, ...]
    kind: Literal["at most", "at least"]
    bound: float
    over: tuple[str, ...] = ()

    def row(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        """`steps`: of the report."""
        figure, over = (_found(steps, path) if path else 1.0 for path in (self.figure, self.over))
        value = None if figure is None or not over else round(figure / over, 3)
        met = None if value is None else value <= self.bound if self.kind == "at most" else value >= self.bound
        return {"goal": self.title, "figure": value, self.kind: self.bound, "met": met}


SHORT, DEEP = "pass_ms after 120", "after 16384"
QUESTIONS, CODE = "question answering, T 0", "code completion, T 0"
GOALS = (
    Goal("EAGLE-3 over plain, questions", ("heads", QUESTIONS, "eagle3", "speedup"), "at least", 2.0),
    Goal("EAGLE-3 over plain, code", ("heads", CODE, "eagle3", "speedup"), "at least", 2.5),
    Goal("8B pass of 1 row, ms", ("8B", SHORT, "1"), "at most", 7.0),
    Goal("8B pass of 8 rows, ms", ("8B", SHORT, "8"), "at most", 7.3),
    Goal("8B pass of 64 rows, ms", ("8B", SHORT, "64"), "at most", 8.5),
    Goal("8B pass, 256 rows over 64", ("8B", SHORT, "256"), "at most", 2.0, ("8B", SHORT, "64")),
    Goal(
        "attention of 8 rows after 16k over reading its bytes",
        ("attention", DEEP, "us", "8"),
        "at most",
        2.0,
        ("attention", DEEP, "bytes_us"),
    ),
    Goal("idle GPU, ms of a step of 64 requests, plain", ("batch", "idle_ms", "plain"), "at most", 2.0),
    Goal("idle GPU, ms of a step of 64 requests, EAGLE-3", ("batch", "idle_ms", "eagle3"), "at most", 2.0),
    Goal("8B in INT4 over bfloat16, 1 row", ("8B", "int4", "pass_ms", "1"), "at most", 0.55, ("8B", SHORT, "1")),
)


def steps(device: str) -> dict[str, Step]:
    """Every step, in their order."""

    def module(name: str) -> list[str]:
        return [sys.executable, "-m", "paceline_lab.bench.gpu", name, device]

    return {
        "micro": Step(40, module("micro")),
        "attention": Step(40, module("attention_times")),
        "tests": Step(
            120, [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *_gpu_tests()]
        ),
        "probe": Step(30, module("row_bits")),
        "8B": Step(90, module("large_model")),
        "heads": Step(70, module("heads")),
        "batch": Step(60, module("batch")),
        "stack": Step(90, module("stack")),
        "load": Step(30, module("planned_load")),
    }


def run(console: Console, device: str, budget_s: float, only: Sequence[str], output: Path) -> dict[str, Any]:
    """Run the steps named `only`, or all; write the report to `output` after each, and return it.

    Raises `StartError` for an unknown step or device, and if `output` cannot be written.
    """
    began = time.monotonic()
    known = steps(device)
    check_names(only, known)
    chosen = {name: step for name, step in known.items() if not only or name in only}
    report: dict[str, Any] = {"machine": _machine(device), "budget_s": budget_s, "steps": {}, "goals": []}
    _write(output, report)
    weight = sum(step.seconds for step in chosen.values())
    for name, step in chosen.items():
        limit_s = max(0.0, budget_s - (time.monotonic() - began)) * step.seconds / weight
        weight -= step.seconds
        with console.status(f"{name}, up to {limit_s:.0f} s"):
            done = report["steps"][name] = run_step(step.command, limit_s)
        if device.startswith("cuda"):
            report["goals"] = [goal.row(report["steps"]) for goal in GOALS]
        _write(output, report)
        ended = "killed" if done["killed"] else f"exit code {done['exit_code']}"
        console.print(f"{name}: {ended}, {done['seconds']} s")
    return report


def run_step(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a command in a process group, and end the group after `limit_s` at the latest."""
    began = time.monotonic()
    with TemporaryFile(
        "w+", errors="replace"
    ) as output:  # a pipe would be held open by whatever the command left behind
        process = subprocess.Popen(
            die_with_parent(command),
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": _python_path(), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
        try:
            killed = not _ended(process, limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "limit_s": round(limit_s, 1),
        "killed": killed,
        "figures": _figures(lines),
        "last_lines": lines[-LAST_LINES:],
    }


def _take_interrupts() -> None:
    """What `nohup` and a shell's background leave ignored, a step has to hear."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Whether it ended by itself within its limit. Else it is interrupted; what it has printed counts."""
    grace_s = min(GRACE_S, limit_s / 2)
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s - grace_s)
        return True
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    return False


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    """Of all lines that are JSON objects; the last of a name counts."""
    figures: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError):
            if line.startswith("{"):
                figures |= json.loads(line)
    return figures


def _found(steps: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """The figure of a step at `path`, None if there is none."""
    step, *keys = path
    found: Any = steps.get(step, {}).get("figures", {})
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, (int, float)) else None


def _machine(device: str) -> dict[str, Any]:
    """In a process of its own, so that this one holds no memory of the device."""
    ended = run_step([sys.executable, "-c", MACHINE.format(device=device)], 60.0)
    if ended["exit_code"] != 0:
        raise StartError(f"device {device}: {(ended['last_lines'] or ['no answer'])[-1]}")
    machine: dict[str, Any] = ended["figures"]
    return machine


def _gpu_tests() -> list[str]:
    """The files with tests marked `gpu`: others may import what a bare machine does not have."""
    files = sorted((CHECKOUT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def _python_path() -> str:
    return os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _write(output: Path, report: Mapping[str, Any]) -> None:
    """Replace the file as a whole: whoever ends this process leaves the last report intact."""
    part = output.with_name(f"{output.name}.part")
    try:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        part.replace(output)
    except OSError as error:
        raise StartError(f"output {output} cannot be written: {error}") from error
