"""Structured output: the tokens that a grammar allows after a request's output. Needs no torch.

A grammar is text in llguidance's dialect of Lark. `lark` translates JSON schemas, regular expressions and choices into
it, so that only one kind goes over the wire. `grammar_state` follows a grammar token by token, and needs numpy.
"""

from paceline.grammar.json_schema import GrammarError
from paceline.grammar.lark import grammar_from_choices, grammar_from_regex, grammar_from_schema, grammar_from_text

__all__ = ["GrammarError", "grammar_from_choices", "grammar_from_regex", "grammar_from_schema", "grammar_from_text"]
