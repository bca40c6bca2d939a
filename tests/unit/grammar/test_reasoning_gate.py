"""A grammar begins behind the reasoning: masks before, at and after that are functions of the tokens alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.grammar.grammar_state import GrammarState
from paceline.grammar.reasoning_matcher import ALWAYS, ReasoningGate
from paceline.parsing.formats.harmony import OPENAI
from paceline.parsing.formats.hermes import HERMES
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from paceline.parsing.tool_grammar import grammar_start
from paceline.text import Tokenizer
from tests.helpers.grammars import ANSWER, CALL, END, GRAMMARS, MEMORY, PIECES, THINK, grammars, tight, tokenizer
from tests.helpers.llamas import VOCABULARY

ALL = grammars()
A, B, ABC = (PIECES.index(piece) for piece in ("a", "b", "abc"))
GATES = {
    "one token": ReasoningGate((ANSWER,)),
    "three tokens that overlap with themselves": ReasoningGate((A, A, B)),
    "two equal tokens": ReasoningGate((A, A)),
    "one token may open it": ReasoningGate((A, B), THINK),
    "the grammar has the token that may open it": ReasoningGate((ANSWER,), ABC),
}


def started(gate: ReasoningGate, *output: int, grammar: str = GRAMMARS["choice"]) -> GrammarState:
    state = ALL.start(grammar, (END, CALL), output, gate)
    state.wait(30.0)
    assert state.ready
    return state


def mask_of(state: GrammarState, path: Sequence[int]) -> bytes:
    allowed = state.allowed(path)
    return b"" if allowed is None else allowed.tobytes()


def wandered(gate: ReasoningGate, rng: random.Random, most: int = 12) -> list[int]:
    """Allowed tokens, most of them from the markers."""
    state, path = started(gate), list[int]()
    while len(path) < most and (allowed := state.allowed(path)) is not None:
        tokens = [token for token in np.flatnonzero(allowed).tolist() if token not in (END, CALL)]
        likely = [token for token in (*gate.closing, gate.opening) if token in tokens]
        path.append(rng.choice(likely if likely and rng.random() < 0.8 else tokens))
    return path


def expected_start(gate: ReasoningGate, output: Sequence[int]) -> int | None:
    """Where the grammar begins, written from the definition."""
    if gate.opening is not None and list(output[:1]) != [gate.opening]:
        return 0
    first = 0 if gate.opening is None else 1
    for end in range(first, len(output) + 1):
        if tuple(output[first:end])[-len(gate.closing) :] == gate.closing:
            return end
    return None


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_a_mask_follows_from_the_tokens_alone(gate: ReasoningGate) -> None:
    """Whether they are a path, committed one after another, or the output that a new state begins with."""
    rng, begun = random.Random(3), 0
    for _ in range(20):
        walk = wandered(gate, rng)
        tree, committed = started(gate), started(gate)
        for at in range(len(walk) + 1):
            new, start = started(gate, *walk[:at]), expected_start(gate, walk[:at])
            mask = mask_of(new, [])
            assert mask == mask_of(tree, walk[:at]) == mask_of(committed, [])
            if start is None:
                assert np.flatnonzero(~np.frombuffer(mask, np.bool_)).tolist() == [END, CALL]
            elif at:
                assert mask == mask_of(started(ReasoningGate(), *walk[start:at]), [])
            begun += start is not None and 0 < start < at
            permitted = [new.permits([], token) for token in range(VOCABULARY)]
            assert permitted == [tree.permits(walk[:at], token) for token in range(VOCABULARY)]
            assert not mask or permitted == np.frombuffer(mask, np.bool_).tolist()
            committed.extend(walk[at : at + 1])
    assert begun > 3


def test_the_reasoning_ends_nowhere_but_at_its_marker() -> None:
    """A request neither ends nor fails inside; the marker's second occurrence is for the grammar to allow."""
    state = started(GATES["one token"])
    for path in ([], [ABC, ABC], [THINK, 2]):
        assert not state.finished(path)
        assert not state.permits(path, END)
        assert not state.permits([*path, END], ABC)
        assert not state.permits(path, VOCABULARY)
        assert state.within_limits(path)
    assert state.permits([ABC, ANSWER], ABC)
    assert not state.permits([ABC, ANSWER], ANSWER)
    assert state.error([ABC, ANSWER, ANSWER]) == "the output is outside the grammar"
    assert state.permits([ABC, ANSWER, ABC], END)
    assert state.finished([ABC, ANSWER, ABC, ABC])
    assert state.error([ABC, ANSWER, ABC, ABC]) == ""


def test_the_first_token_decides_whether_there_is_reasoning() -> None:
    gate = GATES["one token may open it"]
    state, plain = started(gate), started(ReasoningGate())
    first, usual = state.allowed([]), plain.allowed([])
    assert first is not None
    assert usual is not None
    assert np.flatnonzero(first != usual).tolist() == [THINK]
    assert mask_of(state, [ABC]) == mask_of(plain, [ABC])
    assert not state.permits([ABC], THINK)
    assert state.permits([THINK], 2)
    assert state.permits([THINK, A, B], ABC)


def test_a_grammar_begins_with_a_lexer_that_others_have_exhausted() -> None:
    """The limit is found where the reasoning ends, in the middle of guesses. Only the grammar's tokens are replayed."""
    rng, gate = random.Random(1), GATES["one token"]
    with tight(states=120):
        shared = grammars()
        waiting = shared.start(MEMORY, (END,), [2, 3], gate)
        waiting.wait(30.0)
        assert waiting.within_limits([3, ANSWER])
        used = [shared.start(MEMORY, (END,), []) for _ in range(4)]
        while all(state.within_limits() for state in used):
            for state in used:
                allowed = state.allowed([])
                assert allowed is not None
                state.extend([int(rng.choice([token for token in np.flatnonzero(allowed) if token != END]))])
        waiting.extend([4, ANSWER, A])
        while not waiting.ready:
            waiting.wait(30.0)
        new = grammars().start(MEMORY, (END,), [2, 3, 4, ANSWER, A], gate)
        new.wait(30.0)
        assert new.ready
        assert mask_of(waiting, []) == mask_of(new, [])


QWEN, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]
CHANNELS = ReasoningFormat("channels", "<call>a", "<think>", answer="<call>ab<think>")


@pytest.mark.parametrize(
    ("reasoning", "prompt", "expected"),
    [
        (None, "<think>", ALWAYS),
        (QWEN, "Hi", ReasoningGate((ANSWER,), THINK)),
        (QWEN, "Hi<think>\n", ReasoningGate((ANSWER,))),
        (QWEN, "<think>\n\n</think>\n\n", ALWAYS),
        (QWEN, "<think>Well</think>Hi. And you?", ReasoningGate((ANSWER,), THINK)),
        (R1, "Hi", ReasoningGate((ANSWER,))),
        (R1, "<think>\n\n</think>\n\n", ALWAYS),
        (ReasoningFormat("no tokens", "a", "[/]"), "Hi", ALWAYS),
        (CHANNELS, "Hi", ReasoningGate((CALL, PIECES.index("ab"), THINK))),
    ],
)
def test_a_prompt_says_where_the_grammar_begins(
    reasoning: ReasoningFormat | None, prompt: str, expected: ReasoningGate
) -> None:
    """A marker that is several tokens cannot be waited for, unless special tokens delimit it."""
    assert grammar_start(OutputFormat(reasoning), prompt, tokenizer(), calls=False) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Hi", ALWAYS),
        ("<think>Well", ReasoningGate((ANSWER,))),
        ("<think>Well</think>Hi", ALWAYS),
        ("", ReasoningGate((ANSWER,))),
    ],
)
def test_a_continued_answer_says_where_the_grammar_begins(said: str, expected: ReasoningGate) -> None:
    form = OutputFormat(QWEN)
    assert grammar_start(form, f"<think>{said}", tokenizer(), calls=False, continued=said) == expected


def test_a_forced_call_s_grammar_begins_with_the_reasoning_that_it_has_in_it() -> None:
    for tools, expected in ((HERMES, (ANSWER,)), (OPENAI, ()), (None, (ANSWER,))):
        start = grammar_start(OutputFormat(QWEN, tools), "<think>", tokenizer(), calls=True)
        assert start.closing == expected


def test_the_shipped_model_does_not_reason() -> None:
    start = grammar_start(OutputFormat(QWEN), "Hi", Tokenizer.load("pydoc"), calls=False)
    assert start.closing == ()
