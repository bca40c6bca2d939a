"""The gateway refuses grammars that cost too much or allow no text; others hardly wait for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from paceline.grammar import GrammarError, grammar_from_regex, grammar_from_schema
from paceline.grammar.grammar_checker import GrammarChecker
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.openai.bodies import CompletionBody
from paceline_services.gateway.structured_output import GrammarChecks

COSTLY = {"type": "integer", "multipleOf": 999983}
"""Eight seconds, and 370 MB."""


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
async def test_a_costly_or_empty_grammar_is_refused(asked: dict[str, Any], message: str) -> None:
    checks = GrammarChecks()
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": asked})
    with pytest.raises(InvalidRequestError, match=message) as refused:
        await checks.grammar_of(body)
    assert refused.value.param == f"structured_outputs.{next(iter(asked))}"
    usual = CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"regex": "ab*"}})
    assert await checks.grammar_of(usual) == grammar_from_regex("ab*"), "other grammars are checked"
    await checks.close()


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
