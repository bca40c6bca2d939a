"""The simulated accelerator: its time, its text, and drafts with a given agreement."""

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
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def model(spec: str = QUICK, slots: int = 4000, clock: Clock | None = None) -> TimedModel:
    clock = clock or Clock()
    return TimedModel(spec, TimedModelConfig.parse(spec), slots, slots, clock, clock.sleep)


def logits_after(model: TimedModel, tokens: Sequence[int], slots: Sequence[int] | None = None) -> torch.Tensor:
    """Logits after each of `tokens`."""
    slot_table = SlotTable()
    slot_table.slots = list(slots or range(1, len(tokens) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, range(len(rows))).logits


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


# Time


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01), (64, 0.01), (65, 0.01 * 65 / 64), (640, 0.1)])
def test_a_pass_takes_the_time_of_the_roofline(rows: int, seconds: float) -> None:
    clock = Clock()
    logits_after(model("timed:step_ms=10,knee_rows=64", clock=clock), [0] * rows)
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
    logits_after(simulated, [1, 2])
    assert clock.now == pytest.approx(0.007)


def test_the_next_pass_makes_up_for_a_late_timer() -> None:
    clock, late = Clock(), 0.0
    spec = TimedModelConfig.parse("timed:step_ms=10")
    simulated = TimedModel("timed:", spec, 64, 64, clock, lambda seconds: clock.sleep(seconds + late))
    late = 1e-4
    for _ in range(10):
        logits_after(simulated, [1])
    assert clock.now == pytest.approx(10 * 0.01 + late)
    late = 3e-3  # longer than a timer's delay: the processor was busy
    logits_after(simulated, [1])
    logits_after(simulated, [1])
    assert clock.now == pytest.approx(12 * 0.01 + 2 * late - MOST_LATE_S)


def test_the_probe_finds_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    cost = measure_row_cost(model("timed:step_ms=1,knee_rows=32", 400, clock), 64, repeats=2)
    assert [cost(rows) for rows in (8, 32, 64)] == pytest.approx([0.001, 0.001, 0.002])


# Text


def test_the_whole_past_decides_whatever_its_slots() -> None:
    tokens = text(TILE + 20)
    there = logits_after(model(), tokens)
    elsewhere = logits_after(model(), tokens, list(range(500, 500 - len(tokens), -1)))
    assert torch.equal(there, elsewhere)
    other = logits_after(model(), [tokens[0] + 1, *tokens[1:]])
    assert not any(torch.equal(a, b) for a, b in zip(there, other, strict=True))


def test_a_wrong_slot_gives_wrong_tokens() -> None:
    simulated = model()
    right = logits_after(simulated, [10, 11, 12, 13])[-1]
    slot_table = SlotTable()
    slot_table.slots = [1, 2, 9, 4]
    wrong = simulated.run([slot_table.row(13, 3)], [0]).logits[0]
    assert right.argmax() != wrong.argmax()


def test_the_seed_chooses_the_text() -> None:
    one, other = (logits_after(model(f"{QUICK},seed={seed}"), text(50)).argmax(-1) for seed in (0, 1))
    assert (one == other).float().mean() < 0.1


def test_it_passes_the_probe_of_rows() -> None:
    assert is_row_invariant(model())
    assert is_row_invariant(model(f"{QUICK},agreement=0.8"))


def test_hidden_states_are_token_and_position() -> None:
    simulated, slot_table = model(), SlotTable()
    slot_table.slots = [5, 6]
    output = simulated.run([slot_table.row(70, 0), slot_table.row(80, 1)], [1], (0, 3))
    assert output.hidden is not None
    assert output.hidden.tolist() == [[[70, 0]] * 2, [[80, 1]] * 2]


# A draft


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_draft_is_right_at_the_given_rate(agreement: float, spread: float) -> None:
    tokens = text(3000)
    draft = model(f"{QUICK},agreement={agreement},spread={spread}")
    hits = logits_after(model(), tokens).argmax(-1) == logits_after(draft, tokens).argmax(-1)
    assert hits.float().mean().item() == pytest.approx(agreement, abs=0.03)


def test_a_draft_s_second_choice_is_mostly_right_after_a_wrong_first() -> None:
    tokens = text(3000)
    drawn = logits_after(model(), tokens).argmax(-1, keepdim=True)
    chances = logits_after(model(f"{QUICK},agreement=0.8,spread=2"), tokens)
    rank = (chances > chances.gather(1, drawn)).sum(-1)
    share = [(rank == r).float().mean().item() for r in range(4)]
    assert share == sorted(share, reverse=True)
    assert 0.3 < share[1] / (1 - share[0]) < 0.7


def test_blur_and_bias_make_a_draft_miscalibrated() -> None:
    tokens = text(6000)
    drawn = logits_after(model(slots=6000), tokens).argmax(-1)

    def misjudged(spec: str) -> float:
        """Expected calibration error, over ten bins of confidence."""
        beliefs = logits_after(model(f"{QUICK},agreement=0.7,{spec}", slots=6000), tokens).softmax(-1)
        best, choice = beliefs.max(-1)
        tenth = (best * 10).long().clamp(max=9)
        off = [(best[tenth == t].mean() - (choice == drawn)[tenth == t].float().mean()).abs() for t in range(10)]
        weights = [(tenth == t).float().mean() for t in range(10)]
        return float(sum(o * w for o, w in zip(off, weights, strict=True) if w > 0))

    assert misjudged("blur=0") < 0.03
    assert misjudged("blur=2") > 0.05
    assert misjudged("blur=0,bias=3") > 0.15


def test_beliefs_are_distributions() -> None:
    chances = logits_after(model(f"{QUICK},agreement=0.6"), text(200)).exp()
    assert chances.sum(-1).max() < 1.001
    assert (chances > math.exp(UNLISTED + 1)).sum(-1).max() <= 8


@pytest.mark.parametrize(("agreement", "spread"), [(0.5, 0.0), (0.8, 0.0), (0.8, 2.0), (0.95, 4.0)])
def test_log_odds_average_to_the_agreement(agreement: float, spread: float) -> None:
    mean = mean_log_odds(agreement, spread)
    normal = random.Random(5)
    chances = [1 / (1 + math.exp(-mean - spread * normal.gauss(0, 1))) for _ in range(20000)]
    assert fmean(chances) == pytest.approx(agreement, abs=0.01)


# Names


def test_a_name_is_the_whole_configuration() -> None:
    spec = TimedModelConfig.parse("timed:vocabulary=64, step_ms=2.5,agreement=0.75")
    assert (spec.vocabulary, spec.step_ms, spec.agreement) == (64, 2.5, 0.75)
    assert TimedModelConfig.parse("timed:") == TimedModelConfig()
    assert fake_vocabulary("timed:vocabulary=64,step_ms=2.5") == fake_vocabulary("timed:vocabulary=64,agreement=0.1")
    assert fake_vocabulary("timed:vocabulary=64") != fake_vocabulary("timed:vocabulary=65")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("timed:speed=9", "speed: is not known here"),
        ("timed:vocabulary=2", "vocabulary: must be at least 16"),
        ("timed:agreement=1.5", "agreement: must be at most 1"),
        ("timed:step_ms=fast", "step_ms: must be a number"),
        ("timed:512", "512: is not known here"),
    ],
)
def test_a_malformed_name_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ModelNotFoundError, match=complaint):
        resolve_model(name)


def test_a_timed_model_does_not_pass_for_another() -> None:
    assert served_name("timed:step_ms=9", None) == "timed:step_ms=9"
    assert served_name("timed:step_ms=9", "timed:h200") == "timed:h200"
    assert served_name("/models/llama", "gpt") == "gpt"
    assert served_name("/models/llama", None) == "llama"
    with pytest.raises(ValueError, match="begins with 'timed:', not as 'gpt'"):
        served_name("timed:step_ms=9", "gpt")
