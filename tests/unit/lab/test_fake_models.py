"""Models without weights: they read their past through slots, agree at a given rate, and take a given time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from paceline.model import Model, SlotTable
from paceline.model.row_probe import is_row_invariant, measure_row_cost
from paceline.model.rows import TILE
from paceline.model_names import ModelNotFoundError, fake_vocabulary, resolve_model, served_name
from paceline_lab.fake_models.table_model import TableModel
from paceline_lab.fake_models.timed_config import TimedModelConfig
from paceline_lab.fake_models.timed_model import MOST_LATE_S, UNLISTED, TimedModel

QUICK = "timed:vocabulary=1000,step_ms=0"
SLOTS = 4000


class Clock:
    """Time that passes only in `sleep`. A sleep is late by `late_s`."""

    def __init__(self) -> None:
        self.now = self.late_s = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s


def timed(spec: str = QUICK, clock: Clock | None = None, slots: int = SLOTS) -> TimedModel:
    clock = clock or Clock()
    return TimedModel(spec, TimedModelConfig.parse(spec), slots, slots, clock, clock.sleep)


def table(disagreement: float = 0.0) -> TableModel:
    return TableModel(1000, SLOTS, SLOTS, disagreement)


def logits_after(model: Model, tokens: Sequence[int], slots: Sequence[int] = range(1, SLOTS)) -> torch.Tensor:
    """Logits after each of `tokens`."""
    slot_table = SlotTable(slots[: len(tokens)])
    rows = [slot_table.row(token, i) for i, token in enumerate(tokens)]
    return model.run(rows, range(len(rows))).logits


def text(length: int) -> list[int]:
    return random.Random(0).choices(range(1000), k=length)


@pytest.mark.parametrize("model", [table, timed])
class TestPast:
    def test_tokens_decide_whatever_their_slots(self, model: Callable[[], Model]) -> None:
        tokens = text(TILE + 20)
        there = logits_after(model(), tokens)
        assert torch.equal(there, logits_after(model(), tokens, range(500, 1, -1)))
        assert len(set(there.argmax(-1).tolist())) > 50
        other = logits_after(model(), [tokens[0] + 1, *tokens[1:]])
        assert not torch.equal(there[0], other[0])

    def test_earlier_tokens_count_across_a_tile_s_border(self, model: Callable[[], Model]) -> None:
        one, other = [5] * (TILE + 1), [5] * (TILE - 1) + [6, 5]
        assert logits_after(model(), one)[-1].argmax() != logits_after(model(), other)[-1].argmax()

    def test_a_wrong_slot_gives_wrong_tokens(self, model: Callable[[], Model]) -> None:
        """Otherwise tests of the engine over this model would prove nothing."""
        fake = model()
        right = logits_after(fake, [10, 11, 12, 13])[-1]
        wrong = fake.run([SlotTable([1, 2, 9, 4]).row(13, 3)], [0]).logits[0]
        assert right.argmax() != wrong.argmax()

    def test_hidden_states_are_token_and_position(self, model: Callable[[], Model]) -> None:
        slot_table = SlotTable([5, 6])
        output = model().run([slot_table.row(70, 0), slot_table.row(80, 1)], [1], (0, 3, 7))
        assert output.hidden is not None
        assert output.hidden.tolist() == [[[70, 0]] * 3, [[80, 1]] * 3]


@pytest.mark.parametrize(
    "model",
    [*(TableModel(100, 256, positions) for positions in (2, 17, 512)), timed(), timed(f"{QUICK},agreement=0.8")],
    ids=["2 positions", "17 positions", "table", "timed", "timed draft"],
)
def test_models_pass_the_probes(model: Model) -> None:
    assert is_row_invariant(model)
    assert measure_row_cost(model, 8)(1) >= 0


def test_the_whole_past_of_a_timed_model_decides() -> None:
    tokens = text(TILE + 20)
    one, other = logits_after(timed(), tokens), logits_after(timed(), [tokens[0] + 1, *tokens[1:]])
    assert not (one == other).all(-1).any()


# Time


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01), (64, 0.01), (65, 0.01 * 65 / 64), (640, 0.1)])
def test_a_pass_takes_the_time_of_the_roofline(rows: int, seconds: float) -> None:
    clock = Clock()
    logits_after(timed("timed:step_ms=10,knee_rows=64", clock), [0] * rows)
    assert clock.now == pytest.approx(seconds)


def test_computing_counts_towards_the_deadline() -> None:
    clock, ticking = Clock(), itertools.count(1)
    config = TimedModelConfig.parse("timed:step_ms=10")
    logits_after(TimedModel("timed:", config, 64, 64, lambda: clock.now + 0.003 * next(ticking), clock.sleep), [1, 2])
    assert clock.now == pytest.approx(0.007)


def test_the_next_pass_makes_up_for_a_late_timer() -> None:
    clock = Clock()
    model = timed("timed:step_ms=10", clock)
    clock.late_s = late = 1e-4
    for _ in range(10):
        logits_after(model, [1])
    assert clock.now == pytest.approx(10 * 0.01 + late)
    clock.late_s = late = 3e-3  # longer than a timer's delay: the processor was busy
    logits_after(model, [1])
    logits_after(model, [1])
    assert clock.now == pytest.approx(12 * 0.01 + 2 * late - MOST_LATE_S)


def test_the_probe_finds_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    cost = measure_row_cost(timed("timed:step_ms=1,knee_rows=32", clock, slots=400), 64, repeats=2)
    assert [cost(rows) for rows in (8, 32, 64)] == pytest.approx([0.001, 0.001, 0.002])


# Drafts


@pytest.mark.parametrize(
    ("target", "draft", "agreement"),
    [
        *((table(), table(disagreement), 1 - disagreement) for disagreement in (0.0, 0.3, 1.0)),
        *(
            (timed(), timed(f"{QUICK},agreement={agreement},spread={spread}"), agreement)
            for agreement in (0.0, 0.3, 0.8, 1.0)
            for spread in (0.0, 2.0)
        ),
        (timed(), timed(f"{QUICK},seed=1"), 0.0),
    ],
)
def test_a_draft_is_right_at_the_given_rate(target: Model, draft: Model, agreement: float) -> None:
    tokens = text(3000)
    hits = logits_after(target, tokens).argmax(-1) == logits_after(draft, tokens).argmax(-1)
    assert hits.float().mean().item() == pytest.approx(agreement, abs=0.03)


def test_a_draft_s_second_choice_is_mostly_right_after_a_wrong_first() -> None:
    tokens = text(3000)
    drawn = logits_after(timed(), tokens).argmax(-1, keepdim=True)
    chances = logits_after(timed(f"{QUICK},agreement=0.8,spread=2"), tokens)
    rank = (chances > chances.gather(1, drawn)).sum(-1)
    share = [(rank == r).float().mean().item() for r in range(4)]
    assert share == sorted(share, reverse=True)
    assert 0.3 < share[1] / (1 - share[0]) < 0.7


@pytest.mark.parametrize(
    ("spec", "least", "most"), [("blur=0", 0, 0.03), ("blur=2", 0.05, 1), ("blur=0,bias=3", 0.15, 1)]
)
def test_blur_and_bias_make_a_draft_miscalibrated(spec: str, least: float, most: float) -> None:
    """By the expected calibration error, over ten bins of confidence."""
    tokens = text(6000)
    drawn = logits_after(timed(slots=6000), tokens, range(1, 6001)).argmax(-1)
    draft = timed(f"{QUICK},agreement=0.7,{spec}", slots=6000)
    best, choice = logits_after(draft, tokens, range(1, 6001)).softmax(-1).max(-1)
    tenth = (best * 10).long().clamp(max=9)
    bins = [tenth == t for t in range(10) if (tenth == t).any()]
    hit = (choice == drawn).float()
    error = sum((best[inside].mean() - hit[inside].mean()).abs() * inside.float().mean() for inside in bins)
    assert least <= float(error) < most


def test_beliefs_are_distributions() -> None:
    chances = logits_after(timed(f"{QUICK},agreement=0.6"), text(200)).exp()
    assert chances.sum(-1).max() < 1.001
    assert (chances > math.exp(UNLISTED + 1)).sum(-1).max() <= 8


# Names


def test_a_name_is_the_whole_configuration() -> None:
    spec = TimedModelConfig.parse("timed:vocabulary=64, step_ms=2.5,agreement=0.75")
    assert (spec.vocabulary, spec.step_ms, spec.agreement) == (64, 2.5, 0.75)
    assert TimedModelConfig.parse("timed:") == TimedModelConfig()
    assert fake_vocabulary("timed:vocabulary=64,step_ms=2.5") == fake_vocabulary("timed:vocabulary=64,agreement=0.1")
    assert fake_vocabulary("timed:vocabulary=64") != fake_vocabulary("timed:vocabulary=65")
    model = TableModel.parse("table:64:0.25", slots=300)
    assert (model.vocabulary_size, model.slots, model.max_model_len) == (64, 300, 8192)
    assert model.fingerprint == TableModel.parse("table:64", slots=9).fingerprint
    assert model.fingerprint != TableModel.parse("table:65", slots=9).fingerprint


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
def test_a_malformed_name_of_a_timed_model_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ModelNotFoundError, match=complaint):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", "x", "1", "-5", "64:2", "64:-1", "64:x"])
def test_a_malformed_name_of_a_table_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not table:SIZE or table:SIZE:DISAGREEMENT"):
        TableModel.parse(f"table:{name}", slots=256)


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        ("timed:step_ms=9", None, "timed:step_ms=9"),
        ("timed:step_ms=9", "timed:h200", "timed:h200"),
        ("/models/llama", "gpt", "gpt"),
        ("/models/llama", None, "llama"),
    ],
)
def test_a_model_is_served_under_its_name(model: str, given: str | None, name: str) -> None:
    assert served_name(model, given) == name


def test_a_timed_model_does_not_pass_for_another() -> None:
    with pytest.raises(ValueError, match="begins with 'timed:', not as 'gpt'"):
        served_name("timed:step_ms=9", "gpt")
