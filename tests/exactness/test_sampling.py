"""Every step from logits to the drawn token against a plain reference, and that rows are independent."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.logits_rules import History, SamplingRow, apply_logits_rules
from paceline.core.noise import gumbel, noise_bits
from paceline.core.sampling import LOWEST_TEMPERATURE, FindCandidates, draw, scores, top_scores
from paceline.engine.log_probabilities import log_probs
from paceline.model.native.native_library import draw_candidates

VOCABULARY = 24
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def reference_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Bars, bias and penalties as vLLM documents them, one token at a time."""
    result = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logit = -math.inf
        for bad_word in params.bad_words:
            before = bad_word[:-1]
            if bad_word[-1] == token and tuple(output[len(output) - len(before) :]) == before:
                logit = -math.inf
        if token in params.stop_token_ids and len(output) < params.min_tokens:
            logit = -math.inf
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        result.append(logit)
    return result


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k, top-p; each on what the one before left."""

    def probs(kept: set[int]) -> dict[int, float]:
        largest = max(logits)
        weights = {t: math.exp((logits[t] - largest) / params.temperature) for t in kept}
        return {t: w / sum(weights.values()) for t, w in weights.items()}

    kept = {t for t, logit in enumerate(logits) if logit > -math.inf}
    probabilities = probs(kept)
    kept = {t for t in kept if probabilities[t] >= params.min_p * max(probabilities.values())}
    if 0 < params.top_k < len(kept):
        weakest = sorted((logits[t] for t in kept), reverse=True)[params.top_k - 1]
        kept = {t for t in kept if logits[t] >= weakest}
    if params.top_p < 1:
        probabilities = probs(kept)
        kept = {t for t in kept if sum(p for p in probabilities.values() if p > probabilities[t]) < params.top_p}
    probabilities = probs(kept)
    return [probabilities.get(t, 0.0) for t in range(len(logits))]


def distribution_behind(logits: Tensor, row: SamplingRow) -> Tensor:
    """The distribution that a row draws from: its scores without the noise."""
    noise = gumbel(noise_bits([row.params.seed], [row.position], torch.arange(len(logits))))
    return (scores(logits[None], [row]) - noise)[0].double().softmax(-1)


RULES = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 5},
    "top_k of all": {"top_k": 99},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-6},
    "top_p nearly all": {"top_p": 1 - 1e-12},
    "min_p": {"min_p": 0.1},
    "min_p of 1": {"min_p": 1.0},
    "filters together": {"temperature": 1.5, "min_p": 0.02, "top_k": 9, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.4},
    "encouraged repetition": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.6},
    "bias": {"logit_bias": {3: 4.5, 7: -100.0, 0: -0.5}},
    "bad words": {"bad_words": ((4,), (9, 5), (1, 9, 6), (5, 9, 1, 9, 8), (9, 1, 9, 6, 2))},
    "allowed": {"allowed_token_ids": (2, 3, 5, 8, 13, 21, 99)},
    "one allowed": {"allowed_token_ids": (8,), "logit_bias": {8: -100.0}},
    "min_tokens": {"min_tokens": 7, "max_tokens": 16, "stop_token_ids": (2, 11)},
    "min_tokens reached": {"min_tokens": 6, "max_tokens": 16, "stop_token_ids": (2, 11)},
    "everything": {
        "temperature": 0.9,
        "top_k": 12,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {3: 2.0, 9: -1.0},
        "bad_words": ((9, 5), (3,)),
        "allowed_token_ids": tuple(range(1, 20)),
        "min_tokens": 9,
        "max_tokens": 16,
        "stop_token_ids": (2,),
    },
}
PROMPT, OUTPUT, PATH = [3, 1, 4, 1, 5], [9, 2, 6, 5, 9], [1, 9]


@pytest.fixture(params=RULES.values(), ids=RULES)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return SamplingParams(seed=11, **request.param)


def random_logits(seed: int, rows: int = 1, spread: float = 1.0, size: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def row_after(history: Sequence[int] = (), position: int = 5, **settings: object) -> SamplingRow:
    params = SamplingParams(**settings)
    return SamplingRow(params, position, History(params, [], history, VOCABULARY))


@pytest.mark.parametrize("seed", range(8))
def test_the_distribution_is_the_formula_s(params: SamplingParams, seed: int) -> None:
    """At temperature 0 the largest logit wins."""
    logits = random_logits(seed, spread=2.5)
    row = SamplingRow(params, 12, History(params, PROMPT, OUTPUT, VOCABULARY), PATH)
    ruled = reference_logits(logits[0].tolist(), params, PROMPT, OUTPUT + PATH)
    expected = reference_distribution(ruled, params)
    probs = distribution_behind(logits[0], row).tolist()
    assert probs == pytest.approx(expected, rel=2e-4, abs=1e-9)
    assert [p > 0 for p in probs] == [p > 0 for p in expected]
    greedy = row._replace(params=params.model_copy(update={"temperature": 0.0}))
    assert scores(logits, [greedy])[0].tolist() == pytest.approx(ruled, rel=1e-5)
    assert draw(logits, [greedy]).tolist() == [ruled.index(max(ruled))]


def ruled(history: History, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """Logits after `apply_logits_rules`."""
    return apply_logits_rules(logits[None], [SamplingRow(history.params, 0, history, path)])[0]


def test_a_path_counts_like_output_and_leaves_no_trace(params: SamplingParams) -> None:
    """Whether output comes at once or in pieces."""
    [logits] = random_logits(1)
    given, history = logits.clone(), History(params, PROMPT, [], VOCABULARY)
    for tokens in (OUTPUT[:1], [], OUTPUT[1:4], OUTPUT[4:]):
        history.extend(tokens)
    assert history.output_tokens == len(OUTPUT)
    for path in ([], PATH, []):
        expected = History(params, PROMPT, OUTPUT + path, VOCABULARY)
        assert torch.equal(ruled(history, logits, path), ruled(expected, logits, []))
        draw(logits[None], [SamplingRow(params, 3, history, path)])
        draw(logits[None], [row_after(temperature=0.0)])
    assert torch.equal(logits, given)


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    masks = {"bad_words": ((99,), (1, 99)), "stop_token_ids": (99,), "min_tokens": 5}
    params = SamplingParams(logit_bias={99: 5.0}, repetition_penalty=1.5, **masks)
    history = History(params, [99, 3], [99, 1], VOCABULARY)
    inside = History(SamplingParams(repetition_penalty=1.5), [3], [1], VOCABULARY)
    logits = torch.ones(VOCABULARY)
    assert torch.equal(ruled(history, logits, [99]), ruled(inside, logits, []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.0, "min_tokens": 1}])
def test_the_lowest_id_wins_among_equal_logits(dtype: torch.dtype, settings: dict[str, object]) -> None:
    logits = torch.zeros(3, VOCABULARY, dtype=dtype)
    logits[1, [4, 20]] = 1.0
    logits[2, [23, 7, 11]] = 2.0
    assert draw(logits, [row_after(**settings)] * 3).tolist() == [0, 4, 7]


def test_a_draw_is_the_largest_of_logits_and_noise() -> None:
    logits, row = random_logits(3), row_after(temperature=0.7, seed=8, position=77)
    noise = gumbel(noise_bits([8], [77], torch.arange(VOCABULARY)))
    expected = (logits - logits.max()) / torch.tensor(0.7) + noise
    assert torch.equal(scores(logits, [row]), expected)
    assert draw(logits, [row]).item() == expected.argmax()


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-9}]
)
def test_masked_tokens_are_never_drawn(settings: dict[str, object]) -> None:
    logits = torch.full((1, VOCABULARY), -3.0)
    logits[0, 5], logits[0, 6] = 30.0, 10.0
    masks = {"bad_words": ((9, 5),), "stop_token_ids": (6,), "min_tokens": 3}
    for position in range(50):
        assert draw(logits, [row_after([9], position, **settings)]).tolist() == [5]
        assert draw(logits, [row_after([9], position, **masks, **settings)]).item() not in (5, 6)


def test_the_only_token_left_is_drawn_whatever_its_noise() -> None:
    logits = torch.full((200, VOCABULARY), -math.inf)
    logits[:, 13] = -1e30
    assert draw(logits, [row_after(position=i) for i in range(200)]).tolist() == [13] * 200


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[[2, 3, 4]] = 1.0
    for settings in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.01}):
        assert distribution_behind(logits, row_after(**settings))[[2, 3, 4]].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 0.999])
def test_top_p_keeps_just_enough_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    [logits] = random_logits(5, spread=spread, size=3000)
    params = SamplingParams(top_p=top_p)
    kept = distribution_behind(logits, SamplingRow(params, 5, History(params, [], [], 3000))) > 0
    probs = logits.double().softmax(-1)
    assert probs[kept].min() > probs[~kept].max()
    assert probs[kept].sum() >= top_p > probs[kept].sum() - probs[kept].min()


def test_very_low_temperatures_are_raised() -> None:
    logits = random_logits(1, spread=1e4)
    raised = scores(logits, [row_after(temperature=1e-30)])
    assert torch.equal(raised, scores(logits, [row_after(temperature=LOWEST_TEMPERATURE)]))
    assert raised.isfinite().all()


def test_no_rows_draw_nothing() -> None:
    assert scores(torch.zeros(0, VOCABULARY), []).shape == (0, VOCABULARY)
    assert draw(torch.zeros(0, VOCABULARY), []).shape == (0,)


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "threads", "rules"),
    [
        (97, torch.float32, 1, [*RULES]),
        (4096, torch.bfloat16, 1, [*RULES]),
        (4099, torch.float32, 1, [*RULES]),
        (33_001, torch.float32, 2, ["top_p", "everything"]),  # so long that torch splits a row among threads
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_other_rows(
    vocabulary: int, dtype: torch.dtype, threads: int, rules: Sequence[str], device: str
) -> None:
    """Bit for bit the same scores for any other rows and any order."""
    every = [SamplingParams(seed=seed, **RULES[rule]) for seed, rule in enumerate(rules)]
    every += [every[-1], SamplingParams(temperature=0.0), every[0], SamplingParams(top_p=0.4)]
    rows = [SamplingRow(p, 90 + i, History(p, PROMPT, OUTPUT, vocabulary), PATH) for i, p in enumerate(every)]
    logits = random_logits(2, len(rows), 3.0, vocabulary).to(device, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = scores(logits, rows)
        for i, row in enumerate(rows):
            assert torch.equal(scores(logits[i : i + 1], [row])[0], together[i]), i
        for seed in range(3):
            order = random.Random(seed).sample(range(len(rows)), k=len(rows) - 2 * seed)
            assert torch.equal(scores(logits[order], [rows[i] for i in order]), together[order])
            assert torch.equal(draw(logits[order], [rows[i] for i in order]), together[order].argmax(-1))
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=["native", "numpy"])
def find(request: pytest.FixtureRequest) -> FindCandidates | None:
    """On CPUs a draw looks only at tokens whose integers are below a limit: native code finds them, or numpy does."""
    if request.param == "native" and os.environ.get("PACELINE_NATIVE") == "0":
        pytest.skip("native code is switched off")
    return draw_candidates if request.param == "native" else None


def drawn_and_scored(
    find: FindCandidates | None, spread: float, count: int, vocabulary: int, **settings: object
) -> tuple[Tensor, Tensor]:
    """Draws, and where the scores of the same rows are largest."""
    params = SamplingParams(seed=17, **settings)
    history = History(params, [], [], vocabulary)
    rows = [SamplingRow(params, position, history) for position in range(count)]
    logits = random_logits(7, count, spread, vocabulary)
    return draw(logits, rows, find), scores(logits, rows).argmax(-1)


@pytest.mark.parametrize("vocabulary", [3, 16, 61, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("settings", [{"temperature": 0.8}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_no_winner_is_left_out(
    find: FindCandidates | None, spread: float, vocabulary: int, settings: dict[str, object]
) -> None:
    drawn, largest = drawn_and_scored(find, spread, 100 if vocabulary > 1000 else 1500, vocabulary, **settings)
    assert torch.equal(drawn, largest)


@pytest.mark.parametrize("leniency", [0.0, 0.5, 0.9, 0.99])
def test_a_limit_that_is_too_low_is_detected(
    find: FindCandidates | None, leniency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "ROUNDING_MARGIN", leniency)
    drawn, largest = drawn_and_scored(find, 0.3, 20_000, 60)
    assert not torch.equal(drawn, largest)


def test_of_equal_scores_the_lowest_id_wins(find: FindCandidates | None) -> None:
    """To the last bit: token 3 has a smaller logit than 7, and with its noise the same score."""
    ties = 0
    for position in range(300):
        noise = gumbel(noise_bits([0], [position], torch.arange(VOCABULARY)))[0]
        logits = torch.full((1, VOCABULARY), -60.0)
        logits[0, 7], logits[0, 3] = 0.0, noise[7] - noise[3]
        if logits[0, 3] < 0 and logits[0, 3] + noise[3] == noise[7]:
            assert draw(logits, [row_after(position=position)], find).tolist() == [3]
            ties += 1
    assert ties > 50


def test_log_probabilities_are_the_model_s_own() -> None:
    logits = random_logits(4, 3).bfloat16()
    probs = logits.double().log_softmax(-1)
    for row, (found, token) in enumerate(zip(log_probs(logits, [5, 0, 23], 4), [5, 0, 23], strict=True)):
        assert found.log_prob == pytest.approx(probs[row, token].item(), abs=1e-5)
        best = probs[row].sort(descending=True, stable=True)
        assert [value for _, value in found.top] == pytest.approx(best.values[:4].tolist(), abs=1e-5)
        assert all(probs[row, token].item() == pytest.approx(value, abs=1e-5) for token, value in found.top)
        assert found.rank == 1 + best.indices.tolist().index(token)
    (alone,) = log_probs(torch.zeros(1, VOCABULARY), [3], 0)
    assert (alone.log_prob, list(alone.top)) == (pytest.approx(-math.log(VOCABULARY)), [])


def test_listed_tokens_take_the_place_of_the_most_probable() -> None:
    logits = random_logits(4, 2)
    probs = logits.double().log_softmax(-1)
    for row, found in enumerate(log_probs(logits, [5, 0], 3, (9, 2, 5, 9))):
        assert [token for token, _ in found.top] == [9, 2, 5, 9]
        assert [value for _, value in found.top] == pytest.approx(probs[row, [9, 2, 5, 9]].tolist(), abs=1e-5)
        assert found == log_probs(logits[row : row + 1], [[5, 0][row]], 0, (9, 2, 5, 9))[0]


def test_among_equal_log_probabilities_the_lowest_ids_come_first() -> None:
    """Logits in bfloat16 often are equal, and the result must not depend on other rows."""
    logits = torch.zeros(2, 4096, dtype=torch.bfloat16)
    logits[:, 100:130], logits[:, -5:] = 2.0, 3.0
    for found, rank in zip(log_probs(logits, [103, 2], 20), (5 + 4, 5 + 30 + 3), strict=True):
        assert [token for token, _ in found.top] == [*range(4091, 4096), *range(100, 115)]
        assert found.rank == rank


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [97, 4096, 50_257])
def test_log_probabilities_do_not_depend_on_other_rows(vocabulary: int, device: str) -> None:
    logits = random_logits(6, 9, size=vocabulary).to(device, torch.bfloat16)
    together = log_probs(logits, [*range(9)], 5)
    for first, end in ((0, 1), (1, 2), (3, 9), (8, 9)):
        assert log_probs(logits[first:end], [*range(first, end)], 5) == together[first:end]


@pytest.mark.parametrize("count", [1, 5, VOCABULARY, 100])
def test_a_shortlist_has_the_scores_of_the_whole(count: int) -> None:
    """For every rule but the filters by probability mass, which see nothing but the list; greedy rows among noisy."""
    every_params = [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.3, seed=4, min_p=0.1, top_k=4, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.5, seed=5, presence_penalty=1.0),
    ]
    rows = [
        SamplingRow(each, 9 + i, History(each, [1, 2], [3], VOCABULARY), [5]) for i, each in enumerate(every_params)
    ]
    logits = random_logits(1, len(rows))
    tokens, listed = top_scores(logits, rows, count)
    assert torch.equal(listed, scores(logits, rows).gather(-1, tokens))
    assert tokens.shape[-1] == min(count, VOCABULARY)
    if count >= VOCABULARY:
        assert torch.equal(tokens.gather(-1, listed.argmax(-1, keepdim=True))[:, 0], draw(logits, rows))
