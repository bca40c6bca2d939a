"""Where the grammar of a request begins, for a model that may reason before it answers."""

from __future__ import annotations

from typing import TypedDict

from paceline.parsing.output_format import OutputFormat
from paceline.text import Tokenizer


class GrammarStart(TypedDict):
    """Fields of `paceline.config.SamplingParams`."""

    grammar_begins_after: tuple[int, ...]
    grammar_waits_if: int | None


AT_ONCE = GrammarStart(grammar_begins_after=(), grammar_waits_if=None)


def grammar_start(form: OutputFormat, prompt: str, tokenizer: Tokenizer, *, calls: bool) -> GrammarStart:
    """For an answer to this rendered prompt. `calls`: whether the grammar forces calls, see `forced_call_grammar`.

    Where the prompt leaves it open, the answer's first token decides whether there is reasoning. A marker that may be
    written in several ways cannot be waited for: then the grammar begins at once.
    """
    reasoning = form.reasoning
    if reasoning is None or (calls and form.tools is not None and form.tools.reads_reasoning):
        return AT_ONCE
    closing = _fixed_tokens(reasoning.answer or reasoning.end, tokenizer)
    if not closing:
        return AT_ONCE
    if reasoning.answer or reasoning.begins_inside(prompt):
        return GrammarStart(grammar_begins_after=closing, grammar_waits_if=None)
    opening = tokenizer.token_id(reasoning.begin)
    if opening is None or prompt.rstrip().endswith(reasoning.end):
        return AT_ONCE
    return GrammarStart(grammar_begins_after=closing, grammar_waits_if=opening)


def _fixed_tokens(marker: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a marker that models write in one way only: one token, or some between special tokens.

    Empty: there may be several ways.
    """
    token = tokenizer.token_id(marker)
    if token is not None:
        return (token,)
    tokens = tuple(tokenizer.encode(marker, add_special_tokens=False))
    delimited = len(tokens) > 1 and {tokens[0], tokens[-1]} <= tokenizer.special_ids
    return tokens if delimited else ()
