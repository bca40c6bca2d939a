"""What a GPU draws and scores is what a CPU does, and the host waits for it once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow, apply_logits_rules
from paceline.core.noise import gumbel_choice
from paceline.core.sampling import TOP_P_CANDIDATES, draw, probabilities, scores, top_probabilities, top_scores
from paceline.engine.log_probabilities import log_probs
from tests.helpers.pretended_gpu import DEVICE, GpuTensor, pretended_gpu

VOCABULARY = 700
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top-p": {"top_p": 0.8},
    "bias": {"logit_bias": {3: 5.0, 9: -5.0}},
    "allowed": {"allowed_token_ids": tuple(range(0, VOCABULARY, 3))},
    "bad words": {"bad_words": ((5,), (7, 8)), "min_tokens": 9, "max_tokens": 20, "stop_token_ids": (1, 2)},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "everything": {"top_k": 30, "logit_bias": {4: 1.0}, "bad_words": ((6,),), "repetition_penalty": 0.8},
    "nothing is allowed": {"temperature": 0.0, "allowed_token_ids": (11,), "bad_words": ((11,),)},
}


class Evens:
    """A grammar that allows every second token, and after one draft token all."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        return None if len(path) == 1 else np.arange(VOCABULARY) % 2 == 0


def some_rows(names: Sequence[str], *, grammar: bool = False) -> list[SamplingRow]:
    """Two rows of each, one of them after two draft tokens."""
    rows, rng = [], random.Random(2)
    for name in names:
        params = SamplingParams(**{"temperature": 0.8, "seed": rng.randrange(2**64), **RULES[name]})
        tokens = rng.choices(range(VOCABULARY), k=40)
        history = History(params, tokens[:30], tokens[30:], VOCABULARY, Evens() if grammar else None)
        rows += [SamplingRow(params, 40, history), SamplingRow(params, 42, history, (tokens[3], 7))]
    return rows


def logits_of(rows: Sequence[SamplingRow], spread: float = 3.0) -> torch.Tensor:
    return torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(1)) * spread


CASES = [(each,) for each in RULES] + [tuple(RULES)]


@pytest.mark.parametrize("grammar", [False, True], ids=["", "grammar"])
@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_a_step_reads_its_draws_and_nothing_else(names: tuple[str, ...], grammar: bool) -> None:
    """Temperatures, seeds, filters, masks and penalties once made two to some hundred blocking copies."""
    expected = draw(logits_of(some_rows(names, grammar=grammar)), some_rows(names, grammar=grammar))
    rows = some_rows(names, grammar=grammar)
    with pretended_gpu() as reads:
        for tokens in ([1, 2], [3]):  # states of penalties are on the GPU when they grow
            drawn = draw(GpuTensor(logits_of(rows)), rows).tolist()
            assert len(reads) == 1
            reads.clear()
            if tokens == [1, 2]:
                assert drawn == expected.tolist()
            for row in rows:
                row.history.extend(tokens)
            assert not reads


@pytest.mark.parametrize("names", CASES, ids="+".join)
def test_rules_and_scores_have_the_bits_of_a_cpu(names: tuple[str, ...]) -> None:
    rows = some_rows(names, grammar=True)
    logits = logits_of(rows)
    expected = [apply_logits_rules(logits, rows), scores(logits, rows), probabilities(logits, rows)]
    rows = some_rows(names, grammar=True)
    with pretended_gpu():
        given = GpuTensor(logits)
        found = [function(given, rows) for function in (apply_logits_rules, scores, probabilities)]
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, GpuTensor)
        assert torch.equal(ours.inner, theirs)


def test_a_flat_distribution_is_drawn_again() -> None:
    """Its top-p has more tokens than are tried before the draws are read."""
    rows = some_rows(["top-p", "plain", "greedy"])
    logits = logits_of(rows, spread=0.01)
    expected = draw(logits, rows).tolist()
    assert (probabilities(logits, rows)[0] > 0).sum() > TOP_P_CANDIDATES[-1]
    with pretended_gpu() as reads:
        assert draw(GpuTensor(logits), rows).tolist() == expected
        assert len(reads) == 2


@pytest.mark.parametrize("names", [("greedy",), ("filters",), tuple(RULES)], ids="+".join)
def test_predicted_draws_wait_for_nothing(names: tuple[str, ...]) -> None:
    rows = some_rows(names)
    logits = logits_of(rows)
    expected = [*top_scores(logits, rows, 8), *top_probabilities(logits, rows, 8)]
    with pretended_gpu() as reads:
        found = [*top_scores(GpuTensor(logits), rows, 8), *top_probabilities(GpuTensor(logits), rows, 8)]
        assert not reads
    assert all(torch.equal(ours.inner, theirs) for ours, theirs in zip(found, expected, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("listed", [(), (9, 2, 5)], ids=["most probable", "listed"])
def test_log_probabilities_are_read_once(listed: tuple[int, ...]) -> None:
    logits = (torch.randn(6, VOCABULARY) * 2).round()  # many are equal
    tokens = [*range(6)]
    expected = log_probs(logits, tokens, 20, listed)
    with pretended_gpu() as reads:
        assert log_probs(GpuTensor(logits), tokens, 20, listed) == expected
        assert len(reads) == 1


def test_a_choice_by_weights_waits_for_nothing() -> None:
    weights = torch.rand(3, VOCABULARY)
    expected = gumbel_choice(weights.clone(), [1, 2, 3], [4, 5, 6])
    with pretended_gpu() as reads:
        found = gumbel_choice(GpuTensor(weights.clone()), [1, 2, 3], [4, 5, 6])
        assert not reads
    assert torch.equal(found.inner, expected)  # type: ignore[attr-defined]


def test_the_stand_in_sees_what_a_gpu_is_waited_for() -> None:
    with pretended_gpu() as reads:
        given = GpuTensor(torch.ones(3, 4))
        bool((given > 0).all())
        float(given.sum())
        given.argmax(-1).tolist()
        given.cpu()
        assert len(reads) == 4
        for blocking in (
            lambda: given[[0, 1]],
            lambda: given + torch.ones(4),
            lambda: given * torch.tensor([1.0, 2.0, 3.0], device=DEVICE)[:, None],
        ):
            with pytest.raises(RuntimeError, match="blocking copy"):
                blocking()
