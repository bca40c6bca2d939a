"""Where the grammar of a request begins, for a model that may reason before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parsing.output_format import OutputFormat
from paceline.text import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarStart:
    """Where in an output the grammar begins, see the fields of `paceline.config.SamplingParams`."""

    begins_after: tuple[int, ...] = ()
    waits_if: int | None = None


AT_ONCE = GrammarStart()


def grammar_start(
    form: OutputFormat, tokenizer: Tokenizer, *, inside: bool, settled: bool, calls: bool
) -> GrammarStart:
    """Where the grammar of an answer begins.

    `inside`: the answer begins inside the reasoning. `settled`: there is no more reasoning to come but that one.
    Where both are false, the answer's first token decides. `calls`: the grammar forces calls, see
    `forced_call_grammar`. A marker that may be written in several ways cannot be waited for: then the grammar begins
    at once.
    """
    reasoning = form.reasoning
    if reasoning is None or (calls and form.tools is not None and form.tools.reads_reasoning):
        return AT_ONCE
    closing = _fixed_tokens(reasoning.answer or reasoning.end, tokenizer)
    if closing and (inside or (reasoning.answer and not settled)):
        return GrammarStart(closing)
    opening = tokenizer.token_id(reasoning.begin)
    if not closing or opening is None or settled:
        return AT_ONCE
    return GrammarStart(closing, opening)


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
