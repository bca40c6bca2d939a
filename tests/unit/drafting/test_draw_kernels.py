"""The kernels of a level in Triton's interpreter; and compiled, since the interpreter takes more than the compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not made for this platform"
)


def printed(argument: str, **environment: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "tests.unit.drafting.draw_cases", argument]
    changed = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    ended = subprocess.run(command, env=changed, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_they_do_what_torchs_operators_do() -> None:
    cases = printed("compare", TRITON_INTERPRET="1")
    assert len(cases) == 5
    assert [case["case"] for case in cases if not case["same"]] == []


def test_they_compile_for_a_hopper_gpu() -> None:
    """Without local memory, to which numbers that have no register are spilled."""
    cases = printed("compile")
    assert len(cases) == 3
    assert [case["case"] for case in cases if case["local"]] == []
