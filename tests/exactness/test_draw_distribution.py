"""The drawn distribution: what the real draw does with its noise, swept over a grid or counted over many positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.noise import gumbel
from paceline.core.sampling import draw
from tests.exactness.test_identity import joint
from tests.exactness.test_sampling import reference_distribution, reference_logits

SIGNIFICANCE = 1e-6


def sweep(levels: int) -> Tensor:
    """Gumbel noise of evenly spaced integers."""
    step = 2**32 // levels
    return gumbel(torch.arange(step // 2, 2**32, step))


@pytest.mark.parametrize("first", [0.5, 0.3, 0.05, 0.001, 1e-5])
def test_two_tokens_swept_over_all_noise_have_their_probabilities(first: float) -> None:
    """A draw is a function of its noise: counted over all combinations on a grid, it has the distribution."""
    levels = 4096
    scores = sweep(levels) + math.log(first), sweep(levels) + math.log(1 - first)
    losses = torch.searchsorted(scores[1].sort().values, scores[0])  # how often the first beats the second
    assert losses.sum().item() / levels**2 == pytest.approx(first, abs=1 / levels)


@pytest.mark.parametrize("distribution", [(0.2, 0.3, 0.5), (0.98, 0.015, 0.005), (1 / 3, 1 / 3, 1 / 3)])
def test_three_tokens_swept_over_all_noise_have_their_probabilities(distribution: tuple[float, float, float]) -> None:
    levels = 160
    combinations = torch.cartesian_prod(*[sweep(levels)] * 3)
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


def many_draws(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The drawn token of each row, all of the same logits [V]."""
    batches = [rows[start : start + 2000] for start in range(0, len(rows), 2000)]
    return torch.cat([draw(logits.expand(len(batch), -1), batch) for batch in batches])


def tail_of(drawn: Tensor, distribution: Sequence[float]) -> float:
    return chi_square_tail(drawn.bincount(minlength=len(distribution)).tolist(), distribution)


def tail_of_pairs(first: Tensor, second: Tensor, distribution: Sequence[Sequence[float]]) -> float:
    """`distribution`: [of the first, of the second]."""
    return tail_of(first * len(distribution[0]) + second, [p for row in distribution for p in row])


def random_logits(seed: int, spread: float = 1.0, size: int = 12) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


FLAT, PEAKED = 0.3, 4.0
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
    logits, params = random_logits(9, spread), SamplingParams(**settings)
    history = History(params, [1, 2], [4, 5, 5], len(logits))
    count = 10_000 if history.has_logits_rules else 20_000
    if across == "positions":
        rows = [SamplingRow(params, position, history) for position in range(count)]
    else:
        rows = [SamplingRow(params.model_copy(update={"seed": seed}), 3, history) for seed in range(count)]
    distribution = reference_distribution(reference_logits(logits.tolist(), params, [1, 2], [4, 5, 5]), params)
    assert tail_of(many_draws(logits, rows), distribution) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("spread", [FLAT, PEAKED])
def test_many_draws_from_a_large_vocabulary(spread: float) -> None:
    logits = random_logits(9, spread, 2048)
    drawn = many_draws(logits, plain_rows(SamplingParams(seed=1), 16_000, 2048))
    assert tail_of(drawn, logits.double().softmax(-1).tolist()) > SIGNIFICANCE


@pytest.mark.parametrize("across", ["positions", pytest.param("seeds", marks=pytest.mark.slow)])
def test_draws_next_to_each_other_are_unrelated(across: str) -> None:
    logits = random_logits(2, size=5)
    distribution = logits.double().softmax(-1)
    rows = plain_rows(SamplingParams(seed=3), 40_000, 5)
    if across == "seeds":
        rows = [SamplingRow(SamplingParams(seed=row.position), 3, row.history) for row in rows]
    drawn = many_draws(logits, rows)
    assert tail_of_pairs(drawn[::2], drawn[1::2], torch.outer(distribution, distribution).tolist()) > SIGNIFICANCE


@pytest.mark.parametrize("closeness", [0.3, 1.5])
def test_draft_and_target_draw_together_as_the_algebra_says(closeness: float) -> None:
    """With the same noise and another model: the joint distribution of `test_identity`, acceptance included."""
    target = random_logits(6, size=6)
    draft = target + random_logits(8, closeness, 6)
    rows = plain_rows(SamplingParams(seed=4), 20_000, 6)
    expected = joint(*(logits.double().softmax(-1).tolist() for logits in (target, draft)))
    assert tail_of_pairs(many_draws(draft, rows), many_draws(target, rows), expected) > SIGNIFICANCE


def test_the_statistics_can_fail() -> None:
    """Distributions a little off are rejected, the right one is not."""
    distribution = (0.1, 0.2, 0.3, 0.4)
    assert chi_square_tail([4010, 7950, 12040, 16000], distribution) > 0.1
    assert chi_square_tail([4400, 7600, 12000, 16000], distribution) < SIGNIFICANCE
    with pytest.raises(AssertionError, match="probability 0"):
        chi_square_tail([1, 10, 10], (0.0, 0.5, 0.5))
    logits, rows = random_logits(9), plain_rows(SamplingParams(), 20_000, 12)
    wrong_temperature = reference_distribution(logits.tolist(), SamplingParams(temperature=1.1))
    assert tail_of(many_draws(logits, rows), wrong_temperature) < SIGNIFICANCE
    reused_noise = [row._replace(position=row.position // 2) for row in plain_rows(SamplingParams(), 10_000, 4)]
    drawn = many_draws(torch.zeros(4), reused_noise)
    assert tail_of_pairs(drawn[::2], drawn[1::2], [[1 / 16] * 4] * 4) < SIGNIFICANCE
