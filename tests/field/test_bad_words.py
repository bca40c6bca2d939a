"""Bad words that ban every token the grammar allows give way, and so do allowed ids that hold none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.engine.draft_client import DraftClient, NoDraftClient
from paceline.messages import GenerationRequest
from tests.exactness.test_grammar import PROMPT, draft_model, drafting, engine, outcome, outside
from tests.helpers.engine_runs import run
from tests.helpers.grammars import END, GRAMMARS, PIECES, text_of

ALL = tuple((token,) for token in range(len(PIECES)))
RULES: dict[str, dict[str, Any]] = {
    "every token": {"bad_words": ALL},
    "every token, early end": {"bad_words": ALL, "min_tokens": 9},
    "allowed ids outside the grammar": {"bad_words": ALL, "allowed_token_ids": (40,)},
    "bias": {"bad_words": ALL, "logit_bias": dict.fromkeys(range(len(PIECES)), -100.0)},
    "penalties": {"bad_words": ALL, "repetition_penalty": 1.4, "frequency_penalty": 1.0, "presence_penalty": 0.5},
}
NEUTRAL = {"bad_words": (), "min_tokens": 0, "allowed_token_ids": ()}
DRAFTS: dict[str, Callable[[], DraftClient]] = {
    "chain": lambda: draft_model(1, knows=True),
    "tree": lambda: draft_model(3, knows=True),
    "tree of a draft without the grammar": lambda: draft_model(3, knows=False),
    "lookup": lambda: drafting("ngram", 2),
    "liar": lambda: drafting("liar", 2),
}


def requests(**changes: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{name}, {grammar}, {temperature}",
            PROMPT,
            SamplingParams(
                temperature=temperature,
                seed=4,
                max_tokens=40,
                stop_token_ids=(END,),
                grammar=GRAMMARS[grammar],
                **(rules | changes),
            ),
        )
        for name, rules in RULES.items()
        for grammar in ("schema", "choice")
        for temperature in (0.0, 1.0)
    ]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run(engine(NoDraftClient()), requests(), together=1)


def test_the_output_is_the_one_without_them(plain: dict[str, Any]) -> None:
    """Bias and penalties stay in force."""
    without = run(engine(NoDraftClient()), requests(**NEUTRAL), together=1)
    assert outcome(plain) == outcome(without)
    assert not any(outside(plain[each.request_id], each.sampling.grammar) for each in requests())


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_change_no_token_of_it(plain: dict[str, Any], kind: str) -> None:
    assert outcome(run(engine(DRAFTS[kind]()), requests())) == outcome(plain)


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_they_hold_where_the_grammar_allows_another_token(kind: str) -> None:
    """Of the choices abc, abcabc, de, true and [10, 10] the last three begin with banned tokens."""
    banned = tuple((PIECES.index(piece),) for piece in ("d", "de", "t", "tr", "true", "["))
    asked = [each for each in requests(bad_words=banned) if "bias, choice" in each.request_id]
    plainly = run(engine(NoDraftClient()), asked)
    assert outcome(run(engine(DRAFTS[kind]()), asked)) == outcome(plainly)
    assert {text_of(each.tokens) for each in plainly.values()} <= {"abc", "abcabc"}
