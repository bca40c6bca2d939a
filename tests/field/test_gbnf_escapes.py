"""Escapes of GBNF mean their character, as in llama.cpp, and any name but `root` is free."""

from __future__ import annotations

import pytest

from paceline.grammar import GrammarError, grammar_from_text
from tests.field.schema_texts import accepts


@pytest.mark.parametrize(
    ("gbnf", "accepted", "refused"),
    [
        (r'root ::= "\u00e9"', "é", "e"),
        (r'root ::= "\u000a" "\x41"', "\nA", "A"),
        (r'root ::= "\U0001F600"', "😀", "F600"),
        (r"root ::= [\u4e00-\u9fff]+", "中文", "a"),
        (r"root ::= [\U0001F600-\U0001F64F]", "😀", "1"),
        (r"root ::= [^\u000a]", "x", "\n"),
        (r'root ::= "\u0022" [\u005d\u002d\u005e]+', '"]-^', '"x'),
        (r'root ::= "\\u00e9"', r"\u00e9", "é"),
    ],
)
def test_an_escape_is_its_character(gbnf: str, accepted: str, refused: str) -> None:
    grammar = grammar_from_text(gbnf)
    assert accepts(grammar, accepted)
    assert not accepts(grammar, refused)


@pytest.mark.parametrize("escape", [r"\ud800", r"\U00110000"])
def test_an_escape_of_no_character_is_refused_by_name(escape: str) -> None:
    with pytest.raises(GrammarError, match=f"\\{escape} is no character"):
        grammar_from_text(f'root ::= "{escape}"')


@pytest.mark.parametrize(
    "gbnf",
    [
        'root ::= start "b"\nstart ::= "a"',
        'start ::= "a"\nroot ::= start "b" # start: x',
        'root ::= "ab"\nstart ::= root',
    ],
)
def test_a_rule_named_start_does_not_make_it_lark(gbnf: str) -> None:
    grammar = grammar_from_text(gbnf)
    assert accepts(grammar, "ab")
    assert not accepts(grammar, "a")
