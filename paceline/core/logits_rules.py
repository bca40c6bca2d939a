"""What changes a row's logits before a token is drawn: masks, bias and penalties, steps 1 to 3 of `sampling`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core.upload import send, upload

T = TypeVar("T")

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
            self._seen, self._counts = self.token_counts(tokens, self._counts.device)
        if self.grammar is not None:
            self.grammar.extend(tokens)

    def apply_logits_rules(self, logits_V: Tensor, path: Sequence[int]) -> None:
        """Steps 1 to 3 for the token after the committed output and then `path`, in place. Logits: float32 [V], on a
        CPU."""
        if (allowed := self.allowed(path)) is not None:
            logits_V.masked_fill_(torch.from_numpy(~allowed), MASKED)
        if (disallowed := self.disallowed(logits_V.device)) is not None:
            _replace_unless_masked(logits_V, logits_V.masked_fill(disallowed, MASKED))
        if forbidden := self.forbidden(path):
            _replace_unless_masked(logits_V, logits_V.index_fill(0, torch.tensor(forbidden), MASKED))
        self.add_bias(logits_V)
        if (params := self.params).penalised:
            weights = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            logits_V.copy_(_penalised(logits_V, *self.token_counts(path, logits_V.device), *weights))

    def allowed(self, path: Sequence[int]) -> npt.NDArray[np.bool_] | None:
        """The tokens that the grammar allows after `path`, bool [V]; None: all."""
        return None if self.grammar is None else self.grammar.allowed(path)

    def disallowed(self, device: torch.device) -> Tensor | None:
        """The tokens outside `allowed_token_ids`, bool [V]; None: there are none."""
        if self._disallowed is not None:
            self._disallowed = send(self._disallowed, device)
        return self._disallowed

    def forbidden(self, path: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word after `path`, and stop tokens that come too early."""
        last = self._recent_with(path)
        forbidden = [w[-1] for w in self.params.bad_words if len(w) == 1 or tuple(last[1 - len(w) :]) == w[:-1]]
        if self.output_tokens + len(path) < self.params.min_tokens:
            forbidden += self.params.stop_token_ids
        return [token for token in forbidden if token < self.vocabulary_size]

    def add_bias(self, logits_V: Tensor) -> None:
        """Step 2, in place."""
        if len(self._biased):
            device = logits_V.device
            self._biased, self._bias = send(self._biased, device), send(self._bias, device)
            logits_V.index_add_(0, self._biased, self._bias)

    def token_counts(self, tokens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Seen in prompt or output, bool [V], and count in the output, float [V], with `tokens` after the output."""
        self._seen, self._counts = send(self._seen, device), send(self._counts, device)
        if not tokens:
            return self._seen, self._counts
        ids = send(self._ids(tokens), device)
        ones = torch.ones(len(ids), device=device)
        return self._seen.index_fill(0, ids, True), self._counts.index_add(0, ids, ones)

    def _recent_with(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens of the output and `tokens`, as many as the longest bad word needs."""
        return [*self._recent_tokens, *tokens][-self._longest_prefix :] if self._longest_prefix else []

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([token for token in tokens if token < self.vocabulary_size], dtype=torch.int64)


def apply_logits_rules(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Steps 1 to 3: a new float32 tensor. Nothing waits for a GPU."""
    logits_RV = logits_RV.to(torch.float32, copy=True)
    ruled = [i for i, row in enumerate(rows) if row.history.has_logits_rules]
    if logits_RV.is_cpu:  # one row at a time stays in the cache
        for i in ruled:
            rows[i].history.apply_logits_rules(logits_RV[i], rows[i].path)
    else:  # all rows together take a few kernels
        _change(logits_RV, ruled, lambda logits_NV: _apply_together(logits_NV, [rows[i] for i in ruled]))
    return logits_RV


def _apply_together(logits_NV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """`History.apply_logits_rules` for rows on a GPU, in place."""
    device = logits_NV.device
    if allowed := _where_any(row.history.allowed(row.path) for row in rows):
        masks_GV = send(torch.from_numpy(~np.stack([*allowed.values()])), device)
        _change(logits_NV, [*allowed], lambda some: some.masked_fill_(masks_GV, MASKED))
    if disallowed := _where_any(row.history.disallowed(device) for row in rows):
        masks_DV = torch.stack([*disallowed.values()])
        _change(logits_NV, [*disallowed], lambda some: _unless_masked(some, some.masked_fill(masks_DV, MASKED)))
    if forbidden := _where_any(row.history.forbidden(row.path) or None for row in rows):
        places, masked = _places([*forbidden.values()], device), logits_NV.new_full((), MASKED)
        _change(logits_NV, [*forbidden], lambda some: _unless_masked(some, some.index_put(places, masked)))
    for logits_V, row in zip(logits_NV.unbind(), rows, strict=True):
        row.history.add_bias(logits_V)
    penalised = [i for i, row in enumerate(rows) if row.history.params.penalised]
    _change(logits_NV, penalised, lambda some: _penalised_together(some, [rows[i] for i in penalised]))
    return logits_NV


def _penalised_together(logits_PV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    device, histories = logits_PV.device, [row.history for row in rows]
    seen, counts = zip(*(history.token_counts((), device) for history in histories), strict=True)
    seen_PV, counts_PV = torch.stack(seen), torch.stack(counts)
    paths = [[token for token in row.path if token < row.history.vocabulary_size] for row in rows]
    if any(paths):
        places = _places(paths, device)
        seen_PV.index_put_(places, seen_PV.new_ones(()))
        counts_PV.index_put_(places, counts_PV.new_ones(()), accumulate=True)
    params = [history.params for history in histories]
    weights = upload(
        device,
        [each.repetition_penalty for each in params],
        [each.frequency_penalty for each in params],
        [each.presence_penalty for each in params],
    )
    return _penalised(logits_PV, seen_PV, counts_PV, *(weights_P.float()[:, None] for weights_P in weights))


def _penalised(
    logits: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: float | Tensor,
    frequency: float | Tensor,
    presence: float | Tensor,
) -> Tensor:
    """Step 3, for a row or for several. `seen`, `counts`: see `History.token_counts`."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _replace_unless_masked(logits_V: Tensor, masked_V: Tensor) -> None:
    """Overwrite logits by a masked copy of them, unless that leaves no token."""
    if not bool((masked_V == MASKED).all()):
        logits_V.copy_(masked_V)


def _unless_masked(logits_NV: Tensor, masked_NV: Tensor) -> Tensor:
    """The rows of a masked copy of logits, but the logits where that leaves no token."""
    return torch.where((masked_NV == MASKED).all(-1, keepdim=True), logits_NV, masked_NV)


def _change(logits_RV: Tensor, members: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    """Replace some rows by what `change` makes of them. It may overwrite its argument."""
    if members:
        rows = upload(logits_RV.device, members)[0].long()
        logits_RV.index_copy_(0, rows, change(logits_RV.index_select(0, rows)))


def _where_any(found: Iterable[T | None]) -> dict[int, T]:
    """By row, what is not None."""
    return {i: each for i, each in enumerate(found) if each is not None}


def _places(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token, both int64 [n], of each row's tokens."""
    rows = [row for row, some in enumerate(tokens) for _ in some]
    rows_n, tokens_n = upload(device, rows, [token for some in tokens for token in some])
    return rows_n.long(), tokens_n.long()
