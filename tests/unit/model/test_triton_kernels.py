"""Our Triton kernels in an interpreter, and as compiled for an H100. On a GPU tests/exactness/test_gpu.py runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.model.gpu.paged_pass import PassInput
from paceline.model.gpu.paths import DeviceTables
from tests.helpers.sm_90 import MOST_SHARED, Launch, RecordedKernel, compiled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for it"),
    pytest.mark.timeout(900),  # the interpreter takes a minute and a half of a core
]


@cache
def cases() -> dict[str, list[dict[str, Any]]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.unit.model.triton_cases"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[dict[str, Any]]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_kernels_compute_what_torchs_operators_do() -> None:
    assert {kind: len(found) for kind, found in cases().items()} == {
        **{"attention": 4, "drafts": 3, "layers": 5},
        "refused": 4,
    }
    for case in [*cases()["attention"], *cases()["drafts"], *cases()["layers"]]:
        assert case["error"] < 1e-5, case


def test_a_row_attends_alike_alone_in_other_company_and_by_one_program() -> None:
    assert [case["case"] for case in cases()["attention"] if not case["same"]] == []


def test_a_node_of_a_draft_attends_as_in_a_pass_of_its_own() -> None:
    """By one plan for all levels."""
    assert [case["case"] for case in cases()["drafts"] if not case["same"]] == []


def test_rows_that_are_apart_in_memory_are_refused() -> None:
    assert [case["case"] for case in cases()["refused"] if not case["refused"]] == []


SIZE, KV_HEADS, QUERIES = 128, 8, 32
HIDDEN, INNER = 4096, 14336
"""8B's shape."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Launch]]:
    """Of all kernels of a layer, in passes of 8 and of 256 rows, by their names."""
    from paceline.model.gpu import attention_kernels, layer_kernels, triton_kernels

    found: list[Launch] = []
    names = ("_plan", "_attend", "_merge", "_write_tables", "_add_norm", "_join", "_rotate_and_store", "_silu_times")
    for name in names:
        module = attention_kernels if hasattr(attention_kernels, name) else layer_kernels
        monkeypatch.setattr(module, name, RecordedKernel(getattr(module, name), found))
    half = {"dtype": torch.bfloat16}
    data = torch.zeros(100, 2 * KV_HEADS, SIZE, **half)
    for rows in (8, 256):
        these = PassInput(DeviceTables(4, 100, torch.device("cpu")), rows, 8, 8)
        triton_kernels.write_tables(these.tables.data, these.writes)
        x = torch.zeros(rows, HIDDEN, **half)
        triton_kernels.add_norm(x, x, torch.zeros(HIDDEN, **half), 1e-5)
        triton_kernels.join(these.tokens, x, x, *torch.zeros(2, HIDDEN, **half), 1e-5, norms_residual=True)
        projected, table = torch.zeros(rows, QUERIES + 2 * KV_HEADS, SIZE, **half), torch.zeros(100, SIZE, **half)
        query = triton_kernels.rotate_and_store(projected, these.positions, these.slots, table, table, data, None, 1e-5)
        triton_kernels.attend(query, data, these.paths, triton_kernels.plan(these.paths), scale=0.1)
        triton_kernels.silu_times(torch.zeros(rows, 2 * INNER, **half))
    return {name: [launch for launch in found if launch.kernel.__name__ == name] for name in names}


def test_an_h100_runs_them_without_spills(launches: dict[str, list[Launch]], tmp_path: Path) -> None:
    for name, (few, many) in launches.items():
        made = [compiled(each, tmp_path) for each in (few, many)]
        for each in made:
            assert each.spills == 0, name
            assert each.shared < MOST_SHARED / 2, name  # two programs share a multiprocessor
        assert made[0].products == made[1].products, f"{name}: sums depend on the number of rows"
        assert bool(made[0].products) == (name == "_attend")


def test_attention_rounds_each_product_and_each_sum(launches: dict[str, list[Launch]], tmp_path: Path) -> None:
    """Powers of two are one instruction, which is none of both."""
    for name in ("_attend", "_merge"):
        assert not any(compiled(each, tmp_path).fuses for each in launches[name]), name


def test_attention_is_two_kernels_and_each_other_step_one(launches: dict[str, list[Launch]]) -> None:
    """As `tests.helpers.counted_kernels.FusedKernels` has them, by which a layer's kernels are counted."""
    assert {name: len(found) for name, found in launches.items()} == dict.fromkeys(launches, 2)


@pytest.mark.parametrize(("queries", "kv_heads", "size"), [(64, 8, 128), (8, 4, 256), (16, 4, 256), (16, 2, 64)])
def test_attention_of_other_heads_does_not_spill(
    queries: int, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from paceline.model.gpu import attention_kernels

    found: list[Launch] = []
    monkeypatch.setattr(attention_kernels, "_attend", RecordedKernel(attention_kernels._attend, found))
    monkeypatch.setattr(attention_kernels, "_merge", RecordedKernel(attention_kernels._merge, []))
    query, data = (torch.zeros(8, heads, size, dtype=torch.bfloat16) for heads in (queries, 2 * kv_heads))
    these = PassInput(DeviceTables(4, 100, torch.device("cpu")), 8, 8, 8)
    attention_kernels.attend(query, data, these.paths, these.paths.groups, scale=0.1)
    made = compiled(found[0], tmp_path)
    assert made.spills == 0
    assert made.shared < MOST_SHARED / 2
