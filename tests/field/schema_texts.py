"""Texts that a grammar accepts, by llguidance alone, byte by byte."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from paceline.grammar.lark import LIMITS, PREAMBLE

_BYTES = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text fits a grammar, which has to compile."""
    parser = LLMatcher(_BYTES, PREAMBLE + grammar, log_level=0, limits=LIMITS)
    assert not parser.get_error(), parser.get_error()
    return all(parser.try_consume_tokens([byte]) == 1 for byte in text.encode()) and parser.is_accepting()
