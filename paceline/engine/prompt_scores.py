"""Log-probabilities of prompts: the row of a prompt's token scores the token after it.

The rows run in any case, as the prompt is computed. A request that asks for scores also needs their logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.core.log_probabilities import log_probs
from paceline.engine.scheduler import ScheduledRequest
from paceline.messages import LogProbs, PromptLogProbs

ROWS_AT_ONCE = 64
"""Rows that are scored together: each takes several numbers for every token of the vocabulary."""


def score_prompts(batch: Sequence[ScheduledRequest], logits_RV: Tensor) -> list[list[PromptLogProbs]]:
    """What a step scores of each request's prompt: one part of it, or nothing. Counts these rows as scored.

    `logits_RV`: of the `scored_rows` of all requests, in order.
    """
    if not len(logits_RV):
        return [[] for _ in batch]
    parts = logits_RV.split([len(each.scored_rows) for each in batch])
    return [[_score(each, part)] if len(part) else [] for each, part in zip(batch, parts, strict=True)]


def _score(scheduled: ScheduledRequest, logits_RV: Tensor) -> PromptLogProbs:
    request, rows = scheduled.request, scheduled.scored_rows
    tokens = request.tokens[rows.start + 1 : rows.stop + 1]
    top = request.generation_request.sampling.prompt_logprobs or 0
    entries: list[LogProbs] = []
    for start in range(0, len(tokens), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        entries += log_probs(logits_RV[start:stop], tokens[start:stop], top)
    request.rows_scored = rows.stop
    return PromptLogProbs(rows.start + 1, entries)
