"""Our Triton kernel in Triton's interpreter. On a GPU tests/exactness/test_gpu.py runs it as it is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not made for this platform")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.unit.model.triton_cases"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_it_attends_as_flash_attention_does(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 8
    for case in cases:
        assert case["error"] < 1e-5, case


def test_a_sequence_does_not_depend_on_others(cases: list[dict[str, Any]]) -> None:
    assert [case["case"] for case in cases if not case["same"]] == []
