"""`residual` with hashed noise and tensors: counted over seeds, its output has the target's distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.sampling import History, NoisePurpose, SamplingRow, draw, noise_key, probabilities, uniform
from paceline.core.strategies import residual
from paceline.core.strategies.block_verification import accept_block
from paceline.core.strategies.residual import AcceptanceRule, Residual, accept_each, residual_weights
from paceline.core.strategies.verifier import VerificationInput
from paceline.core.tree import TokenTree
from paceline.drafting.sampled_drafts import WEIGHT_SUM, draw_token, quantised_distribution, sample_draft_tokens
from paceline.grammar import grammar_from_choices
from tests.exactness.test_draw_distribution import SIGNIFICANCE, chi_square_tail, plain_rows
from tests.exactness.test_sampling import reference_distribution, reference_logits
from tests.helpers.grammars import END, PIECES, grammars
from tests.helpers.llamas import VOCABULARY

FLAT, PEAKED, SMALL = 0.3, 3.0, 8


def logits(seed: int, spread: float, size: int = SMALL) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


class TestDraftDistribution:
    def test_every_key_draws_by_weight(self) -> None:
        """The whole range of keys, in even steps."""
        distribution = {3: 1, 4: 5, 9: 2}
        keys = [i * (2**64 // 64) for i in range(64)]
        assert Counter(draw_token(distribution, key) for key in keys) == {3: 8, 4: 40, 9: 16}
        assert draw_token(distribution, 2**64 - 1) == 9

    def test_a_certain_guess_is_certain(self) -> None:
        assert draw_token({7: 3}, 0) == draw_token({7: 3}, 2**64 - 1) == 7

    def test_rounding_leaves_out_what_weighs_nothing_and_sorts(self) -> None:
        assert quantised_distribution([5, 2, 9], [0.75, 0.25, 1e-6]) == {2: 16384, 5: 49151}
        assert list(quantised_distribution([5, 2], [0.75, 0.25])) == [2, 5]
        assert quantised_distribution([5], [1.0]) == {5: WEIGHT_SUM}

    @pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
    def test_it_follows_temperature_and_filters(self, settings: dict[str, float]) -> None:
        params = SamplingParams(**settings)
        [row] = plain_rows(params, 1, SMALL)
        [guess] = sample_draft_tokens(logits(1, 1.0)[None], [row])
        expected = reference_distribution(logits(1, 1.0).tolist(), params)
        distribution = [guess.distribution.get(token, 0) / sum(guess.distribution.values()) for token in range(SMALL)]
        assert distribution == pytest.approx(expected, abs=2e-5)

    def test_it_follows_penalties_along_the_path(self) -> None:
        params = SamplingParams(frequency_penalty=1.5, bad_words=((2,),))
        row = SamplingRow(params, 5, History(params, [1], [4], SMALL), [3, 3])
        [guess] = sample_draft_tokens(logits(1, 1.0)[None], [row])
        expected = reference_distribution(reference_logits(logits(1, 1.0).tolist(), params, [1], [4, 3, 3]), params)
        distribution = [guess.distribution.get(token, 0) / sum(guess.distribution.values()) for token in range(SMALL)]
        assert distribution == pytest.approx(expected, abs=2e-5)
        assert 2 not in guess.distribution

    def test_at_temperature_0_it_is_the_largest_logit(self) -> None:
        [row] = plain_rows(SamplingParams(temperature=0), 1, SMALL)
        [guess] = sample_draft_tokens(logits(1, 1.0)[None], [row])
        assert guess.distribution == {guess.token: WEIGHT_SUM}
        assert guess.token == logits(1, 1.0).argmax()

    def test_columns_may_stand_for_other_tokens(self) -> None:
        [row] = plain_rows(SamplingParams(), 1, 100)
        ids = torch.arange(SMALL) * 10 + 3
        [guess] = sample_draft_tokens(logits(1, 1.0)[None], [row], ids)
        assert set(guess.distribution) <= set(ids.tolist())

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_without_an_allowed_column_there_is_no_token(self, temperature: float) -> None:
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
    def test_many_guesses_have_it(self, spread: float) -> None:
        rows = plain_rows(SamplingParams(seed=5), 20_000, SMALL)
        guesses = sample_draft_tokens(logits(3, spread).expand(len(rows), -1), rows)
        counts = Counter(guess.token for guess in guesses)
        distribution = [
            guesses[0].distribution.get(token, 0) / sum(guesses[0].distribution.values()) for token in range(SMALL)
        ]
        assert chi_square_tail([counts[token] for token in range(SMALL)], distribution) > SIGNIFICANCE

    def test_its_score_does_not_depend_on_the_token(self) -> None:
        rows = plain_rows(SamplingParams(), 50, SMALL)
        guesses = sample_draft_tokens(logits(3, PEAKED).expand(50, -1), rows)
        assert len({guess.token for guess in guesses}) > 1
        assert len({guess.log_prob for guess in guesses}) == 1


class TestNoise:
    def test_a_uniform_number_may_be_0_and_is_never_1(self) -> None:
        assert uniform(0) == 0.0
        assert uniform(2**64 - 1) < 1.0

    def test_keys_of_purposes_and_places_differ(self) -> None:
        several = ((), (0,), (1,), (0, 1), (1, 0))
        keys = [noise_key(seed, purpose, *places) for seed in (0, 1) for purpose in NoisePurpose for places in several]
        assert len(set(keys)) == len(keys)

    @pytest.mark.parametrize(("first", "second"), list(itertools.combinations(NoisePurpose, 2)))
    def test_purposes_are_unrelated(self, first: NoisePurpose, second: NoisePurpose) -> None:
        pairs = Counter(
            (int(4 * uniform(noise_key(7, first, i))), int(4 * uniform(noise_key(7, second, i)))) for i in range(20_000)
        )
        counts = [pairs[a, b] for a in range(4) for b in range(4)]
        assert chi_square_tail(counts, [1 / 16] * 16) > SIGNIFICANCE

    def test_tests_are_unrelated_to_draws_and_to_guesses(self) -> None:
        rows = plain_rows(SamplingParams(seed=2), 20_000, 4)
        flat = torch.zeros(len(rows), 4)
        draws = draw(flat, rows).tolist()
        guesses = [guess.token for guess in sample_draft_tokens(flat, rows)]
        coins = [int(4 * uniform(noise_key(2, NoisePurpose.ACCEPT, row.position, 0))) for row in rows]
        for pair in ((draws, guesses), (draws, coins), (guesses, coins)):
            counts = Counter(zip(*pair, strict=True))
            table = [counts[a, b] for a in range(4) for b in range(4)]
            assert chi_square_tail(table, [1 / 16] * 16) > SIGNIFICANCE

    def test_another_root_or_path_has_other_noise(self) -> None:
        params = SamplingParams(seed=4)
        history = History(params, [], [], 50)
        flat = torch.zeros(1, 50)
        paths = ([], [1], [2], [1, 2], [2, 1], [1, 2, 3])
        tokens = {
            tuple(path): sample_draft_tokens(flat, [SamplingRow(params, 30, history, path)])[0].token for path in paths
        }
        assert len(set(tokens.values())) > 3


class TestResidualWeights:
    def test_it_is_the_targets_surplus(self) -> None:
        target = torch.tensor([[0.5, 0.3, 0.2]])
        assert residual_weights(target, [1.0], [{0: 0.7, 2: 0.1}])[0].tolist() == pytest.approx([0.0, 0.3, 0.1])
        assert residual_weights(target, [0.5], [{0: 0.2}])[0].tolist() == pytest.approx([0.05, 0.15, 0.1])

    def test_without_a_draft_distribution_it_is_the_targets(self) -> None:
        target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
        assert torch.equal(residual_weights(target, [1.0, 1.0], [{}, {}]), target)

    def test_without_a_remainder_it_is_the_targets(self) -> None:
        target = torch.tensor([[0.5, 0.5]])
        assert torch.equal(residual_weights(target, [1.0], [{0: 0.5, 1: 0.5}]), target)


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.85},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias and bars": {"logit_bias": {1: 1.5}, "bad_words": ((3,), (0, 1))},
}
SIZE = 4
TABLE = torch.randn(2, SIZE + 1, SIZE, generator=torch.Generator().manual_seed(12))
"""[target or draft, token before or none, token]: logits."""
SEEDS = 1500
LENGTH = 3


@cache
def table(model: int, spread: float) -> Tensor:
    """The draft's logits are the target's, and something else."""
    return spread * (TABLE[0] + 0.6 * model * TABLE[1])


def after(model: int, path: Sequence[int], spread: float) -> Tensor:
    return table(model, spread)[path[-1] if path else SIZE]


@dataclass
class Request:
    """One that is decoded by hand: guesses ahead of its root, of which the first `rows` have rows."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    tree: TokenTree = field(default_factory=lambda: TokenTree(0, 0, chain=True))

    def __post_init__(self) -> None:
        self.history = History(self.params, [0], [], SIZE)

    @property
    def chain(self) -> Sequence[int]:
        """The guesses' tokens."""
        return self.tree.tokens[1:]

    def row(self, depth: int) -> SamplingRow:
        return SamplingRow(self.params, self.tree.position + 1 + depth, self.history, self.chain[:depth])

    def logits(self, model: int, spread: float, depth: int) -> Tensor:
        return after(model, [*self.tokens, *self.chain[:depth]], spread)

    def verification_input(self, rows: int) -> VerificationInput:
        verified = self.tree.nodes()[:rows]
        places = [self.row(depth) for depth in range(len(verified) + 1)]
        return VerificationInput(self.tree, verified, places, [0, *self.tokens])

    def commit(self, committed: Sequence[int]) -> None:
        self.tree.commit(committed)
        self.history.extend(committed)
        self.tokens += committed


def decoded(
    settings: dict[str, object], count: int, spread: float, rule: AcceptanceRule, guesses: int, rows: int
) -> list[tuple[int, ...]]:
    """Three tokens for each of `count` seeds, by as many steps as it takes."""
    requests = [Request(SamplingParams(**settings, seed=seed)) for seed in range(count)]
    verifier = Residual(rule)
    while running := [each for each in requests if len(each.tokens) < LENGTH]:
        for _ in range(guesses):
            short = [each for each in running if len(each.chain) < guesses]
            ends = [len(each.chain) for each in short]
            stacked = [each.logits(1, spread, end) for each, end in zip(short, ends, strict=True)]
            places = [each.row(end) for each, end in zip(short, ends, strict=True)]
            for each, guess in zip(
                short, sample_draft_tokens(torch.stack(stacked), places) if short else (), strict=True
            ):
                each.tree.add(each.tree.size, *guess)
        step = [each.verification_input(rows) for each in running]
        depths = [(each, depth) for each, one in zip(running, step, strict=True) for depth in range(len(one.rows))]
        all_committed = verifier.verify(torch.stack([each.logits(0, spread, depth) for each, depth in depths]), step)
        for each, committed in zip(running, all_committed, strict=True):
            each.commit(committed)
    return [tuple(each.tokens[:LENGTH]) for each in requests]


def distribution_of_three(params: SamplingParams, spread: float) -> dict[tuple[int, ...], float]:
    distribution = {(): 1.0}
    for _ in range(LENGTH):
        distribution = {
            (*path, token): weight * p
            for path, weight in distribution.items()
            for token, p in enumerate(
                reference_distribution(
                    reference_logits(after(0, path, spread).tolist(), params, [0], list(path)), params
                )
            )
        }
    return distribution


@pytest.mark.parametrize("spread", [FLAT, PEAKED], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    "name",
    ["plain", "top_p", *(pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS if n not in ("plain", "top_p"))],
)
def test_decoding_has_the_targets_distribution(name: str, spread: float) -> None:
    settings = SETTINGS[name]
    rule = accept_block if spread == PEAKED else accept_each
    counts = Counter(decoded(settings, SEEDS, spread, rule, 3, 2))
    assert tail(counts, distribution_of_three(SamplingParams(**settings), spread)) > SIGNIFICANCE


@pytest.mark.parametrize("rule", [accept_each, accept_block])
@pytest.mark.parametrize(
    ("guesses", "rows"),
    [(3, 3), (4, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 0), (1, 0), (1, 1)))],
)
def test_decoding_has_the_targets_distribution_for_any_chain(guesses: int, rows: int, rule: AcceptanceRule) -> None:
    counts = Counter(decoded({}, SEEDS, 1.0, rule, guesses, rows))
    assert tail(counts, distribution_of_three(SamplingParams(), 1.0)) > SIGNIFICANCE


def tail(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    return chi_square_tail([counts[each] for each in distribution], list(distribution.values()))


@pytest.mark.parametrize("rule", [accept_each, accept_block])
def test_at_temperature_0_it_is_greedy_decoding(rule: AcceptanceRule) -> None:
    expected: list[int] = []
    while len(expected) < LENGTH:
        expected.append(int(after(0, expected, PEAKED).argmax()))
    assert decoded({"temperature": 0}, 1, PEAKED, rule, 3, 2) == [tuple(expected)]


def test_requests_of_a_step_are_independent() -> None:
    """Alone or together, with chains of several lengths and some plain ones."""
    alone, together, stacked = [], [], []
    for seed in range(12):
        params = SamplingParams(seed=seed, temperature=seed % 4 / 2)
        history = History(params, [0], [], SIZE)
        tree = TokenTree(0, 0)
        path = list[int]()
        for _ in range(seed % 4):
            [guess] = sample_draft_tokens(
                after(1, path, 1.0)[None], [SamplingRow(params, len(path) + 1, history, path)]
            )
            tree.add(tree.size, *guess)
            path.append(guess.token)
        verified = tree.nodes()[: max(0, seed % 4 - 1)]
        rows = [SamplingRow(params, 1 + i, history, path[:i]) for i in range(len(verified) + 1)]
        logits_RV = torch.stack([after(0, row.path, 1.0) for row in rows])
        together.append(VerificationInput(tree, verified, rows, [0]))
        stacked.append(logits_RV)
        alone += Residual().verify(logits_RV, together[-1:])
    assert Residual().verify(torch.cat(stacked), together) == alone


def test_probabilities_match_the_reference() -> None:
    several = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2)]
    rows = [row for params in several for row in plain_rows(params, 1, 5)]
    values = torch.tensor([1.0, 2.0, 0.5, 2.0, -1.0])
    distributions = probabilities(values.expand(3, -1), rows)
    for distribution, row in zip(distributions.tolist(), rows, strict=True):
        if not row.params.greedy:
            assert distribution == pytest.approx(reference_distribution(values.tolist(), row.params), abs=1e-6)
    assert distributions[1].tolist() == [0, 1, 0, 0, 0]


class TestMutantsAreDetected:
    """What would break the distribution, broken in the code that runs."""

    def detected(self) -> bool:
        counts = Counter(decoded({}, SEEDS, 1.0, accept_each, 2, 1))
        return tail(counts, distribution_of_three(SamplingParams(), 1.0)) < SIGNIFICANCE

    def test_recovered_tokens_from_the_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(residual, "residual_weights", lambda target, weights, taken: target)
        assert self.detected()

    def test_noise_without_purposes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tests and guesses share theirs: a guess drawn by a small number is accepted more often."""

        def shared(seed: int, purpose: NoisePurpose, *places: int) -> int:
            return noise_key(seed, NoisePurpose.GUESS, places[0] if places else 0)

        for module in ("paceline.core.strategies.residual", "paceline.drafting.sampled_drafts"):
            monkeypatch.setattr(f"{module}.noise_key", shared)
        assert self.detected()

    def test_a_false_draft_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The draft samples at half the temperature of the distribution it sends."""

        def colder(distribution: dict[int, int], key: int) -> int:
            return draw_token({token: weight * weight for token, weight in distribution.items()}, key)

        monkeypatch.setattr("paceline.drafting.sampled_drafts.draw_token", colder)
        assert self.detected()

    def test_a_wrong_target_temperature(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def colder(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
            return sampling.probabilities(logits_RV * 1.5, rows)

        monkeypatch.setattr(residual, "probabilities", colder)
        assert self.detected()

    def test_the_real_code_is_not_detected(self) -> None:
        assert not self.detected()
