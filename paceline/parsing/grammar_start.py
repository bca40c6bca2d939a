"""Where the grammar of a request begins, for a model that may reason before it answers."""

from __future__ import annotations

from paceline.grammar.reasoning_gate import ALWAYS, ReasoningGate
from paceline.parsing.output_format import OutputFormat
from paceline.text import Tokenizer


def grammar_start(
    form: OutputFormat, prompt: str, tokenizer: Tokenizer, *, calls: bool, continued: str = ""
) -> ReasoningGate:
    """Where the grammar of an answer to this rendered prompt begins.

    `calls`: the grammar forces calls, see `forced_call_grammar`. `continued`: the text that the answer continues, if
    there is one; it has all reasoning that is to come, or its beginning. Where the prompt leaves it open, the first
    token of the answer decides. A marker that may be written in several ways cannot be waited for: then the grammar
    begins at once.
    """
    reasoning = form.reasoning
    if reasoning is None or (calls and form.tools is not None and form.tools.reads_reasoning):
        return ALWAYS
    inside = form.begins_inside(prompt, continued)
    settled = bool(continued) or prompt.rstrip().endswith(reasoning.end)
    closing = _fixed_tokens(reasoning.answer or reasoning.end, tokenizer)
    if closing and (inside or (reasoning.answer and not settled)):
        return ReasoningGate(closing)
    opening = tokenizer.token_id(reasoning.begin)
    return ALWAYS if not closing or opening is None or settled else ReasoningGate(closing, opening)


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
