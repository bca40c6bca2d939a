"""Grammars as text: translates what users write into llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from paceline.grammar.gbnf import is_lark, lark_of
from paceline.grammar.grammar_error import GrammarError
from paceline.grammar.json_schema import llguidance_schema, unknown_keywords

PREAMBLE = '%llguidance {"no_forcing": true}\n'
"""Where a grammar forces text, llguidance would allow only one tokenization of it, and not always the same one."""
WHITE_SPACE = r"\n[ \t]{0,40}|[ \t]"
"""White space between the parts of JSON, unless a schema sets another. It is bounded: small models may never end it."""


def limits(
    initial_lexer_fuel: int = 1_000_000,  # when compiled: about 20 ms
    step_lexer_fuel: int = 100_000,  # for each mask: about 7 ms
    step_max_items: int = 20_000,  # for each mask: about 1 ms
    max_lexer_states: int = 20_000,  # 20 to 40 MB
) -> LLParserLimits:
    """Limits of following a hostile grammar; `grammar_checker` limits compiling."""
    return LLParserLimits(
        max_grammar_size=100_000,
        initial_lexer_fuel=initial_lexer_fuel,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=step_max_items,
        max_lexer_states=max_lexer_states,
        verbose_errors=False,
    )


LIMITS = limits()


def grammar_from_schema(
    schema: Mapping[str, Any] | bool, white_space: str | None = WHITE_SPACE, *, strict: bool = True
) -> str:
    """JSON that a schema describes. `white_space`: a regular expression for the text between its parts; None: none.

    `strict`: false leaves out keywords that cannot be compiled. Raises `GrammarError`.
    """
    return f"start: {json_part(schema, white_space, strict=strict)}"


def json_part(schema: Mapping[str, Any] | bool, white_space: str | None = WHITE_SPACE, *, strict: bool = True) -> str:
    """JSON that a schema describes, as a part of a rule. See `grammar_from_schema`."""
    options = {"whitespace_flexible": False} if white_space is None else {"whitespace_pattern": white_space}
    whole = llguidance_schema(schema, options, strict=strict)
    return f"%json {json.dumps(whole, separators=(',', ':'))}"


def regex_part(regex: str) -> str:
    """Text that a regular expression matches from end to end, as a part of a rule."""
    return f"/{regex_to_lark(regex, '')}/"


def text_part(text: str) -> str:
    """This text, as a part of a rule."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def grammar_from_regex(regex: str) -> str:
    """Text that a regular expression matches from end to end."""
    return f"start: {regex_part(regex)}"


def grammar_from_choices(choices: Sequence[str]) -> str:
    """One of these texts."""
    texts = " | ".join(map(text_part, choices))
    return f"start: CHOICE\nCHOICE: {texts}"  # one lexeme: thousands of them would exceed llguidance's limits


def grammar_from_text(text: str) -> str:
    """Text that a grammar in Lark or GBNF (llama.cpp's EBNF) describes. Raises `GrammarError`."""
    if "%llguidance" in text:
        raise GrammarError("options of %llguidance cannot be set")
    try:
        lark = text if is_lark(text) else lark_of(text)
    except Exception as error:  # it raises errors of many types
        raise GrammarError(f"it cannot be read as GBNF: {error}") from error
    for part in _PART.finditer(lark):
        if part["ids"]:
            raise GrammarError(f"token ids, as in {part['ids'][:40]}, cannot be used: write the text of the tokens")
    return lark


def with_ids_below(size: int, grammar: str) -> str:
    """The grammar of a large vocabulary for one of this size. Other ids of special tokens take their place."""
    return _PART.sub(lambda part: f"<[{int(part['id']) % size}]>" if part["id"] else part[0], grammar)


def short_error(error: str) -> str:
    """The reason in an error of llguidance, without the position, which is in text that the user did not write."""
    first, *rest = error.strip().splitlines() or [""]
    if keywords := unknown_keywords(first):
        names = ", ".join(keywords)
        return f"a grammar cannot keep to {names}: `strict: false` of a response format or a tool leaves it out"
    reasons = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return ", ".join([_POSITION.sub("", first), *reasons])[:200]


def faulty_part(error: str, grammar: str) -> str:
    """The comment behind the rule that an error of llguidance is about; "": none."""
    position = _POSITION.match(error)
    line = f"{PREAMBLE}{grammar}".splitlines()[int(position["line"]) - 1] if position else ""
    if not line.startswith("rule_"):  # a user's own
        return ""
    comments = [part[0] for part in _PART.finditer(line) if part[0].startswith("//")]
    return comments[-1].removeprefix("//").strip() if comments else ""


def limit_of(parser: LLMatcher) -> str:
    """The limit that a parser has hit. Empty: none; the parser goes on, or its grammar ended the text."""
    error = short_error(parser.get_error())
    return "" if error.startswith(("NoExtension", "Parser Error")) else error


_POSITION = re.compile(r"^(at )?(?P<line>\d+)\(\d+\): ")
_PART = re.compile(
    r"""
    "(?:\\.|[^"\\])*"       # a text: of Lark, or inside JSON
    | (?://|\#)[^\n]*       # a comment
    | /(?:\\.|[^/\\])+/      # a regular expression
    | (?P<ids><\[(?:(?P<id>[0-9]{1,9})\]|[^<>\s]*)>)  # token ids
    | <[^<>\s]+>            # the name of a special token
    """,
    re.VERBOSE,
)
"""The parts of Lark in which `<[` may occur."""
