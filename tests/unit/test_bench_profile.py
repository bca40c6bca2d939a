"""`paceline bench profile`: the parts of a step."""

from __future__ import annotations

import io
import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline import family
from paceline.cli import main
from paceline.config import SpeculativeConfig
from paceline.launcher import StartError
from paceline_lab.bench import step_profile
from paceline_lab.bench.method_comparison import LIMITS
from paceline_lab.bench.step_profile import (
    PARTS,
    HardwareFloor,
    ProfileCase,
    Stopwatch,
    TimedCalls,
    blocks,
    piped,
    read,
    show,
)
from tests.helpers.checkpoints import save_checkpoint

SVG = "{http://www.w3.org/2000/svg}"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def case(**figures: Any) -> ProfileCase:
    parts = dict.fromkeys(PARTS, 1.0) | {"pass": 8.0}
    engine = {"engine_ms": 5.0}
    return ProfileCase(
        **{"size": "shipped", "requests": 8, "method": "plain", "parts_ms": parts, "floor_ms": 4.0, **engine, **figures}
    )


def test_a_nested_part_counts_alone_and_time_between_parts_not_at_all() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    for _ in range(2):
        with stopwatch.part("outer"):
            clock.now += 1
            with stopwatch.part("inner"):
                clock.now += 10
            clock.now += 2
        clock.now += 100
        assert stopwatch.take() == {"outer": 3, "inner": 10}
    assert stopwatch.take() == {}


def test_timed_calls_count_as_one_part() -> None:
    class Model:
        layers = 2

        def run(self, rows: int) -> int:
            clock.now += 3
            return 2 * rows

    clock = Clock()
    stopwatch = Stopwatch(clock)
    timed = TimedCalls(Model(), ["run"], stopwatch, "pass")
    assert (timed.layers, timed.run(4)) == (2, 8)
    assert stopwatch.take() == {"pass": 3}


def test_a_part_that_raises_counts() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)

    def failing() -> None:
        with stopwatch.part("outer"), stopwatch.part("inner"):
            clock.now += 2
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()
    clock.now += 5
    assert stopwatch.take() == {"outer": 0, "inner": 2}


def test_the_floor_is_the_longer_of_reading_and_multiplying() -> None:
    floor = HardwareFloor(weights=1000, weight_bytes=2000, bytes_per_s=1e6, macs_per_s=1e6)
    assert floor.ms(1) == 2.0
    assert floor.ms(5) == 5.0


def test_the_floor_counts_all_matrices_of_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "_timed", lambda work, clock: 0.5)
    floor = step_profile.measured_floor(family.NAMES[0])
    layer = 256 * (2 * 256 + 2 * 128 + 3 * 512)
    assert floor.weights == 4096 * 256 + 26 * layer
    assert floor.bytes_per_s == 4 * floor.weights
    assert floor.macs_per_s == 2 * 512 * 1024 * 1024


def test_a_piped_message_is_equal() -> None:
    assert piped({"a": [1, 2]}) == {"a": [1, 2]}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama that drafts for itself, in place of the shipped family: every draft token is right."""
    model = str(save_checkpoint(tmp_path / "tiny"))
    config = SpeculativeConfig.model_validate({**LIMITS, "method": "draft_model", "model": model})
    config = config.model_copy(update={"draft_placement": "worker"})
    monkeypatch.setattr(step_profile, "_models", lambda size, method, folder: (model, config))
    monkeypatch.setattr(step_profile, "_prompts", lambda: [[1, 2, 3], [4, 5]])
    monkeypatch.setattr(step_profile, "SLOTS", 1024)


@pytest.mark.usefixtures("tiny")
def test_the_parts_of_a_real_step() -> None:
    """Every part of a step with a draft takes time; a plain step has no draft part."""
    shown = io.StringIO()
    result = step_profile.run(Console(file=shown, width=200), ["shipped"], [2], "draft_model", threads=1)
    plain, drafted = (ProfileCase(**each) for each in result["cases"])
    assert (plain.method, plain.tokens, plain.rows) == ("plain", 2, 2)
    assert plain.parts_ms["draft"] == plain.round_ms == 0
    assert all(plain.parts_ms[part] > 0 for part in PARTS if part != "draft")
    assert all(drafted.parts_ms[part] > 0 for part in PARTS)
    assert drafted.tokens > 2
    assert drafted.rows > 2
    assert drafted.round_ms > 0
    assert min(plain.engine_ms, drafted.engine_ms) > 0
    assert plain.floor_ms < plain.parts_ms["pass"]
    assert "2 requests, draft_model" in shown.getvalue()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("threads", "clock"), [(1, time.thread_time), (2, time.perf_counter)])
def test_one_thread_is_measured_in_cpu_time(threads: int, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Any] = []

    def measure(llm: Any, case: ProfileCase, config: Any, floor: HardwareFloor, clock: Any) -> ProfileCase:
        clocks.append(clock)
        case.parts_ms = dict.fromkeys(PARTS, 1.0)
        return case

    monkeypatch.setattr(step_profile, "measure", measure)
    step_profile.run(Console(quiet=True), ["shipped"], [1], "draft_model", threads=threads)
    assert clocks == [clock, clock]


def test_bars_are_as_long_as_their_parts() -> None:
    """15 ms, of which the pass is 8."""
    text = blocks(case(), width=150).plain
    assert text == "p" * 80 + "e" * 50 + "p" * 10 + "w" * 10


def test_a_step_without_time_has_no_bar() -> None:
    assert blocks(ProfileCase("shipped", 1, "plain", parts_ms=dict.fromkeys(PARTS, 0.0))).plain == ""


def test_every_figure_is_shown() -> None:
    shown = io.StringIO()
    show(Console(file=shown, width=80), [case(), case(requests=32, engine_ms=3.25)])
    assert "32 at once" in shown.getvalue()
    assert "3.25" in shown.getvalue()


def test_an_earlier_run_is_drawn_too() -> None:
    before = {"cases": [asdict(case(parts_ms=dict.fromkeys(PARTS, 1.0) | {"pass": 23.0}, engine_ms=5.0))]}
    drawn = ElementTree.fromstring(step_profile.picture({"cases": [asdict(case())]}, before))
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert {"before", "30.00 ms", "now", "15.00 ms", "floor", "4.00 ms"} <= set(texts)
    passes = sorted(float(each.get("width", 0)) for each in drawn.iter(f"{SVG}rect"))
    assert passes[-1] / passes[-2] == pytest.approx(23 / 8, abs=0.01)
    alone = step_profile.picture({"cases": [asdict(case(requests=1))]}, before)
    assert "before" not in alone, "a case that was not measured before"


def test_the_last_line_of_a_run_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    path.write_text("some text\n" + json.dumps({"cases": [asdict(case())]}) + "\n")
    assert ProfileCase(**read(path)["cases"][0]) == case()


@pytest.mark.parametrize("content", [None, "", "no json", "{}", '{"cases": [{"requests": 1, "odd": 2}]}'])
def test_a_file_without_an_earlier_run_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match="no earlier run"):
        read(path)


def test_unknown_names_are_refused_before_loading() -> None:
    for wrong in (["--sizes", "huge"], ["--method", "magic"], ["--before", "/nowhere.json"]):
        assert CliRunner().invoke(main, ["bench", "profile", *wrong]).exit_code == 2


def test_the_command_ends_with_one_line_of_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = {"threads": 1, "floors": {}, "cases": [asdict(case())]}
    calls: list[Any] = []

    def run(console: Console, *args: Any) -> dict[str, Any]:
        calls.append(args)
        return result

    monkeypatch.setattr(step_profile, "run", run)
    svg = tmp_path / "profile.svg"
    ran = CliRunner().invoke(main, ["bench", "profile", "--sizes", "shipped", "--requests", "8", "--svg", str(svg)])
    assert json.loads(ran.output.splitlines()[-1]) == result
    assert calls == [(["shipped"], [8], "draft_model", None)]
    assert svg.read_text().startswith("<svg")
