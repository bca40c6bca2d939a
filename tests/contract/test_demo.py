"""`paceline demo`: one act on a stack without weights, and the whole command with its last line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.cpu_affinity import available
from paceline.cli.deployment import DeploymentOptions
from paceline.config import EngineConfig, SpeculativeConfig
from paceline_lab.bench.demo import TEMPERATURES, DemoAct, DemoFigures, play, verdict
from paceline_lab.bench.workloads import Workload

SPEEDS = ("plain_tokens_per_s", "speculative_tokens_per_s", "plain_tokens_per_s_http", "speculative_tokens_per_s_http")
MEASURED = {"name", "temperature", *SPEEDS, "speedup", "speedup_http", "acceptance_length"}
FIGURES = {"identical", "outputs", "same", "workloads", "ready_s", "rss_mb"}


async def test_an_act_is_shown_and_measured_and_gives_the_cores_back() -> None:
    """The next act's target would have no core of its own if the command stayed off the last one's."""
    before = available()
    act = DemoAct(
        "Title",
        "What it shows.",
        DeploymentOptions("table:64", SpeculativeConfig(method="ngram"), EngineConfig(cpus=tuple(before[:1]))),
        [Workload("counting", "/v1/completions", [{"prompt": "1 2 3"}])],
        max_tokens=96,
    )
    figures = DemoFigures()
    await play(Console(file=(shown := io.StringIO())), act, figures, time.monotonic())
    assert (figures.outputs, figures.same) == (2, 2)
    assert verdict([figures, figures]).startswith("4 of 4 outputs identical, up to ")
    document = figures.as_json()
    assert document["identical"]
    assert document["ready_s"] > 0
    assert _cases(document) == [("counting", t) for t in TEMPERATURES]
    assert all(row[speed] > 0 for row in document["workloads"] for speed in SPEEDS)
    assert "Title" in shown.getvalue()
    assert "What it shows." in shown.getvalue()
    assert shown.getvalue().count("identical output: 1 prompts, plain and speculative") == len(TEMPERATURES)
    assert available() == before


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_acts_through_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from paceline.cli import main; main()", "demo", "pydoc"]
    ran = subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
    assert ran.returncode == 0
    shown, last = ran.stdout.strip().rsplit("\n", 1)
    assert shown.index("Act one: pydoc") < shown.index("Act two: the widened model")
    assert "188 million parameters in a temporary folder" in " ".join(shown.split())
    document = json.loads(last)
    assert document.pop("model") == "pydoc"
    widened = document.pop("widened")
    assert set(document) == set(widened) == FIGURES
    assert document["identical"] is widened["identical"] is True
    assert document["same"] + widened["same"] == 24
    assert _cases(document) == list(product(("code editing", "question answering"), TEMPERATURES))
    assert _cases(widened) == [("code completion", temperature) for temperature in TEMPERATURES]
    for measured in (*document["workloads"], *widened["workloads"]):
        assert set(measured) == MEASURED
        assert min(measured[speed] for speed in SPEEDS) > 0
    assert not list(tmp_path.glob("paceline-demo-*"))


def _cases(figures: dict[str, list[dict[str, object]]]) -> list[tuple[object, object]]:
    return [(each["name"], each["temperature"]) for each in figures["workloads"]]
