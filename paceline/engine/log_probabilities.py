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
from paceline.core.upload import upload
from paceline.messages import LogProbs


def log_probs(logits_RV: Tensor, tokens: Sequence[int], top: int, listed: Sequence[int] = ()) -> list[LogProbs]:
    """Log-probability and rank of `tokens` [R], and the `top` most probable tokens of each row.

    `listed`: report these tokens, in this order, in place of the most probable ones.
    """
    log_probs_RV = log_softmax(logits_RV)
    tokens_R, listed_K = upload(log_probs_RV.device, tokens, listed)
    tokens_R1 = tokens_R.long()[:, None]
    chosen_R1 = log_probs_RV.gather(-1, tokens_R1)
    ids_V = torch.arange(log_probs_RV.shape[-1], device=log_probs_RV.device)
    before_RV = (log_probs_RV > chosen_R1) | ((log_probs_RV == chosen_R1) & (ids_V < tokens_R1))
    ids_RK = listed_K.long().expand(len(tokens), -1) if listed else _most_probable(log_probs_RV, ids_V, top)
    values_RK = log_probs_RV.gather(-1, ids_RK)
    parts = chosen_R1, before_RV.sum(-1, keepdim=True), ids_RK, values_RK
    found_RN = torch.cat([part.double() for part in parts], -1).tolist()  # one read of a GPU
    return [
        LogProbs(chosen, [*zip(map(int, each[: len(each) // 2]), each[len(each) // 2 :], strict=True)], 1 + int(before))
        for chosen, before, *each in found_RN
    ]


def _most_probable(log_probs_RV: Tensor, ids_V: Tensor, count: int) -> Tensor:
    """Ids [R, K] of the `count` most probable tokens of each row, the lowest ids first among equals.

    `topk` takes any among equals, so it chooses among integers that are not: bits of a distance from 0 rise with it.
    """
    keys_RV = (log_probs_RV.abs().view(torch.int32).long() << 32) | ids_V
    return keys_RV.topk(min(count, len(ids_V)), largest=False).values & 0xFFFF_FFFF
