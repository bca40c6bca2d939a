"""Structured output: which tokens a grammar leaves open after what a request has said so far. Needs no torch.

A grammar is text in llguidance's dialect of Lark; JSON schemas, regular expressions and choices are written as such
(`writing`), so that one kind travels. `following` knows what text each token of a vocabulary adds, and needs numpy.
"""

from paceline.grammar.lark import (
    GrammarError,
    grammar_from_choices,
    grammar_from_regex,
    grammar_from_schema,
    grammar_from_text,
)

__all__ = [
    "GrammarError",
    "grammar_from_choices",
    "grammar_from_regex",
    "grammar_from_schema",
    "grammar_from_text",
]
