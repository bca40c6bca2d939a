"""Grammars: the same tokens with speculation on and off, whoever drafts, resumed or not; none outside the grammar."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig, SpeculativeOptions
from paceline.core.messages import Delta, FinishReason, Submission
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.methods.ngram import NGramSpeculator
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState, Mask
from tests.exactness.test_engine import FREE, Liar, llama, run
from tests.helpers.grammars import AMBIGUOUS, END, GRAMMARS, MEMORY, PIECES, grammars, text_of, tight

PROMPT = [13, 23, 24, 25, 13, 23, 24, 25, 40]
LAWS = {
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


def submissions(grammars: Sequence[str] = tuple(GRAMMARS)) -> list[Submission]:
    return [
        Submission(f"{name}, {law}", PROMPT, params.model_copy(update={"grammar": GRAMMARS[name]}))
        for name in grammars
        for law, params in LAWS.items()
    ]


FEW = ("schema", "choice")
"""Enough to see that something is wrong."""


def draft_model(width: int, *, knows: bool, noise: float = 0.02) -> DraftClient:
    speculator = DraftModelSpeculator(llama(torch.float32, noise), width)
    speculator.grammars = grammars() if knows else None
    return LocalDraftClient(speculator)


def engine(drafting: DraftClient, known: GrammarCompiler | None = None, **keys: object) -> Engine:
    model = llama(torch.float32)
    speculation = {"method": "ngram", "num_speculative_tokens": 5, "max_tree_nodes": 20, **keys}
    config = SpeculativeConfig.model_validate(speculation)
    return Engine(model, EngineConfig(slots=model.slots), config, drafting, FREE, grammars=known or grammars())


@pytest.fixture(scope="module")
def plain() -> dict[str, Delta]:
    """One request at a time, no speculation."""
    return run(engine(NoDraftClient()), submissions(), together=1)


def outcome(answers: dict[str, Delta]) -> dict[str, tuple[list[int], FinishReason | None]]:
    return {key: (answer.tokens, answer.finish_reason) for key, answer in answers.items()}


def outside(answer: Delta, grammar: str) -> bool:
    """Whether an output is no beginning of what the grammar allows, by parsing it afresh."""
    state = grammars().start(grammar, (END,), [])
    state.wait(10.0)
    return not all(state.permits(answer.tokens[:i], token) for i, token in enumerate(answer.tokens))


def test_plain_outputs_are_what_the_grammars_say(plain: dict[str, Delta]) -> None:
    ended = 0
    for request in submissions():
        answer = plain[request.request_id]
        assert not outside(answer, request.sampling.grammar), request.request_id
        if answer.finish_reason is FinishReason.STOP:
            ended += 1
            if "schema" in request.request_id:
                rows = json.loads(text_of(answer.tokens))
                assert 1 <= len(rows) <= 3
                assert all(0 <= row["a"] <= 120 and len(row["b"]) <= 6 for row in rows)
        else:
            assert answer.finish_reason is FinishReason.LENGTH
    assert ended > len(plain) / 2


@pytest.mark.parametrize(
    ("drafter", "width"),
    [("knows", 1), ("knows", 3), ("does not know", 3), ("perfect", 1), ("ngram", 2), ("liar", 1)],
)
def test_speculation_changes_no_token(plain: dict[str, Delta], drafter: str, width: int) -> None:
    drafting = {
        "knows": lambda: draft_model(width, knows=True),
        "does not know": lambda: draft_model(width, knows=False),
        "perfect": lambda: draft_model(width, knows=True, noise=0.0),
        "ngram": lambda: LocalDraftClient(NGramSpeculator(1, 3, width)),
        "liar": lambda: LocalDraftClient(Liar()),
    }[drafter]()
    target = engine(drafting)
    assert outcome(run(target, submissions())) == outcome(plain)
    drafted = sum(sum(each.drafted) for each in target.calibrations.values())
    accepted = sum(sum(each.accepted) for each in target.calibrations.values())
    assert drafted > 20
    assert accepted > (0.5 * drafted if drafter in ("knows", "perfect") and width == 1 else 0)


def test_a_draft_that_knows_the_grammar_guesses_better() -> None:
    accepted = {}
    for knows in (False, True):
        target = engine(draft_model(1, knows=knows))
        answers = run(target, submissions(("regex", "compact schema")))
        accepted[knows] = sum(sum(answer.accepted) for answer in answers.values())
    assert accepted[True] > 1.2 * accepted[False]


@pytest.mark.parametrize("split", [1, 4, 11])
def test_resuming_elsewhere_changes_no_token(plain: dict[str, Delta], split: int) -> None:
    resumed = [
        Submission(s.request_id, s.prompt, s.sampling, committed=plain[s.request_id].tokens[:split])
        for s in submissions()
        if len(plain[s.request_id].tokens) > split
    ]
    assert len(resumed) > 10
    answers = run(engine(draft_model(3, knows=True)), resumed)
    for s in resumed:
        assert [*s.committed, *answers[s.request_id].tokens] == plain[s.request_id].tokens
        assert answers[s.request_id].finish_reason == plain[s.request_id].finish_reason


STRATEGIES: list[dict[str, object]] = [
    {"rejection_sampling_strategy": "greedy"},
    {"rejection_sampling_strategy": "residual"},
    {"rejection_sampling_strategy": "residual", "block_verification": True},
    {"rejection_sampling_strategy": "typical-acceptance"},
    {"rejection_sampling_strategy": "logit-comparison"},
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
    drafting = LocalDraftClient(Liar()) if drafter == "liar" else draft_model(2, knows=False)
    answers = run(engine(drafting, **keys), submissions(FEW))
    for request in submissions(FEW):
        answer = answers[request.request_id]
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), answer.error
        assert not outside(answer, request.sampling.grammar), request.request_id


def always_the_roots(self: GrammarState, path: Sequence[int]) -> Mask | None:
    return ALLOWED(self, ())


def a_guess_late(self: GrammarState, path: Sequence[int]) -> Mask | None:
    return ALLOWED(self, path[:-1])


def never_advanced(self: GrammarState, tokens: Sequence[int]) -> None: ...


def nothing(self: GrammarState, path: Sequence[int]) -> Mask | None:
    return None


ALLOWED = GrammarState.allowed
MUTANTS = {
    "the root's mask at every node": ("allowed", always_the_roots),
    "a guess late": ("allowed", a_guess_late),
    "not advanced along what is committed": ("extend", never_advanced),
    "no mask": ("allowed", nothing),
}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_caught(plain: dict[str, Delta], name: str, mutant: object) -> None:
    with patch.object(GrammarState, name, mutant):
        answers = run(engine(draft_model(2, knows=False)), submissions(FEW))
    assert outcome(answers) != {key: each for key, each in outcome(plain).items() if key in answers}


def test_the_last_token_of_a_text_ends_the_request_without_a_stop_token(plain: dict[str, Delta]) -> None:
    for law in LAWS:
        answer = plain[f"choice, {law}"]
        assert answer.finish_reason is FinishReason.STOP
        assert END not in answer.tokens[:-1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.tokens)
        assert text_of(answer.tokens) in ("abc", "abcabc", "de", "true", "[10, 10]")


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone() -> None:
    params = SamplingParams(max_tokens=9, seed=1)
    bad = {
        "unknown": "start: nowhere",
        "unsayable": 'start: "z" | "zz"',
        "empty": 'start: ""',
        "committed": GRAMMARS["choice"],
    }
    said = {"committed": [2]}
    requests = [
        Submission(key, PROMPT, params.model_copy(update={"grammar": grammar}), committed=said.get(key, []))
        for key, grammar in bad.items()
    ]
    good = Submission("good", PROMPT, params, SpeculativeOptions(enabled=False))
    answers = run(engine(NoDraftClient()), [*requests, good])
    assert len(answers.pop("good").tokens) == 9
    assert all(answer.finish_reason is FinishReason.ERROR and not answer.tokens for answer in answers.values())
    words = {
        "unknown": "nowhere",
        "unsayable": "continue",
        "empty": "nothing",
        "committed": "outside",
    }
    assert [key for key, answer in answers.items() if words[key] not in answer.error] == [], answers


def test_cancelling_while_a_grammar_is_compiled_frees_everything() -> None:
    target = engine(NoDraftClient())
    request = submissions()[0]
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


def limited(grammar: str) -> list[Submission]:
    law = {"temperature": 0.9, "max_tokens": 50, "stop_token_ids": (END,), "grammar": grammar}
    return [Submission(f"{seed}", PROMPT, SamplingParams(seed=seed, **law)) for seed in range(4)]


def ends(answers: dict[str, Delta]) -> dict[str, tuple[list[int], FinishReason | None, str]]:
    return {key: (answer.tokens, answer.finish_reason, answer.error) for key, answer in answers.items()}


@pytest.mark.parametrize(
    "name",
    [
        "enough states for each, not for all",
        "too few items",
        pytest.param("too few states", marks=pytest.mark.slow),
        pytest.param("fuel for what is new", marks=pytest.mark.slow),
    ],
)
def test_a_limit_is_hit_by_a_request_and_its_tokens_alone(name: str) -> None:
    """Parsers of one grammar share a lexer: what guesses and other requests leave of its limits is nobody's outcome."""
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
        assert {answer.finish_reason for answer in alone.values()} == reasons
        assert all("too many" in a.error.lower() for a in alone.values() if a.finish_reason is FinishReason.ERROR)
        for drafting in (lambda: LocalDraftClient(NGramSpeculator(1, 3, 2)), lambda: draft_model(2, knows=True)):
            replays = 0
            assert ends(run(engine(drafting()), requests)) == ends(alone)
            assert replays > 0
            assert ends(run(engine(drafting()), requests, together=1)) == ends(alone)
        plain = engine(NoDraftClient())
        for _ in range(2):
            assert ends(run(plain, requests)) == ends(alone)
        resumed = [
            Submission(s.request_id, PROMPT, s.sampling, committed=alone[s.request_id].tokens[:20]) for s in requests
        ]
        for key, (tokens, *end) in ends(run(plain, resumed)).items():
            assert ([*alone[key].tokens[:20], *tokens], *end) == ends(alone)[key]


def test_who_takes_over_ends_what_a_lost_target_had_not_ended_yet() -> None:
    """Whether a token was the last one may be known only after a replay, and its target be lost meanwhile."""
    requests = [replace(s, sampling=s.sampling.model_copy(update={"max_tokens": 12})) for s in limited(MEMORY)]
    said: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
    with tight(states=60):
        target = engine(NoDraftClient())
        for request in requests:
            target.submit(request)
        while target.busy:
            for delta in target.step():
                said[delta.request_id].append(delta)
        late = [request for request in requests if not said[request.request_id][-1].tokens]
        assert late
        for request in late:
            *before, last = said[request.request_id]
            committed = [token for delta in before for token in delta.tokens]
            answer = run(engine(NoDraftClient()), [replace(request, committed=committed)])[request.request_id]
            assert (answer.tokens, answer.finish_reason, answer.error) == ([], last.finish_reason, last.error)


def test_who_takes_over_a_text_that_is_complete_ends_it() -> None:
    params = SamplingParams(max_tokens=9, grammar=GRAMMARS["choice"])
    answer = run(engine(NoDraftClient()), [Submission("r", PROMPT, params, committed=[PIECES.index("de")])])["r"]
    assert (answer.tokens, answer.finish_reason, answer.error) == ([], FinishReason.STOP, "")


def test_who_waits_for_a_replay_holds_up_nobody() -> None:
    first, second, *_ = limited(MEMORY)
    good = Submission("good", PROMPT, SamplingParams(max_tokens=200, seed=1))
    answers = {each.request_id: Delta(each.request_id) for each in (first, second, good)}
    gate = threading.Event()

    def step() -> None:
        for delta in target.step():
            answers[delta.request_id].tokens += delta.tokens
            answers[delta.request_id].finish_reason = delta.finish_reason
        target.check_integrity()

    with tight(states=90):
        alone = run(engine(NoDraftClient()), [first])
        known = grammars()
        target = engine(NoDraftClient(), known)
        for each in (first, second, good):
            target.submit(each)
        while not answers[first.request_id].tokens:
            step()
        known._thread.submit(gate.wait)
        known._replays.submit(gate.wait)
        while answers["good"].finish_reason is None:
            step()
        assert target.load.running == 0
        assert answers[first.request_id].finish_reason is answers[second.request_id].finish_reason is None
        target.cancel(second.request_id)
        gate.set()
        while target.busy:
            step()
    assert answers[second.request_id].finish_reason is FinishReason.CANCELLED
    assert outcome({first.request_id: answers[first.request_id]}) == outcome(alone)
