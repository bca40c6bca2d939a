"""Coupled draws for vLLM: the tokens do not depend on the drafts, under every sampling rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import draw
from paceline.vllm.coupled_draws import NO_TOKEN, CoupledDraws

VOCABULARY = 40
LENGTH = 24
PROMPT = (1, 2, 3, 2)


@dataclass
class Params:
    """vLLM's sampling parameters, with its defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    all_stop_token_ids: set[int] = field(default_factory=set)
    bad_words_token_ids: Sequence[Sequence[int]] | None = None


@dataclass
class Request:
    req_id: str
    prompt_token_ids: list[int]
    sampling_params: Params
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


def logits_after(tokens: Sequence[int]) -> Tensor:
    """A model: any tokens have logits of their own."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens[-3:])) % 2**31)
    return 2 * torch.randn(VOCABULARY, generator=generator)


def never(_: Sequence[int]) -> list[int]:
    return []


def at_random(tokens: Sequence[int]) -> list[int]:
    return random.Random(len(tokens)).choices(range(VOCABULARY), k=3)


def generate(
    params: Params, *guesses: Callable[[Sequence[int]], list[int]], prompt: Sequence[int] = PROMPT
) -> tuple[list[list[int]], int]:
    """The outputs of one request for each way to guess, all in one batch, and how many guesses were accepted.

    The seed is the same for all.
    """
    draws = CoupledDraws(VOCABULARY)
    requests = [Request(f"r{index}", list(prompt), params) for index, _ in enumerate(guesses)]
    accepted = 0
    while min(len(request.output_token_ids) for request in requests) < LENGTH:
        known = [[*request.prompt_token_ids, *request.output_token_ids] for request in requests]
        drafts = [guess(tokens) for guess, tokens in zip(guesses, known, strict=True)]
        rows = [
            logits_after([*tokens, *draft[:depth]])
            for tokens, draft in zip(known, drafts, strict=True)
            for depth in range(len(draft) + 1)
        ]
        if any(drafts):
            verified = draws.verify(torch.stack(rows), requests, drafts).tolist()  # type: ignore[arg-type]
            result = [[token for token in row if token != NO_TOKEN] for row in verified]
        else:
            result = [[token] for token in draws.draw(torch.stack(rows), requests).tolist()]  # type: ignore[arg-type]
        for request, tokens in zip(requests, result, strict=True):
            accepted += len(tokens) - 1
            request.output_token_ids += tokens
    return [request.output_token_ids[:LENGTH] for request in requests], accepted


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"logit_bias": {3: 5.0, 7: -100.0}},
    {"allowed_token_ids": [4, 5, 6, 9, 11]},
    {"bad_words_token_ids": [[4], [5, 6]]},
    {"min_tokens": 14, "all_stop_token_ids": set(range(30))},
    {"extra_args": {"paceline": '{"sampling": {"min_p": 0.2, "logit_bias": {"3": 4.0}}}'}},
    {"extra_args": {"paceline": '{"forced": [1, 7, 7, 3, 9]}'}},
]


def name_of(rules: dict[str, Any]) -> str:
    return "forced" if "forced" in str(rules) else "-".join(rules) or "plain"


@pytest.mark.parametrize("rules", RULES, ids=name_of)
def test_drafts_change_no_token(rules: dict[str, Any]) -> None:
    params = Params(**{"seed": 11, **rules})
    [plain], _ = generate(params, never)

    def knows(tokens: Sequence[int]) -> list[int]:
        start = len(tokens) - 4
        return [*plain[start : start + 3], 0]

    (alone, guessed, known), accepted = generate(params, never, at_random, knows)
    assert alone == guessed == known == plain
    assert accepted >= LENGTH / 2


def test_the_draws_are_those_of_the_engine() -> None:
    """Also the rules, at the position of each token."""
    params = Params(seed=5, temperature=0.7, repetition_penalty=1.3)
    [plain], _ = generate(params, never)
    ours = SamplingParams(seed=5, temperature=0.7, repetition_penalty=1.3)
    tokens = [1, 2, 3, 2]
    for _ in range(LENGTH):
        history = History(ours, tokens[:4], tokens[4:], VOCABULARY)
        row = SamplingRow(ours, len(tokens), history)
        tokens.append(int(draw(logits_after(tokens)[None], [row])))
    assert tokens[4:] == plain


def test_rules_are_kept() -> None:
    [allowed], _ = generate(Params(seed=1, allowed_token_ids=[4, 5, 6]), at_random)
    assert set(allowed) == {4, 5, 6}
    [good], _ = generate(Params(seed=1, bad_words_token_ids=[[7]], logit_bias={7: 50.0}), at_random)
    assert 7 not in good


def test_rules_that_leave_no_token_are_ignored() -> None:
    """vLLM's grammar has masked all tokens but 7. The logits stay as they are."""
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 7] = 1.0
    before = logits.clone()
    for rules in ({"bad_words_token_ids": [[7]]}, {"min_tokens": 5, "all_stop_token_ids": {7}}):
        request = Request("r", [1], Params(seed=1, logit_bias={7: 2.0}, **rules))  # type: ignore[arg-type]
        assert CoupledDraws(VOCABULARY).draw(logits, [request]).tolist() == [7]  # type: ignore[list-item]
        assert torch.equal(logits, before)


def test_requests_without_a_seed_differ_and_each_is_repeatable() -> None:
    (first, second), _ = generate(Params(), never, never)
    assert first != second
    assert generate(Params(), never, at_random)[0] == [first, second]


@pytest.mark.parametrize(
    "given",
    [
        "no JSON",
        {"sampling": {"min_p": 2.0}},
        '{"sampling": {"min_p": 2.0}}',
        '{"sampling": {"logit_bias": {"3": "much"}}}',
        '{"sampling": {"unknown": 1}}',
        '{"committed": 4}',
        '{"committed": -1}',
        '{"forced": [40]}',
        '{"unknown": 1}',
        json.dumps({"cache_salt": "a" * 65}),
        '{"cache_salt": "\\n"}',
    ],
    ids=str,
)
def test_a_wrong_extra_argument_is_ignored(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An error here would end vLLM."""
    params = Params(seed=3, extra_args={"paceline": given}, repetition_penalty=1e6, logit_bias={1: 1e6})
    assert generate(params, never) == generate(replace(params, extra_args=None), never)
    assert "ignored" in caplog.text


def test_drafts_are_told_a_request_s_salt_or_nothing() -> None:
    request = Request("r", list(PROMPT), Params(extra_args={"paceline": '{"cache_salt": "one"}'}))
    described = CoupledDraws(VOCABULARY).describe(request)  # type: ignore[arg-type]
    assert (described.cache_salt, described.speculative.enabled) == ("one", None)
    request.sampling_params = Params(extra_args={"paceline": '{"cache_salt": "one", "unknown": 1}'})
    assert CoupledDraws(VOCABULARY).describe(request).speculative.enabled is False  # type: ignore[arg-type]


@pytest.mark.parametrize("guess", [never, at_random])
@pytest.mark.parametrize("rules", RULES[:-1], ids=name_of)
def test_a_request_goes_on_after_committed_tokens(
    rules: dict[str, Any], guess: Callable[[Sequence[int]], list[int]]
) -> None:
    """Elsewhere it began; here they are the end of its prompt, or its first draws are forced."""
    extra = json.loads(rules.get("extra_args", {}).get("paceline", "{}"))
    params = Params(**{"seed": 11, **rules})
    [plain], _ = generate(params, never)
    here = replace(params, extra_args={"paceline": json.dumps({**extra, "committed": 10})})
    [rest], _ = generate(here, guess, prompt=[*PROMPT, *plain[:10]])
    assert rest[: LENGTH - 10] == plain[10:]
    again = replace(params, extra_args={"paceline": json.dumps({**extra, "forced": plain[:10]})})
    assert generate(again, guess)[0] == [plain]


def test_an_id_may_come_back_with_another_request() -> None:
    draws, logits = CoupledDraws(VOCABULARY), logits_after([1])[None]
    for seed in range(20):
        request = Request("r", [1], Params(seed=seed))
        expected = int(CoupledDraws(VOCABULARY).draw(logits, [request]))  # type: ignore[list-item]
        assert int(draws.draw(logits, [request])) == expected  # type: ignore[list-item]
    draws.keep(())
    assert len(draws) == 0
