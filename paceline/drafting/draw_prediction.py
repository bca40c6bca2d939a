"""What a draft's logits say the target will draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.sampling import History, SamplingRow, top_scores
from paceline.core.verify import STRATEGIES
from paceline.drafting.speculator import DraftError, Opening
from paceline.grammar.grammar_state import GrammarCompiler

SHORTLIST_SIZE = 64
"""Tokens of each law among which the target's draw is looked for."""

RankedTokens = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, falling."""


def request_history(opening: Opening, vocabulary_size: int, grammars: GrammarCompiler | None) -> History:
    """What the target's rules that look back know when it opens the request. Raises `DraftError`."""
    strategy = STRATEGIES.get(opening.strategy)
    if strategy is None:
        raise DraftError(f"unknown strategy {opening.strategy!r}")
    law, split = strategy.effective_params(opening.sampling), len(opening.tokens) - opening.output_tokens
    prompt, output = opening.tokens[:split], opening.tokens[split:]
    grammar = None
    if grammars is not None and law.grammar:
        grammar = grammars.start(law.grammar, law.stop_token_ids, output)
    return History(law, prompt, output, vocabulary_size, grammar)


def predict_draws(
    logits_RV: Tensor, rows: Sequence[SamplingRow], width: int, ids_V: Tensor | None = None
) -> list[RankedTokens]:
    """What each of these draws gives, `width` tokens of each. `ids_V` as for `top_scores`.

    A token that cannot come has log-probability -inf; where none of `ids_V` can, none has one (NaN). Neither is above
    any floor.
    """
    tokens_RK, scores_RK = top_scores(logits_RV, rows, SHORTLIST_SIZE, ids_V)
    log_probs_RK = torch.log_softmax(scores_RK, -1)
    chosen, likely = (each[:, :width].tolist() for each in (tokens_RK, log_probs_RK))
    return [list(zip(*law, strict=True)) for law in zip(chosen, likely, strict=True)]
