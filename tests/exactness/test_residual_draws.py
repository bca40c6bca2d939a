"""`residual` with hashed noise and tensors: counted over seeds, its output has the target's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.noise import NoisePurpose, noise_key, uniform
from paceline.core.sampling import draw, probabilities
from paceline.core.strategies.block_verification import accept_block
from paceline.core.strategies.residual import AcceptanceRule, Residual, accept_each, residual_weights
from paceline.core.strategies.verifier import VerificationInput
from paceline.core.tree import TokenTree
from paceline.drafting.draw_prediction import (
    WEIGHT_SUM,
    SampledToken,
    draw_token,
    quantised_distribution,
    sample_draft_tokens,
)
from paceline.grammar import grammar_from_choices
from tests.exactness.test_draw_distribution import SIGNIFICANCE, chi_square_tail, plain_rows
from tests.exactness.test_sampling import reference_distribution, reference_logits
from tests.exactness.verification_inputs import verification_input
from tests.helpers.grammars import END, PIECES, grammars
from tests.helpers.llamas import VOCABULARY

FLAT, PEAKED, SMALL = 0.3, 3.0, 8
EVEN_PAIRS = [1 / 16] * 16


def logits(seed: int, spread: float) -> Tensor:
    return torch.randn(SMALL, generator=torch.Generator().manual_seed(seed)) * spread


def sampled(logits_V: Tensor, row: SamplingRow) -> SampledToken:
    [guess] = sample_draft_tokens(logits_V[None], [row])
    assert guess is not None
    return guess


def shares(guess: SampledToken) -> list[float]:
    return [guess.distribution.get(token, 0) / sum(guess.distribution.values()) for token in range(SMALL)]


def test_every_key_draws_by_weight() -> None:
    """The whole range of keys, in even steps."""
    distribution = {3: 1, 4: 5, 9: 2}
    keys = [i * (2**64 // 64) for i in range(64)]
    assert Counter(draw_token(distribution, key) for key in keys) == {3: 8, 4: 40, 9: 16}
    assert draw_token(distribution, 2**64 - 1) == 9
    assert draw_token({7: 3}, 0) == draw_token({7: 3}, 2**64 - 1) == 7


def test_rounding_leaves_out_what_weighs_nothing_and_sorts() -> None:
    assert list(quantised_distribution([5, 2, 9], [0.75, 0.25, 1e-6]).items()) == [(2, 16384), (5, 49151)]
    assert quantised_distribution([5], [1.0]) == {5: WEIGHT_SUM}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"frequency_penalty": 1.5, "bad_words": ((2,),)},
    ],
    ids=str,
)
def test_a_guess_s_distribution_follows_the_request_s_rules(settings: dict[str, object]) -> None:
    """Penalties along the path, too."""
    params = SamplingParams(**settings)
    guess = sampled(logits(1, 1.0), SamplingRow(params, 5, History(params, [1], [4], SMALL), [3, 3]))
    expected = reference_distribution(reference_logits(logits(1, 1.0).tolist(), params, [1], [4, 3, 3]), params)
    assert shares(guess) == pytest.approx(expected, abs=2e-5)
    assert guess.distribution.keys() == {token for token, p in enumerate(expected) if p}


def test_at_temperature_0_the_guess_is_the_largest_logit() -> None:
    guess = sampled(logits(1, 1.0), *plain_rows(SamplingParams(temperature=0), 1, SMALL))
    assert guess.distribution == {guess.token: WEIGHT_SUM}
    assert guess.token == logits(1, 1.0).argmax()


def test_columns_may_stand_for_other_tokens() -> None:
    ids = torch.arange(SMALL) * 10 + 3
    [guess] = sample_draft_tokens(logits(1, 1.0)[None], plain_rows(SamplingParams(), 1, 100), ids)
    assert guess is not None
    assert set(guess.distribution) <= set(ids.tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_an_allowed_column_there_is_no_token(temperature: float) -> None:
    """A head of a smaller vocabulary under a grammar: the chain ends there; other requests' chains do not."""
    params = SamplingParams(temperature=temperature, seed=1, stop_token_ids=(END,))
    state = grammars().start(grammar_from_choices(["abc"]), (END,), [])
    state.wait(30.0)
    known = torch.tensor([token for token in range(VOCABULARY) if PIECES[token : token + 1] != ["bc"]])
    history = History(params, [2], [], VOCABULARY, state)
    rows = [SamplingRow(params, 1, history), SamplingRow(params, 2, history, [PIECES.index("a")])]
    first, second = sample_draft_tokens(torch.zeros(2, len(known)), rows, known)
    assert first is not None
    assert second is not None
    known = known[[PIECES[token : token + 1] != ["b"] for token in known.tolist()]]
    first, second = sample_draft_tokens(torch.zeros(2, len(known)), rows, known)
    assert first is not None
    assert second is None


@pytest.mark.parametrize("spread", [FLAT, PEAKED])
def test_many_guesses_have_the_distribution_that_is_sent(spread: float) -> None:
    rows = plain_rows(SamplingParams(seed=5), 20_000, SMALL)
    guesses = sample_draft_tokens(logits(3, spread).expand(len(rows), -1), rows)
    counts = Counter(guess.token for guess in guesses)
    assert chi_square_tail([counts[token] for token in range(SMALL)], shares(guesses[0])) > SIGNIFICANCE
    assert len({guess.log_prob for guess in guesses}) == 1, "a score does not depend on the token"


def test_a_uniform_number_may_be_0_and_is_never_1() -> None:
    assert uniform(0) == 0.0
    assert uniform(2**64 - 1) < 1.0


def test_keys_of_purposes_and_places_differ() -> None:
    several = ((), (0,), (1,), (0, 1), (1, 0))
    keys = [noise_key(seed, purpose, *places) for seed in (0, 1) for purpose in NoisePurpose for places in several]
    assert len(set(keys)) == len(keys)


def test_noise_of_purposes_is_unrelated() -> None:
    """Of tests, replacements and so on, and of the target's draws and the draft's guesses."""
    rows = plain_rows(SamplingParams(seed=2), 20_000, 4)
    flat = torch.zeros(len(rows), 4)
    columns = [[int(4 * uniform(noise_key(2, purpose, row.position, 0))) for row in rows] for purpose in NoisePurpose]
    columns += [draw(flat, rows).tolist(), [guess.token for guess in sample_draft_tokens(flat, rows)]]
    for first, second in itertools.combinations(columns, 2):
        counts = Counter(zip(first, second, strict=True))
        assert chi_square_tail([counts[a, b] for a in range(4) for b in range(4)], EVEN_PAIRS) > SIGNIFICANCE


def test_guesses_on_another_path_have_other_noise() -> None:
    params = SamplingParams(seed=4)
    history = History(params, [], [], SMALL)
    paths = ([], [1], [2], [1, 2], [2, 1], [1, 2, 3])
    guesses = {sampled(torch.zeros(SMALL), SamplingRow(params, 30, history, path)).token for path in paths}
    assert len(guesses) > 3


def test_what_is_left_is_the_target_s_surplus_or_all_of_it() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]])
    for weight, taken, left in (
        (1.0, {0: 0.7, 2: 0.1}, [0.0, 0.3, 0.1]),
        (0.5, {0: 0.2}, [0.05, 0.15, 0.1]),
        (1.0, {}, [0.5, 0.3, 0.2]),
        (1.0, {0: 0.5, 1: 0.3, 2: 0.2}, [0.5, 0.3, 0.2]),
    ):
        assert residual_weights(target, [weight], [taken])[0].tolist() == pytest.approx(left)


SIZE, LENGTH, SEEDS = 4, 3, 1500
TABLE = torch.randn(2, SIZE + 1, SIZE, generator=torch.Generator().manual_seed(12))
"""[target or draft, token before or none, token]: logits. The draft's are the target's, and something else."""
TARGET, DRAFT = TABLE[0], TABLE[0] + 0.6 * TABLE[1]


class Request:
    """One that is decoded by hand, from guesses ahead of its root."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.tokens: list[int] = []
        self.tree = TokenTree(0, 0, chain=True)
        self.history = History(params, [0], [], SIZE)

    def row(self, depth: int) -> SamplingRow:
        return SamplingRow(self.params, self.tree.position + 1 + depth, self.history, self.tree.tokens[1 : 1 + depth])

    def logits(self, model: Tensor, depth: int) -> Tensor:
        return model[[SIZE, *self.tokens, *self.tree.tokens[1 : 1 + depth]][-1]]

    def commit(self, committed: Sequence[int]) -> None:
        self.tree.commit(committed)
        self.history.extend(committed)
        self.tokens += committed


def decoded(
    settings: dict[str, object], count: int, spread: float, rule: AcceptanceRule, guesses: int, rows: int
) -> Counter[tuple[int, ...]]:
    """Three tokens for each of `count` seeds, by as many steps as it takes. `rows`: of guesses, in a step."""
    requests = [Request(SamplingParams(**settings, seed=seed)) for seed in range(count)]
    verifier = Residual(rule)
    while running := [each for each in requests if len(each.tokens) < LENGTH]:
        for _ in range(guesses):
            ends = [(each, each.tree.size) for each in running if each.tree.size < guesses]
            if ends:
                stacked = spread * torch.stack([each.logits(DRAFT, end) for each, end in ends])
                sampled_tokens = sample_draft_tokens(stacked, [each.row(end) for each, end in ends])
                for (each, end), guess in zip(ends, sampled_tokens, strict=True):
                    each.tree.add(end, *guess)
        step, stacked_logits = [], []
        for each in running:
            verified = each.tree.nodes()[:rows]
            depths = range(len(verified) + 1)
            step.append(VerificationInput(each.tree, verified, [each.row(d) for d in depths], [0, *each.tokens]))
            stacked_logits += [each.logits(TARGET, depth) for depth in depths]
        for each, verdict in zip(running, verifier.verify(spread * torch.stack(stacked_logits), step), strict=True):
            each.commit(verdict.tokens(each.tree))
    return Counter(tuple(each.tokens[:LENGTH]) for each in requests)


def tail(counts: Counter[tuple[int, ...]], spread: float, params: SamplingParams) -> float:
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        distribution = {
            (*path, token): weight * p
            for path, weight in distribution.items()
            for token, p in enumerate(
                reference_distribution(
                    reference_logits((spread * TARGET[[SIZE, *path][-1]]).tolist(), params, [0], path), params
                )
            )
        }
    return chi_square_tail([counts[each] for each in distribution], list(distribution.values()))


SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.85},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias and bars": {"logit_bias": {1: 1.5}, "bad_words": ((3,), (0, 1))},
}
CHAINS = [(3, 3), (4, 1), (0, 0), (1, 0), (1, 1)]
"""Numbers of guesses, and of those with rows."""
DECODED = [
    *((settings, FLAT, accept_each, 3, 2) for settings in SETTINGS),
    *((settings, PEAKED, accept_block, 3, 2) for settings in SETTINGS),
    *(("plain", 1.0, rule, *chain) for chain in CHAINS for rule in (accept_each, accept_block)),
]


@pytest.mark.parametrize(
    ("name", "spread", "rule", "guesses", "rows"),
    [pytest.param(*c, marks=() if c[0] in ("plain", "top_p") and c[3] > 1 else pytest.mark.slow) for c in DECODED],
)
def test_decoding_has_the_targets_distribution(
    name: str, spread: float, rule: AcceptanceRule, guesses: int, rows: int
) -> None:
    """Whatever the rules, the number of guesses, and how many of them have rows."""
    counts = decoded(SETTINGS[name], SEEDS, spread, rule, guesses, rows)
    assert tail(counts, spread, SamplingParams(**SETTINGS[name])) > SIGNIFICANCE


@pytest.mark.parametrize("rule", [accept_each, accept_block])
def test_at_temperature_0_it_is_greedy_decoding(rule: AcceptanceRule) -> None:
    expected = [SIZE]
    while len(expected) <= LENGTH:
        expected.append(int(TARGET[expected[-1]].argmax()))
    assert decoded({"temperature": 0}, 1, PEAKED, rule, 3, 2) == {tuple(expected[1:]): 1}


def shared_noise(seed: int, purpose: NoisePurpose, *places: int) -> int:
    """Tests and guesses share theirs: a guess drawn by a small number is accepted more often."""
    return noise_key(seed, NoisePurpose.GUESS, places[0] if places else 0)


def colder_guess(distribution: dict[int, int], key: int) -> int:
    """The draft samples at half the temperature of the distribution it sends."""
    return draw_token({token: weight * weight for token, weight in distribution.items()}, key)


STRATEGY, DRAFTS = "paceline.core.strategies.residual", "paceline.drafting.draw_prediction"
MUTANTS: dict[str, dict[str, object]] = {
    "recovered tokens from the target": {f"{STRATEGY}.residual_weights": lambda target, weights, taken: target},
    "noise without purposes": {f"{STRATEGY}.noise_key": shared_noise, f"{DRAFTS}.noise_key": shared_noise},
    "a false draft temperature": {f"{DRAFTS}.draw_token": colder_guess},
    "a false target temperature": {f"{STRATEGY}.probabilities": lambda logits, rows: probabilities(1.5 * logits, rows)},
}


@pytest.mark.parametrize("mutant", [*MUTANTS, ""])
def test_what_breaks_the_distribution_is_detected(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken in the code that runs, which passes without."""
    for name, changed in MUTANTS.get(mutant, {}).items():
        monkeypatch.setattr(name, changed)
    counts = decoded({}, SEEDS, 1.0, accept_each, 2, 1)
    assert (tail(counts, 1.0, SamplingParams()) < SIGNIFICANCE) == bool(mutant)


def test_requests_of_a_step_are_independent() -> None:
    """Alone or together, with chains of several lengths, some of them plain, the last guess without a row."""
    requests, rule = [], Residual()
    for seed in range(12):
        params = SamplingParams(seed=seed, temperature=seed % 4 / 2)
        chain = [sampled(logits(depth, 1.0), row) for depth, row in enumerate(plain_rows(params, seed % 4, SMALL))]
        distributions = {depth: guess.distribution for depth, guess in enumerate(chain, 1)}
        tokens = [guess.token for guess in chain]
        unverified = int(seed % 4 > 1)
        requests.append(verification_input(params, SMALL, tokens, distributions=distributions, unverified=unverified))
    stacked = [torch.stack([logits(10 + depth, 1.0) for depth in range(len(each.rows))]) for each in requests]
    alone = [rule.verify(one, [each])[0] for one, each in zip(stacked, requests, strict=True)]
    assert rule.verify(torch.cat(stacked), requests) == alone
    assert len({len(verdict.accepted) for verdict in alone}) > 2


def test_probabilities_match_the_reference() -> None:
    several = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2)]
    rows = [row for params in several for row in plain_rows(params, 1, 5)]
    values = torch.tensor([1.0, 2.0, 0.5, 2.0, -1.0])
    first, greedy, filtered = probabilities(values.expand(3, -1), rows).tolist()
    assert first == pytest.approx(reference_distribution(values.tolist(), several[0]), abs=1e-6)
    assert filtered == pytest.approx(reference_distribution(values.tolist(), several[2]), abs=1e-6)
    assert greedy == [0, 1, 0, 0, 0]
