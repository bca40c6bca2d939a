"""Log-probabilities of tokens, as the API reports them.

They are the model's own, before masks, penalties, temperature and filters, as vLLM's `raw_logprobs`. Among equals the
lowest ids come first. By contract a row's result does not depend, to the bit, on the other rows of the call.

Shapes: R rows, V vocabulary, K reported tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling import log_softmax
from paceline.messages import LogProbs


def log_probs(logits_RV: Tensor, tokens: Sequence[int], top: int, listed: Sequence[int] = ()) -> list[LogProbs]:
    """Log-probability and rank of `tokens` [R], and the `top` most probable tokens of each row.

    `listed`: report these tokens, in this order, in place of the most probable ones.
    """
    log_probs_RV = log_softmax(logits_RV)
    tokens_R1 = torch.tensor(tokens, device=log_probs_RV.device)[:, None]
    chosen_R1 = log_probs_RV.gather(-1, tokens_R1)
    ids_V = torch.arange(log_probs_RV.shape[-1], device=log_probs_RV.device)
    before_RV = (log_probs_RV > chosen_R1) | ((log_probs_RV == chosen_R1) & (ids_V < tokens_R1))
    if listed:
        ids_RK = torch.tensor(listed, device=log_probs_RV.device).expand(len(log_probs_RV), -1)
        values_RK = log_probs_RV.gather(-1, ids_RK)
    else:
        ids_RK, values_RK = _largest(log_probs_RV, top)
    return [
        LogProbs(chosen, list(zip(ids, values, strict=True)), 1 + before)
        for chosen, before, ids, values in zip(
            chosen_R1[:, 0].tolist(), before_RV.sum(-1).tolist(), ids_RK.tolist(), values_RK.tolist(), strict=True
        )
    ]


def _largest(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values [R, K] of the `count` largest of each row.

    `topk` takes any among equals, so it only says how large the smallest of them is.
    """
    rows, count = len(values_RV), min(count, values_RV.shape[-1])
    if not count:
        return torch.empty(rows, 0, dtype=torch.int64), torch.empty(rows, 0)
    kept_RV = values_RV >= values_RV.topk(count).values[:, -1:]
    if int(kept_RV.sum()) == rows * count:
        ids_RK = kept_RV.nonzero()[:, 1].view(rows, count)
    else:  # others equal the smallest
        ids_RK = values_RV.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    values_RK, order_RK = values_RV.gather(-1, ids_RK).sort(dim=-1, descending=True, stable=True)
    return ids_RK.gather(-1, order_RK), values_RK
