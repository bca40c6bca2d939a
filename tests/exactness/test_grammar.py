"""Grammars: the same tokens with any draft or none, resumed or not, and none outside the grammar."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions, StrategyName
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState, Mask
from paceline.messages import Delta, FinishReason, GenerationRequest
from tests.exactness.test_engine import FREE, Liar, llama
from tests.helpers.drafts import model_draft, ngram_draft
from tests.helpers.engine_runs import run
from tests.helpers.grammars import AMBIGUOUS, END, GRAMMARS, MEMORY, PIECES, grammars, text_of, tight

PROMPT = [13, 23, 24, 25, 13, 23, 24, 25, 40]
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(END,)),
    "sampled": SamplingParams(temperature=1.0, seed=5, max_tokens=60, stop_token_ids=(END,), logprobs=1),
    "penalised": SamplingParams(
        temperature=0.9, seed=8, frequency_penalty=0.6, top_p=0.9, top_k=9, max_tokens=40, stop_token_ids=(END,)
    ),
    "barred": SamplingParams(
        temperature=1.2, seed=2, bad_words=((23,), (4,)), min_tokens=7, max_tokens=60, stop_token_ids=(END,)
    ),
    "ends with nothing": SamplingParams(temperature=1.0, seed=6, max_tokens=50),
}


def generation_requests(grammars: Sequence[str] = tuple(GRAMMARS)) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"{name}, {sampling}", PROMPT, params.model_copy(update={"grammar": GRAMMARS[name]}))
        for name in grammars
        for sampling, params in SAMPLING.items()
    ]


FEW = ("schema", "choice")
"""A subset that shows an error."""


def draft_model(width: int, *, knows: bool, noise: float = 0.02) -> DraftClient:
    speculator = model_draft(llama(torch.float32, noise), width)
    speculator.grammars = grammars() if knows else None
    return LocalDraftClient(speculator)


def drafting(drafter: str, width: int) -> DraftClient:
    if drafter in ("ngram", "liar"):
        return LocalDraftClient(ngram_draft(1, 3, width) if drafter == "ngram" else Liar())
    return draft_model(width, knows=drafter != "does not know", noise=0.0 if drafter == "perfect" else 0.02)


def engine(drafting: DraftClient, known: GrammarCompiler | None = None, **keys: object) -> Engine:
    model = llama(torch.float32)
    speculation = {"method": "ngram", "num_speculative_tokens": 5, "max_tree_nodes": 20, **keys}
    config = SpeculativeConfig.model_validate(speculation)
    return Engine(model, EngineConfig(slots=model.slots), config, drafting, FREE, grammars=known or grammars())


@pytest.fixture(scope="module")
def plain() -> dict[str, Delta]:
    """One request at a time, no speculation."""
    return run(engine(NoDraftClient()), generation_requests(), together=1)


def outcome(outputs: dict[str, Delta]) -> dict[str, tuple[list[int], FinishReason | None]]:
    return {key: (output.tokens, output.finish_reason) for key, output in outputs.items()}


def outside(output: Delta, grammar: str) -> bool:
    """Whether an output leaves the grammar, found with a new state."""
    state = grammars().start(grammar, (END,), [])
    state.wait(10.0)
    return not all(state.permits(output.tokens[:i], token) for i, token in enumerate(output.tokens))


def test_plain_outputs_fit_their_grammars(plain: dict[str, Delta]) -> None:
    """A text's last token ends a request that has no stop token, too."""
    ended = 0
    for request in generation_requests():
        output = plain[request.request_id]
        assert not outside(output, request.sampling.grammar), request.request_id
        assert END not in output.tokens[:-1]
        assert output.usage is not None
        assert output.usage.completion_tokens == len(output.tokens)
        if output.finish_reason is FinishReason.STOP:
            ended += 1
            if "schema" in request.request_id:
                rows = json.loads(text_of(output.tokens))
                assert 1 <= len(rows) <= 3
                assert all(0 <= row["a"] <= 120 and len(row["b"]) <= 6 for row in rows)
            if "choice" in request.request_id:
                assert text_of(output.tokens) in ("abc", "abcabc", "de", "true", "[10, 10]")
        else:
            assert output.finish_reason is FinishReason.LENGTH
            assert "choice" not in request.request_id
    assert ended > len(plain) / 2


@pytest.mark.parametrize(
    ("drafter", "width"),
    [("knows", 1), ("knows", 3), ("does not know", 3), ("perfect", 1), ("ngram", 2), ("liar", 1)],
)
def test_speculation_changes_no_token(plain: dict[str, Delta], drafter: str, width: int) -> None:
    target = engine(drafting(drafter, width))
    assert outcome(run(target, generation_requests())) == outcome(plain)
    drafted = sum(sum(each.drafted) for each in target.calibrations.values())
    accepted = sum(sum(each.accepted) for each in target.calibrations.values())
    assert drafted > 20
    assert accepted > (0.5 * drafted if drafter in ("knows", "perfect") and width == 1 else 0)


def test_a_draft_that_knows_the_grammar_is_accepted_more() -> None:
    accepted = {}
    for knows in (False, True):
        target = engine(draft_model(1, knows=knows))
        outputs = run(target, generation_requests(("regex", "compact schema")))
        accepted[knows] = sum(sum(output.accepted) for output in outputs.values())
    assert accepted[True] > 1.2 * accepted[False]


@pytest.mark.parametrize("split", [1, 4, 11])
def test_resuming_elsewhere_changes_no_token(plain: dict[str, Delta], split: int) -> None:
    resumed = [
        GenerationRequest(s.request_id, s.prompt, s.sampling, committed=plain[s.request_id].tokens[:split])
        for s in generation_requests()
        if len(plain[s.request_id].tokens) > split
    ]
    assert len(resumed) > 10
    outputs = run(engine(draft_model(3, knows=True)), resumed)
    for s in resumed:
        assert [*s.committed, *outputs[s.request_id].tokens] == plain[s.request_id].tokens
        assert outputs[s.request_id].finish_reason == plain[s.request_id].finish_reason


STRATEGIES: list[dict[str, object]] = [
    *({"rejection_sampling_strategy": name} for name in get_args(StrategyName) if name != "coupled"),
    {"rejection_sampling_strategy": "residual", "block_verification": True},
    {"synthetic_acceptance_rate": 0.9},
    {
        "use_relaxed_acceptance_for_thinking": True,
        "begin_thinking_phase_token": 13,
        "end_thinking_phase_token": 0,
        "relaxed_topk": 20,
        "relaxed_delta": 1.0,
    },
]


@pytest.mark.parametrize("keys", STRATEGIES, ids=str)
@pytest.mark.parametrize("drafter", ["does not know", "liar"])
def test_no_strategy_commits_a_token_outside_the_grammar(keys: dict[str, object], drafter: str) -> None:
    outputs = run(engine(drafting(drafter, 2), **keys), generation_requests(FEW))
    for request in generation_requests(FEW):
        output = outputs[request.request_id]
        assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
        assert not outside(output, request.sampling.grammar), request.request_id


ALLOWED = GrammarState.allowed
MUTANTS: dict[str, tuple[str, Callable[[GrammarState, Sequence[int]], Mask | None]]] = {
    "the root's mask at every node": ("allowed", lambda self, path: ALLOWED(self, ())),
    "one token late": ("allowed", lambda self, path: ALLOWED(self, path[:-1])),
    "not advanced by commits": ("extend", lambda self, tokens: None),
    "no mask": ("allowed", lambda self, path: None),
}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_caught(plain: dict[str, Delta], name: str, mutant: object) -> None:
    with patch.object(GrammarState, name, mutant):
        outputs = run(engine(draft_model(2, knows=False)), generation_requests(FEW))
    assert outcome(outputs) != {key: each for key, each in outcome(plain).items() if key in outputs}


UNUSABLE: dict[str, tuple[str, list[int]]] = {
    "nowhere": ("start: nowhere", []),
    "continue": ('start: "z" | "zz"', []),
    "nothing": ('start: ""', []),
    "outside": (GRAMMARS["choice"], [2]),
}
"""By a part of the error: a grammar and committed tokens."""


def test_an_unusable_grammar_ends_only_its_request() -> None:
    params = SamplingParams(max_tokens=9, seed=1)
    requests = [
        GenerationRequest(part, PROMPT, params.model_copy(update={"grammar": grammar}), committed=committed)
        for part, (grammar, committed) in UNUSABLE.items()
    ]
    good = GenerationRequest("good", PROMPT, params, SpeculativeOptions(enabled=False))
    outputs = run(engine(NoDraftClient()), [*requests, good])
    assert len(outputs.pop("good").tokens) == 9
    assert all(output.finish_reason is FinishReason.ERROR and not output.tokens for output in outputs.values())
    assert [part for part, output in outputs.items() if part not in output.error] == [], outputs


def test_cancelling_while_a_grammar_is_compiled_frees_everything() -> None:
    target = engine(NoDraftClient())
    request = generation_requests()[0]
    target.submit(request)
    target.cancel(request.request_id)
    [last] = target.step()
    assert last.finish_reason is FinishReason.CANCELLED
    assert not target.busy
    target.check_integrity()


TIGHT: dict[str, tuple[str, dict[str, int], set[FinishReason]]] = {
    "enough states for each, not for all": (MEMORY, {"states": 120}, {FinishReason.LENGTH}),
    "too few states": (MEMORY, {"states": 60}, {FinishReason.ERROR}),
    "fuel for what is new": (MEMORY, {"fuel": 150}, {FinishReason.LENGTH}),
    "too few items": (AMBIGUOUS, {"items": 150}, {FinishReason.LENGTH, FinishReason.ERROR}),
}
"""A grammar, limits, and how its requests end."""


def limited(grammar: str) -> list[GenerationRequest]:
    params = {"temperature": 0.9, "max_tokens": 50, "stop_token_ids": (END,), "grammar": grammar}
    return [GenerationRequest(f"{seed}", PROMPT, SamplingParams(seed=seed, **params)) for seed in range(4)]


def ends(outputs: dict[str, Delta]) -> dict[str, tuple[list[int], FinishReason | None, str]]:
    return {key: (output.tokens, output.finish_reason, output.error) for key, output in outputs.items()}


@pytest.mark.parametrize(
    "name",
    [
        "enough states for each, not for all",
        "too few items",
        pytest.param("too few states", marks=pytest.mark.slow),
        pytest.param("fuel for what is new", marks=pytest.mark.slow),
    ],
)
def test_a_limit_depends_on_the_request_and_its_tokens_alone(name: str) -> None:
    """Parsers of one grammar share a lexer: draft tokens and other requests that exhaust it change no output."""
    grammar, limits, reasons = TIGHT[name]
    replays, replay = 0, GrammarCompiler.replay

    def counted(self: GrammarCompiler, *args: Any) -> Any:
        nonlocal replays
        replays += 1
        return replay(self, *args)

    requests = limited(grammar)
    with tight(**limits), patch.object(GrammarCompiler, "replay", counted):
        alone: dict[str, Delta] = {}
        for request in requests:
            alone |= run(engine(NoDraftClient()), [request])
        assert {output.finish_reason for output in alone.values()} == reasons
        assert all("too many" in a.error.lower() for a in alone.values() if a.finish_reason is FinishReason.ERROR)
        for drafting in (lambda: LocalDraftClient(ngram_draft(1, 3, 2)), lambda: draft_model(2, knows=True)):
            replays = 0
            assert ends(run(engine(drafting()), requests)) == ends(alone)
            assert replays > 0
            assert ends(run(engine(drafting()), requests, together=1)) == ends(alone)
        plain = engine(NoDraftClient())
        for _ in range(2):
            assert ends(run(plain, requests)) == ends(alone)
        resumed = [
            GenerationRequest(s.request_id, PROMPT, s.sampling, committed=alone[s.request_id].tokens[:20])
            for s in requests
        ]
        for key, (tokens, *end) in ends(run(plain, resumed)).items():
            assert ([*alone[key].tokens[:20], *tokens], *end) == ends(alone)[key]


def test_another_target_ends_a_request_whose_end_was_not_sent() -> None:
    """Whether a token is the last may be known only after a replay, and the target may be lost before."""
    requests = [replace(s, sampling=s.sampling.model_copy(update={"max_tokens": 12})) for s in limited(MEMORY)]
    deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    with tight(states=45):
        target = engine(NoDraftClient())
        for request in requests:
            target.submit(request)
        while target.busy:
            for delta in target.step():
                deltas[delta.request_id].append(delta)
        late = [request for request in requests if not deltas[request.request_id][-1].tokens]
        assert late
        for request in late:
            *before, last = deltas[request.request_id]
            committed = [token for delta in before for token in delta.tokens]
            output = run(engine(NoDraftClient()), [replace(request, committed=committed)])[request.request_id]
            assert (output.tokens, output.finish_reason, output.error) == ([], last.finish_reason, last.error)


def test_another_target_ends_a_complete_text() -> None:
    params = SamplingParams(max_tokens=9, grammar=GRAMMARS["choice"])
    output = run(engine(NoDraftClient()), [GenerationRequest("r", PROMPT, params, committed=[PIECES.index("de")])])["r"]
    assert (output.tokens, output.finish_reason, output.error) == ([], FinishReason.STOP, "")


def test_a_replay_delays_only_its_request() -> None:
    first, second, *_ = limited(MEMORY)
    good = GenerationRequest("good", PROMPT, SamplingParams(max_tokens=200, seed=1))
    outputs = {each.request_id: Delta(each.request_id) for each in (first, second, good)}
    gate = threading.Event()

    def step() -> None:
        for delta in target.step():
            outputs[delta.request_id].tokens += delta.tokens
            outputs[delta.request_id].finish_reason = delta.finish_reason
        target.check_integrity()

    with tight(states=90):
        alone = run(engine(NoDraftClient()), [first])
        known = grammars()
        target = engine(NoDraftClient(), known)
        for each in (first, second, good):
            target.submit(each)
        while not outputs[first.request_id].tokens:
            step()
        known._thread.submit(gate.wait)
        known._replays.submit(gate.wait)
        while outputs["good"].finish_reason is None:
            step()
        assert target.load.running == 0
        assert outputs[first.request_id].finish_reason is outputs[second.request_id].finish_reason is None
        target.cancel(second.request_id)
        gate.set()
        while target.busy:
            step()
    assert outputs[second.request_id].finish_reason is FinishReason.CANCELLED
    assert outcome({first.request_id: outputs[first.request_id]}) == outcome(alone)
