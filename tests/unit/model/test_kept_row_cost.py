"""Costs of passes that are learned while serving, and kept from one start to the next."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.core.policy.step_cost import LearnedRowCost
from paceline.model import Model, load
from paceline.model.kept_row_cost import KeptRowCost, model_row_cost
from paceline.model.row_probe import QUICK_ROWS, ROW_COUNTS, measure_row_cost, quick_row_cost
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import TimedModel
from tests.helpers.checkpoints import save_checkpoint


def staircase(rows: int) -> float:
    return 0.01 + 0.002 * -(-rows // 8)


class TestLearning:
    def test_it_becomes_what_a_full_measurement_gives(self) -> None:
        """Every third pass is disturbed, and the first estimates are, too."""
        cost, draws = LearnedRowCost({1: 0.05, 8: 0.02, 64: 0.09}), random.Random(5)
        for _ in range(3000):
            rows = draws.choice(ROW_COUNTS)
            cost.observe(rows, staircase(rows) * (1 if draws.random() < 0.67 else 1 + 9 * draws.random()))
        for rows in ROW_COUNTS:
            assert cost(rows) == pytest.approx(staircase(rows), rel=0.01)
            assert cost.table(256)[rows] == cost(rows)

    def test_one_stalled_pass_changes_nothing(self) -> None:
        cost = LearnedRowCost({1: 1.0, 8: 2.0})
        before = [cost(rows) for rows in range(1, 30)]
        for rows in (1, 5, 8, 20):
            cost.observe(rows, 100.0)
        assert [cost(rows) for rows in range(1, 30)] == before

    def test_two_slow_passes_of_a_new_count_make_a_point(self) -> None:
        cost = LearnedRowCost({1: 1.0, 8: 2.0})
        for seconds in (9.0, 7.0):
            cost.observe(20, seconds)
        assert (cost(8), cost(20)) == (2.0, 7.0)

    def test_a_faster_pass_caps_those_of_fewer_rows(self) -> None:
        cost = LearnedRowCost({1: 1.0, 8: 2.0, 16: 3.0})
        cost.table(16)
        cost.observe(12, 1.5)
        assert [cost(rows) for rows in (1, 8, 12, 16)] == [1.0, 1.5, 1.5, 3.0]
        assert cost.table(16)[8] == 1.5

    def test_beyond_the_last_point_it_rises_as_before_it(self) -> None:
        assert LearnedRowCost({1: 1.0, 8: 2.0, 16: 3.0})(32) == 5.0
        assert LearnedRowCost({4: 1.0})(8) == 2.0

    def test_a_clock_that_stands_still_teaches_nothing(self) -> None:
        cost = LearnedRowCost({1: 1.0})
        cost.observe(1, 0.0)
        assert cost(1) == 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.0)


@pytest.mark.parametrize(
    ("step_ms", "knee", "counts"), [(1, 32, [1, 8, 64]), (80, 64, [1, 8, 33]), (400, 64, [1, 8, 16])]
)
def test_few_passes_make_the_first_estimate(
    step_ms: int, knee: int, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    config = TimedModelConfig.parse(f"timed:step_ms={step_ms},knee_rows={knee}")
    model = TimedModel("timed:", config, 2048, 2048, clock, clock.sleep)
    cost = quick_row_cost(model, 256)
    assert sorted(cost.points) == counts
    full = measure_row_cost(model, QUICK_ROWS)
    assert [cost(rows) for rows in counts] == pytest.approx([full(rows) for rows in counts])


@pytest.mark.parametrize("most", [1, 3, 8, 9])
def test_no_pass_is_larger_than_a_step(most: int) -> None:
    model = TimedModel("timed:", TimedModelConfig.parse("timed:step_ms=0"), 2048, 2048)
    assert max(quick_row_cost(model, most).points) == most


class TestKept:
    @pytest.fixture
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Model:
        return load(str(save_checkpoint(tmp_path_factory.mktemp("checkpoint"))), EngineConfig(slots=512))

    @pytest.fixture
    def files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Model) -> Callable[[], list[Path]]:
        monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
        return lambda: list((tmp_path / "costs").iterdir())

    @pytest.fixture
    def passes(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        made: list[int] = []
        run = model.run

        def counted(rows: list[object], *rest: object) -> object:
            made.append(len(rows))
            return run(rows, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(model, "run", counted)
        return made

    def test_the_next_start_takes_no_pass(
        self, model: Model, files: Callable[[], list[Path]], passes: list[int]
    ) -> None:
        first = model_row_cost(model, 256, 1)
        assert passes == [8, 1, 64]
        first.observe(5, 1e-6)
        del first
        gc.collect()
        assert len(files()) == 1
        assert model_row_cost(model, 256, 1)(5) == 1e-6
        assert passes == [8, 1, 64]
        model_row_cost(model, 256, 2)
        assert len(passes) == 6, "other threads take other times"

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"8": -1}', '{"1": NaN}', '{"a": 1}', '{"1": null}'])
    def test_nonsense_in_the_file_is_replaced(
        self, text: str, model: Model, files: Callable[[], list[Path]], passes: list[int]
    ) -> None:
        model_row_cost(model, 256, 1)
        gc.collect()
        [file] = files()
        file.write_text(text)
        assert model_row_cost(model, 256, 1)(1) > 0
        assert passes == [8, 1, 64] * 2

    def test_a_folder_that_cannot_be_used_is_no_error(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[int]
    ) -> None:
        (tmp_path / "taken").touch()
        monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "taken"))
        assert not isinstance(model_row_cost(model, 256, 1), KeptRowCost)
        assert passes == [8, 1, 64]

    def test_it_is_written_while_serving(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        cost = KeptRowCost({1: 1.0}, tmp_path / "cost.json")
        cost.observe(1, 0.5)
        assert not list(tmp_path.iterdir())
        now = 1000.0
        threads: list[object] = []
        monkeypatch.setattr("threading.Thread.start", lambda thread: threads.append(thread.run()))
        cost.observe(1, 0.25)
        assert (tmp_path / "cost.json").read_text() == '{"1": 0.25}'
        cost.observe(1, 0.125)
        assert len(threads) == 1
