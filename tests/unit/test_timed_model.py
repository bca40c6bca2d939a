"""The simulated accelerator: it takes its time, reads its past through slots, and is foreseen as often as asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
import torch

from paceline.model import SlotTable
from paceline.model.row_probe import is_row_invariant, measure_row_cost
from paceline.model.rows import TILE
from paceline.model_names import ModelNotFoundError, fake_vocabulary, resolve_model, served_name
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import MOST_LATE_S, UNLISTED, TimedModel, mean_log_odds

QUICK = "timed:vocabulary=1000,step_ms=0"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def model(spec: str = QUICK, slots: int = 4000, clock: Clock | None = None) -> TimedModel:
    clock = clock or Clock()
    return TimedModel(spec, TimedModelConfig.parse(spec), slots, slots, clock, clock.sleep)


def laws(model: TimedModel, tokens: Sequence[int], slots: Sequence[int] | None = None) -> torch.Tensor:
    """Logits after each of `tokens`."""
    lane = SlotTable()
    lane.slots = list(slots or range(1, len(tokens) + 1))
    rows = [lane.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, range(len(rows))).logits


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


# Time


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01), (64, 0.01), (65, 0.01 * 65 / 64), (640, 0.1)])
def test_a_pass_takes_what_the_roofline_says(rows: int, seconds: float) -> None:
    clock = Clock()
    laws(model("timed:step_ms=10,knee_rows=64", clock=clock), [0] * rows)
    assert clock.now == pytest.approx(seconds)


def test_computing_counts_towards_the_deadline() -> None:
    clock = Clock()
    ticking = itertools.count(1)
    simulated = TimedModel(
        "timed:",
        TimedModelConfig.parse("timed:step_ms=10"),
        64,
        64,
        lambda: clock.now + 0.003 * next(ticking),
        clock.sleep,
    )
    laws(simulated, [1, 2])
    assert clock.now == pytest.approx(0.007)


def test_what_a_timer_is_late_the_next_pass_makes_up_for() -> None:
    clock, late = Clock(), 0.0
    spec = TimedModelConfig.parse("timed:step_ms=10")
    simulated = TimedModel("timed:", spec, 64, 64, clock, lambda seconds: clock.sleep(seconds + late))
    late = 1e-4
    for _ in range(10):
        laws(simulated, [1])
    assert clock.now == pytest.approx(10 * 0.01 + late)
    late = 3e-3  # no timer, but somebody else who took the processor
    laws(simulated, [1])
    laws(simulated, [1])
    assert clock.now == pytest.approx(12 * 0.01 + 2 * late - MOST_LATE_S)


def test_the_probe_finds_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    cost = measure_row_cost(model("timed:step_ms=1,knee_rows=32", 400, clock), 64, repeats=2)
    assert [cost(rows) for rows in (8, 32, 64)] == pytest.approx([0.001, 0.001, 0.002])


# Text


def test_the_whole_past_decides_wherever_it_lies() -> None:
    tokens = text(TILE + 20)
    there = laws(model(), tokens)
    elsewhere = laws(model(), tokens, list(range(500, 500 - len(tokens), -1)))
    assert torch.equal(there, elsewhere)
    other = laws(model(), [tokens[0] + 1, *tokens[1:]])
    assert not any(torch.equal(a, b) for a, b in zip(there, other, strict=True))


def test_a_wrong_slot_gives_wrong_tokens() -> None:
    simulated = model()
    right = laws(simulated, [10, 11, 12, 13])[-1]
    lane = SlotTable()
    lane.slots = [1, 2, 9, 4]
    wrong = simulated.run([lane.row(13, 3)], [0]).logits[0]
    assert right.argmax() != wrong.argmax()


def test_the_seed_chooses_the_text() -> None:
    one, other = (laws(model(f"{QUICK},seed={seed}"), text(50)).argmax(-1) for seed in (0, 1))
    assert (one == other).float().mean() < 0.1


def test_it_passes_the_probe_of_rows() -> None:
    assert is_row_invariant(model())
    assert is_row_invariant(model(f"{QUICK},agreement=0.8"))


def test_hidden_states_say_whose_they_are() -> None:
    simulated, lane = model(), SlotTable()
    lane.slots = [5, 6]
    output = simulated.run([lane.row(70, 0), lane.row(80, 1)], [1], (0, 3))
    assert output.hidden is not None
    assert output.hidden.tolist() == [[[70, 0]] * 2, [[80, 1]] * 2]


# A draft


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_draft_is_right_as_often_as_asked(agreement: float, spread: float) -> None:
    tokens = text(3000)
    draft = model(f"{QUICK},agreement={agreement},spread={spread}")
    hits = laws(model(), tokens).argmax(-1) == laws(draft, tokens).argmax(-1)
    assert hits.float().mean().item() == pytest.approx(agreement, abs=0.03)


def test_what_a_draft_does_not_choose_first_it_mostly_chooses_next() -> None:
    tokens = text(3000)
    drawn = laws(model(), tokens).argmax(-1, keepdim=True)
    chances = laws(model(f"{QUICK},agreement=0.8,spread=2"), tokens)
    rank = (chances > chances.gather(1, drawn)).sum(-1)
    share = [(rank == r).float().mean().item() for r in range(4)]
    assert share == sorted(share, reverse=True)
    assert 0.3 < share[1] / (1 - share[0]) < 0.7


def test_a_draft_without_blur_knows_its_chances_and_one_with_blur_does_not_quite() -> None:
    tokens = text(6000)
    drawn = laws(model(slots=6000), tokens).argmax(-1)

    def misjudged(spec: str) -> float:
        """Mean distance between what is believed and what happens, over tenths of belief."""
        beliefs = laws(model(f"{QUICK},agreement=0.7,{spec}", slots=6000), tokens).softmax(-1)
        best, choice = beliefs.max(-1)
        tenth = (best * 10).long().clamp(max=9)
        off = [(best[tenth == t].mean() - (choice == drawn)[tenth == t].float().mean()).abs() for t in range(10)]
        weights = [(tenth == t).float().mean() for t in range(10)]
        return float(sum(o * w for o, w in zip(off, weights, strict=True) if w > 0))

    assert misjudged("blur=0") < 0.03
    assert misjudged("blur=2") > 0.05
    assert misjudged("blur=0,bias=3") > 0.15


def test_beliefs_are_laws() -> None:
    chances = laws(model(f"{QUICK},agreement=0.6"), text(200)).exp()
    assert chances.sum(-1).max() < 1.001
    assert (chances > math.exp(UNLISTED + 1)).sum(-1).max() <= 8


@pytest.mark.parametrize(("agreement", "spread"), [(0.5, 0.0), (0.8, 0.0), (0.8, 2.0), (0.95, 4.0)])
def test_log_odds_average_to_the_agreement(agreement: float, spread: float) -> None:
    mean = mean_log_odds(agreement, spread)
    normal = random.Random(5)
    chances = [1 / (1 + math.exp(-mean - spread * normal.gauss(0, 1))) for _ in range(20000)]
    assert fmean(chances) == pytest.approx(agreement, abs=0.01)


# Names


def test_a_name_says_it_all() -> None:
    spec = TimedModelConfig.parse("timed:vocabulary=64, step_ms=2.5,agreement=0.75")
    assert (spec.vocabulary, spec.step_ms, spec.agreement) == (64, 2.5, 0.75)
    assert TimedModelConfig.parse("timed:") == TimedModelConfig()
    assert fake_vocabulary("timed:vocabulary=64,step_ms=2.5") == fake_vocabulary("timed:vocabulary=64,agreement=0.1")
    assert fake_vocabulary("timed:vocabulary=64") != fake_vocabulary("timed:vocabulary=65")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("timed:speed=9", "speed: is not known here"),
        ("timed:vocabulary=2", "vocabulary: must be at least 16"),
        ("timed:agreement=1.5", "agreement: must be at most 1"),
        ("timed:step_ms=fast", "step_ms: must be a number"),
        ("timed:512", "512: is not known here"),
    ],
)
def test_a_name_that_is_none_says_why(name: str, told: str) -> None:
    with pytest.raises(ModelNotFoundError, match=told):
        resolve_model(name)


def test_a_timed_model_does_not_pass_for_another() -> None:
    assert served_name("timed:step_ms=9", None) == "timed:step_ms=9"
    assert served_name("timed:step_ms=9", "timed:h200") == "timed:h200"
    assert served_name("/models/llama", "gpt") == "gpt"
    assert served_name("/models/llama", None) == "llama"
    with pytest.raises(ValueError, match="begins with 'timed:', not as 'gpt'"):
        served_name("timed:step_ms=9", "gpt")
