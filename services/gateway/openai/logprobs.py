"""Log-probabilities in OpenAI's two shapes: the old one of completions and the one of chat."""

from __future__ import annotations

from typing import Any

from paceline.core.messages import Delta
from paceline.text import Tokenizer

Json = dict[str, Any]

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, for which JSON has no number."""


def completion_log_probs(delta: Delta, tokenizer: Tokenizer) -> Json:
    """Parallel lists over tokens; `text_offset` counts characters from the start of the choice's text."""
    tokens = [spelled(token, tokenizer) for token in delta.tokens]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(each.log_prob) for each in delta.log_probs],
        "top_logprobs": [
            {spelled(token, tokenizer): _finite(log_prob) for token, log_prob in each.top}
            | {drawn: _finite(each.log_prob)}
            for drawn, each in zip(tokens, delta.log_probs, strict=True)
        ],
        "text_offset": delta.offsets,
    }


def chat_log_probs(delta: Delta, tokenizer: Tokenizer) -> Json:
    """One entry per token, each with its bytes: a token may be part of a character."""
    return {
        "content": [
            _entry(token, each.log_prob, tokenizer)
            | {"top_logprobs": [_entry(other, log_prob, tokenizer) for other, log_prob in each.top]}
            for token, each in zip(delta.tokens, delta.log_probs, strict=True)
        ],
        "refusal": None,
    }


def _entry(token: int, log_prob: float, tokenizer: Tokenizer) -> Json:
    return {
        "token": spelled(token, tokenizer),
        "logprob": _finite(log_prob),
        "bytes": list(tokenizer.piece(token)),
    }


def spelled(token: int, tokenizer: Tokenizer) -> str:
    """A token's text; U+FFFD stands for an incomplete character."""
    return tokenizer.piece(token).decode(errors="replace")


def _finite(log_prob: float) -> float:
    return max(log_prob, MIN_LOGPROB)
