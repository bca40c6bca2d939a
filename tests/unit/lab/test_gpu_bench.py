"""`paceline bench gpu`: each step runs on a CPU with tiny shapes; a step that fails or hangs costs itself alone."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.autograd import DeviceType
from typer.testing import CliRunner

from paceline.cli import main
from paceline.config import EngineConfig
from paceline.launcher import StartError
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline_lab.bench import gpu_run, step_profile
from paceline_lab.bench.gpu import micro
from paceline_lab.bench.gpu.device_trace import PART, DeviceTrace, _trace_of, covered, marked_calls, traced
from paceline_lab.bench.gpu.micro import ROWS, SETTINGS, other_bits
from paceline_lab.bench.gpu.model_shapes import LLAMA_8B, shape_for
from paceline_lab.bench.gpu.random_models import build_model, make_network
from paceline_lab.bench.gpu.row_bits import row_bits
from paceline_lab.bench.gpu_run import CHECKOUT, GOALS, Goal, Step, run, run_step, steps

CPU = torch.device("cpu")
CODE, QUESTIONS = "code completion, T 0", "question answering, T 0"
FIGURES: Mapping[str, set[str]] = {
    "micro": {"copy_gb_s", "launch_us", "products, small workspace", "quantized"},
    "attention_times": {"attention", "after 20", "after 120"},
    "row_bits": {"8B", "shipped"},
    "large_model": {
        *("memory", "numerics", "pass_ms after 20", "pass_ms after 120", "error", "prompt of 600"),
        *("kernels of 8 rows", "kernels of 64 rows", "int4"),
    },
    "heads": {CODE, QUESTIONS, "eagle3 round_ms, T 0", "8B head"},
    "batch": {"numerics", "pass_ms after 120", "2 requests", "idle_ms", "profile"},
    "stack": {"1 streams", "2 streams"},
    "planned_load": {"planned_slots", "memory", "numerics"},
}
"""By module, what it measures."""


def figures(module: str) -> dict[str, Any]:
    """Of a step on the CPU, as its process prints them."""
    found: dict[str, Any] = {}
    for each in importlib.import_module(f"paceline_lab.bench.gpu.{module}").measure(CPU):
        found |= json.loads(json.dumps(each))
    assert set(found) == FIGURES[module]
    return found


# Steps


def test_products_and_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one setting: each takes a process of its own."""
    monkeypatch.setattr(micro, "SETTINGS", {"small workspace": SETTINGS["small workspace"]})
    found = figures("micro")
    assert set(found["products, small workspace"]) == {"qkv", "o", "gate_up", "down", "head"}
    assert list(found["products, small workspace"]["down"]["us"]) == [str(rows) for rows in ROWS]
    assert min(found["launch_us"].values()) > 0
    assert isinstance(found["quantized"]["int4, down, 8 rows"], str), "an operator that a CPU lacks says so"


def test_rows_with_other_bits_are_found() -> None:
    """A product that sums a long pass in two parts, as a library may."""

    def split(rows: Tensor) -> Tensor:
        half = weight.shape[1] // 2
        if len(rows) < 48:
            return rows @ weight.T
        return rows[:, :half] @ weight.T[:half] + rows[:, half:] @ weight.T[half:]

    weight, rows = torch.randn(32, 64), torch.randn(256, 64)
    assert other_bits(lambda part: torch.stack([F.linear(row, weight) for row in part]), rows) == []
    weight, rows = weight.double(), rows.double()
    assert set(other_bits(split, rows)) >= {count for count in ROWS if count >= 48}


def test_attention_after_every_context() -> None:
    found = figures("attention_times")
    assert found["attention"] == "torch"
    assert list(found["after 120"]["us"]) == ["1", "8", "25", "64"]
    assert min(found["after 120"]["us"].values()) > 0 < found["after 20"]["bytes_us"] < found["after 120"]["bytes_us"]


def test_the_rows_of_both_models_are_compared() -> None:
    found = figures("row_bits")
    assert found["shipped"]["rows_invariant"]
    assert found["8B"]["other_bits"] == found["shipped"]["other_bits"] == {}


def test_a_model_whose_rows_feel_the_pass_is_found() -> None:
    """In passes of 24 rows its last three rows have other logits, and in all longer ones one row."""

    def output(rows: Sequence[Row], wanted: Sequence[int]) -> ModelOutput:
        logits = torch.tensor([[float(rows[i].position)] for i in wanted])
        if len(rows) >= 24:
            logits[-3 if len(rows) == 24 else -1 :] += 0.5
        return ModelOutput(logits)

    model: Any = SimpleNamespace(vocabulary_size=9, numerics="none", run=output)
    counts = (24, 32, 40, 48, 56, 64, 65, 96, 128, 192, 256)
    assert row_bits(model)["other_bits"] == {str(count): 3 if count == 24 else 1 for count in counts}


def test_a_large_model() -> None:
    found = figures("large_model")
    assert found["error"] < 0.1, "relative to the largest logit"
    assert list(found["int4"]["pass_ms"]) == ["1", "8", "16", "32", "64", "128", "256"]
    assert "packed" in found["int4"]["numerics"]
    assert "memory" not in found["memory"]


@pytest.mark.slow
def test_drafting_methods_and_rounds() -> None:
    found = figures("heads")
    assert set(found[CODE]) == {"eagle3", "draft_model", "suffix", "suffix + eagle3"}
    assert all(each["identical"] for rows in (found[CODE], found[QUESTIONS]) for each in rows.values())
    assert found["eagle3 round_ms, T 0"]["calls"] > 0 < found["eagle3 round_ms, T 0"]["host"]
    assert found["8B head"]["round_ms"] > 0


def test_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    floor = step_profile.HardwareFloor(1, 1, 1.0, 1.0)
    monkeypatch.setattr(step_profile, "measured_floor", lambda *_, **__: floor)  # its products take a minute here
    found = figures("batch")
    assert found["2 requests"]["identical"]
    assert found["2 requests"]["plain_tokens_per_s"] > 0
    assert found["idle_ms"] == {"plain": None, "eagle3": None}
    assert found["profile"]["2 requests, eagle3"]["parts_ms"]["draft"] > 0


@pytest.mark.alone
def test_streams_through_the_gateway() -> None:
    found = figures("stack")
    assert all(each["identical"] for each in found.values())
    assert all(each["longest_gap_ms"] >= each["itl_ms"] > 0 for each in found.values())


def test_a_model_loads_with_as_many_slots_as_planned() -> None:
    assert figures("planned_load")["planned_slots"] == 16384


def test_a_random_model_has_the_shape_of_its_name() -> None:
    shape = shape_for(LLAMA_8B, torch.device("meta"))
    network = make_network(shape, torch.device("meta"))
    assert sum(weight.numel() for weight in network.parameters()) == 8_030_261_248
    tiny = build_model(make_network(shape_for(LLAMA_8B, CPU), CPU), EngineConfig(slots=256))
    assert tiny.vocabulary_size == 4096


# Traces


def test_overlapping_kernels_count_once() -> None:
    assert covered([]) == 0
    assert covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0), (5.2, 5.4)]) == 4.0


def event(name: str, start: float, end: float, *, gpu: bool = False, **more: Any) -> Any:
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    fields = {"is_user_annotation": False, "device_time_total": 0.0, **more}
    return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end), **fields)


def test_a_trace_tells_kernels_and_waits_apart() -> None:
    """Of the two waits the second one is in no part; an annotation on the GPU is no kernel."""
    events = [
        event(PART, 0, 100, device_time_total=30.0),
        event("cudaStreamSynchronize", 10, 30),
        event("cudaStreamSynchronize", 150, 190),
        event("gemm", 20, 40, gpu=True),
        event("gemm", 60, 70, gpu=True),
        event("copy", 65, 75, gpu=True),
        event(PART, 0, 100, gpu=True, is_user_annotation=True),
    ]
    trace = _trace_of(events)
    assert trace.busy_us == 35
    assert trace.table() == [{"kernel": "gemm", "calls": 2, "us": 30}, {"kernel": "copy", "calls": 1, "us": 10}]
    assert trace.part_figures() == {"host": 0.1, "waits": 0.02, "device": 0.03, "calls": 1}
    assert DeviceTrace().part_figures()["calls"] == 0


def test_marked_calls_are_parts_of_a_trace() -> None:
    owner = SimpleNamespace(work=lambda n: torch.zeros(n) + 1)
    with marked_calls(owner, "work"):
        trace = traced(lambda: [owner.work(3), owner.work(4)], CPU, host=True)
    assert len(trace.parts) == 2
    assert trace.us > 0
    assert trace.kernels == []
    assert traced(lambda: owner.work(3), CPU, host=True).parts == [], "it is as it was"


# The run

WORKS = """
import json
print("no JSON"); print('{"a": 1}'); print('{"a": 2, "b": {"c": 4.0}}'); print("{neither")
"""
FAILS = "import sys; print('{\"a\": 1}'); sys.exit('it is broken')"
HANGS = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print('{"child": %d}' % child.pid, flush=True)
threading.Event().wait()
"""
INTERRUPTED = """
import sys, threading
print('{"a": 1}', flush=True)
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print('{"b": 2}', flush=True)
    sys.exit(0)
"""


def python(code: str, seconds: float = 1.0) -> Step:
    return Step(seconds, [sys.executable, "-c", code])


def run_of(steps: Mapping[str, Step], output: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float) -> dict[str, Any]:
    """The report, as the file has it."""
    monkeypatch.setattr(gpu_run, "steps", lambda device: steps)
    returned = run(Console(quiet=True), "cpu", budget_s, (), output)
    written: dict[str, Any] = json.loads(output.read_text())
    assert written == json.loads(json.dumps(returned))
    return written


def test_a_step_that_fails_or_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "GRACE_S", 0.2)
    given = {"fails": python(FAILS, 50), "hangs": python(HANGS, 3), "works": python(WORKS, 50)}
    report = run_of(given, tmp_path / "gpu.json", monkeypatch, 103.0)
    fails, hangs, works = report["steps"].values()
    assert (fails["exit_code"], fails["killed"], fails["figures"]) == (1, False, {"a": 1})
    assert fails["last_lines"][-1] == "it is broken"
    assert (works["exit_code"], works["figures"]) == (0, {"a": 2, "b": {"c": 4.0}})
    assert (hangs["exit_code"], hangs["killed"]) == (-9, True)
    stat = Path(f"/proc/{hangs['figures']['child']}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", "killed with the step"
    assert hangs["limit_s"] < 7 < 60 < works["limit_s"], "a share is of what is left"
    assert report["machine"]["device"] == "cpu"


def test_the_file_is_written_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step reads in it what the first one did."""
    output = tmp_path / "gpu.json"
    reads = f"print(open({str(output)!r}).read().replace(chr(10), ''))"
    report = run_of({"works": python(WORKS), "reads": python(reads)}, output, monkeypatch, 60.0)
    seen = report["steps"]["reads"]["figures"]
    assert seen["steps"] == {"works": report["steps"]["works"]}
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_an_interrupted_step_may_say_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "GRACE_S", 60.0)
    ended = run_step(python(INTERRUPTED).command, 8.0)
    assert (ended["killed"], ended["exit_code"], ended["figures"]) == (True, 0, {"a": 1, "b": 2})


def test_a_step_hears_an_interrupt_that_its_parent_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `nohup`, or in the background of a shell."""
    monkeypatch.setattr(gpu_run, "GRACE_S", 60.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = run_step(python(INTERRUPTED).command, 8.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended["exit_code"], ended["figures"]) == (0, {"a": 1, "b": 2})


def test_a_goal_is_beside_its_figure() -> None:
    found = {"8B": {"figures": {"ms": {"64": 8.0, "256": 20.0}, "bad": "text"}}}
    most = Goal("most", ("8B", "ms", "256"), "at most", 2.0, ("8B", "ms", "64"))
    assert most.row(found) == {"goal": "most", "figure": 2.5, "at most": 2.0, "met": False}
    least = Goal("least", ("8B", "ms", "64"), "at least", 8.0)
    assert least.row(found) == {"goal": "least", "figure": 8.0, "at least": 8.0, "met": True}
    for path in (("8B", "ms", "1"), ("8B", "bad"), ("heads", "x"), ("8B", "bad", "deep")):
        assert Goal("none", path, "at most", 1.0).row(found)["figure"] is None
    assert Goal("none", ("8B", "ms", "64"), "at most", 1.0, ("8B", "ms", "0")).row(found)["met"] is None
    assert len({goal.title for goal in GOALS}) == len(GOALS) == 10


def test_every_step_is_a_module_and_every_goal_one_of_its_figures() -> None:
    known = steps("cpu")
    assert list(known) == ["micro", "attention", "tests", "probe", "8B", "heads", "batch", "stack", "load"]
    assert sum(step.seconds for step in known.values()) == 570
    modules = {name: step.command[3] for name, step in known.items() if name != "tests"}
    assert set(modules.values()) == set(FIGURES)
    files = [Path(word) for word in known["tests"].command if word.endswith(".py")]
    assert CHECKOUT / "tests/exactness/test_gpu.py" in files
    for goal in GOALS:
        step, figure, *_ = goal.figure
        assert figure in FIGURES[modules[step]] | {"after 16384"}


def test_a_bare_machine_runs_a_step_from_the_command_line(tmp_path: Path) -> None:
    """By the interpreter alone, outside the checkout: nothing is installed there."""
    output = tmp_path / "gpu.json"
    words = ["bench", "gpu", "--device", "cpu", "--budget", "250", "--only", "attention", "--output", str(output)]
    ran = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(output.read_text())
    assert set(report["steps"]["attention"]["figures"]) == FIGURES["attention_times"]
    assert report["budget_s"] == 250
    assert report["goals"] == [], "a tiny model on a CPU meets none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only micro,magic --device cpu", "there is no 'magic': choose from micro, attention, tests"),
        ("--only load --device nonsense", "device nonsense:"),
        ("--only load --device cpu --output /nowhere/gpu.json", "output /nowhere/gpu.json cannot be written"),
        ("--budget 0", "budget"),
    ],
)
def test_a_wrong_option_is_refused(words: str, message: str) -> None:
    result = CliRunner().invoke(main, ["bench", "gpu", *words.split()], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="device cuda:0"):
        run(Console(quiet=True), "cuda:0", 10.0, (), tmp_path / "gpu.json")
