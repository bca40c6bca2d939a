"""Log-probabilities of tokens, as the API reports them.

They are the model's own, before masks, penalties, temperature and filters, as vLLM's `raw_logprobs`. Among equals the
lowest ids come first. By contract a row's result does not depend, to the bit, on the other rows of the call.

Shapes: R rows, V vocabulary, K reported tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from paceline.core.sampling import log_softmax
from paceline.core.upload import upload
from paceline.engine.host_copy import HostCopy
from paceline.messages import Delta, LogProbs

DELTAS_AT_ONCE = 16
"""Each of their rows takes several numbers for every token of the vocabulary."""
_32_BITS = 0xFFFF_FFFF


class StartedLogProbs:
    """Log-probability and rank of `tokens` [R], and the `top` most probable tokens of each row.

    An accelerator computes them; nothing waits for it before `read`.
    """

    def __init__(self, logits_RV: Tensor, tokens: Sequence[int], top: int, listed: Sequence[int] = ()) -> None:
        """`listed`: report these tokens, in this order, in place of the most probable ones."""
        log_probs_RV = log_softmax(logits_RV)
        rows, vocabulary = log_probs_RV.shape
        device = log_probs_RV.device
        tokens_R, listed_K = upload(device, tokens, listed)
        tokens_R1 = tokens_R.long()[:, None]
        chosen_R1 = log_probs_RV.gather(-1, tokens_R1)
        ids_V = torch.arange(vocabulary, device=device)
        before_RV = (log_probs_RV > chosen_R1) | ((log_probs_RV == chosen_R1) & (ids_V < tokens_R1))
        ids_RK = listed_K.long().expand(rows, -1) if listed else _largest(log_probs_RV, min(top, vocabulary))
        values_RK = log_probs_RV.gather(-1, ids_RK)
        parts = chosen_R1, before_RV.sum(-1, keepdim=True), ids_RK, values_RK
        self._copy = HostCopy(torch.cat([part.double() for part in parts], -1))

    def read(self) -> list[LogProbs]:
        [found_RN] = self._copy.read()
        return [
            LogProbs(chosen, [*zip(map(int, top[: len(top) // 2]), top[len(top) // 2 :], strict=True)], 1 + int(before))
            for chosen, before, *top in found_RN.tolist()
        ]


class DeltaLogProbs:
    """Those of a step's deltas: computed for many at once, and read when the deltas are delivered."""

    def __init__(self) -> None:
        self._added: defaultdict[tuple[int, tuple[int, ...]], list[tuple[Delta, Sequence[Tensor]]]] = defaultdict(list)
        """By what is reported."""
        self._started: list[tuple[list[Delta], StartedLogProbs]] = []

    def add(self, delta: Delta, logits: Sequence[Tensor], top: int, listed: Sequence[int]) -> None:
        """`logits`: those that the delta's tokens were drawn from, [1, V] each. See `StartedLogProbs`."""
        self._added[top, tuple(listed)].append((delta, logits))

    def start(self) -> None:
        """Start computing for what was added."""
        for (top, listed), deltas in self._added.items():
            for first in range(0, len(deltas), DELTAS_AT_ONCE):
                part = deltas[first : first + DELTAS_AT_ONCE]
                logits_RV = torch.cat([row for _, rows in part for row in rows])
                tokens = [token for delta, _ in part for token in delta.tokens]
                self._started.append(([delta for delta, _ in part], StartedLogProbs(logits_RV, tokens, top, listed)))
        self._added.clear()

    def read(self) -> None:
        """Complete the deltas."""
        for deltas, started in self._started:
            entries = iter(started.read())
            for delta in deltas:
                delta.log_probs = list(islice(entries, len(delta.tokens)))
        self._started.clear()


def log_probs(logits_RV: Tensor, tokens: Sequence[int], top: int, listed: Sequence[int] = ()) -> list[LogProbs]:
    """See `StartedLogProbs`."""
    return StartedLogProbs(logits_RV, tokens, top, listed).read()


def _largest(values_RV: Tensor, count: int) -> Tensor:
    """Ids [R, K] of the `count` largest of each row, float32, falling; among equals the lowest ids first.

    `topk` takes any among equals. So it compares integers that differ: a float32's bits, in an order that integers
    have, too, and below them how low the id is.
    """
    bits_RV = (values_RV + 0.0).view(torch.int32)  # the sum has no negative 0
    order_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFF_FFFF)).long() << 32
    lowness_V = _32_BITS - torch.arange(values_RV.shape[-1], device=values_RV.device)
    return _32_BITS - ((order_RV | lowness_V).topk(count).values & _32_BITS)
