"""Grammars that begin after reasoning: the same tokens with any draft or none, resumed anywhere, by any strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from paceline.config import SamplingParams
from paceline.engine.draft_client import NoDraftClient
from paceline.grammar.reasoning_matcher import ReasoningGate, ReasoningMatcher
from paceline.messages import Delta, FinishReason, GenerationRequest
from tests.exactness.test_grammar import PROMPT, STRATEGIES, draft_model, drafting, engine, outcome
from tests.helpers.engine_runs import run
from tests.helpers.grammars import ANSWER, END, GRAMMARS, PIECES, THINK, grammars

A, B = PIECES.index("a"), PIECES.index("b")
GATES = {
    "marker": ReasoningGate((ANSWER,)),
    "two tokens": ReasoningGate((A, B)),
    "opened or not": ReasoningGate((ANSWER,), THINK),
}
LIKELY = {ANSWER: 2.5, A: 2.0, B: 2.0, END: 2.0}
"""So that reasoning ends at different places, and would end the request if it could."""
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, repetition_penalty=1.6, logit_bias=LIKELY),
    "sampled": SamplingParams(temperature=1.0, seed=5, logit_bias=LIKELY, logprobs=1),
    "hot": SamplingParams(temperature=1.5, seed=8, top_k=40, logit_bias=LIKELY | {THINK: 4.0}),
    "barred": SamplingParams(temperature=1.2, seed=2, bad_words=((4,),), min_tokens=7, logit_bias=LIKELY),
}
NAMES = ("schema", "choice", "special tokens")


def generation_requests(names: Sequence[str] = NAMES, seeds: int = 2) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"{name}, {gated}, {sampling}, {seed}",
            PROMPT,
            params.model_copy(
                update={
                    "seed": params.seed + 100 * seed,
                    "max_tokens": 70,
                    "stop_token_ids": (END,),
                    "grammar": GRAMMARS[name],
                    "grammar_begins_after": gate.closing,
                    "grammar_waits_if": gate.opening,
                }
            ),
        )
        for name in names
        for gated, gate in GATES.items()
        for sampling, params in SAMPLING.items()
        for seed in range(seeds)
    ]


FEW = generation_requests(("choice",))


def gate_of(request: GenerationRequest) -> ReasoningGate:
    return ReasoningGate(request.sampling.grammar_begins_after, request.sampling.grammar_waits_if)


def start_of(request: GenerationRequest, output: Delta) -> int | None:
    """Where the grammar begins in an output."""
    return gate_of(request).grammar_start(output.tokens)


@pytest.fixture(scope="module")
def plain() -> dict[str, Delta]:
    """One request at a time, no speculation."""
    return run(engine(NoDraftClient()), generation_requests(), together=1)


def check(request: GenerationRequest, output: Delta) -> int | None:
    """Whether an output keeps to its grammar behind the reasoning, and ends nowhere inside. Returns where it begins."""
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
    start = start_of(request, output)
    assert END not in output.tokens[:-1], request.request_id
    if start is None:
        assert output.finish_reason is FinishReason.LENGTH, request.request_id
        assert END not in output.tokens
        return None
    state, text = grammars().start(request.sampling.grammar, (END,), []), output.tokens[start:]
    state.wait(10.0)
    assert all(state.permits(text[:i], token) for i, token in enumerate(text)), request.request_id
    return start


def test_plain_outputs_keep_to_their_grammars_behind_the_reasoning(plain: dict[str, Delta]) -> None:
    starts = [check(request, plain[request.request_id]) for request in generation_requests()]
    reasons = [plain[request.request_id].finish_reason for request in generation_requests()]
    assert len({start for start in starts if start is not None}) > 6, "reasoning of different lengths"
    ended = [start for start, reason in zip(starts, reasons, strict=True) if reason is FinishReason.STOP]
    assert sum(1 for start in ended if start) > len(starts) / 4
    opened = [
        plain[each.request_id].tokens[0] == THINK for each in generation_requests() if gate_of(each).opening is not None
    ]
    assert 0 < sum(opened) < len(opened)


@pytest.mark.parametrize(
    ("drafter", "width"),
    [("knows", 1), ("knows", 3), ("does not know", 3), ("perfect", 1), ("ngram", 2), ("liar", 1)],
)
def test_speculation_changes_no_token(plain: dict[str, Delta], drafter: str, width: int) -> None:
    target = engine(drafting(drafter, width))
    outputs = run(target, generation_requests())
    assert outcome(outputs) == outcome(plain)
    crossed = 0
    for request in generation_requests():
        output = outputs[request.request_id]
        start = start_of(request, output)
        crossed += bool(start) and any(output.accepted[start - 1 : start + 1])
    assert crossed > (0 if drafter in ("ngram", "liar") else 3), "guesses are accepted where the reasoning ends"


@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 4])
def test_resuming_elsewhere_changes_no_token(plain: dict[str, Delta], offset: int) -> None:
    """In the middle of the reasoning and of the marker, right behind it, and in the middle of the grammar's text."""
    resumed = []
    for request in generation_requests():
        output = plain[request.request_id]
        start = start_of(request, output) or 0
        split = max(1, start + offset)
        if start + offset > 0 and split < len(output.tokens):
            resumed.append(replace(request, committed=output.tokens[:split]))
    assert len(resumed) > 10
    outputs = run(engine(draft_model(3, knows=True)), resumed)
    for each in resumed:
        assert [*each.committed, *outputs[each.request_id].tokens] == plain[each.request_id].tokens
        assert outputs[each.request_id].finish_reason == plain[each.request_id].finish_reason


@pytest.mark.parametrize("keys", [{}, *STRATEGIES], ids=str)
@pytest.mark.parametrize("drafter", ["does not know", "liar"])
def test_no_strategy_leaves_the_grammar_or_ends_the_reasoning(keys: dict[str, object], drafter: str) -> None:
    outputs = run(engine(drafting(drafter, 2), **keys), FEW)
    starts = [check(request, outputs[request.request_id]) for request in FEW]
    assert len({start for start in starts if start}) > 1


def test_a_greedy_engine_changes_no_token() -> None:
    """The other strategy whose tokens do not depend on guesses."""
    keys = {"rejection_sampling_strategy": "greedy"}
    alone = outcome(run(engine(NoDraftClient(), **keys), FEW, together=1))
    for drafter in ("knows", "does not know", "liar"):
        assert outcome(run(engine(drafting(drafter, 2), **keys), FEW)) == alone


def test_a_grammar_without_reasoning_is_the_usual_one() -> None:
    """Without a grammar the fields have no effect, and a token outside the vocabulary is refused."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=30, stop_token_ids=(END,), logit_bias={END: 3.0})
    marked = params.model_copy(update={"grammar_begins_after": (ANSWER,), "grammar_waits_if": THINK})
    unknown = params.model_copy(update={"grammar": GRAMMARS["choice"], "grammar_begins_after": (64,)})
    requests = [GenerationRequest(name, PROMPT, each) for name, each in (("a", params), ("b", marked), ("c", unknown))]
    outputs = run(engine(NoDraftClient()), requests)
    assert outputs["a"].tokens == outputs["b"].tokens
    assert outputs["a"].finish_reason is FinishReason.STOP
    assert outputs["c"].finish_reason is FinishReason.ERROR
    assert "outside the vocabulary" in outputs["c"].error


def test_a_gate_that_forgets_its_path_is_caught(plain: dict[str, Delta]) -> None:
    with patch.object(ReasoningMatcher, "after", lambda self, token: self):
        outputs = run(engine(NoDraftClient()), FEW)
    assert outcome(outputs) != {key: each for key, each in outcome(plain).items() if key in outputs}
