"""Structured output: which tokens a grammar leaves open after what a request has said so far. Needs no torch.

A grammar is text in llguidance's dialect of Lark; JSON schemas, regular expressions and choices are written as such
(`writing`), so that one kind travels. `following` knows what text each token of a vocabulary adds, and needs numpy.
"""

from paceline.grammar.writing import GrammarError, of_choices, of_grammar, of_regex, of_schema

__all__ = [
    "GrammarError",
    "of_choices",
    "of_grammar",
    "of_regex",
    "of_schema",
]
