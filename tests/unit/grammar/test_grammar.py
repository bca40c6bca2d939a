"""Grammars are translated, checked and followed; text drawn within a schema fits the schema."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.grammar import (
    GrammarError,
    grammar_from_choices,
    grammar_from_regex,
    grammar_from_schema,
    grammar_from_text,
)
from paceline.grammar.grammar_checker import complaint
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState, Mask
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.text import Tokenizer
from paceline_services.gateway.structured.output import StructuredOutputs, compile_grammar_text
from tests.helpers.grammars import (
    AMBIGUOUS,
    CALL,
    END,
    GRAMMARS,
    MARKED_MEMORY,
    MEMORY,
    PIECES,
    TABLE,
    grammars,
    text_of,
    tight,
)
from tests.helpers.llamas import VOCABULARY
from tests.helpers.random_schemas import TYPES

ALL = grammars()
SHIPPED = Tokenizer.load("pydoc")
LARGE = GrammarCompiler(GrammarVocabulary(lambda: SHIPPED), len(SHIPPED.pieces) + 7)
"""Padded, as models are."""


def started(grammar: str, *output: int, vocabulary: GrammarCompiler = ALL) -> GrammarState:
    state = vocabulary.start(grammar, (END,), output)
    state.wait(30.0)
    assert state.ready
    return state


def wandered(state: GrammarState, rng: random.Random, most: int = 80) -> list[int]:
    """Tokens of a random walk; it ends the text as soon as that is possible, half of the time."""
    path: list[int] = []
    while len(path) < most and not state.finished(path):
        allowed = allowed_after(state, path)
        if allowed[END] and rng.random() < 0.5:
            break
        path.append(int(rng.choice([token for token in np.flatnonzero(allowed) if token != END])))
    return path


def allowed_after(state: GrammarState, path: Sequence[int] = ()) -> Mask:
    allowed = state.allowed(path)
    assert allowed is not None
    return allowed


def mask_of(state: GrammarState, path: list[int]) -> bytes:
    allowed = state.allowed(path)
    return b"" if allowed is None else allowed.tobytes()


def shipped_text(tokens: Sequence[int]) -> str:
    return b"".join(SHIPPED.pieces[token] for token in tokens).decode()


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_mask_follows_from_grammar_and_tokens_alone(grammar: str) -> None:
    """Whether the path is reached token by token, with commits between, from other branches, or by a new state."""
    rng = random.Random(7)
    walks = [wandered(started(grammar), rng) for _ in range(6)]
    paths = [walk[:length] for walk in walks for length in range(len(walk) + 1)]
    rng.shuffle(paths)
    tree = started(grammar)
    for path in paths:
        assert mask_of(tree, path) == mask_of(started(grammar, *path), [])
    for walk in walks:
        state = started(grammar)
        for at, other in enumerate(walk):
            for branch in (walk[at : at + 2], walks[0][at : at + 3]):
                state.permits(branch, other)
            assert mask_of(state, walk[at : at + 1]) == mask_of(started(grammar, *walk[: at + 1]), [])
            state.extend([other])


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 5, 6))])
@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_mask_has_exactly_the_tokens_that_can_follow(grammar: str, seed: int) -> None:
    state, path = started(grammar), list[int]()
    for token in wandered(started(grammar), random.Random(seed)):
        allowed = allowed_after(state, path)
        tried = started(grammar, *path[:-1])  # it has no mask after the last token
        assert allowed.tolist() == [tried.permits(path[-1:], other) for other in range(VOCABULARY)]
        assert allowed.tolist() == [state.permits(path, other) for other in range(VOCABULARY)]
        path.append(token)


def test_forced_text_may_be_written_in_any_tokens() -> None:
    state = started(grammar_from_choices(["abcabc"]))
    assert {PIECES[i] for i in np.flatnonzero(state.allowed([]))} == {"a", "ab", "abc"}


def test_a_request_is_finished_where_only_the_end_can_follow() -> None:
    state = started(grammar_from_choices(["abc", "abcabc"]))
    abc = PIECES.index("abc")
    assert not state.finished([abc])
    assert allowed_after(state, [abc])[END]
    assert state.finished([abc, abc])
    assert state.allowed([abc, abc]) is None
    assert state.permits([abc], END)
    assert not state.permits([abc, END], abc), "after the end there is nothing"
    assert state.error([abc, abc]) == ""


def test_the_end_of_a_text_is_no_token() -> None:
    """llguidance has one for it, after those of the vocabulary."""
    state = started(GRAMMARS["choice"])
    assert not state.permits([PIECES.index("abc")], VOCABULARY)
    assert state.error([PIECES.index("abc"), VOCABULARY]) == "the output is outside the grammar"


def test_a_limit_is_an_error_even_where_the_text_may_end() -> None:
    with tight(items=150):
        state = started(AMBIGUOUS, vocabulary=grammars())
        while state.within_limits():
            assert not state._output or state.permits([], END)
            state.extend([PIECES.index("a")])
        assert not state.ready
        state.wait(30.0)
    assert state.ready
    assert state.within_limits()
    assert state.finished([])
    assert "too many items" in state.error().lower()


@pytest.mark.parametrize("grammar", [MEMORY, MARKED_MEMORY], ids=["text", "special tokens"])
def test_a_lexer_exhausted_by_others_is_replaced(grammar: str) -> None:
    rng = random.Random(1)
    with tight(states=120):
        shared = grammars()
        used = [shared.start(grammar, (END,), []) for _ in range(4)]
        for _, state in itertools.product(range(30), used):
            while not state.ready:
                state.wait(30.0)
            allowed = allowed_after(state)
            assert mask_of(state, []) == mask_of(started(grammar, *state._output, vocabulary=grammars()), [])
            tokens = [token for token in np.flatnonzero(allowed) if token != END]
            state.extend([CALL if CALL in tokens else int(rng.choice(tokens))])
        replayed = [state for state in used if state._replayed is not None]
        assert len(replayed) > 1, "several requests were replayed"
        assert grammar == MEMORY or any(CALL in state._output[: state._replayed] for state in replayed)
        assert started(grammar, vocabulary=shared).allowed([]) is not None


def test_tokens_without_text_are_never_allowed() -> None:
    state = started(grammar_from_regex("(.|\n)*"), vocabulary=LARGE)
    allowed = allowed_after(state)
    empty = {i for i, piece in enumerate(SHIPPED.pieces) if not piece or i in SHIPPED.special_ids} - {END}
    assert not allowed[[*empty, *range(len(SHIPPED.pieces), LARGE.vocabulary_size)]].any()
    assert allowed.sum() > 4000


def test_tokens_committed_before_compilation_count() -> None:
    """A draft starts before its grammar is compiled."""
    gate, abc = threading.Event(), PIECES.index("abc")
    slow = grammars()
    slow._thread.submit(gate.wait)
    state = slow.start(GRAMMARS["choice"], (END,), [])
    assert not state.ready
    assert state.allowed([]) is None
    state.extend([abc])
    gate.set()
    state.wait(30.0)
    assert mask_of(state, []) == mask_of(started(GRAMMARS["choice"], abc), [])


def test_a_draft_that_cannot_compile_has_no_mask() -> None:
    def no_tokenizer() -> Tokenizer:
        raise ValueError("the decoder changes earlier text")

    state = GrammarCompiler(GrammarVocabulary(no_tokenizer), 10).start(GRAMMARS["choice"], (), [])
    state.wait(30.0)
    assert state.allowed([]) is None
    assert "cannot follow grammars" in state.error()


@settings(deadline=None)
@given(kind=TYPES, seed=st.integers(0, 999), compact=st.booleans())
def test_text_drawn_within_a_schema_fits_it(kind: Any, seed: int, compact: bool) -> None:
    """With random tokens of the shipped vocabulary; pydantic makes the schema and checks the text."""
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    grammar = grammar_from_schema(schema, None) if compact else grammar_from_schema(schema)
    assert complaint(grammar) == ""
    rng, state, path = random.Random(seed), started(grammar, vocabulary=LARGE), list[int]()
    while not state.finished(path):
        token = int(rng.choice(np.flatnonzero(allowed_after(state, path))))
        if token == END:
            break
        path.append(token)
    text = shipped_text(path)
    adapter.validate_python(json.loads(text), strict=True)
    assert not compact or text == text.strip()


def test_white_space_is_bounded() -> None:
    blanks = [PIECES.index(piece) for piece in ("\n  ", " ", " ")]
    state = started(GRAMMARS["schema"], PIECES.index("["), *blanks)
    assert state.permits([], blanks[-1])
    assert not state.permits([blanks[-1]] * 40, blanks[-1])
    anywhere = started(GRAMMARS["any white space"], PIECES.index("["), *blanks)
    assert anywhere.permits([blanks[-1]] * 40, blanks[-1])


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        (grammar_from_schema({"type": "strin"}), "strin"),
        (grammar_from_schema({"$ref": "#/nowhere"}), "nowhere"),
        (grammar_from_schema({"enum": []}), "Unsatisfiable"),
        (grammar_from_regex("a(?=b)"), "look-around"),
        ("start: nowhere", "nowhere"),
        ("start: " + "(" * 9000 + '"a"' + ")" * 9000, "nested"),
    ],
)
def test_an_invalid_grammar_has_a_short_error(grammar: str, part: str) -> None:
    refusal = complaint(grammar)
    assert part in refusal
    assert len(refusal) <= 200
    assert "no_forcing" not in refusal, "not what the user wrote"


def test_users_cannot_set_options_of_llguidance() -> None:
    with pytest.raises(GrammarError, match="cannot be set"):
        grammar_from_text('%llguidance {"no_forcing": false}\nstart: "a"')
    with pytest.raises(GrammarError, match="GBNF"):
        grammar_from_text("root ::= " + "(" * 9000)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("start: <[5]>", True),
        ('start: "a" # "\n | <[5-9]>', True),
        ("start: </a> | <[^5]> | </b>", True),
        ("start: /a\\// <[*]>", True),
        ("start: %lark { start: <[5,6]> }", True),
        ('start: "<[5]>" | /<[a-z]>/ | %json {"const": "<[5]>"} // <[5]>', False),
        ("start: /\\/<[a-z]>/", False),
        ('root ::= "<[5]>" [a-z]', False),
    ],
)
def test_users_cannot_name_tokens_by_their_ids(text: str, refused: bool) -> None:
    """An id is another token in another vocabulary."""
    if refused:
        with pytest.raises(GrammarError, match="token ids"):
            grammar_from_text(text)
    else:
        assert complaint(grammar_from_text(text)) == ""


def test_a_choice_may_hold_any_text() -> None:
    choices = ['"', "\\n", "a|b", "ä\n", "start: x", "\x7f"]
    state = started(grammar_from_choices(choices), vocabulary=LARGE)
    assert {shipped_text(wandered(state, random.Random(seed))) for seed in range(60)} == set(choices)


def test_many_choices_are_one_lexeme() -> None:
    """With one rule each, they once exceeded a limit of llguidance."""
    choices = [f"choice {n}" for n in range(2000)]
    assert complaint(grammar_from_choices(choices)) == ""
    assert started(grammar_from_choices(choices), vocabulary=LARGE).allowed([]) is not None


def test_fields_of_vllm_become_grammars() -> None:
    asked = {
        "json": json.dumps(TABLE),
        "regex": "[a-c]+",
        "choice": ["abc", "de"],
        "grammar": 'root ::= "abc"',
        "json_object": True,
    }
    for field, value in asked.items():
        grammar = compile_grammar_text(StructuredOutputs.model_validate({field: value}), SHIPPED)
        assert started(grammar).allowed([]) is not None
    compact = StructuredOutputs.model_validate({"json": TABLE, "disable_any_whitespace": True}).to_grammar(SHIPPED)
    assert compact == grammar_from_schema(TABLE, None)
    spaced = StructuredOutputs.model_validate({"json": TABLE, "whitespace_pattern": " "}).to_grammar(SHIPPED)
    assert "\n" not in text_of(wandered(started(spaced), random.Random(1)))
