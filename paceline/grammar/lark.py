"""Grammars as text: what users write, turned into the one dialect that travels, and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

PREAMBLE = '%llguidance {"no_forcing": true}\n'
"""Where a grammar forces text, llguidance would allow only one way to write it in tokens, and not always the same."""
WHITE_SPACE = r"\n[ \t]{0,40}|[ \t]"
"""What may stand between the parts of JSON, unless a schema says otherwise. It has an end, which small models do not
always find."""


def limits(
    initial_lexer_fuel: int = 1_000_000,  # when compiled: about 20 ms
    step_lexer_fuel: int = 100_000,  # for each mask: about 7 ms
    step_max_items: int = 20_000,  # for each mask: about 1 ms
    max_lexer_states: int = 20_000,  # 20 to 40 MB
) -> LLParserLimits:
    """What following a hostile grammar can cost; what compiling costs, see `checker`."""
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=initial_lexer_fuel,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=step_max_items,
        max_lexer_states=max_lexer_states,
        verbose_errors=False,
    )


LIMITS = limits()


class GrammarError(ValueError):
    """The text says what is wrong with a grammar."""


def grammar_from_schema(schema: Mapping[str, Any] | bool, white_space: str | None = WHITE_SPACE) -> str:
    """JSON that a schema describes. `white_space`: a regular expression for what may stand between its parts;
    None: nothing may."""
    options = {"whitespace_flexible": False} if white_space is None else {"whitespace_pattern": white_space}
    whole = {"x-guidance": options, **schema} if isinstance(schema, Mapping) else schema
    return f"start: %json {json.dumps(whole, separators=(',', ':'))}"


def grammar_from_regex(regex: str) -> str:
    """Text that a regular expression matches from end to end."""
    return f"start: /{regex_to_lark(regex, '')}/"


def grammar_from_choices(choices: Sequence[str]) -> str:
    """One of these texts."""
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"start: CHOICE\nCHOICE: {texts}"  # one lexeme: thousands of them would exceed llguidance's limits


def grammar_from_text(text: str) -> str:
    """What a grammar in Lark or GBNF (llama.cpp's EBNF) describes. Raises `GrammarError`."""
    if "%llguidance" in text:
        raise GrammarError("options of %llguidance cannot be set")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # it raises whatever comes to hand
        raise GrammarError(f"it cannot be read as GBNF: {error}") from error


def short_error(error: str) -> str:
    """What llguidance complains of, without the place in a text that the user did not write."""
    first, *rest = error.strip().splitlines() or [""]
    reasons = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return ", ".join([_PLACE.sub("", first), *reasons])[:200]


def limit_of(parser: LLMatcher) -> str:
    """Which limit a parser has hit. Empty: none, it goes on or has ended by what its grammar says."""
    error = short_error(parser.get_error())
    return "" if error.startswith(("NoExtension", "Parser Error")) else error


_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
