"""Grammars as text: translates what users write, also llama.cpp's GBNF, into llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from paceline.grammar.json_schema import GrammarError, llguidance_schema, unknown_keywords

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


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark. GBNF writes `::=` behind a rule's name, and its first rule is `root`."""
    return re.search(r"(?m)^\s*start\s*:(?!:=)", text) is not None


def lark_of(text: str) -> str:
    """The grammar in Lark. Raises errors of many types if it is no GBNF."""
    return str(gbnf_to_lark(_GBNF_PART.sub(_readable, text)))


def _readable(part: re.Match[str]) -> str:
    """A part of GBNF as llguidance reads it."""
    if part["name"]:
        return f"{part['name']}-rule" if part["name"].lower() == "start" else part["name"]  # Lark's `start` is `root`
    return part[0] if part["comment"] else _ESCAPE.sub(_character, part[0])


def _character(escape: re.Match[str]) -> str:
    """An escape of a code point as its character; ASCII stays escaped, for it may mean something in a class."""
    if not (digits := escape["short"] or escape["long"]):
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x100 else chr(code)


_GBNF_PART = re.compile(
    r"""
    (?P<comment>\#[^\r\n]*)
    | "(?:\\.|[^"\\])*"
    | \[(?:\\.|[^\]\\])*\]
    | (?P<name>[\w-]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})|.)", re.DOTALL)
