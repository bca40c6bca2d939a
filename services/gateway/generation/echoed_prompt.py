"""A prompt that the text of its completions begins with (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.messages import Delta, LogProbs
from paceline.text import Detokenizer, Tokenizer
from paceline_services.gateway.generation.bodies import CompletionBody


@dataclass(slots=True)
class EchoedPrompt:
    """One prompt; `add` collects the log-probabilities of its tokens."""

    tokens: Sequence[int]
    text: str
    offsets: Sequence[int] = ()
    """By token, the characters of the text before it. Empty if its tokens have no log-probabilities."""
    log_probs: list[LogProbs] = field(default_factory=list)
    """Of the tokens from the second one on, as far as they have come."""
    ended: bool = False
    """Whether the first completion has ended, so that no more log-probabilities come."""

    @classmethod
    def of(cls, body: CompletionBody, index: int, tokens: Sequence[int], tokenizer: Tokenizer) -> EchoedPrompt:
        """The index-th prompt of a body. A text is echoed as the client sent it, special tokens included; by its tokens
        where these are not all of it, or each needs its own part of the text. (Then a marker with which the text begins
        shows twice if its encoding adds one more.)"""
        prompt = body.prompt[index]
        if not isinstance(prompt, str):
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=body.skip_special_tokens)
        elif body.scores_echo or body.truncate_prompt_tokens is not None:
            special = tokenizer.special_ids.intersection(tokens)
            written = [token for token in special if tokenizer.piece(token).decode() in prompt]
            detokenizer = Detokenizer(tokenizer, shown=written)
        else:
            return cls(tokens, prompt)
        if not body.scores_echo:
            return cls(tokens, detokenizer.feed(tokens) + detokenizer.flush())
        text, offsets = "", []
        for token in tokens:
            offsets.append(len(text))
            text += detokenizer.feed((token,))
        return cls(tokens, text + detokenizer.flush(), offsets)

    @property
    def scored(self) -> bool:
        """Whether all log-probabilities have come that will come."""
        return self.ended or len(self.log_probs) >= len(self.tokens) - 1

    def add(self, delta: Delta) -> None:
        """Take the prompt's log-probabilities from a delta of its first completion."""
        for part in delta.prompt_log_probs:
            self.log_probs += part.entries
        self.ended |= delta.finish_reason is not None

    def entries(self, top: int) -> list[LogProbs | None]:
        """One per token, with the `top` most probable tokens. None for the first token, and for tokens that an aborted
        request has not scored."""
        scored = [LogProbs(each.log_prob, each.top[:top], each.rank) for each in self.log_probs]
        return [None, *scored, *[None] * (len(self.tokens) - 1 - len(scored))]
