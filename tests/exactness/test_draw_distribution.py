"""The drawn distribution: what the real draw does with its noise, swept over a grid or counted over many positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.sampling import History, SamplingRow, draw, gumbel
from tests.exactness.test_identity import joint
from tests.exactness.test_sampling import reference_distribution, reference_logits

SIGNIFICANCE = 1e-6


def sweep(levels: int) -> Tensor:
    """Evenly spaced values of the noise's integers."""
    step = 2**32 // levels
    return torch.arange(step // 2, 2**32, step)


class TestSweep:
    """A draw is a function of its noise: counted over all combinations on a grid, it has the distribution."""

    @pytest.mark.parametrize("first", [0.5, 0.3, 0.05, 0.001, 1e-5])
    def test_two_tokens(self, first: float) -> None:
        levels = 4096
        noise = gumbel(sweep(levels))
        scores = noise + math.log(first), noise + math.log(1 - first)
        losses = torch.searchsorted(scores[1].sort().values, scores[0])  # how often the first beats the second
        assert losses.sum().item() / levels**2 == pytest.approx(first, abs=1 / levels)

    @pytest.mark.parametrize("distribution", [(0.2, 0.3, 0.5), (0.98, 0.015, 0.005), (1 / 3, 1 / 3, 1 / 3)])
    def test_three_tokens(self, distribution: tuple[float, float, float]) -> None:
        levels = 160
        noise = gumbel(sweep(levels))
        combinations = torch.cartesian_prod(noise, noise, noise)
        counts = (combinations + torch.tensor(distribution).log()).argmax(-1).bincount(minlength=3)
        assert (counts / levels**3).tolist() == pytest.approx(distribution, abs=1.5 / levels)


def chi_square_tail(counts: Sequence[int], distribution: Sequence[float]) -> float:
    """The probability of counts at least this far from the distribution. Cells with small expectations are merged."""
    total = sum(counts)
    cells = sorted(zip(distribution, counts, strict=True), reverse=True)
    large = [(p * total, n) for p, n in cells if p * total >= 10]
    small = [(p * total, n) for p, n in cells if p * total < 10]
    rest = (sum(e for e, _ in small), sum(n for _, n in small))
    if rest[0] == 0:
        assert rest[1] == 0, "a token of probability 0 was drawn"
    else:
        large.append(rest)
    statistic = sum((n - e) ** 2 / e for e, n in large)
    degrees = torch.tensor((len(large) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def plain_rows(params: SamplingParams, count: int, vocabulary: int) -> list[SamplingRow]:
    history = History(params, [], [], vocabulary)
    return [SamplingRow(params, position, history) for position in range(count)]


def many_draws(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    drawn: list[int] = []
    for start in range(0, len(rows), 2000):
        batch = rows[start : start + 2000]
        drawn += draw(logits.expand(len(batch), -1), batch).tolist()
    return drawn


FLAT, PEAKED, SMALL = 0.3, 4.0, 12
DISTRIBUTIONS = {
    "flat": (FLAT, {}),
    "peaked": (PEAKED, {}),
    "cold": (PEAKED, {"temperature": 0.3}),
    "top_k": (FLAT, {"top_k": 4}),
    "top_p": (PEAKED, {"top_p": 0.8, "temperature": 2.0}),
    "min_p": (PEAKED, {"min_p": 0.05}),
    "penalties": (FLAT, {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}),
    "bias and bars": (FLAT, {"logit_bias": {1: 2.0, 2: -1.0}, "bad_words": ((3,), (5, 4))}),
}


@pytest.mark.parametrize("across", ["positions", pytest.param("seeds", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("spread", "settings"), DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_many_draws_have_the_distribution(spread: float, settings: dict[str, object], across: str) -> None:
    logits = torch.randn(SMALL, generator=torch.Generator().manual_seed(9)) * spread
    params = SamplingParams(**settings)
    history = History(params, [1, 2], [4, 5, 5], SMALL)
    count = 10_000 if history.has_logits_rules else 20_000
    if across == "positions":
        rows = [SamplingRow(params, position, history) for position in range(count)]
    else:
        rows = [SamplingRow(params.model_copy(update={"seed": seed}), 3, history) for seed in range(count)]
    distribution = reference_distribution(reference_logits(logits.tolist(), params, [1, 2], [4, 5, 5]), params)
    counts = torch.tensor(many_draws(logits, rows)).bincount(minlength=SMALL).tolist()
    assert chi_square_tail(counts, distribution) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("spread", [FLAT, PEAKED])
def test_many_draws_from_a_large_vocabulary(spread: float) -> None:
    logits = torch.randn(2048, generator=torch.Generator().manual_seed(9)) * spread
    params = SamplingParams(seed=1)
    counts = torch.tensor(many_draws(logits, plain_rows(params, 16_000, 2048))).bincount(minlength=2048).tolist()
    assert chi_square_tail(counts, logits.double().softmax(-1).tolist()) > SIGNIFICANCE


@pytest.mark.parametrize("across", ["positions", pytest.param("seeds", marks=pytest.mark.slow)])
def test_draws_next_to_each_other_are_unrelated(across: str) -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(2))
    distribution = logits.double().softmax(-1)
    rows = plain_rows(SamplingParams(seed=3), 40_000, 5)
    if across == "seeds":
        rows = [SamplingRow(SamplingParams(seed=row.position), 3, row.history) for row in rows]
    first, second = torch.tensor(many_draws(logits, rows)).view(-1, 2).unbind(-1)
    counts = (first * 5 + second).bincount(minlength=25).tolist()
    assert chi_square_tail(counts, torch.outer(distribution, distribution).flatten().tolist()) > SIGNIFICANCE


@pytest.mark.parametrize("closeness", [0.3, 1.5])
def test_draft_and_target_draw_together_as_the_algebra_says(closeness: float) -> None:
    """With the same noise and another model: the joint distribution of `test_identity`, acceptance included."""
    generator = torch.Generator().manual_seed(6)
    target = torch.randn(6, generator=generator)
    draft = target + closeness * torch.randn(6, generator=generator)
    rows = plain_rows(SamplingParams(seed=4), 20_000, 6)
    pairs = torch.tensor(many_draws(draft, rows)) * 6 + torch.tensor(many_draws(target, rows))
    distributions = [distribution.double().softmax(-1).tolist() for distribution in (target, draft)]
    expected = [p for row in joint(*distributions) for p in row]
    assert chi_square_tail(pairs.bincount(minlength=36).tolist(), expected) > SIGNIFICANCE


class TestChiSquare:
    """It must be able to fail: distributions a little off are rejected, the right one is not."""

    DISTRIBUTION = (0.1, 0.2, 0.3, 0.4)

    def test_right_counts_pass(self) -> None:
        assert chi_square_tail([4010, 7950, 12040, 16000], self.DISTRIBUTION) > 0.1

    def test_wrong_counts_fail(self) -> None:
        assert chi_square_tail([4400, 7600, 12000, 16000], self.DISTRIBUTION) < SIGNIFICANCE

    def test_the_impossible_fails(self) -> None:
        with pytest.raises(AssertionError, match="probability 0"):
            chi_square_tail([1, 10, 10], (0.0, 0.5, 0.5))

    def test_a_wrong_temperature_is_detected(self) -> None:
        logits = torch.randn(SMALL, generator=torch.Generator().manual_seed(9))
        rows = plain_rows(SamplingParams(), 20_000, SMALL)
        counts = torch.tensor(many_draws(logits, rows)).bincount(minlength=SMALL).tolist()
        wrong = reference_distribution(logits.tolist(), SamplingParams(temperature=1.1))
        assert chi_square_tail(counts, wrong) < SIGNIFICANCE

    def test_reused_noise_is_detected(self) -> None:
        logits = torch.zeros(4)
        rows = [
            SamplingRow(row.params, row.position // 2, row.history) for row in plain_rows(SamplingParams(), 10_000, 4)
        ]
        first, second = torch.tensor(many_draws(logits, rows)).view(-1, 2).unbind(-1)
        counts = (first * 4 + second).bincount(minlength=16).tolist()
        assert chi_square_tail(counts, [1 / 16] * 16) < SIGNIFICANCE
