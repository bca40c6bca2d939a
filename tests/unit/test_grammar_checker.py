"""Grammars that cost too much, or leave nothing to say, are refused where they come in; others hardly wait for them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from paceline.grammar import GrammarError, of_regex, of_schema
from paceline.grammar.checker import Checker
from services.gateway.bodies import CompletionBody
from services.gateway.errors import InvalidRequestError
from services.gateway.structure import GrammarChecks

COSTLY = {"type": "integer", "multipleOf": 999983}
"""Eight seconds, and 370 MB."""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": COSTLY}, "compiling it takes more than 250 ms"),
        ({"regex": "^$"}, "only the empty text fits it"),
        ({"regex": r"[^\s\S]"}, "no text fits it"),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text fits it"),
        ({"grammar": "start: a\na: a"}, "no text fits it"),
        ({"json": False}, "schema is false"),
    ],
)
async def test_what_costs_too_much_or_leaves_nothing_is_refused(asked: dict[str, Any], said: str) -> None:
    checks = GrammarChecks()
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": asked})
    with pytest.raises(InvalidRequestError, match=said) as refused:
        await checks.grammar_of(body)
    assert refused.value.param == f"structured_outputs.{next(iter(asked))}"
    usual = CompletionBody.model_validate({"prompt": "x", "structured_outputs": {"regex": "ab*"}})
    assert await checks.grammar_of(usual) == of_regex("ab*"), "others go on"
    await checks.close()


async def test_memory_has_a_limit_too() -> None:
    checker = Checker(time_s=60.0, memory_bytes=16 * 2**20)
    with pytest.raises(GrammarError, match="compiling it takes more than 16 MB"):
        await checker.check(of_schema(COSTLY))
    await checker.check(of_regex("a"))
    await checker.close()


async def test_a_costly_grammar_holds_up_one_other_at_most() -> None:
    """Of those that are no costlier than usual."""
    checker = Checker(time_s=60.0)
    costly = asyncio.create_task(checker.check(of_schema(COSTLY)))
    for _ in range(20):
        await checker.check(of_regex("a"))
    assert not costly.done()
    costly.cancel()
    with suppress(asyncio.CancelledError):
        await costly
    await checker.close()
