"""Where the grammar of a request begins, for a model that may reason before it answers."""

from __future__ import annotations

from typing import TypedDict

from paceline.parsing.reasoning import ReasoningFormat
from paceline.text import Tokenizer


class GrammarStart(TypedDict):
    """Fields of `paceline.config.SamplingParams`."""

    grammar_begins_after: tuple[int, ...]
    grammar_waits_if: int | None


AT_ONCE = GrammarStart(grammar_begins_after=(), grammar_waits_if=None)


def grammar_start(reasoning: ReasoningFormat | None, prompt: str, tokenizer: Tokenizer) -> GrammarStart:
    """For an answer to this rendered prompt. `reasoning`: of the model; None: it does not reason.

    Where the prompt leaves it open, the answer's first token decides whether there is reasoning. A marker that is not
    one token cannot be waited for, since its text may be written in several ways: then the grammar begins at once.
    """
    if reasoning is None:
        return AT_ONCE
    opening, closing = (tokenizer.token_id(marker) for marker in (reasoning.begin, reasoning.end))
    if closing is None:
        return AT_ONCE
    if reasoning.begins_inside(prompt):
        return GrammarStart(grammar_begins_after=(closing,), grammar_waits_if=None)
    if opening is None or prompt.rstrip().endswith(reasoning.end):
        return AT_ONCE
    return GrammarStart(grammar_begins_after=(closing,), grammar_waits_if=opening)
