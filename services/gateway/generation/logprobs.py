"""Log-probabilities in three shapes: the old one of OpenAI's completions, the one of chat, and vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.messages import Delta, LogProbs
from paceline.text import Tokenizer
from paceline_services.gateway.http.json_body import Json

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, for which JSON has no number."""


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    """How a response names tokens: by their text, or as `token_id:ID` (`return_tokens_as_token_ids`)."""

    tokenizer: Tokenizer
    by_id: bool = False

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.by_id else spelled(token, self.tokenizer)


def completion_log_probs(
    tokens: Sequence[int], log_probs: Sequence[LogProbs | None], offsets: Sequence[int], spelling: TokenSpelling
) -> Json:
    """Parallel lists over tokens; null for a token without a log-probability.

    `offsets`: by token, the characters of the choice's text before it.
    """
    return {
        "tokens": [spelling(token) for token in tokens],
        "token_logprobs": [None if each is None else _finite(each.log_prob) for each in log_probs],
        "top_logprobs": [
            None if each is None else _by_spelling(token, each, spelling)
            for token, each in zip(tokens, log_probs, strict=True)
        ],
        "text_offset": offsets,
    }


def chat_log_probs(delta: Delta, spelling: TokenSpelling) -> Json:
    """One entry per token, each with its bytes: a token may be part of a character."""
    return {
        "content": [
            _entry(token, each.log_prob, spelling)
            | {"top_logprobs": [_entry(other, log_prob, spelling) for other, log_prob in each.top]}
            for token, each in zip(delta.tokens, delta.log_probs, strict=True)
        ],
        "refusal": None,
    }


def prompt_log_probs(
    prompt: Sequence[int], log_probs: Sequence[LogProbs], top: int, tokenizer: Tokenizer
) -> list[Json | None]:
    """By position the prompt's token and the `top` most probable ones, by id.

    Null for the first token, and for tokens behind the last of `log_probs`: an aborted request has not scored them.
    """

    def known(token: int, log_prob: float, rank: int) -> Json:
        return {"logprob": _finite(log_prob), "rank": rank or None, "decoded_token": spelled(token, tokenizer)}

    scored = [
        {str(token): known(token, each.log_prob, each.rank)}
        | {str(other): known(other, value, rank) for rank, (other, value) in enumerate(each.top[:top], 1)}
        for token, each in zip(prompt[1:], log_probs, strict=False)
    ]
    return [None, *scored, *[None] * (len(prompt) - 1 - len(scored))]


def spelled(token: int, tokenizer: Tokenizer) -> str:
    """A token's text; U+FFFD stands for an incomplete character."""
    return tokenizer.piece(token).decode(errors="replace")


def _by_spelling(token: int, log_probs: LogProbs, spelling: TokenSpelling) -> Json:
    """The token and the most probable ones, best first. Of tokens that are spelled alike the most probable one counts:
    evaluations compare the token's own number with the largest of these."""
    found: Json = {}
    for each, value in sorted([*log_probs.top, (token, log_probs.log_prob)], key=lambda pair: -pair[1]):
        found.setdefault(spelling(each), _finite(value))
    return found


def _entry(token: int, log_prob: float, spelling: TokenSpelling) -> Json:
    return {
        "token": spelling(token),
        "logprob": _finite(log_prob),
        "bytes": list(spelling.tokenizer.piece(token)),
    }


def _finite(log_prob: float) -> float:
    return max(log_prob, MIN_LOGPROB)
