"""What changes a row's logits before a token is drawn: masks, bias and penalties, steps 1 to 3 of `sampling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.noise import uploaded

MASKED = -math.inf


class Grammar(Protocol):
    """What the output may be, after the committed tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""

    def allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The tokens that may follow the committed ones and `path`, bool [V]; None: all."""


class SamplingRow(NamedTuple):
    """The parameters of a draw from one row of logits.

    `position`: the absolute position of the token to be drawn. `path`: the draft tokens between the committed output in
    `history` and that position; empty in plain decoding. `params` gives temperature, filters and seed; masks, bias and
    penalties come from `history`.
    """

    params: SamplingParams
    position: int
    history: History
    path: Sequence[int] = ()


class History:
    """One request's committed tokens, as far as masks and penalties need them.

    Token ids outside the vocabulary are ignored: they are never drawn.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        vocabulary_size: int,
        grammar: Grammar | None = None,
    ) -> None:
        """`grammar`: its state after `output`; None: any text is allowed."""
        self.params = params
        self.grammar: Grammar | None = None
        self.vocabulary_size = vocabulary_size
        self.output_tokens = 0
        self._longest_prefix = max((len(tokens) for tokens in params.bad_words), default=1) - 1
        self._recent_tokens: list[int] = []
        bias = {token: value for token, value in params.logit_bias.items() if token < vocabulary_size}
        self._biased = self._ids(list(bias))
        self._bias = torch.tensor(list(bias.values()))
        self._disallowed: Tensor | None = None
        """Tokens outside `allowed_token_ids`, bool [V]."""
        if params.allowed_token_ids:
            self._disallowed = torch.ones(vocabulary_size, dtype=torch.bool)
            self._disallowed[self._ids(params.allowed_token_ids)] = False
        self._counts = torch.zeros(vocabulary_size if params.penalised else 0)
        self._seen = torch.zeros(self._counts.shape, dtype=torch.bool)
        if params.penalised:
            self._seen[self._ids(prompt)] = True
        self.extend(output)
        self.grammar = grammar
        masked = params.bad_words or params.min_tokens or params.allowed_token_ids or grammar is not None
        self.has_logits_rules = bool(masked or params.logit_bias or params.penalised)
        """Whether steps 1 to 3 can change this request's logits."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens."""
        self.output_tokens += len(tokens)
        self._recent_tokens = self._recent_with(tokens)
        if self.params.penalised:
            self._seen, self._counts = self._token_counts(tokens)
        if self.grammar is not None:
            self.grammar.extend(tokens)

    def apply_logits_rules(self, logits_V: Tensor, path: Sequence[int]) -> None:
        """Steps 1 to 3 for the token after the committed output and then `path`, in place. Logits: float32 [V]."""
        self._mask(logits_V, path)
        if len(self._biased):
            if self._biased.device != logits_V.device:  # only at the first call
                self._biased, self._bias = (
                    uploaded(self._biased, logits_V.device),
                    uploaded(self._bias, logits_V.device),
                )
            logits_V.index_add_(0, self._biased, self._bias)
        if self.params.penalised:
            logits_V.copy_(self._penalised(logits_V, path))

    def _mask(self, logits_V: Tensor, path: Sequence[int]) -> None:
        allowed = None if self.grammar is None else self.grammar.allowed(path)
        if allowed is not None:
            logits_V.masked_fill_(uploaded(~allowed, logits_V.device), MASKED)
        if self._disallowed is not None:
            if self._disallowed.device != logits_V.device:
                self._disallowed = uploaded(self._disallowed, logits_V.device)
            _replace_unless_masked(logits_V, logits_V.masked_fill(self._disallowed, MASKED))
        if forbidden := self._forbidden_tokens(path):
            ids = uploaded(self._ids(forbidden), logits_V.device)
            _replace_unless_masked(logits_V, logits_V.index_fill(0, ids, MASKED))

    def _forbidden_tokens(self, path: Sequence[int]) -> list[int]:
        last = self._recent_with(path)
        forbidden = [w[-1] for w in self.params.bad_words if len(w) == 1 or tuple(last[1 - len(w) :]) == w[:-1]]
        if self.output_tokens + len(path) < self.params.min_tokens:
            forbidden += self.params.stop_token_ids
        return forbidden

    def _penalised(self, logits_V: Tensor, path: Sequence[int]) -> Tensor:
        params = self.params
        if self._counts.device != logits_V.device:  # only at the first call
            self._counts, self._seen = uploaded(self._counts, logits_V.device), uploaded(self._seen, logits_V.device)
        seen_V, counts_V = self._token_counts(path)
        repeated_V = torch.where(
            logits_V > 0, logits_V / params.repetition_penalty, logits_V * params.repetition_penalty
        )
        logits_V = torch.where(seen_V, repeated_V, logits_V)
        return logits_V - params.frequency_penalty * counts_V - params.presence_penalty * (counts_V > 0)

    def _token_counts(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Seen in prompt or output, bool [V], and count in the output, float [V], with `tokens` after the output."""
        if not tokens:
            return self._seen, self._counts
        ids = uploaded(self._ids(tokens), self._counts.device)
        ones = torch.ones(len(ids), device=ids.device)
        return self._seen.index_fill(0, ids, True), self._counts.index_add(0, ids, ones)

    def _recent_with(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens of the output and `tokens`, as many as the longest bad word needs."""
        return [*self._recent_tokens, *tokens][-self._longest_prefix :] if self._longest_prefix else []

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([token for token in tokens if token < self.vocabulary_size], dtype=torch.int64)


def apply_logits_rules(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Steps 1 to 3: a new float32 tensor."""
    logits_RV = logits_RV.to(torch.float32, copy=True)
    for logits_V, row in zip(logits_RV, rows, strict=True):
        if row.history.has_logits_rules:
            row.history.apply_logits_rules(logits_V, row.path)
    return logits_RV


def _replace_unless_masked(logits_V: Tensor, masked_V: Tensor) -> None:
    """Overwrite logits by a masked copy of them, unless that leaves no token. Waits for no GPU."""
    logits_V.copy_(torch.where((masked_V == MASKED).all(), logits_V, masked_V))
