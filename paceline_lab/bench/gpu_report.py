"""`make gpu`: the tests and figures that take a GPU, one after another, each in a process of its own.

A step that fails does not end the run. The report has each step's exit code, seconds, last lines, and its JSON line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.launcher import StartError
from paceline.model.paged_attention import FLASH_ATTN, FLASH_ATTN_MODULE, TRITON
from paceline.model.torch_attention import TORCH
from paceline_lab.bench import pass_times

LAST_LINES = 20
LONGEST_S = 3600.0
"""A step that takes longer is killed."""
WAYS: Mapping[str, Mapping[str, str]] = {
    "flash-attn, graphs": {"PACELINE_ATTENTION": FLASH_ATTN},
    "flash-attn": {"PACELINE_ATTENTION": FLASH_ATTN, "PACELINE_CUDA_GRAPHS": "0"},
    "triton, graphs": {"PACELINE_ATTENTION": TRITON},
    "triton": {"PACELINE_ATTENTION": TRITON, "PACELINE_CUDA_GRAPHS": "0"},
    "torch": {"PACELINE_ATTENTION": TORCH},
}
"""Environments of the figures."""


def steps(device: str) -> dict[str, tuple[list[str], Mapping[str, str]]]:
    """Commands, and what is added to their environments."""
    paceline = str(Path(sys.executable).with_name("paceline"))
    engine = json.dumps({"device": device, "slots": 16384})
    found: dict[str, tuple[list[str], Mapping[str, str]]] = {
        "tests": ([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], {}),
        "doctor": ([paceline, "doctor", "--engine-config", engine], {}),
    }
    for way, environment in WAYS.items():
        if _has_flash_attention() or FLASH_ATTN not in environment.values():
            sizes = [word for size in pass_times.SIZES for word in ("--sizes", size)]
            found[f"passes, {way}"] = ([paceline, "bench", "passes", "--device", device, *sizes], environment)
    found["methods"] = ([paceline, "bench", "methods", "--device", device], {})
    return found


def run(console: Console, device: str) -> dict[str, Any]:
    """Run all steps; return the JSON document. Raises `StartError` if there is no such device."""
    name, done = _device_name(device), {}
    for title, (command, environment) in steps(device).items():
        with console.status(title):
            done[title] = _run(command, environment)
        console.print(f"{title}: exit code {done[title]['exit_code']}, {done[title]['seconds']} s")
    return {
        "device": name,
        "torch": torch.__version__,
        "flash_attn_3": _has_flash_attention(),
        "steps": done,
    }


def _has_flash_attention() -> bool:
    return importlib.util.find_spec(FLASH_ATTN_MODULE) is not None


def _device_name(device: str) -> str:
    """In a process of its own, so that this one holds no memory of the device."""
    if not device.startswith("cuda"):
        return device
    ended = _run([sys.executable, "-c", f"import torch; print(torch.cuda.get_device_name({device!r}))"], {})
    last = (ended["last_lines"] or [""])[-1]
    if ended["exit_code"] != 0:
        raise StartError(f"device {device}: {last}")
    return str(last)


def _run(command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    lines = output.splitlines()
    return {
        "exit_code": process.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "result": _json(lines[-1]) if lines else None,
        "last_lines": lines[-LAST_LINES:],
    }


def _json(line: str) -> Any:
    """None if it is no JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None
