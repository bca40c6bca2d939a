"""Grammars are translated, checked and followed; text drawn within a schema fits the schema."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import re
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.grammar import (
    GrammarError,
    grammar_from_choices,
    grammar_from_regex,
    grammar_from_schema,
    grammar_from_text,
)
from paceline.grammar.grammar_checker import complaint
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError, OverloadedError
from paceline_services.gateway.openai.bodies import CompletionBody
from paceline_services.gateway.structured_output import (
    MAX_WAITING_GRAMMARS,
    GrammarChecks,
    ResponseFormat,
    StructuredOutputs,
    compile_grammar_text,
)
from tests.helpers.grammars import AMBIGUOUS, END, GRAMMARS, MEMORY, PIECES, TABLE, grammars, text_of, tight
from tests.helpers.llamas import VOCABULARY

ALL = grammars()
SHIPPED = Tokenizer.load("pydoc")
LARGE = GrammarCompiler(lambda: SHIPPED, len(SHIPPED.pieces) + 7)
"""Padded, as models are."""


TOO_LONG = {"enum": ["x" * MAX_GRAMMAR_LENGTH]}


def started(grammar: str, *output: int, vocabulary: GrammarCompiler = ALL) -> GrammarState:
    state = vocabulary.start(grammar, (END,), output)
    state.wait(30.0)
    assert state.ready
    return state


def wandered(state: GrammarState, rng: random.Random, most: int = 80) -> list[int]:
    """Tokens of a random walk; it ends the text as soon as that is possible, half of the time."""
    path: list[int] = []
    while len(path) < most and not state.finished(path):
        allowed = state.allowed(path)
        assert allowed is not None
        if allowed[END] and rng.random() < 0.5:
            break
        path.append(int(rng.choice([token for token in np.flatnonzero(allowed) if token != END])))
    return path


def mask_of(state: GrammarState, path: list[int]) -> bytes:
    allowed = state.allowed(path)
    return b"" if allowed is None else allowed.tobytes()


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
        allowed = state.allowed(path)
        assert allowed is not None
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
    allowed = state.allowed([abc])
    assert allowed is not None
    assert allowed[END]
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


def test_a_lexer_exhausted_by_others_is_replaced() -> None:
    rng = random.Random(1)
    with tight(states=120):
        shared = grammars()
        used = [shared.start(MEMORY, (END,), []) for _ in range(4)]
        for _, state in itertools.product(range(30), used):
            while not state.ready:
                state.wait(30.0)
            allowed = state.allowed([])
            assert allowed is not None
            assert mask_of(state, []) == mask_of(started(MEMORY, *state._output, vocabulary=grammars()), [])
            state.extend([int(rng.choice([token for token in np.flatnonzero(allowed) if token != END]))])
        assert sum(state._replayed is not None for state in used) > 1, "several requests were replayed"
        assert started(MEMORY, vocabulary=shared).allowed([]) is not None


def test_tokens_without_text_are_never_allowed() -> None:
    state = started(grammar_from_regex("(.|\n)*"), vocabulary=LARGE)
    allowed = state.allowed([])
    assert allowed is not None
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

    state = GrammarCompiler(no_tokenizer, 10).start(GRAMMARS["choice"], (), [])
    state.wait(30.0)
    assert state.allowed([]) is None
    assert "cannot follow grammars" in state.error()


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 200},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 8},
        {"enum": ["red", "green", 3, None]},
        {"const": {"a": [1, 2]}},
        {"type": "string", "pattern": "^[a-z]{1,3}-[0-9]{2}$"},
    ]
)


def objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "long name", 'quote"d', "ä"])
    return st.dictionaries(names, children, min_size=1, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:1],
            "additionalProperties": False,
        }
    )


schemas = st.recursive(
    leaves,
    lambda children: st.one_of(
        objects(children),
        children.map(lambda items: {"type": "array", "items": items, "maxItems": 2}),
        st.lists(children, min_size=2, max_size=2).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=5,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema, as far as it occurs here."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(value == each for each in schema.get("enum", [schema.get("const")]))
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            matches = re.search(schema.get("pattern", ""), value) if isinstance(value, str) else None
            return matches is not None and len(value) <= schema.get("maxLength", 100)
        case "array":
            return isinstance(value, list) and len(value) <= 2 and all(fits(each, schema["items"]) for each in value)
    properties = schema["properties"]
    known = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= properties.keys()
    return known and all(fits(each, properties[name]) for name, each in value.items())


@settings(deadline=None)
@given(schema=schemas, seed=st.integers(0, 999), compact=st.booleans())
def test_text_drawn_within_a_schema_fits_it(schema: dict[str, Any], seed: int, compact: bool) -> None:
    """With random tokens of the shipped vocabulary."""
    grammar = grammar_from_schema(schema, None) if compact else grammar_from_schema(schema)
    assert complaint(grammar) == ""
    rng, state, path = random.Random(seed), started(grammar, vocabulary=LARGE), list[int]()
    while not state.finished(path):
        allowed = state.allowed(path)
        assert allowed is not None
        path.append(int(rng.choice(np.flatnonzero(allowed))))
        if path[-1] == END:
            path.pop()
            break
    text = b"".join(SHIPPED.pieces[token] for token in path).decode()
    assert fits(json.loads(text), schema), text
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


def test_a_choice_may_hold_any_text() -> None:
    choices = ['"', "\\n", "a|b", "ä\n", "start: x"]
    state = started(grammar_from_choices(choices), vocabulary=LARGE)
    texts = set()
    for seed in range(60):
        tokens = wandered(state, random.Random(seed))
        texts.add(b"".join(SHIPPED.pieces[token] for token in tokens).decode())
    assert texts == set(choices)


def body_with(regex: str) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"regex": regex}})


async def test_grammars_that_wait_to_be_checked_are_limited() -> None:
    """Hostile grammars delay only requests with new grammars."""
    checks, gate = GrammarChecks(), threading.Event()
    known = await checks.grammar_of(body_with("known"))
    checks._thread.submit(gate.wait)
    waiting = [asyncio.create_task(checks.grammar_of(body_with("a" * n))) for n in range(1, MAX_WAITING_GRAMMARS + 1)]
    again = asyncio.create_task(checks.grammar_of(body_with("a")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await checks.grammar_of(body_with("b"))
    assert await checks.grammar_of(body_with("known")) == known
    again.cancel()
    gate.set()
    assert [await task for task in waiting] == [grammar_from_regex("a" * n) for n in range(1, MAX_WAITING_GRAMMARS + 1)]
    assert await checks.grammar_of(body_with("b")) == grammar_from_regex("b")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="regex"):
            await checks.grammar_of(body_with("("))
    await checks.close()


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ResponseFormat, {"type": "json_schema", "json_schema": {"schema": TOO_LONG}}, "json_schema.schema"),
        (StructuredOutputs, {"json": TOO_LONG}, "json"),
        (StructuredOutputs, {"json": json.dumps(TOO_LONG)}, "json"),
        (StructuredOutputs, {"choice": ["x" * 100] * (MAX_GRAMMAR_LENGTH // 100)}, "choice"),
    ],
)
def test_a_value_too_long_for_a_grammar_is_refused_before_translation(
    kind: type[ResponseFormat | StructuredOutputs], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(fields)
    error = InvalidRequestError.of(refused.value)
    assert error.param == param
    assert f"{MAX_GRAMMAR_LENGTH} are the most" in error.message


def test_a_grammar_has_a_length_limit() -> None:
    """The translation may be longer than the value."""
    schema = {"enum": ["ä" * (MAX_GRAMMAR_LENGTH // 2)]}
    asked = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(GrammarError, match=f"{MAX_GRAMMAR_LENGTH} are the most"):
        compile_grammar_text(asked)


def test_many_choices_are_one_lexeme() -> None:
    """With one rule each, they once exceeded a limit of llguidance."""
    choices = [f"choice {n}" for n in range(2000)]
    assert complaint(grammar_from_choices(choices)) == ""
    assert started(grammar_from_choices(choices), vocabulary=LARGE).allowed([]) is not None


async def test_little_is_kept_of_checked_grammars() -> None:
    """The key was once the whole body, up to 8 MB, of 256 requests."""
    checks = GrammarChecks()
    schema = {"type": "integer"}
    for name in ("a" * 100_000, "b" * 100_000):
        named = {"name": name, "description": name, "schema": schema}
        body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": named}}
        assert await checks.grammar_of(CompletionBody.model_validate(body)) == grammar_from_schema(schema)
    with pytest.raises(InvalidRequestError):
        await checks.grammar_of(body_with("(" * 10_000))
    assert [len(key) <= 64 for key in checks._tasks] == [True, True], "a schema's name is not part of its grammar"
    await checks.close()


async def test_a_refused_body_is_not_kept() -> None:
    """The stored error was once raised itself, and its traceback kept every body."""
    checks = GrammarChecks()
    bodies = []
    for _ in range(3):
        body = body_with("(")
        bodies.append(weakref.ref(body))
        with suppress(InvalidRequestError):
            await checks.grammar_of(body)
        del body
    gc.collect()
    assert [kept() for kept in bodies] == [None] * 3
    await checks.close()


def test_fields_of_vllm_become_grammars() -> None:
    asked = {
        "json": json.dumps(TABLE),
        "regex": "[a-c]+",
        "choice": ["abc", "de"],
        "grammar": 'root ::= "abc"',
        "json_object": True,
    }
    for field, value in asked.items():
        grammar = compile_grammar_text(StructuredOutputs.model_validate({field: value}))
        assert started(grammar).allowed([]) is not None
    compact = StructuredOutputs.model_validate({"json": TABLE, "disable_any_whitespace": True}).to_grammar()
    assert compact == grammar_from_schema(TABLE, None)
    spaced = StructuredOutputs.model_validate({"json": TABLE, "whitespace_pattern": " "}).to_grammar()
    assert "\n" not in text_of(wandered(started(spaced), random.Random(1)))
