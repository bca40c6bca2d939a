"""The gateway refuses grammars that cost too much or allow no text; others hardly wait for them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.grammar import GrammarError, grammar_from_regex, grammar_from_schema
from paceline.grammar.grammar_checker import GrammarChecker, complaint
from paceline.grammar.lark import with_ids_below
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError, OverloadedError
from paceline_services.gateway.generation.bodies import CompletionBody
from paceline_services.gateway.structured.output import (
    MAX_WAITING_GRAMMARS,
    GrammarChecks,
    ResponseFormat,
    StructuredOutputs,
    compile_grammar_text,
)

TOKENIZER = Tokenizer.load("pydoc")
TOO_LONG = {"enum": ["x" * MAX_GRAMMAR_LENGTH]}
COSTLY = {"type": "integer", "multipleOf": 999983}
"""Eight seconds, and 370 MB."""


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    made = GrammarChecks()
    yield made
    await made.close()


def body_with(regex: str) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"regex": regex}})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": COSTLY}, "compiling it takes more than 250 ms"),
        ({"regex": "^$"}, "only the empty text fits it"),
        ({"regex": r"[^\s\S]"}, "no text fits it"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text fits it"),
        ({"grammar": "start: a\na: a"}, "no text fits it"),
        ({"json": False}, "schema is false"),
    ],
)
async def test_a_costly_or_empty_grammar_is_refused(checks: GrammarChecks, asked: dict[str, Any], message: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": asked})
    with pytest.raises(InvalidRequestError, match=message) as refused:
        await checks.grammar_of(body, TOKENIZER)
    assert refused.value.param == f"structured_outputs.{next(iter(asked))}"
    assert (await checks.grammar_of(body_with("ab*"), TOKENIZER)).text == grammar_from_regex("ab*"), (
        "other grammars are checked"
    )


def test_a_grammar_of_any_vocabulary_is_checked() -> None:
    """Grammars name special tokens by their ids, which the checker's bytes do not have."""
    for token in (0, 255, 256, 511, 151657):
        assert complaint(f"start: <[{token}]> /a/") == ""
        assert "nowhere" in complaint(f"start: <[{token}]> nowhere")
    assert with_ids_below(256, 'start: "<[300]>" /<[300]>/ <[300]> // <[300]>') == (
        'start: "<[300]>" /<[300]>/ <[44]> // <[300]>'
    )


async def test_memory_is_limited_too() -> None:
    checker = GrammarChecker(time_s=60.0, memory_bytes=16 * 2**20)
    with pytest.raises(GrammarError, match="compiling it takes more than 16 MB"):
        await checker.check(grammar_from_schema(COSTLY))
    await checker.check(grammar_from_regex("a"))
    await checker.close()


async def test_a_costly_grammar_delays_at_most_one_other() -> None:
    checker = GrammarChecker(time_s=60.0)
    costly = asyncio.create_task(checker.check(grammar_from_schema(COSTLY)))
    for _ in range(20):
        await checker.check(grammar_from_regex("a"))
    assert not costly.done()
    costly.cancel()
    with suppress(asyncio.CancelledError):
        await costly
    await checker.close()


async def test_grammars_that_wait_to_be_checked_are_limited(checks: GrammarChecks) -> None:
    """Hostile grammars delay only requests with new grammars."""
    gate = threading.Event()
    known = await checks.grammar_of(body_with("known"), TOKENIZER)
    checks._thread.submit(gate.wait)
    waiting = [
        asyncio.create_task(checks.grammar_of(body_with("a" * n), TOKENIZER))
        for n in range(1, MAX_WAITING_GRAMMARS + 1)
    ]
    again = asyncio.create_task(checks.grammar_of(body_with("a"), TOKENIZER))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await checks.grammar_of(body_with("b"), TOKENIZER)
    assert await checks.grammar_of(body_with("known"), TOKENIZER) == known
    again.cancel()
    gate.set()
    assert [(await task).text for task in waiting] == [
        grammar_from_regex("a" * n) for n in range(1, MAX_WAITING_GRAMMARS + 1)
    ]
    assert (await checks.grammar_of(body_with("b"), TOKENIZER)).text == grammar_from_regex("b")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="regex"):
            await checks.grammar_of(body_with("("), TOKENIZER)


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
    asked = StructuredOutputs.model_validate({"json": {"enum": ["ä" * (MAX_GRAMMAR_LENGTH // 2)]}})
    with pytest.raises(GrammarError, match=f"{MAX_GRAMMAR_LENGTH} are the most"):
        compile_grammar_text(asked, TOKENIZER)


async def test_little_is_kept_of_checked_grammars(checks: GrammarChecks) -> None:
    """The key was once the whole body, up to 8 MB, of 256 requests."""
    schema = {"type": "integer"}
    for name in ("a" * 100_000, "b" * 100_000):
        named = {"name": name, "description": name, "schema": schema}
        body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": named}}
        checked = await checks.grammar_of(CompletionBody.model_validate(body), TOKENIZER)
        assert checked.text == grammar_from_schema(schema)
    with pytest.raises(InvalidRequestError):
        await checks.grammar_of(body_with("(" * 10_000), TOKENIZER)
    assert [len(key) <= 64 for key in checks._tasks] == [True, True], "a schema's name is not part of its grammar"


async def test_a_refused_body_is_not_kept(checks: GrammarChecks) -> None:
    """The stored error was once raised itself, and its traceback kept every body."""
    bodies = []
    for _ in range(3):
        body = body_with("(")
        bodies.append(weakref.ref(body))
        with suppress(InvalidRequestError):
            await checks.grammar_of(body, TOKENIZER)
        del body
    gc.collect()
    assert [kept() for kept in bodies] == [None] * 3
